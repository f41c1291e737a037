"""The public loss functions: values, gradients, gradient memory, and rejected arguments."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from tests.support.tolerances import DTYPES, ROUNDED, assert_as_good_as
from transformer_engine.pytorch import fused_linear_cross_entropy, parallel_cross_entropy
from transformer_engine.pytorch.functions.linear_cross_entropy import chunk_rows

IGNORED = -100
SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1])
PRECISE = pytest.mark.parametrize("precise", [False, True], ids=["chunks", "precise"])
MEAN = pytest.mark.parametrize("mean", [True, False], ids=["mean", "rows"])


def sample(dtype, device, shape=(3, 5, 37)):
    logits = (2 * torch.randn(shape, device=device)).to(dtype).requires_grad_()
    target = torch.randint(0, shape[-1], shape[:-1], device=device)
    target[0, 2] = IGNORED
    return logits, target


def torch_loss(logits, target, smoothing, mean):
    """torch's loss, in float32."""
    rows = logits.float().flatten(0, -2)
    how = {"label_smoothing": smoothing, "reduction": "mean" if mean else "none"}
    loss = cross_entropy(rows, target.flatten(), ignore_index=IGNORED, **how)
    return loss if mean else loss.view(target.shape)


@DTYPES
@SMOOTHING
@MEAN
def test_the_loss_and_its_gradient_equal_torch(dtype, smoothing, mean, device):
    logits, target = sample(dtype, device)
    reference = logits.detach().clone().requires_grad_()
    loss = parallel_cross_entropy(logits, target, smoothing, mean)
    expected = torch_loss(reference, target, smoothing, mean)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        logits.grad.float(), reference.grad.float(), rtol=ROUNDED[dtype], atol=1e-6
    )
    assert (logits.grad[0, 2] == 0).all()


def test_one_row_equals_values_computed_by_hand(device):
    logits = torch.tensor([[[1.0, 2.0, 3.0]]], device=device, requires_grad=True)
    loss = parallel_cross_entropy(logits, torch.tensor([[2]], device=device), 0.1)
    assert loss.item() == pytest.approx(0.5076060, abs=1e-6)
    loss.sum().backward()
    assert logits.grad.flatten().tolist() == pytest.approx(
        [0.0566972, 0.2113951, -0.2680924], abs=1e-6
    )


def test_an_empty_vocabulary_is_rejected(device):
    target = torch.full((2, 3), IGNORED, device=device)
    with pytest.raises(ValueError, match=r"the logits are \[2, 3, 0\], of a vocabulary of 0 ids"):
        parallel_cross_entropy(torch.ones(2, 3, 0, device=device), target)
    with pytest.raises(ValueError, match=r"of a vocabulary of 0 ids; give at least one"):
        fused_linear_cross_entropy(
            torch.ones(2, 3, 8, device=device), torch.ones(0, 8, device=device), target
        )


@pytest.mark.parametrize("value", [8e37, -8e37, 3e38])
def test_large_logits_have_torchs_smoothed_loss(value, device):
    logits = torch.full((1, 2, 40), value, device=device, requires_grad=True)
    reference = logits.detach().clone().requires_grad_()
    target = torch.tensor([[0, 39]], device=device)
    loss, expected = (
        parallel_cross_entropy(logits, target, 0.1),
        torch_loss(reference, target, 0.1, False),
    )
    # The mean of equal logits has a rounding error proportional to the logits.
    torch.testing.assert_close(loss, expected, rtol=0.0, atol=abs(value) * 0.1 * 2**-20)
    assert torch.isfinite(loss).all()
    loss.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad)


def test_a_bfloat16_gradient_is_the_float32_gradient_rounded_once(device):
    logits, target = sample(torch.bfloat16, device)
    wide = logits.detach().float().requires_grad_()
    for x in (logits, wide):
        parallel_cross_entropy(x, target).sum().backward()
    assert torch.equal(logits.grad, wide.grad.to(torch.bfloat16))


