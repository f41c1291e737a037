"""Print {layer and recipe: differences} between the steps of a pass and compiled passes, on a simulated GPU.

Every layer runs under every recipe; with and without cached weights if the argument is "all", otherwise in
turn. With a compute capability as the argument, such as "10.0", some layers run under its block-scaling
recipes. With "deferred", some layers cast columns in the backward pass.

Memory holds symbols instead of numbers. The output of a kernel or product is a symbol made from its name, its
scalars and the symbols that it reads. Two steps that produce the same symbols in results, gradients and
scaling states have launched the same kernels on the same inputs.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import host_calls
import pretended_gpu

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.common.dispatch import observing
from transformer_engine.common.kernels import launch as launches
from transformer_engine.pytorch.distributed import faults, operands
from transformer_engine.pytorch.functions import deferred_columns
from transformer_engine.pytorch.primitives.gemm import cublaslt_library, cublaslt_swizzled
from transformer_engine.pytorch.primitives.gemm.block_scales import block_scale_memory
from transformer_engine.pytorch.primitives.gemm.swizzle import swizzle_operand_scale
from transformer_engine.pytorch.tensor import current_scaling

LAYERS = {
    "linear": host_calls._linear,
    "linear_bias": host_calls._linear_bias,
    "layernorm_linear": host_calls._layernorm_linear,
    "layernorm_mlp": host_calls._mlp,
    "gelu_mlp": lambda: te.LayerNormMLP(512, 512, params_dtype=torch.bfloat16),
    "column_parallel": lambda: te.LayerNormLinear(512, 1024, parallel_mode="column", **_sharded()),
    "row_parallel": lambda: te.Linear(1024, 512, parallel_mode="row", bias=False, **_sharded()),
    "reduced": lambda: te.Linear(
        1024, 512, parallel_mode="row", bias=False, **_sharded(sequence_parallel=False)
    ),
    "parallel_mlp": lambda: te.LayerNormMLP(
        512, 1024, activation="swiglu", bias=False, set_parallel_mode=True, **_sharded()
    ),
    "column_bias": lambda: te.Linear(512, 1024, parallel_mode="column", **_sharded()),
    "overlapped_mlp": lambda: te.LayerNormMLP(
        512,
        1024,
        bias=False,
        set_parallel_mode=True,
        ub_overlap_ag=True,
        ub_overlap_rs=True,
        ub_bulk_dgrad=True,
        **_sharded(),
    ),
    "cached_mlp": lambda: te.LayerNormMLP(
        512,
        512,
        activation="swiglu",
        bias=False,
        cache_quantized_activation_input=True,
        params_dtype=torch.bfloat16,
    ),
    "biased_mlp": lambda: te.LayerNormMLP(512, 512, activation="relu", params_dtype=torch.bfloat16),
}
# Layers and recipes on GPUs whose tensor cores read block scales.
SCALED_LAYERS = (
    "linear_bias",
    "layernorm_linear",
    "layernorm_mlp",
    "gelu_mlp",
    "column_parallel",
    "row_parallel",
    "parallel_mlp",
    "overlapped_mlp",
)
SCALED_RECIPES = {
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
COMPILED = 4  # a signature's second call compiles a forward pass, and the second backward after it a backward pass

memory: dict[Any, Any] = {}  # by address
inputs: list[weakref.ref[torch.Tensor]] = []  # in all steps
wait_for_shards, send_shard = operands._Received.wait, operands._start_byte_gather


def read(address: int | None) -> Any:
    return None if address is None else memory.get(address, "?")


def _sharded(**options: Any) -> dict[str, Any]:
    """Options for a layer that two ranks share."""
    shared = {"tp_group": dist.group.WORLD, "tp_size": 2, "sequence_parallel": True}
    return {**shared, "params_dtype": torch.bfloat16, **options}


class Done:
    """Handle of a completed collective."""

    def wait(self) -> None:
        pass


def communicate(name: str) -> Any:
    """A collective that computes symbols."""

    def collective(result: torch.Tensor, sent: Any = None, *_: Any, **__: Any) -> Done:
        source = sent if isinstance(sent, torch.Tensor) else result
        memory[result.data_ptr()] = hash((name, read(source.data_ptr())))
        return Done()

    return collective


def name_copy(operation: str, result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Result of a torch operation; a copy gets a symbol made from the operation and the source."""
    if result.data_ptr() != source.data_ptr():
        memory[result.data_ptr()] = hash((operation, read(source.data_ptr())))
    return result


