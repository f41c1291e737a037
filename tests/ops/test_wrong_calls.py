"""Errors for wrong inputs, parameters and buffers, and wrong return values from users' operations."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, Float8CurrentScaling
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.ops.fuser import OperationFuser


def sample() -> torch.Tensor:
    return torch.randn(8, 32, requires_grad=True)


@pytest.mark.parametrize(
    "value", [3, None, [1.0], numpy.zeros((8, 32))], ids=["int", "None", "list", "numpy"]
)
def test_inputs_that_are_not_tensors_are_named(value):
    message = rf"main input of BasicLinear \(operation 0\) is an? {type(value).__name__}; give a torch.Tensor"
    for chain in (
        ops.Linear(32, 32),
        ops.Sequential(ops.Linear(32, 32), torch.nn.ReLU(), ops.Identity()),
    ):
        with pytest.raises(TypeError, match=message):
            chain(value)
    with pytest.raises(TypeError, match=r"extra input 0 of AddExtraInput \(operation 2\) is an? "):
        ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput())(sample(), value)
    missing = r"extra inputs: 0 given, 1 read by AddExtraInput \(operation {}\); give one tensor"
    with pytest.raises(ValueError, match=missing.format(0)):
        ops.AddExtraInput()(sample())
    with pytest.raises(ValueError, match=missing.format(2)):
        ops.Sequential(ops.Linear(32, 32), ops.AddExtraInput())(sample())
    with pytest.raises(ValueError, match=missing.format(0)):
        ops.Sequential(torch.nn.ReLU(), ops.AddExtraInput())(sample())


def test_extra_inputs_that_no_operation_reads_are_named():
    with pytest.raises(
        ValueError, match="1 given, but BasicLinear, Bias read none; pass the main input alone"
    ):
        ops.Linear(32, 32)(sample(), sample())


@pytest.mark.parametrize(
    ("op_kwargs", "message"),
    [
        (3, r"op_kwargs=3 is an int; give a dict \{basic operation"),
        (0, r"op_kwargs=0 is an int; give a dict \{basic operation"),
        ({0: 3}, "op_kwargs contains 3, which is an int; give a dict of keyword"),
        ({0: None}, "op_kwargs contains None, which is a NoneType; give a dict of keyword"),
    ],
    ids=["int", "zero", "value", "None"],
)
def test_op_kwargs_that_are_not_dicts_are_named(op_kwargs: Any, message: str):
    with pytest.raises(TypeError, match=message):
        ops.Sequential(ops.Identity())(sample(), op_kwargs=op_kwargs)


def test_op_kwargs_that_name_no_basic_operation_are_rejected():
    chain = ops.Sequential(ops.Linear(32, 32), ops.Identity())
    with pytest.raises(
        ValueError, match=r"a Linear, but only basic operations .* use one of its basic_ops as"
    ):
        chain(sample(), op_kwargs={0: {}})
    with pytest.raises(
        ValueError, match="a Bias that is neither in this Sequential nor in one of its fused"
    ):
        chain(sample(), op_kwargs={ops.Linear(32, 32).basic_ops[1]: {}})
    with pytest.raises(ValueError, match="names operation 2 of a Sequential of 2 modules"):
        chain(sample(), op_kwargs={2: {}})
    with pytest.raises(ValueError, match="Bias does not accept the keyword argument 'fast'"):
        chain(sample(), op_kwargs={chain[0].basic_ops[1]: {"fast": True}})


@pytest.mark.parametrize("hook", [False, True])
def test_wrong_keyword_arguments_of_a_fused_operation_are_named(hook: bool):
    linear = ops.Linear(32, 32)
    if hook:
        linear.basic_ops[0].register_forward_hook(lambda *_: None)
    with pytest.raises(
        ValueError, match=r"Linear stands for 2 basic operations and does not accept .* 'fast'"
    ):
        linear(sample(), fast=True)
    with pytest.raises(ValueError, match="basic_op_kwargs has 1 entries for 2 basic operations"):
        linear(sample(), basic_op_kwargs=[{}])


@pytest.mark.parametrize(
    "op", [ops.GELU(), ops.SwiGLU(), ops.ScaledSReLU()], ids=lambda op: type(op).__name__
)
def test_an_activation_of_a_number_names_the_operation(op: Any):
    extra = [torch.randn(())] * op.num_extra_inputs
    with pytest.raises(
        ValueError, match=f"{type(op).__name__} takes inputs with at least one dimension"
    ):
        op(torch.randn(()), *extra)


class Returning(ops.BasicOperation):
    """An operation whose passes return the values of two functions."""

    def __init__(self, forward: Any = None, backward: Any = None) -> None:
        super().__init__()
        self.returned = forward, backward

    def op_forward(self, ctx, input_, **kwargs):
        return input_ if self.returned[0] is None else self.returned[0](input_)

    def op_backward(self, ctx, grad_output):
        return (grad_output, ()) if self.returned[1] is None else self.returned[1](grad_output)


class ReturningExtra(ops.BasicOperation):
    num_extra_inputs = 1
    num_extra_outputs = 1

    def __init__(self, forward: Any = None, backward: Any = None) -> None:
        super().__init__()
        self.returned = (
            forward or (lambda x: (x, [(x,)])),
            backward or (lambda dy: (dy, [()], [(dy,)])),
        )

    op_forward = op_backward = None  # pyright: ignore

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        return self.returned[0](input_)

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        return self.returned[1](grad_output)


def run(op: Any) -> None:
    extra = [sample()] * op.num_extra_inputs
    y = ops.Sequential(ops.Bias(32), op, ops.Bias(32))(sample(), *extra)
    (y[0] if extra else y).sum().backward()


WRONG = {
    "op_forward returned None; return a tensor as the output": Returning(lambda x: None),
    "op_forward returned a tuple; return a tensor": Returning(lambda x: (x, x)),
    "op_backward returned a Tensor; return a tuple": Returning(None, lambda dy: dy),
    "op_backward returned None; return a tensor as the gradient": Returning(
        None, lambda dy: (None, ())
    ),
    "op_backward returned an int; return a tensor as the gradient": Returning(
        None, lambda dy: (3, ())
    ),
    "returned a NoneType as the gradients of the parameters": Returning(
        None, lambda dy: (dy, None)
    ),
    "fuser_forward returned a Tensor; return a tuple": ReturningExtra(lambda x: x),
    "fuser_forward returned a Tensor in place of a sequence": ReturningExtra(lambda x: (x, [x])),
    "fuser_forward returned 2 groups": ReturningExtra(lambda x: (x, [(x,), (x,)])),
    "returned an int for extra output 0": ReturningExtra(lambda x: (x, [(3,)])),
    "op_backward returned a tuple of 1 values; return a tuple": Returning(None, lambda dy: (dy,)),
    "fuser_backward returned a tuple of 2 values; return a tuple": ReturningExtra(
        None, lambda dy: (dy, [()])
    ),
    "returned 0 gradients for the 1 extra inputs": ReturningExtra(
        None, lambda dy: (dy, [()], [()])
    ),
    "returned an int; return a tensor or None": ReturningExtra(None, lambda dy: (dy, [()], [(3,)])),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_operation_return_values_are_named(message):
    with pytest.raises(TypeError, match=message):
        run(WRONG[message])


class WithWeight(Returning):
    """A user's operation with one parameter [32]."""

    def __init__(self, backward: Any) -> None:
        super().__init__(None, backward)
        self.weight = torch.nn.Parameter(torch.ones(32))


