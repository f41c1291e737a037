"""Rejection of extra states before a state dict replaces a weight: a module is loaded as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

EXTRA_STATE = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX
_IGNORED = torch.nn.Module.set_extra_state


class CheckedLoading(torch.nn.Module):
    """Module whose state dict is rejected as a whole if an extra state of it or of a descendant is rejected.

    Descendants with a method `read_extra_state` are checked. In a model whose root is another module, each of these
    modules is loaded as a whole.
    """

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        check_states(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_states(root: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raise ExtraStateError if a module below the root rejects its extra state; nothing is changed.

    Args:
        root: Module that is about to be loaded.
        state_dict: State dict that holds the module's entries.
        prefix: Prefix of the module's entries, empty or with a dot at its end.
    """
    for name, module in root.named_modules(remove_duplicate=False):
        read = getattr(module, "read_extra_state", None)
        if read is None or type(module).set_extra_state is _IGNORED:
            continue
        path = f"{prefix}{name}." if name else prefix
        for key in (EXTRA_STATE, *getattr(module, "earlier_extra_states", ())):
            if path + key in state_dict:
                read(state_dict[path + key])
                break
