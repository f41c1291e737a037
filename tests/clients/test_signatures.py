"""Signatures as code written against the original calls them; the table is in `signatures`."""

from __future__ import annotations

import functools
import importlib
import inspect

import pytest
import torch

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.clients import signatures
from tests.clients.signatures import UNKNOWN
from transformer_engine.common import recipe
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    FlashAttentionUtils,
)
from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

WITHOUT_DEFAULT = inspect.Parameter.empty


def line_parameters(text: str) -> list[inspect.Parameter]:
    """Parse the parameters in a table line."""
    scope = {"UNKNOWN": UNKNOWN, "torch": torch}
    exec(f"def listed({' '.join(text.split())}): ...", scope)
    return list(inspect.signature(scope["listed"]).parameters.values())  # pyright: ignore


def differences(callable_, text: str, bound: bool = False) -> list[str]:
    """Differences that break a call written for the listed signature."""
    ours = list(inspect.signature(callable_).parameters.values())[int(bound) :]
    expected = line_parameters(text)
    by_name = {p.name: p for p in ours}
    results = []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p.name for p in ours if p.kind in positional]
    for index, reference in enumerate(p for p in expected if p.kind in positional):
        if index >= len(places) or places[index] != reference.name:
            results.append(f"place {index} is {places[index : index + 1]}, not {reference.name}")
    for reference in expected:
        actual = by_name.get(reference.name)
        if actual is None:
            results.append(f"{reference.name} is missing")
        elif (actual.default is WITHOUT_DEFAULT) != (reference.default is WITHOUT_DEFAULT):
            results.append(f"{reference.name} differs in having a default")
        elif (
            reference.default is not UNKNOWN
            and reference.default is not WITHOUT_DEFAULT
            and actual.default != reference.default
        ):
            results.append(f"{reference.name}={actual.default!r}, not {reference.default!r}")
    listed = {p.name for p in expected}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    results += [
        f"{p.name} has to be given"
        for p in ours
        if p.name not in listed and p.default is WITHOUT_DEFAULT and p.kind not in variadic
    ]
    return results


def resolve_path(path: str):
    """Return the object at a dotted path from transformer_engine.pytorch, through modules and attributes."""
    *modules, _ = path.split(".")
    for count in range(len(modules), -1, -1):
        name = ".".join(["transformer_engine.pytorch", *modules[:count]])
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, path.split(".")[count:], module)
    raise AssertionError(path)


@pytest.mark.parametrize("name", [*signatures.LAYERS, *signatures.TENSORS])
def test_a_constructor_is_called_as_in_the_original(name):
    result = getattr(te, name)
    text = (signatures.LAYERS | signatures.TENSORS)[name]
    call = result.__new__ if name == "QuantizerRole" else result.__init__
    assert differences(call, text, bound=True) == []


@pytest.mark.parametrize("name", signatures.METHODS)
def test_a_method_is_called_as_in_the_original(name):
    assert (
        differences(functools.reduce(getattr, name.split("."), te), signatures.METHODS[name]) == []
    )


@pytest.mark.parametrize("name", signatures.BASE_MODULE)
def test_a_method_of_the_base_module_is_called_as_in_the_original(name):
    assert (
        differences(getattr(TransformerEngineBaseModule, name), signatures.BASE_MODULE[name]) == []
    )


@pytest.mark.parametrize("name", signatures.RECIPES)
def test_a_recipe_is_made_as_in_the_original(name):
    assert differences(getattr(recipe, name), signatures.RECIPES[name]) == []


@pytest.mark.parametrize("name", signatures.FUNCTIONS)
def test_a_function_is_called_as_in_the_original(name):
    assert differences(resolve_path(name), signatures.FUNCTIONS[name]) == []


@pytest.mark.parametrize("name", signatures.EXTENSION)
def test_a_function_of_the_extension_is_called_as_in_the_original(name):
    expected = signatures.EXTENSION[name]
    if isinstance(expected, str):
        assert differences(getattr(tex, name), expected) == []
        return
    ours = inspect.signature(getattr(tex, name.removeprefix("COUNT "))).parameters.values()
    assert sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in ours) == expected


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in signatures.MEMBERS.items() for name in names.split()],
)
def test_a_member_of_the_original_exists(owner, name):
    assert hasattr(resolve_path(owner), name)


@pytest.mark.parametrize("name", signatures.TOP.split())
def test_the_top_package_has_names_that_live_deeper(name):
    assert getattr(te, name) is not None


def test_state_is_readable_as_class_attributes(device):
    for name in signatures.STATE_ATTRIBUTES.split():
        getattr(FP8GlobalStateManager, name)
    layer = te.Linear(16, 16, device=device)
    used = DelayedScaling()
    with te.autocast(recipe=used):
        assert FP8GlobalStateManager.FP8_ENABLED and FP8GlobalStateManager.FP8_RECIPE is used
        assert FP8GlobalStateManager.AUTOCAST_DEPTH == 1
        layer(torch.ones(16, 16, device=device))
        (amaxes,) = [
            result
            for key, result in FP8GlobalStateManager.global_amax_buffer.items()
            if key.startswith("forward")
        ]
        assert amaxes[0][0].item() == 1.0
    assert not FP8GlobalStateManager.FP8_ENABLED and FP8GlobalStateManager.AUTOCAST_DEPTH == 0
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        assert FP8GlobalStateManager.FP8_PARAMETERS


