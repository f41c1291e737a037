"""Model validation for convert_hf: decoders in supported families with unmodified layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....common import optional
from ....common.checks import described
from ....common.numbers import with_article
from ...conversion import DecoderConfig
from ...conversion.families import family_named
from ...conversion.settings import Settings
from .hooks import find_hooked
from .injection import InjectedForward

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
# Tensors that are joined, and so require gradients together.
_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
# Layer submodules that are replaced.
NORMS = ("input_layernorm", "post_attention_layernorm")
REPLACED = ("self_attn", "mlp", *NORMS)
_LINEAR = (*_JOINED[0], "self_attn.o_proj", *_JOINED[1], "mlp.down_proj")
_ACTIVATIONS = {"swiglu": F.silu, "geglu": lambda x: F.gelu(x, approximate="tanh")}


def find_decoders(model: Any) -> list[nn.Module]:
    """Return the decoder layer stacks in a transformers model; ValueError if it has no supported one."""
    reason = optional.failure("transformers")
    if reason is not None:
        raise ImportError(
            f"convert_hf takes models of transformers: {reason}; pip install transformers"
        )
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            f"model={described(model)} is not a model of transformers; give the result of from_pretrained"
        )
    reject_adapters(model, "convert the model first, then give it to get_peft_model")
    named = {type(module): _model_type(module) for module in model.modules()}
    decoders = [
        module
        for module in model.modules()
        if named[type(module)] in FAMILIES
        and {"layers", "norm", "rotary_emb"} <= {name for name, _ in module.named_children()}
    ]
    if not decoders:
        raise ValueError(
            f"{type(model).__name__} (model_type={_model_type(model)!r}) has no decoder of {', '.join(FAMILIES)}; "
            "inject_te_attention(model) serves the attention of other models"
        )
    return decoders


def reject_adapters(model: nn.Module, remedy: str) -> None:
    """Raise ValueError for a model with peft adapters."""
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(f"{type(model).__name__} holds adapters of peft; {remedy}")


def _model_type(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "model_type", None)


def decoder_config(decoder: nn.Module) -> DecoderConfig:
    """Return a decoder's layer config, without rotary settings: the library computes the rotation."""
    config: Any = decoder.config
    content = config.to_dict() | {"rope_parameters": None, "rope_scaling": None}
    settings = Settings(content, f"the config of {type(decoder).__name__}")
    return family_named(config.model_type).settings(settings)


def check_decoder(decoder: nn.Module, config: DecoderConfig) -> None:
    """Raise ValueError for a modified layer, or one whose tensors cannot be joined."""
    check_hooks(decoder)
    owners: dict[int, str] = {}
    _check_epsilon(decoder.norm, config, f"the last norm of {type(decoder).__name__}")
    for number, layer in enumerate(decoder.layers):  # pyright: ignore[reportArgumentType]
        location = f"layer {number} of {type(decoder).__name__}"
        if not hasattr(layer.self_attn, "q_proj"):
            raise ValueError(f"{location} is converted already; call revert_hf(model) first")
        _check_products(layer, location)
        fresh = fresh_layer(layer, decoder.config, number)
        for name in REPLACED:
            expected = dict(fresh.get_submodule(name).named_modules(prefix=name))
            for path, part in layer.get_submodule(name).named_modules(prefix=name):
                if type(part) is not type(expected.get(path)):
                    raise ValueError(
                        f"{path} of {location} is {with_article(type(part))}, which is not what transformers puts "
                        "there; convert the model before it is changed"
                    )
                forward = vars(part).get("forward")
                if forward is not None and not isinstance(forward, InjectedForward):
                    raise ValueError(
                        f"{path} of {location} has a replaced forward, which would be lost; convert the model "
                        "before its forward is replaced"
                    )
        for name in NORMS:
            _check_epsilon(layer.get_submodule(name), config, f"{name} of {location}")
        x: Tensor = torch.linspace(-4.0, 4.0, 65, device="cpu")
        if not torch.allclose(
            layer.mlp.act_fn(x), _ACTIVATIONS[config.activation](x), rtol=1e-5, atol=1e-6
        ):
            raise ValueError(
                f"the activation of {location} is {layer.mlp.act_fn}, which LayerNormMLP does not compute; it has silu "
                "and gelu by tanh (gelu_pytorch_tanh)"
            )
        for name, parameter in layer.named_parameters(remove_duplicate=False):
            label = f"{name} of {location}"
            if owners.setdefault(id(parameter), label) != label:
                raise ValueError(
                    f"{label} is {owners[id(parameter)]}, and would become a separate weight; convert models whose "
                    "layers share none"
                )


