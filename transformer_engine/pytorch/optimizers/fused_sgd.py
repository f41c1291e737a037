"""p -= lr m, m = momentum m + (1 - dampening) (g + decay p): gradient descent over all parameters of a kind at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described, suggests_keywords
from ...common.numbers import to_bool, to_float, with_article
from .checks import GroupChecks, one_number, reject_unsupported
from .multi_tensor import check_sgd_rates, multi_tensor_sgd, sgd_checked
from .multi_tensor_apply import like, local_part, multi_tensor_applier
from .states import CopiedWhole

__all__ = ["FusedSGD"]

NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
_PLAIN = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Bucket:
    """Parameters in a group that one launch steps; first: they have no momenta yet."""

    group: dict[str, Any]
    params: list[Tensor]
    device: torch.device
    first: bool


class FusedSGD(CopiedWhole):
    """Gradient descent with momentum, dampening, Nesterov momentum and weight decay; torch.optim.SGD's numbers.

    Gradients are divided once by the attribute most_recent_scale. scale_set_by_backward is cleared with it.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Momentum factor.
        dampening: Momentum dampening.
        weight_decay: Weight decay, an L2 penalty.
        nesterov: Use Nesterov momentum.
        wd_after_momentum: Add the weight decay after the momentum.
        materialize_master_grads: No effect: gradients are read in their dtype.
        set_grad_none: Deprecated; use `zero_grad(set_to_none=...)`.
    """

    SETTINGS = (
        "wd_after_momentum",
        "materialize_master_grads",
        "set_grad_none",
        "most_recent_scale",
        "scale_set_by_backward",
        "_dummy_overflow_buf",
    )

    @suggests_keywords
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
        wd_after_momentum = to_bool("wd_after_momentum", wd_after_momentum)
        materialize_master_grads = to_bool("materialize_master_grads", materialize_master_grads)
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; use zero_grad(set_to_none=..)",
                DeprecationWarning,
                stacklevel=2,
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        check_numbers(defaults)
        self._checked = GroupChecks(NUMBERS, check_numbers)
        super().__init__(params, defaults)
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.set_grad_none = set_grad_none
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        first = next((p for group in self.param_groups for p in group["params"]), None)
        device = torch.device("cpu") if first is None else local_part(first).device
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a copy or pickle."""
        super().__setstate__(state)
        self._checked = GroupChecks(NUMBERS, check_numbers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking its numbers; see torch.optim.Optimizer."""
        if isinstance(param_group, dict):
            check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict from this class or torch.optim.SGD, after checking all its entries."""
        for group, into in zip(state_dict["param_groups"], self.param_groups, strict=False):
            check_numbers({**self.defaults, **group})
            for index, parameter in zip(group["params"], into["params"], strict=False):
                local = local_part(parameter)
                momentum = state_dict["state"].get(index, {}).get("momentum_buffer")
                if momentum is not None:
                    if not isinstance(momentum, Tensor):
                        raise TypeError(
                            f"momentum_buffer of parameter {index} is {described(momentum)}; give a tensor"
                        )
                    if local_part(momentum).shape != local.shape:
                        raise ValueError(
                            f"momentum_buffer of parameter {index} is {list(local_part(momentum).shape)}, "
                            f"the parameter {list(local.shape)}; load the state of these parameters, in their order"
                        )
        super().load_state_dict(state_dict)
        for state in self.state.values():
            # torch's, without momentum
            if "momentum_buffer" in state and state["momentum_buffer"] is None:
                del state["momentum_buffer"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, and return closure()'s result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._checked.check(self.param_groups)
        batches = [batch for group in self.param_groups for batch in self._batches(group)]
        for batch in batches:
            self._check(batch)
        for batch in batches:
            self._step_batch(batch)
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients to None, or with set_to_none=False to zeros."""
        setting = self.set_grad_none if set_to_none is None else set_to_none
        super().zero_grad(set_to_none=True if setting is None else setting)

    def _batches(self, group: dict[str, Any]) -> list[_Bucket]:
        """Return a group's parameters that have gradients, grouped by device, dtypes and states."""
        found: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in group["params"]:
            grad = parameter.grad
            if grad is None:
                continue
            local = local_part(parameter)
            if grad.is_sparse:
                raise RuntimeError("FusedSGD takes no sparse gradients; use torch.optim.SGD")
            if type(local) not in (Tensor, torch.nn.Parameter) or local.dtype not in _PLAIN:
                raise RuntimeError(
                    f"a parameter is {with_article(type(local))} of {local.dtype}; give plain ones of float32, float16 "
                    "or bfloat16, or use FusedAdam(master_weights=True)"
                )
            is_first = "momentum_buffer" not in self.state.get(parameter, {})
            found.setdefault((local.device, local.dtype, grad.dtype, is_first), []).append(
                parameter
            )
        return [
            _Bucket(group, params, local_part(params[0]).device, key[-1])
            for key, params in found.items()
        ]

    def _check(self, batch: _Bucket) -> None:
        """Raise ValueError or TypeError for numbers and tensors that cannot be stepped, before any change."""
        check_sgd_rates(*self._rates(batch.group))
        multi_tensor_applier(
            lambda chunk_size, flag, lists: sgd_checked(flag, lists),
            self._dummy_overflow_buf.to(batch.device),
            self._lists(batch),
        )

    def _step_batch(self, batch: _Bucket) -> None:
        if batch.first:
            for parameter in batch.params:
                zeros = torch.zeros_like(local_part(parameter).detach())
                self.state[parameter]["momentum_buffer"] = like(parameter, zeros)
        wd, momentum, dampening, lr, scale = self._rates(batch.group)
        ways = (to_bool("nesterov", batch.group["nesterov"]), batch.first, self.wd_after_momentum)
        lists = self._lists(batch)
        multi_tensor_applier(
            multi_tensor_sgd,
            self._dummy_overflow_buf.to(batch.device),
            lists,
            wd,
            momentum,
            dampening,
            lr,
            *ways,
            scale,
        )

    def _lists(self, batch: _Bucket) -> list[list[Tensor]]:
        """Return [gradients, parameters(, momenta)]."""
        lists = [[p.grad for p in batch.params if p.grad is not None], batch.params]
        states = [self.state[p] for p in batch.params if p in self.state]
        momenta = [state["momentum_buffer"] for state in states if "momentum_buffer" in state]
        return [*lists, momenta] if momenta else lists

    def _rates(self, group: dict[str, Any]) -> tuple[float, float, float, float, float]:
        names = ("weight_decay", "momentum", "dampening", "lr")
        decay, momentum, dampening, lr = (to_float(name, group[name]) for name in names)
        return (
            decay,
            momentum,
            dampening,
            lr,
            1.0 / to_float("most_recent_scale", self.most_recent_scale),
        )


def check_numbers(group: dict[str, Any]) -> None:
    """Raise TypeError, ValueError or RuntimeError for numbers that no step can be computed with."""
    for name in ("lr", "momentum", "weight_decay"):
        found = one_number(name, group.get(name))
        if found is not None and found < 0.0:
            raise ValueError(f"{name}={found} is below 0; give a number of at least 0")
    one_number("dampening", group.get("dampening"))
    nesterov = to_bool("nesterov", group.get("nesterov"))
    momentum, dampening = group["momentum"], group["dampening"]
    if nesterov and (momentum == 0.0 or dampening != 0.0):
        raise ValueError(
            f"nesterov=True with momentum={momentum} and dampening={dampening}; give a momentum and no dampening"
        )
    reject_unsupported(group, "FusedSGD", "torch.optim.SGD")
