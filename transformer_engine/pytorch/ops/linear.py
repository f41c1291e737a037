"""Linear: a matrix product, a bias and tensor-parallel communication as one fused operation.

| tensor_parallel_mode | operations (`Bias` only with bias=True) |
| --- | --- |
| None, "column", or any mode with one rank | `BasicLinear`, `Bias` |
| "row" with several ranks | `BasicLinear`, `Bias`, `AllReduce` (with sequence parallelism `ReduceScatter`) |

This file chooses the operations, owns their parameters and translates state-dict keys. `forward` is inherited
(`operation.py`): alone, the layer runs as a chain of its own; in a `Sequential`, as a part of the container's chain
(`fuser.py`). A call has three steps:

1. The method `passes` of each operation returns its forward and backward function for one kind of call: `LinearPasses`
   (`passes/linear.py`) and `BiasPasses` (`passes/bias.py`). The recipe's quantizers belong to `BasicLinear`
   (`recipe_slots.py`).
2. `passes/patterns.py` adds the bias in the epilogue of the product.
3. `LinearPasses` calls `functions/linear.py`, which quantizes the operands and multiplies.

`Linear` owns the parameters that these operations read (`lent_parameters.py`), so that torch's tools find
`weight` and `bias` as in torch.nn.Linear.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from ...common.numbers import to_bool
from ..runtime.checks import is_distributed
from .basic import AllReduce, BasicLinear, Bias, ReduceScatter
from .basic.basic_linear import create_tensor_parallel
from .operation import BasicOperation
from .pass_operation import PassFusedOperation, PassOperation

# {parameter name: index of the basic operation that reads it}
_OPERATION_INDEX = {"weight": 0, "bias": 1}
# torch.distributed.fsdp.FullyShardedDataParallel inserts this text into the state-dict prefixes of the modules that it
# wraps.
_FSDP_PREFIX = "_fsdp_wrapped_module."


class Linear(PassFusedOperation):
    """Compute y [.., out_features] = x [.., in_features] @ weight.T + bias.

    State dicts have the keys "basic_ops.0.weight" and "basic_ops.1.bias"; "weight" and "bias" can be loaded
    too. Within torch.distributed.fsdp.FullyShardedDataParallel, which looks parameters up by their names, the
    keys are "weight" and "bias". Each basic operation also has a key "basic_ops.<index>._extra_state", for the
    scales of delayed scaling.

    In a row-parallel layer each rank has a bias [out_features] and adds it before the reduction, so
    y contains the sum over all ranks' biases: the bias then fuses with the product, and the operations and
    checkpoints are those of NVIDIA's Transformer Engine. `te.Linear` adds one bias, after the reduction.
    Loading the same bias on all n ranks, for example from te.Linear or torch.nn.Linear, therefore adds n times
    that bias: divide it by n, or load zeros on the other ranks.

    Args:
        in_features: Size of the last input dimension, over all ranks.
        out_features: Size of the last output dimension, over all ranks.
        bias: Add a bias.
        device: Parameter device, by default the GPU if there is one, unlike torch.nn. With "meta" the first forward
            pass allocates the parameters.
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
        # Raises an error for invalid arguments. `parallel.mode` is None with one rank.
        parallel = create_tensor_parallel(
            tensor_parallel_mode,
            tensor_parallel_group,
            to_bool("sequence_parallel", sequence_parallel),
            in_features,
            out_features,
        )
        has_bias = to_bool("bias", bias)
        is_row_parallel = parallel.mode == "row"
        linear_options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "rng_state_tracker_function": rng_state_tracker_function,
            "accumulate_into_main_grad": accumulate_into_main_grad,
        }
        if is_row_parallel:
            # A row-parallel BasicLinear would reduce its result itself, before the bias is added. Here it is an
            # unsharded layer over this rank's input features, and a separate operation reduces after the bias. So
            # `basic_ops[0].in_features` is the size on this rank, while `Linear.in_features` is the full size.
            linear = BasicLinear(in_features // parallel.size, out_features, **linear_options)
        else:
            linear = BasicLinear(
                in_features,
                out_features,
                tensor_parallel_mode=tensor_parallel_mode,
                tensor_parallel_group=tensor_parallel_group,
                sequence_parallel=sequence_parallel,
                **linear_options,
            )
        ops: list[BasicOperation] = [linear]
        if has_bias:
            bias_op = Bias(
                out_features,
                device=device,
                dtype=linear.weight.dtype,
                tensor_parallel=parallel.mode == "column",
                tensor_parallel_group=tensor_parallel_group,
            )
            ops.append(bias_op)
        if is_row_parallel:
            reduction = ReduceScatter if parallel.sequence else AllReduce
            ops.append(reduction(parallel.group))
        super().__init__(ops)
        # Keep this name and the properties below: modules that were pickled by py0.3.0 or earlier contain `_sizes`, not
        # `in_features` and `out_features`.
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

    def reset_parameters(self) -> None:
        """Fill the weight with uniform random values and the bias with zeros.

        Parameters on the meta device are allocated first.
        """
        for operation in self.basic_operations():
            if isinstance(operation, PassOperation):  # a user may have replaced it
                operation.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            ValueError: The layer was constructed without a bias, and the value is a bias. No operation would
                add it.
        """
        self._check_bias(name, value)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter.

        Raises:
            ValueError: The layer was constructed without a bias, and the parameter is a bias.
        """
        self._check_bias(name, param)
        super().register_parameter(name, param)

    def _check_bias(self, name: str, value: Any) -> None:
        """Raise ValueError if no operation would add the bias.

        `_has_bias` is unset during construction, when `self._has_bias` would raise an error.
        """
        if name == "bias" and value is not None and not self.__dict__.get("_has_bias", True):
            raise ValueError("this Linear has no bias; construct it with bias=True")

    def _parameter_keys(self, prefix: str) -> dict[str, str]:
        """State-dict keys for the parameters that `Linear` owns.

        Returns:
            {key as in torch.nn.Linear, prefix + "weight": key with the basic operation's index,
            prefix + "basic_ops.0.weight"}.
        """
        operations = self.basic_operations()
        keys: dict[str, str] = {}
        for name, index in _OPERATION_INDEX.items():
            # A parametrization removes the name from `_parameters`. None means no bias.
            is_none = name in self._parameters and self._parameters[name] is None
            if is_none or index >= len(operations):
                continue
            # A user may have replaced the operation, for example `linear.basic_ops[0] = LoRA(..)`. If the new
            # one owns a parameter of this name, it saves and loads the parameter itself.
            if name not in operations[index]._parameters:
                keys[f"{prefix}{name}"] = f"{prefix}basic_ops.{index}.{name}"
        return keys

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the parameters under keys that name the basic operations."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # FullyShardedDataParallel looks the entries up by parameter name (class docstring), so they keep these keys.
        if _FSDP_PREFIX in prefix:
            return
        for torch_key, indexed_key in self._parameter_keys(prefix).items():
            if torch_key in destination:
                destination[indexed_key] = destination.pop(torch_key)

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
        keys = self._parameter_keys(prefix)
        moved: dict[str, str] = {}
        for torch_key, indexed_key in keys.items():
            if indexed_key not in state_dict:
                continue
            parameter = self._parameters.get(torch_key.removeprefix(prefix))  # None if parametrized
            # Two entries are an error, unless the one under `torch_key` is the parameter itself:
            # torch.distributed.checkpoint.state_dict adds this entry.
            if torch_key in state_dict and state_dict[torch_key] is not parameter:
                raise RuntimeError(
                    f"the state dict has {torch_key} and {indexed_key}, which are the same parameter of Linear; remove "
                    "one of them"
                )
            # `load_state_dict` passes a shallow copy. Without `pop`, `BasicLinear` would report the key as unexpected.
            state_dict[torch_key] = _sharded_as(parameter, state_dict.pop(indexed_key))
            moved[torch_key] = indexed_key
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # Report keys as the state dict had them, and missing ones as `_save_to_state_dict` writes them.
        unexpected_keys[:] = [moved.get(key, key) for key in unexpected_keys]
        if _FSDP_PREFIX not in prefix:
            missing_keys[:] = [keys.get(key, key) for key in missing_keys]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _sharded_as(parameter: Any, value: Any) -> Any:
    """Shard a full value like a DTensor parameter, without communication.

    `torch.distributed.checkpoint.state_dict` shards a value only if its key is the parameter's name, so not one that
    contains "basic_ops". A value that is a DTensor already, or whose parameter is a plain tensor, is returned
    unchanged.
    """
    if (
        not is_distributed(parameter)
        or is_distributed(value)
        or not isinstance(value, torch.Tensor)
    ):
        return value
    # The module is imported already, because the parameter is a DTensor.
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh
    return distribute_tensor(
        value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None
    )
