"""p -= lr m, m = momentum m + (1 - dampening) (g + decay p): gradient descent over all parameters of a kind at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functions.multi_tensor import multi_tensor_sgd
from .local import like, local_of
from .multi_tensor_apply import multi_tensor_applier

__all__ = ["FusedSGD"]

_PLAIN = (torch.float32, torch.float16, torch.bfloat16)


class FusedSGD(torch.optim.Optimizer):
    """Gradient descent with momentum, dampening, Nesterov's form and weight decay; the numbers of torch.optim.SGD.

    wd_after_momentum         weight decay is added behind the momentum
    materialize_master_grads  taken for its callers' sake: gradients are read as they are
    most_recent_scale         gradients are divided by it, once; scale_set_by_backward is cleared with it
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ):
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if value < 0.0:
                raise ValueError(f"{name}={value} is below 0; give a number of at least 0")
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}; give a momentum and no dampening"
            )
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; say zero_grad(set_to_none=..)", DeprecationWarning, stacklevel=2
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        first = next((p for group in self.param_groups for p in group["params"]), None)
        device = torch.device("cpu") if first is None else local_of(first).device
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; what closure() answers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, self._lists(group["params"])) for group in self.param_groups]
        for group, found in groups:
            for lists, first in found:
                self._step_lists(group, lists, first)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Gradients are None, or zeros with set_to_none=False."""
        given = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=True if given is None else given)

    def _lists(self, params: list[Tensor]) -> list[tuple[list[list[Tensor]], bool]]:
        """([gradients, parameters, momenta], has none of them a momentum yet?) of each device and dtypes."""
        found: dict[tuple[Any, ...], list[list[Tensor]]] = {}
        for parameter in params:
            grad = parameter.grad
            if grad is None:
                continue
            local = local_of(parameter)
            if grad.is_sparse:
                raise RuntimeError("FusedSGD takes no sparse gradients; use torch.optim.SGD")
            if type(local) not in (Tensor, torch.nn.Parameter) or local.dtype not in _PLAIN:
                raise RuntimeError(
                    f"a parameter is a {type(local).__name__} of {local.dtype}; give plain ones of float32, float16 "
                    "or bfloat16, or use FusedAdam(master_weights=True)"
                )
            is_first = "momentum_buffer" not in self.state[parameter]
            lists = found.setdefault((local.device, local.dtype, grad.dtype, is_first), [[], [], []])
            for part, tensor in zip(lists, (grad, parameter, self._momentum(parameter)), strict=True):
                part.append(tensor)
        return [(lists, key[-1]) for key, lists in found.items()]

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = like(parameter, torch.zeros_like(local_of(parameter).detach()))
        return state["momentum_buffer"]

    def _step_lists(self, group: dict[str, Any], lists: list[list[Tensor]], first: bool) -> None:
        rates = [group[name] for name in ("weight_decay", "momentum", "dampening", "lr")]
        ways = (group["nesterov"], first, self.wd_after_momentum)
        device = local_of(lists[1][0]).device
        flag = self._dummy_overflow_buf.to(device)
        multi_tensor_applier(multi_tensor_sgd, flag, lists, *rates, *ways, 1.0 / self.most_recent_scale)
