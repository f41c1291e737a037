"""Fusion: the fused operations in a chain, users' operations and fusions, channels, and wrong calls."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.ops.fuser import OperationFuser

BF16 = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": torch.bfloat16}


def kinds(fused) -> list[str]:
    return [type(op).__name__ for op, _ in fused]


def run(chain, *extra, recipe=None):
    x = torch.randn(32, 64, **BF16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        result = chain(x * 1, *extra)
    return x, result


def residual(width: int = 64) -> torch.Tensor:
    return torch.randn(32, width, **BF16)


FORWARD = {
    "linear and bias": (lambda: [ops.Linear(64, 64, **BF16)], 0, ["ForwardLinearBiasActivation"]),
    "linear, bias, in-place add": (
        lambda: [ops.Linear(64, 64, **BF16), ops.AddExtraInput(in_place=True)],
        1,
        ["ForwardLinearBiasAdd"],
    ),
    "linear, in-place add": (
        lambda: [ops.Linear(64, 64, bias=False, **BF16), ops.AddExtraInput(in_place=True)],
        1,
        ["ForwardLinearBiasAdd"],
    ),
    "linear, add": (
        lambda: [ops.Linear(64, 64, bias=False, **BF16), ops.AddExtraInput()],
        1,
        ["BasicLinear", "AddExtraInput"],
    ),
    "linear, scale, in-place add": (
        lambda: [
            ops.BasicLinear(64, 64, **BF16),
            ops.ConstantScale(2.0),
            ops.AddExtraInput(in_place=True),
        ],
        1,
        ["ForwardLinearScaleAdd"],
    ),
}
BACKWARD = {
    "in-place extra output, linear": (
        lambda: [ops.MakeExtraOutput(in_place=True), ops.Linear(64, 64, bias=False, **BF16)],
        ["BackwardLinearAdd"],
    ),
    "linear, scale": (
        lambda: [ops.BasicLinear(64, 64, **BF16), ops.ConstantScale(2.0)],
        ["BackwardLinearScale"],
    ),
    "extra output, RMSNorm": (
        lambda: [ops.MakeExtraOutput(), ops.RMSNorm(64, **BF16)],
        ["BackwardAddRMSNorm"],
    ),
    "extra output, te.RMSNorm": (
        lambda: [ops.MakeExtraOutput(), te.RMSNorm(64, **BF16)],
        ["BackwardAddRMSNorm"],
    ),
}


@pytest.mark.parametrize("case", FORWARD)
def test_forward_pass_fusions(case):
    make, extra, expected = FORWARD[case]
    chain = ops.Sequential(*make())
    run(chain, *[residual()] * extra)
    assert len(chain._module_groups) == 1
    assert kinds(chain._module_groups[0]._forward_ops) == expected


@pytest.mark.parametrize("case", BACKWARD)
def test_backward_pass_fusions(case):
    make, expected = BACKWARD[case]
    chain = ops.Sequential(*make())
    run(chain)
    assert kinds(chain._module_groups[0]._backward_ops) == expected


def test_float32_products_are_not_fused_with_their_bias():
    chain = ops.Sequential(ops.Linear(64, 64, device=BF16["device"], dtype=torch.float32))
    chain(torch.randn(4, 64, device=BF16["device"]))
    assert kinds(chain._module_groups[0]._forward_ops) == ["BasicLinear", "Bias"]


@pytest.mark.parametrize("activation", [ops.GELU, ops.ReLU])
def test_bias_and_activation_fuse_in_the_backward_pass_under_a_recipe(activation, emulated):
    chain = ops.Sequential(
        ops.Quantize(forward=False, backward=True), ops.Bias(64, **BF16), activation()
    )
    run(chain)
    fuser = chain._module_groups[0]
    assert kinds(fuser._backward_ops) == ["Quantize", "Bias", activation.__name__]
    _, y = run(chain, recipe=Float8CurrentScaling())
    assert kinds(fuser._backward_ops) == ["Quantize", "BackwardActivationBias"]
    assert [indices for _, indices in fuser._backward_ops] == [[0], [1, 2]]
    y.sum().backward()
    run(chain, recipe=Float8CurrentScaling(backward_override="high_precision"))
    assert kinds(fuser._backward_ops) == ["Quantize", "Bias", activation.__name__]


def test_a_chain_fuses_again_when_the_history_length_changes(emulated):
    chain = ops.Sequential(ops.BasicLinear(64, 64, **BF16))
    run(chain, recipe=DelayedScaling(amax_history_len=4))
    assert chain[0]._fp8_metas["forward"]["scaling_fwd"].amax_history.shape == (4, 2)
    run(chain, recipe=DelayedScaling(amax_history_len=8))
    assert chain[0]._fp8_metas["forward"]["scaling_fwd"].amax_history.shape == (8, 2)
    assert chain._module_groups[0].recipe_type is DelayedScaling
    run(chain)
    assert (
        chain[0].get_quantizer("forward", 0) is None and chain._module_groups[0].recipe_type is None
    )


def test_other_modules_separate_chains():
    last = te.Linear(64, 64, device=BF16["device"])
    chain = ops.Sequential(ops.Identity(), torch.nn.Flatten(), ops.Identity(), ops.Identity(), last)
    assert chain._module_groups is None
    chain(torch.randn(4, 64, device=BF16["device"]))
    kinds_of_groups = [type(group) for group in chain._module_groups]
    assert kinds_of_groups == [OperationFuser, torch.nn.Flatten, OperationFuser, te.Linear]
    chain.append(ops.Identity())
    assert chain._module_groups is None


def test_the_backward_stops_at_the_first_operation_that_requires_it():
    chain = ops.Sequential(ops.GELU(), ops.BasicLinear(64, 64, **BF16), ops.Bias(64, **BF16))
    x = torch.randn(4, 64, **BF16)
    y = chain(x)
    fuser = chain._module_groups[0]
    assert fuser.first_op_requiring_backward == 1 and y.requires_grad
    y.sum().backward()
    assert chain[1].weight.grad is not None
    chain(x.clone().requires_grad_())
    assert fuser.first_op_requiring_backward == 0
    with torch.no_grad():
        assert not chain(x).requires_grad
    assert fuser.first_op_requiring_backward == 3
    chain.requires_grad_(False)
    assert not chain(x).requires_grad


class Doubled(ops.BasicOperation):
    """y = 2 weight x, a user's operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((), 3.0, **BF16))

    def op_forward(
        self, ctx, input_, *, prev_op_grad_output_quantizer, next_op_input_quantizer, factor=2.0
    ):
        ctx.save_for_backward(input_)
        ctx.factor = factor
        self.quantizers = prev_op_grad_output_quantizer, next_op_input_quantizer
        return input_ * self.weight * factor

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * self.weight * ctx.factor, [(grad_output * x).sum() * ctx.factor]