def scales_in_library_layout(operand: Any, shape: Any) -> torch.Tensor:
    """Block scales in cuBLASLt's layout."""
    return name_copy("layout", block_scale_memory(operand, shape), operand.scale)


def scales_in_tiles(operand: Any) -> torch.Tensor:
    """Swizzled scales, which are a copy if they were row-major or float32."""
    return name_copy("swizzled", swizzle_operand_scale(operand), operand.scale)


def scalars_of_levels(a: Any, b: Any, accumulates: bool) -> torch.Tensor:
    """alpha and beta in memory, a symbol for the second-level maxima."""
    scalars = torch.zeros(2)
    memory[scalars.data_ptr()] = hash(
        ("alpha", read(a.amax.data_ptr()), read(b.amax.data_ptr()), accumulates)
    )
    return scalars


def random_numbers(*shape: Any, **options: Any) -> torch.Tensor:
    """A tensor whose symbol counts the draws in a step."""
    drawn = torch.zeros(*shape, **options)
    memory["draws"] = memory.get("draws", 0) + 1
    memory[drawn.data_ptr()] = hash(("random", memory["draws"]))
    return drawn


def maxima_of_ranks(group: Any, elements: int, *maxima: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Maxima over a group's ranks, reduced by one collective."""
    joined = tuple(read(maximum.data_ptr()) for maximum in maxima)
    reduced = tuple([torch.empty(1) for _ in range(elements)])
    for number, maximum in enumerate(reduced):
        memory[maximum.data_ptr()] = hash(("maximum", joined, number))
    return reduced


def sent_shard(part: torch.Tensor, group: Any) -> Any:
    """Start gathering codes or scales, which are copied if they are not contiguous."""
    return send_shard(name_copy("contiguous", part.contiguous(), part), group)


def wait_and_name_shards(received: operands._Received, ranks: int, axis: int) -> torch.Tensor:
    """Wait for gathered codes or scales, which are copied if they are joined along the last axis."""
    return name_copy("joined", wait_for_shards(received, ranks, axis), received.bytes)


class Kernel:
    """A launcher that computes symbols."""

    def __init__(self, launch: Any):
        self.launch = launch

    def __call__(self, *arguments: Any) -> None:
        launch = self.launch
        count = launch.inputs + len(launch.outputs)
        pointers = arguments[len(arguments) - len(launch.scalars + launch.constants) - count :][
            :count
        ]
        inputs, outputs = pointers[: launch.inputs], pointers[launch.inputs :]
        name = launch.kernel.fn.__name__
        result = hash(
            (
                name,
                launch.grid,
                launch.scalars,
                tuple(map(str, launch.constants)),
                *map(read, inputs),
            )
        )
        for number, address in enumerate((*outputs, *[inputs[index] for index in launch.in_place])):
            if address is not None:
                memory[address] = hash((result, number))


class Names(dict):
    """Number each name by its first occurrence."""

    def __missing__(self, name: str) -> int:
        return self.setdefault(name, len(self))

    def __getattr__(self, name: str) -> int:
        return self[name]


class Library:
    """cuBLASLt's two calls on symbols."""

    def __init__(self) -> None:
        self.attributes: dict[tuple[int, int], int] = {}
        self.names = Names()

    def set_attribute(self, operation: int, attribute: int, address: int, size: int) -> None:
        if size == 8:
            self.attributes[operation, attribute] = ctypes.c_uint64.from_address(address).value

    def matmul(
        self, handle, operation, alpha, a, of_a, b, of_b, beta, c, of_c, d, of_d, *_
    ) -> None:
        pointers = {name: at for (of, name), at in self.attributes.items() if of == operation}
        read_too = tuple([(name, read(at)) for name, at in sorted(pointers.items())])
        memory[d] = hash(("product", read(a), read(b), memory.get(alpha), read_too))
        aux = pointers.get(self.names["EPILOGUE_AUX_POINTER"])
        if aux is not None:
            memory[aux] = hash(("aux", memory[d], read(aux)))


def pretend(capability: tuple[int, int] = pretended_gpu.HOPPER) -> None:
    pretended_gpu.pretend(capability)
    cublaslt_swizzled._scalars = scalars_of_levels
    pretended_gpu.everywhere("swizzle_operand_scale", scales_in_tiles)
    torch.rand = random_numbers
    current_scaling._all_reduce_joined = maxima_of_ranks
    pretended_gpu.everywhere("block_scale_memory", scales_in_library_layout)
    operands._Received.wait, operands._start_byte_gather = wait_and_name_shards, sent_shard
    middle = (0, 0, False, False, None, None, None, None, None, None)

    def compiled(launch: Any, tensors: Any) -> Any:
        arguments = (*launch.scalars, *launch.constants)
        return launches.Handle(Kernel(launch), launch.grid, lambda device: 0, middle, arguments)

    launches._compile = compiled
    fake, library = cublaslt_library.bindings(), Library()
    numbers = itertools.count(1)
    fake.MatmulDescAttribute = library.names
    fake.matmul_desc_create = lambda *_: next(numbers)
    fake.matmul_desc_set_attribute, fake.matmul = library.set_attribute, library.matmul
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    faults.check_step = lambda *_: None  # pyright: ignore  # one rank has nothing to compare with
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, name, communicate(name))


