"""is_bare(module, kind, forward): does module(x) come to forward(module, x) and nothing else?

A layer may then hand its child what it knows beside the arguments that the child's forward takes from everybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as everywhere

_called: Any = nn.Module.__call__


def is_bare(module: nn.Module, kind: type[nn.Module], forward: Callable[..., Any]) -> bool:
    """No hook would see the call, nobody has replaced forward or compiled the module, and torch.jit traces nothing."""
    return (
        type(module) is kind
        and kind.forward is forward
        and kind.__call__ is _called
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or everywhere._global_forward_hooks
            or everywhere._global_forward_pre_hooks
            or everywhere._global_backward_hooks
            or everywhere._global_backward_pre_hooks
            or torch._C._get_tracing_state()
        )
    )
