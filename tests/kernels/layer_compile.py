"""Compile all launches in layers' training steps for GPUs in the hardware table; print JSON lines.

    PYTHONPATH=. python -m tests.kernels.layer_compile 8.9 [--sample] [--part 0/2]

Each line is a title with facts: constants, tensor-core and cast instructions, registers, stack, shared
and tensor memory. `tests.primitives.hardware_layers` records the launches on the simulated GPU: with all libraries,
without, and with the Triton backends for products and attention forced; `cast_shapes` records casts for
matrices with other sizes. --sample compiles one launch per kernel, operand type and tile type.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.kernels import cast_shapes
from tests.primitives import hardware_layers
from tests.primitives.scaled_compile import ANY, resources
from tests.support.simulated_gpu import RecordedLaunch, Simulation
from transformer_engine.common import optional
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.hardware import Hardware
from transformer_engine.common.kernels import conversion
from transformer_engine.common.kernels.launch import Launch, compile_options

CAST = re.compile(r"\bcvt\.rn\.satfinite\.e[45]m[32]x2\.f32")
DOUBLE_ROUNDING = re.compile(r"\bcvt\.\S*e[45]m[32]x2\.f16")
# Capability for a recipe's dense products by Triton.
DENSE = {"block": "fp8 products", "mxfp8": "mxfp8 products", "nvfp4": "nvfp4 products"}


class Pointer:
    """A tensor's dtype and alignment, which Triton reads in place of the tensor."""

    def __init__(self, dtype: torch.dtype, aligned: bool):
        self.dtype = dtype
        self.address = 16 if aligned else 1

    def data_ptr(self) -> int:
        return self.address

    @staticmethod
    def ptr_range() -> int:
        return 0


def use_target(hardware: Hardware) -> None:
    """Make Triton compile for a GPU in the table in this process."""
    target = GPUTarget("cuda", hardware.target, 32)
    fake = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    driver.set_active(fake)


def compiled(
    launch: Launch, kinds: tuple[tuple[torch.dtype, bool] | None, ...], row: Hardware
) -> Any:
    """The kernel that a launch with tensors of these dtypes and alignments compiles to."""
    dtypes = [None if kind is None else str(kind[0]).removeprefix("torch.") for kind in kinds]
    values, as_bytes = conversion.resolve(launch.kernel.arg_names, launch.constants, row, dtypes)
    options = compile_options(launch.warps, launch.registers, launch.fuses)
    if launch.dependent:
        options["launch_pdl"] = True
    pointers = [
        None
        if kind is None
        else Pointer(torch.uint8 if as_bytes and kind[0].itemsize == 1 else kind[0], kind[1])
        for kind in kinds
    ]
    return launch.kernel.warmup(*pointers, *launch.scalars, *values, grid=launch.grid, **options)


def constants(launch: Launch) -> dict[str, Any]:
    """{name: value} for a launch's compile-time constants."""
    names = launch.kernel.arg_names
    return dict(zip(names[len(names) - len(launch.constants) :], launch.constants, strict=True))


def facts(recorded: RecordedLaunch, row: Hardware) -> dict[str, Any]:
    kernel = compiled(recorded.launch, recorded.kinds, row)
    ptx = kernel.asm["ptx"]
    registers, stack = resources(kernel.asm["cubin"])
    return {
        "constants": {name: str(value) for name, value in constants(recorded.launch).items()},
        "products": sorted(set(ANY.findall(ptx))),
        "casts": len(CAST.findall(ptx)),
        "double roundings": len(DOUBLE_ROUNDING.findall(ptx)),
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "tensor memory": getattr(kernel.metadata, "tmem_size", 0) or 0,
    }


def launch_title(recorded: RecordedLaunch, row: Hardware) -> str:
    launch = recorded.launch
    function = launch.kernel.fn
    dtypes = [str(kind[0]).removeprefix("torch.") if kind else "-" for kind in recorded.kinds]
    module = function.__module__.rpartition(".")[2]
    values = [str(value) for value in launch.constants]
    unaligned = sum(not kind[1] for kind in recorded.kinds if kind)
    return " ".join(
        [
            f"{row.architecture} {module}.{function.__name__}({', '.join(values)})",
            f"[{', '.join(dtypes)}]",
            f"{list(launch.scalars)} warps={launch.warps}",
            *[f"unaligned={unaligned}"] * bool(unaligned),
        ]
    )


def force_triton(recipe_name: str, row: Hardware) -> AbstractContextManager[Any]:
    """Force the Triton backends for a recipe's products, if the row has them."""
    choice = {"attention": "triton"}
    scaled = recipe_name == "block" or optional.release("triton") >= row.scaled_dot
    if scaled and recipe_name in DENSE and row.has(DENSE[recipe_name]):  # pyright: ignore[reportArgumentType]
        choice["gemm"] = "triton"
    if recipe_name == "none" or (
        recipe_name in ("delayed", "current", "block") and row.has("fp8 products")
    ):
        choice["grouped_gemm"] = "triton"
    return use_backend(**choice)


def record_launches(simulation: Simulation) -> list[RecordedLaunch]:
    """Launches for all layers and recipes, by the tables' choice and forced, and for uneven casts."""
    for by_force in (False, True):
        for layer, name, recipe in hardware_layers.cases():
            with force_triton(name, simulation.hardware) if by_force else nullcontext():
                for _ in hardware_layers.train(layer, recipe):
                    pass
    for name, make in hardware_layers.RECIPES.items():
        recipe = None if make is None else make()
        with force_triton(name, simulation.hardware):
            for layer in hardware_layers.ACCUMULATING:
                for _ in hardware_layers.train(layer, recipe, accumulates=True):
                    pass
    cast_shapes.run()
    return list(simulation.launches.values())


def sample(every: list[RecordedLaunch]) -> list[RecordedLaunch]:
    """One launch per kernel, one-byte tensor types, and constants on which its registers depend.

    Predicated tiles need more registers than whole ones, and float32 scales more than powers of two.
    """
    results: dict[Any, RecordedLaunch] = {}
    for recorded in every:
        launch = recorded.launch
        codes = tuple(
            kind[0] if kind and kind[0].itemsize == 1 else None for kind in recorded.kinds
        )
        values = constants(launch)
        options = tuple(values.get(name) for name in ("EVEN", "PAIRS", "POWER_OF_TWO", "SQUARE"))
        options += (values.get("CURVE") == "identity",)  # its launches have other warp counts
        options += (values.get("ACCUMULATE"), values.get("ADDS"))
        results.setdefault((launch.kernel, codes, options), recorded)
    return list(results.values())


def main(arguments: list[str]) -> None:
    simulation = hardware_layers.simulation(arguments)
    every = record_launches(simulation)
    if "--sample" in arguments:
        every = sample(every)
    if "--part" in arguments:
        part, parts = map(int, arguments[arguments.index("--part") + 1].split("/"))
        every = every[part::parts]
    use_target(simulation.hardware)
    for recorded in every:
        title = launch_title(recorded, simulation.hardware)
        try:
            results = facts(recorded, simulation.hardware)
        except Exception as error:  # failures are this program's results
            results = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[-400:]}"}
        print(json.dumps([title, results]), flush=True)
    print(json.dumps(["Triton", triton.__version__]))


if __name__ == "__main__":
    main(sys.argv[1:])