def name_inputs(module: Any, x: torch.Tensor) -> dict[str, Any]:
    """Assign symbols to the input, parameters, cached weights and scaling states; return the states."""
    states = {
        f"{key}.{name}": getattr(state, name)
        for key, state in module.numerics.meta.items()
        if hasattr(state, "amax_history")
        for name in ("scale_in_place", "amax_history")
    }
    saved = {
        f"{name} {number}": part
        for name, cached in module.numerics.workspaces.items()
        for number, part in enumerate(cached.flatten()[0])
        if part is not None
    }
    memory.clear()
    for name, tensor in {**saved, "x": x, **states, **dict(module.named_parameters())}.items():
        memory[tensor.data_ptr()] = name
    for parameter in module.parameters():
        parameter.grad = None
    return states


def symbols(
    module: Any, x: torch.Tensor, y: torch.Tensor, states: dict[str, Any]
) -> dict[str, Any]:
    """Run the backward pass from y; return the symbols for results, gradients and states."""
    if y.requires_grad:
        dy = torch.zeros_like(y)
        memory[dy.data_ptr()] = "dy"
        y.backward(dy)
    left = {"y": y, "dx": x.grad, **states}
    left |= {f"d{name}": parameter.grad for name, parameter in module.named_parameters()}
    return {
        name: None if tensor is None else read(tensor.data_ptr()) for name, tensor in left.items()
    }


def step(module: Any, recipe: Any, first: bool | None) -> dict[str, Any]:
    """Symbols for results, gradients and states after a step; the `first` microbatch caches weights."""
    x = torch.zeros(128, 1, 512, dtype=torch.bfloat16, requires_grad=True)
    inputs.append(weakref.ref(x))
    states = name_inputs(module, x)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, is_first_microbatch=first)
    return symbols(module, x, y, states)


def compiled_passes(module: Any) -> list[int]:
    """Number of compiled signatures per pass of a layer."""
    specs = [spec for spec in module._specs.values() if spec.compiled is not None]
    return [
        sum(kind.generated is not None for kind in compiled.kinds.values())
        for spec in specs
        for compiled in spec.compiled.passes
    ]


def reasons(module: Any) -> set[str]:
    """Reasons why a layer's passes are not compiled."""
    specs = [spec for spec in module._specs.values() if spec.compiled is not None]
    kinds = [kind for spec in specs for run in spec.compiled.passes for kind in run.kinds.values()]
    return {kind.reason for kind in kinds if kind.reason is not None}


def differences(name: str, kind: str, cached: bool) -> str | None:
    module, recipe = LAYERS[name](), (host_calls.RECIPES | SCALED_RECIPES)[kind]()
    if cached:
        step(module, recipe, True)
    steps = [step(module, recipe, False if cached else None) for _ in range(COMPILED + 3)]
    if compiled_passes(module)[-2:] != [1, 1]:  # in the latest spec
        return f"compiled: {compiled_passes(module)}, {reasons(module)}"
    expected = steps[1]  # the first step has no states yet
    if "?" in expected.values():
        return f"{expected}"
    for number, actual in enumerate(steps[2:], 2):
        unlike = [part for part in expected if actual[part] != expected[part]]
        if unlike:
            return f"step {number}: {unlike}"
    return None


