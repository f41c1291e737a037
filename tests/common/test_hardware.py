"""The table of hardware: rows, unlisted architectures, names of GPUs, and reasons."""

from __future__ import annotations

import copy
import pickle

import pytest

from transformer_engine.common import optional
from transformer_engine.common.hardware import (
    CAPABILITIES,
    NO_GPU,
    ROWS,
    capability_number,
    find_rows,
    hardware_named,
    hardware_of_gpu,
    nvidia,
)
from transformer_engine.common.kernels import launch

NVIDIA = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")


def test_the_table_has_one_row_per_architecture():
    assert tuple(row.architecture for row in ROWS if row.vendor == "nvidia") == NVIDIA
    assert tuple(row.architecture for row in ROWS if row.vendor == "amd") == ("gfx942", "gfx950")


def test_every_capability_of_a_row_has_a_declared_name():
    assert {capability for row in ROWS for capability in row.capabilities} == set(CAPABILITIES)


@pytest.mark.parametrize(
    ("capability", "having"),
    [
        ("fp8 products", NVIDIA[2:]),
        ("cast kernels", NVIDIA),
        ("fp8 casts", NVIDIA[2:]),
        ("triton fp8 casts", NVIDIA[3:]),
        ("dependent launch", NVIDIA[3:]),
        ("fp8 block products", ("9.0",)),
        ("mxfp8 products", NVIDIA[4:]),
        ("nvfp4 products", NVIDIA[4:]),
        ("mxfp8 recipe", NVIDIA[4:7]),
        ("stochastic casts", ("10.0", "10.3")),
        ("tensor memory", NVIDIA[4:7]),
    ],
)
def test_a_capability_belongs_to_the_architectures_of_its_instruction(capability, having):
    assert tuple(row.architecture for row in find_rows(capability)) == having


@pytest.mark.parametrize(
    ("architecture", "release", "reason"),
    [
        (
            "11.0",
            (3, 6),
            "Triton 3.6 does not compile for compute capability 11.0; pip install --upgrade 'triton>=3.7'",
        ),
        ("11.0", (3, 7), None),
        ("12.1", (3, 6), None),
        ("9.0", (3, 6), None),
        ("11.0", (0, 0), None),  # a development build without metadata
    ],
)
def test_an_old_triton_is_missing_on_a_newer_gpu(architecture, release, reason, monkeypatch):
    monkeypatch.setattr(launch, "MISSING", None)
    monkeypatch.setattr(optional, "failure", lambda *names: None)
    monkeypatch.setattr(optional, "release", lambda name: release)
    assert launch.unavailable_reason(hardware_named("nvidia", architecture)) == reason


def test_no_row_multiplies_by_scales_in_a_triton_that_does_not_compile_for_it():
    assert all(row.scaled_dot >= row.triton for row in ROWS)


def test_a_machine_without_a_gpu_says_so():
    assert NO_GPU.lacks("bf16 products") == "there is no GPU, which bf16 products need"


def test_a_capability_of_scattered_architectures_lists_each_of_them():
    assert nvidia(8, 9).lacks("cudnn cached attention") == (
        "compute capability 8.9 has no cudnn cached attention; NVIDIA GPUs of compute capability 8.0, 8.6, 9.0, 10.0, "
        "10.3 and 11.0 have"
    )


def test_shared_memory_and_tensor_memory_are_those_of_the_architecture():
    shared = {row.architecture: row.shared_memory for row in ROWS if row.vendor == "nvidia"}
    small = dict.fromkeys(("8.6", "8.9", "12.0", "12.1"), 101376)
    large = dict.fromkeys(("9.0", "10.0", "10.3", "11.0"), 232448)
    assert shared == {"8.0": 166912, **small, **large}
    assert {row.architecture for row in ROWS if row.tensor_memory} == {"10.0", "10.3", "11.0"}
    assert all(row.has("tensor memory") == (row.tensor_memory == 512) for row in ROWS)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("NVIDIA H200", "9.0"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA RTX 6000 Ada Generation", "8.9"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "12.0"),
        ("NVIDIA GB10", "12.1"),
        ("NVIDIA GB200", "10.0"),
        ("NVIDIA RTX A1000", None),
        ("Tesla T4", None),
    ],
)
def test_a_gpu_is_found_by_its_name(name, architecture):
    row = hardware_of_gpu(name)
    assert (row and row.architecture) == architecture


@pytest.mark.parametrize(
    ("architecture", "likeness"),
    [("8.7", "8.6"), ("10.1", "10.0"), ("12.3", "12.1"), ("14.0", "12.1")],
)
def test_an_unlisted_architecture_has_the_capabilities_of_its_nearest_older_relative(
    architecture, likeness
):
    row = hardware_named("nvidia", architecture)
    assert set(row.capabilities) >= set(hardware_named("nvidia", likeness).capabilities)
    assert row.portable_ptx > (90, 0), (
        "kernels of an unlisted architecture may need a newer version"
    )
    assert f"compute capability {architecture} (not in the table, treated as {likeness})" in str(
        row.lacks("hopper instructions")
    )
    assert hardware_named("nvidia", architecture) is row


def test_the_number_that_rocm_reports_is_no_compute_capability():
    row = hardware_named("amd", "gfx942")
    assert (
        row.has("triton kernels") and not row.has("fp8 products") and capability_number(row) == 94
    )
    assert row.lacks("fp8 products") == (
        "AMD gfx942 has no fp8 products (its FP8 codes (fnuz) differ from those of the recipes); "
        "NVIDIA GPUs of compute capability 8.9 and higher have"
    )
    assert hardware_named("amd", "gfx90a").likeness == "gfx942"
    # Only gfx942 is known to have codes of another format.
    assert "no kernel of FP8 codes was run on it" in str(
        hardware_named("amd", "gfx1201").lacks("fp8 products")
    )
    assert "fnuz" in str(hardware_named("amd", "gfx942").lacks("fp8 products"))


@pytest.mark.parametrize(
    ("row", "capability", "places"),
    [
        (nvidia(8, 0), "fp8 products", "8.9 and higher"),
        (nvidia(10, 0), "fp8 block products", "9.0"),
        (nvidia(12, 0), "mxfp8 recipe", "10.0 to 11.0"),
        (nvidia(7, 5), "bf16 products", "8.0 and higher"),
    ],
)
def test_a_missing_capability_has_a_reason_that_names_where_it_exists(row, capability, places):
    assert not row.has(capability)
    assert row.lacks(capability) == (
        f"{row.title} has no {capability}; NVIDIA GPUs of compute capability {places} have"
    )
    assert nvidia(10, 0).lacks("mxfp8 products") is None


def test_copies_and_pickles_of_a_row_are_the_row():
    for row in (*ROWS, NO_GPU, nvidia(12, 3)):
        assert copy.deepcopy(row) is row and pickle.loads(pickle.dumps(row)) is row
