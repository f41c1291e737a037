"""Each operation alone against plain PyTorch: values and every gradient, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.chains import ACTIVATIONS, GATED, SCALED, run_plain
from tests.support.tolerances import relative_error
from transformer_engine.pytorch import ops

PLACE = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": torch.float32}


def _activations() -> dict[str, Any]:
    cases = {kind.__name__: kind for kind in (*ACTIVATIONS, *GATED)}
    interleaved = (ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU)
    cases |= {
        f"{kind.__name__} interleaved": lambda kind=kind: kind(glu_interleave_size=8)
        for kind in interleaved
    }
    cases |= {f"{kind.__name__} interleaved": lambda kind=kind: kind(8) for kind in SCALED[1:]}
    cases["ClampedSwiGLU(limit=1)"] = lambda: ops.ClampedSwiGLU(
        limit=1.0, alpha=1.5, glu_linear_offset=0.5
    )
    cases["SiTUGLU(beta1=1)"] = lambda: ops.SiTUGLU(beta1=1.0, beta2=2.0)
    return cases


CASES: dict[str, Any] = {
    "BasicLinear": lambda: ops.BasicLinear(64, 32, **PLACE),
    "Linear": lambda: ops.Linear(64, 32, **PLACE),
    "Linear without bias": lambda: ops.Linear(64, 32, bias=False, **PLACE),
    "Bias": lambda: ops.Bias(64, **PLACE),
    "LayerNorm": lambda: ops.LayerNorm(64, **PLACE),
    "LayerNorm of two dimensions": lambda: ops.LayerNorm((16, 64), **PLACE),
    "LayerNorm, zero-centered": lambda: ops.LayerNorm(
        64, eps=1e-3, zero_centered_gamma=True, **PLACE
    ),
    "RMSNorm": lambda: ops.RMSNorm(torch.Size([64]), **PLACE),
    "RMSNorm, zero-centered": lambda: ops.RMSNorm(64, zero_centered_gamma=True, **PLACE),
    "te.LayerNorm": lambda: te.LayerNorm(64, **PLACE),
    "te.RMSNorm": lambda: te.RMSNorm(64, **PLACE),
    "L2Normalization": ops.L2Normalization,
    "ConstantScale": lambda: ops.ConstantScale(0.3),
    "Identity": ops.Identity,
    "Reshape": lambda: ops.Reshape((16, -1, 64)),
    "Quantize without a recipe": lambda: ops.Quantize(forward=True, backward=True),
    "AllReduce of one rank": ops.AllReduce,
    "AllGather of one rank": ops.AllGather,
    "ReduceScatter of one rank": ops.ReduceScatter,
    "AddExtraInput": ops.AddExtraInput,
    "AddExtraInput in place": lambda: ops.AddExtraInput(in_place=True),
    "MakeExtraOutput": ops.MakeExtraOutput,
    "MakeExtraOutput in place": lambda: ops.MakeExtraOutput(in_place=True),
    **_activations(),
}


def gradients(run: Any, op: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and input and parameter gradients; the loss is a sum over the outputs with fixed weights."""
    for tensor in (*leaves, *op.parameters()):
        tensor.grad = None
    result = run(*[leaf * 1 for leaf in leaves])
    outputs = list(result) if isinstance(result, tuple) else [result]
    generator = torch.Generator().manual_seed(5)
    loss = sum([(y * torch.randn(y.shape, generator=generator).to(y)).sum() for y in outputs])
    loss.backward()
    grads = [tensor.grad for tensor in (*leaves, *op.parameters())]
    return [*[y.detach() for y in outputs], *grads]


def sample_leaves(
    op: Any, dtype: torch.dtype, shape: tuple[int, ...] = (3, 16, 64)
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [shape]
    if isinstance(op, ops.AddExtraInput):
        shapes.append(shape)
    elif type(op) in SCALED:
        shapes.append(shape[:-1])
    outputs = [torch.randn(size, generator=generator) for size in shapes]
    return [tensor.to(PLACE["device"], dtype).requires_grad_() for tensor in outputs]


def perturb_parameters(op: Any) -> Any:
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter))
    return op


@pytest.mark.parametrize("case", CASES)
def test_operation_equals_plain_pytorch(case):
    op = perturb_parameters(CASES[case]())
    leaves = sample_leaves(op, torch.float32)
    actual = gradients(ops.Sequential(op), op, leaves)
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = gradients(lambda *args: run_plain([op], *args), op, double)
    for ours, reference in zip(actual, expected, strict=True):
        assert ours.shape == reference.shape and ours.dtype == torch.float32
        assert relative_error(ours, reference) <= 1e-5, case


