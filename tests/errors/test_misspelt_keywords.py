"""Misspelt keywords: every public callable in both frameworks names the most similar parameter."""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator
from enum import EnumMeta
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.common.checks import nearest
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, Quantizer

# Arguments that these pass on: to the model, the checkpointed function, the explained function or `ModelShape`; and
# switches whose parameter is any name.
PASSING = {"checkpoint", "explain", "memory_plan", "plan", "use_backend"}
# Tensor, quantizer and record constructors, which extensions and tests call, and names without a keyword.
STORAGES = (QuantizedTensorStorage, Quantizer, torch.Tensor, tuple, torch.autograd.Function)
OTHERS = {
    *(
        "Observation",
        "Verification",
        "FusedMLAQUpProjRopeQuant",
        "DelayedScalingRequest",
        "QuantizerRequest",
    ),
    *("QuantizerRole", "OperationContext", "OperationFuser", "MultiTensorApply"),
}
EXTENSIONS = ("multi_tensor", "register_", "extend_", "TransformerLayerType")
QUERIES = ("is_", "get_", "plain_", "conversion_table", "restore", "revert_hf", "prepare_for")


def callables(module: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in module.__all__:
        value = getattr(module, name)
        if not callable(value) or name in PASSING | OTHERS or name.startswith(QUERIES):
            continue
        if inspect.isclass(value) and (issubclass(value, STORAGES) or isinstance(value, EnumMeta)):
            continue
        if inspect.isclass(value) and inspect.isabstract(value):
            continue
        yield name, value


def keywords(function: Callable[..., Any]) -> list[str]:
    """Parameters that callers can name, without private ones."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in kinds and not p.name.startswith("_")]


def cases() -> Iterator[Any]:
    modules = {"te": te, "ops": te.ops, "optimizers": te.optimizers}
    if importlib.util.find_spec("flax") is not None:
        import transformer_engine.jax as te_jax
        import transformer_engine.jax.flax as te_flax

        modules |= {"jax": te_jax, "flax": te_flax}
    for prefix, module in modules.items():
        for name, value in callables(module):
            if max(map(len, keywords(value)), default=0) > 3 and not name.startswith(EXTENSIONS):
                yield pytest.param(value, id=f"{prefix}.{name}")


@pytest.mark.parametrize("function", list(cases()))
def test_misspelt_keywords_raise_with_the_correct_name(function: Callable[..., Any]):
    name = max(keywords(function), key=len)
    misspelt = name[:-2] + name[-1]  # one letter is missing
    with pytest.raises(TypeError) as raised:
        result = function(**{misspelt: None})
        result.__enter__()  # JAX blocks check their arguments when they are entered
    assert str(raised.value) == f"{function.__name__}() takes no {misspelt}=; did you mean {name}=?"


def test_keywords_without_a_similar_parameter_get_no_suggestion():
    with pytest.raises(TypeError, match=r"Linear\(\) takes no zzz=; leave it out"):
        te.Linear(16, 16, zzz=1)


def test_the_first_word_of_a_parameter_suggests_it_unless_several_begin_with_it():
    names = ("dp_resource", "tp_resource", "tp_resource_size")
    assert nearest("dp", names) == "dp_resource"
    assert nearest("tp", names) is None


def test_recipes_name_the_field_that_an_ignored_argument_resembles():
    with pytest.warns(
        UserWarning,
        match=r"ignores unknown arguments: amax_history \(did you mean amax_history_len\?\)",
    ):
        recipe.DelayedScaling(amax_history=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recipe.DelayedScaling(amax_history_len=16)


def test_a_jax_recipe_without_enabled_warns_that_nothing_is_quantized():
    pytest.importorskip("flax")
    te_jax = importlib.import_module("transformer_engine.jax")
    with pytest.warns(UserWarning, match="enabled is False by default.*pass enabled=True"):
        te_jax.autocast(recipe=recipe.DelayedScaling())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te_jax.autocast(enabled=False, recipe=recipe.DelayedScaling())
        te_jax.autocast(False, recipe.DelayedScaling())
        te_jax.autocast()
        te_jax.autocast(enabled=True, recipe=recipe.DelayedScaling())
        te.autocast(recipe=recipe.DelayedScaling())


def test_users_operations_receive_their_own_keywords():
    class Scaled(te.ops.GELU):
        def __init__(self, scale: float = 1.0, **kwargs: Any) -> None:
            super().__init__()
            self.others = kwargs

    assert Scaled(scael=2.0).others == {"scael": 2.0}
    assert list(inspect.signature(te.ops.Linear).parameters)[:2] == ["in_features", "out_features"]


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (
            lambda: te.DotProductAttention(4, 16, qkv_format="bsdh"),
            r"thd \(did you mean 'bshd'\?\)",
        ),
        (
            lambda: te.TransformerLayer(64, 128, 4, self_attn_mask_type="causel"),
            r"\(did you mean 'causal'\?\)",
        ),
        (
            lambda: te.LayerNormMLP(64, 128, activation="gleu"),
            r"\(did you mean 'gelu'\?\)|\(did you mean 'g?e?glu'\?\)",
        ),
        (
            lambda: te.LayerNormMLP(64, 128, normalization="BatchNorm1d"),
            "choose one of LayerNorm, RMSNorm$",
        ),
    ],
)
def test_misspelt_options_raise_with_the_nearest_name(call: Callable[[], Any], meant: str):
    with pytest.raises(ValueError, match=meant):
        call()