def test_the_gradient_overwrites_the_logits(device):
    leaf, target = sample(torch.float32, device)
    logits = leaf * 1.0
    loss = parallel_cross_entropy(logits, target, overwrite_input=True)
    assert torch.equal(logits, leaf)
    version = logits._version
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.data_ptr() == logits.data_ptr() and not torch.equal(logits, leaf)
    assert logits._version > version
    (expected,) = torch.autograd.grad(parallel_cross_entropy(leaf, target).sum(), leaf)
    assert torch.equal(grad, expected)
    repeated = parallel_cross_entropy(leaf, target, overwrite_input=True).sum()
    repeated.backward(retain_graph=True)
    assert leaf.grad.data_ptr() == leaf.data_ptr()  # also for a leaf, as requested
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        repeated.backward()


def test_overwritten_logits_must_be_contiguous(device):
    logits, target = sample(torch.float32, device)
    with pytest.raises(ValueError, match="overwrite_input=True needs contiguous logits"):
        parallel_cross_entropy(logits.transpose(0, 1), target.t(), overwrite_input=True)


def test_deprecated_arguments_warn(device):
    logits, target = sample(torch.float32, device)
    with pytest.warns(FutureWarning, match="is_cg_capturable is deprecated"):
        parallel_cross_entropy(
            logits,
            target,
            label_smoothing=0.0,
            reduce_loss=False,
            dist_process_group=None,
            ignore_idx=IGNORED,
            is_cg_capturable=True,
        )
    result = logits * 1.0
    with pytest.warns(FutureWarning, match="keep_logits is deprecated"):
        loss = parallel_cross_entropy(result, target, keep_logits=False)
    (grad,) = torch.autograd.grad(loss.sum(), result)
    assert grad.data_ptr() == result.data_ptr()


