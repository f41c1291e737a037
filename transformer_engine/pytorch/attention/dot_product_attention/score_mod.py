"""score = score_mod(score, b, h, i, j, **tensors): a caller's change of single scores, with the tensors it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class BoundScoreMod:
    """A score_mod with tensors by name; equal to another of the same function and the very same tensors."""

    def __init__(self, function: Callable[..., Tensor], tensors: Mapping[str, Tensor]):
        self.function = function
        self.tensors = dict(tensors)
        self._key = (function, tuple((name, id(tensor)) for name, tensor in self.tensors.items()))

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return self.function(score, b, h, i, j, **self.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundScoreMod) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def resolved(
    score_mod: Callable[..., Tensor] | None,
    tensors: Mapping[str, Tensor] | None,
    bprop: Any,
    bprop_tensors: Any,
) -> Callable[..., Tensor] | None:
    """The score_mod of a call, its tensors bound; NotImplementedError for a gradient given beside it."""
    if bprop is not None:
        raise NotImplementedError(
            "score_mod_bprop is not available: autograd differentiates score_mod, and a gradient given beside it "
            "could differ from that; leave it None"
        )
    if bprop_tensors is not None:
        raise ValueError(
            "score_mod_bprop_tensors without score_mod_bprop, which would read them; leave it None"
        )
    if tensors is None:
        return score_mod
    if score_mod is None:
        raise ValueError("score_mod_tensors without score_mod, which would read them; give both")
    wrong = [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]
    if wrong:
        raise TypeError(
            f"score_mod_tensors holds no tensor under {', '.join(map(repr, wrong))}; give tensors by name"
        )
    return BoundScoreMod(score_mod, tensors)
