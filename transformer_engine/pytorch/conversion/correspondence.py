"""{our tensor: their tensors}: a family's table spelled out for one model, and checked against it both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .decoder import Decoder
from .decoder_config import DecoderConfig
from .families.family import Family, Row
from .layouts import Layout
from .safetensors import Described

EXTRA_STATE = "_extra_state"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Match:
    """One tensor of ours, made of theirs."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout
    shape: tuple[int, ...]

    def their_shapes(self) -> Shapes:
        parts = self.layout.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.theirs, parts, strict=True)}


@dataclass(frozen=True)
class Correspondence:
    """Every tensor of a model, ours and theirs, exactly once."""

    family: Family
    matches: tuple[Match, ...]

    @staticmethod
    def of(family: Family, config: DecoderConfig) -> Correspondence:
        """The rows of the family's table whose tensors the model has; together they are all of them."""
        shapes = shapes_of(Decoder(config, device="meta"))
        matches = []
        for row in family.rows:
            for number in range(config.layers) if "{i}" in row.ours else (0,):
                match = _spelled_out(row, number, config, shapes)
                if match is not None:
                    matches.append(match)
        assert sorted(match.ours for match in matches) == sorted(shapes), family.model_type
        return Correspondence(family, tuple(matches))

    @property
    def ours(self) -> Shapes:
        return {match.ours: match.shape for match in self.matches}

    @property
    def theirs(self) -> Shapes:
        return {name: shape for match in self.matches for name, shape in match.their_shapes().items()}

    def their_names(self, found: Mapping[str, object]) -> dict[str, str]:
        """{name of the table: name in a file}: a file may leave the prefix out; tensors that follow are left out."""
        prefix = self.family.prefix
        names = {}
        for name in found:
            whole = name if name.startswith(prefix) or name == self.family.head else prefix + name
            if not self.family.derived.fullmatch(whole):
                names[whole] = name
        return names


def shapes_of(model: Decoder) -> Shapes:
    """{name: shape} of a model's tensors, without the states of quantization."""
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if not name.endswith(EXTRA_STATE)
    }


def _spelled_out(row: Row, number: int, config: DecoderConfig, shapes: Shapes) -> Match | None:
    ours = row.ours.format(i=number)
    if ours not in shapes:
        return None
    theirs = tuple(name.format(i=number) for name in row.theirs)
    return Match(ours, theirs, row.layout(config), shapes[ours])


def check_tensors(found: Mapping[str, Described], expected: Shapes, source: str) -> None:
    """ValueError unless the tensors found are those expected: none missing, none over, every shape as it must be."""
    missing, over = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    remedy = "convert the checkpoint that its config.json belongs to"
    if missing:
        raise ValueError(f"{source} lacks {_listed(missing)}; {remedy}")
    if over:
        raise ValueError(f"{source} also holds {_listed(over)}, which its model has not; {remedy}")
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ValueError(
                f"{source}: {name} is {list(found[name].shape)}, its config makes it {list(shape)}; {remedy}"
            )
        if not found[name].dtype.is_floating_point or found[name].dtype.itemsize == 1:
            raise ValueError(
                f"{source}: {name} is {found[name].dtype}, which is no weight's; convert the checkpoint in bfloat16, "
                "float16 or float32"
            )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def same_values(a: Tensor, b: Tensor) -> bool:
    """Are two tensors equal, bit for bit but for the sign of zero?"""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
