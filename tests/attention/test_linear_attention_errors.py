"""Linear attention errors: each names the argument, and nothing is computed."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import transformer_engine.pytorch as te
from tests.attention.linear_attention_cases import MODULES, Case
from transformer_engine.pytorch.attention import linear_attention

CASE = {
    "gdn": Case("gdn", "sbhd", (5, 5), 4, (16, 8), dtype=torch.bfloat16, gate_dtype=torch.float32),
    "gdn2": Case(
        "gdn2", "sbhd", (5, 5), 4, (64, 128), dtype=torch.bfloat16, gate_dtype=torch.float32
    ),
    "gdp": Case(
        "gdp", "sbhd", (5, 5), 4, (64, 128), 2, dtype=torch.bfloat16, gate_dtype=torch.float32
    ),
}
SIGNATURES = {
    "gdn": (
        "num_attention_heads kv_channels qkv_format=sbhd tp_size=1 tp_group=None layer_number=None scale=None",
        "query_layer key_layer value_layer g=None beta=None * qkv_format=None cu_seqlens=None "
        "checkpoint_core_attention=False initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False",
    ),
    "gdn2": (
        "num_attention_heads kv_channels qkv_format=sbhd tp_size=1 tp_group=None layer_number=None scale=None",
        "query_layer key_layer value_layer g=None beta=None w=None * qkv_format=None cu_seqlens=None "
        "checkpoint_core_attention=False initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False beta_guard=False",
    ),
    "gdp": (
        "num_attention_heads kv_channels num_householder=1 qkv_format=sbhd tp_size=1 tp_group=None "
        "layer_number=None scale=None",
        "query_layer key_layer value_layer g=None beta=None * qkv_format=None cu_seqlens=None "
        "checkpoint_core_attention=False initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False "
        "use_beta_sigmoid_in_kernel=False allow_neg_eigval=False safe_gate=False gate_domain=log "
        "a_log=None dt_bias=None",
    ),
}


def _signature_text(function) -> str:
    words = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        words.append(f"{parameter.name}{default}")
    return " ".join(words)


@pytest.mark.parametrize("rule", MODULES)
def test_signatures_match_the_original(rule):
    constructor, forward = SIGNATURES[rule]
    assert _signature_text(MODULES[rule].__init__) == constructor
    assert _signature_text(MODULES[rule].forward) == forward


def test_every_import_path_of_the_original_has_the_modules():
    for module in MODULES.values():
        name = module.__name__
        assert getattr(te.attention, name) is getattr(linear_attention, name) is module
        assert issubclass(module, linear_attention.LinearAttentionBase)
    assert (
        te.attention.linear_attention.gdp.GatedDeltaProductAttention
        is te.GatedDeltaProductAttention
    )


@pytest.mark.parametrize(
    ("rule", "arguments", "error", "message"),
    [
        ("gdn", {"num_attention_heads": 6, "tp_size": 4}, ValueError, "tp_size=4 does not divide"),
        ("gdn", {"qkv_format": "hbsd"}, ValueError, "qkv_format='hbsd'"),
        ("gdn", {"kv_channels": 0}, ValueError, "kv_channels"),
        ("gdn", {"scale": float("nan")}, ValueError, "scale=nan"),
        ("gdn2", {"kv_channels": 96}, ValueError, "64 and 128"),
        ("gdp", {"kv_channels": (64, 32)}, ValueError, "64 and 128"),
        ("gdp", {"num_householder": 0}, ValueError, "num_householder=0"),
        ("gdp", {"num_householder": 1.5}, TypeError, "num_householder=1.5"),
    ],
)
def test_constructors_reject_settings(rule, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        MODULES[rule](**{"num_attention_heads": 8, "kv_channels": 64, **arguments})


BOUNDS = torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize(
    ("rule", "changes", "error", "message"),
    [
        ("gdn", {"g": None}, ValueError, "g=None"),
        ("gdn2", {"w": None}, ValueError, "w=None"),
        ("gdn2", {"beta": None, "w": None}, ValueError, "beta=None and w=None"),
        ("gdn", {"g": torch.bfloat16}, TypeError, "g is torch.bfloat16"),
        ("gdn", {"beta": torch.float16}, TypeError, "beta is torch.float16"),
        ("gdn2", {"beta": torch.float32}, TypeError, "beta is torch.float32"),
        ("gdn2", {"w": torch.float32}, TypeError, "w is torch.float32"),
        ("gdn2", {"g": torch.float16}, TypeError, "g is torch.float16"),
        ("gdp", {"beta": torch.float16}, TypeError, "beta is torch.float16"),
        ("gdn", {"key_layer": torch.float16}, ValueError, "key_layer is torch.float16"),
        (
            "gdn",
            {"query_layer": torch.float8_e4m3fn},
            TypeError,
            "query_layer is torch.float8_e4m3fn",
        ),
        ("gdn", {"query_layer": 3}, TypeError, "query_layer is 3"),
        ("gdn", {"value_layer": (5, 2, 4, 16)}, ValueError, "value_layer is [5, 2, 4, 16]"),
        ("gdn", {"query_layer": (5, 2, 3, 16)}, ValueError, "query_layer is [5, 2, 3, 16]"),
        ("gdn", {"g": (5, 2, 4, 1)}, ValueError, "g is [5, 2, 4, 1]"),
        ("gdp", {"key_layer": (5, 2, 4, 64)}, ValueError, "key_layer is [5, 2, 4, 64]"),
        ("gdn", {"initial_state": (2, 4, 16, 8)}, ValueError, "initial_state is [2, 4, 16, 8]"),
        ("gdn", {"initial_state": torch.bfloat16}, TypeError, "initial_state is torch.bfloat16"),
        ("gdn", {"cu_seqlens": BOUNDS}, ValueError, "it is for 'thd'"),
        ("gdn", {"qkv_format": "thd"}, ValueError, "query_layer is [5, 2, 4, 16]"),
        ("gdn2", {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel=True"),
        ("gdp", {"allow_neg_eigval": True}, ValueError, "use_beta_sigmoid_in_kernel=True"),
        ("gdn2", {"beta_guard": True}, ValueError, "use_qk_l2norm_in_kernel=True"),
        ("gdp", {"gate_domain": "exp"}, ValueError, "gate_domain='exp'"),
        ("gdp", {"gate_domain": "linear", "safe_gate": True}, ValueError, "gate_domain='log'"),
        ("gdp", {"a_log": torch.zeros(4)}, ValueError, "a_log is a parameter of the safe gate"),
        ("gdp", {"dt_bias": torch.zeros(3), "safe_gate": True}, ValueError, "dt_bias is [3]"),
    ],
)
def test_calls_reject_tensors_and_options(rule, changes, error, message):
    case = CASE[rule]
    arguments = dict(case.tensors())
    for name, change in changes.items():
        if isinstance(change, torch.dtype):
            change = arguments[name].detach().to(change)
        elif isinstance(change, tuple):
            change = torch.zeros(change, dtype=arguments[name].dtype)
        arguments[name] = change
    with pytest.raises(error, match=re.escape(message)):
        case.module()(**arguments)


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        (None, ValueError, "cu_seqlens=None"),
        ([0, 2, 8], ValueError, "the 7 tokens"),
        ([1, 3, 7], ValueError, "begin with 0"),
        ([0, 5, 3], ValueError, "not fall"),
        (torch.tensor([0, 3, 7]), TypeError, "cu_seqlens is torch.int64"),
        (torch.zeros(2, 2, dtype=torch.int32), ValueError, "cu_seqlens is [2, 2]"),
    ],
)
def test_packed_calls_reject_bounds(bounds, error, message):
    case = Case("gdn", "thd", (3, 4), 4, (16, 8), dtype=torch.bfloat16, gate_dtype=torch.float32)
    if isinstance(bounds, list):
        bounds = torch.tensor(bounds, dtype=torch.int32)
    with pytest.raises(error, match=re.escape(message)):
        case.module()(**case.tensors(), cu_seqlens=bounds)


def test_tensor_parallel_ranks_need_a_group():
    module = te.GatedDeltaNetAttention(8, 16, qkv_format="sbhd", tp_size=2)
    assert module.num_attention_heads_per_partition == 4 and not module.tp_group_initialized
    tensors = Case("gdn", "sbhd", (5, 5), 4, (16, 16), has_state=False).tensors()
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        module(**tensors)
    module.set_tensor_parallel_group(object())
    assert module(**tensors).shape == (5, 2, 4 * 16)


def test_attributes_are_the_arguments():
    module = te.GatedDeltaProductAttention(8, (64, 128), 3, "thd", layer_number=None, scale=None)
    assert (module.num_attention_heads, module.kv_channels, module.num_householder) == (
        8,
        (64, 128),
        3,
    )
    assert (module.qkv_format, module.tp_size, module.layer_number, module.scale) == (
        "thd",
        1,
        1,
        0.125,
    )
    assert (module.qk_head_dim, module.v_head_dim) == (64, 128)
    assert module.tp_group_initialized and module.tp_group is None
    assert module.gdp_attention.scale == 0.125
    assert te.GatedDeltaNetAttention(2, 16).gdn_attention.rule == "gated_delta_net"
    assert te.GatedDeltaNet2Attention(2, 64).gdn2_attention.rule == "gated_delta_net_2"
    module.fast_setattr("fsdp_group", None)


def test_hooks_run_once_per_call_also_after_an_error():
    class Counted(te.GatedDeltaNetAttention):
        begun = ended = 0

        def prepare_forward(self, inp, allow_non_contiguous=False):
            self.begun += 1
            return super().prepare_forward(inp, allow_non_contiguous)

        def end_forward(self):
            self.ended += 1

    module = Counted(2, 16)
    tensors = Case("gdn", "sbhd", sizes=(16, 16)).tensors()
    module(**tensors)
    assert (module.begun, module.ended) == (1, 1)
    with pytest.raises(ValueError, match="g=None"):
        module(*list(tensors.values())[:3])
    assert (module.begun, module.ended) == (2, 2)
