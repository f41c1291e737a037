"""torch.compile and CUDA graphs on chains: values and gradients equal eager calls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from tests.support.layers import RECIPES
from tests.support.recorder import RerunRecorder
from tests.support.tolerances import relative_error
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.graphs import automatic, build

pytestmark = pytest.mark.any_device

PLACE = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": torch.float32}


def chain() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.MakeExtraOutput(),
        ops.LayerNorm(64, **PLACE),
        ops.Linear(64, 128, **PLACE),
        ops.GELU(),
        ops.Linear(128, 64, **PLACE),
    )


def steps(run: Any, module: Any, recipe: Any, count: int = 2) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for number in range(count):
        module.zero_grad()
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(32, 64, generator=generator).to(PLACE["device"]).requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y, extra = run(x)
        (y.square().mean() + extra.mean()).backward()
        results += [y.detach().clone(), x.grad, *[p.grad.clone() for p in module.parameters()]]  # pyright: ignore
    return results


# tests/ops/test_chains.py always compares a compiled chain with eager mode, bit for bit.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "delayed", "current", "mxfp8"])
def test_a_chain_compiles_without_graph_breaks(name, emulated):
    torch._dynamo.reset()
    eager, module = chain(), chain()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    expected = steps(eager, eager, RECIPES[name])
    actual = steps(compiled, module, RECIPES[name])
    for ours, reference in zip(actual, expected, strict=True):
        assert relative_error(ours, reference) <= 1e-5


def test_a_compiled_activation_saves_the_same_codes_as_eager_mode():
    torch._dynamo.reset()
    gelu = ops.Sequential(ops.GELU(cache_quantized_input=True), ops.ConstantScale(2.0))
    records: list[torch.Tensor] = []
    for run in (gelu, torch.compile(gelu, fullgraph=True, backend="aot_eager")):
        x = torch.linspace(-3, 3, 256, device=PLACE["device"]).view(4, 64).requires_grad_()
        y = run(x)
        y.sum().backward()
        assert x.grad is not None
        records += [y.detach(), x.grad]
    assert torch.equal(records[0], records[2]) and torch.equal(records[1], records[3])
    exact = torch.linspace(-3, 3, 256, device=PLACE["device"]).view(4, 64).requires_grad_()
    (2 * torch.nn.functional.gelu(exact, approximate="tanh")).sum().backward()
    assert 0 < relative_error(records[3], exact.grad) <= 2**-4  # the saved input's rounding


@pytest.mark.parametrize("first", [ops.Linear, ops.RMSNorm])
def test_a_compiled_chain_has_gradients_for_its_result_as_an_extra_output(first):
    torch._dynamo.reset()
    sizes = (64, 64) if first is ops.Linear else (64,)
    module = ops.Sequential(first(*sizes, **PLACE), ops.MakeExtraOutput())
    gradients: list[list[torch.Tensor]] = []
    for run in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        x = torch.linspace(-1, 2, 32 * 64, device=PLACE["device"]).view(32, 64).requires_grad_()
        y, extra = run(x)
        (y.square().sum() + (3 * extra).sum()).backward()
        assert x.grad is not None
        gradients.append([x.grad, *[p.grad.clone() for p in module.parameters()]])  # pyright: ignore
    for ours, eager in zip(gradients[1], gradients[0], strict=True):
        assert eager.norm() > 0 and relative_error(ours, eager) <= 1e-6


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_a_compiled_backward_pass_equals_one_with_a_contiguous_gradient(layout):
    torch._dynamo.reset()
    torch.manual_seed(0)
    norms = ops.Sequential(
        ops.RMSNorm(32, **PLACE), ops.RMSNorm(32, **PLACE), ops.L2Normalization()
    )
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(32, 32, generator=generator).to(PLACE["device"]) for _ in range(2))
    dy = dy.t() if layout == "transposed" else dy[:1].expand(32, 32)
    gradients: list[list[torch.Tensor]] = []
    compiled = torch.compile(norms, fullgraph=True, backend="aot_eager")
    for run, grad in ((compiled, dy), (norms, dy.contiguous()), (norms, dy)):
        norms.zero_grad()
        leaf = x.clone().requires_grad_()
        run(leaf).backward(grad)
        assert leaf.grad is not None
        gradients.append([leaf.grad, *[p.grad.clone() for p in norms.parameters()]])  # pyright: ignore
    traced, contiguous, strided = gradients
    for ours, reference, other in zip(traced, contiguous, strided, strict=True):
        assert torch.equal(ours, reference)
        assert relative_error(ours, other) <= 1e-6


def experts() -> ops.Sequential:
    """Permuted tokens, GroupedLinear, scaled SwiGLU, GroupedLinear; some parameters are frozen."""
    torch.manual_seed(0)
    chain = ops.Sequential(
        ops.GroupedLinear(3, 64, 128, bias=False, **PLACE),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 64, 64, scale_bias=True, **PLACE),
    )
    for parameter in (*chain[0].parameters(), *list(chain[2].parameters())[1::2]):
        parameter.requires_grad_(parameter.dim() == 1)
    return chain


def expert_steps(run: Any, module: Any, recipe: Any) -> list[torch.Tensor | None]:
    """Results and gradients from two steps with different token counts, and the scaling states."""
    records: list[torch.Tensor | None] = []
    for rows in ([32, 0, 64], [64, 32, 96]):
        splits = torch.tensor(rows, device=PLACE["device"])
        generator = torch.Generator().manual_seed(sum(rows))
        x, scales, of_biases = (
            torch.rand(sum(rows), *size, generator=generator).to(PLACE["device"]).requires_grad_()
            for size in ((64,), (), ())
        )
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = run(x, splits, scales, splits, of_biases)
        y.square().sum().backward()
        records += [y.detach().clone(), x.grad, scales.grad, of_biases.grad]
        records += [parameter.grad for parameter in module.parameters()]
        module.zero_grad()
    for op in module:
        records += [
            part.clone()
            for states in op._save_fp8_metas().values()
            for state in states
            for part in state
        ]
    return records


@pytest.mark.parametrize(
    "name",
    [
        "delayed",
        *[
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("none", "current", "mxfp8", "nvfp4")
        ],
    ],
)
def test_experts_with_a_row_count_tensor_compile_in_one_graph(name, emulated):
    torch._dynamo.reset()
    eager, module = experts(), experts()
    for chain_of_experts in (eager, module):  # the first call of a chain builds its fusions
        expert_steps(chain_of_experts, chain_of_experts, RECIPES[name])
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=graphs, dynamic=True)
    expected = expert_steps(eager, eager, RECIPES[name])
    actual = expert_steps(compiled, module, RECIPES[name])
    assert graphs.frame_count == 1
    assert len(expected) > 20 and any(part is None for part in expected)
    for ours, reference in zip(actual, expected, strict=True):
        assert (ours is None) == (reference is None)
        assert ours is None or reference is None or torch.equal(ours, reference)


def test_delayed_weight_gradients_of_experts_need_eager_mode():
    torch._dynamo.reset()
    layer = ops.GroupedLinear(2, 16, 16, delay_wgrad_compute=True, **PLACE)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    splits = torch.tensor([1, 2], device=PLACE["device"])
    with pytest.raises(
        Exception, match=r"delayed weight gradients in a compiled graph .* eager mode"
    ):
        compiled(torch.randn(3, 16, device=PLACE["device"]), splits)


@pytest.mark.parametrize("name", ["none", "delayed", "current", "mxfp8"])
def test_a_replayed_graph_equals_eager_calls(name, emulated, monkeypatch):
    rerun = RerunRecorder()
    monkeypatch.setattr(build, "graph_recorder", lambda pool=None: rerun)
    monkeypatch.setattr(automatic, "records", lambda device: True)
    recipe = RECIPES[name]
    eager, module = chain(), chain()
    x = torch.randn(32, 64, device=PLACE["device"], requires_grad=True)
    te.make_graphed_callables(module, (x,), enabled=recipe is not None, recipe=recipe)
    expected = steps(eager, eager, recipe, 3)
    actual = steps(module, module, recipe, 3)
    assert rerun.recordings
    for ours, reference in zip(actual, expected, strict=True):
        assert torch.equal(ours, reference)


class Offset(ops.BasicOperation):
    """A user's operation, which allocates its offset before its first forward pass."""

    allocations = 0

    def pre_first_fuser_forward(self) -> None:
        self.allocations += 1
        self.offset = torch.full((64,), float(self.allocations), device=PLACE["device"])

    def op_forward(self, ctx, input_, **options):
        return input_ + self.offset

    def op_backward(self, ctx, grad_output):
        return grad_output, ()


