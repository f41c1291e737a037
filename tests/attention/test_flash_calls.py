"""Arguments that the flash backends pass to their libraries; a literal library equals the reference."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from tests.attention import flash_library
from tests.attention.attention_oracle import cumulative
from transformer_engine.common import optional
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives.attention import reference
from transformer_engine.pytorch.primitives.attention.backends import flash2, flash3, flash4
from transformer_engine.pytorch.primitives.attention.call import (
    AttentionCall,
    AttentionInputs,
    Switches,
)
from transformer_engine.pytorch.primitives.attention.mask import resolve

LENGTHS_Q, LENGTHS_KV = [5, 3], [6, 7]


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    interface = types.ModuleType("flash_attn.cute.interface")
    interface.__dict__["_flash_attn_fwd"] = flash_library.flash_attn_fwd
    interface.__dict__["_flash_attn_bwd"] = flash_library.flash_attn_bwd
    package = types.ModuleType("flash_attn")
    third = types.ModuleType("flash_attn_interface")
    for module in (package, third):
        module.__dict__["flash_attn_func"] = flash_library.flash_attn_func
        module.__dict__["flash_attn_varlen_func"] = flash_library.flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    cute = types.ModuleType("flash_attn.cute")
    cute.__dict__["utils"] = flash_library.CuteUtilities()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", third)
    monkeypatch.setattr(flash4, "VERSION", "4.0.0")
    monkeypatch.setattr(flash2, "VERSION", "2.8.3")
    monkeypatch.setattr(flash3, "INSTALLED", True)
    monkeypatch.setattr(optional, "failure", lambda *_: None)
    flash4._score_functions.cache_clear()
    flash3._softcap_failure.cache_clear()


def sample(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(layout="bshd", mask="causal", window=None, groups=2, sink=False, **changes):
    """(request, inputs) for 2 sequences with 4 heads of size 8, float32."""
    request = AttentionCall(
        dtype=torch.float32,
        device_type="cpu",
        batch=2,
        heads=4,
        groups=groups,
        seqlen_q=5,
        seqlen_kv=7,
        head_dim_qk=8,
        head_dim_v=8,
        q_format=layout[:4].replace("thd ", "thd"),
        kv_format=layout[:4].replace("thd ", "thd"),
        mask=resolve(mask, window, None),
        scale=0.3,
        switches=Switches(),
        softmax="learnable" if sink else "vanilla",
        padded_between=layout == "thd with gaps",
    )
    packed = request.packed
    gaps = 2 if request.padded_between else 0
    lead_q, lead_kv = ((2, 5), (2, 7)) if layout == "bshd" else ((5, 2), (7, 2))
    if packed:
        lead_q, lead_kv = (sum(LENGTHS_Q) + 2 * gaps + 3,), (sum(LENGTHS_KV) + 2 * gaps + 3,)
    padding = request.mask.padding
    inputs = AttentionInputs(
        sample(*lead_q, 4, 8, seed=1),
        sample(*lead_kv, groups, 8, seed=2),
        sample(*lead_kv, groups, 8, seed=3),
        lengths_q=torch.tensor(LENGTHS_Q, dtype=torch.int32) if padding else None,
        lengths_kv=torch.tensor(LENGTHS_KV, dtype=torch.int32) if padding else None,
        starts_q=cumulative([n + gaps for n in LENGTHS_Q], "cpu") if packed else None,
        starts_kv=cumulative([n + gaps for n in LENGTHS_KV], "cpu") if packed else None,
        sink=sample(4, seed=4) if sink else None,
    )
    return replace(request, **changes), inputs


PROBLEMS = {
    "bottom right": {"mask": "causal_bottom_right"},
    "sbhd": {"layout": "sbhd", "mask": "no_mask"},
    "window": {"mask": "no_mask", "window": (2, 1)},
    "causal window": {"mask": "causal_bottom_right", "window": (2, 0), "groups": 1},
    "padding": {"mask": "padding", "sink": True},
    "padding, sbhd": {"layout": "sbhd", "mask": "padding_causal_bottom_right"},
    "thd with a tail": {"layout": "thd", "mask": "padding_causal_bottom_right", "sink": True},
    "thd with gaps": {"layout": "thd with gaps", "mask": "padding"},
    "softcap": {"mask": "causal_bottom_right", "softcap": 0.4},
    "softcap, thd with a tail": {
        "layout": "thd",
        "mask": "padding_causal_bottom_right",
        "softcap": 0.4,
    },
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_flash4_computes_the_request(name):
    request, inputs = problem(**PROBLEMS[name])
    got, expected = (backend.forward(request, inputs) for backend in (flash4, reference))
    torch.testing.assert_close(got.output, expected.output)
    grad = sample(*got.output.shape, seed=5)
    if request.padded_between or request.mask.padding:
        grad = torch.where(expected.output == 0, 0, grad)
    ours = flash4.backward(request, inputs, got, grad)
    original = reference.backward(request, inputs, expected, grad)
    for a, b in zip(ours, original, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
def test_flash4_reads_caches(layout, paged):
    request, inputs = problem(mask="padding_causal_bottom_right", needs_gradient=False, cached=True)
    k, v = inputs.k, inputs.v
    if paged:
        order = torch.tensor([[3, 0, 5, 1], [2, 7, 4, 6]], dtype=torch.int32)
        padded = [
            torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 1)).unflatten(1, (4, 2)) for x in (k, v)
        ]
        pages = [torch.empty(8, 2, 2, 8) for _ in padded]
        for store, x in zip(pages, padded, strict=True):
            store[order.flatten().long()] = x.flatten(0, 1)
        k, v = pages
        request = replace(request, page_size=2)
        inputs = inputs._replace(page_table=order)
    q = inputs.q
    if layout == "sbhd":
        q = q.transpose(0, 1).contiguous()
    if layout == "thd":
        q = torch.cat([q[b, :n] for b, n in enumerate(LENGTHS_Q)])
        inputs = inputs._replace(starts_q=cumulative(LENGTHS_Q, "cpu"))
    request, inputs = replace(request, q_format=layout), inputs._replace(q=q, k=k, v=v)
    expected = reference.forward(request, inputs).output
    got = flash4.forward(request, inputs)
    torch.testing.assert_close(got.output, expected)
    assert got.lse is None


@pytest.mark.parametrize("backend", [flash2, flash3], ids=["flash2", "flash3"])
@pytest.mark.parametrize(
    "name",
    [
        "bottom right",
        "sbhd",
        "window",
        "causal window",
        "thd with a tail",
        "softcap",
        "softcap, thd with a tail",
    ],
)
def test_installed_flash_packages_compute_the_request(name, backend):
    request, inputs = problem(**{**PROBLEMS[name], "sink": False})
    got = backend.run(request, inputs).output
    torch.testing.assert_close(got, reference.run(request, inputs).output)


def hopper_request(**changes):
    request = problem(groups=4)[0]
    fields = {
        "device_type": "cuda",
        "dtype": torch.bfloat16,
        "hardware": nvidia(9, 0),
        "seqlen_q": 7,
    }
    sizes = {"head_dim_qk": 64, "head_dim_v": 64}
    return replace(request, **{**fields, **sizes, **changes})


@pytest.mark.parametrize(
    "backend, changes, reason",
    [
        (flash4, {}, None),
        (flash3, {}, None),
        (flash2, {}, None),
        (flash4, {"switches": Switches(flash=False)}, "NVTE_FLASH_ATTN=0"),
        (flash4, {"switches": Switches(flash4=False)}, "NVTE_FLASH_ATTN_V4=0"),
        (flash3, {"switches": Switches(flash3=False)}, "NVTE_FLASH_ATTN_V3=0"),
        (flash2, {"switches": Switches(flash2=False)}, "NVTE_FLASH_ATTN_V2=0"),
        (
            flash4,
            {"hardware": nvidia(8, 0)},
            "compute capability 8.0 has no flash attention 4; NVIDIA GPUs of compute capability 9.0 and higher have",
        ),
        (
            flash3,
            {"hardware": nvidia(10, 0)},
            "compute capability 10.0 has no flash attention 3; NVIDIA GPUs of compute capability 9.0 have",
        ),
        (
            flash4,
            {"hardware": nvidia(10, 0), "head_dim_qk": 256, "head_dim_v": 256},
            "heads of size (256, 256) > 128",
        ),
        (
            flash4,
            {"head_dim_qk": 40},
            "heads of queries and keys have size 40; supported: multiples of 32",
        ),
        (
            flash4,
            {"head_dim_qk": 96, "head_dim_v": 96, "deterministic": True},
            "a deterministic gradient",
        ),
        (
            flash4,
            {"head_dim_qk": 192, "head_dim_v": 128, "groups": 2},
            "grouped heads of two sizes, 192 and 128",
        ),
        (flash4, {"page_size": 16}, "a gradient through a paged cache"),
        (flash4, {"seqlen_q": 5}, "a diagonal that begins top left"),
        (flash4, {"dropout": 0.1}, "attention_dropout"),
        (flash2, {"softmax": "off-by-one"}, "softmax_type='off-by-one'"),
        (flash3, {"bias": "alibi"}, "core_attention_bias_type='alibi'"),
        (
            flash4,
            {"mask": resolve("arbitrary", window_size=None, bottom_right_diagonal=None)},
            "attn_mask_type='arbitrary'",
        ),
        (flash4, {"padding_tensors": True}, "give cu_seqlens_q and cu_seqlens_kv"),
        (flash4, {"fp8": "delayed"}, "FP8 attention"),
        (flash4, {"dtype": torch.float32}, "the tensors are torch.float32"),
        (flash4, {"device_type": "cpu"}, "the tensors are on cpu"),
        (flash4, {"max_logit": True}, "return_max_logit"),
        (flash4, {"seqlen_q": 0}, "an empty tensor"),
        (flash4, {"score_mod": lambda score, *_: score}, "score_mod"),
        (flash4, {"softcap": 20.0}, None),
        (flash3, {"softcap": 20.0}, None),
        (flash2, {"softcap": 20.0, "bias": "alibi"}, None),
        (flash2, {"softcap": 20.0, "dropout": 0.1}, "softcap together with attention_dropout"),
        (flash3, {"head_dim_v": 128}, "heads of two sizes"),
        (flash2, {"page_size": 16}, "a paged cache"),
        (
            flash2,
            {"mask": resolve("padding", window_size=None, bottom_right_diagonal=None)},
            "lengths of padded sequences",
        ),
        (
            flash2,
            {"q_format": "thd", "kv_format": "thd", "padded_between": True},
            "tokens between packed sequences",
        ),
    ],
)
def test_rejections_name_the_value_and_the_limit(backend, changes, reason):
    result = backend.BACKEND.rejection_reason(hopper_request(**changes))
    assert (result is None) if reason is None else reason in (result or "")


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(flash4, "VERSION", None)
    monkeypatch.setattr(flash2, "VERSION", None)
    monkeypatch.setattr(flash3, "INSTALLED", False)
    for backend in (flash4, flash3, flash2):
        assert "is not installed" in (backend.BACKEND.rejection_reason(hopper_request()) or "")
    monkeypatch.setattr(flash2, "VERSION", "1.0.9")
    expected = "is not a version from 2.1.1 up to, not including, 2.8.4"
    for version in ("1.0.9", "2.1.0", "2.8.4", "2.8.4+cu128"):
        monkeypatch.setattr(flash2, "VERSION", version)
        assert flash2.unsupported_reason(hopper_request()) == f"flash-attn {version} {expected}"


@pytest.mark.parametrize(
    "version", ["2.1.1", "2.3.6", "2.4.0", "2.4.1", "2.8.3", "2.8.3+cu128torch2.9"]
)
def test_flash2_receives_the_options_that_its_release_has(version, monkeypatch):
    monkeypatch.setattr(flash2, "VERSION", version)
    arguments = []
    package = sys.modules["flash_attn"]
    function = package.flash_attn_func

    def call(*tensors, **options):
        arguments.append(options)
        present = {"window_size": (-1, -1), "alibi_slopes": None, "deterministic": False}
        return function(*tensors, **present | options)

    monkeypatch.setattr(package, "flash_attn_func", call)
    request, inputs = problem(mask="causal_bottom_right")
    torch.testing.assert_close(
        flash2.run(request, inputs).output, reference.forward(request, inputs).output.flatten(-2)
    )
    actual = flash2.release(version)
    later = {"window_size": (2, 3, 0), "alibi_slopes": (2, 4, 0), "deterministic": (2, 4, 1)}
    assert set(arguments[0]) == {"dropout_p", "softmax_scale", "causal"} | {
        name for name, first in later.items() if actual >= first
    }


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        (
            "2.2.5",
            {"mask": resolve("no_mask", (4, 4), None)},
            "no sliding window, which came with 2.3",
        ),
        ("2.3.6", {"bias": "alibi"}, "no ALiBi, which came with 2.4"),
        ("2.4.0", {"deterministic": True}, "no deterministic backward pass, which came with 2.4.1"),
        ("2.5.9", {"softcap": 20.0}, "no softcap, which came with 2.6"),
    ],
)
def test_an_older_flash2_names_the_option_that_it_lacks(version, changes, reason, monkeypatch):
    monkeypatch.setattr(flash2, "VERSION", version)
    assert reason in (flash2.unsupported_reason(hopper_request(**changes)) or "")


def test_flash4_has_softcap_gradients_where_the_library_has_them(monkeypatch):
    monkeypatch.setattr(flash4, "VERSION", "4.0.0b30")
    assert "4.0.0b36 has its gradient" in (
        flash4.BACKEND.rejection_reason(hopper_request(softcap=20.0)) or ""
    )
    monkeypatch.setattr(flash4, "VERSION", "4.0.0b36")
    assert flash4.BACKEND.rejection_reason(hopper_request(softcap=20.0)) is None
    workstation = hopper_request(softcap=20.0, hardware=nvidia(12, 0))
    reason = flash4.BACKEND.rejection_reason(workstation)
    assert reason is not None and "12.0 has no flash attention 4 gradients of scores" in reason
    assert flash4.BACKEND.rejection_reason(replace(workstation, needs_gradient=False)) is None


def test_flash4_creates_a_softcaps_functions_once():
    request, inputs = problem(**PROBLEMS["softcap"])
    flash4.forward(request, inputs)
    functions = flash4._score_functions(0.4)
    flash4.forward(request, inputs)
    assert flash4._score_functions(0.4) is functions
    assert flash4._score_functions(0.5)[0] is not functions[0]


def test_a_flash3_without_the_argument_softcap_is_named(monkeypatch):
    def older(q, k, v, *, softmax_scale, causal, window_size, deterministic): ...

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_varlen_func", older)
    flash3._softcap_failure.cache_clear()
    reason = flash3.BACKEND.rejection_reason(hopper_request(softcap=20.0)) or ""
    assert (
        "flash_attn_varlen_func of the installed flash-attention 3 has no argument softcap"
        in reason
    )
    assert flash3.BACKEND.rejection_reason(hopper_request()) is None