def fresh_layer(layer: nn.Module, config: Any, number: int) -> nn.Module:
    """Return a new library layer on the meta device."""
    with torch.device("meta"):
        return type(layer)(config, number)


def _check_epsilon(norm: Any, config: DecoderConfig, location: str) -> None:
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", config.epsilon))
    if epsilon != config.epsilon:
        raise ValueError(
            f"{location} has epsilon {epsilon}, the model's config {config.epsilon}; set both to one number"
        )


def check_hooks(decoder: nn.Module) -> None:
    """Raise ValueError for a hook on a submodule that is replaced; it would never be called."""
    replaced = [
        (f"{name} of layer {number} of {type(decoder).__name__}", layer.get_submodule(name))
        for number, layer in enumerate(decoder.layers)  # pyright: ignore[reportArgumentType]
        for name in REPLACED
    ]
    for location, module in (
        *replaced,
        (f"the last norm of {type(decoder).__name__}", decoder.norm),
    ):
        hooked = next(find_hooked(module), None)  # pyright: ignore[reportArgumentType]
        if hooked is not None:
            raise ValueError(
                f"{location} has a hook{f' on {hooked}' if hooked else ''} and is replaced; remove the "
                "hook, and register it on the model that you get"
            )


def _check_products(layer: nn.Module, location: str) -> None:
    parts = {name: layer.get_submodule(name) for name in _LINEAR}
    for name, part in parts.items():
        if type(part) is not nn.Linear:
            raise ValueError(
                f"{name} of {location} is {with_article(type(part))}, not a torch.nn.Linear; convert the "
                "model before it is quantized, adapted or parallelized"
            )
    for module in layer.modules():
        if hasattr(module, "_hf_hook"):
            raise ValueError(
                f"{location} has hooks of accelerate's dispatch; load the model without device_map, convert it, then "
                "dispatch it, to devices alone: offloading does not find weights that were fused"
            )
    kinds = {
        (parameter.dtype, parameter.device): name for name, parameter in layer.named_parameters()
    }
    if len(kinds) > 1:
        listed = ", ".join(f"{name} {dtype} on {device}" for (dtype, device), name in kinds.items())
        raise ValueError(
            f"the parameters of {location} differ: {listed}; bring them together with model.to()"
        )
    ((dtype, _),) = kinds
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"the parameters of {location} are {dtype}; convert the model in float32, bfloat16 or float16"
        )
    for names in _JOINED:
        flags = {
            parameter.requires_grad for name in names for parameter in parts[name].parameters()
        }
        if len(flags) > 1:
            raise ValueError(
                f"{', '.join(names)} of {location} become one weight, but only some of them require "
                "gradients; freeze all or leave all trainable"
            )


def factory_kwargs(weight: Tensor) -> dict[str, Any]:
    """Return device and dtype keywords for a layer that replaces the layer of `weight`."""
    return {"device": weight.device, "params_dtype": weight.dtype}


def norm_factory_kwargs(weight: Tensor) -> dict[str, Any]:
    """Return device and dtype keywords for a norm that replaces the norm of `weight`."""
    return {"device": weight.device, "dtype": weight.dtype}


def norm_keywords(config: DecoderConfig) -> dict[str, Any]:
    """Return the keywords for the first norm in a layer."""
    return {
        "normalization": config.norm,
        "eps": config.epsilon,
        "zero_centered_gamma": config.zero_centered,
    }


def leave_unfilled(weight: Tensor) -> None:
    """Leave a weight uninitialized, as an init_method for weights that are overwritten."""