def test_users_operations_run_between_fused_passes(emulated):
    chain = ops.Sequential(
        ops.Linear(64, 64, **BF16), Doubled(), ops.Linear(64, 64, **BF16), ops.GELU()
    )
    x, y = run(chain, recipe=Float8CurrentScaling())
    y.sum().backward()
    before, distance = chain[1].quantizers
    assert before is None and distance is chain[2].basic_ops[0].get_input_quantizer()
    plain = ops.Sequential(chain[0], ops.ConstantScale(6.0), chain[2], chain[3])
    grads = [x.grad, chain[0].weight.grad.clone()]
    assert chain[1].weight.grad is not None
    chain.zero_grad()
    leaf = x.detach().requires_grad_()
    with te.autocast(recipe=Float8CurrentScaling()):
        expected = plain(leaf * 1)
    expected.sum().backward()
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(grads[0], leaf.grad, rtol=5e-2, atol=5e-2)
    assert chain(x, op_kwargs={1: {"factor": 4.0}}).shape == (32, 64)


class DoubledTwice(ops.FusedOperation):
    """Two operations of a user as one."""


class Untouched(torch.nn.Module):
    """Calls a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("way", ["fused", "called", "called members", "replaced member"])
def test_op_kwargs_reach_basic_operations_of_a_fused_one(way):
    chain = ops.Sequential(ops.Identity(), DoubledTwice([Doubled(), Doubled()]), Doubled())
    first, second = chain[1].basic_ops
    if way == "called":
        chain[1].register_forward_hook(lambda *_: None)
    elif way == "called members":
        first.register_forward_hook(lambda *_: None)
    elif way == "replaced member":
        chain[1].basic_ops[0] = Untouched(first)
    x = torch.ones(4, **BF16, requires_grad=True)
    y = chain(x, op_kwargs={second: {"factor": 0.5}, 2: {"factor": 4.0}})
    y.sum().backward()
    expected = 3.0**3 * 2.0 * 0.5 * 4.0
    assert torch.equal(y, torch.full_like(y, expected)) and torch.equal(
        x.grad, torch.full_like(x, expected)
    )
    if way == "replaced member":
        return
    chain(x, op_kwargs={-1: {"factor": 8.0}, first: {"factor": 1.0}, second: {}}).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, expected + 3.0**3 * 2.0 * 8.0))


class Overridden(ops.Bias):
    """A package operation with an overridden forward pass."""

    def op_forward(self, ctx, input_, **options):
        return super().op_forward(ctx, input_ + 1, **options)


def test_an_overridden_method_is_called():
    chain = ops.Sequential(Overridden(64, **BF16), ops.Identity())
    x, y = run(chain)
    torch.testing.assert_close(y, x + 1)
    y.sum().backward()
    torch.testing.assert_close(chain[0].bias.grad, torch.full((64,), 32.0, **BF16))


class ScaledTwice(ops.FusedOperation):
    """A user's forward-only fusion of two ConstantScale."""

    calls = 0

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        type(self).calls += 1
        first, second = self.basic_ops
        y, _ = first.fuser_forward(
            basic_op_ctxs[:1], input_, basic_op_extra_inputs=[()], basic_op_kwargs=[{}]
        )
        y, _ = second.fuser_forward(
            basic_op_ctxs[1:], y, basic_op_extra_inputs=[()], basic_op_kwargs=[{}]
        )
        return y, [(), ()]


