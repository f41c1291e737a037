"""Optimizers whose copies and pickles can step: torch's hold parameter groups and states, and nothing else."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class CopiedWhole(torch.optim.Optimizer):
    """torch.optim.Optimizer whose copy.deepcopy and pickle hold the attributes named in SETTINGS too.

    Others are left out: a scheduler puts a closure in place of an optimizer's `step`, hooks have closures of their own.
    """

    SETTINGS: ClassVar[tuple[str, ...]] = ()

    def __getstate__(self) -> dict[str, Any]:
        own = vars(self)
        return super().__getstate__() | {name: own[name] for name in self.SETTINGS if name in own}
