import pickle
import warnings

import pytest

import transformer_engine.pytorch as te
from transformer_engine.common import optional
from transformer_engine.common.hardware import NO_GPU, nvidia
from transformer_engine.common.kernels import launch
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch import quantization as q
from transformer_engine.pytorch.primitives.gemm import product
from transformer_engine.pytorch.quantization import families, support

CHECKS = {
    "bf16": (q.check_bf16_support, q.is_bf16_available),
    "fp8": (q.check_fp8_support, q.is_fp8_available),
    "mxfp8": (q.check_mxfp8_support, q.is_mxfp8_available),
    "fp8_block_scaling": (q.check_fp8_block_scaling_support, q.is_fp8_block_scaling_available),
    "nvfp4": (q.check_nvfp4_support, q.is_nvfp4_available),
}


@pytest.fixture
def machine(monkeypatch):
    """Simulate a GPU with some compute capability, with the emulation variable unset."""

    def pretend(capability, cuda=(12, 9)):
        monkeypatch.delenv("TE_EMULATE", raising=False)
        monkeypatch.setattr(support, "has_cuda", lambda: capability is not None)
        for module in (support, families):
            monkeypatch.setattr(
                module, "current_hardware", lambda: nvidia(*capability) if capability else NO_GPU
            )
        monkeypatch.setattr(support, "cuda_version", lambda: cuda)

    return pretend


@pytest.mark.parametrize(
    ("capability", "native"),
    [
        ((7, 5), set()),
        ((8, 0), {"bf16"}),
        ((8, 9), {"bf16", "fp8"}),
        ((9, 0), {"bf16", "fp8", "fp8_block_scaling"}),
        ((10, 0), set(CHECKS)),
        ((12, 0), set(CHECKS) - {"mxfp8"}),
    ],
)
def test_a_gpu_supports_the_formats_of_its_hardware_and_gives_reasons_for_others(
    machine, capability, native
):
    machine(capability)
    for kind, (check, is_available) in CHECKS.items():
        available, reason = check()
        assert available == (kind in native)
        assert is_available() == available
        assert is_available(return_reason=True) == (available, reason)
        assert ("TE_EMULATE" in reason) == (not available)
        assert q.format_support(kind).native == available


def test_the_reason_names_the_capability_that_is_needed(machine):
    machine((9, 0))
    assert q.check_mxfp8_support()[1].startswith(
        "Device compute capability 10.0 or higher required for MXFP8 execution."
    )


def test_block_scaling_needs_a_recent_cuda(machine):
    machine((9, 0), cuda=(12, 8))
    available, reason = q.check_fp8_block_scaling_support()
    assert not available
    assert "12.9" in reason


def test_emulation_is_the_default_without_a_gpu(machine):
    machine(None)
    for kind, (check, _) in CHECKS.items():
        assert check() == (True, "")
        assert q.format_support(kind) == q.Support(
            kind,
            native=False,
            emulated=True,
            reason=f"There is no CUDA device for {kind} execution.",
        )


def test_a_variable_switches_emulation(machine, monkeypatch):
    machine((9, 0))
    monkeypatch.setenv("TE_EMULATE", "1")
    assert q.is_nvfp4_available()
    assert q.format_support("nvfp4").emulated
    assert not q.format_support("fp8").emulated
    machine(None)
    monkeypatch.setenv("TE_EMULATE", "0")
    assert not q.is_fp8_available()


def test_emulate_switches_at_once_and_a_block_ends_it(machine):
    machine((9, 0))
    with q.emulate():
        assert q.is_mxfp8_available()
        with q.emulate(False):
            assert not q.is_mxfp8_available()
        assert q.is_mxfp8_available()
    assert not q.is_mxfp8_available()
    switch = q.emulate()
    assert q.is_mxfp8_available()
    switch.__exit__(None, None, None)
    assert not q.is_emulating()


def test_a_recipe_needs_its_format(machine):
    machine((9, 0))
    available = {
        kind: q.check_recipe_support(kind())[0]
        for kind in (
            DelayedScaling,
            Float8CurrentScaling,
            Float8BlockScaling,
            MXFP8BlockScaling,
            NVFP4BlockScaling,
        )
    }
    assert [kind for kind, yes in available.items() if not yes] == [
        MXFP8BlockScaling,
        NVFP4BlockScaling,
    ]
    assert q.check_recipe_support(CustomRecipe(qfactory=len)) == (True, "")


@pytest.mark.parametrize(
    ("capability", "kind"),
    [
        (None, DelayedScaling),
        ((9, 0), DelayedScaling),
        ((10, 0), MXFP8BlockScaling),
        ((12, 0), Float8CurrentScaling),
    ],
)
def test_the_default_recipe_is_the_best_that_needs_no_emulation(machine, capability, kind):
    machine(capability)
    assert type(q.get_default_recipe()) is kind
    assert q.get_default_recipe() is not q.get_default_recipe()
    assert type(q.FP8GlobalStateManager.get_fp8_recipe()) is kind


def test_an_unknown_kind_is_rejected(machine):
    machine((9, 0))
    with pytest.raises(ValueError, match=r"'fp6'.*nvfp4"):
        q.format_support("fp6")


def test_the_state_manager_returns_reasons(machine):
    machine((8, 9))
    manager = q.FP8GlobalStateManager
    assert manager.is_fp8_available() == (True, "")
    for check in (
        manager.is_mxfp8_available,
        manager.is_fp8_block_scaling_available,
        manager.is_nvfp4_available,
    ):
        available, reason = check()
        assert not available
        assert "required for" in reason


@pytest.mark.parametrize("kind", CHECKS)
def test_a_support_check_is_one_function_in_every_module(kind):
    name = f"is_{kind}_available"
    assert getattr(te, name) is getattr(q, name) is pickle.loads(pickle.dumps(getattr(te, name)))
    assert getattr(q, f"check_{kind}_support").__name__ == f"check_{kind}_support"


@pytest.mark.parametrize(
    ("capability", "kind", "recipe"),
    [
        ((12, 0), "mxfp8", MXFP8BlockScaling()),
        ((12, 1), "mxfp8", MXFP8BlockScaling()),
        ((8, 9), "fp8_block_scaling", Float8BlockScaling()),
    ],
)
def test_a_recipe_with_native_products_runs_where_the_original_does_not_offer_it(
    machine, monkeypatch, capability, kind, recipe
):
    machine(capability)
    monkeypatch.setattr(launch, "unavailable_reason", lambda hardware: None)
    monkeypatch.setattr(optional, "release", lambda name: (3, 8))
    for cached in (product.multiplies_natively, support._warn_of_native_products):
        cached.cache_clear()
    check, is_available = CHECKS[kind]
    with q.emulate(False):
        assert not is_available() and not check()[0]
        with pytest.warns(
            UserWarning, match=f"run natively here all the same.*is_{kind}_available"
        ):
            assert q.check_recipe_support(recipe) == (True, "")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert q.check_recipe_support(recipe) == (True, "")  # it warns once
    for cached in (product.multiplies_natively, support._warn_of_native_products):
        cached.cache_clear()


def test_a_recipe_without_native_products_is_unavailable_with_its_reason(machine):
    product.multiplies_natively.cache_clear()
    machine((8, 0))
    with q.emulate(False):
        available, reason = q.check_recipe_support(MXFP8BlockScaling())
    assert not available and "10.0 or higher required for MXFP8" in reason
