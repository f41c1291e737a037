"""Random operation chains: fused and unfused chains equal float32 PyTorch, values and every gradient."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.torch_version import TorchVersion

import transformer_engine.pytorch as te
from tests.support.chains import GATED, RECIPES, build, chains, run_plain
from tests.support.tolerances import UNIT, relative_error
from transformer_engine.pytorch.ops.chain import unfused
from transformer_engine.pytorch.quantization import emulate
from transformer_engine.pytorch.tensor import QuantizedTensor

ROWS = (4, 32)  # 128 rows, which every format supports
# Chain error against float32, relative in the Euclidean norm. A quantized product of random matrices is off
# by half a unit in its format; up to seven of them follow one another, and a norm may enlarge an error.
EXACT, FP8, FP4 = 2e-5, 2 * UNIT[torch.float8_e4m3fn], 0.75


def inputs(chain: Any, extra: list[str], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A chain's main input and extra inputs."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*ROWS, 64, generator=generator).to(device)
    outputs = []
    shape = shapes(chain, x)
    for kind, index in zip(extra, shape, strict=True):
        size = index if kind.startswith("residual") else index[:-1]
        outputs.append(torch.randn(size, generator=generator).to(device))
    return x, outputs


def shapes(chain: Any, x: Tensor) -> list[Any]:
    """Main-input shapes for the operations that have an extra input."""
    results = []
    shape = list(x.shape)
    for op in chain:
        if op.is_fused_op or isinstance(op, te.ops.BasicLinear):
            shape[-1] = op.out_features
        elif isinstance(op, te.ops.Reshape):
            shape = list(torch.empty(shape, device="meta").reshape(op._shape).shape)
        elif op.num_extra_inputs:
            results.append(tuple(shape))
        if type(op) in GATED:
            shape[-1] //= 2
    return results


def gradients(
    run: Any, chain: Any, x: Tensor, extra: list[Tensor], context: Any
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and gradients; the loss is a sum over the outputs with fixed weights."""
    for parameter in chain.parameters():
        parameter.grad = None
    leaves = [x.clone().requires_grad_(), *[tensor.clone().requires_grad_() for tensor in extra]]
    with context:
        # not leaves: an operation may write an extra input in place
        result = run(*[leaf * 1 for leaf in leaves])
    outputs = list(result) if isinstance(result, tuple) else [result]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(y.shape, generator=generator).to(x.device) for y in outputs]
    values = [dequantized(y) for y in outputs]
    loss = sum([(y * w).sum() for y, w in zip(values, weights, strict=True)])
    loss.backward()
    grads = [*[leaf.grad for leaf in leaves], *[parameter.grad for parameter in chain.parameters()]]
    return [y.detach().clone() for y in values], [
        None if g is None else dequantized(g) for g in grads
    ]


def run_alone(chain: Any, x: Tensor, *extra: Tensor) -> Any:
    """Run each operation separately."""
    argument, outputs = iter(extra), []
    for op in chain:
        numbers = [member.num_extra_inputs for member in op.basic_operations()]
        x = op(x, *[next(argument) for _ in range(sum(numbers))])
        if isinstance(x, tuple):
            x, *rest = x
            outputs += rest
    return (x, *outputs) if outputs else x


def dequantized(tensor: Tensor) -> Tensor:
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def compare(actual: Any, expected: Any, bound: float, names: str) -> None:
    for ours, reference in zip(actual, expected, strict=True):
        if ours is None or reference is None:
            # An extra input gets no gradient if no later operation depends on its operation.
            assert ours is None or ours.abs().max() == 0
            assert reference is None or reference.abs().max() == 0
            continue
        assert ours.shape == reference.shape, names
        if bound == 0.0:
            assert torch.equal(ours, reference), f"{names}: {relative_error(ours, reference):.2e}"
        elif reference.norm() < 1e-4 * max(1.0, reference.numel() ** 0.5):
            assert (ours - reference).norm() <= max(bound, 1e-3) * reference.numel() ** 0.5, names
        else:
            assert relative_error(ours, reference) <= bound, (
                f"{names}: {relative_error(ours, reference):.2e} > {bound}"
            )


