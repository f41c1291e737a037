"""Linear: y = x @ weight.T + bias, a fused operation of a product, a bias and the communication of a sharded layer."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ...common.numbers import to_bool
from .basic import AllReduce, BasicLinear, Bias, ReduceScatter
from .basic.basic_linear import tensor_parallel_boundary
from .operation import BasicOperation
from .step_operation import StepFusedOperation


class Linear(StepFusedOperation):
    """y = x @ weight.T + bias over the last dimension of x.

    A state dict holds "basic_ops.0.weight" and "basic_ops.1.bias". A row-parallel layer adds its bias to the reduced
    sum.

    Args:
        in_features: Last dimension of the input, over all ranks.
        out_features: Last dimension of the output, over all ranks.
        bias: Add a bias.
        device: Device of the parameters, by default the GPU if there is one; "meta" allocates them in the first forward
            pass.
        dtype: Dtype of the parameters, by default torch's default dtype.
        tensor_parallel_mode: None, "column" (out_features are sharded) or "row" (in_features are sharded).
        tensor_parallel_group: The tensor-parallel process group, by default the world group.
        sequence_parallel: Activations outside of the pair of sharded layers are sharded along their first dimension.
        rng_state_tracker_function: Function that returns the tracker under whose state the weight is initialized.
        accumulate_into_main_grad: Accumulate the weight gradient into `weight.main_grad`.

    Raises:
        ValueError: An unsupported dtype or mode, or a size that the group does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: Any = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        boundary = tensor_parallel_boundary(
            tensor_parallel_mode,
            tensor_parallel_group,
            to_bool("sequence_parallel", sequence_parallel),
            in_features,
            out_features,
        )
        # A row-parallel product computes a partial sum, which a separate operation reduces.
        row = boundary.mode == "row"
        linear = BasicLinear(
            in_features // boundary.size if row else in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=None if row else tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        ops: list[BasicOperation] = [linear]
        has_bias = to_bool("bias", bias)
        if has_bias:
            # The bias of a row-parallel layer is the sum of the biases of all ranks.
            added = Bias(
                out_features * (boundary.size if row else 1),
                device=device,
                dtype=linear.weight.dtype,
                tensor_parallel=boundary.mode is not None,
                tensor_parallel_group=tensor_parallel_group,
            )
            ops.append(added)
        if row:
            ops.append((ReduceScatter if boundary.sequence else AllReduce)(boundary.group))
        super().__init__(ops)
        self._sizes = in_features, out_features
        self._has_bias = has_bias
        self._alias_parameters()

    @property
    def in_features(self) -> int:
        """Last dimension of the input, over all ranks."""
        return self._sizes[0]

    @property
    def out_features(self) -> int:
        """Last dimension of the output, over all ranks."""
        return self._sizes[1]

    def _owners(self) -> dict[str, Any]:
        """Return the basic operations that hold the parameters."""
        owners = {"weight": self.basic_ops[0]}
        if self._has_bias:
            owners["bias"] = self.basic_ops[1]
        return owners

    def _alias_parameters(self) -> None:
        """Make `weight` and `bias` aliases of the parameters of the basic operations."""
        for name, owner in self._owners().items():
            self._parameters[name] = owner._parameters[name]
        if not self._has_bias:
            self._parameters["bias"] = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias") and "_has_bias" in self.__dict__:
            if name == "bias" and not self._has_bias:
                if value is None:
                    return
                raise ValueError("this Linear has no bias; make it with bias=True")
            owner = self._owners()[name]
            setattr(owner, name, value)
            self._alias_parameters()
            return
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        if name in ("weight", "bias"):
            setattr(self, name, param)
            return
        super().register_parameter(name, param)

    def pre_first_fuser_forward(self) -> None:
        super().pre_first_fuser_forward()
        self._alias_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        super()._apply(fn, recurse)
        self._alias_parameters()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save nothing: the basic operations save the parameters."""

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        """Accept parameters under their own names and under those of the basic operations."""
        for index, name in enumerate(("weight", "bias")):
            value = state_dict.pop(prefix + name, None)
            if value is not None:
                state_dict.setdefault(f"{prefix}basic_ops.{index}.{name}", value)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *others)
        own = {prefix + "weight", prefix + "bias"}
        missing_keys[:] = [key for key in missing_keys if key not in own]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}"