@pytest.mark.parametrize("case", CASES)
def test_operation_in_bfloat16_is_as_good_as_plain_pytorch(case):
    op = perturb_parameters(CASES[case]()).to(torch.bfloat16)
    leaves = sample_leaves(op, torch.bfloat16)
    actual = gradients(ops.Sequential(op), op, leaves)
    low = gradients(lambda *args: run_plain([op], *args), op, leaves)
    double = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = gradients(lambda *args: run_plain([op], *args), op, double)
    for ours, reference, best in zip(actual, low, exact, strict=True):
        if ours.dtype is torch.bfloat16 and not torch.equal(reference.double(), best.double()):
            # Plain PyTorch may be exact by chance where a single rounding is left.
            assert relative_error(ours, best) <= max(2 * relative_error(reference, best), 2**-8), (
                case
            )


@pytest.mark.parametrize("case", ["GELU", "SwiGLU", "ClampedSwiGLU"])
def test_cached_quantized_input_changes_the_gradient_by_its_rounding_only(case):
    op, cached = CASES[case](), CASES[case]()
    cached.cache_quantized_input = True
    (x,) = sample_leaves(op, torch.float32)
    y, dx = gradients(op, op, [x])
    y_cached, dx_cached = gradients(cached, cached, [x])
    assert torch.equal(y, y_cached)
    assert 0 < relative_error(dx_cached, dx) <= 2**-3


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (1, 64), (2, 2, 2, 64)])
def test_inputs_may_have_any_leading_shape(shape):
    chain = ops.Sequential(ops.LayerNorm(64, **PLACE), ops.Linear(64, 32, **PLACE), ops.GELU())
    x = torch.randn(shape, device=PLACE["device"], requires_grad=True)
    y = chain(x)
    assert y.shape == (*shape[:-1], 32)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    torch.testing.assert_close(y, run_plain(chain, x), rtol=1e-5, atol=1e-5)


def test_strided_inputs_are_supported():
    chain = ops.Sequential(ops.Linear(64, 32, **PLACE), ops.SiLU())
    x = torch.randn(64, 5, 3, device=PLACE["device"]).permute(2, 1, 0).requires_grad_()
    y = chain(x)
    y.permute(1, 0, 2).sum().backward()
    torch.testing.assert_close(y, run_plain(chain, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("numel", [48, 100])
def test_dropout_keeps_the_expected_fraction_and_scales_it(numel):
    op = ops.Dropout(0.25)
    x = torch.ones(64, numel, device=PLACE["device"], requires_grad=True)
    y = op(x)
    kept = y != 0
    assert set(y.unique().tolist()) <= {0.0, float(torch.tensor(1.0) / 0.75)}
    assert abs(kept.float().mean().item() - 0.75) < 0.05
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    op.eval()
    assert torch.equal(op(x), x)


def grouped_case(**options: Any) -> tuple[Any, list[torch.Tensor]]:
    op = perturb_parameters(ops.GroupedLinear(3, 64, 32, **{**PLACE, **options}))
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(48, 64, generator=generator).to(PLACE["device"]).requires_grad_()
    extra = [torch.tensor([16, 0, 32])]
    if op.num_extra_inputs == 2:
        extra.append(torch.rand(48, generator=generator).to(PLACE["device"]).requires_grad_())
    return op, [x, *extra]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"scale_bias": True},
        {"single_grouped_weight": True, "single_grouped_bias": True},
        {"single_grouped_weight": True},
    ],
    ids=str,
)
def test_grouped_linear_equals_plain_pytorch(options):
    op, (x, splits, *scales) = grouped_case(**options)
    leaves = [x, *scales]

    def run(x: torch.Tensor, *scales: torch.Tensor) -> Any:
        return op(x, splits, *scales)

    actual = gradients(run, op, leaves)
    expected = gradients(lambda x, *scales: run_plain([op], x, splits, *scales), op, leaves)
    for ours, reference in zip(actual, expected, strict=True):
        assert relative_error(ours, reference) <= 1e-5


def test_grouped_linear_rows_without_a_group_are_zero():
    op, (x, _) = grouped_case(bias=True)
    y = op(x, torch.tensor([8, 8, 8]))
    y.sum().backward()
    assert y.shape == (48, 32) and not y[24:].any() and not x.grad[24:].any()
    assert torch.equal(y[:24], op(x[:24], torch.tensor([8, 8, 8])))


