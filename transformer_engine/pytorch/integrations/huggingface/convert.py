"""convert_hf(model): replaces the decoder layers of a transformers model by this package's layers, in place.

* x + attention(norm(x)): norm and q, k, v become one LayerNormLinear, followed by te's rotation and attention; o_proj
  becomes a Linear.
* x + mlp(norm(x)): norm, gate, up, activation and down become one LayerNormMLP.
* The last norm and the loss become RMSNorm and parallel_cross_entropy.

Layers, embeddings and head remain the library's own modules, so that hooks, recorded hidden states, caches, generation,
gradient checkpointing and tied weights work as before. A state dict uses the library's names: `from_pretrained` in the
stock class reads the files from `save_pretrained`, and `revert_hf` restores the stock modules.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....common.checks import suggests_keywords
from ....common.recipe import Recipe
from ...conversion import DecoderConfig
from ...cross_entropy import parallel_cross_entropy
from ...module.base import TransformerEngineBaseModule
from ...module.layernorm_mlp import LayerNormMLP
from ...module.loading import EXTRA_STATE
from ...module.rmsnorm import RMSNorm
from ...quantization.support import check_block
from .convertible import (
    REPLACED,
    check_decoder,
    check_hooks,
    decoder_config,
    factory_kwargs,
    find_decoders,
    fresh_layer,
    leave_unfilled,
    norm_factory_kwargs,
    norm_keywords,
    reject_adapters,
)
from .fused_attention import SET_BY_CALLERS, FusedAttention
from .hooks import (
    drop_hooks,
    enter_recipe,
    leave_recipe,
    renew_recorders,
    return_angles,
    return_cosines,
)
from .interface import NAME, register_te_attention
from .layer_names import LayerNames, LoadsTheirNames, SavesTheirNames

M = TypeVar("M", bound=nn.Module)


class Absorbed(nn.Identity):
    """y = x in place of a norm that the following LayerNormLinear or LayerNormMLP computes."""


@dataclass(frozen=True)
class Converted:
    """The attention implementation of a decoder before its conversion, for `revert_hf`."""

    attention: str


@suggests_keywords
def convert_hf(model: M, recipe: Recipe | None = None) -> M:
    """Replace the decoder layers of a model by this package's layers, and return the model.

    Parameters are replaced: convert before constructing the optimizer. Under
    te.quantized_model_init the product weights are quantized.

    Args:
        model: A transformers model in the families llama, mistral, qwen2, qwen3 or gemma.
        recipe: The forward runs under te.autocast(recipe=recipe), in training and in evaluation. With None, products
            use the parameters' precision, or the caller's te.autocast.

    Raises:
        ValueError: The family is not supported, or layers were modified; nothing is replaced.
    """
    check_block(True, recipe)
    decoders = [(decoder, decoder_config(decoder)) for decoder in find_decoders(model)]
    for decoder, config in decoders:
        check_decoder(decoder, config)
    register_te_attention()
    for decoder, config in decoders:
        _convert(decoder, config, recipe)
    library = importlib.import_module("transformers.loss.loss_utils")
    converted: Any = model
    if getattr(converted, "loss_function", None) is library.ForCausalLMLoss:
        converted.loss_function = causal_loss
    for module in model.modules():  # `save_pretrained` omits tensors that only this package reads
        if not hasattr(module, "_keys_to_ignore_on_save"):
            continue
        states = [
            f"{name}.{EXTRA_STATE}"
            for name, part in module.named_modules()
            if isinstance(part, TransformerEngineBaseModule)
        ]
        ignored: Any = module._keys_to_ignore_on_save
        module.__dict__["_keys_to_ignore_on_save"] = [*(ignored or ()), *states]
    return model


def revert_hf(model: M) -> M:
    """Restore the transformers layers with the current weights, and return the model.

    Args:
        model: A model that `convert_hf` converted. Quantized weights (te.quantized_model_init) are dequantized.
    """
    decoders: list[Any] = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "converted", None), Converted)
    ]
    if not decoders:
        raise ValueError(f"{type(model).__name__} is not converted; there is nothing to revert")
    reject_adapters(model, "take them out with unload() first")
    for decoder in decoders:
        check_hooks(decoder)
    for decoder in decoders:
        for number, layer in enumerate(decoder.layers):
            state = {
                name: value
                for name, value in layer.state_dict().items()
                if not name.endswith(EXTRA_STATE)
            }
            frozen = {
                name for name, parameter in layer.named_parameters() if not parameter.requires_grad
            }
            names = next(
                hook.names
                for hook in layer._state_dict_hooks.values()
                if isinstance(hook, SavesTheirNames)
            )
            drop_hooks(layer._state_dict_hooks, lambda hook: isinstance(hook, SavesTheirNames))
            drop_hooks(
                layer._load_state_dict_pre_hooks,
                lambda hook: isinstance(hook.hook, LoadsTheirNames),
            )
            stock: Any = fresh_layer(layer, decoder.config, number)
            for name in SET_BY_CALLERS:
                setattr(stock.self_attn, name, getattr(layer.self_attn, name))
            for name in REPLACED:
                setattr(layer, name, getattr(stock, name).train(layer.training))
            layer.load_state_dict(state, assign=True)
            wants = {
                original_name: engine_name not in frozen
                for engine_name, original_name in names.pairs()
            }
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(wants.get(name, parameter.requires_grad))
        norm, stock = decoder.norm, decoder.layers[0].input_layernorm
        decoder.norm = type(stock)(norm.weight.shape[0], eps=norm.eps).train(norm.training)
        decoder.norm.weight = norm.weight
        return_cosines(decoder.rotary_emb)
        leave_recipe(decoder)
        if decoder.config._attn_implementation == NAME:
            decoder.set_attn_implementation(decoder.converted.attention)
        del decoder.converted
    renew_recorders(model)
    for module in model.modules():
        if module.__dict__.get("_loss_function") is causal_loss:
            del module._loss_function
        module.__dict__.pop("_keys_to_ignore_on_save", None)
    return model


@torch.no_grad()
def _convert(decoder: Any, config: DecoderConfig, recipe: Recipe | None) -> None:
    names = LayerNames.of(decoder.config.model_type, config)
    for number, layer in enumerate(decoder.layers):
        _convert_layer(layer, number, config, names)
    norm = decoder.norm
    converted = RMSNorm(
        config.hidden,
        eps=config.epsilon,
        zero_centered_gamma=config.zero_centered,
        **norm_factory_kwargs(norm.weight),
    )
    decoder.norm = converted.train(norm.training)
    decoder.norm.weight = norm.weight
    return_angles(decoder.rotary_emb)
    enter_recipe(decoder, recipe)
    decoder.converted = Converted(decoder.config._attn_implementation)
    decoder.set_attn_implementation(NAME)


def _convert_layer(layer: Any, number: int, config: DecoderConfig, names: LayerNames) -> None:
    stock = dict(layer.named_parameters())
    theirs_by_name = dict(stock)
    names.to_ours(stock)
    frozen = {
        engine_name
        for engine_name, original_name in names.pairs()
        if original_name in theirs_by_name and not theirs_by_name[original_name].requires_grad
    }
    place = factory_kwargs(layer.mlp.down_proj.weight)
    mlp = LayerNormMLP(
        config.hidden,
        config.feed_forward,
        bias=config.mlp_bias,
        activation=config.activation,
        init_method=leave_unfilled,
        output_layer_init_method=leave_unfilled,
        **norm_keywords(config),
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


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the next-token cross entropy, with the signature of transformers' causal language models.

    transformers makes a float32 copy of the logits, the largest tensor in a step; this function reads them in their
    dtype and computes in float32. It does not modify the logits, which callers read after the backward pass.

    Returns:
        The mean over the counted tokens, or their sum divided by num_items_in_batch.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = logits.reshape(1, -1, vocab_size)
    targets = shift_labels.reshape(1, -1).to(logits.device)
    mean = num_items_in_batch is None
    loss = parallel_cross_entropy(rows, targets, reduce_loss=mean, ignore_idx=ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss.sum() / num_items_in_batch
