"""convert_hf(model): the decoder layers of a transformers model as this package's layers, with the same weights.

    x + attention(norm(x))   ->   norm and q, k, v in one LayerNormLinear, te's rotation and attention, o_proj a Linear
    x + mlp(norm(x))         ->   norm, gate, up, activation and down in one LayerNormMLP
    the last norm, the loss  ->   RMSNorm, parallel_cross_entropy

Layers, embeddings and head stay the library's own modules, so that hooks, recorded hidden states, caches, generation,
gradient checkpointing and tied weights are as they were. A state dict keeps the library's names: `save_pretrained`
writes what `from_pretrained` of the stock class reads, and `revert_hf` brings the stock modules back.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ....common.recipe import Recipe
from ...conversion import DecoderConfig
from ...module.base import TransformerEngineBaseModule
from ...module.layernorm_mlp import LayerNormMLP
from ...module.loading import EXTRA_STATE
from ...module.rmsnorm import RMSNorm
from ...quantization.support import check_block
from .causal_loss import causal_loss
from .convertible import (
    REPLACED,
    check_decoder,
    check_hooks,
    decoder_config,
    decoders_of,
    fresh_layer,
    refuse_adapters,
)
from .fused_attention import SET_BY_CALLERS, FusedAttention
from .hooks import drop_hooks, renew_recorders
from .interface import NAME, register_te_attention
from .layer_names import LayerNames, LoadsTheirNames, SavesTheirNames
from .made_empty import norm_of, norm_place_of, place_of, unfilled
from .rotary_angles import give_angles, give_cosines
from .under_recipe import enter_recipe, leave_recipe

M = TypeVar("M", bound=nn.Module)


class Absorbed(nn.Identity):
    """y = x: the norm that stood here is computed by the product behind it, which holds its weight."""


@dataclass(frozen=True)
class Converted:
    """What `revert_hf` has to know of a decoder: the attention that it had."""

    attention: str


def convert_hf(model: M, recipe: Recipe | None = None) -> M:
    """The model itself, computing as before with the layers of this package.

    recipe   its forward runs under te.autocast(recipe=recipe), in training and in evaluation; None: products are in
             the parameters' precision, or in that of a te.autocast of the caller's

    Parameters are new ones: convert before the optimizer is made. Families: llama, mistral, qwen2, qwen3, gemma;
    ValueError for others and for layers that were changed, before anything is replaced. Under
    te.quantized_model_init the weights of the products become codes.
    """
    check_block(True, recipe)
    found = [(decoder, decoder_config(decoder)) for decoder in decoders_of(model)]
    for decoder, config in found:
        check_decoder(decoder, config)
    register_te_attention()
    for decoder, config in found:
        _convert(decoder, config, recipe)
    _take_causal_loss(model)
    _keep_extra_states_out_of_files(model)
    return model


def revert_hf(model: M) -> M:
    """The model itself, of its library's layers again, with the weights that it has by now.

    Weights of codes (te.quantized_model_init) come back as the values that the codes stand for.
    """
    decoders = [
        module for module in model.modules() if isinstance(getattr(module, "converted", None), Converted)
    ]
    if not decoders:
        raise ValueError(f"{type(model).__name__} is not converted; there is nothing to revert")
    refuse_adapters(model, "take them out with unload() first")
    for decoder in decoders:
        check_hooks(decoder)
    for decoder in decoders:
        _revert(decoder)
    renew_recorders(model)
    for module in model.modules():
        if module.__dict__.get("_loss_function") is causal_loss:
            del module._loss_function
        module.__dict__.pop("_keys_to_ignore_on_save", None)
    return model


def _take_causal_loss(model: Any) -> None:
    """Compute the library's loss of next tokens, where a model has that one, from logits in their own dtype."""
    library = importlib.import_module("transformers.loss.loss_utils")
    if getattr(model, "loss_function", None) is library.ForCausalLMLoss:
        model.loss_function = causal_loss


