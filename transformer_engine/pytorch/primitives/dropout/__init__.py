"""y = keep ? x / (1 - p) : 0 with a mask of one bit an element, its gradient, and the table of backends.

The mask is a function of a seed and of an element's place alone, the same on every device and backend. The seed is
one draw from a torch generator: whoever restores the generator's state gets the same mask again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.dispatch import Operator, Table
from ...runtime.launching import operator
from . import reference, triton
from .reference import DropoutRequest, empty_dropout

__all__ = [
    "TABLE",
    "DropoutRequest",
    "bias_add",
    "bias_dropout_add_forward",
    "draw_seed",
    "dropout_backward",
    "dropout_forward",
]


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """int64 [1] on the device, drawn from the generator, or from the device's default one."""
    # Not Tensor.random_, which a compiler does not trace.
    return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=device, generator=generator)


def dropout_forward(
    x: Tensor,
    p: float,
    *,
    seed: Tensor | None = None,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, mask): y like x and contiguous; mask uint8 [ceil(numel / 8)], element i in bit i % 8 of byte i // 8.

    A bit is 1 where the element was kept. seed: int64 [1] on x's device, None: draw_seed(generator). out receives y.
    """
    return _forward(x, None, None, p, seed, generator, out)


def bias_dropout_add_forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    *,
    seed: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, mask): y [.., H] = residual + dropout(x + bias [H]), rounded to x's dtype after each step."""
    _check_terms(x, bias, residual)
    return _forward(x, bias, residual, p, seed, generator, None)


def bias_add(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """y [.., H] = residual + (x + bias [H]), rounded to x's dtype after each step: nothing dropped, no mask."""
    _check_terms(x, bias, residual)
    return TABLE.bound(("bias_add", x.shape, x.dtype, x.device))(x, bias, residual)


def _check_terms(x: Tensor, bias: Tensor | None, residual: Tensor) -> None:
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual is {residual.dtype} {list(residual.shape)}, x {x.dtype} {list(x.shape)}; make them alike"
        )
    if bias is not None and tuple(bias.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"bias is {list(bias.shape)}, it needs one number a feature: {list(x.shape[-1:])}")


def dropout_backward(dy: Tensor, mask: Tensor, p: float, *, out: Tensor | None = None) -> Tensor:
    """dx = keep ? dy / (1 - p) : 0, like dy and contiguous; mask as dropout_forward returned it. out receives dx."""
    _check(p)
    if mask.dtype is not torch.uint8 or mask.numel() != -(-dy.numel() // 8):
        raise ValueError(
            f"mask is {mask.dtype} of {mask.numel()}; give one bit an element, uint8 of {-(-dy.numel() // 8)}"
        )
    return _into(out, TABLE.bound(("backward", dy.shape, dy.dtype, dy.device, p))(dy, mask))


def _forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    seed: Tensor | None,
    generator: torch.Generator | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check(p)
    if seed is None:
        seed = draw_seed(x.device, generator)
    y, mask = TABLE.bound(("forward", x.shape, x.dtype, x.device, p))(x, bias, residual, seed)
    return _into(out, y), mask


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _check(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p={p} is outside 0 .. 1; give the share of elements to drop")


def _dropped(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    return _forward(x, bias, residual, p, seed, None, None)


def _empty_sum(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _empty_gradient(dy: Tensor, mask: Tensor, p: float) -> Tensor:
    return dy.new_empty(dy.shape)


_OPERATORS = {
    "forward": operator(
        "dropout_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor seed, float p) -> (Tensor, Tensor)",
        _dropped,
        empty_dropout,
    ),
    "bias_add": operator("bias_add(Tensor x, Tensor bias, Tensor residual) -> Tensor", bias_add, _empty_sum),
    "backward": operator(
        "dropout_backward(Tensor dy, Tensor mask, float p) -> Tensor", dropout_backward, _empty_gradient
    ),
}


def _operator_of(request: DropoutRequest) -> Operator:
    one = _OPERATORS[request.operation]
    return one.given() if request.operation == "bias_add" else one.given(p=request.p)


TABLE: Table[DropoutRequest] = Table(
    "dropout", (triton.BACKEND, reference.BACKEND), describe=DropoutRequest, operator=_operator_of
)
