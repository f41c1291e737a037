"""Tensor-parallel ranks that differ in a setting of a layer report the setting before the first collective."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.threaded_ranks import run_on_threads

HIDDEN = 32


def messages(build: Any, *arguments: dict[str, Any]) -> list[str]:
    """Per-rank errors from a layer's forward and backward pass, "" for none."""

    def run(rank: int) -> str:
        torch.manual_seed(0)
        layer = build(**arguments[rank])
        try:
            layer(torch.randn(8, 2, HIDDEN)).sum().backward()
        except RuntimeError as error:
            return str(error)
        return ""

    return run_on_threads(run, 2)


PARALLEL: dict[str, Any] = {"set_parallel_mode": True, "tp_size": 2, "device": "cpu"}


def transformer_layer(**options: Any) -> torch.nn.Module:
    arguments = {
        "num_gqa_groups": 2,
        "fuse_qkv_params": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return te.TransformerLayer(
        HIDDEN,
        options.pop("ffn", 64),
        options.pop("heads", 4),
        tp_group=dist.group.WORLD,
        **(PARALLEL | arguments | options),
    )


def mlp(**options: Any) -> torch.nn.Module:
    return te.LayerNormMLP(
        HIDDEN, options.pop("ffn", 64), tp_group=dist.group.WORLD, **(PARALLEL | options)
    )


def attention(**options: Any) -> torch.nn.Module:
    return te.MultiheadAttention(
        HIDDEN,
        4,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        tp_group=dist.group.WORLD,
        **(PARALLEL | options),
    )


def linear(**options: Any) -> torch.nn.Module:
    return te.LayerNormLinear(
        HIDDEN,
        HIDDEN,
        parallel_mode="column",
        tp_group=dist.group.WORLD,
        device="cpu",
        **({"sequence_parallel": True} | options),
    )


# {setting: (layer, first rank's options, second rank's options, message text)}
DIFFERENCES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "activation": (
        transformer_layer,
        {},
        {"activation": "relu"},
        "activation: rank 0: 'gelu'; rank 1: 'relu'",
    ),
    "normalization": (
        transformer_layer,
        {},
        {"normalization": "RMSNorm"},
        "normalization: .*'RMSNorm'",
    ),
    "epsilon": (
        transformer_layer,
        {},
        {"layernorm_epsilon": 1e-3},
        r"eps: rank 0: 1e-05; rank 1: 0\.001",
    ),
    "zero-centered gamma": (
        transformer_layer,
        {},
        {"zero_centered_gamma": True},
        "zero_centered_gamma",
    ),
    "bias": (transformer_layer, {}, {"bias": False}, "use_bias: rank 0: True; rank 1: False"),
    "mask type": (transformer_layer, {}, {"self_attn_mask_type": "no_mask"}, "self_attn_mask_type"),
    "groups": (
        transformer_layer,
        {},
        {"num_gqa_groups": 4},
        "num_gqa_groups: rank 0: 2; rank 1: 4",
    ),
    "feed-forward size": (transformer_layer, {}, {"ffn": 128}, "ffn_shard: rank 0: 32; rank 1: 64"),
    "heads": (transformer_layer, {}, {"heads": 8}, "num_attention_heads: rank 0: 4; rank 1: 8"),
    "softmax type": (transformer_layer, {}, {"softmax_type": "off-by-one"}, "softmax_type"),
    "qk norm": (transformer_layer, {}, {"qk_norm_type": "RMSNorm"}, "qk_norm_type"),
    "window": (transformer_layer, {}, {"window_size": (2, 0)}, r"window_size: .*\(2, 0\)"),
    "attention dropout": (
        transformer_layer,
        {},
        {"attention_dropout": 0.5},
        r"attention_dropout: .*0\.5",
    ),
    "hidden dropout": (transformer_layer, {}, {"hidden_dropout": 0.5}, r"hidden_dropout: .*0\.5"),
    "epsilon of the qk norm": (
        transformer_layer,
        {"qk_norm_type": "RMSNorm"},
        {"qk_norm_type": "RMSNorm", "qk_norm_eps": 0.1},
        r"q_norm\.eps: .*0\.1",
    ),
    "drop path": (transformer_layer, {}, {"drop_path_rate": 0.5}, r"drop_path\.drop_prob: .*0\.5"),
    "parallel layer": (
        transformer_layer,
        {},
        {"parallel_attention_mlp": True},
        "parallel_attention_mlp",
    ),
    "residual": (
        transformer_layer,
        {},
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection",
    ),
    "output norm": (transformer_layer, {}, {"output_layernorm": True}, "output_layernorm"),
    "order of the qk norm": (
        transformer_layer,
        {"qk_norm_type": "RMSNorm"},
        {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
        "qk_norm_before_rope",
    ),
    "rotation": (transformer_layer, {}, {"rotary_pos_interleaved": True}, "rotary_pos_interleaved"),
    "order of fused weights": (
        transformer_layer,
        {},
        {"qkv_weight_interleaved": False},
        "interleaved",
    ),
    "attention's window": (attention, {}, {"window_size": (1, 0)}, r"window_size: .*\(1, 0\)"),
    "attention's mask": (attention, {}, {"attn_mask_type": "no_mask"}, "attn_mask_type"),
    "attention's softmax": (
        attention,
        {},
        {"softmax_type": "off-by-one"},
        "core_attention.softmax_type",
    ),
    "attention's qk norm": (attention, {}, {"qk_norm_type": "L2Normalization"}, "qk_norm_type"),
    "MLP's activation": (mlp, {}, {"activation": "silu"}, "LayerNormMLP.activation"),
    "MLP's parameters": (
        mlp,
        {"activation": "clamped_swiglu"},
        {"activation": "clamped_swiglu", "activation_params": {"limit": 3.0}},
        "LayerNormMLP.activation_params",
    ),
    "MLP's norm": (mlp, {}, {"normalization": "RMSNorm"}, "LayerNormMLP.normalization"),
    "MLP's epsilon": (mlp, {}, {"eps": 0.1}, r"LayerNormMLP\.eps: rank 0: 1e-05; rank 1: 0\.1"),
    "MLP's size": (mlp, {}, {"ffn": 32}, "ffn_shard"),
    "MLP's bias": (mlp, {}, {"bias": False}, "use_bias"),
    "norm's gamma": (
        linear,
        {},
        {"zero_centered_gamma": True},
        "LayerNormLinear.zero_centered_gamma",
    ),
    "norm's epsilon": (linear, {}, {"eps": 0.1}, "LayerNormLinear.eps"),
    "norm": (linear, {}, {"normalization": "RMSNorm"}, "LayerNormLinear.normalization"),
    "linear's bias": (linear, {}, {"bias": False}, "LayerNormLinear.use_bias"),
}


NAMED = 14  # the first ones; the others are their neighbors


@pytest.mark.parametrize(
    "name",
    [
        name if number < NAMED else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(DIFFERENCES)
    ],
)
def test_a_setting_that_differs_is_reported_on_every_rank(name: str):
    build, first, second, text = DIFFERENCES[name]
    for message in messages(build, first, second):
        assert "the ranks of a process group differ" in message
        assert re.search(text, message), message


@pytest.mark.parametrize("build", [transformer_layer, attention, mlp, linear])
def test_equal_ranks_are_not_reported(build: Any):
    assert messages(build, {}, {}) == ["", ""]
    assert messages(lambda **options: copy.deepcopy(build(**options)), {}, {}) == ["", ""]


def test_settings_of_one_process_may_differ():
    """Layer names and functions are not compared between processes."""

    def build(rank: int) -> torch.nn.Module:
        return transformer_layer(name=f"layer of rank {rank}", init_method=lambda weight: None)

    assert messages(build, {"rank": 0}, {"rank": 1}) == ["", ""]


def test_a_written_setting_of_a_product_is_compared():
    def build(eps: float) -> torch.nn.Module:
        layer = mlp()
        layer.eps = eps
        return layer

    assert all(
        "LayerNormMLP.eps" in message for message in messages(build, {"eps": 1e-5}, {"eps": 0.1})
    )


def test_every_step_is_compared_with_te_check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TE_CHECK", "1")

    def run(rank: int) -> str:
        torch.manual_seed(0)
        layer = mlp()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        try:
            for step in range(3):
                layer.activation = "relu" if rank == 1 and step == 2 else "gelu"
                layer(torch.randn(8, 2, HIDDEN)).sum().backward()
                optimizer.step()
        except RuntimeError as error:
            return f"{step}: {error}"
        return ""

    assert all(re.match(r"2: .*activation: ", message) for message in run_on_threads(run, 2))
