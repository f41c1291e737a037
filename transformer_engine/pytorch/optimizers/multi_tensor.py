"""multi_tensor_*(chunk_size, noop_flag, tensor_lists, ..): one operation on all tensors of lists, checked, in place.

tensor_lists holds parallel lists. The tensors in one list have one dtype. The i-th tensors in all lists have
equal element counts; all are contiguous and on the device of noop_flag, int32 [1]. chunk_size is accepted for
compatibility without effect, because the kernels determine how tensors are split. Empty lists need no work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.checks import check_option, described, number
from ...common.formats import FLOAT8
from ...common.numbers import to_float, to_int
from ...common.operation_settings import Adam, Sgd
from ..constants import DType
from ..primitives.multi_tensor import (
    adam_rates,
    adam_step,
    copy_to_device,
    scale_all,
    sgd_step,
    squares_of_all,
)
from ..primitives.multi_tensor.block_states import block_count
from ..primitives.quantize import QuantizeSpec, quantize, scale_from_amax
from ..primitives.quantize.encodings import e8m0_from_float
from ..runtime.checks import tensor
from ..tensor.elements import find_element

Lists = Sequence[Sequence[Tensor]]

_VALUES = (torch.float32, torch.float16, torch.bfloat16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT32 = (torch.float32,)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Compute outputs[i] = inputs[i] * scale for the lists [inputs, outputs], which may be the same tensors."""
    factor = to_float("scale", scale)
    if checked(noop_flag, tensor_lists, _VALUES, _VALUES):
        scale_all(tensor_lists, copy_to_device([factor], noop_flag.device), noop_flag)


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, tensor_lists: Lists, scale: Tensor
) -> None:
    """Compute `multi_tensor_scale` with a multiplier on the device: float32, one element."""
    tensor("is_infinite", is_infinite)
    factor = _factor("scale", scale, is_infinite)
    if checked(is_infinite, tensor_lists, _VALUES, _VALUES):
        scale_all(tensor_lists, factor, is_infinite)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_python: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors, float32 [1], and per tensor, float32 [n], for the lists [inputs].

    The second result is empty unless `per_tensor_python`. `multi_tensor_applier` omits tensors without elements, as the
    original does: n counts the other tensors, and without any the result is None.
    """
    return _norms(noop_flag, tensor_lists, None, per_tensor_python)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `multi_tensor_l2norm` of the inputs times inv_scale; the inputs are unchanged."""
    tensor("noop_flag", noop_flag)
    return _norms(noop_flag, tensor_lists, _factor("inv_scale", inv_scale, noop_flag), per_tensor)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Compute one step of Adam on the lists [gradients, parameters, exp_avg, exp_avg_sq(, masters)], in place.

    With masters the step updates these, and the parameters become copies of them. Masters of int16
    are remainders: a bfloat16 parameter is a float32 master rounded half up, and the bits of the
    master, read as an integer, equal the parameter's bits times 2^16, plus the remainder.
    """
    how = _adam_mode(mode)
    rates = _host_rates(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    if adam_checked(noop_flag, tensor_lists):
        adam_step(tensor_lists, copy_to_device(rates, noop_flag.device), how)


multi_tensor_adam_param_remainder = multi_tensor_adam


def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: DType | int,
) -> None:
    """Compute `multi_tensor_adam` on [gradients, codes, exp_avg, exp_avg_sq, masters, scale, amax, scale_inv].

    The codes (uint8) become the codes of masters times scale, amax grows to the largest master,
    scale_inv becomes 1 / scale.
    """
    how = _adam_mode(mode)
    rates = _host_rates(lr, beta1, beta2, epsilon, step, bias_correction, weight_decay)
    kinds = (_VALUES, (torch.uint8,), _FLOAT32, _FLOAT32, _FLOAT32)
    scales = [list(part) for part in tensor_lists[5:]] if _is_lists(tensor_lists, (8,)) else []
    if not checked(noop_flag, tensor_lists[:5], *kinds):
        return
    checked(noop_flag, scales, *[_FLOAT32] * 3)
    grads, codes, first, second, masters = tensor_lists[:5]
    if len(scales[0]) != len(codes) or any(scale.numel() != 1 for scale in scales[0]):
        raise ValueError(
            f"the scales have {[scale.numel() for scale in scales[0]]} elements for {len(codes)} tensors of codes; "
            "give one scale, one amax and one scale_inv of one element for each"
        )
    spec = QuantizeSpec(FLOAT8, find_element(DType(int(fp8_dtype))))
    adam_step([grads, masters, first, second], copy_to_device(rates, noop_flag.device), how)
    for target, master, scale, amax, inverse in zip(codes, masters, *scales, strict=True):
        if target.numel():
            quantized = quantize(
                master.view(1, -1), spec, multiplier=scale.view(1), record=amax.view(1)
            )
            assert quantized.codes is not None and quantized.scale is not None
            target.view(-1).copy_(quantized.codes.view(-1).view(torch.uint8))
            inverse.copy_(quantized.scale.view(inverse.shape))


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """Compute `multi_tensor_adam` with lr, step and inv_scale on the device, for CUDA graphs.

    Masters are float32 if given.
    """
    how = _adam_mode(mode)
    rates = device_rates(
        lr, (beta1, beta2), epsilon, step, bias_correction, weight_decay, inv_scale
    )
    if checked(noop_flag, tensor_lists, _VALUES, _VALUES, _MOMENTS, _MOMENTS, optional=_FLOAT32):
        adam_step(tensor_lists, rates, how, noop_flag)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Compute one step of SGD on the lists [gradients, parameters, momenta(, copies of the parameters)], in place."""
    wd, momentum, dampening, lr, scale = check_sgd_rates(wd, momentum, dampening, lr, scale)
    how = Sgd(momentum != 0.0, bool(nesterov), bool(first_run), bool(wd_after_momentum))
    if checked(noop_flag, tensor_lists, _VALUES, _VALUES, _VALUES, optional=_VALUES):
        numbers = (wd, momentum, 1.0 - dampening, lr, scale)
        sgd_step(tensor_lists, copy_to_device(numbers, noop_flag.device), how, noop_flag)


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    amax_epsilon: float,
) -> None:
    """Compute scale = max_fp8 / max(amax, amax_epsilon) and its inverse for [amaxes, scales, scale_invs], float32.

    The scales follow current scaling. The flag is not read.
    """
    max_fp8, amax_epsilon = to_float("max_fp8", max_fp8), to_float("amax_epsilon", amax_epsilon)
    number("max_fp8", max_fp8)
    number("amax_epsilon", amax_epsilon)
    if not checked(noop_flag, tensor_lists, _FLOAT32, _FLOAT32, _FLOAT32):
        return
    amaxes, scales, inverses = tensor_lists
    amax = torch.cat([amax.reshape(-1) for amax in amaxes])
    updated = scale_from_amax(
        amax, max_fp8, power_of_two=bool(force_pow_2_scales), epsilon=amax_epsilon
    )
    for targets, values in ((scales, updated), (inverses, updated.reciprocal())):
        _spread(targets, values)