CHECKPOINTED = {
    "chain": lambda: ops.Sequential(
        ops.LayerNorm(64, **PLACE), ops.Linear(64, 64, **PLACE), ops.GELU()
    ),
    "operation": lambda: ops.Linear(64, 64, **PLACE),
    "parts": lambda: ops.Sequential(
        ops.Linear(64, 64, **PLACE), torch.nn.ReLU(), ops.Bias(64, **PLACE)
    ),
    "user": lambda: ops.Sequential(Offset(), ops.Linear(64, 64, **PLACE)),
    "module": lambda: te.LayerNormLinear(
        64, 64, params_dtype=torch.float32, device=PLACE["device"]
    ),
}


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("name", list(CHECKPOINTED))
def test_a_compiled_checkpoint_has_the_bits_of_eager_mode(name: str, called_before: bool):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = CHECKPOINTED[name]()
    reference = copy.deepcopy(module)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(PLACE["device"])
    if called_before:
        with torch.no_grad():  # the chain caches fusions without a backward pass
            module(x)

    def run(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, y, use_reentrant=False)  # pyright: ignore[reportReturnType]

    records: list[list[torch.Tensor]] = []
    for call, owner in (
        (torch.compile(run, backend="aot_eager", fullgraph=True), module),
        (reference, reference),
    ):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        assert leaf.grad is not None
        records.append(
            [y.detach(), leaf.grad, *[p.grad for p in owner.parameters() if p.grad is not None]]
        )
    assert len(records[0]) > 2
    for compiled, eager in zip(*records, strict=True):
        assert torch.equal(compiled, eager)


