"""Muon: p -= lr * orthogonal factor of the momentum, for matrices in hidden layers, stacked by shape.

For a gradient g [M, N] the step is

    m = lerp(m, g, 1 - momentum)
    u = lerp(g, m, momentum) with Nesterov momentum, else m
    o = Newton-Schulz iterations of u / max(||u||, eps)
    p = (1 - lr * weight_decay) p - adjusted(lr) o

with the numbers of torch.optim.Muon (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982).
Equally shaped matrices are iterated in batched products. A matrix that is sharded over devices is
gathered, since the orthogonal factor depends on the full matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...common.checks import check_option, described, suggests_keywords, whole
from ...common.numbers import to_bool, with_article
from ..constants import dist_group_type
from ..distributed.collectives import gather_along_first_dim, rank, world_size
from ..runtime.autograd import disable_autocast
from ..runtime.checks import is_distributed
from ..tensor.quantized_tensor import QuantizedTensor
from .checks import GroupChecks, one_number, reject_unsupported
from .multi_tensor_apply import like, local_part
from .newton_schulz import CoeffT
from .orthogonal_updates import iteration_coefficients, orthogonalize, part_matrices
from .states import CopiedWhole

__all__ = ["FusedMuon"]

NUMBERS = (
    "lr",
    "momentum",
    "weight_decay",
    "nesterov",
    "eps",
    "ns_steps",
    "ns_coefficients",
    "split",
)
SIMPLE: CoeffT = (3.4445, -4.7750, 2.0315)
MASTER, MOMENTUM = "master_param", "momentum_buffer"
_PLAIN = (torch.float32, torch.float16, torch.bfloat16)
_ADJUSTMENTS = ("original", "match_rms_adamw")


class _Update(NamedTuple):
    """The update of one parameter.

    Attributes:
        param: The parameter.
        target: The tensor that is stepped: its local shard, or its local master.
        matrices: The momentum as matrices [n, rows, columns], in its own memory; the orthogonal factors replace it.
        whole: The same memory in the shape of the whole parameter.
    """

    param: Tensor
    target: Tensor
    matrices: list[Tensor]
    whole: Tensor


class FusedMuon(CopiedWhole):
    """Muon over matrices in hidden layers: float32, 16-bit and quantized, sharded or not, and stacked experts.

    Parameters are matrices [out, in], or matrix stacks [experts, out, in], where each matrix is
    orthogonalized. Optimize embeddings, heads, norms and biases with another optimizer, such as `FusedAdam`.

    FSDP2 parameters (DTensor) are gathered over their mesh, and parameters with the attributes `tensor_model_parallel`
    and `partition_dim` over `tp_group`; every rank computes the orthogonal factor of the whole matrix.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Weight of the earlier momentum, in [0, 1).
        nesterov: Use Nesterov momentum.
        ns_coefficients: (a, b, c) for every Newton-Schulz iteration, or a sequence of such triples,
            whose last one is repeated (`get_coefficients`).
        eps: Least norm that a momentum is divided by.
        ns_steps: Iteration count.
        adjust_lr_fn: "original" (default) multiplies lr by sqrt(max(1, out / in)), "match_rms_adamw" by
            0.2 sqrt(max(out, in)).
        split: Rows of the matrices in a fused weight, each with its own orthogonal factor: (ffn, ffn) for
            gate and up, (heads / groups * d, d, d) for queries, keys and values in groups. The pattern
            repeats along the rows. With tensor parallelism these are the rows on one rank.
        master_weights: Update float32 masters of 16-bit and quantized parameters; the parameters copy them.
        ns_dtype: Iteration dtype. torch.bfloat16 and torch.float32 compute general products, as torch.optim.Muon does;
            torch.float16 computes products of symmetric matrices, of which half is multiplied, with smaller errors
            than bfloat16. None: float16 where a kernel computes these products, otherwise bfloat16.
        tp_group: Tensor-parallel process group.

    Raises:
        ValueError: A parameter is not a matrix or a matrix stack, or a setting is out of its range.
        TypeError: A setting has another type.
    """

    SETTINGS = ("master_weights", "ns_dtype", "tp_group")

    @suggests_keywords
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[Any] = SIMPLE,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split: Sequence[int] | None = None,
        master_weights: bool = False,
        ns_dtype: torch.dtype | None = None,
        tp_group: dist_group_type | None = None,
    ) -> None:
        if ns_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(
                f"ns_dtype={described(ns_dtype)}; give torch.float16, torch.bfloat16, torch.float32 or None"
            )
        self.master_weights = to_bool("master_weights", master_weights)
        self.ns_dtype, self.tp_group = ns_dtype, tp_group
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": to_bool("nesterov", nesterov),
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "split": split,
        }
        check_numbers(defaults)
        self._checked = GroupChecks(NUMBERS, check_numbers)
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes of a copy or pickle."""
        super().__setstate__(state)
        self._checked = GroupChecks(NUMBERS, check_numbers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking its settings and shapes; see torch.optim.Optimizer."""
        if isinstance(param_group, dict):
            group = {**self.defaults, **param_group}
            check_numbers(group)
            params = param_group.get("params")
            named = [params] if isinstance(params, Tensor) else list(params or ())
            param_group = {**param_group, "params": named}
            for entry in named:
                parameter = entry[1] if isinstance(entry, tuple) else entry
                if isinstance(parameter, Tensor):
                    _check_shape(parameter, group["split"])
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` result, or a torch.optim.Muon state dict; states keep their saved dtype."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for index, parameter in zip(saved, parameters, strict=True):
            for name in (MOMENTUM, MASTER):
                value = state_dict["state"].get(index, {}).get(name)
                if isinstance(value, Tensor):  # torch would convert it to the parameter's dtype
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every parameter that has a gradient, and return closure()'s result.

        Raises:
            RuntimeError: A gradient is sparse, or a parameter has an unsupported dtype, before any change.
            ValueError: The settings of a group are out of range, before any change.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._checked.check(self.param_groups)
        stepped = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        for group, params in stepped:
            for parameter in params:
                self._check(parameter, group["split"])
        for group, params in stepped:
            if params:
                self._step_group(group, params)
        return loss

    def _check(self, parameter: Tensor, split: Sequence[int] | None) -> None:
        grad, local = parameter.grad, local_part(parameter)
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("FusedMuon takes no sparse gradients; use torch.optim.SparseAdam")
        if isinstance(local, QuantizedTensor):
            if not self.master_weights:
                raise RuntimeError(
                    f"{with_article(type(local))} cannot be stepped without masters; use "
                    "FusedMuon(master_weights=True)"
                )
        elif local.dtype not in _PLAIN:
            raise RuntimeError(
                f"a parameter is {local.dtype}; give float32, float16 or bfloat16 ones"
            )
        if local_part(grad).shape != local.shape:
            raise ValueError(
                f"a parameter is {list(local.shape)}, its gradient {list(local_part(grad).shape)}; give both one shape"
            )
        _check_shape(parameter, split)

    @disable_autocast
    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Step the parameters of a group that have gradients."""
        lr, decay, momentum = (float(group[name]) for name in ("lr", "weight_decay", "momentum"))
        grads = [local_part(parameter.grad) for parameter in params if parameter.grad is not None]
        momenta = [self._momentum(*pair) for pair in zip(params, grads, strict=True)]
        torch._foreach_lerp_(momenta, grads, 1.0 - momentum)
        if group["nesterov"]:
            directions = list(torch._foreach_lerp(grads, momenta, momentum))
        else:
            directions = [buffer.clone() for buffer in momenta]
        prepared = [
            self._update(parameter, direction, group["split"])
            for parameter, direction in zip(params, directions, strict=True)
        ]
        del directions
        coefficients = iteration_coefficients(group["ns_coefficients"], int(group["ns_steps"]))
        orthogonalize(
            [part for update in prepared for part in update.matrices],
            coefficients,
            float(group["eps"]),
            self.ns_dtype,
        )
        _scale([update.target for update in prepared], 1.0 - lr * decay)
        of_rate: dict[float, list[_Update]] = {}
        for update in prepared:
            factors = [_adjustment(group["adjust_lr_fn"], part) for part in update.matrices]
            if len(set(factors)) > 1:
                for part, factor in zip(update.matrices, factors, strict=True):
                    part.mul_(factor)
                factors = [1.0]
            of_rate.setdefault(lr * factors[0], []).append(update)
        for rate, updates in of_rate.items():
            steps = [self._local(update).to(update.target.dtype) for update in updates]
            torch._foreach_add_([update.target for update in updates], steps, alpha=-rate)
        for update in prepared:
            local = local_part(update.param)
            if isinstance(local, QuantizedTensor):
                local.quantize_(update.target)
            elif local.data_ptr() != update.target.data_ptr():
                local.copy_(update.target)

    def _momentum(self, parameter: Tensor, grad: Tensor) -> Tensor:
        """The local momentum, zeros before the first step."""
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = like(
                parameter, torch.zeros_like(grad, memory_format=torch.contiguous_format)
            )
        return local_part(state[MOMENTUM])

    def _target(self, parameter: Tensor) -> Tensor:
        """The local tensor that is stepped: the parameter, or its float32 master."""
        local, state = local_part(parameter).detach(), self.state[parameter]
        if not self.master_weights or (type(local) is Tensor and local.dtype == torch.float32):
            return local
        if MASTER not in state:
            quantized = isinstance(local, QuantizedTensor)
            values = local.dequantize(dtype=torch.float32) if quantized else local.to(torch.float32)
            state[MASTER] = like(parameter, values)
        return local_part(state[MASTER])

    def _update(self, parameter: Tensor, update: Tensor, split: Sequence[int] | None) -> _Update:
        """Gather a momentum, and divide it into matrices."""
        full = update
        if is_distributed(parameter):
            full = like(parameter, update).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
        elif self._is_sharded(parameter):
            full = _gathered(update, int(parameter.partition_dim), self.tp_group)  # pyright: ignore[reportAttributeAccessIssue]
        full = full.contiguous()
        return _Update(parameter, self._target(parameter), part_matrices(full, split), full)

    def _local(self, update: _Update) -> Tensor:
        """This rank's part of an update."""
        parameter, full = update.param, update.whole
        if is_distributed(parameter):
            from torch.distributed.tensor import DTensor, Replicate

            placed: Any = parameter
            replicated = [Replicate()] * placed.device_mesh.ndim
            everywhere = DTensor.from_local(full, placed.device_mesh, replicated, run_check=False)
            return everywhere.redistribute(placements=placed.placements).to_local()
        if self._is_sharded(parameter):
            group: Any = self.tp_group
            return full.chunk(world_size(group), int(parameter.partition_dim))[rank(group)]  # pyright: ignore[reportAttributeAccessIssue]
        return full

    def _is_sharded(self, parameter: Tensor) -> bool:
        sharded = getattr(parameter, "tensor_model_parallel", False) and self.tp_group is not None
        return sharded and world_size(self.tp_group) > 1


def _scale(tensors: list[Tensor], factor: float) -> None:
    """Multiply tensors by a number, in place."""
    if all(tensor.is_cuda for tensor in tensors):
        torch._foreach_mul_(tensors, factor)
        return
    # on a CPU, torch 2.13 rounds the factor of a list to the dtype of its tensors
    for tensor in tensors:
        tensor.mul_(factor)


def _adjustment(name: str | None, part: Tensor) -> float:
    """Learning rate factor for matrices [n, rows, columns], or [n, repeats, rows, columns]."""
    rows, columns = math.prod(part.shape[1:-1]), part.shape[-1]
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(1, columns)))