def multi_tensor_compute_scale_inv_e8m0(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: Lists
) -> None:
    """Compute MXFP8's exponents for the lists [amaxes bfloat16, exponents uint8]: the power of two >= amax / 448.

    The flag must be None.
    """
    if noop_flag is not None:
        raise ValueError("noop_flag has no meaning for exponents; give None")
    if not _is_lists(tensor_lists, (2,)):
        raise ValueError(
            "tensor_lists holds amaxes and exponents; give [[amax, ..], [exponent, ..]]"
        )
    flag = (
        torch.zeros(1, dtype=torch.int32, device=tensor_lists[0][0].device)
        if tensor_lists[0]
        else None
    )
    if flag is not None and checked(flag, tensor_lists, (torch.bfloat16,), (torch.uint8,)):
        amax = torch.cat([amax.reshape(-1) for amax in tensor_lists[0]]).to(torch.float32)
        _spread(tensor_lists[1], e8m0_from_float(amax / 448.0))


def device_rates(
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    step: Tensor,
    bias_correction: int | bool,
    weight_decay: float,
    inv_scale: Tensor | None,
) -> Tensor:
    """Return the numbers for `adam_step`, computed on the device of lr from values on that device."""
    for name, value in (("lr", lr), ("step", step)):
        tensor(name, value)
    host = adam_rates(0.0, betas, eps, 1, False, weight_decay)
    rates = torch.empty(len(host), dtype=torch.float32, device=lr.device)
    for index in range(1, 7):
        # an assignment copies from the host; graphs cannot capture it
        rates[index].fill_(host[index])
    rates[0] = lr.reshape(())
    steps = step.reshape(()).to(torch.float64)
    for index, beta in ((7, betas[0]), (8, betas[1])):
        rates[index].copy_(1.0 - torch.pow(beta, steps)) if bias_correction else rates[index].fill_(
            1.0
        )
    rates[9].fill_(1.0) if inv_scale is None else rates[9].copy_(_factor("inv_scale", inv_scale)[0])
    rates[10].copy_(steps)
    rates[11].fill_(0.0)
    return rates


