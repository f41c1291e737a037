"""Single-parameter FusedAdam steps from backward-pass hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...common.formats import ceil_div
from ...common.operation_settings import CHUNK
from ...common.warning import warn_once
from ..distributed.collectives import world_size
from ..runtime.checks import is_distributed
from ..tensor.quantized_tensor import QuantizedTensor
from .adam_states import NAMES
from .buckets import Bucket, BucketKey, GroupBuckets
from .checks import GroupChecks, check_parameter, check_states
from .multi_tensor_apply import Checked, local_part


class SteppableOptimizer(Protocol):
    """The FusedAdam members that single-parameter steps use."""

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]
    capturable: bool
    master_weights: bool
    stochastic_rounding: bool
    use_decoupled_grad: bool
    _backward_buckets: dict[Tensor, GroupBuckets]
    _known_states: list[dict[str, Tensor]]
    _checked: GroupChecks
    _dummy_overflow_buf: Tensor
    _partial_step: str | None
    _opt_called: bool
    _optimizer_step_pre_hooks: dict[int, Any]
    _optimizer_step_post_hooks: dict[int, Any]

    def _forget_replaced_states(self) -> None: ...
    def _advance(
        self, group: dict[str, Any], devices: set[torch.device], inverse: Tensor | None
    ) -> dict[torch.device, Tensor]: ...
    def _complete(self, param: Tensor) -> None: ...
    def _keeps_remainder(self, param: Tensor) -> bool: ...
    def _buckets(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Bucket]: ...
    def _lists(self, grads: list[Tensor | None], bucket: Bucket) -> Checked: ...
    def _step_bucket(
        self, bucket: Bucket, lists: Checked, rates: dict[Any, Tensor], may_skip: bool
    ) -> None: ...


_REDUCED_LATER = (
    "DistributedDataParallel or with another reduction after the backward pass, which the steps would precede; use "
    "fully_shard (FSDP2), or loss.backward() and step()"
)


@contextmanager
def step_in_backward(optimizer: SteppableOptimizer) -> Iterator[None]:
    """Step parameters from hooks; see `FusedAdam.step_in_backward`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    _check_entry(optimizer, parameters)
    calls = _call_step_hooks(optimizer)
    next(calls)
    steps = _Steps(optimizer)
    try:
        with ExitStack() as hooks:
            for parameter in parameters:
                hooks.callback(parameter.register_post_accumulate_grad_hook(steps.step).remove)
            yield
        for parameter in parameters:
            if parameter.grad is not None:
                steps.step(parameter)
    except BaseException as error:
        _end_by_error(steps, len(parameters), error)
        raise
    finally:
        optimizer._known_states = list(optimizer.state.values())
    optimizer._opt_called = True  # learning-rate schedulers warn if no step has preceded theirs
    next(calls, None)


def _check_entry(optimizer: SteppableOptimizer, parameters: list[Tensor]) -> None:
    """Raise RuntimeError if gradients of the next backward pass cannot be stepped, before any state changes."""
    if optimizer.use_decoupled_grad:
        raise RuntimeError(
            "step_in_backward reads .grad, and use_decoupled_grad=True has other gradients; call step()"
        )
    check_complete(optimizer._partial_step)
    for parameter in parameters:
        shape = list(parameter.shape)
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        if any(isinstance(getattr(hook, "__self__", None), _Steps) for hook in hooks.values()):
            raise RuntimeError(
                f"a parameter {shape} is stepped by another step_in_backward() already; leave that context before "
                "entering this one, and give each parameter to one optimizer"
            )
        if getattr(parameter, "main_grad", None) is not None:
            raise RuntimeError(
                f"a parameter {shape} has main_grad, and step_in_backward reads .grad; build its layer without "
                "fuse_wgrad_accumulation and delete main_grad, or copy main_grad to .grad and call step()"
            )
        if hasattr(parameter, "_ddp_mp_hook_state"):  # DistributedDataParallel(mixed_precision=..)
            raise RuntimeError(f"a parameter {shape} belongs to {_REDUCED_LATER}")
    if world_size() > 1 and not all(map(is_distributed, parameters)):
        warn_once(
            "step_in_backward with parameters that are not DTensors",
            "step_in_backward steps parameters that are not DTensors from the gradients of this rank; do not use it "
            f"with {_REDUCED_LATER}",
            stacklevel=5,  # the with statement, above this function, the generator and its __enter__
        )


def check_complete(partial_step: str | None) -> None:
    """Raise RuntimeError if an exception has ended the last step after some of its parameters."""
    if partial_step is not None:
        raise RuntimeError(
            f"{partial_step}, and another step from the same batch would step these parameters twice; restore the "
            "parameters and call load_state_dict(), or skip the batch: call zero_grad()"
        )


def _end_by_error(steps: _Steps, parameters: int, error: BaseException) -> None:
    """Count no step if no parameter was stepped; note a step of some parameters only."""
    if not steps.stepped:
        steps.retract()
    elif len(steps.stepped) < parameters:
        steps.optimizer._partial_step = (
            f"{type(error).__name__} ended step_in_backward() after {len(steps.stepped)} of {parameters} parameters "
            "were stepped"
        )


