"""FusedAdam states (moments and master weights in any dtype): reading, writing, saving and loading."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..primitives.multi_tensor import halves, join_halves
from ..primitives.multi_tensor.block_states import FIRST, SECOND, BlockFormat, block_count
from ..tensor.quantized_tensor import QuantizedTensor
from . import states
from .checks import check_saved
from .multi_tensor_apply import like, local_part
from .states import CopiedWhole

NAMES = ("exp_avg", "exp_avg_sq", "master_param")
BLOCK_FORMATS = {"exp_avg": FIRST, "exp_avg_sq": SECOND}


class AdamStates(CopiedWhole):
    """An optimizer with the states of Adam; the attributes are the settings of FusedAdam."""

    capturable: bool
    master_weights: bool
    store_param_remainders: bool
    block_scaled_states: bool
    name_to_dtype_map: dict[str, torch.dtype]
    _scales: dict[Tensor, dict[str, Tensor]]
    _dummy_overflow_buf: Tensor
    _opt_called: bool
    _partial_step: str | None = None  # how an exception has ended a step of some parameters only

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle; a float32 parameter is its own master again."""
        super().__setstate__(state)
        for parameter in self._parameters():
            local = local_part(parameter).detach()
            for name, value in self.state.get(parameter, {}).items():
                if name in NAMES:
                    states.make_writable(local_part(value))
            if "master_param" in self.state.get(parameter, {}) and _is_own(local):
                self.state[parameter]["master_param"] = like(parameter, local)

    def get_unscaled_state(
        self, param: Tensor, state_name: str, skip_unscale: bool = False
    ) -> Tensor:
        """Return a state in float32 (remainders: int16), with the placements of the parameter.

        Args:
            param: A parameter in the optimizer.
            state_name: "exp_avg", "exp_avg_sq" or "master_param".
            skip_unscale: Return the stored state without unscaling it.
        """
        self._renew_master(param)
        state = self.state[param][state_name]
        if skip_unscale:
            return state
        local = local_part(state)
        numbers = states.unscale(
            local, self._scale(param, state_name), self._block_format(state_name)
        )
        return state if numbers is local else like(param, numbers)

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store float32 values (remainders: int16) as a state, converted to the dtype of the state."""
        remainder = state_name == "master_param" and self._keeps_remainder(param)
        dtype = torch.int16 if remainder else torch.float32
        values = local_part(unscaled_state).detach()
        if values.dtype != dtype:
            raise RuntimeError(f"{state_name} is {values.dtype}; give {dtype}")
        self._renew_master(param)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, False, remainder)
        state = local_part(self.state[param][state_name])
        with torch.no_grad():
            states.store(
                values.view(state.shape).to(state.device),
                state,
                self._scale(param, state_name),
                self._block_format(state_name),
            )

    def initialize_state(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Create the moments of a parameter, filled with zeros, and its master weight if `master_weights` is set."""
        self.state[param] = {}
        self._complete(param, store_param_remainders)

    def state_bytes(self) -> int:
        """Bytes of the states of all parameters on this rank, whether they exist yet or not."""
        return sum(
            self._bytes_of(local_part(parameter).detach(), self._keeps_remainder(parameter))
            for parameter in self._parameters()
        )

    def _bytes_of(self, local: Tensor, keeps_remainder: bool) -> int:
        names = NAMES if self.master_weights and not _is_own(local) else NAMES[:2]
        total = 0
        for name in names:
            halved = name == "master_param" and keeps_remainder
            dtype = torch.int16 if halved else self.name_to_dtype_map[name]
            total += local.numel() * dtype.itemsize
            if self._block_format(name) is not None:
                total += block_count(local.numel())
        return total

    def _complete(self, param: Tensor, store_param_remainders: bool | None = None) -> None:
        """Create the missing states of a parameter."""
        self._renew_master(param)
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                self._initialize_state(param, name, True)
        if not self.master_weights or "master_param" in state:
            return
        keeps = (
            self._keeps_remainder(param)
            if store_param_remainders is None
            else store_param_remainders
        )
        self._initialize_state(param, "master_param", keeps, keeps)
        local = local_part(param).detach()
        if not keeps and (isinstance(local, QuantizedTensor) or local.dtype != torch.float32):
            self.set_scaled_state(param, "master_param", float_values(local))

    def _renew_master(self, param: Tensor) -> None:
        """Replace a master that does not belong to the parameter's present data.

        A float32 parameter is its own master, so that the master is an alias of its data. A bfloat16 parameter has
        remainders (int16) or a full master. Assigning `param.data` changes the memory, and possibly the dtype, without
        a notice to the optimizer.
        """
        master = self.state[param].get("master_param") if param in self.state else None
        if not isinstance(master, Tensor):
            return
        local_master, local = local_part(master), local_part(param).detach()
        if _is_own(local):
            if local_master.data_ptr() != local.data_ptr() or local_master.shape != local.shape:
                self.state[param]["master_param"] = like(param, local)
        elif (
            not isinstance(local_master, QuantizedTensor) and local_master.numel() == local.numel()
        ):
            keeps = self._keeps_remainder(param)
            if local_master.dtype != (
                torch.int16 if keeps else self.name_to_dtype_map["master_param"]
            ):
                del self.state[param]["master_param"]
                self._complete(param)

    def _initialize_state(
        self,
        param: Tensor,
        state_name: str,
        zero_buffer: bool,
        store_param_remainders: bool = False,
    ) -> None:
        """Allocate a state filled with zeros; the master of a float32 parameter is an alias of the parameter."""
        local = local_part(param).detach()
        dtype = torch.int16 if store_param_remainders else self.name_to_dtype_map[state_name]
        is_own_master = state_name == "master_param" and _is_own(local)
        block_format = self._block_format(state_name)
        values = local if is_own_master else states.zeros(local, dtype, block_format)
        if dtype in states.RANGES and not is_own_master:
            self._scales.setdefault(param, {})[state_name] = states.zero_scale(local, block_format)
        self.state[param][state_name] = like(param, values)

    def _keeps_remainder(self, param: Tensor) -> bool:
        local = local_part(param)
        plain = local.dtype == torch.bfloat16 and not isinstance(local, QuantizedTensor)
        return self.store_param_remainders and self.master_weights and plain

    def _block_format(self, state_name: str) -> BlockFormat | None:
        """Format of a block-scaled moment; None for other states."""
        return BLOCK_FORMATS.get(state_name) if self.block_scaled_states else None

    def _scale(self, param: Tensor, state_name: str) -> Tensor | None:
        return self._scales.get(param, {}).get(state_name)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict in torch's form, with every state in float32 (remainders: int16).

        Groups hold the step count. torch.optim.AdamW reads it from the parameters' states, and
        therefore cannot resume from this state dict.
        """
        found = super().state_dict()
        found["state"] = {
            index: {
                name: self.get_unscaled_state(parameter, name) if name in NAMES else value
                for name, value in self.state[parameter].items()
            }
            for index, parameter in enumerate(self._parameters())
            if parameter in self.state
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` result into states with any dtype, or a torch.optim.AdamW state dict.

        torch counts steps per parameter; ValueError unless they are equal in a group. A state that cannot be loaded is
        rejected before any state changes.
        """
        steps = check_saved(state_dict, self.param_groups, self.defaults, self.master_weights)
        super().load_state_dict(state_dict)
        self._partial_step = None
        places = [index for group in state_dict["param_groups"] for index in group["params"]]
        for index, parameter in zip(places, self._parameters(), strict=True):
            saved = state_dict["state"].get(index)
            if not saved:
                continue
            self.state[parameter] = {}
            for name in ("exp_avg", "exp_avg_sq"):
                self.set_scaled_state(parameter, name, saved[name].float())
            if self.master_weights and saved.get("master_param") is not None:
                # A float32 master or its lower half, converted to the kind that is kept here.
                keeps, local = self._keeps_remainder(parameter), local_part(parameter).detach()
                master = local_part(saved["master_param"]).to(local.device)
                if master.dtype == torch.int16 and not keeps:
                    master = join_halves(local.to(torch.bfloat16), master)
                elif master.dtype != torch.int16 and keeps:
                    upper, master = halves(master.float())
                    local.copy_(upper)
                self.set_scaled_state(
                    parameter, "master_param", master if keeps else master.float()
                )
        # Groups in torch's optimizers have no step count: use their parameters' count.
        for group, saved, step in zip(
            self.param_groups, state_dict["param_groups"], steps, strict=True
        ):
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if "step" not in saved and step is not None:
                group["step"] = step
            if "step" in group and not self.capturable:
                group["step"] = int(group["step"])
            if self.capturable:
                device = self._dummy_overflow_buf.device
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)

    def master_values(self, param: Tensor) -> Tensor:
        """Return the parameter's master weight in float32; raise RuntimeError if `master_weights` is False."""
        if not self.master_weights:
            raise RuntimeError(
                "the optimizer has no master weights; construct it with FusedAdam(master_weights=True)"
            )
        if param not in self.state or "master_param" not in self.state[param]:
            self.initialize_state(param)
        if self._keeps_remainder(param):
            remainder = local_part(self.state[param]["master_param"])
            return like(param, join_halves(local_part(param).detach(), remainder))
        return self.get_unscaled_state(param, "master_param")

    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def _is_own(local: Tensor) -> bool:
    """Return whether a detached parameter is its own master weight."""
    return type(local) is Tensor and local.dtype == torch.float32


def float_values(parameter: Tensor) -> Tensor:
    """Return the values of a lower-precision parameter in float32."""
    if isinstance(parameter, QuantizedTensor):
        return parameter.dequantize(dtype=torch.float32)
    return parameter.to(torch.float32)
