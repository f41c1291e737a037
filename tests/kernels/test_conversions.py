"""Conversions between float32 and FP8 codes: for each GPU in the table, against the reference and in PTX."""

from __future__ import annotations

import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import forked, programs
from tests.support.programs import interpreting
from transformer_engine.common.hardware import NO_GPU, hardware_named, nvidia
from transformer_engine.common.kernels import conversion
from transformer_engine.common.kernels.conversion import INSTRUCTION, INTEGERS, NATIVE

HERE = Path(__file__).parent
E4M3, E5M2 = INTEGERS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed (pip install triton)",
)


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("8.0", (INTEGERS[E4M3], True)),
        ("8.6", (INTEGERS[E4M3], True)),
        ("8.9", (INSTRUCTION, False)),
        ("9.0", (NATIVE, False)),
        ("12.1", (NATIVE, False)),
    ],
)
def test_a_launch_uses_its_gpus_conversion(architecture, expected):
    row = hardware_named("nvidia", architecture)
    constants, as_bytes = conversion.resolve(
        ["x", "CONVERSION"], (NATIVE,), row, ["float32", E4M3, None]
    )
    assert (*constants, as_bytes) == expected


def test_an_explicit_conversion_in_a_record_is_used_on_every_gpu():
    for row in (nvidia(9, 0), nvidia(8, 0), NO_GPU):
        assert conversion.resolve(["CONVERSION"], (INSTRUCTION,), row, [E5M2]) == (
            (INSTRUCTION,),
            False,
        )
        assert conversion.resolve(["CONVERSION"], (INTEGERS[E5M2],), row, []) == (
            (INTEGERS[E5M2],),
            True,
        )


def test_kernels_without_conversions_receive_bytes_where_triton_has_no_fp8_types():
    assert conversion.resolve(["x", "EVEN"], (True,), nvidia(8, 0), [E4M3, E5M2]) == ((True,), True)
    assert conversion.resolve(["x", "EVEN"], (True,), nvidia(8, 9), [E4M3]) == ((True,), False)
    assert conversion.resolve(["x", "EVEN"], (True,), NO_GPU, [E4M3]) == ((True,), False)


def test_two_fp8_dtypes_in_one_kernel_raise_an_error_without_fp8_types():
    with pytest.raises(
        ValueError, match=r"float8_e4m3fn and float8_e5m2, and compute capability 8\.0 has no"
    ):
        conversion.resolve(["CONVERSION"], (NATIVE,), nvidia(8, 0), [E4M3, E5M2])


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_interpreted_conversions_equal_the_reference(count):
    command = ["-W", "ignore", str(HERE / "conversion_cases.py"), str(count)]
    facts = json.loads(forked.output(command, HERE, interpreting(), patience=600).splitlines()[-1])
    assert len(facts) == 2 * 2 * 5
    assert sum(values for values, _ in facts.values()) > 4 * (65536 + count)
    assert {name: wrong for name, (_, wrong) in facts.items() if wrong} == {}


def run_launches(way: str, device: str, *options: str) -> dict[str, dict]:
    command = ["-W", "ignore", str(HERE / "conversion_launches.py"), way, device, *options]
    environment = dict(interpreting() if device == "cpu" else os.environ)
    return json.loads(programs.output(command, HERE, environment, 600).splitlines()[-1])


def test_quantizations_by_integers_equal_the_reference():
    cases = run_launches("integers", "cpu")["cases"]
    assert len(cases) == 23
    assert [name for name, (_, equal) in cases.items() if not equal] == []


@pytest.mark.slow
def test_every_kernel_is_bitwise_equal_with_integer_conversion():
    native, integers = (
        run_launches(way, "cpu", "--all")["cases"] for way in ("native", "integers")
    )
    assert len(native) == 93
    assert native == integers
    assert [name for name, (_, equal) in native.items() if not equal] == []