def check_sgd_rates(
    wd: float, momentum: float, dampening: float, lr: float, scale: float
) -> tuple[float, ...]:
    """Return the rates as floats; raise TypeError or ValueError unless all are finite numbers."""
    rates = {"wd": wd, "momentum": momentum, "dampening": dampening, "lr": lr, "scale": scale}
    found = {name: to_float(name, value) for name, value in rates.items()}
    for name, value in found.items():
        number(name, value)
    return tuple(found.values())


def sgd_checked(noop_flag: Any, tensor_lists: Any) -> bool:
    """Return `checked` of [gradients, parameters(, momenta)]: the checks of a step before momenta are created."""
    return checked(noop_flag, tensor_lists, _VALUES, _VALUES, optional=_VALUES)


def adam_checked(noop_flag: Any, tensor_lists: Any, block_scaled: bool = False) -> bool:
    """Return `checked` for the lists in an Adam step; only bfloat16 parameters have remainders."""
    last = (*_VALUES, torch.int16)
    moments = (torch.uint8,) if block_scaled else _MOMENTS
    lists = [*tensor_lists[:4], *tensor_lists[6:]] if block_scaled else tensor_lists
    has_work = checked(noop_flag, lists, _VALUES, _VALUES, moments, moments, optional=last)
    if has_work and block_scaled:
        _check_exponents(tensor_lists)
    if has_work and len(lists) == 5 and lists[4][0].dtype == torch.int16:
        parameters = lists[1][0].dtype
        if parameters != torch.bfloat16:
            raise TypeError(f"parameters beside remainders are {parameters}; give bfloat16 ones")
    return has_work


def _check_exponents(tensor_lists: Lists) -> None:
    """Raise ValueError unless lists 4 and 5 hold one exponent per block of the moments."""
    for place in (4, 5):
        for index, (exponents, codes) in enumerate(
            zip(tensor_lists[place], tensor_lists[2], strict=True)
        ):
            blocks = block_count(codes.numel())
            if exponents.dtype != torch.uint8 or exponents.numel() != blocks:
                raise ValueError(
                    f"tensor {index} of list {place} is {exponents.dtype} {list(exponents.shape)}; a moment of "
                    f"{codes.numel()} values has uint8 [{blocks}]"
                )