class Alias(torch.autograd.Function):
    """An input alias that autograd does not record as a view."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


ALIASES = {
    "itself": lambda p: p,
    "view": lambda p: p.view(p.shape),
    "part": lambda p: p[1:],
    "detached": lambda p: p.detach().requires_grad_(),
    "custom function": Alias.apply,
    "view of a custom function": lambda p: Alias.apply(p.view(-1)).view(p.shape),
}


@DTYPES
@pytest.mark.parametrize("alias", ALIASES)
def test_a_leaf_keeps_its_values_and_gets_a_gradient_in_other_memory(alias, dtype, device):
    logits, target = sample(dtype, device)
    parameter = torch.nn.Parameter(logits.detach())
    before = parameter.detach().clone()
    argument = ALIASES[alias](parameter)
    loss = parallel_cross_entropy(argument, target[-len(argument) :])
    loss.sum().backward()
    assert torch.equal(parameter, before)
    leaf = argument if alias == "detached" else parameter
    assert leaf.grad.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
    twin = before.clone().requires_grad_()
    torch_loss(
        twin[-len(argument) :], target[-len(argument) :], smoothing=0.0, mean=False
    ).sum().backward()
    torch.testing.assert_close(leaf.grad.float(), twin.grad.float(), rtol=ROUNDED[dtype], atol=1e-6)


@pytest.mark.parametrize("parts", [1, 3])
def test_chunked_logits_have_the_full_gradients(parts, device):
    leaf, target = sample(torch.float32, device)
    full = parallel_cross_entropy(leaf * 1.0, target).sum()
    (expected,) = torch.autograd.grad(full, leaf)
    chunks = zip((leaf * 1.0).chunk(parts), target.chunk(parts), strict=True)
    sum(
        parallel_cross_entropy(*chunk, overwrite_input=parts > 1).sum() for chunk in chunks
    ).backward()
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("kept_by", ["default", "retain_graph", "create_graph"])
def test_logits_that_are_read_later_are_not_overwritten(kept_by, device):
    logits, target = sample(torch.float32, device)
    before = logits.detach().clone()
    loss = parallel_cross_entropy(logits, target).sum()
    saved = None if kept_by == "default" else True
    (first,) = torch.autograd.grad(
        loss, logits, retain_graph=saved, create_graph=kept_by == "create_graph"
    )
    assert torch.equal(logits, before)
    if saved:
        (second,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(second, first.detach())


def test_another_operation_that_saved_the_logits_raises_in_its_backward(device):
    leaf, target = sample(torch.float32, device)
    logits = leaf * 1.0
    penalty = logits.square().sum()
    loss = parallel_cross_entropy(logits, target, overwrite_input=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + penalty).backward()


def test_logits_and_targets_may_have_any_strides(device):
    logits, target = sample(torch.float32, device)
    expected = parallel_cross_entropy(logits, target)
    lying = logits.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    strided = torch.stack((target, target), dim=-1)[..., 0].to(torch.int32)
    loss = parallel_cross_entropy(lying, strided)
    assert torch.equal(loss, expected)
    before = lying.detach().clone()
    loss.sum().backward()
    expected.sum().backward()
    assert torch.equal(lying.grad, logits.grad) and torch.equal(lying, before)


def test_the_mean_over_only_ignored_rows_is_zero(device):
    logits, target = sample(torch.float32, device)
    loss = parallel_cross_entropy(logits, torch.full_like(target, IGNORED), 0.1, True)
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all()
    empty = torch.zeros(2, 0, 7, device=device, requires_grad=True)
    assert parallel_cross_entropy(
        empty, torch.zeros(2, 0, dtype=torch.int64, device=device)
    ).shape == (2, 0)


def test_the_compiled_loss_equals_the_eager_loss(device):
    logits, target = sample(torch.float32, device)
    compiled = torch.compile(
        lambda x, y: parallel_cross_entropy(x, y, 0.1, True), fullgraph=True, backend="aot_eager"
    )
    reference = logits.detach().clone().requires_grad_()
    loss, expected = compiled(reference, target), parallel_cross_entropy(logits, target, 0.1, True)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(reference.grad, logits.grad)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"target": torch.full((3, 5), 37)},
            ValueError,
            r"target 37 is outside of a vocabulary of 37 ids",
        ),
        ({"target": torch.full((3, 5), -1)}, ValueError, r"target -1 is outside"),
        (
            {"target": torch.zeros(3, 4, dtype=torch.int64)},
            ValueError,
            r"give one id a row, \[3, 5\]",
        ),
        ({"target": torch.zeros(3, 5)}, TypeError, r"target is torch.float32; give ids"),
        ({"inp": torch.zeros(15, 37)}, ValueError, r"give logits \[batch, sequence, vocabulary\]"),
        ({"label_smoothing": -0.5}, ValueError, r"label_smoothing=-0.5 is not a share"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing=1.5 is not a share"),
        ({"ignore_idx": 1.5}, TypeError, "ignore_idx"),
        ({"reduce_loss": torch.ones(2)}, TypeError, "reduce_loss"),
        ({"dist_process_group": 3}, TypeError, "dist_process_group"),
    ],
)
def test_bad_arguments_raise(change, error, words):
    good = {"inp": torch.zeros(3, 5, 37), "target": torch.zeros(3, 5, dtype=torch.int64)}
    with pytest.raises(error, match=words):
        parallel_cross_entropy(**(good | change))


def test_the_old_keyword_is_accepted_with_a_warning(device):
    logits, target = sample(torch.float32, device)
    with pytest.warns(FutureWarning, match="give the logits as inp"):
        loss = parallel_cross_entropy(None, target, _input=logits)
    assert torch.equal(loss, parallel_cross_entropy(logits, target))


def head(dtype, device, rows=(8, 13), features=24, ids=61):
    hidden = torch.randn(*rows, features, device=device).to(dtype)
    weight = (0.4 * torch.randn(ids, features, device=device)).to(dtype)
    bias = torch.randn(ids, device=device).to(dtype)
    target = torch.randint(0, ids, rows, device=device)
    target[0, 2] = IGNORED
    return [x.requires_grad_() for x in (hidden, weight, bias)], target


def gradients(loss, leaves):
    (
        loss
        if loss.dim() == 0
        else (loss * torch.linspace(0.5, 2, loss.numel(), device=loss.device).view_as(loss)).sum()
    ).backward()
    results = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    return results


@DTYPES
@SMOOTHING
@MEAN
def test_the_fused_linear_head_loss_equals_the_loss_from_logits(dtype, smoothing, mean, device):
    leaves, target = head(dtype, device)
    hidden, weight, bias = leaves
    exact = [x.detach().double().requires_grad_() for x in leaves]
    plain = torch_loss(linear(*leaves), target, smoothing, mean)
    in_steps = gradients(plain, leaves)
    truth = torch_loss(linear(*exact), target, smoothing, mean)
    exactly = gradients(truth, exact)
    loss = fused_linear_cross_entropy(
        hidden, weight, target, bias, label_smoothing=smoothing, reduce_loss=mean
    )
    assert loss.dtype == torch.float32 and loss.shape == plain.shape
    torch.testing.assert_close(loss, plain, rtol=ROUNDED[dtype], atol=1e-5)
    for ours, reference, right in zip(gradients(loss, leaves), in_steps, exactly, strict=True):
        assert ours.dtype == dtype
        if dtype is torch.float32:
            torch.testing.assert_close(ours, right.float(), rtol=1e-4, atol=1e-5)
        else:
            assert_as_good_as(ours, reference, right)


@pytest.mark.parametrize("features", [8, 24, 128], ids="{} features".format)
@PRECISE
def test_fused_head_gradients_equal_gradients_through_the_logits(features, precise, device):
    leaves, target = head(torch.float32, device, (8, 13), features)
    hidden, weight, bias = leaves
    expected = gradients(torch_loss(linear(*leaves), target, 0.1, True), leaves)
    how = {"label_smoothing": 0.1, "precise": precise}
    loss = fused_linear_cross_entropy(hidden, weight, target, bias, **how)
    for ours, reference in zip(gradients(3 * loss, leaves), expected, strict=True):
        torch.testing.assert_close(ours, 3 * reference, rtol=1e-4, atol=1e-5)


def test_a_precise_weight_gradient_is_as_exact_as_two_separate_steps(device):
    (hidden, weight, _), target = head(torch.bfloat16, device, (4, 256), 32, 2048)
    leaves = [hidden, weight]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    _, right = gradients(torch_loss(linear(*exact), target, smoothing=0.0, mean=True), exact)

    def error(loss):
        return (gradients(loss, leaves)[1].double() - right).norm() / right.norm()

    in_steps = error(parallel_cross_entropy(linear(hidden, weight), target, reduce_loss=True))
    assert error(fused_linear_cross_entropy(hidden, weight, target, precise=True)) < 1.5 * in_steps
    assert error(fused_linear_cross_entropy(hidden, weight, target)) < 4 * in_steps


def test_gradients_are_multiplied_in_place_unless_the_graph_is_retained(device):
    (hidden, weight, bias), target = head(torch.float32, device)
    leaves = [hidden, weight, bias]
    expected = torch.autograd.grad(
        torch_loss(linear(*leaves), target, smoothing=0.0, mean=True), leaves
    )
    loss = fused_linear_cross_entropy(hidden, weight, target, bias)
    for factor, saved in ((2.0, True), (3.0, True), (0.5, False)):
        actual = torch.autograd.grad(
            loss, leaves, torch.tensor(factor, device=device), retain_graph=saved
        )
        for ours, reference in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, factor * reference, rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("frozen", [0, 1, 2], ids=["hidden", "weight", "bias"])
@PRECISE
def test_only_required_gradients_are_computed(frozen, precise, device):
    leaves, target = head(torch.float32, device)
    hidden, weight, bias = leaves
    leaves[frozen].requires_grad_(False)
    expected = gradients(torch_loss(linear(*leaves), target, smoothing=0.0, mean=True), leaves)
    fused_linear_cross_entropy(hidden, weight, target, bias, precise=precise).backward()
    assert leaves[frozen].grad is None
    for leaf, reference in zip(leaves, expected, strict=True):
        assert reference is None or torch.allclose(leaf.grad, reference, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        loss = fused_linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(
        loss,
        torch_loss(linear(hidden, weight), target, smoothing=0.0, mean=True),
        rtol=1e-5,
        atol=1e-6,
    )


class Largest(TorchDispatchMode):
    """Element count of the largest result with last extent `ids` that an operation returns."""

    def __init__(self, ids: int):
        super().__init__()
        self.ids, self.elements = ids, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.dim() == 2
                and tensor.shape[-1] == self.ids
            ):
                self.elements = max(self.elements, tensor.numel())
        return result


@MEAN
def test_no_tensor_holds_more_than_a_twentieth_of_the_logits(mean, device):
    (hidden, weight, _), target = head(torch.float32, device, rows=(4, 256), features=8, ids=61)
    with Largest(61) as observed:
        fused_linear_cross_entropy(hidden, weight, target, reduce_loss=mean).sum().backward()
    assert 0 < observed.elements <= 0.05 * 1024 * 61
    assert chunk_rows(8192) == 384 and chunk_rows(1 << 20) <= 0.05 * (1 << 20)


def test_a_mismatched_head_is_rejected(device):
    (hidden, weight, bias), target = head(torch.float32, device)
    with pytest.raises(ValueError, match=r"give \[.., features\] and \[vocabulary, features\]"):
        fused_linear_cross_entropy(hidden, weight[:, :3], target)
    with pytest.raises(TypeError, match=r"weight is torch.bfloat16, hidden torch.float32"):
        fused_linear_cross_entropy(hidden, weight.bfloat16(), target)
    with pytest.raises(ValueError, match=r"bias is \[3\]; give \[61\]"):
        fused_linear_cross_entropy(hidden, weight, target, bias[:3])
    # on a GPU the call does not wait for this check
    (hidden, weight, _), target = head(torch.float32, "cpu")
    with pytest.raises(ValueError, match="target 61 is outside"):
        fused_linear_cross_entropy(hidden, weight, torch.full_like(target, 61))


@pytest.mark.parametrize("shape", [(13, 8), (2, 52), (1, 104)])
def test_targets_in_another_order_of_rows_are_rejected(shape, device):
    (hidden, weight, _), target = head(torch.float32, device)
    with pytest.raises(ValueError, match=r"give one id a row, \[8, 13\]"):
        fused_linear_cross_entropy(hidden, weight, target.reshape(shape))
    expected = fused_linear_cross_entropy(hidden, weight, target)
    for same in (target.reshape(-1), target.unsqueeze(-1)):
        assert torch.equal(fused_linear_cross_entropy(hidden, weight, same), expected)


@MEAN
def test_a_head_without_features_has_the_loss_of_its_bias(mean, device):
    bias = torch.randn(7, device=device, requires_grad=True)
    hidden = torch.zeros(5, 0, device=device, requires_grad=True)
    weight = torch.zeros(7, 0, device=device, requires_grad=True)
    target = torch.tensor([0, 6, 3, -100, 3], device=device)
    for argument in (bias, None):
        loss = te.fused_linear_cross_entropy(hidden, weight, target, argument, reduce_loss=mean)
        logits = torch.zeros(5, 7, device=device) if argument is None else argument.expand(5, 7)
        reduction = "mean" if mean else "none"
        expected = torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(loss, expected)
        if argument is not None:
            (actual,), (reference,) = (torch.autograd.grad(x.sum(), bias) for x in (loss, expected))
            torch.testing.assert_close(actual, reference)
    loss.sum().backward()
    assert hidden.grad.shape == (5, 0) and weight.grad.shape == (7, 0)


@MEAN
def test_a_head_over_zero_rows_has_zero_gradients(mean, device):
    (hidden, weight, bias), target = head(torch.float32, device)
    nothing = hidden.detach()[:0].requires_grad_()
    fused_linear_cross_entropy(nothing, weight, target[:0], bias, reduce_loss=mean).sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight)) and torch.equal(
        bias.grad, torch.zeros_like(bias)
    )
    assert nothing.grad.shape == nothing.shape


# The tracer takes 16 s on one core for each.
@pytest.mark.slow
@pytest.mark.parametrize("mean", [True, False])
def test_the_losses_are_traced_with_dynamic_shapes(mean, device):
    def both(logits, hidden, weight, target, smoothing):
        how = {"label_smoothing": smoothing, "reduce_loss": mean}
        return parallel_cross_entropy(logits, target, **how), fused_linear_cross_entropy(
            hidden, weight, target, **how
        )

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows, smoothing in ((5, 0.0), (7, 0.1), (9, 0.2)):
        logits, target = sample(torch.float32, device, (2, rows, 13))
        leaves = (logits, torch.randn(2, rows, 4, device=device), torch.randn(13, 4, device=device))
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        actual, expected = compiled(*leaves, target, smoothing), both(*twins, target, smoothing)
        for ours, reference in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, reference)
        for losses in (actual, expected):
            (losses[0].sum() + losses[1].sum()).backward()
        for leaf, twin in zip(leaves, twins, strict=True):
            torch.testing.assert_close(leaf.grad, twin.grad)


@pytest.mark.gpu
def test_a_step_allocates_one_logits_tensor():
    logits = torch.randn(4, 512, 32000, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, 32000, (4, 512), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logits.requires_grad_()
    parallel_cross_entropy(
        logits.clone(), target, label_smoothing=0.0, reduce_loss=True, overwrite_input=True
    ).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.01 * logits.nbytes


@pytest.mark.gpu
@PRECISE
def test_a_head_allocates_its_gradients_and_a_twentieth_of_the_logits(precise):
    hidden = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32768, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 32768, (4096,), device="cuda")
    for _ in range(2):  # the first call allocates the products' workspace
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused_linear_cross_entropy(hidden, weight, target, precise=precise).backward()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < hidden.nbytes + weight.nbytes + 0.05 * 4096 * 32768 * 2


def capture_step(step):
    """(graph, loss) for a step that has run once before, on another stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


