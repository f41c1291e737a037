"""p -= lr (m / c1 / (sqrt(v / c2) + eps) + decay p): Adam and AdamW over all parameters of a kind in one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from ...common.checks import suggests_keywords
from ...common.numbers import to_bool
from ...common.operation_settings import Adam
from ..primitives.multi_tensor import adam_rates, copy_to_device
from ..tensor.quantized_tensor import QuantizedTensor
from . import states
from .adam_states import NAMES, AdamStates, float_values
from .backward_steps import check_complete, step_in_backward
from .buckets import Bucket, BucketKey, GroupBuckets, group_into_buckets
from .checks import (
    NUMBERS,
    GroupChecks,
    check_capturable,
    check_dtypes,
    check_numbers,
    check_parameter,
    check_states,
    read_pair,
)
from .multi_tensor import device_rates
from .multi_tensor_apply import Checked, local_part
from .multi_tensor_apply import multi_tensor_applier as multi_tensor_applier

__all__ = ["FusedAdam"]


class FusedAdam(AdamStates):
    """Adam and AdamW over all parameters of a kind in one launch.

    A quantized parameter (`quantized_model_init`) requires master_weights=True. An FP8 parameter with delayed scaling
    may do without, unless capturable is set; it loses updates that are smaller than the step between two codes.

    Between steps, `parameter.data` may be replaced by a tensor with another dtype or memory: the
    moments stay, and another kind of master is created from the parameter. Replacements with
    another size or device raise ValueError before any state changes. A captured CUDA graph keeps
    parameter, gradient and state addresses, so capture again after a replacement.

    Steps are counted per group, in its "step". A parameter whose first gradient comes late is corrected for all
    steps of its group, while torch.optim.AdamW counts steps per parameter and cannot load this state_dict().

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate; a tensor with capturable.
        betas: Decay of the first and second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay.
        amsgrad: Unsupported; True raises RuntimeError.
        bias_correction: Correct the moments for their initial zeros.
        adam_w_mode: Decay parameters (AdamW); False adds the decay to the gradients.
        capturable: Keep lr and the step on the device, for CUDA graphs; an overflow skips the step.
        master_weights: Update high-precision masters of 16-bit and quantized parameters; the parameters copy them.
        master_weight_dtype: float32, or float16 with one scale per tensor.
        exp_avg_dtype: First moment dtype: float32, bfloat16, or float16 and uint8 (FP8) with one scale per tensor.
        exp_avg_sq_dtype: Second moment dtype, like exp_avg_dtype.
        use_decoupled_grad: Read parameter.decoupled_grad instead of .grad.
        store_param_remainders: Store only the lower 16 bits of the masters for bfloat16 parameters.
            Both halves are the float32 number, and the parameter is that number, rounded half up.
        set_grad_none: Deprecated; use `zero_grad(set_to_none=...)`.
        block_scaled_states: FP8 moments (both dtypes uint8) have one exponent per 128 values instead of one scale per
            tensor, and one launch reads, updates and writes them.
        stochastic_rounding: Round block-scaled moments, and bfloat16 parameters without masters, up or down at
            random, with the exact mean. The random bits depend on the step and the position only.

    Raises:
        RuntimeError: The option combination is unsupported.
    """

    SETTINGS = (
        "adam_w_mode",
        "capturable",
        "master_weights",
        "master_weight_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "name_to_dtype_map",
        "dtype_to_range_map",
        "use_decoupled_grad",
        "store_param_remainders",
        "block_scaled_states",
        "stochastic_rounding",
        "fuse_unscale",
        "set_grad_none",
        "_scales",
        "_partial_step",
        "_dummy_overflow_buf",
        "_step_supports_amp_scaling",
    )

    @suggests_keywords
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype
        | None = torch.float32,  # None, which NeMo Automodel passes, is float32
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        block_scaled_states: bool = False,
        stochastic_rounding: bool = False,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad; use torch.optim.AdamW(amsgrad=True)")
        bias_correction = to_bool("bias_correction", bias_correction)
        capturable = to_bool("capturable", capturable)
        master_weights = to_bool("master_weights", master_weights)
        use_decoupled_grad = to_bool("use_decoupled_grad", use_decoupled_grad)
        store_param_remainders = to_bool("store_param_remainders", store_param_remainders)
        master_weight_dtype = master_weight_dtype or torch.float32
        self.block_scaled_states = to_bool("block_scaled_states", block_scaled_states)
        self.stochastic_rounding = to_bool("stochastic_rounding", stochastic_rounding)
        check_dtypes(
            master_weights,
            master_weight_dtype,
            exp_avg_dtype,
            exp_avg_sq_dtype,
            self.block_scaled_states,
        )
        halves_masters = bool(
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        if capturable:
            check_capturable(
                master_weights,
                master_weight_dtype,
                exp_avg_dtype,
                exp_avg_sq_dtype,
                halves_masters,
                self.block_scaled_states,
            )
        self.adam_w_mode = int(to_bool("adam_w_mode", adam_w_mode))
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.name_to_dtype_map: dict[str, torch.dtype] = dict(
            zip(NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True)
        )
        self.dtype_to_range_map = states.RANGES
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = halves_masters
        self.fuse_unscale = exp_avg_dtype == exp_avg_sq_dtype == torch.bfloat16
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; use zero_grad(set_to_none=..)",
                DeprecationWarning,
                stacklevel=2,
            )
        self._scales = {}
        self._layouts: dict[int, GroupBuckets] = {}
        self._backward_buckets: dict[Tensor, GroupBuckets] = {}
        self._known_states: list[dict[str, Tensor]] = []
        self._checked = GroupChecks(NUMBERS, check_numbers)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        check_numbers(defaults)
        super().__init__(params, defaults)
        device = next((local_part(p).device for p in self._parameters()), torch.device("cpu"))
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
        if capturable:
            self._step_supports_amp_scaling = True
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a copy or pickle; caches start empty."""
        super().__setstate__(state)
        self._layouts, self._backward_buckets, self._known_states = {}, {}, []
        self._checked = GroupChecks(NUMBERS, check_numbers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking its numbers; see torch.optim.Optimizer."""
        if isinstance(param_group, dict):
            check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """Step every parameter that has a gradient, and return closure()'s result.

        Args:
            closure: Called before the step, with gradients enabled; or None.
            grad_scaler: With capturable=True: gradients are divided by its scale. If a gradient is not finite, nothing
                is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._checked.check(self.param_groups)
        check_complete(self._partial_step)
        flag = self._dummy_overflow_buf
        inverse = None
        if grad_scaler is not None and self.capturable:
            # float32 [1] = 1 / scale, or 1 if the gradients are unscaled; sets the flag if a gradient is not finite.
            found = grad_scaler._check_inf_per_device(self)
            if not found:
                raise RuntimeError(
                    "no parameter has a gradient for the GradScaler to check; step_in_backward() has freed them, and "
                    "has stepped without unscaling: use it without a GradScaler, or call loss.backward() outside of it"
                )
            flag.copy_(
                torch.stack([value.to(flag.device).view(()) for value in found.values()]).sum() != 0
            )
            scale = grad_scaler._get_scale_async().to(flag.device)
            if grad_scaler._per_optimizer_states[id(self)]["stage"] is OptState.UNSCALED:
                inverse = torch.ones_like(scale, dtype=torch.float32).view(1)
            else:
                inverse = scale.to(torch.float64).reciprocal().to(torch.float32).view(1)
        self._forget_replaced_states()
        grads: list[list[Tensor | None]] = [
            [getattr(parameter, "decoupled_grad", None) for parameter in group["params"]]
            if self.use_decoupled_grad
            else [parameter.grad for parameter in group["params"]]
            for group in self.param_groups
        ]
        layouts = self._renew_layouts(grads)
        self._known_states = list(self.state.values())
        lists = [
            [self._lists(of_group, bucket) for bucket in layout.buckets]
            for of_group, layout in zip(grads, layouts, strict=True)
        ]
        for group, of_group, layout in zip(self.param_groups, lists, layouts, strict=True):
            devices = {bucket.parameters[0].device for bucket in layout.buckets}
            rates = self._advance(group, devices, inverse)
            for bucket, of_bucket in zip(layout.buckets, of_group, strict=True):
                self._step_bucket(bucket, of_bucket, rates, may_skip=inverse is not None)
        return loss

    def step_in_backward(self) -> AbstractContextManager[None]:
        """Step each parameter as soon as a backward pass has accumulated its gradient, and free the gradient.

        The gradients of a model then never exist together, and `step` is not called. If all parameters have gradients,
        the bits are equal to those of `loss.backward(); optimizer.step()`. Gradients of backward passes before the
        context are added. Gradients that appear only after the backward pass, as with FSDP2, are stepped at
        the end of the context. The norm of all gradients is unknown before the first step and cannot be clipped, and
        a GradScaler cannot skip the step or unscale the gradients.

        The context counts as one `step` for learning-rate schedulers and step hooks: pre-hooks run on entry, before
        the gradients exist, and post-hooks on exit. An exception before the first gradient counts no step. After
        some parameters were stepped, the step stays counted, and these parameters stay stepped; the next step is an
        error unless load_state_dict() or zero_grad() precedes it.

        Gradients must be complete in the backward pass. DistributedDataParallel reduces them after the hooks, so that
        replicas would diverge: in a process group, a warning says so unless all parameters are DTensors.

        Example:
            with optimizer.step_in_backward():
                loss.backward()

        Raises:
            RuntimeError: With use_decoupled_grad; a parameter has main_grad, or is stepped by another context; or it
                gets two gradients in one context, as from two backward passes, from two reentrant checkpoints that
                share it, or under DistributedDataParallel.
        """
        return step_in_backward(self)

    def _forget_replaced_states(self) -> None:
        """Clear the layouts if the caller has replaced the state dictionaries since the last step."""
        cached = self._known_states
        if len(self.state) == len(cached) and all(map(is_, self.state.values(), cached)):
            return
        self._layouts.clear()
        if cached and not self.state:  # all states were cleared: their steps no longer count
            for group in self.param_groups:
                group.pop("step", None)

    def _advance(
        self, group: dict[str, Any], devices: set[torch.device], inverse: Tensor | None
    ) -> dict[torch.device, Tensor]:
        """Count a step of a group, and return the numbers for `adam_step` on each device.

        Args:
            group: The group.
            devices: Devices of its parameters.
            inverse: With capturable: factor of the gradients, float32 [1]; None: 1.
        """
        flag = self._dummy_overflow_buf
        if self.capturable:  # int32 [1] on the flag's device, unchanged if the flag is set
            steps = torch.as_tensor(group.get("step", 0), dtype=torch.int32, device=flag.device)
            group["step"] = steps.reshape(-1)[:1].add_((flag != 1).to(torch.int32))
        else:
            group["step"] = int(group.get("step", 0)) + 1
        betas, eps = read_pair(group["betas"]), float(group["eps"])
        step: Any = group["step"]
        rest = (
            to_bool("bias_correction", group["bias_correction"]),
            float(group["weight_decay"]),
        )
        if not self.capturable:
            numbers = adam_rates(float(group["lr"]), betas, eps, step, *rest)
            return {device: copy_to_device(numbers, device) for device in devices}
        lr = torch.as_tensor(group["lr"], dtype=torch.float32, device=flag.device)
        values = device_rates(lr, betas, eps, step, *rest, inverse)
        return {device: values.to(device) for device in devices}

    def _lists(self, grads: list[Tensor | None], bucket: Bucket) -> Checked:
        """Return the stored [gradients, parameters, moments, moments(, masters)], checked."""
        of_members = (
            grads
            if len(grads) == len(bucket.params)
            else [grads[index] for index in bucket.members]
        )
        try:
            state_lists = [[state[name] for state in bucket.states] for name in self._names(bucket)]
            if self.block_scaled_states:
                state_lists[2:2] = [
                    [self._scales[parameter][name] for parameter in bucket.params]
                    for name in NAMES[:2]
                ]
        except KeyError as missing:
            raise RuntimeError(
                f"the state of a parameter has no {missing.args[0]} any more; delete its whole entry of "
                "optimizer.state, which then starts from zero, or call load_state_dict()"
            ) from None
        lists: list[Any] = [of_members, bucket.parameters, *state_lists]
        flag = self._dummy_overflow_buf.to(bucket.parameters[0].device)
        return bucket.step.check(flag, lists)

    def _names(self, bucket: Bucket) -> tuple[str, ...]:
        """Return the states that a bucket step changes."""
        return NAMES if self.master_weights and not bucket.own else NAMES[:2]

    def _step_bucket(
        self, bucket: Bucket, lists: Checked, rates: dict[Any, Tensor], may_skip: bool
    ) -> None:
        """Step the parameters of a bucket; may_skip: the overflow flag may be set."""
        names, device = self._names(bucket), bucket.parameters[0].device
        settings = Adam(bool(self.adam_w_mode), self.block_scaled_states, self.stochastic_rounding)
        how = (rates[device], settings, self.capturable)
        converts = [
            self.name_to_dtype_map[name] in states.RANGES and self._block_format(name) is None
            for name in names
        ]
        if not bucket.quantized and not any(converts):
            multi_tensor_applier(bucket.step, self._dummy_overflow_buf.to(device), lists, *how)
            return
        grads, stepped, *state_lists = lists
        exponents = state_lists[2:4] if self.block_scaled_states else []
        if self.block_scaled_states:
            del state_lists[2:4]
        read = [
            self._read(bucket.params, stored, name) if converted else stored
            for converted, stored, name in zip(converts, state_lists, names, strict=True)
        ]
        moments, masters = read[:2], read[2:]
        if bucket.quantized:
            stepped = (
                masters.pop() if masters else [float_values(parameter) for parameter in stepped]
            )
        multi_tensor_applier(
            bucket.step,
            self._dummy_overflow_buf.to(device),
            [grads, stepped, *moments, *exponents, *masters],
            *how,
        )
        for state, name, values, converted in zip(state_lists, names, read, converts, strict=True):
            if converted:  # float32 numbers from `_read`
                for parameter, stored, numbers in zip(bucket.params, state, values, strict=True):
                    states.store(numbers, local_part(stored), self._scale(parameter, name))
        if bucket.quantized:
            for parameter, numbers in zip(bucket.parameters, stepped, strict=True):
                # A rank without elements takes part too: the maximum is reduced over the ranks.
                if isinstance(parameter, QuantizedTensor):
                    values = local_part(numbers).view(parameter.shape)
                    if may_skip:
                        _quantize_unless_skipped(
                            self._dummy_overflow_buf.to(device) != 0, parameter, values
                        )
                    else:
                        parameter.quantize_(values)

    def _read(self, members: list[Tensor], stored: Sequence[Tensor], name: str) -> Sequence[Tensor]:
        """Return a state per parameter: itself where the kernel supports its dtype, otherwise float32 numbers."""
        if self.name_to_dtype_map[name] not in states.RANGES or stored[0].dtype == torch.int16:
            return stored
        return [
            states.unscale(local_part(state), self._scale(parameter, name))
            for parameter, state in zip(members, stored, strict=True)
        ]

    def _renew_layouts(self, grads: list[list[Tensor | None]]) -> list[GroupBuckets]:
        """Return the buckets of each group, cached while the facts are equal, and create missing states.

        All parameters and states are checked before the first state is created.
        """
        groups = [group["params"] for group in self.param_groups]
        ways = (self.master_weights, self.use_decoupled_grad)
        facts = [BucketKey.of(*lists, *ways) for lists in zip(groups, grads, strict=True)]
        cached = self._layouts
        new = [
            i for i, fact in enumerate(facts) if i not in cached or not cached[i].key.equal(fact)
        ]
        for index in new:
            for parameter, grad in zip(groups[index], grads[index], strict=True):
                if grad is not None:
                    check_parameter(parameter, grad, self.master_weights, self.capturable)
                    check_states(
                        parameter, self.state.get(parameter, {}), NAMES[: 2 + self.master_weights]
                    )
        for index in new:
            for parameter in groups[index]:
                self._complete(parameter)
            self._layouts[index] = GroupBuckets(
                facts[index], self._buckets(groups[index], grads[index])
            )
        return [self._layouts[index] for index in range(len(facts))]

    def _buckets(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Bucket]:
        """Group parameters with complete states into buckets."""
        return group_into_buckets(
            params,
            grads,
            self.state,
            self._keeps_remainder,
            not self.use_decoupled_grad,
            self.block_scaled_states,
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set gradients (with use_decoupled_grad, decoupled ones) to None, or with set_to_none=False to zeros."""
        if (
            self.set_grad_none is not None
            and set_to_none is not None
            and self.set_grad_none != set_to_none
        ):
            raise ValueError(
                f"set_grad_none={self.set_grad_none} was given to FusedAdam, set_to_none={set_to_none} here; give one"
            )
        # The gradients that have not been stepped are dropped.
        self._partial_step: str | None = None
        setting = self.set_grad_none if set_to_none is None else set_to_none
        to_none = True if setting is None else setting
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if to_none:
                    parameter.decoupled_grad = None
                elif parameter.decoupled_grad is not None:
                    parameter.decoupled_grad.zero_()


def _quantize_unless_skipped(skipped: Tensor, parameter: QuantizedTensor, values: Tensor) -> None:
    """Quantize values into a parameter; restore its codes and scales if `skipped`, bool [1] on the device, is True."""
    parts = [part for part in parameter.as_storage().flatten()[0] if part is not None]
    before = [part.clone() for part in parts]
    parameter.quantize_(values)
    for part, old in zip(parts, before, strict=True):
        part.copy_(
            torch.where(skipped, old.view(torch.uint8), part.view(torch.uint8)).view(part.dtype)
        )