class ScaledTwiceBackward(ops.FusedOperation):
    """A user's backward-only fusion of two ConstantScale."""

    calls = 0

    def fuser_backward(self, basic_op_ctxs, grad_output, *, basic_op_grad_extra_outputs):
        type(self).calls += 1
        return grad_output * (self.basic_ops[0].scale * self.basic_ops[1].scale), [(), ()], [(), ()]


def _pairs(kind):
    def fuse(argument, *, recipe):
        outputs = []
        for op in argument:
            if (
                outputs
                and isinstance(op, ops.ConstantScale)
                and isinstance(outputs[-1], ops.ConstantScale)
            ):
                op = kind([outputs.pop(), op])
            outputs.append(op)
        return outputs

    return fuse


@pytest.fixture
def registrations():
    lists = (
        OperationFuser.forward_fusion_functions,
        OperationFuser.backward_fusion_functions,
        OperationFuser.forward_backward_fusion_functions,
    )
    saved = [list(functions) for functions in lists]
    yield
    for functions, before in zip(lists, saved, strict=True):
        functions[:] = before


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_registered_fusions_replace_operations(registrations, direction):
    kind = ScaledTwice if direction == "forward" else ScaledTwiceBackward
    register = (
        ops.register_forward_fusion if direction == "forward" else ops.register_backward_fusion
    )
    register(_pairs(kind), prepend=True)
    kind.calls = 0
    chain = ops.Sequential(
        ops.Bias(64, **BF16), ops.ConstantScale(2.0), ops.ConstantScale(4.0), ops.Identity()
    )
    x, y = run(chain)
    y.sum().backward()
    assert kind.calls == 1
    fuser = chain._module_groups[0]
    assert kind.__name__ in kinds(
        fuser._forward_ops if direction == "forward" else fuser._backward_ops
    )
    assert kind.__name__ not in kinds(
        fuser._backward_ops if direction == "forward" else fuser._forward_ops
    )
    torch.testing.assert_close(y, x * 8)
    assert torch.equal(x.grad, torch.full_like(x, 8.0))


class ScaledBothWays(ScaledTwice, ScaledTwiceBackward):
    """A user's fusion for both passes."""


def test_joint_fusions_apply_to_both_passes(registrations):
    ops.register_forward_backward_fusion(_pairs(ScaledBothWays))
    chain = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(4.0))
    x, y = run(chain)
    y.sum().backward()
    fuser = chain._module_groups[0]
    assert fuser._forward_ops[0][0] is fuser._backward_ops[0][0]
    assert kinds(fuser._forward_ops) == ["ScaledBothWays"] and torch.equal(
        x.grad, torch.full_like(x, 8.0)
    )