@pytest.mark.parametrize("compiles", [False, True])
def test_split_sizes_are_sequences_or_tensors_of_any_integers(compiles):
    op, (x, splits) = grouped_case()
    chain = ops.Sequential(op, ops.ReLU())
    run = torch.compile(chain, fullgraph=True, backend="eager") if compiles else chain
    rows = splits.tolist()
    expected = gradients(lambda x: chain(x, splits), chain, [x])
    forms = [rows] if compiles else [rows, tuple(rows), [float(n) for n in rows], splits.to("cpu")]
    forms += (
        [] if compiles else [splits.to(dtype) for dtype in (torch.uint8, torch.int16, torch.int32)]
    )
    for form in forms:
        for ours, reference in zip(
            gradients(lambda x, form=form: run(x, form), chain, [x]), expected, strict=True
        ):
            assert torch.equal(ours, reference)
    if not compiles:
        assert torch.equal(op(x, rows), op(x, splits))
        with pytest.raises(
            TypeError, match=r"split sizes=\[1.5, 2, 3\] holds 1.5; give a list of whole numbers"
        ):
            op(x, [1.5, 2, 3])
        with pytest.raises(ValueError, match="3 groups, but got split sizes"):
            op(x, [1, 2])


def test_grouped_linear_writes_caller_buffers():
    op, (x, splits) = grouped_case()
    output, grad_input = torch.empty(48, 32, device=x.device), torch.empty(48, 64, device=x.device)
    expected = gradients(lambda x: op(x, splits), op, [x])
    chain = ops.Sequential(op)

    def run(x: torch.Tensor) -> Any:
        return chain(x, splits, op_kwargs={op: {"output": output, "grad_input": grad_input}})

    actual = gradients(run, op, [x])
    for ours, reference in zip(actual, expected, strict=True):
        assert torch.equal(ours, reference)
    assert torch.equal(output, actual[0]) and torch.equal(grad_input, actual[1])
    with pytest.raises(ValueError, match="output is"):
        chain(x, splits, op_kwargs={op: {"output": output[:8]}})


def test_grouped_linear_delays_weight_gradients():
    op, (x, splits) = grouped_case(delay_wgrad_compute=True)
    now, _ = grouped_case()
    now.load_state_dict(op.state_dict())
    finished = []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: finished.append(True))
    op(x, splits).sum().backward()
    assert op.need_backward_dw() and op.weight0.grad is None and op.bias0.grad is not None
    op.backward_dw()
    now(x, splits).sum().backward()
    assert finished and torch.equal(op.weight2.grad, now.weight2.grad)
    assert op.weight0.skip_backward_post_hook


@pytest.mark.parametrize(
    "make",
    [lambda **o: ops.BasicLinear(64, 32, **o), lambda **o: ops.GroupedLinear(1, 64, 32, **o)],
)
def test_weight_gradients_accumulate_into_main_grad(make):
    op = make(accumulate_into_main_grad=True, **PLACE)
    weight = next(iter(op.parameters()))
    extra = [torch.tensor([8])] if op.num_extra_inputs else []
    x = torch.randn(8, 64, device=PLACE["device"])
    with pytest.raises(RuntimeError, match="main_grad"):
        op(x, *extra)
    weight.main_grad = torch.ones_like(weight)
    op(x, *extra).sum().backward()
    dw = torch.ones(32, 8, device=x.device) @ x
    torch.testing.assert_close(weight.main_grad, 1 + dw, rtol=1e-5, atol=1e-5)
    weight.overwrite_main_grad = True
    op(x, *extra).sum().backward()
    torch.testing.assert_close(weight.main_grad, dw, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_torch_autocast_computes_in_its_dtype(autocast_dtype):
    chain = ops.Sequential(ops.LayerNorm(64, **PLACE), ops.Linear(64, 128, **PLACE), ops.SwiGLU())
    x = torch.randn(16, 64, device=PLACE["device"], requires_grad=True)
    with torch.autocast(PLACE["device"], dtype=autocast_dtype):
        y = chain(x)
    assert y.dtype is autocast_dtype
    y.float().sum().backward()
    assert x.grad.dtype is torch.float32
    assert all(p.grad.dtype is torch.float32 for p in chain.parameters())
    assert relative_error(y, run_plain(chain, x)) < 2e-2
