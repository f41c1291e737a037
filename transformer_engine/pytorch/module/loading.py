"""What a state dict may lack or name otherwise: the extra states of other libraries and of the original's releases."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from ...common import env

EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def rename_earlier(state_dict: MutableMapping[str, Any], prefix: str, earlier: tuple[str, ...]) -> None:
    """Put an extra state that an earlier release kept in a child, under one of these names, in its present place."""
    for name in earlier:
        state = state_dict.pop(prefix + name, None)
        if state is not None:
            state_dict.setdefault(prefix + EXTRA_STATE, state)


def forgive_missing(missing_keys: list[str], prefix: str) -> None:
    """A state dict without an extra state is whole: it was saved by another library, or before there was one.

    NVTE_STRICT_EXTRA_STATE=1: then it is not.
    """
    if prefix + EXTRA_STATE in missing_keys and not env.get("NVTE_STRICT_EXTRA_STATE"):
        missing_keys.remove(prefix + EXTRA_STATE)


def forget_stateless(state_dict: MutableMapping[str, Any], prefix: str) -> None:
    """Norms of the original keep an extra state, in which there is nothing: they quantize nothing."""
    state_dict.pop(prefix + EXTRA_STATE, None)