def _keep_extra_states_out_of_files(model: nn.Module) -> None:
    """save_pretrained leaves out what only this package reads; state_dict has it."""
    for module in model.modules():
        ignored = getattr(module, "_keys_to_ignore_on_save", None)
        if hasattr(module, "_keys_to_ignore_on_save"):
            states = [
                f"{name}.{EXTRA_STATE}"
                for name, part in module.named_modules()
                if isinstance(part, TransformerEngineBaseModule)
            ]
            module.__dict__["_keys_to_ignore_on_save"] = [*(ignored or ()), *states]


@torch.no_grad()
def _convert(decoder: Any, config: DecoderConfig, recipe: Recipe | None) -> None:
    names = LayerNames.of(decoder.config.model_type, config)
    for number, layer in enumerate(decoder.layers):
        _convert_layer(layer, number, config, names)
    norm = decoder.norm
    made = RMSNorm(
        config.hidden,
        eps=config.epsilon,
        zero_centered_gamma=config.zero_centered,
        **norm_place_of(norm.weight),
    )
    decoder.norm = made.train(norm.training)
    decoder.norm.weight = norm.weight
    give_angles(decoder.rotary_emb)
    enter_recipe(decoder, recipe)
    decoder.converted = Converted(decoder.config._attn_implementation)
    decoder.set_attn_implementation(NAME)


def _convert_layer(layer: Any, number: int, config: DecoderConfig, names: LayerNames) -> None:
    stock = dict(layer.named_parameters())
    wanted = dict(stock)
    names.to_ours(stock)
    frozen = {ours for ours, theirs in names.pairs() if theirs in wanted and not wanted[theirs].requires_grad}
    place = place_of(layer.mlp.down_proj.weight)
    mlp = LayerNormMLP(
        config.hidden,
        config.feed_forward,
        bias=config.mlp_bias,
        activation=config.activation,
        init_method=unfilled,
        output_layer_init_method=unfilled,
        **norm_of(config),
        **place,
    )
    attention = FusedAttention(layer.self_attn, config, number)
    for name, part in zip(REPLACED, (attention, mlp, Absorbed(), Absorbed()), strict=True):
        setattr(layer, name, part.train(layer.training))
    for name, parameter in layer.named_parameters():
        parameter.copy_(stock[name])
        parameter.requires_grad_(name not in frozen)
    layer.register_state_dict_post_hook(SavesTheirNames(names))
    layer.register_load_state_dict_pre_hook(LoadsTheirNames(names))


def _revert(decoder: Any) -> None:
    for number, layer in enumerate(decoder.layers):
        _revert_layer(layer, number, decoder.config)
    norm, stock = decoder.norm, decoder.layers[0].input_layernorm
    decoder.norm = type(stock)(norm.weight.shape[0], eps=norm.eps).train(norm.training)
    decoder.norm.weight = norm.weight
    give_cosines(decoder.rotary_emb)
    leave_recipe(decoder)
    if decoder.config._attn_implementation == NAME:
        decoder.set_attn_implementation(decoder.converted.attention)
    del decoder.converted


def _revert_layer(layer: Any, number: int, config: Any) -> None:
    state = {name: value for name, value in layer.state_dict().items() if not name.endswith(EXTRA_STATE)}
    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    names = next(hook.names for hook in layer._state_dict_hooks.values() if isinstance(hook, SavesTheirNames))
    drop_hooks(layer._state_dict_hooks, lambda hook: isinstance(hook, SavesTheirNames))
    drop_hooks(layer._load_state_dict_pre_hooks, lambda hook: isinstance(hook.hook, LoadsTheirNames))
    stock: Any = fresh_layer(layer, config, number)
    for name in SET_BY_CALLERS:
        setattr(stock.self_attn, name, getattr(layer.self_attn, name))
    for name in REPLACED:
        setattr(layer, name, getattr(stock, name).train(layer.training))
    layer.load_state_dict(state, assign=True)
    wants = {theirs: ours not in frozen for ours, theirs in names.pairs()}
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(wants.get(name, parameter.requires_grad))
