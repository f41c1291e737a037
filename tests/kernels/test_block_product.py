"""The block-scaled product in Gluon: the assembler's output, without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from transformer_engine.common import optional

# No backend chooses these kernels with another release, or without Triton.
UNKNOWN_REASON = optional.failure("triton") or optional.gluon_problem(optional.release("triton"))
UNKNOWN = pytest.mark.skipif(UNKNOWN_REASON is not None, reason=str(UNKNOWN_REASON))
pytestmark = UNKNOWN

SHARED_MEMORY = 232448  # bytes that a program on Hopper may have


def assemble(folder: Path, launch, dtypes: tuple[str | None, ...]):
    from triton.backends.nvidia.compiler import get_ptxas

    from transformer_engine.common.kernels.compiled import compiled

    kernel = compiled(launch, dtypes, 90)
    source = folder / "kernel.ptx"
    source.write_text(kernel.ptx)
    assembler = get_ptxas(kernel.capability).path
    command = [assembler, "-v", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return kernel, done.stderr


@pytest.mark.parametrize("m", [8192, 36])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.sampled(4)
def test_no_register_is_spilled_and_no_product_is_serialized(tmp_path, by_row, dtype, m):
    from transformer_engine.common.kernels.block_product import product

    launch = product(m, 4096, 28672, dtype, by_row=by_row, processors=132)
    second = "float8_e5m2" if by_row else "float8_e4m3fn"
    kernel, said = assemble(
        tmp_path, launch, ("float8_e4m3fn", second, "float32", "float32", dtype)
    )
    assert "0 bytes spill stores, 0 bytes spill loads" in said, said
    assert not re.search(r"C75\d\d|serialized", said), said
    assert kernel.shared_memory <= SHARED_MEMORY
    assert kernel.warps == 12, (
        "two groups that multiply, and a warp that fetches, rounded up to a group"
    )
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n128k32") == 16


def test_a_program_allocates_memory_for_its_tensor_maps(tmp_path):
    from transformer_engine.common.kernels.block_product import product

    for by_row, maps in ((False, 4), (True, 5)):
        launch = product(512, 512, 512, "bfloat16", by_row=by_row, processors=132)
        kernel, _ = assemble(
            tmp_path, launch, (*["float8_e4m3fn"] * 2, "float32", "float32", "bfloat16")
        )
        assert kernel.scratch == 128 * maps
        assert len(kernel.pointers) == 5
        assert [scalar.value for scalar in kernel.scalars] == [512, 512, 512]


def test_programs_do_not_outnumber_tiles_or_processors():
    from transformer_engine.common.kernels.block_product import product

    of = {
        m: product(m, 1024, 512, "bfloat16", by_row=False, processors=132).grid
        for m in (4, 260, 8192)
    }
    assert of == {4: (8, 1, 1), 260: (16, 1, 1), 8192: (132, 1, 1)}
