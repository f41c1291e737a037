"""p -= lr (m / c1 / (sqrt(v / c2) + eps) + decay p): Adam and AdamW over all parameters of a kind in one launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...common.steps import Adam
from ..primitives.multi_tensor import halves, joined
from ..tensor.quantized_tensor import QuantizedTensor
from . import states
from .adam_checks import check_capturable, check_dtypes, check_numbers, check_parameter
from .adam_numbers import next_step, rates_of
from .amp import heed
from .buckets import Bucket, Layout, buckets_of, facts_of
from .local import like, local_of
from .multi_tensor_apply import multi_tensor_applier

__all__ = ["FusedAdam"]

_NAMES = ("exp_avg", "exp_avg_sq", "master_param")


class FusedAdam(torch.optim.Optimizer):
    """Adam (adam_w_mode=False: weight decay as a part of the gradient) and AdamW.

    master_weights          parameters of 16 bits and quantized ones are copies of masters, which are stepped in their
                            place; a float32 parameter is its own master
    master_weight_dtype     float32, or float16 with one scale a tensor
    exp_avg_dtype,
    exp_avg_sq_dtype        float32, bfloat16, or float16 and uint8 (FP8) with one scale a tensor
    store_param_remainders  of a bfloat16 parameter the master's lower 16 bits alone are kept: both together are the
                            float32 number, and the parameter is it rounded half up
    capturable              lr and the number of steps lie on the device, for CUDA graphs; an overflow skips the step
    use_decoupled_grad      read parameter.decoupled_grad in place of .grad

    A quantized parameter (`quantized_model_init`) needs master_weights=True; a FP8 one with delayed scaling may do
    without, and loses whatever is smaller than the step between two codes.

    Raises RuntimeError for combinations that do not exist, as the original does.
    """

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
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam has no AMSGrad; use torch.optim.AdamW(amsgrad=True)")
        check_dtypes(master_weights, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype)
        halves_masters = bool(
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        if capturable:
            check_capturable(
                master_weights, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, halves_masters
            )
        self.adam_w_mode = int(adam_w_mode)
        self.capturable = capturable
        self.master_weights = master_weights
        self.master_weight_dtype = master_weight_dtype
        self.exp_avg_dtype = exp_avg_dtype
        self.exp_avg_sq_dtype = exp_avg_sq_dtype
        self.name_to_dtype_map: dict[str, torch.dtype] = dict(
            zip(_NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True)
        )
        self.dtype_to_range_map = states.RANGES
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = halves_masters
        self.fuse_unscale = exp_avg_dtype == exp_avg_sq_dtype == torch.bfloat16
        self.set_grad_none = set_grad_none
        if set_grad_none is not None:
            warnings.warn(
                "set_grad_none is deprecated; say zero_grad(set_to_none=..)", DeprecationWarning, stacklevel=2
            )
        self._scales: dict[Tensor, dict[str, Tensor]] = {}
        self._layouts: dict[int, Layout] = {}
        self._known_states: list[dict[str, Tensor]] = []
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        check_numbers(defaults)
        super().__init__(params, defaults)
        device = self._device()
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32, device=device)
        if capturable:
            self._step_supports_amp_scaling = True
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device)

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        """One step of every parameter that has a gradient; what closure() answers.

        grad_scaler   with capturable=True: gradients are divided by its scale, and where one of them is not finite
                      nothing is changed
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flag = self._dummy_overflow_buf
        inverse = heed(grad_scaler, self, flag) if grad_scaler is not None and self.capturable else None
        if not self._states_are_known():
            self._layouts.clear()
        grads = [self._grads(group["params"]) for group in self.param_groups]
        layouts = [self._layout(place, grads[place]) for place in range(len(grads))]
        self._known_states = list(self.state.values())
        for group, of_group, layout in zip(self.param_groups, grads, layouts, strict=True):
            group["step"] = next_step(group.get("step", 0), flag, self.capturable)
            devices = {bucket.parameters[0].device for bucket in layout.buckets}
            rates = rates_of(group, inverse, devices, flag, self.capturable)
            for bucket in layout.buckets:
                self._step_bucket(of_group, bucket, rates)
        return loss

    def _step_bucket(self, grads: list[Tensor | None], bucket: Bucket, rates: dict[Any, Tensor]) -> None:
        members, kept = bucket.params, bucket.states
        of_members = grads if len(grads) == len(members) else [grads[place] for place in bucket.members]
        masters = self.master_weights and not bucket.own
        stepped = bucket.parameters
        if bucket.quantized:
            stepped = (
                self._read(members, kept, "master_param")
                if masters
                else [_numbers(parameter) for parameter in stepped]
            )
        names = ["exp_avg", "exp_avg_sq", *["master_param"] * (masters and not bucket.quantized)]
        read = [self._read(members, kept, name) for name in names]
        device = bucket.parameters[0].device
        multi_tensor_applier(
            bucket.step,
            self._dummy_overflow_buf.to(device),
            [of_members, stepped, *read],  # pyright: ignore[reportArgumentType]
            rates[device],
            Adam(decoupled=bool(self.adam_w_mode)),
            self.capturable,
        )
        for name, values in zip(names, read, strict=True):
            self._write(members, kept, name, values)
        if bucket.quantized:
            if masters:
                self._write(members, kept, "master_param", stepped)
            for parameter, numbers in zip(bucket.parameters, stepped, strict=True):
                if isinstance(parameter, QuantizedTensor) and parameter.numel():
                    parameter.quantize_(local_of(numbers).view(parameter.shape))

    def _read(self, members: list[Tensor], kept: list[dict[str, Tensor]], name: str) -> list[Tensor]:
        """A state of each parameter: itself where the kernel takes its dtype, else float32 numbers."""
        found = [state[name] for state in kept]
        if self.name_to_dtype_map[name] not in states.RANGES or found[0].dtype == torch.int16:
            return found
        return [
            states.unscaled(local_of(state), self._scale(parameter, name))
            for parameter, state in zip(members, found, strict=True)
        ]

    def _write(
        self, members: list[Tensor], kept: list[dict[str, Tensor]], name: str, values: list[Tensor]
    ) -> None:
        """What `_read` made float32 numbers of is kept as it was."""
        if self.name_to_dtype_map[name] in states.RANGES:
            for parameter, state, numbers in zip(members, kept, values, strict=True):
                states.store(numbers, local_of(state[name]), self._scale(parameter, name))

    def _grads(self, params: list[Tensor]) -> list[Tensor | None]:
        if self.use_decoupled_grad:
            return [getattr(parameter, "decoupled_grad", None) for parameter in params]
        return [parameter.grad for parameter in params]

    def _states_are_known(self) -> bool:
        """Are the dictionaries of the states those of the last step? Whoever owns an optimizer may replace them."""
        known = self._known_states
        return len(self.state) == len(known) and all(map(is_, self.state.values(), known))

    def _layout(self, place: int, grads: list[Tensor | None]) -> Layout:
        """The buckets of a group, remembered while the facts are the same; every parameter there has its states."""
        params = self.param_groups[place]["params"]
        facts = facts_of(params, grads, self.master_weights, self.use_decoupled_grad)
        known = self._layouts.get(place)
        if known is not None and known.facts == facts:
            return known
        for parameter, grad in zip(params, grads, strict=True):
            if grad is not None and grad.is_sparse:
                raise RuntimeError("FusedAdam takes no sparse gradients; use torch.optim.SparseAdam")
            if grad is not None:
                check_parameter(parameter, grad, self.master_weights, self.capturable)
        for parameter in params:
            self._complete(parameter)
        held = not self.use_decoupled_grad
        layout = Layout(facts, buckets_of(params, grads, self.state, self._keeps_remainder, held))
        self._layouts[place] = layout
        return layout

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Gradients, or with use_decoupled_grad decoupled ones, are None, or zeros with set_to_none=False."""
        if self.set_grad_none is not None and set_to_none is not None and self.set_grad_none != set_to_none:
            raise ValueError(
                f"set_grad_none={self.set_grad_none} was given to FusedAdam, set_to_none={set_to_none} here; give one"
            )
        given = self.set_grad_none if set_to_none is None else set_to_none
        to_none = True if given is None else given
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if to_none:
                    parameter.decoupled_grad = None
                elif parameter.decoupled_grad is not None:
                    parameter.decoupled_grad.zero_()

    # States.

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        """A state as float32 numbers (remainders: int16), distributed as the parameter is.

        skip_unscale   as it is kept
        """
        state = self.state[param][state_name]
        if skip_unscale:
            return state
        local = local_of(state)
        numbers = states.unscaled(local, self._scale(param, state_name))
        return state if numbers is local else like(param, numbers)

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Keep float32 numbers (remainders: int16) as a state, in its dtype."""
        remainder = state_name == "master_param" and self._keeps_remainder(param)
        dtype = torch.int16 if remainder else torch.float32
        values = local_of(unscaled_state).detach()
        if values.dtype != dtype:
            raise RuntimeError(f"{state_name} is {values.dtype}; give {dtype}")
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, False, remainder)
        state = local_of(self.state[param][state_name])
        with torch.no_grad():
            states.store(values.view(state.shape).to(state.device), state, self._scale(param, state_name))

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """The moments of a parameter, zeros, and its master, if it has one."""
        self.state[param] = {}
        self._complete(param, store_param_remainders)

    def _complete(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Make the states that a parameter has not got."""
        kept = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in kept:
                self._initialize_state(param, name, True)
        if not self.master_weights or "master_param" in kept:
            return
        keeps = self._keeps_remainder(param) if store_param_remainders is None else store_param_remainders
        self._initialize_state(param, "master_param", keeps, keeps)
        local = local_of(param).detach()
        if not keeps and (isinstance(local, QuantizedTensor) or local.dtype != torch.float32):
            self.set_scaled_state(param, "master_param", _numbers(local))

    def _initialize_state(
        self, param: Tensor, state_name: str, zero_buffer: bool, store_param_remainders: bool = False
    ) -> None:
        """Make room for a state: zeros, or of a float32 parameter's master the parameter itself."""
        local = local_of(param).detach()
        dtype = torch.int16 if store_param_remainders else self.name_to_dtype_map[state_name]
        own = state_name == "master_param" and type(local) is Tensor and local.dtype == torch.float32
        made = local if own else states.zeros(local, dtype)
        if dtype in states.RANGES and not own:
            one = torch.ones(1, dtype=torch.float32, device=local.device)
            self._scales.setdefault(param, {})[state_name] = one
        self.state[param][state_name] = like(param, made)

    def _keeps_remainder(self, param: Tensor) -> bool:
        local = local_of(param)
        plain = local.dtype == torch.bfloat16 and not isinstance(local, QuantizedTensor)
        return self.store_param_remainders and self.master_weights and plain

    def _scale(self, param: Tensor, state_name: str) -> Tensor | None:
        return self._scales.get(param, {}).get(state_name)

    def state_dict(self) -> dict[str, Any]:
        """torch's, with every state as float32 numbers, whatever it is kept in (remainders: int16)."""
        found = super().state_dict()
        found["state"] = {
            place: {
                name: self.get_unscaled_state(parameter, name) if name in _NAMES else value
                for name, value in self.state[parameter].items()
            }
            for place, parameter in enumerate(self._parameters())
            if parameter in self.state
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, of whatever dtypes the states are kept in here; one of torch.optim.AdamW
        too, whose number of steps stands with each parameter."""
        super().load_state_dict(state_dict)
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        for place, parameter in zip(places, self._parameters(), strict=True):
            saved = state_dict["state"].get(place)
            if saved is None:
                continue
            self.state[parameter] = {}
            for name in ("exp_avg", "exp_avg_sq"):
                if saved.get(name) is not None:
                    self.set_scaled_state(parameter, name, saved[name].float())
            if self.master_weights and saved.get("master_param") is not None:
                self._load_master(parameter, saved["master_param"])
        self._take_steps(state_dict)

    def _load_master(self, parameter: Tensor, saved: Tensor) -> None:
        """A master of float32, or the lower half of one, as whichever of the two is kept here."""
        keeps, local, given = self._keeps_remainder(parameter), local_of(parameter).detach(), local_of(saved)
        given = given.to(local.device)
        if given.dtype == torch.int16 and not keeps:
            given = joined(local.to(torch.bfloat16), given)
        elif given.dtype != torch.int16 and keeps:
            upper, given = halves(given.float())
            local.copy_(upper)
        self.set_scaled_state(parameter, "master_param", given if keeps else given.float())

    def _take_steps(self, state_dict: dict[str, Any]) -> None:
        """Of torch's optimizers, which count by parameter, the count of a group's first."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            counts = [state_dict["state"].get(place, {}).get("step") for place in saved["params"]]
            counts = [int(count) for count in counts if count is not None]
            if "step" not in saved and counts:
                group["step"] = counts[0]
            if "step" in group and not self.capturable:
                group["step"] = int(group["step"])
            if self.capturable:
                lr = torch.as_tensor(group["lr"], dtype=torch.float32)
                group["lr"] = lr.to(self._dummy_overflow_buf.device)

    def master_values(self, param: Tensor) -> Tensor:
        """float32: the parameter's master, whatever it is kept in; RuntimeError without master_weights."""
        if not self.master_weights:
            raise RuntimeError("there are no masters; say FusedAdam(master_weights=True)")
        if param not in self.state or "master_param" not in self.state[param]:
            self.initialize_state(param)
        if self._keeps_remainder(param):
            remainder = local_of(self.state[param]["master_param"])
            return like(param, joined(local_of(param).detach(), remainder))
        return self.get_unscaled_state(param, "master_param")

    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def _device(self) -> torch.device:
        return next((local_of(parameter).device for parameter in self._parameters()), torch.device("cpu"))


def _numbers(parameter: Tensor) -> Tensor:
    """float32: what a parameter of fewer bits stands for."""
    if isinstance(parameter, QuantizedTensor):
        return parameter.dequantize(dtype=torch.float32)
    return parameter.to(torch.float32)
