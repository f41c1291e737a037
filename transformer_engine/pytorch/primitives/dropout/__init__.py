"""y = keep ? x / (1 - p) : 0 with a one-bit mask per element, its gradient, and the backend table.

The mask is a function of the seed and the element's index, equal on every device and backend. The seed is one draw
from a torch generator: restoring the generator's state reproduces the mask.
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
    """Draw int64 [1] on the device, from the generator or from the device's default one."""
    # Not Tensor.random_, which torch.compile cannot trace.
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

    A bit is 1 if the element is kept.

    Args:
        seed: int64 [1] on x's device; None: draw_seed(generator).
        out: Buffer that receives y.
    """
    return _forward(x, bias=None, residual=None, p=p, seed=seed, generator=generator, out=out)


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
        raise ValueError(
            f"bias is {list(bias.shape)}, it needs one number per feature: {list(x.shape[-1:])}"
        )


def dropout_backward(dy: Tensor, mask: Tensor, p: float, *, out: Tensor | None = None) -> Tensor:
    """dx = keep ? dy / (1 - p) : 0, like dy and contiguous; mask as dropout_forward returned it. out receives dx."""
    _check_probability(p)
    if mask.dtype is not torch.uint8 or mask.numel() != -(-dy.numel() // 8):
        raise ValueError(
            f"mask is {mask.dtype} of {mask.numel()}; give one bit per element, uint8 of {-(-dy.numel() // 8)}"
        )
    dx = TABLE.bound(("backward", dy.shape, dy.dtype, dy.device, p))(dy, mask)
    return dx if out is None else out.copy_(dx)


def _forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    seed: Tensor | None,
    generator: torch.Generator | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    _check_probability(p)
    if seed is None:
        seed = draw_seed(x.device, generator)
    y, mask = TABLE.bound(("forward", x.shape, x.dtype, x.device, p))(x, bias, residual, seed)
    return y if out is None else out.copy_(y), mask


def _check_probability(p: float) -> None:
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p={p} is outside 0 .. 1; give the share of elements to drop")


_OPERATORS = {
    "forward": operator(
        "dropout_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor seed, float p) -> (Tensor, Tensor)",
        lambda x, bias, residual, seed, p: _forward(
            x, bias, residual, p, seed, generator=None, out=None
        ),
        empty_dropout,
    ),
    "bias_add": operator(
        "bias_add(Tensor x, Tensor bias, Tensor residual) -> Tensor",
        bias_add,
        lambda x, bias, residual: x.new_empty(x.shape),
    ),
    "backward": operator(
        "dropout_backward(Tensor dy, Tensor mask, float p) -> Tensor",
        dropout_backward,
        lambda dy, mask, p: dy.new_empty(dy.shape),
    ),
}


TABLE: Table[DropoutRequest] = Table(
    "dropout",
    (triton.BACKEND, reference.BACKEND),
    describe=DropoutRequest,
    operator=lambda request: _OPERATORS[request.operation].given(
        **({} if request.operation == "bias_add" else {"p": request.p})
    ),
)