def _gathered(shard: Tensor, dimension: int, group: dist_group_type | None) -> Tensor:
    """The whole matrix from equal shards along a dimension."""
    first = shard.movedim(dimension, 0).contiguous()
    return gather_along_first_dim(first, group)[0].movedim(0, dimension)


def _check_shape(parameter: Tensor, split: Sequence[int] | None) -> None:
    if parameter.dim() not in (2, 3):
        raise ValueError(
            f"a parameter is {list(parameter.shape)}; FusedMuon steps matrices [out, in] and stacks of them, use "
            "FusedAdam for the others"
        )
    if split is not None and parameter.shape[-2] % sum(split):
        raise ValueError(
            f"split={tuple(split)} has {sum(split)} rows, which do not divide the {parameter.shape[-2]} rows of a "
            f"parameter {list(parameter.shape)}"
        )


def check_numbers(group: dict[str, Any]) -> None:
    """Raise TypeError or ValueError for settings that no step can be computed with."""
    for name in ("lr", "weight_decay", "momentum", "eps"):
        found = one_number(name, group.get(name))
        if found is not None and (found < 0.0 or (name == "momentum" and found >= 1.0)):
            limit = "[0, 1)" if name == "momentum" else "at least 0"
            raise ValueError(f"{name}={found} is out of range; give a number of {limit}")
    steps = group.get("ns_steps")
    whole("ns_steps", steps)
    if group.get("adjust_lr_fn") is not None:
        check_option("adjust_lr_fn", group["adjust_lr_fn"], _ADJUSTMENTS)
    to_bool("nesterov", group.get("nesterov"))
    coefficients = group.get("ns_coefficients")
    triples = (
        [coefficients]
        if isinstance(coefficients, Sequence)
        and coefficients
        and isinstance(coefficients[0], (int, float))
        else coefficients
    )
    if not isinstance(triples, Sequence) or not triples or any(len(one) != 3 for one in triples):
        raise ValueError(
            f"ns_coefficients={described(coefficients)}; give three numbers (a, b, c), or a sequence of such triples"
        )
    split = group.get("split")
    if split is not None:
        if not isinstance(split, Sequence) or not split:
            raise ValueError(f"split={described(split)}; give the numbers of rows of each part")
        for rows in split:
            whole("split", rows)
    reject_unsupported(group, "FusedMuon", "torch.optim.Muon")
