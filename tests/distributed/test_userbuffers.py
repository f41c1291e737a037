"""initialize_ub checks and records a configuration, although products are not split to overlap with collectives."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed.userbuffers import (
    get_ub,
    get_ub_is_fp8,
    is_ub_initialized,
)
from transformer_engine.pytorch.module import base

NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8

pytestmark = pytest.mark.filterwarnings("ignore:initialize_ub has no effect")


@pytest.fixture(autouse=True)
def forgotten():
    yield
    te.destroy_ub()


def test_a_configuration_is_recorded_until_it_is_destroyed():
    assert not is_ub_initialized()
    te.destroy_ub()  # without effect
    te.initialize_ub(
        [128, 32], 2, quantization_modes=[NONE, FP8], dtype=torch.bfloat16, bootstrap_backend="nccl"
    )
    assert is_ub_initialized()
    with pytest.raises(RuntimeError, match="destroy_ub"):
        te.initialize_ub([128, 32], 2)
    assert not get_ub("qkv_fprop", False).is_fp8_ubuf()
    assert get_ub("qkv_fprop", True).is_fp8_ubuf() and get_ub_is_fp8("qkv_fprop", True)
    assert get_ub("proj_fprop", False).get_tp_size() == 2
    assert (
        get_ub("proj_dgrad", False).is_p2p_overlap()
        and not get_ub("proj_fprop", False).is_p2p_overlap()
    )
    assert base.get_ub is get_ub
    te.destroy_ub()
    assert not is_ub_initialized()
    with pytest.raises(RuntimeError, match="initialize_ub"):
        get_ub("qkv_fprop", False)


def test_settings_of_products_change_their_communicators():
    te.initialize_ub(
        [128, 32],
        2,
        quantization_modes=[FP8],
        ub_cfgs={
            "qkv_dgrad": {"method": "ring_exchange", "num_sm": 2},
            "fc2_fprop": {"method": "ring_exchange", "atomic_gemm": True},
            "of another model": {"method": "bulk"},
        },
    )
    assert get_ub("qkv_dgrad", True).reduces and get_ub("qkv_dgrad", True).is_p2p_overlap()
    assert get_ub("fc2_fprop", True).is_atomic_gemm()
    with pytest.raises(KeyError, match="qkv_wgrad"):
        get_ub("qkv_wgrad", True)
    with pytest.raises(KeyError, match="fc1_fprop"):
        get_ub("fc1_fprop", False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shape": [128]}, ValueError, "tokens, hidden"),
        ({"bootstrap_backend": "ucc"}, ValueError, "ucc"),
        ({"quantization_modes": (FP8,)}, TypeError, "list"),
        ({"quantization_modes": ["fp8"]}, TypeError, "UserBufferQuantizationMode"),
        (
            {"quantization_modes": [NONE, FP8], "ub_cfgs": [{}]},
            ValueError,
            "1 configurations for 2",
        ),
        ({"ub_cfgs": {"fc1_fprop": {"methods": "bulk"}}}, TypeError, "'methods'"),
        ({"ub_cfgs": {"fc1_fprop": {"method": "tree"}}}, ValueError, "'tree'"),
        ({"ub_cfgs": {"fc1_fprop": {"method": "pipeline"}}}, ValueError, "pipeline"),
        ({"ub_cfgs": {"fc1_fprop": {"method": "external"}}}, ValueError, "external"),
        ({"ub_cfgs": {"fc2_wgrad": {"method": "bulk"}}}, ValueError, "external"),
        (
            {"ub_cfgs": {"fc1_dgrad": {"method": "ring_exchange"}, "fc1_wgrad": {"num_sm": 2}}},
            ValueError,
            "fc1_wgrad",
        ),
        ({"ub_cfgs": {"fc1_fprop": {"atomic_gemm": True}}}, ValueError, "atomic_gemm"),
    ],
)
def test_a_configuration_that_excludes_itself_is_named_and_not_recorded(options, error, message):
    arguments = {"shape": [128, 32], "tp_size": 2} | options
    with pytest.raises(error, match=message):
        te.initialize_ub(**arguments)
    assert not is_ub_initialized()


def test_the_flag_of_earlier_releases_names_its_successor():
    with pytest.warns(DeprecationWarning, match="quantization_modes"):
        te.initialize_ub([128, 32], 2, use_fp8=True)
    assert get_ub_is_fp8("qkv_fprop", True)