@pytest.mark.gpu
def test_a_captured_head_is_replayed_with_other_features():
    weight = torch.randn(1000, 64, device="cuda", requires_grad=True)
    static = torch.randn(256, 64, device="cuda", requires_grad=True)
    target = torch.randint(0, 1000, (256,), device="cuda")

    def step():
        static.grad = weight.grad = None
        loss = fused_linear_cross_entropy(static, weight, target)
        (2 * loss).backward()
        return loss

    graph, loss = capture_step(step)
    gradients = [static.grad, weight.grad]
    with torch.no_grad():
        static.copy_(torch.randn_like(static))
    graph.replay()
    plain = [x.detach().clone().requires_grad_() for x in (static, weight)]
    expected = torch_loss(linear(*plain), target, smoothing=0.0, mean=True)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    (2 * expected).backward()
    for ours, reference in zip(gradients, plain, strict=True):
        torch.testing.assert_close(ours, reference.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_captured_step_is_replayed_with_other_logits():
    target = torch.randint(0, 1000, (2, 8), device="cuda")
    static = torch.randn(2, 8, 1000, device="cuda", requires_grad=True)

    def step():
        static.grad = None
        loss = parallel_cross_entropy(
            static * 1.0, target, 0.1, reduce_loss=True, dist_process_group=None, ignore_idx=IGNORED
        )
        loss.backward()
        return loss

    graph, loss = capture_step(step)
    with torch.no_grad():
        static.copy_(torch.randn_like(static))
    graph.replay()
    torch.testing.assert_close(
        loss, torch_loss(static, target, 0.1, True).detach(), rtol=1e-5, atol=1e-6
    )


def test_the_names_are_public():
    assert te.parallel_cross_entropy is parallel_cross_entropy
    assert te.fused_linear_cross_entropy is fused_linear_cross_entropy
