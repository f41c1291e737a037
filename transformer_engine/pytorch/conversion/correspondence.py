"""{our tensor: their tensors} for one model, built from the table of its family and checked in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .decoder import Decoder
from .decoder_config import DecoderConfig
from .families import CheckpointFamily
from .layouts import WeightLayout
from .safetensors import Described

EXTRA_STATE = "_extra_state"
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorMatch:
    """One tensor of ours and their tensors that it consists of."""

    ours: str
    theirs: tuple[str, ...]
    layout: WeightLayout
    shape: tuple[int, ...]

    def their_shapes(self) -> Shapes:
        parts = self.layout.split(torch.empty(self.shape, device="meta"))
        return {name: tuple(part.shape) for name, part in zip(self.theirs, parts, strict=True)}


@dataclass(frozen=True)
class Correspondence:
    """Every tensor in a model, with its names on both sides."""

    family: CheckpointFamily
    matches: tuple[TensorMatch, ...]

    @staticmethod
    def of(family: CheckpointFamily, config: DecoderConfig) -> Correspondence:
        """Match each model tensor with its row in the family's table."""
        content = Decoder(config, device="meta").state_dict()
        shapes = {
            name: tuple(v.shape) for name, v in content.items() if not name.endswith(EXTRA_STATE)
        }
        matches = []
        for row in family.rows:
            for number in range(config.layers) if "{i}" in row.ours else (0,):
                ours = row.ours.format(i=number)
                if ours in shapes:
                    theirs = tuple(name.format(i=number) for name in row.theirs)
                    matches.append(TensorMatch(ours, theirs, row.layout(config), shapes[ours]))
        unmatched = set(shapes).symmetric_difference(match.ours for match in matches)
        if unmatched:
            raise RuntimeError(
                f"the table of {family.model_type} does not match {sorted(unmatched)}"
            )
        return Correspondence(family, tuple(matches))

    @property
    def ours(self) -> Shapes:
        return {match.ours: match.shape for match in self.matches}

    @property
    def theirs(self) -> Shapes:
        return {
            name: shape for match in self.matches for name, shape in match.their_shapes().items()
        }

    def their_names(self, found: Mapping[str, object]) -> dict[str, str]:
        """Return {name in the table: name in a file}; files may omit the prefix, and derived tensors are skipped."""
        prefix = self.family.prefix
        names = {}
        for name in found:
            full_name = (
                name if name.startswith(prefix) or name == self.family.head else prefix + name
            )
            if not self.family.derived.fullmatch(full_name):
                names[full_name] = name
        return names


def check_tensors(found: Mapping[str, Described], expected: Shapes, source: str) -> None:
    """Raise ValueError for missing or unexpected tensors, and for a shape or dtype that differs."""
    missing, over = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    remedy = "convert the checkpoint that its config.json belongs to"
    if missing:
        raise ValueError(f"{source} lacks {_list_names(missing)}; {remedy}")
    if over:
        raise ValueError(
            f"{source} also holds {_list_names(over)}, which its model lacks; {remedy}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ValueError(
                f"{source}: {name} is {list(found[name].shape)}, its config makes it {list(shape)}; {remedy}"
            )
        if not found[name].dtype.is_floating_point or found[name].dtype.itemsize == 1:
            raise ValueError(
                f"{source}: {name} is {found[name].dtype}, which is not a dtype of weights; convert the checkpoint in "
                "bfloat16, float16 or float32"
            )


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