def checked(
    noop_flag: Any,
    tensor_lists: Any,
    *kinds: tuple[torch.dtype, ...],
    optional: tuple[torch.dtype, ...] | None = None,
) -> bool:
    """Check parallel lists; return whether there is work.

    Args:
        noop_flag: int32 [1].
        tensor_lists: The lists.
        kinds: Accepted dtypes of each list.
        optional: Accepted dtypes of one more list, which may be omitted.

    Raises:
        TypeError, ValueError: The lists are not parallel, have other dtypes, or are not on the flag's device.
    """
    tensor("noop_flag", noop_flag)
    if noop_flag.dtype != torch.int32 or noop_flag.numel() != 1:
        raise ValueError(
            f"noop_flag is {noop_flag.dtype} {list(noop_flag.shape)}; give an int32 tensor of one element"
        )
    counts = (len(kinds),) if optional is None else (len(kinds), len(kinds) + 1)
    if not _is_lists(tensor_lists, counts):
        raise ValueError(
            f"tensor_lists is {described(tensor_lists)}; give {' or '.join(map(str, counts))} lists of tensors"
        )
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(set(lengths)) > 1:
        raise ValueError(f"the lists have {lengths} tensors; give lists of one length")
    if not lengths[0]:
        return False
    allowed = kinds if optional is None else (*kinds, optional)
    for place, (tensors, dtypes) in enumerate(zip(tensor_lists, allowed, strict=False)):
        for index, part in enumerate(tensors):
            name = f"tensor {index} of list {place}"
            tensor(name, part)
            if part.dtype not in dtypes:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise TypeError(f"{name} is {part.dtype}; give {names}")
            if part.dtype != tensors[0].dtype:
                raise TypeError(
                    f"{name} is {part.dtype}, the first of its list {tensors[0].dtype}; make one call a dtype"
                )
            if part.device != noop_flag.device:
                raise ValueError(
                    f"{name} is on {part.device}, noop_flag on {noop_flag.device}; make one call a device"
                )
            if not part.is_contiguous():
                raise ValueError(f"{name} has strides {part.stride()}; give contiguous tensors")
    sizes = [part.numel() for part in tensor_lists[0]]
    for place, tensors in enumerate(tensor_lists):
        for index, (part, size) in enumerate(zip(tensors, sizes, strict=True)):
            if part.numel() != size:
                raise ValueError(
                    f"tensor {index} of list {place} has {part.numel()} elements, that of list 0 {size}; match them"
                )
    return True


def _is_lists(value: Any, counts: tuple[int, ...]) -> bool:
    is_list = (list, tuple)
    return (
        isinstance(value, is_list)
        and len(value) in counts
        and all(isinstance(x, is_list) for x in value)
    )


def _factor(name: str, value: Any, flag: Tensor | None = None) -> Tensor:
    """Return a float32 tensor of one element, on the device of the flag, as [1]; raise TypeError or ValueError."""
    tensor(name, value)
    if value.dtype != torch.float32 or value.numel() != 1:
        raise ValueError(
            f"{name} is {value.dtype} {list(value.shape)}; give a float32 tensor of one element"
        )
    if flag is not None and value.device != flag.device:
        raise ValueError(
            f"{name} is on {value.device}, the flag on {flag.device}; move one of them"
        )
    return value.reshape(1)


def _adam_mode(mode: int) -> Adam:
    check_option("mode", int(mode), (0, 1))
    return Adam(decoupled=int(mode) == 1)


def _host_rates(
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
) -> tuple[float, ...]:
    rates = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "epsilon": epsilon,
        "weight_decay": weight_decay,
    }
    found = {name: to_float(name, value) for name, value in rates.items()}
    for name, value in found.items():
        number(name, value)
    betas = (found["beta1"], found["beta2"])
    count, corrects = to_int("step", step, 1), bool(bias_correction)
    return adam_rates(found["lr"], betas, found["epsilon"], count, corrects, found["weight_decay"])


def _norms(
    noop_flag: Tensor, tensor_lists: Lists, factor: Tensor | None, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    if not checked(noop_flag, tensor_lists, _VALUES):
        nothing = torch.zeros(1, dtype=torch.float32, device=noop_flag.device)
        return nothing, nothing[:0]
    sums = squares_of_all(tensor_lists[0], factor)
    norm = sums.sum().sqrt().view(1)
    noop_flag.view(1).masked_fill_(~torch.isfinite(norm), 1)
    return norm, sums.sqrt() if per_tensor else sums[:0]


def _spread(targets: Sequence[Tensor], values: Tensor) -> None:
    """Write consecutive elements of a vector into the tensors."""
    parts = values.split([target.numel() for target in targets])
    shaped = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
    torch._foreach_copy_(list(targets), shaped)
