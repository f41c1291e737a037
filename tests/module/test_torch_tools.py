"""PyTorch's tools for modules have their documented effect on every public module and operation.

A tool's oracle is the same module without it: a hook that doubles an output has the doubled output of the
module without a hook, a parametrized weight has the same results as the weight that it computes.
"""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules import module as every_module
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from tests.support.layers import HIDDEN, KINDS
from tests.support.public_modules import BATCH, MODULES, PUBLIC, TOKENS, WITHOUT_CALLS, call

CONTAINERS = ["MultiheadAttention", "TransformerLayer", "ops.Sequential"]


class Step(NamedTuple):
    """Output, input gradient, and parameter gradients by name."""

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor | None]


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]().train()


def parameter_owners(module: nn.Module, dimensions: int = 0) -> list[tuple[nn.Module, str]]:
    """(submodule, parameter name) pairs, optionally restricted to a number of dimensions."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
        if dimensions in (0, parameter.dim())
    ]


def scaled(output: Any, factor: float) -> Any:
    """A module's result with a scaled main output."""
    return output * factor if isinstance(output, Tensor) else (output[0] * factor, *output[1:])


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(TOKENS, BATCH, HIDDEN, device="cpu").to(dtype).requires_grad_()


def step(
    name: str, module: nn.Module, run: Callable[[Tensor], Tensor] | None = None, scale: float = 1.0
) -> Step:
    x = inputs()
    y = call(name, module, x * scale) if run is None else run(x)
    torch.manual_seed(2)
    y.backward(torch.randn_like(y))
    assert x.grad is not None
    return Step(y.detach(), x.grad, {key: each.grad for key, each in module.named_parameters()})


def assert_equal(actual: Step, expected: Step, output: float = 1.0, gradient: float = 1.0) -> None:
    torch.testing.assert_close(actual.output, expected.output * output)
    torch.testing.assert_close(actual.input_gradient, expected.input_gradient * gradient)


def assert_all_equal(actual: Step, expected: Step) -> None:
    assert_equal(actual, expected)
    for name, gradient in expected.gradients.items():
        if gradient is not None:
            torch.testing.assert_close(
                actual.gradients[name],
                gradient,
                msg=lambda text: f"{name}: {text}",  # noqa: B023
            )


# Tools. Each takes a class name, and raises AssertionError if the tool has another effect on it.


def forward_hook(name: str) -> None:
    module = make(name)
    module.register_forward_hook(lambda _, args, output: scaled(output, 2))
    # Twice the output has twice the gradient.
    assert_equal(step(name, module), step(name, make(name)), output=2.0, gradient=2.0)