def test_a_fusion_that_loses_operations_raises(registrations):
    ops.register_forward_fusion(lambda given, *, recipe: given[1:])
    with pytest.raises(RuntimeError, match="mismatch after fusing"):
        run(ops.Sequential(ops.Identity(), ops.Identity()))
    with pytest.raises(TypeError, match="not callable"):
        ops.register_backward_fusion(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no basic operations"):
        ops.FusedOperation([])


def test_channels_connect_operations():
    def chain(connected: bool):
        instance, add = ops.MakeExtraOutput(), ops.AddExtraInput()
        if connected:
            assert (
                instance.set_extra_output_channel(0, "residual", output_to_caller=False) is instance
            )
            assert add.set_extra_input_channel(0, "residual") is add
        return ops.Sequential(instance, ops.Linear(64, 64, **BF16), ops.GELU(), add)

    connected, public = chain(True), chain(False)
    public.load_state_dict(connected.state_dict())
    x, y = run(connected)
    assert isinstance(y, torch.Tensor) and connected._module_groups[0].num_extra_inputs == 0
    y.sum().backward()
    leaf = x.detach().requires_grad_()
    source = leaf * 1
    head, same = ops.Sequential(public[0], public[1], public[2])(source)
    expected = public[3](head, same)
    expected.sum().backward()
    assert torch.equal(y, expected) and torch.equal(x.grad, leaf.grad)
    assert torch.equal(connected[1].weight.grad, public[1].weight.grad)


def test_channel_gradients_are_summed_over_readers_and_the_caller():
    result = ops.MakeExtraOutput().set_extra_output_channel(0, "x")
    adds = [ops.AddExtraInput().set_extra_input_channel(0, "x") for _ in range(2)]
    chain = ops.Sequential(result, ops.ConstantScale(2.0), *adds)
    x, (y, extra) = run(chain)
    (y + 3 * extra).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0 + 1 + 1 + 3))


def test_a_hidden_extra_output_without_a_reader_is_not_returned():
    hidden = ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    for chain in (hidden, ops.Sequential(hidden, ops.ConstantScale(2.0))):
        x, y = run(chain)
        assert isinstance(y, torch.Tensor)
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 1.0 if chain is hidden else 2.0))


def test_wrong_channels_raise():
    op = ops.AddExtraInput()
    with pytest.raises(IndexError, match="does not exist"):
        op.set_extra_input_channel(1, "a")
    with pytest.raises(ValueError, match="non-empty string"):
        op.set_extra_input_channel(0, "")
    with pytest.raises(TypeError, match="not a bool"):
        ops.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=1)  # pyright: ignore
    with pytest.raises(ValueError, match="no producer"):
        OperationFuser([ops.AddExtraInput().set_extra_input_channel(0, "a")])
    late = [
        ops.AddExtraInput().set_extra_input_channel(0, "a"),
        ops.MakeExtraOutput().set_extra_output_channel(0, "a"),
    ]
    with pytest.raises(ValueError, match="not earlier"):
        OperationFuser(late)
    twice = [ops.MakeExtraOutput().set_extra_output_channel(0, "a") for _ in range(2)]
    with pytest.raises(ValueError, match="several producers"):
        OperationFuser(twice)
    OperationFuser([op])
    with pytest.raises(RuntimeError, match="fixed"):
        op.set_extra_input_channel(0, "b")