class Fused(ops.FusedOperation):
    """A user's backward pass for a Linear of this package."""

    def fuser_backward(self, basic_op_ctxs: Any, grad_output: Any, **options: Any) -> Any:
        return grad_output[:1], [(None,), (None,)], [(), ()]


WRONG_GRADIENTS = {
    r"Returning.op_backward returned a tensor \[1, 32\] as the gradient of the input; return a tensor \[8, 32\]": (
        Returning(None, lambda dy: (dy[:1], ()))
    ),
    r"WithWeight.op_backward returned a tensor \[16\] as the gradient of parameter 0 of WithWeight; return .* \[32\]": (
        WithWeight(lambda dy: (dy, (dy[0, :16],)))
    ),
    r"ReturningExtra.fuser_backward returned a tensor \[3\] as the gradient of extra input 0 of ReturningExtra": (
        ReturningExtra(None, lambda dy: (dy, [()], [(torch.ones(3),)]))
    ),
    r"op_backward returned a tensor of torch.int64 as the gradient of the input; return a floating-point tensor": (
        Returning(None, lambda dy: (dy.long(), ()))
    ),
}


@pytest.mark.parametrize("message", WRONG_GRADIENTS)
def test_gradients_of_wrong_shape_or_dtype_name_the_operation(message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        run(WRONG_GRADIENTS[message])


def test_a_gradient_of_wrong_shape_from_a_fusion_of_the_backward_pass_is_named():
    def fusion(argument: list[Any], *, recipe: Any) -> list[Any]:
        return [argument[0], Fused(argument[1:3])]

    ops.register_backward_fusion(fusion)
    try:
        chain = ops.Sequential(ops.Bias(32), ops.Linear(32, 32, dtype=torch.float32))
        with pytest.raises(
            ValueError, match=r"Fused.fuser_backward returned a tensor \[1, 32\] .* the input"
        ):
            chain(sample()).sum().backward()
    finally:
        OperationFuser.backward_fusion_functions.remove(fusion)


def test_autograd_sums_a_broadcast_gradient_of_a_parameter():
    op = WithWeight(lambda dy: (dy, (dy,)))
    ops.Sequential(ops.Bias(32), op)(sample()).sum().backward()
    assert op.weight.grad is not None and torch.equal(
        op.weight.grad, torch.full_like(op.weight, 8.0)
    )


@pytest.mark.parametrize(
    "value", [None, 3, [1, 2], [torch.nn.ReLU()]], ids=["None", "int", "ints", "module"]
)
def test_wrong_fusion_return_values_are_named(value):
    def fusion(argument, *, recipe):
        return value

    ops.register_forward_fusion(fusion)
    try:
        with pytest.raises(TypeError, match="the fusion function fusion returned"):
            ops.Sequential(ops.Bias(32), ops.Identity())(sample())
    finally:
        OperationFuser.forward_fusion_functions.remove(fusion)


@pytest.mark.parametrize("make", [ops.Linear, te.Linear], ids=["operation", "module"])
@pytest.mark.parametrize(
    "value", [3, te.MXFP8Quantizer, Float8CurrentScaling()], ids=["int", "class", "recipe"]
)
def test_a_qfactory_that_returns_no_quantizer_is_named(value, make):
    with (
        te.autocast(recipe=CustomRecipe(qfactory=lambda role: value)),
        pytest.raises(
            TypeError, match=r"qfactory of CustomRecipe returned .* return a quantizer object"
        ),
    ):
        make(32, 32)(sample())


BUFFERS = {
    "main_grad is a list": lambda w: [1],
    "main_grad has dtype torch.int32": lambda w: torch.zeros(w.shape, dtype=torch.int32),
    "main_grad has dtype torch.float8_e4m3fn": lambda w: torch.zeros(
        w.shape, dtype=torch.float8_e4m3fn
    ),
    r"main_grad is \[16, 32\] and the weight \[32, 32\]": lambda w: torch.zeros(16, 32),
    r"main_grad is \[1024\] and the weight \[32, 32\]": lambda w: torch.zeros(1024),
}


@pytest.mark.parametrize("message", BUFFERS)
def test_wrong_gradient_buffers_are_named(message):
    operation = ops.BasicLinear(32, 32, accumulate_into_main_grad=True)
    operation.weight.main_grad = BUFFERS[message](operation.weight)
    with pytest.raises((TypeError, ValueError), match=message):
        operation(sample())
    module = te.Linear(32, 32, fuse_wgrad_accumulation=True)
    module.weight.main_grad = BUFFERS[message](module.weight)
    y = module(sample())
    with pytest.raises((TypeError, ValueError), match=message):
        y.sum().backward()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ops.Linear(32, 32), "weight"),
        (lambda: ops.Bias(32), "bias"),
        (lambda: ops.BasicLinear(32, 32), "weight"),
        (lambda: ops.RMSNorm(32), "weight"),
        (lambda: ops.LayerNorm(32), "bias"),
    ],
)
def test_missing_parameters_are_named(make, name):
    op = make()
    setattr(op, name, None)
    for chain in (op, ops.Sequential(op, Returning())):
        with pytest.raises(RuntimeError, match=f"{name} is None; assign a torch.nn.Parameter"):
            chain(sample())


