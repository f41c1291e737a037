"""`te verify --casts`: codes defined by intervals, and comparisons that find planted faults."""

import json

import pytest
import torch

from transformer_engine.common.formats import E2M1, E4M3, E5M2
from transformer_engine.pytorch.inspect import cast_kernels, cast_oracle, cast_verification
from transformer_engine.pytorch.inspect.cast_verification import verify_casts
from transformer_engine_tools import main

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
def test_codes_within_the_range_equal_torch(element):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    random = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * element.maximum / 8
    x = torch.cat((every, random))
    x = x[x.abs() <= element.maximum]
    expected = x.to(DTYPES[element]).view(torch.uint8)
    assert torch.equal(cast_oracle.element_codes(x, element), expected)


@pytest.mark.parametrize(
    ("element", "values", "codes"),
    [
        (E4M3, [448.0, 464.0, 465.0, float("inf"), -float("inf")], [0x7E, 0x7E, 0x7E, 0x7E, 0xFE]),
        (
            E4M3,
            [float("nan"), -float("nan"), 0.0, -0.0, 2.0**-10, 1.01 * 2.0**-10],
            [0x7F, 0x7F, 0, 0x80, 0, 1],
        ),
        (E5M2, [57344.0, 61440.0, 1e30, float("nan")], [0x7B, 0x7B, 0x7B, 0x7F]),
        # Midpoints of E2M1 go to the even code.
        (
            E2M1,
            [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 100.0, -0.0, -1.0],
            [0, 2, 2, 4, 4, 6, 6, 7, 8, 10],
        ),
        (E2M1, [float("nan"), -float("nan")], [7, 7]),
    ],
)
def test_values_beyond_the_range_saturate_and_midpoints_round_to_even(element, values, codes):
    assert cast_oracle.element_codes(torch.tensor(values), element).tolist() == codes


def test_code_values_equal_torch():
    for element, dtype in DTYPES.items():
        expected = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        assert torch.equal(
            cast_oracle.code_values(element, torch.device("cpu")).nan_to_num(1e9, 1e10, -1e10),
            expected.nan_to_num(1e9, 1e10, -1e10),
        )


def test_power_of_two_scales_are_the_smallest_without_saturation():
    amax = torch.tensor([448.0, 449.0, 1.0, 0.0, 2.0**-149, 3.4e38])
    codes = cast_oracle.power_scales(amax, E4M3)
    assert codes.tolist() == [127, 128, 119, 0, 0, 247]


def test_sampled_casts_equal_the_definition_on_this_machine():
    verification = verify_casts(device=torch.device("cpu"))
    assert verification.equal
    compared = sum(result.compared for result in verification.results)
    assert (
        f"{compared:,} bytes compared (a sample of the float32 numbers), 0 differ"
        in verification.report()
    )


@pytest.mark.gpu
def test_sampled_kernels_equal_the_definition_on_a_gpu():
    verification = verify_casts()
    assert verification.equal, verification.report()
    names = {result.name for result in verification.results}
    assert "codes of mxfp8, every float32" in names
    assert "codes of RMSNorm in e4m3, every result, given scales" in names


@pytest.mark.parametrize("title", cast_kernels.PRODUCERS)
def test_producers_compute_every_16_bit_number(title):
    """Each result of a producer, without a cast, contains all of them; ReLU has no negative ones."""
    numbers = cast_verification.Numbers(torch.device("cpu"), complete=False)
    x = numbers.halves(torch.bfloat16)
    values = cast_kernels.PRODUCERS[title](x, None)
    finite = x[x.isfinite()] if title != "ReLU" else x[x.isfinite() & (x > 0)]
    assert set(finite.tolist()) <= set(values.flatten().tolist())
    comparisons = [
        pair for pair in cast_kernels.producers(numbers.halves, range(-2, 3, 4)) if title in pair[0]
    ]
    assert len(comparisons) >= 2 + len(cast_kernels.BLOCK_SPECS)
    for name, pairs in comparisons:
        for actual, expected in pairs():
            assert torch.equal(actual, expected), name


def test_a_planted_fault_is_counted(monkeypatch):
    """A cast that rounds toward zero differs in about half of the inexact codes."""

    def truncating(x, element):
        bits = x.view(torch.int32) & -(1 << (23 - element.mantissa_bits))
        return correct(bits.view(torch.float32), element)

    correct = cast_verification.cast
    monkeypatch.setattr(cast_verification, "cast", truncating)
    verification = verify_casts(device=torch.device("cpu"))
    assert not verification.equal
    different = {
        result.name: result.different for result in verification.results if result.different
    }
    assert set(different) == {"reference e4m3, every float32", "reference e5m2, every float32"}
    assert "DIFFERENT" in verification.report()


def test_the_command_writes_a_certificate(tmp_path, capsys):
    file = tmp_path / "casts.json"
    main(["verify", "--casts", "--device", "cpu", "--json", str(file)])
    certificate = json.loads(file.read_text(encoding="utf-8"))
    assert certificate["equal"] and not certificate["complete"]
    assert {"gpu", "torch"} <= set(certificate["machine"])
    assert "0 differ" in capsys.readouterr().out


def test_the_command_needs_a_file_or_casts(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["verify"])
    assert exit_.value.code != 0
    assert "--casts" in "".join(capsys.readouterr())