def test_wrong_calls_raise_before_anything_is_computed():
    chain = ops.Sequential(ops.AddExtraInput(), ops.BasicLinear(64, 32, **BF16))
    x = torch.randn(4, 64, **BF16)
    with pytest.raises(ValueError, match="extra inputs: 0 given"):
        chain(x)
    with pytest.raises(ValueError, match="same shape"):
        chain(x, x[:2])
    with pytest.raises(ValueError, match="does not accept the keyword argument 'fast'"):
        chain(x, x, op_kwargs={1: {"fast": True}})
    with pytest.raises(ValueError, match="neither in this Sequential"):
        chain(x, x, op_kwargs={ops.Identity(): {}})
    with pytest.raises(ValueError, match="only basic operations"):
        ops.Sequential(ops.Linear(64, 64, **BF16))(x, op_kwargs={0: {}})
    with pytest.raises(ValueError, match=r"takes \[.., 64\]"):
        chain[1](x[:, :32])
    with pytest.raises(ValueError, match="unsupported"):
        ops.BasicLinear(64, 64, dtype=torch.float64)
    with pytest.raises(ValueError, match="tensor_parallel_mode"):
        ops.BasicLinear(64, 64, tensor_parallel_mode="rows")
    with pytest.raises(ValueError, match="no bias"):
        ops.Linear(64, 64, bias=False, **BF16).bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(ValueError, match="two halves"):
        ops.SwiGLU()(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="float32, float16 or bfloat16"):
        ops.GELU()(torch.randn(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="normalizes the last dimensions"):
        ops.RMSNorm(32, **BF16)(x)
    with pytest.raises(ValueError, match="one scale per row"):
        ops.ScaledSwiGLU()(x, torch.ones(3))
    with pytest.raises(ValueError, match="activation_recompute_in_mlp"):
        ops.ScaledSwiGLU(activation_recompute_in_mlp=True)
    # without effect, with a warning
    recomputed = ops.ScaledSReLU(activation_recompute_in_mlp=True)(x, torch.ones(4))
    assert torch.equal(recomputed, ops.ScaledSReLU()(x, torch.ones(4)))
    with pytest.raises(ValueError, match="finite number"):
        ops.SiTUGLU(beta1=0.0)
    with pytest.raises(ValueError, match="not a probability"):
        ops.Dropout(1.5)
    with pytest.raises(ValueError, match="3 groups"):
        ops.GroupedLinear(3, 64, 32, **BF16)(x, torch.tensor([4]))
    with pytest.raises(ValueError, match="do not fit"):
        ops.GroupedLinear(1, 64, 32, **BF16)(x, torch.tensor([5]))
    with pytest.raises(ValueError, match="does not hold"):
        ops.Reshape((5, -1))(x)


def test_sequential_supports_list_operations():
    a, b, c = ops.Identity(), ops.ConstantScale(2.0), ops.GELU()
    chain = ops.Sequential({"first": a, "second": b})
    assert list(chain.state_dict()) == ["first._extra_state", "second._extra_state"]
    assert list(chain.append(c)._modules) == ["first", "second", "0"]
    chain = ops.Sequential(a, b)
    chain += [c]
    assert (
        len(chain) == 3
        and list(chain) == [a, b, c]
        and chain[-1] is c
        and list(chain[1:]) == [b, c]
    )
    assert chain.pop(1) is b and list(chain._modules) == ["0", "2"]
    assert list(chain.append(b)._modules) == ["0", "2", "3"]
    assert list(chain.insert(1, ops.ReLU())._modules) == ["0", "1", "2", "3"]
    chain[1] = b
    assert chain[1] is b
    del chain[1]
    joined = ops.Sequential(a) + [b]  # noqa: RUF005  # the operator is tested
    assert list(joined) == [a, b] and len(chain) == 3
    assert (
        isinstance(chain, torch.nn.Sequential)
        and type(chain * 2) is type(2 * chain) is ops.Sequential
    )
    assert list(joined * 2) == [a, b, a, b] and list(joined) == [a, b]
    x = torch.randn(2, 4, device=BF16["device"])
    assert torch.equal((joined * 2)(x), 4 * x)
    for count, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="factor="):
            joined * count
    with pytest.raises(IndexError):
        chain[7]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        chain.append(torch.relu)  # pyright: ignore[reportArgumentType]


def test_extra_outputs_from_several_chains_are_returned_in_order():
    chain = ops.Sequential(
        ops.MakeExtraOutput(), torch.nn.Flatten(), ops.ConstantScale(2.0), ops.MakeExtraOutput()
    )
    x = torch.randn(4, 8, device=BF16["device"])
    y, first, second = chain(x)
    assert torch.equal(first, x) and torch.equal(second, 2 * x) and torch.equal(y, 2 * x)


def test_second_derivatives_raise_with_the_name():
    chain = ops.Sequential(
        ops.Linear(64, 64, device=BF16["device"], dtype=torch.float32), ops.GELU()
    )
    x = torch.randn(4, 64, device=BF16["device"], requires_grad=True)
    (dx,) = torch.autograd.grad(chain(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="Sequential"):
        dx.sum().backward()


def test_a_retained_graph_runs_backward_twice():
    chain = ops.Sequential(ops.Linear(64, 64, **BF16), ops.GELU(), ops.RMSNorm(64, **BF16))
    x, y = run(chain)
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    y.sum().backward()
    assert torch.equal(first, x.grad)


def test_a_registered_bias_of_a_linear_without_one_raises():
    linear = te.ops.Linear(32, 32, bias=False, device="cpu")
    with pytest.raises(ValueError, match="no bias"):
        linear.register_parameter("bias", torch.nn.Parameter(torch.zeros(32)))
    linear.register_parameter("bias", None)
    assert linear.bias is None and "bias=False" in repr(linear)


def test_channels_are_fixed_by_a_call_in_which_a_hooked_operation_fails():
    chain = te.ops.Sequential(te.ops.MakeExtraOutput(), te.ops.AddExtraInput())
    for operation in chain:
        operation.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(ValueError):
        chain(torch.randn(2, 32))  # without the extra input
    with pytest.raises(RuntimeError, match=r"channels .* are fixed"):
        chain[1].set_extra_input_channel(0, "residual")