def find_missed_setting() -> str | None:
    """How compiled passes miss a changed quantizer setting; None if they follow it."""
    module, recipe = LAYERS["linear"](), host_calls.RECIPES["current"]()
    before = [step(module, recipe, None) for _ in range(COMPILED + 3)][-1]
    module.quantizers["scaling_fwd"][0].force_pow_2_scales = True
    results = [step(module, recipe, None) for _ in range(COMPILED + 3)]
    with observing(lambda operation, request: None):  # runs the steps
        expected = step(module, recipe, None)
    if expected == before or compiled_passes(module) != [2, 2]:
        return f"the setting changes nothing, or nothing is compiled: {compiled_passes(module)}"
    return (
        None
        if all(result == expected for result in results)
        else "a pass compiled before the change"
    )


def find_live_inputs(name: str, kind: str) -> str | None:
    """Steps whose inputs compiled passes keep alive; None if all are freed."""
    module, recipe = LAYERS[name](), host_calls.RECIPES[kind]()
    inputs.clear()
    for _ in range(COMPILED + 3):
        step(module, recipe, None)
    gc.collect()
    saved = [number for number, x in enumerate(inputs) if x() is not None]
    if compiled_passes(module)[-2:] != [1, 1]:
        return f"compiled: {compiled_passes(module)}"
    return f"inputs of steps {saved}" if saved else None


def results_of_hopper(every: bool) -> dict[str, str | None]:
    pretend(pretended_gpu.HOPPER)
    cases = [
        (name, kind, cached)
        for row, name in enumerate(LAYERS)
        for column, kind in enumerate(host_calls.RECIPES)
        for cached in (False, True)
        if (not cached if kind == "none" else every or cached == bool((row + column) % 2))
    ]
    results = {"/".join(map(str, case)): differences(*case) for case in cases}
    results["a quantizer's setting"] = find_missed_setting()
    return results | {
        f"kept inputs/{name}": find_live_inputs(name, "block")
        for name in ("linear", "parallel_mlp")
    }


def results_of_block_scales(architecture: str) -> dict[str, str | None]:
    major, minor = map(int, architecture.split("."))
    pretend((major, minor))
    # Only casts on a GPU write scales in the order of products.
    torch.Tensor.is_cuda = property(lambda tensor: True)  # pyright: ignore[reportAttributeAccessIssue]
    return {
        f"{name}/{kind}/{cached}": differences(name, kind, cached)
        for row, name in enumerate(SCALED_LAYERS)
        for column, kind in enumerate(SCALED_RECIPES)
        for cached in (bool((row + column) % 2),)
    }


def results_of_deferred_columns() -> dict[str, str | None]:
    """Differences if the backward pass casts columns of weights and of an input that is saved elsewhere."""
    deferred_columns._FEWEST_ROWS = deferred_columns._FEWEST_ELEMENTS = 0
    pretend(pretended_gpu.HOPPER)
    LAYERS["shared_input"] = _shared_input
    names = ("linear_bias", "layernorm_linear", "layernorm_mlp", "gelu_mlp", "shared_input")
    results = {
        f"{name}/{kind}": differences(name, kind, False)
        for name in names
        for kind in ("delayed", "current")
    }
    module, recipe = _shared_input(), host_calls.RECIPES["current"]()
    step(module, recipe, None)
    modes = {(spec.weight_columns, spec.input_columns) for spec in module._specs.values()}
    return results | {"modes": None if modes == {("recomputed", "recomputed")} else f"{modes}"}


def _shared_input() -> Any:
    module = host_calls._linear()
    module._config = replace(module._config, _shares_input=True)  # pyright: ignore
    return module


RESULTS = {
    "some": lambda: results_of_hopper(False),
    "all": lambda: results_of_hopper(True),
    "deferred": results_of_deferred_columns,
}

if __name__ == "__main__":
    argument = sys.argv[1]
    print(
        json.dumps(
            RESULTS[argument]() if argument in RESULTS else results_of_block_scales(argument)
        )
    )
