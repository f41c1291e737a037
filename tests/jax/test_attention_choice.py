"""Attention backends on a CPU and an H200: one supports every case, and the others return a reason."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from transformer_engine.common.hardware import nvidia
from transformer_engine.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout
from transformer_engine.jax.primitives.attention import (
    SHORT,
    TABLE,
    AttentionRequest,
    cudnn,
    cudnn_packed,
    triton,
)

WHOLE, PACKED = QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD
ROWS = (
    (WHOLE, "whole"),
    (WHOLE, "lengths"),
    (WHOLE, "segments"),
    (WHOLE, "mask"),
    (PACKED, "segments"),
)
WINDOWS = (None, (16, 0), (16, 4))
LONG = SHORT + 1  # query tokens: cuDNN is preferred
# (dtype, key heads, key tokens, key and value extents, dropout, score_mod)
REST = (
    (jnp.bfloat16, 8, LONG, 128, 128, 0.0, False),
    (jnp.float16, 2, LONG + 32, 64, 32, 0.0, False),
    (jnp.bfloat16, 4, LONG, 192, 128, 0.1, False),
    (jnp.float32, 1, LONG, 64, 64, 0.0, False),
    (jnp.bfloat16, 8, LONG, 256, 256, 0.0, False),
    (jnp.bfloat16, 8, LONG, 128, 128, 0.0, True),
)


def requests(platform: str) -> Iterator[AttentionRequest]:
    """Every mask with every bias, sink, window and row layout, in each shape above, with gradients."""
    kinds = itertools.product(AttnMaskType, AttnBiasType, AttnSoftmaxType, WINDOWS, ROWS, REST)
    for mask, bias, softmax, window, (layout, rows), (
        dtype,
        groups,
        keys,
        d_qk,
        d_v,
        dropout,
        modified,
    ) in kinds:
        yield AttentionRequest(
            jnp.dtype(dtype),
            layout,
            bias,
            mask,
            softmax,
            dropout,
            8,
            groups,
            LONG,
            keys,
            d_qk,
            d_v,
            window,
            True,
            platform,
            rows,
            modified,
            3 if layout is PACKED else 1,
        )


@pytest.fixture
def h200(monkeypatch):
    """H200 libraries with cuDNN 9.19, as far as choices query them."""
    monkeypatch.setattr(
        triton,
        "platform_failure",
        lambda platform, name: None if platform == "cuda" else "no GPU here",
    )
    monkeypatch.setattr(cudnn, "hardware", lambda: nvidia(9, 0))
    for name, said in (("library_failure", None), ("failure", None), ("library_version", 91900)):
        monkeypatch.setattr(cudnn_packed, name, lambda said=said: said)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_every_attention_has_a_backend_and_every_rejection_a_reason(platform, h200):
    takers = set()
    for request in requests(platform):
        reasons = {
            backend.name: backend.rejection_reason(request) for backend in TABLE.candidates(request)
        }
        assert None in reasons.values(), request
        assert all(said is None or len(said.split()) > 2 for said in reasons.values()), reasons
        takers.add(next(name for name, said in reasons.items() if said is None))
    assert takers == ({"reference"} if platform == "cpu" else {"cudnn", "triton", "reference"})


def test_gpu_uses_the_reference_only_for_score_functions_and_packed_biases(h200):
    """Sinks, bottom-right masks, windows on both sides, packed rows and dropout have kernels, gradients included."""
    for request in requests("cuda"):
        taker = next(
            b.name for b in TABLE.candidates(request) if b.rejection_reason(request) is None
        )
        left = request.modified or (
            request.layout is PACKED and request.bias is not AttnBiasType.NO_BIAS
        )
        assert (taker == "reference") is left, request


def test_deterministic_mode_excludes_cudnn_gradients(h200, monkeypatch):
    request = next(
        request for request in requests("cuda") if cudnn.unsupported_reason(request) is None
    )
    forward = request._replace(training=False)
    selection = [TABLE.chosen(one) for one in (request, forward)]
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert selection == ["cudnn", "cudnn"]
    assert [TABLE.chosen(one) for one in (request, forward)] == ["triton", "cudnn"]
    assert "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0" in (cudnn.unsupported_reason(request) or "")


@pytest.mark.parametrize(
    ("queries", "keys", "tokens", "layout", "first"),
    [
        (SHORT, SHORT, "whole", WHOLE, "triton"),
        (SHORT + 1, SHORT, "whole", WHOLE, "cudnn"),
        (SHORT, SHORT + 1, "whole", WHOLE, "cudnn"),
        (SHORT, SHORT, "part", WHOLE, "cudnn"),
        (SHORT, SHORT, "whole", PACKED, "cudnn"),
    ],
)
def test_short_sequences_prefer_the_triton_kernels(queries, keys, tokens, layout, first, h200):
    request = next(
        request for request in requests("cuda") if cudnn.unsupported_reason(request) is None
    )
    requested = request._replace(queries=queries, keys=keys, tokens=tokens, layout=layout)
    assert TABLE.candidates(requested)[0].name == first