class _DoublesInput(nn.Module):
    """A module whose first argument is doubled."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, first: Tensor, *args: Any, **options: Any) -> Any:
        return self.module(first * 2, *args, **options)


def _assert_doubles_input(name: str, module: nn.Module) -> None:
    reference = _DoublesInput(make(name))
    expected = step(name, reference)
    expected.gradients.clear()
    expected.gradients.update({key: p.grad for key, p in reference.module.named_parameters()})
    assert_all_equal(step(name, module), expected)


def forward_pre_hook(name: str) -> None:
    module = make(name)
    module.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    _assert_doubles_input(name, module)


def forward_pre_hook_with_keywords(name: str) -> None:
    module = make(name)
    module.register_forward_pre_hook(
        lambda _, args, options: ((args[0] * 2, *args[1:]), options), with_kwargs=True
    )
    _assert_doubles_input(name, module)


def forward_hook_of_all_modules(name: str) -> None:
    module = make(name)
    handle = every_module.register_module_forward_hook(
        lambda each, args, output: scaled(output, 2) if each is module else None
    )
    try:
        result = step(name, module)
    finally:
        handle.remove()
    assert_equal(result, step(name, make(name)), output=2.0, gradient=2.0)


def full_backward_hook_of_all_modules(name: str) -> None:
    module = make(name)
    handle = every_module.register_module_full_backward_hook(
        lambda each, inputs, outputs: _double(inputs) if each is module else None
    )
    try:
        result = step(name, module)
    finally:
        handle.remove()
    assert_equal(result, step(name, make(name)), gradient=2.0)


def _double(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple([None if gradient is None else gradient * 2 for gradient in gradients])


def state_dict_hooks(name: str) -> None:
    module, calls = make(name), []
    module.register_state_dict_pre_hook(lambda *_: calls.append("state_dict_pre"))
    module.register_state_dict_post_hook(lambda *_: calls.append("state_dict_post"))
    module.register_load_state_dict_pre_hook(lambda *_: calls.append("load_pre"))
    module.register_load_state_dict_post_hook(lambda *_: calls.append("load_post"))
    module.load_state_dict(module.state_dict())
    assert calls == ["state_dict_pre", "state_dict_post", "load_pre", "load_post"]


def child_forward_hook(name: str) -> None:
    for number in range(len(list(make(name).children()))):
        module, calls = make(name), []
        child = list(module.children())[number]
        child.register_forward_hook(lambda *args: calls.append(1))  # noqa: B023
        assert_all_equal(step(name, module), step(name, make(name)))
        assert calls, f"the hook of {type(child).__name__} did not run"


def full_backward_hook(name: str) -> None:
    module = make(name)
    module.register_full_backward_hook(lambda _, inputs, outputs: _double(inputs))
    assert_equal(step(name, module), step(name, make(name)), gradient=2.0)


def full_backward_pre_hook(name: str) -> None:
    module = make(name)
    module.register_full_backward_pre_hook(lambda _, outputs: _double(outputs))
    assert_equal(step(name, module), step(name, make(name)), gradient=2.0)


def tensor_hook(name: str) -> None:
    module, records = make(name), []
    for key, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, key=key: records.append(key))
    step(name, module)
    assert set(records) == {key for key, _ in module.named_parameters()}


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _with_doubled_parameters(name: str) -> nn.Module:
    module = make(name)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    return module


def parametrize_parameters(name: str) -> None:
    module = make(name)
    for owner, key in parameter_owners(module):
        parametrize.register_parametrization(owner, key, _Twice())
    result = step(name, module)
    assert_equal(result, step(name, _with_doubled_parameters(name)))
    assert all(gradient is not None for gradient in result.gradients.values())


def replace_parameters(name: str) -> None:
    module = make(name)
    step(name, module)
    for owner, key in parameter_owners(module):
        setattr(owner, key, nn.Parameter(getattr(owner, key).detach() * 2))
    assert_all_equal(step(name, module), step(name, _with_doubled_parameters(name)))


def swap_parameters(name: str) -> None:
    module = make(name)
    for parameter in list(module.parameters()):
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 2))
    assert_all_equal(step(name, module), step(name, _with_doubled_parameters(name)))


def _normalized(name: str, apply: Callable[[nn.Module, str], Any]) -> None:
    module, reference = make(name), make(name)
    for owner, key in parameter_owners(module, 2):
        apply(owner, key)
    module.eval()  # spectral_norm updates its vectors in training mode
    for (owner, key), (of_module, _) in zip(
        parameter_owners(reference, 2), _owners(module), strict=True
    ):
        with torch.no_grad():
            getattr(owner, key).copy_(getattr(of_module, key))
    actual = step(name, module)
    assert_equal(actual, step(name, reference.eval()))
    assert all(gradient is not None for gradient in actual.gradients.values())


def _owners(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [
        (owner, key)
        for owner in module.modules()
        if parametrize.is_parametrized(owner)
        for key in owner.parametrizations
    ]


def weight_norm(name: str) -> None:
    _normalized(name, parametrizations.weight_norm)


def spectral_norm(name: str) -> None:
    _normalized(name, parametrizations.spectral_norm)


def prune_parameters(name: str) -> None:
    module, reference = make(name), make(name)
    owners = parameter_owners(module)
    for owner, key in owners:
        prune.l1_unstructured(owner, key, 0.5)
    for (owner, key), (of_module, _) in zip(parameter_owners(reference), owners, strict=True):
        with torch.no_grad():
            getattr(owner, key).mul_(getattr(of_module, f"{key}_mask"))
    assert_equal(step(name, module), step(name, reference))


def extra_parameter(name: str) -> None:
    module = make(name)
    module.register_parameter("extra", nn.Parameter(torch.ones(3, device="cpu")))
    result = step(name, module)
    assert result.gradients.pop("extra") is None
    assert_all_equal(result, step(name, make(name)))


def extra_child(name: str) -> None:
    module = make(name)
    module.add_module("extra", nn.Linear(2, 2, device="cpu"))
    result = step(name, module)
    assert result.gradients.pop("extra.weight") is result.gradients.pop("extra.bias") is None
    assert_all_equal(result, step(name, make(name)))


class _Adapted(nn.Module):
    """A module whose output is multiplied by a trained scale."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base
        self.scale = nn.Parameter(torch.full((), 3.0, device="cpu"))

    def forward(self, *args: Any, **options: Any) -> Any:
        return scaled(self.base(*args, **options), self.scale)  # pyright: ignore[reportArgumentType]


