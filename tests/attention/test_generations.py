"""Attention on simulated GPUs: rows by hardware and library version, with reasons that name version and remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.test_cudnn import PACKED, installed, request  # noqa: F401
from transformer_engine.common.hardware import ROWS, nvidia
from transformer_engine.common.kernels import launch
from transformer_engine.pytorch.functions.attention.fp8 import BACKWARD, FORWARD, BackwardRequest
from transformer_engine.pytorch.primitives.attention.backends import (
    cudnn,
    cudnn_fp8,
    flash2,
    flash4,
)
from transformer_engine.pytorch.primitives.attention.choose import preference

WIDE = {"head_dim_qk": 192, "head_dim_v": 192}
LARGEST = {"head_dim_qk": 256, "head_dim_v": 256}
MLA = {"head_dim_qk": 192, "head_dim_v": 128}
HEADS = {"head_dim_qk": 128, "head_dim_v": 128}


def rejection(monkeypatch, hardware, version=(9, 28, 1), **options: Any) -> str | None:
    for module in (cudnn, cudnn_fp8):
        monkeypatch.setattr(module, "get_cudnn_version", lambda: version)
    return cudnn.BACKEND.rejection_reason(request(hardware=nvidia(*hardware), **options))


@pytest.mark.parametrize(
    ("hardware", "options", "words"),
    [
        ((10, 0), WIDE, "head size 192 in the backward pass: compute capability 10.0 has no"),
        ((10, 0), LARGEST, None),
        ((10, 3), MLA, None),
        ((9, 0), WIDE, None),
        ((11, 0), MLA, "head size 192 > 128 in the backward pass on compute capability 11.0"),
        ((12, 0), MLA, "head size 192 > 128 in the backward pass on compute capability 12.0"),
        ((12, 1), LARGEST, "head size 256 > 128 in the backward pass on compute capability 12.1"),
        ((12, 0), HEADS, None),
        ((12, 0), {**LARGEST, "needs_gradient": False}, None),
        (
            (12, 0),
            {"deterministic": True},
            "compute capability 12.0 has no cudnn deterministic attention",
        ),
        (
            (12, 0),
            {"mask": "padding", **PACKED},
            "compute capability 12.0 has no cudnn ragged statistics",
        ),
        ((12, 0), {"mask": "padding", "needs_gradient": False, **PACKED}, None),
        ((10, 0), {"deterministic": True}, None),
        ((8, 9), {"cached": True, "needs_gradient": False}, "8.9 has no cudnn cached attention"),
        ((12, 0), {"cached": True, "needs_gradient": False}, "12.0 has no cudnn cached attention"),
        ((8, 0), {"cached": True, "needs_gradient": False}, None),
    ],
)
def test_cudnn_accepts_calls_with_an_engine(hardware, options, words, installed, monkeypatch):  # noqa: F811
    reason = rejection(monkeypatch, hardware, **options)
    assert reason is None if words is None else words in str(reason)


def test_an_old_cudnn_on_12_is_rejected_with_version_and_remedy(installed, monkeypatch):  # noqa: F811
    reason = rejection(monkeypatch, (12, 0), version=(9, 18, 0))
    assert (
        reason is not None and "cuDNN 9.18.0 has no attention for compute capability 12.0" in reason
    )
    assert "9.18.1 and higher have; pip install --upgrade nvidia-cudnn-cu13" in reason
    assert rejection(monkeypatch, (12, 0), version=(9, 18, 1)) is None
    assert rejection(monkeypatch, (10, 0), version=(9, 18, 0)) is None


@pytest.mark.parametrize(
    ("hardware", "version", "options", "words"),
    [
        ((9, 0), (9, 19, 0), {**HEADS, "fp8": "current"}, None),
        ((10, 0), (9, 28, 1), {**HEADS, "fp8": "current"}, None),
        ((10, 3), (9, 28, 1), {**HEADS, "fp8": "delayed"}, None),
        ((10, 0), (9, 13, 1), {**HEADS, "fp8": "delayed"}, None),
        (
            (10, 0),
            (9, 13, 1),
            {**HEADS, "fp8": "current"},
            "current scaling on compute capability 10.0, 9.14.0",
        ),
        (
            (10, 0),
            (9, 20, 0),
            {**MLA, "fp8": "current"},
            "heads of 192/128 on compute capability 10.0, 9.21.0",
        ),
        ((10, 0), (9, 21, 0), {**MLA, "fp8": "current"}, None),
        ((10, 0), (9, 17, 1), {**HEADS, "fp8": "current", "deterministic": True}, "9.18.0 has"),
        ((10, 0), (9, 28, 1), {**LARGEST, "fp8": "current"}, "supported: up to 128, and 192/128"),
        ((12, 0), (9, 28, 1), {**HEADS, "fp8": "current"}, "12.0 has no cudnn fp8 attention"),
        ((8, 9), (9, 28, 1), {**HEADS, "fp8": "current"}, "8.9 has no cudnn fp8 attention"),
        ((10, 0), (9, 28, 1), {**HEADS, "fp8": "block"}, "the recipe scales blocks"),
    ],
)
def test_fp8_attention_follows_hardware_and_version(
    hardware,
    version,
    options,
    words,
    installed,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(cudnn_fp8, "get_cudnn_version", lambda: version)
    verdicts = FORWARD.explain(request(hardware=nvidia(*hardware), **options))
    chosen = next(verdict.backend for verdict in verdicts if verdict.chosen)
    if words is None:
        assert chosen == "cudnn"
        return
    reason = str(verdicts[0].reason)
    # Decoded tensors are attended in 16 bits.
    assert chosen == "emulated" and words in reason and cudnn_fp8.DECODED in reason
    if "current scaling" in words or "192/128 on" in words:
        assert "pip install --upgrade nvidia-cudnn" in reason


def test_fp8_gradients_take_more_heads_on_10_and_run_on_request(installed, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cudnn_fp8, "get_cudnn_version", lambda: (9, 28, 1))

    def choose(hardware, requested, **options):
        call = request(hardware=nvidia(*hardware), fp8="delayed", **options)
        verdicts = BACKWARD.explain(BackwardRequest(call, "cudnn", requested))
        return next((v.backend, verdicts[0].reason) for v in verdicts if v.chosen)

    assert choose((10, 0), True)[0] == "cudnn"
    assert choose((10, 0), True, **MLA)[0] == "cudnn"
    assert choose((9, 0), True) == (
        "emulated",
        "head sizes 64 and 64 in the backward pass; supported: 128",
    )
    name, reason = choose((10, 0), None)
    assert name == "high_precision" and "not measured on compute capability 10.0" in str(reason)


@pytest.mark.parametrize(
    ("hardware", "version", "options", "words"),
    [
        ((9, 0), "4.0.0b10", {}, None),
        ((10, 0), "4.0.0b10", {}, None),
        ((12, 0), "4.0.0b36", {}, None),
        ((12, 0), "4.0.0b10", {}, "4.0.0b36 has; pip install --pre --upgrade flash-attn-4"),
        ((12, 0), "4.0.0b36", WIDE, "heads of size (192, 192) > 128"),
        (
            (12, 0),
            "4.0.0b36",
            {"cached": True, "needs_gradient": False},
            "12.0 has no flash attention 4 of a cache",
        ),
        ((8, 0), "4.0.0b36", {}, "compute capability 8.0 has no flash attention 4"),
    ],
)
def test_flash4_follows_hardware_and_release(hardware, version, options, words, monkeypatch):
    monkeypatch.setattr(flash4, "VERSION", version)
    monkeypatch.setattr(flash4.optional, "failure", lambda *names: None)
    reason = flash4.BACKEND.rejection_reason(request(hardware=nvidia(*hardware), **options))
    assert reason is None if words is None else words in str(reason)


WITH_DROPOUT = {**LARGEST, "dropout": 0.1}
INFERENCE = {**WITH_DROPOUT, "needs_gradient": False}


@pytest.mark.parametrize(
    ("hardware", "version", "options", "words"),
    [
        ((12, 0), "2.8.3", HEADS, None),
        (
            (12, 0),
            "2.7.2.post1",
            HEADS,
            "no kernels for compute capability 12.0, 2.7.3 and higher have",
        ),
        ((10, 3), "2.7.2", HEADS, "pip install --upgrade --no-build-isolation flash-attn"),
        ((9, 0), "2.7.2", HEADS, None),
        ((8, 9), "2.3.6", HEADS, None),
        ((12, 0), "2.8.3", LARGEST, None),
        (
            (12, 1),
            "2.8.3",
            WITH_DROPOUT,
            "heads of size 256 > 192 with dropout on compute capability 12.1",
        ),
        ((12, 0), "2.8.3", INFERENCE, None),
        ((8, 6), "2.5.4", LARGEST, "on compute capability 8.6, 2.5.5 and higher have"),
        ((8, 9), "2.5.5", LARGEST, None),
        ((8, 0), "2.5.4", WITH_DROPOUT, None),
        ((11, 0), "2.8.3", WITH_DROPOUT, None),
        ((12, 0), "2.8.3", {"head_dim_qk": 100, "head_dim_v": 100}, "multiples of 8 up to 256"),
    ],
)
def test_flash2_follows_hardware_and_release(hardware, version, options, words, monkeypatch):
    monkeypatch.setattr(flash2, "VERSION", version)
    monkeypatch.setattr(flash2.optional, "failure", lambda *names: None)
    reason = flash2.BACKEND.rejection_reason(request(hardware=nvidia(*hardware), **options))
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.vendor == "nvidia"], ids=lambda row: row.architecture
)
def test_cudnn_precedes_flash4_where_flash4_was_not_run(row, monkeypatch):
    monkeypatch.setattr(launch, "unavailable_reason", lambda hardware: None)
    order = preference(request(hardware=row, seqlen_q=4096, seqlen_kv=4096, dtype=torch.bfloat16))
    first = "cudnn" if row.architecture in ("11.0", "12.0", "12.1") else "flash4"
    assert order[0] == first and sorted(order) == sorted(preference(request(hardware=nvidia(9, 0))))
