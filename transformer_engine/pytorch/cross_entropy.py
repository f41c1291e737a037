"""parallel_cross_entropy(logits, target), with a vocabulary that may be sharded, and fused_linear_cross_entropy."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from ..common.checks import described, suggests_keywords
from ..common.numbers import to_bool, to_float, to_int
from ..common.operation_settings import Labels
from .constants import dist_group_type
from .distributed.collectives import rank, world_size
from .functions.cross_entropy import CrossEntropy, cross_entropy
from .functions.linear_cross_entropy import linear_cross_entropy
from .runtime.checks import floating, group_or_none, same_device, tensor
from .runtime.device_checks import demand
from .runtime.warn_once import warn_once

__all__ = ["fused_linear_cross_entropy", "parallel_cross_entropy"]

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NO_FEATURES = 16  # zeros in place of features, as many as a product needs


@suggests_keywords
def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist_group_type | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
    keep_logits: bool | None = None,
) -> Tensor:
    """Compute loss float32 [B, S] = -ln(softmax(inp [B, S, V])[target [B, S]]), differentiable in inp.

    With overwrite_input=True the backward pass writes the gradient into the memory of the logits, which saves
    a tensor of their size. It can run once. If another operation saved the logits for its own backward pass,
    autograd raises RuntimeError ("modified by an inplace operation"). The gradient is allocated all the same
    if the logits are a chunk of a larger tensor, and under torch.compile.

    Args:
        inp: Logits [B, S, V], or [B, S, V / ranks] with a process group.
        target: Ids [B, S] in the whole vocabulary.
        label_smoothing: Smoothing s. The target gets probability 1 - s, and s / V is added everywhere.
        reduce_loss: Return the mean over the rows that are not ignored (0 if all are).
        dist_process_group: Its ranks hold equal vocabulary shares, in order. All ranks return the same loss.
        ignore_idx: Rows with this target have loss 0 and gradient 0.
        is_cg_capturable: Deprecated, without effect: the host never waits for the device.
        overwrite_input: Write the gradient into the memory of the logits, which must be contiguous.
        keep_logits: Deprecated: keep_logits=False is overwrite_input=True.

    Raises:
        ValueError: A target is outside the vocabulary. On a GPU this check follows `TE_CHECK`; without it the
            loss is infinite. Also for logits that overwrite_input=True finds not contiguous.
    """
    if _input is not None:
        warnings.warn(
            "the keyword _input is deprecated; give the logits as inp", FutureWarning, stacklevel=2
        )
        inp = _input
    floating("inp", inp)
    if inp.dtype == torch.float64:
        inp = inp.float()  # the loss is computed in float32, as NVIDIA's
    _check_logits(inp)
    reduce_loss = to_bool("reduce_loss", reduce_loss)
    overwrite_input = to_bool("overwrite_input", overwrite_input)
    if to_bool("is_cg_capturable", is_cg_capturable):
        warnings.warn(
            "is_cg_capturable is deprecated: the loss can always be captured; leave it out",
            FutureWarning,
            stacklevel=2,
        )
    if keep_logits is not None:
        warnings.warn(
            "keep_logits is deprecated: the logits are kept by default; give overwrite_input=True to overwrite them",
            FutureWarning,
            stacklevel=2,
        )
        overwrite_input = not to_bool("keep_logits", keep_logits)
    group_or_none("dist_process_group", dist_process_group)
    if inp.dim() != 3:
        raise ValueError(f"inp is {list(inp.shape)}; give logits [batch, sequence, vocabulary]")
    if overwrite_input and not inp.is_contiguous():
        raise ValueError(
            f"inp has strides {inp.stride()}, and overwrite_input=True needs contiguous logits; call contiguous() or "
            "leave overwrite_input False"
        )
    size = 1 if dist_process_group is None else world_size(dist_process_group)
    first = 0 if size == 1 else rank(dist_process_group) * inp.shape[-1]
    target = _flatten_targets(target, inp.shape[:-1])
    labels = _labels(target, inp.shape, label_smoothing, ignore_idx, first, size * inp.shape[-1])
    same_device("target", target, "inp", inp.device)
    rows = inp.contiguous().view(-1, inp.shape[-1])
    if rows.numel() == 0:
        return _empty_loss(inp, reduce_loss)
    group = None if size == 1 else dist_process_group
    how = CrossEntropy(labels, group, reduce_loss, overwrite_input)
    loss = cross_entropy(rows, _ids(target), how)
    return loss if reduce_loss else loss.view(inp.shape[:-1])


@suggests_keywords
def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    reduce_loss: bool = True,
    ignore_idx: int = -100,
    precise: bool = False,
) -> Tensor:
    """Compute the mean -ln(softmax(hidden @ weight.T + bias)[target]) in float32 without storing the logits.

    Peak memory is a 21st of the logits in addition to the gradients. With reduce_loss the forward pass also
    computes the gradients, and the backward pass multiplies them in place by the loss gradient. Otherwise the
    backward pass computes the logits again. Differentiable in hidden, weight and bias.

    Args:
        hidden: Features [.., K].
        weight: Head weight [V, K].
        target: Ids [..].
        bias: Head bias [V].
        reduce_loss: Return the mean instead of losses float32 [..].
        precise: Sum the weight gradient in few products. By default each 21st of the rows beyond the first K is a
            product that is rounded to the dtype of the weight. In bfloat16 ([2048, 1024], 8192 ids, logits with
            deviation 1), the default has 2.5 times the error of separate steps, and `precise` 1.8 times.

    The other arguments are as in `parallel_cross_entropy`.
    """
    tensors = {"hidden": hidden, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, value in tensors.items():
        floating(name, value)
        same_device(name, value, "hidden", hidden.device)
        if value.dtype != hidden.dtype:
            raise TypeError(
                f"{name} is {value.dtype}, hidden {hidden.dtype}; convert one with .to(), which is differentiable"
            )
    _check_logits(hidden, "hidden")
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}; give [.., features] and "
            "[vocabulary, features]"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias is {list(bias.shape)}; give [{weight.shape[0]}], one number an id")
    reduce_loss, precise = to_bool("reduce_loss", reduce_loss), to_bool("precise", precise)
    shape = (*hidden.shape[:-1], weight.shape[0])
    labels = _labels(target, shape, label_smoothing, ignore_idx, 0, weight.shape[0])
    same_device("target", target, "hidden", hidden.device)
    if math.prod(shape) == 0:
        return _empty_loss(hidden, reduce_loss, weight, bias)
    if hidden.shape[-1] == 0:  # the logits are the bias alone, as for features that are 0
        hidden, weight = (
            torch.nn.functional.pad(part, (0, _NO_FEATURES)) for part in (hidden, weight)
        )
    rows = hidden.contiguous().view(-1, hidden.shape[-1])
    loss = linear_cross_entropy(
        rows, weight.contiguous(), bias, _ids(target), labels, reduce_loss, precise
    )
    return loss if reduce_loss else loss.view(shape[:-1])


def _check_logits(value: Any, name: str = "inp") -> None:
    floating(name, value)
    if value.dtype not in _LOGITS:
        raise TypeError(f"{name} is {value.dtype}; give bfloat16, float16 or float32")


def _labels(
    target: Any, shape: tuple[int, ...], smoothing: float, ignored: int, first: int, total: int
) -> Labels:
    """Return the labels for logits with a shape; raise an error unless the targets fit them."""
    smoothing, ignored = to_float("label_smoothing", smoothing), to_int("ignore_idx", ignored)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(
            f"label_smoothing={smoothing} is not a share of the probability; give 0 .. 1"
        )
    if total == 0:
        raise ValueError(
            f"the logits are {list(shape)}, of a vocabulary of 0 ids; give at least one id"
        )
    tensor("target", target)
    if target.dtype not in _INTEGERS:
        raise TypeError(
            f"target is {target.dtype}; give ids of the vocabulary, for example target.long()"
        )
    rows = tuple(shape[:-1])
    if tuple(target.shape) not in (rows, (*rows, 1), (math.prod(rows),)):
        raise ValueError(
            f"target is {list(target.shape)}; give one id a row, {list(rows)}, or all in a line"
        )
    demand(_check_ids, (target,), total, ignored)
    return Labels(ignored, smoothing, first, total)


def _flatten_targets(target: Any, rows: torch.Size) -> Any:
    """Return targets with one id per row, in any shape, as targets of the rows in row-major order."""
    if not isinstance(target, Tensor) or target.numel() != math.prod(rows):
        return target  # _labels raises
    if [size for size in target.shape if size != 1] not in (
        [n for n in rows if n != 1],
        [math.prod(rows)],
    ):
        warn_once(
            "targets of parallel_cross_entropy in another shape",
            f"target is {list(target.shape)}, its ids are read in row-major order for the rows {list(rows)} of the "
            "logits; give it in their shape, for example target.t() if its axes are exchanged",
        )
    return target.reshape(rows)


def _check_ids(ids: Any, total: int, ignored: int) -> None:
    """Raise ValueError for an id outside the vocabulary."""
    waiting = [ids]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif part != ignored and not 0 <= part < total:
            raise ValueError(
                f"target {described(part)} is outside of a vocabulary of {total} ids; give 0 .. {total - 1}, or "
                f"ignore_idx={ignored} for a row that does not count"
            )


def _ids(target: Tensor) -> Tensor:
    return target.detach().to(torch.int64).reshape(-1).contiguous()


def _empty_loss(inp: Tensor, mean: bool, *others: Tensor | None) -> Tensor:
    """Return the loss for no rows, in the graph of inp and others, whose gradients are 0."""
    nothing = inp.to(torch.float32).sum(-1) * 0.0
    for other in others:
        if other is not None:
            nothing = nothing + other.reshape(-1)[:0].to(torch.float32).sum()
    return nothing.sum() if mean else nothing