def _check_replacement(name: str, replace: Callable[[nn.Module, str, nn.Module], None]) -> None:
    for key in [key for key, _ in make(name).named_children()]:
        module, reference = make(name), make(name)
        step(name, module)
        module.zero_grad()
        replace(module, key, _Adapted(getattr(module, key)))
        getattr(reference, key).register_forward_hook(lambda _, args, output: scaled(output, 3))
        actual = step(name, module)
        assert_equal(actual, step(name, reference))
        assert actual.gradients[f"{key}.scale"] is not None


def replace_child(name: str) -> None:
    _check_replacement(name, setattr)


def set_submodule(name: str) -> None:
    _check_replacement(name, lambda module, key, new: module.set_submodule(key, new))


def deep_copy(name: str) -> None:
    module = make(name)
    step(name, module)
    module.zero_grad()
    twin = copy.deepcopy(module)
    assert_all_equal(step(name, twin), step(name, module))
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in module.parameters()}


def pickle_round_trip(name: str) -> None:
    module, buffer = make(name), io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert_all_equal(step(name, torch.load(buffer, weights_only=False)), step(name, make(name)))


def _check_load(name: str, assign: bool) -> None:
    source = make(name)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.25)
    module = make(name)
    module.load_state_dict(source.state_dict(), strict=True, assign=assign)
    assert_all_equal(step(name, module), step(name, source))


def strict_load(name: str) -> None:
    _check_load(name, assign=False)


def load_with_assign(name: str) -> None:
    _check_load(name, assign=True)


def plain_load(name: str) -> None:
    """The state dict has the parameters alone, like a torch module's."""
    source = make(name)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(0.25)
    module = make(name)
    module.load_state_dict(
        {key: value.detach() for key, value in source.named_parameters()}, strict=True
    )
    assert_all_equal(step(name, module), step(name, source))


def to_empty(name: str) -> None:
    source = make(name)
    module = make(name).to("meta").to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    assert_all_equal(step(name, module), step(name, source))


def _check_conversion(name: str, module: nn.Module, dtype: torch.dtype) -> None:
    reference = make(name)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype))
    y = call(name, module, inputs(dtype))
    assert y.dtype == dtype
    expected = call(name, reference, inputs(dtype).float())
    torch.testing.assert_close(
        y.float(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max())
    )


def convert_dtype(name: str) -> None:
    _check_conversion(name, make(name).to(torch.bfloat16), torch.bfloat16)


def half(name: str) -> None:
    _check_conversion(name, make(name).half(), torch.float16)


def swap_tensors(name: str) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = make(name)
        step(name, module)
        module.zero_grad()
        identities = [id(parameter) for parameter in module.parameters()]
        module.to(torch.float64).to(torch.float32)
        assert identities == [id(parameter) for parameter in module.parameters()]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    assert_all_equal(step(name, module), step(name, make(name)))


def functional_call(name: str) -> None:
    module = make(name)
    values = dict(_with_doubled_parameters(name).named_parameters())
    result = step(name, module, lambda x: _functional(name, module, values, x))
    assert_equal(result, step(name, _with_doubled_parameters(name)))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(value.grad is not None for value in values.values())


class _Called(nn.Module):
    def __init__(self, name: str, module: nn.Module):
        super().__init__()
        self.name, self.module = name, module

    def forward(self, x: Tensor) -> Tensor:
        return call(self.name, self.module, x)


