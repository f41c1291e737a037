"""{our tensor: their tensors} for one decoder layer, and the hooks that keep their names in its state dict.

* self_attn.layernorm_qkv.weight joins self_attn.q_proj.weight, .k_proj.weight and .v_proj.weight, group by group.
* mlp.fc1_weight joins mlp.gate_proj.weight and mlp.up_proj.weight.

The rows come from `te convert` (conversion/families.py), with the names of a converted layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...conversion import DecoderConfig
from ...conversion.families import family_named
from ...conversion.layouts import WeightLayout
from ...tensor import QuantizedTensor

_THEIR_LAYER = "model.layers.{i}."
# Submodule names in the table, and in a converted layer.
_PLACES = {
    "layers.{i}.self_attention.layernorm_qkv.": "self_attn.layernorm_qkv.",
    "layers.{i}.self_attention.proj.": "self_attn.o_proj.",
    "layers.{i}.self_attention.": "self_attn.",
    "layers.{i}.layernorm_mlp.": "mlp.",
}


@dataclass(frozen=True)
class LayerTensor:
    """One tensor in a converted layer and the tensors in the stock layer that it consists of."""

    ours: str
    theirs: tuple[str, ...]
    layout: WeightLayout

    @property
    def is_renamed(self) -> bool:
        return self.theirs != (self.ours,)


@dataclass(frozen=True)
class LoadErrors:
    """The lists that load_state_dict reports at its end."""

    missing: list[str]
    errors: list[str]


@dataclass(frozen=True)
class LayerNames:
    """The tensors of a layer; a model without biases, for example, lacks some."""

    matches: tuple[LayerTensor, ...]

    @staticmethod
    def of(model_type: str, decoder: DecoderConfig) -> LayerNames:
        matches = []
        for row in family_named(model_type).rows:
            for prefix, ours in _PLACES.items():
                if row.ours.startswith(prefix):
                    original_names = tuple(name.removeprefix(_THEIR_LAYER) for name in row.theirs)
                    matches.append(
                        LayerTensor(
                            ours + row.ours.removeprefix(prefix),
                            original_names,
                            row.layout(decoder),
                        )
                    )
                    break
        return LayerNames(tuple(matches))

    def to_ours(self, state: MutableMapping[str, Any], prefix: str = "") -> None:
        """Replace their tensors by ours if all parts of a tensor are present."""
        for match in self._renamed():
            original_names = [prefix + name for name in match.theirs]
            if all(name in state for name in original_names):
                state[prefix + match.ours] = match.layout.join(
                    [state.pop(name) for name in original_names]
                )

    def fill(
        self, layer: nn.Module, state: MutableMapping[str, Any], prefix: str, errors: LoadErrors
    ) -> None:
        """Fill in the layer's own values for missing parts and parts with another shape, and report them."""
        parameters = dict(layer.named_parameters())
        for match in self._renamed():
            original_names = [prefix + name for name in match.theirs]
            if match.ours not in parameters or prefix + match.ours in state:
                continue
            with torch.no_grad():
                parts = match.layout.split(_values(parameters[match.ours]))
            for name, part in zip(original_names, parts, strict=True):
                value = state.get(name)
                if value is None:
                    errors.missing.append(name)
                elif value.shape != part.shape:
                    errors.errors.append(
                        f"size mismatch for {name}: its shape is {list(value.shape)} in the state dict, "
                        f"{list(part.shape)} in the model"
                    )
                if value is None or value.shape != part.shape:
                    state[name] = part.detach()

    def to_theirs(self, state: MutableMapping[str, Any], prefix: str = "") -> None:
        """Replace our tensors by theirs, in separate memory: files reject tensors that share it.

        Quantized tensors are dequantized, including those that keep their name.
        """
        for match in self.matches:
            name = prefix + match.ours
            if not match.is_renamed and isinstance(state.get(name), QuantizedTensor):
                state[name] = state[name].dequantize()
        for match in self._renamed():
            if prefix + match.ours in state:
                values = _values(state.pop(prefix + match.ours))
                for name, part in zip(match.theirs, match.layout.split(values), strict=True):
                    state[prefix + name] = part.clone(memory_format=torch.contiguous_format)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Return (ours, theirs) pairs for all parts."""
        return ((match.ours, name) for match in self.matches for name in match.theirs)

    def _renamed(self) -> Iterator[LayerTensor]:
        return (match for match in self.matches if match.is_renamed)


def _values(tensor: Tensor) -> Tensor:
    """Return the values in high precision, for checkpoints without quantized tensors."""
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


@dataclass
class SavesTheirNames:
    """A `state_dict` hook, on which torch sets a mark."""

    names: LayerNames

    def __call__(self, layer: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self.names.to_theirs(state, prefix)


@dataclass(frozen=True)
class LoadsTheirNames:
    """A `load_state_dict` hook."""

    names: LayerNames

    def __call__(
        self,
        layer: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self.names.fill(layer, state, prefix, LoadErrors(missing, errors))
        self.names.to_ours(state, prefix)