def test_slots_have_the_numbers_of_the_extensions_enumerations():
    for names, numbers in (
        (FP8FwdTensorIdx, tex.FP8FwdTensors),
        (FP8BwdTensorIdx, tex.FP8BwdTensors),
    ):
        assert vars(names) == {member.name: member.value for member in numbers}


def test_versions_are_compared_with_a_minimum():
    supported = FlashAttentionUtils.is_version_supported
    assert (
        supported("2.8.0", "2.7.3")
        and not supported("2.7.2", "2.7.3")
        and not supported(None, "2.0")
    )
    for version in ("2.1.1", "2.3.0", "2.8.3", "2.8.3+cu128torch2.9", "2.8.3.post1"):
        assert supported(version), version
    for version in ("2.1.0", "2.8.4", "2.8.4+cu128", "3.0.0", "1.0.9"):
        assert not supported(version), version


def test_attention_parameters_compare_the_recipe_of_their_meta_alone():
    one = AttentionParams(fp8_meta={"recipe": DelayedScaling(), "scaling_fwd": torch.ones(2)})
    assert one == AttentionParams(fp8_meta={"recipe": DelayedScaling()})
    assert one != AttentionParams(fp8_meta={"recipe": Float8CurrentScaling()})
    assert one != AttentionParams(fp8_meta={"recipe": DelayedScaling()}, num_heads=8)
    assert AttentionParams(core_attention_bias_type="no_bias").request().bias_gradient is False


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms_take_margins_by_number_stage_and_environment(kind, device, monkeypatch):
    names = ("fwd_ln_sm_margin", "bwd_ln_sm_margin", "inf_ln_sm_margin")
    norm = getattr(te, kind)(
        16, sm_margin={"forward": 1, "backward": 2, "inference": 3}, device=device
    )
    assert [getattr(norm, name) for name in names] == [1, 2, 3]
    assert norm(input=torch.ones(2, 16, device=device)).shape == (2, 16)
    monkeypatch.setenv("NVTE_BWD_LAYERNORM_SM_MARGIN", "7")
    norm = getattr(te, kind)(16, sm_margin=4, device=device)
    assert [getattr(norm, name) for name in names] == [4, 7, 4]
    fused = te.LayerNormLinear(16, 16, normalization=kind, device=device)
    assert [getattr(fused, name) for name in names] == [0, 7, 0]


def test_an_overlap_flag_changes_no_result(device):
    plain, flagged = (
        te.LayerNormLinear(16, 16, ub_overlap_rs=rs, device=device) for rs in (False, True)
    )
    flagged.load_state_dict(plain.state_dict())
    x = torch.randn(4, 16, device=device)
    assert torch.equal(plain(x), flagged(x))


def test_hooks_are_registered_by_keyword(device):
    layer = te.Linear(16, 16, delay_wgrad_compute=True, device=device)
    called = []
    layer.register_wgrad_accumulation_and_reduce_hooks(
        wgrad_accumulation_and_reduce_hook=lambda: called.append(1)
    )
    layer(torch.ones(16, 16, device=device)).sum().backward()
    layer.backward_dw()
    assert called == [1]


@pytest.mark.parametrize("module", [tex, None], ids=["extension", "package"])
def test_packed_sequences_convert_to_the_order_of_ranks_and_back(module, device):
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    x = torch.arange(12.0, device=device)[:, None]
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32, device=device)
    last = 12 if module is tex else 0  # the extension takes the token count, the package the axis
    to, back = (
        getattr(module or context_parallel, name)
        for name in ("thd_sequence_order_to_cp_rank_order", "thd_cp_rank_order_to_sequence_order")
    )
    ranked = to(x, cu_seqlens, 2, last)
    assert ranked[:, 0].tolist() == [0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]
    assert torch.equal(back(ranked, cu_seqlens, 2, last), x)
    with pytest.raises(ValueError, match="total_tokens=13" if module is tex else "seq_dim=1"):
        to(x, cu_seqlens, 2, 13 if module is tex else 1)


def test_a_score_mod_gets_its_tensors_as_keywords(device):
    q, k, v = (torch.randn(2, 8, 2, 16, device=device, requires_grad=True) for _ in range(3))
    table = torch.randn(2, device=device, requires_grad=True)

    def shift(score, b, h, i, j, slope):
        return score + slope[h] * j

    attention = te.DotProductAttention(2, 16, qkv_format="bshd")
    out = attention(q, k, v, score_mod=shift, score_mod_tensors={"slope": table})
    expected = attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h] * j)
    leaves = (q, k, v, table)
    got = torch.autograd.grad(out.square().sum(), leaves)
    for actual, reference in zip(
        got, torch.autograd.grad(expected.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(actual, reference)
    assert torch.equal(out, expected)
    other = attention(q, k, v, score_mod=shift, score_mod_tensors={"slope": -table})
    assert not torch.allclose(other, out)
    for options, error, words in (
        (
            {"score_mod_tensors": {"slope": table}},
            ValueError,
            "score_mod_tensors=.* without score_mod",
        ),
        (
            {"score_mod": shift, "score_mod_tensors": {"slope": 1.0}},
            TypeError,
            "no tensor under 'slope'",
        ),
        ({"score_mod_bprop_tensors": {}}, ValueError, "without score_mod_bprop"),
    ):
        with pytest.raises(error, match=words):
            attention(q, k, v, **options)