def test_tracing_runs_a_users_first_forward_method_once():
    torch._dynamo.reset()
    module = ops.Sequential(Offset(), ops.ReLU())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 64, device=PLACE["device"])
    outputs = [run(x) for run in (compiled, compiled, module)]
    assert module[0].allocations == 1
    assert all(torch.equal(y, (x + 1).relu()) for y in outputs)


class Square(ops.BasicOperation):
    """A user's operation that saves its input, which is the result of the operation before it."""

    def op_forward(self, ctx, input_, **options):
        ctx.save_for_backward(input_)
        return input_ * input_

    def op_backward(self, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 2 * x * grad_output, ()


SAVING = {
    "after a product": lambda: ops.Sequential(ops.Linear(64, 64, **PLACE), Square()),
    "before a product": lambda: ops.Sequential(Square(), ops.Linear(64, 64, **PLACE)),
    "after an activation": lambda: ops.Sequential(ops.Bias(64, **PLACE), ops.GELU(), Square()),
    "twice": lambda: ops.Sequential(ops.Bias(64, **PLACE), Square(), Square()),
}


@pytest.mark.parametrize("name", list(SAVING))
def test_a_compiled_user_operation_may_save_its_input(name: str):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = SAVING[name]()
    reference = copy.deepcopy(module)
    x = torch.randn(32, 64, device=PLACE["device"])
    records: list[list[torch.Tensor]] = []
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for call, owner in ((compiled, module), (reference, reference)):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.sum().backward()
        assert leaf.grad is not None
        records.append(
            [y.detach(), leaf.grad, *[p.grad for p in owner.parameters() if p.grad is not None]]
        )
    assert len(records[0]) > 2
    for actual, expected in zip(*records, strict=True):
        assert torch.equal(actual, expected)