@pytest.mark.gpu
def test_every_kernel_is_bitwise_equal_with_each_conversion_on_a_gpu():
    """The inline PTX and the integer arithmetic, on a GPU with native conversions."""
    cases: dict[str, dict] = {way: {} for way in ("native", "instruction", "integers")}
    counts = dict.fromkeys(cases, 0)
    parts = [(way, f"{part}/4") for way in cases for part in range(4)]
    with ThreadPoolExecutor(len(parts)) as pool:  # most of the time is compilation
        for (way, _), facts in zip(
            parts, pool.map(lambda key: run_on_gpu(*key), parts), strict=True
        ):
            cases[way] |= facts["cases"]
            counts[way] += sum(count["instruction"] for count in facts["counts"].values())
    assert len(cases["native"]) > 200
    assert [name for name, (_, equal) in cases["native"].items() if not equal] == []
    for way in ("instruction", "integers"):
        assert {
            name for name, result in cases["native"].items() if cases[way][name] != result
        } == set(), way
    assert counts["integers"] == 0 < counts["instruction"]


def run_on_gpu(way: str, part: str) -> dict[str, dict]:
    return run_launches(way, "cuda", "--all", part)


@pytest.fixture(scope="module", params=["cover", pytest.param("--all", marks=pytest.mark.slow)])
def compiled(request) -> dict[str, dict]:
    command = ["-W", "ignore", str(HERE / "conversion_compile.py"), request.param]
    return json.loads(programs.output(command, HERE, os.environ, patience=3600).splitlines()[-1])


# Kernels that do not convert to codes: maxima, transposes and readers.
READERS = ("amax", "row_maxima", "cast-maximum", "values", "transpose", "sum")
STATISTICS = ("none", "one", "blocks", "exponents", "two levels")


def test_casts_use_their_hardwares_instruction_or_sums(compiled):
    assert len(compiled) in (17, 6 * 43)
    for name, facts in compiled.items():
        architecture, kernel = name.split(" ", 1)
        casts = kernel not in (*READERS, *STATISTICS)
        by_integers = architecture in ("8.0", "8.6")
        assert (facts["instructions"] > 0) == (casts and not by_integers), name
        assert (facts["sums"] > 0) == (casts and by_integers), name
        # Otherwise a code would be rounded twice, or a product and the sum that rounds it once.
        assert facts["roundings to float16"] == facts["fused sums"] == 0, name


# Two FP4 candidates per tile in registers; and in Hopper's plan, 128 x 128 tiles in both directions.
SPILLING = ("nvfp4_4over6", "block1d_both", "backward_blocks_True")


def test_kernels_fit_the_shared_memory_and_use_no_stack_but_for_listed_ones(compiled):
    assert [name for name, facts in compiled.items() if not facts["fits"]] == []
    spilling = {name: facts["stack"] for name, facts in compiled.items() if facts["stack"]}
    assert [name for name in spilling if not any(part in name for part in SPILLING)] == []


@pytest.mark.parametrize(("memory", "stages"), [(101376, 2), (227 << 10, 3)])
def test_float32_pipelines_fit_the_gpus_shared_memory(memory, stages):
    from transformer_engine.common.formats import E4M3 as ELEMENT
    from transformer_engine.common.formats import FLOAT32_MAX
    from transformer_engine.common.kernels import block_cast, column_sums, norm
    from transformer_engine.common.kernels.launch import Machine

    machine = Machine(132, memory, 4)  # tiles of 64 KiB
    rows = norm.NormRows(8, 16384, 16384, "float32", 1e-5, False, True, *machine[:2])
    assert norm.forward(rows).constants[-2] == stages
    assert column_sums.column_sums((8192, 14336), 14336, machine).constants[3] == stages
    scales = {"power_of_two": True, "epsilon": 0.0, "value_for_inf": FLOAT32_MAX}
    blocks = block_cast.row_blocks((8192, 4096), ELEMENT, True, True, machine=machine, **scales)
    assert blocks.constants[5] == stages