def _call_step_hooks(optimizer: SteppableOptimizer) -> Iterator[None]:
    """Call the optimizer's hooks before a step, yield once, and call its hooks after a step."""
    args: tuple[Any, ...] = (optimizer,)
    keywords: dict[str, Any] = {}
    before: list[Any] = [
        *_global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
    ]
    for hook in before:
        changed = hook(optimizer, args, keywords)
        if changed is None:
            continue
        if not (isinstance(changed, tuple) and len(changed) == 2):
            raise RuntimeError(
                f"an optimizer's step pre-hook returned {changed!r}; return None or (args, kwargs)"
            )
        args, keywords = changed
    yield
    after: list[Any] = [
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]
    for hook in after:
        hook(optimizer, args, keywords)


class _Steps:
    """The steps within one context.

    Attributes:
        rates: Per-parameter numbers for `adam_step`, float32 [12].
        stepped: Parameters after their step.
    """

    @torch.no_grad()
    def __init__(self, optimizer: SteppableOptimizer) -> None:
        optimizer._checked.check(optimizer.param_groups)
        optimizer._forget_replaced_states()
        self.optimizer = optimizer
        self.rates: dict[Tensor, Tensor] = {}
        self.stepped: set[Tensor] = set()
        self._first_steps = ["step" not in group for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.requires_grad]
            by_device = optimizer._advance(group, {local_part(p).device for p in params}, None)
            chunks = _first_chunks(optimizer, params) if optimizer.stochastic_rounding else None
            for device, numbers in by_device.items():
                own = [p for p in params if local_part(p).device == device]
                table = numbers.repeat(len(own), 1)
                if chunks is not None:
                    firsts = torch.tensor(
                        [chunks[p] for p in own], dtype=torch.float32, device="cpu"
                    )
                    table[:, -1] = firsts.to(device)
                self.rates.update(zip(own, table.unbind(), strict=True))

    @torch.no_grad()
    def retract(self) -> None:
        """Subtract the step that the constructor has counted."""
        optimizer = self.optimizer
        counted = (
            (optimizer._dummy_overflow_buf != 1).to(torch.int32) if optimizer.capturable else 1
        )
        for group, is_first in zip(optimizer.param_groups, self._first_steps, strict=True):
            if is_first:
                del group["step"]
            else:
                group["step"] -= counted

    @torch.no_grad()
    def step(self, parameter: Tensor) -> None:
        """Step a parameter and set its gradient to None."""
        optimizer = self.optimizer
        if parameter in self.stepped:
            raise RuntimeError(
                f"a parameter {list(parameter.shape)} got a second gradient in one step_in_backward(); enter the "
                "context for a step's last backward pass only, use checkpoints with use_reentrant=False for functions "
                f"that share parameters, and do not use it with {_REDUCED_LATER}"
            )
        if parameter.grad is None:
            raise RuntimeError(
                f"a parameter {list(parameter.shape)} has no .grad after its accumulation; do not free it in a hook "
                "or accumulate it in main_grad within step_in_backward()"
            )
        bucket = self._bucket(parameter)
        rates = {bucket.parameters[0].device: self.rates[parameter]}
        lists = optimizer._lists([parameter.grad], bucket)
        self.stepped.add(parameter)
        optimizer._step_bucket(bucket, lists, rates, may_skip=False)
        parameter.grad = None

    def _bucket(self, parameter: Tensor) -> Bucket:
        """Bucket with one parameter, cached while its properties are equal."""
        optimizer, grad = self.optimizer, parameter.grad
        assert grad is not None
        ways = (optimizer.master_weights, optimizer.use_decoupled_grad)
        key = BucketKey.of([parameter], [grad], *ways)
        cached = optimizer._backward_buckets.get(parameter)
        if cached is not None and cached.key.equal(key):
            (bucket,) = cached.buckets
            if bucket.states[0] is optimizer.state.get(parameter):
                return bucket
        check_parameter(parameter, grad, optimizer.master_weights, optimizer.capturable)
        names = NAMES[: 2 + optimizer.master_weights]
        check_states(parameter, optimizer.state.get(parameter, {}), names)
        optimizer._complete(parameter)
        found = GroupBuckets(key, optimizer._buckets([parameter], [grad]))
        optimizer._backward_buckets[parameter] = found
        return found.buckets[0]


def _first_chunks(optimizer: SteppableOptimizer, params: list[Tensor]) -> dict[Tensor, int]:
    """Index per parameter: its first chunk in the launch by which `step` updates parameters with gradients."""
    totals: dict[tuple[Any, ...], int] = {}
    firsts: dict[Tensor, int] = {}
    for parameter in params:
        local = local_part(parameter)
        kind = type(local) if isinstance(local, QuantizedTensor) else local.dtype
        bucket = (local.device, kind, optimizer._keeps_remainder(parameter))
        firsts[parameter] = totals.get(bucket, 0)
        totals[bucket] = firsts[parameter] + ceil_div(local.numel(), CHUNK)
    return firsts