def check(described: list[Any], name: str, device: torch.device) -> None:
    recipe = RECIPES[name]
    chain, kinds, _ = build(described, device, torch.float32)
    if not len(chain):
        return
    x, extra = inputs(chain, kinds, device)

    def autocast() -> Any:
        return te.autocast(enabled=recipe is not None, recipe=recipe)

    with emulate():
        te.fp8.FP8GlobalStateManager.reset()
        if name == "delayed":
            for _ in range(2):  # histories for both directions
                gradients(chain, chain, x, extra, autocast())
            states = [
                op._save_fp8_metas() for group in chain._module_groups for op in group._basic_ops
            ]
        fused = gradients(chain, chain, x, extra, autocast())
        if name == "delayed":
            every = [op for group in chain._module_groups for op in group._basic_ops]
            for op, state in zip(every, states, strict=True):
                op._load_fp8_metas(state)
        alone = gradients(lambda *args: run_alone(chain, *args), chain, x, extra, autocast())
        if name == "delayed":
            for op, state in zip(every, states, strict=True):
                op._load_fp8_metas(state)
        with unfused():
            separate = gradients(chain, chain, x, extra, autocast())
    exact = gradients(lambda *args: run_plain(chain, *args), chain, x, extra, nullcontext())
    quantizing = any(type(op).__name__ in ("Linear", "BasicLinear", "Quantize") for op in chain)
    lossy = name != "none" and quantizing
    unit = FP4 if name == "nvfp4" else FP8
    text = f"{name}: {described}"
    # A GPU adds a bias in a product's epilogue before the result is rounded.
    bound = 0.0 if device.type == "cpu" else unit / 4 if lossy else EXACT
    for rest, what in ((separate, "unfused steps"), (alone, "operations one by one")):
        compare(fused[0], rest[0], bound, f"{text} outputs, fused against {what}")
        compare(fused[1], rest[1], bound, f"{text} gradients, fused against {what}")
    compare(fused[0], exact[0], unit if lossy else EXACT, f"{text} outputs against float32")
    compare(fused[1], exact[1], 2 * unit if lossy else EXACT, f"{text} gradients against float32")


def check_compiled(described: list[Any], name: str, backend: str) -> None:
    """Compare a compiled with an eager chain: outputs and gradients over several steps, scaling states."""
    recipe, device = RECIPES[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chains_of_modes = [build(described, device, torch.float32) for _ in range(2)]
    kinds = chains_of_modes[0][1]
    if not len(chains_of_modes[0][0]):
        return
    chains_of_modes[1][0].load_state_dict(chains_of_modes[0][0].state_dict())
    x, extra = inputs(chains_of_modes[0][0], kinds, device)
    records: list[Any] = []
    with emulate():
        for compiles, (chain, _, _) in enumerate(chains_of_modes):
            te.fp8.FP8GlobalStateManager.reset()
            torch._dynamo.reset()
            run = (
                torch.compile(chain, fullgraph=True, backend=backend, dynamic=False)
                if compiles
                else chain
            )
            for _ in range(3 if name == "delayed" else 1):
                context = te.autocast(enabled=recipe is not None, recipe=recipe)
                records += gradients(run, chain, x, extra, context)
            every = [op for module in chain for op in module.basic_operations()]
            metas = [op._save_fp8_metas() for op in every]
            records.append(
                [
                    part
                    for meta in metas
                    for states in meta.values()
                    for state in states
                    for part in state
                ]
            )
    count = len(records) // 2
    # Inductor's fused loops keep intermediate results in registers.
    bound = (
        0.0
        if backend == "aot_eager"
        else EXACT
        if name == "none"
        else FP4
        if name == "nvfp4"
        else FP8
    )
    for ours, reference in zip(records[count:], records[:count], strict=True):
        compare(ours, reference, bound, f"{name}: {described}, {backend} against eager mode")


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="torch 2.11 does not trace a copy of a quantizer",
)
@pytest.mark.parametrize(
    ("name", "described"),
    [
        (
            "mxfp8",
            [("make", 1), ("norm", 0), ("quantize", 5), ("linear", 3), ("gated", 6), ("bias", 1)],
        ),
        pytest.param(
            "current",
            [("make", 1), ("norm", 0), ("quantize", 5), ("linear", 3), ("gated", 6), ("bias", 1)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "delayed",
            [("add", 0), ("linear", 1), ("scaled", 6), ("quantize", 2), ("basic_linear", 0)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_compiled_chain_is_bitwise_equal_to_eager_mode(name, described):
    check_compiled(described, name, "aot_eager")


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="torch 2.11 does not trace a copy of a quantizer",
)
@pytest.mark.slow
@settings(
    max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(chains, st.sampled_from(sorted(RECIPES)))
def test_random_compiled_chains_are_bitwise_equal_to_eager_mode(described, name):
    check_compiled(described, name, "aot_eager")


@pytest.mark.slow
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(chains, st.sampled_from(sorted(RECIPES)))
def test_chains_compiled_by_inductor_equal_eager_mode(described, name):
    check_compiled(described, name, "inductor")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(chains, st.sampled_from(sorted(RECIPES)))
def test_chains_equal_unfused_chains_and_plain_pytorch(described, name):
    check(described, name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.slow
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains, st.sampled_from(sorted(RECIPES)))
def test_more_chains_equal_unfused_chains_and_plain_pytorch(described, name):
    check(described, name, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
