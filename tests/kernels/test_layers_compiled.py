"""Launches in layers' training steps, compiled for GPUs in the table: instructions, stack, memory."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.spills import SPILLS, stack_limit
from tests.primitives.scaled_compile import INSTRUCTIONS
from tests.support import programs
from transformer_engine.common import optional
from transformer_engine.common.formats import E4M3
from transformer_engine.common.hardware import ROWS, Hardware
from transformer_engine.common.kernels.launch import Machine
from transformer_engine.pytorch.runtime import launching

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)

NVIDIA = {row.architecture: row for row in ROWS if row.vendor == "nvidia"}
# Products whose instruction reads the block scales.
SCALED = (
    "scaled_product.product_kernel",
    "scaled_product.tma_product_kernel",
    "grouped_scaled.rows_kernel",
    "grouped_scaled.columns_kernel",
)
SIXTEEN_BITS = r"(?:mma\.sync\S*\.(?:bf16\.bf16|tf32\.tf32)|wgmma\.mma_async\S*bf16|tcgen05\.mma\S*kind::(?:f16|tf32))"
CODES = r"(?:mma\.sync\S*m16n8k32\S*e[45]m[32]|wgmma\.mma_async\S*e[45]m[32]|tcgen05\.mma\S*kind::f8f6f4)"
HALVES = r"mma\.sync\S*\.f16\.f16"
TITLE = re.compile(r"(\S+) ([\w.]+)\(.*?\) \[([^\]]*)\]")


def instruction_pattern(kernel: str, dtypes: list[str], row: Hardware, native: bool) -> str | None:
    """Pattern for all matrix instructions in a kernel; None for a kernel without products.

    Args:
        native: The Triton release has the row's instructions for FP8 codes.
    """
    codes = any(dtype.startswith("float8") for dtype in dtypes[:2])
    if kernel in SCALED:
        return INSTRUCTIONS["mxfp8" if codes else "nvfp4", row.has("tensor memory")]
    if kernel in (
        "promoted_product.block_kernel",
        "grouped_gemm.rows_kernel",
        "grouped_gemm.columns_kernel",
    ):
        # Triton decodes the codes to float16, which represents them exactly
        if codes and not native:
            return HALVES
        return CODES if codes else SIXTEEN_BITS
    attends = kernel in (
        "attention.attend",
        "attention_backward.grad_keys",
        "attention_backward.grad_queries",
    )
    return SIXTEEN_BITS if attends else None


def compiled(architecture: str, *options: str) -> dict[str, dict]:
    """{title: facts} for a row's launches."""
    arguments = [
        "-W",
        "ignore",
        "-m",
        "tests.kernels.layer_compile",
        architecture,
        "--sample",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": programs.search_path()}
    lines = programs.output(arguments, programs.ROOT, environment, patience=3600).splitlines()
    results = dict(json.loads(line) for line in lines if line.startswith("["))
    assert results.pop("Triton")
    return results


def check(architecture: str, result: dict[str, dict], release: tuple[int, ...]) -> None:
    """Check a row's launches, compiled by a Triton release."""
    row = NVIDIA[architecture]
    native = release >= row.scaled_dot
    for title, facts in result.items():
        assert "error" not in facts, (title, facts)
        match = TITLE.match(title)
        assert match is not None and match[1] == architecture, title
        kernel, dtypes = match[2], match[3].split(", ")
        assert facts["stack"] <= stack_limit(kernel, facts["constants"], architecture, release), (
            title,
            facts,
        )
        assert (
            facts["shared"] <= row.shared_memory and facts["tensor memory"] <= row.tensor_memory
        ), (
            title,
            facts,
        )
        assert facts["double roundings"] == 0, title
        pattern = instruction_pattern(kernel, dtypes, row, native)
        if pattern is None:
            assert facts["products"] == [] or kernel.startswith(("nvfp4", "router", "attention")), (
                title,
                facts,
            )
        else:
            assert facts["products"], title
            assert [name for name in facts["products"] if not re.match(pattern, name)] == [], (
                title,
                facts,
            )


# Of one core, for the launches that every commit compiles; the weekly test below compiles all.
SAMPLE_SECONDS = 60


def test_a_sample_of_launches_of_a_training_step_compiles_as_planned_within_a_minute():
    before = os.times()
    result = compiled("12.0", "--part", "5/8")
    after = os.times()
    assert len(result) >= 4
    check("12.0", result, optional.release("triton"))
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    assert used < SAMPLE_SECONDS, f"{used:.0f} s of a core"


def test_spills_name_kernels_and_whether_their_tiles_are_predicated():
    for spill in SPILLS:
        module, _, name = spill.kernel.partition(".")
        kernel = getattr(
            importlib.import_module(f"transformer_engine.common.kernels.{module}"), name
        )
        assert set(spill.constants) <= set(kernel.arg_names), spill
        assert ("EVEN" in kernel.arg_names) == ("EVEN" in spill.constants), spill
        assert set(spill.rows) <= set(NVIDIA), spill


def test_stack_limits_for_predicated_tiles_do_not_apply_to_full_tiles():
    kernel, float32 = "grouped_block_cast.square_block_kernel", {"POWER_OF_TWO": "False"}
    assert stack_limit(kernel, {**float32, "EVEN": "False"}, "8.0", (3, 8)) == 80
    assert stack_limit(kernel, {**float32, "EVEN": "True"}, "8.0", (3, 8)) == 0
    assert stack_limit(kernel, {**float32, "EVEN": "False"}, "9.0", (3, 8)) == 0


@pytest.mark.parametrize(
    ("architecture", "warps"), [("9.0", 4), ("10.0", 4), ("11.0", 8), ("12.0", 8)]
)
def test_two_directional_block_casts_use_enough_warps_to_need_no_stack(architecture, warps):
    from transformer_engine.common.kernels import block_cast  # it imports triton

    row = NVIDIA[architecture]
    machine = Machine(132, row.shared_memory, 2, row.threads)
    scaling = {"power_of_two": True, "epsilon": 0.0, "value_for_inf": 3.0e38}
    launch = block_cast.row_blocks((1024, 1024), E4M3, True, True, **scaling, machine=machine)
    assert launch.warps == warps and launch.grid[0] == min(132 * 8 // warps, 64)


@pytest.mark.parametrize("operation", ["column_sums", "activation"])
@pytest.mark.parametrize(
    ("architecture", "threads"), [("9.0", 2048), ("11.0", 1536), ("12.0", 1536)]
)
def test_fused_cast_plans_read_the_gpus_thread_limit(monkeypatch, operation, architecture, threads):
    backend = importlib.import_module(f"transformer_engine.pytorch.primitives.{operation}.triton")
    row = NVIDIA[architecture]
    monkeypatch.setattr(backend, "current_hardware", lambda: row)
    processors = launching.Processors(20, row.shared_memory)
    monkeypatch.setattr(launching, "processors", lambda device: processors)
    request = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16)
    machine = backend._machine(request, *[2] * (operation == "activation"))
    assert machine == Machine(20, row.shared_memory, 2, threads)


@pytest.mark.parametrize(
    ("architecture", "accumulates", "columns", "warps"),
    [
        ("8.0", False, 128, 8),
        ("8.9", True, 128, 8),
        ("9.0", True, 256, 8),
        ("10.0", False, 256, 8),
        ("10.0", True, 128, 8),
        ("12.0", True, 128, 8),
    ],
)
def test_weight_gradients_of_groups_have_tiles_that_fit_the_registers(
    architecture, accumulates, columns, warps
):
    from transformer_engine.common.kernels import grouped_gemm  # it imports triton

    row = NVIDIA[architecture]
    options = {"shared_memory": row.shared_memory, "hopper": row.has("hopper instructions")}
    launch = grouped_gemm.product_of_columns(
        512, 512, 4, scaling=grouped_gemm.UNSCALED, accumulates=accumulates, **options
    )
    names = launch.kernel.arg_names
    constants = dict(
        zip(names[len(names) - len(launch.constants) :], launch.constants, strict=True)
    )
    assert (constants["BLOCK_K"], launch.warps) == (columns, warps)
    assert constants["ACCUMULATE"] is accumulates


@pytest.mark.slow
@pytest.mark.parametrize("architecture", NVIDIA)
def test_every_training_step_kernel_compiles_as_planned(architecture):
    row, release = NVIDIA[architecture], optional.release("triton")
    if (reason := optional.triton_problem(row, release)) is not None:
        pytest.skip(reason)
    result = compiled(architecture)
    assert len(result) > 30
    check(architecture, result, release)
    kernels = {TITLE.match(title)[2] for title in result}  # pyright: ignore[reportOptionalSubscript]
    # Blocks with power-of-two scales are multiplied by exponents where the instruction reads them.
    exponents = row.has("mxfp8 products") and release >= row.scaled_dot
    assert ("promoted_product.block_kernel" in kernels) == (
        row.has("fp8 products") and not exponents
    )
    # On 12.1, Triton before 3.8 has no native product for MXFP8 and NVFP4: cuBLASLt is the only backend.
    products = {kernel for kernel in kernels if kernel in SCALED[:2]}
    assert not products or row.has("mxfp8 products")
    # Operands and scales by TMA where the instruction reads them from shared and tensor memory.
    assert ("scaled_product.tma_product_kernel" in products) == row.has("tensor memory")
