"""Linear: a matrix product, a bias and tensor-parallel communication as one fused operation.

| tensor_parallel_mode | operations |
| --- | --- |
| None, "column" | `BasicLinear`, `Bias` |
| "row" | `BasicLinear`, `Bias`, `AllReduce`; with sequence parallelism `ReduceScatter` in place of `AllReduce` |

This file contains parameters and state dicts only; the operations compute y and the gradients. The `passes`
method of an operation returns an `OperationPasses`, which holds a forward and a backward function. For the
product, `BasicLinear.passes` (`basic/basic_linear.py`) creates a `LinearPasses` (`passes/linear.py`), which
calls `functions/linear.py`. The pair (linear, bias) in `passes/patterns.py` adds the bias in the epilogue of
the product.

`Linear` owns the parameters that these operations read (`lent_parameters.py`), so that torch's tools find
`weight` and `bias` as in torch.nn.Linear. State dicts use the keys of NVIDIA's Transformer Engine, which
contain the index of the operation ("basic_ops.0.weight"). The keys of torch.nn.Linear ("weight", "bias") can
be loaded too.
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
from .pass_operation import PassFusedOperation

# {parameter name: (index of the operation that reads it, key in state dicts)}
_SAVED_KEYS = {"weight": (0, "basic_ops.0.weight"), "bias": (1, "basic_ops.1.bias")}
# FullyShardedDataParallel (FSDP1) inserts this text into the state-dict prefixes of the modules that it
# wraps.
_FSDP_PREFIX = "_fsdp_wrapped_module."


class Linear(PassFusedOperation):
    """y = x @ weight.T + bias over the last dimension of x.

    State dicts have the keys "basic_ops.0.weight" and "basic_ops.1.bias"; "weight" and "bias" can be loaded
    too. Within torch.distributed.fsdp.FullyShardedDataParallel, which looks parameters up by their names, the
    keys are "weight" and "bias".

    In a row-parallel layer each rank has a bias [out_features] and adds it before the reduction, so
    y contains the sum over all ranks' biases. `te.Linear` adds one bias, after the reduction.

    Args:
        in_features: Size of the last input dimension, over all ranks.
        out_features: Size of the last output dimension, over all ranks.
        bias: Add a bias.
        device: Parameter device, by default the GPU if there is one. With "meta" the first forward pass
            allocates the parameters.
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
        parallel = create_tensor_parallel(
            tensor_parallel_mode,
            tensor_parallel_group,
            to_bool("sequence_parallel", sequence_parallel),
            in_features,
            out_features,
        )
        has_bias = to_bool("bias", bias)
        is_row_parallel = parallel.mode == "row"
        # A row-parallel BasicLinear would reduce its result itself, before the bias is added. Here it is an
        # unsharded layer over this rank's input features, and a separate operation reduces after the bias.
        linear = BasicLinear(
            in_features // parallel.size if is_row_parallel else in_features,
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
                out_features * (parallel.size if is_row_parallel else 1),
                device=device,
                dtype=linear.weight.dtype,
                tensor_parallel=parallel.mode is not None,
                tensor_parallel_group=tensor_parallel_group,
            )
            ops.append(bias_op)
        if is_row_parallel:
            reduction = ReduceScatter if parallel.sequence else AllReduce
            ops.append(reduction(parallel.group))
        super().__init__(ops)
        # Do not rename: existing pickled modules contain this attribute.
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
        """Set an attribute.

        Raises:
            ValueError: The layer was constructed without a bias, and the value is a bias. No operation would
                add it.
        """
        if name == "bias" and not self.__dict__.get("_has_bias", True):
            if value is None:
                return
            raise ValueError("this Linear has no bias; construct it with bias=True")
        super().__setattr__(name, value)

    def _saved_keys(self, prefix: str) -> dict[str, str]:
        """Keys {prefix + "weight": prefix + "basic_ops.0.weight", ..} of parameters that `Linear` owns."""
        operations = list(self.basic_ops)
        return {
            prefix + name: prefix + key
            for name, (index, key) in _SAVED_KEYS.items()
            # A user may have replaced the operation by another one, which owns its parameters and saves them
            # itself.
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
            # Two entries are an error, unless the one under `name` is the parameter itself:
            # torch.distributed.checkpoint.state_dict adds this entry.
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
    """Shard a full value like a DTensor parameter, without communication.

    torch shards a value only if its key is the parameter's name. A value that is a DTensor already, or whose
    parameter is a plain tensor, is returned unchanged.
    """
    if not is_distributed(parameter) or is_distributed(value) or not isinstance(value, torch.Tensor):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh
    return distribute_tensor(value.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)
