"""Linear: a matrix product, a bias and tensor-parallel communication as one fused operation.

| tensor_parallel_mode | operations |
| --- | --- |
| None, "column" | `BasicLinear`, `Bias` |
| "row" | `BasicLinear`, `Bias`, `AllReduce`; with sequence parallelism `ReduceScatter` in place of `AllReduce` |

The passes of these operations compute y and the gradients: `BasicLinear.passes` (`basic/basic_linear.py`) creates the
passes of the product, `passes/linear.py` and `functions/linear.py` compute them, and a row of `passes/patterns.py` adds
the bias in the epilogue of the product.

`Linear` owns the parameters that these operations read, so that torch's tools find `weight` and
`bias` as in torch.nn.Linear. State dicts have NVIDIA Transformer Engine's keys, which name the
operations; torch.nn.Linear's keys load too.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from ...common.numbers import to_bool
from ..runtime.checks import is_distributed
from .basic import AllReduce, BasicLinear, Bias, ReduceScatter
from .basic.basic_linear import tensor_parallel_boundary
from .operation import BasicOperation
from .pass_operation import PassFusedOperation

# {parameter name: (index of the operation that reads it, key in state dicts)}
_SAVED_KEYS = {"weight": (0, "basic_ops.0.weight"), "bias": (1, "basic_ops.1.bias")}
# Part of the prefix of modules below torch.distributed.fsdp.FullyShardedDataParallel.
_FSDP_PREFIX = "_fsdp_wrapped_module."


class Linear(PassFusedOperation):
    """y = x @ weight.T + bias over the last dimension of x.

    State dicts have the keys "basic_ops.0.weight" and "basic_ops.1.bias"; "weight" and "bias" are loaded too. Below
    torch.distributed.fsdp.FullyShardedDataParallel, which looks parameters up by their names, the keys are "weight"
    and "bias".

    In a row-parallel layer each rank has a bias [out_features] and adds it before the reduction, so
    y contains the sum over all ranks' biases. `te.Linear` adds one bias, after the reduction.

    Args:
        in_features: Size of the last input dimension, over all ranks.
        out_features: Size of the last output dimension, over all ranks.
        bias: Add a bias.
        device: Parameter device, by default the GPU if there is one; "meta" allocates them in the
            first forward pass.
        dtype: Parameter dtype, by default torch's default dtype.
        tensor_parallel_mode: None, "column" (out_features are sharded) or "row" (in_features are sharded).
        tensor_parallel_group: The tensor-parallel process group, by default the world group.
        sequence_parallel: Shard the activations between layers along their first dimension.
        rng_state_tracker_function: Function that returns an RNG state tracker, within whose `fork()` the weight is
            initialized.
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
        has_bias = to_bool("bias", bias)
        is_row_parallel = boundary.mode == "row"
        # A row-parallel BasicLinear would reduce its result itself, before the bias is added. Here it is an
        # unsharded layer over this rank's input features, and a separate operation reduces after the bias.
        linear = BasicLinear(
            in_features // boundary.size if is_row_parallel else in_features,
            out_features,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=None if is_row_parallel else tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )
        ops: list[BasicOperation] = [linear]
        if has_bias:
            # Bias divides its size by the number of ranks, but each rank of a row-parallel layer has all out_features.
            bias_op = Bias(
                out_features * (boundary.size if is_row_parallel else 1),
                device=device,
                dtype=linear.weight.dtype,
                tensor_parallel=boundary.mode is not None,
                tensor_parallel_group=tensor_parallel_group,
            )
            ops.append(bias_op)
        if is_row_parallel:
            reduction = ReduceScatter if boundary.sequence else AllReduce
            ops.append(reduction(boundary.group))
        super().__init__(ops)
        # Pickled modules contain this tuple under this name.
        self._sizes = in_features, out_features
        self._has_bias = has_bias
        for op in ops:  # `self` owns `weight` and `bias` from here on, and the operations read them
            op.lend_parameters(self)
        if not has_bias:
            self.register_parameter("bias", None)

    @property
    def in_features(self) -> int:
        """Size of the last input dimension, over all ranks."""
        return self._sizes[0]

    @property
    def out_features(self) -> int:
        """Size of the last output dimension, over all ranks."""
        return self._sizes[1]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a layer without a bias accepts none later, because it has no operation that adds it."""
        if name == "bias" and not self.__dict__.get("_has_bias", True):
            if value is None:
                return
            raise ValueError("this Linear has no bias; construct it with bias=True")
        super().__setattr__(name, value)

    def _saved_keys(self, prefix: str) -> dict[str, str]:
        """Keys {parameter name: key that names the basic operation} of parameters that the operations read here."""
        operations = list(self.basic_ops)
        return {
            prefix + name: prefix + key
            for name, (index, key) in _SAVED_KEYS.items()
            # An operation that replaces one of the constructor's has parameters of its own.
            if index < len(operations) and name not in operations[index]._parameters
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the parameters under keys that name the basic operations."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if _FSDP_PREFIX in prefix:
            return
        for name, key in self._saved_keys(prefix).items():
            if name in destination:
                destination[key] = destination.pop(name)

    def _load_from_state_dict(
        self,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load parameters under keys that name the basic operations, or under their own names.

        Raises:
            RuntimeError: The state dict has a parameter under both keys.
        """
        saved_keys = self._saved_keys(prefix)
        for name, key in saved_keys.items():
            if key not in state_dict:
                continue
            parameter = self._parameters.get(name.removeprefix(prefix))
            # torch.distributed.checkpoint.state_dict adds each parameter itself under its name.
            if name in state_dict and state_dict[name] is not parameter:
                raise RuntimeError(
                    f"the state dict has {name} and {key}, which are the same parameter of Linear; remove one of them"
                )
            state_dict[name] = _sharded_as(parameter, state_dict.pop(key))
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # Report missing parameters under the keys that `state_dict` returns.
        missing_keys[:] = [saved_keys.get(key, key) for key in missing_keys]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}"


def _sharded_as(parameter: Any, value: Any) -> Any:
    """Shard a full value as a DTensor parameter; torch does so only for values under the parameter's name."""
    if not is_distributed(parameter) or is_distributed(value) or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