def _functional(name: str, module: nn.Module, values: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.func.functional_call(
        _Called(name, module), {f"module.{key}": value for key, value in values.items()}, (x,)
    )


def _check_checkpoint(name: str, use_reentrant: bool) -> None:
    module = make(name)
    result = step(
        name, module, lambda x: checkpoint(_Called(name, module), x, use_reentrant=use_reentrant)
    )
    assert_all_equal(result, step(name, make(name)))


def reentrant_checkpoint(name: str) -> None:
    _check_checkpoint(name, True)


def other_checkpoint(name: str) -> None:
    _check_checkpoint(name, False)


def own_checkpoint(name: str) -> None:
    """This package's checkpoint, whose two runs have the same random states."""
    module = make(name)
    result = step(name, module, lambda x: te.checkpoint(_Called(name, module), x))  # pyright: ignore
    assert_all_equal(result, step(name, make(name)))


def compiled_in_place(name: str) -> None:
    torch._dynamo.reset()  # all operations share `forward`, of which torch compiles at most 8 module types
    module, graphs = make(name), CompileCounterWithBackend("aot_eager")
    module.compile(backend=graphs)
    assert_all_equal(step(name, module), step(name, make(name)))
    assert graphs.frame_count > 0


def compiled(name: str) -> None:
    torch._dynamo.reset()
    module = make(name)
    run = torch.compile(_Called(name, module), backend="aot_eager")
    assert_all_equal(step(name, module, run), step(name, make(name)))


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group with one rank."""
    if dist.is_initialized():
        yield
        return
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "gloo", init_method=f"file://{file.name}.store", rank=0, world_size=1
        )
        yield
        dist.destroy_process_group()
        if os.path.exists(f"{file.name}.store"):
            os.remove(f"{file.name}.store")


def _check_wrapper(name: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(_Called(name, make(name)))
    x = inputs()
    y = wrapped(x)
    torch.manual_seed(2)
    y.backward(torch.randn_like(y))
    expected = step(name, make(name))
    torch.testing.assert_close(y.detach(), expected.output)
    torch.testing.assert_close(x.grad, expected.input_gradient)


def data_parallel(name: str) -> None:
    if list(make(name).parameters()):
        _check_wrapper(name, nn.parallel.DistributedDataParallel)


def fully_sharded_1(name: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if list(make(name).parameters()):
        _check_wrapper(
            name, lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu"))
        )


def fully_sharded_2(name: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    _check_wrapper(name, lambda module: fully_shard(module, mesh=mesh))


TOOLS = {
    tool.__name__: tool
    for tool in (
        forward_hook,
        forward_pre_hook,
        forward_pre_hook_with_keywords,
        forward_hook_of_all_modules,
        full_backward_hook,
        full_backward_pre_hook,
        full_backward_hook_of_all_modules,
        tensor_hook,
        state_dict_hooks,
        parametrize_parameters,
        weight_norm,
        spectral_norm,
        prune_parameters,
        replace_parameters,
        swap_parameters,
        extra_parameter,
        extra_child,
        deep_copy,
        pickle_round_trip,
        strict_load,
        load_with_assign,
        plain_load,
        to_empty,
        convert_dtype,
        half,
        swap_tensors,
        functional_call,
        reentrant_checkpoint,
        other_checkpoint,
        own_checkpoint,
        compiled,
        compiled_in_place,
        data_parallel,
        fully_sharded_1,
        fully_sharded_2,
    )
}
TOOLS_OF_CHILDREN = {
    tool.__name__: tool for tool in (child_forward_hook, replace_child, set_submodule)
}
# {(class, tool): why the tool has another effect}
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("ops.Sequential", "extra_child"): "a Sequential calls each child, as torch.nn.Sequential does",
}
# {tool: classes that stand for the others in fast tests}
SAMPLES = {
    "compiled": {
        *[kind.__name__ for kind in KINDS],
        "ops.Linear",
        "ops.GroupedLinear",
        "ops.Sequential",
    },
    "compiled_in_place": {"Linear", "ops.GELU"},
}


def _cases() -> list[Any]:
    pairs = [(name, tool) for tool in TOOLS for name in MODULES]
    pairs += [(name, tool) for tool in TOOLS_OF_CHILDREN for name in CONTAINERS]
    return [
        pytest.param(
            name, tool, marks=[pytest.mark.slow] if name not in SAMPLES.get(tool, {name}) else []
        )
        for name, tool in pairs
        if (name, tool) not in EXCEPTIONS
    ]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("name", "tool"), _cases(), ids=lambda value: value)
def test_a_tool_of_torch_has_its_documented_effect(name: str, tool: str):
    (TOOLS | TOOLS_OF_CHILDREN)[tool](name)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("name", "tool"), list(EXCEPTIONS))
def test_exceptions_are_needed(name: str, tool: str):
    with pytest.raises(Exception):  # noqa: B017
        TOOLS[tool](name)


def test_every_public_module_has_a_row():
    assert {*MODULES} | {*WITHOUT_CALLS} == {*PUBLIC}
    assert not {*MODULES} & {*WITHOUT_CALLS} and all(WITHOUT_CALLS.values())
    assert [name for name in MODULES if type(MODULES[name]()) is not PUBLIC[name]] == []
