"""Single-parameter FusedAdam steps from backward-pass hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ...common.operation_settings import CHUNK
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


@contextmanager
def step_in_backward(optimizer: SteppableOptimizer) -> Iterator[None]:
    """Step parameters from hooks; see `FusedAdam.step_in_backward`."""
    if optimizer.use_decoupled_grad:
        raise RuntimeError(
            "step_in_backward reads .grad, and use_decoupled_grad=True has other gradients; call step()"
        )
    steps = _Steps(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    with ExitStack() as hooks:
        for parameter in parameters:
            hooks.callback(parameter.register_post_accumulate_grad_hook(steps.step).remove)
        yield
    for parameter in parameters:
        if parameter.grad is not None:
            steps.step(parameter)
    optimizer._known_states = list(optimizer.state.values())


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
        for group in optimizer.param_groups:
            params = [p for p in group["params"] if p.requires_grad]
            by_device = optimizer._advance(group, {local_part(p).device for p in params}, None)
            chunks = _first_chunks(optimizer, params)
            for device, numbers in by_device.items():
                own = [p for p in params if local_part(p).device == device]
                table = numbers.repeat(len(own), 1)
                if optimizer.stochastic_rounding:
                    firsts = torch.tensor(
                        [chunks[p] for p in own], dtype=torch.float32, device="cpu"
                    )
                    table[:, -1] = firsts.to(device)
                self.rates.update(zip(own, table.unbind(), strict=True))

    @torch.no_grad()
    def step(self, parameter: Tensor) -> None:
        """Step a parameter and set its gradient to None."""
        optimizer = self.optimizer
        if parameter in self.stepped:
            raise RuntimeError(
                f"a parameter {list(parameter.shape)} got a second gradient in one step_in_backward(); enter the "
                "context for a step's last backward pass only, and use checkpoints with use_reentrant=False for "
                "functions that share parameters"
            )
        self.stepped.add(parameter)
        bucket = self._bucket(parameter)
        rates = {bucket.parameters[0].device: self.rates[parameter]}
        lists = optimizer._lists([parameter.grad], bucket)
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
        totals[bucket] = firsts[parameter] + -(-local.numel() // CHUNK)
    return firsts