@pytest.mark.parametrize("make", [te.TransformerLayer, te.MultiheadAttention])
def test_quantized_parameters_with_separate_projections_name_the_option(make: Any, emulated):
    sizes: Any = (32, 64, 2) if make is te.TransformerLayer else (32, 2)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        with pytest.raises(ValueError, match="fuse_qkv_params=True"):
            make(*sizes)
        make(*sizes, fuse_qkv_params=True)


DEVICES = {
    "Linear": lambda device: ops.Linear(32, 32, device=device),
    "Bias": lambda device: ops.Bias(32, device=device),
    "LayerNorm": lambda device: ops.LayerNorm(32, device=device),
    "RMSNorm": lambda device: ops.RMSNorm(32, device=device),
    "GroupedLinear": lambda device: ops.GroupedLinear(2, 32, 32, device=device),
    "module": lambda device: te.Linear(32, 32, device=device),
}


@pytest.mark.parametrize("kind", DEVICES)
def test_values_that_are_not_devices_are_named(kind):
    for device in ("nonsense:3", "cuda:x", ""):
        with pytest.raises(
            ValueError, match=rf"device='{device}' is not a device of torch; give 'cuda'"
        ):
            DEVICES[kind](device)
    for device in (True, 1.5):
        with pytest.raises(TypeError, match=rf"device={device} is a (bool|float); give 'cuda'"):
            DEVICES[kind](device)


def test_main_grad_on_another_device_is_named():
    operation = ops.BasicLinear(32, 32, device="cpu", accumulate_into_main_grad=True)
    operation.weight.main_grad = torch.zeros(32, 32, device="meta")
    with pytest.raises(
        ValueError, match="main_grad is on meta and the weight on cpu; set it to a tensor on"
    ):
        operation(sample())
    for layer, rest in (
        (te.Linear(32, 32, device="cpu", fuse_wgrad_accumulation=True), ()),
        (te.LayerNormLinear(32, 32, device="cpu", fuse_wgrad_accumulation=True), ()),
        (te.GroupedLinear(2, 32, 32, device="cpu", fuse_wgrad_accumulation=True), ([4, 4],)),
    ):
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter, device="meta")
        output = layer(sample(), *rest)
        with pytest.raises(
            ValueError, match="main_grad is on meta and the weight on cpu; set it to a tensor on"
        ):
            output.sum().backward()
