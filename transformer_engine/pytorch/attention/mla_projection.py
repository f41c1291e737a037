"""Up projection for latent attention's queries: norm, product, rotation and MXFP8 cast, one step after the other.

NVIDIA's kernel needs a compute capability 10 GPU. Clients test `FusedMLAQUpProjRopeQuant.is_supported()` and
take their separate steps if it is False, as it is here; `FusedMLAQUpProjFunction.apply` computes on any device.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..constants import DType, dist_group_type
from ..distributed.collectives import world_size
from ..distributed.tensor_parallel import TensorParallel
from ..functions.linear import linear
from ..functions.linear_spec import IDENTITY, Accumulation, LinearSpec
from ..functions.main_grad import find_main_grad
from ..functions.norm import normalize
from ..functions.normalization import Norm
from ..functions.weight_gradient import WeightGradient, WeightGradStore
from ..runtime.autograd import Function
from ..tensor import MXFP8Quantizer, MXFP8Tensor
from ..tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage

_BLOCK = 32  # values per scale


class FusedMLAQUpProjRopeQuant(nn.Module):
    """A module whose is_supported() callers of NVIDIA's engine test before they use it; it is supported nowhere."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise _without_kernel("FusedMLAQUpProjRopeQuant")

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        """Return False: no kernel fuses the steps."""
        return False

    @staticmethod
    def run(*_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError: no kernel fuses the steps."""
        raise _without_kernel("FusedMLAQUpProjRopeQuant.run")

    @staticmethod
    def backward_linear(*_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError: no kernel fuses the steps."""
        raise _without_kernel("FusedMLAQUpProjRopeQuant.backward_linear")

    @staticmethod
    def wrap_mxfp8(*_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError: no kernel fuses the steps."""
        raise _without_kernel("FusedMLAQUpProjRopeQuant.wrap_mxfp8")


def _without_kernel(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} has no kernel here, is_supported() is False; use Linear, apply_rotary_pos_emb and a quantizer, or "
        "FusedMLAQUpProjFunction.apply"
    )


class FusedMLAQUpProjFunction:
    """Queries of latent attention in MXFP8: the steps of `apply` run one by one, on any device."""

    @staticmethod
    def is_supported(*_: Any, **__: Any) -> bool:
        """Return False: no kernel fuses the steps."""
        return False

    @staticmethod
    def apply(
        x: Tensor,
        gamma: Tensor,
        w_q: Tensor,
        cos: Tensor,
        sin: Tensor,
        wgrad_store: WeightGradStore | None,
        fuse_wgrad_accumulation: bool,
        nh: int,
        q_head_dim: int,
        qk_head_dim: int,
        qk_pos_emb_head_dim: int,
        s: int,
        b: int,
        tp_group: dist_group_type | None,
        sequence_parallel: bool,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
    ) -> MXFP8Tensor:
        """Compute rotate(RMSNorm(x) gamma w_q^T) for each head, in MXFP8; differentiable in x, gamma and w_q.

        The first `qk_head_dim` channels of a head are not rotated. The other `qk_pos_emb_head_dim` channels are
        pairs (even, odd), which become halves: left = even cos_l - odd sin_l, right = odd cos_r + even sin_r.

        Args:
            x: Latent values [s, b, r], bfloat16.
            gamma: Norm weight [r].
            w_q: Weight [nh * q_head_dim, r], bfloat16 or MXFP8Tensor. With the latter, x and the output gradient are
                quantized to MXFP8 E4M3 for the products.
            cos: [s, 1, 1, qk_pos_emb_head_dim], rounded to bfloat16.
            sin: As `cos`.
            wgrad_store: Store that delays the weight gradient, if it is enabled.
            fuse_wgrad_accumulation: Add the weight gradient to `w_q.main_grad`.
            nh: Head count.
            q_head_dim: Channels per head, a multiple of 32.
            qk_head_dim: Channels that are not rotated.
            qk_pos_emb_head_dim: Channels that are rotated.
            s: Tokens per sequence, a multiple of 32.
            b: Sequences.
            tp_group: Must have one rank.
            sequence_parallel: Has no effect with one rank.
            eps: Of the norm.
            normalization: "RMSNorm".
            zero_centered_gamma: Multiply by 1 + gamma.

        Returns:
            MXFP8Tensor [s, b, nh, q_head_dim] with nominal dtype bfloat16, E4M3. `_rowwise_scale_inv` is [s, b, nh,
            q_head_dim / 32]; `_columnwise_scale_inv` is [s / 32, b, nh, q_head_dim], a scale per 32 tokens.

        Raises:
            RuntimeError: `tp_group` has several ranks, or the norm is not an RMSNorm.
            ValueError: The shapes do not fit, or s or q_head_dim is not a multiple of 32.
        """
        _check(
            x,
            w_q,
            cos,
            sin,
            (nh, q_head_dim, qk_head_dim, qk_pos_emb_head_dim, s, b),
            tp_group,
            normalization,
        )
        y = normalize(
            x.reshape(s * b, -1), gamma, None, Norm("RMSNorm", eps, bool(zero_centered_gamma))
        )
        spec = _product_spec(y, w_q, wgrad_store, bool(fuse_wgrad_accumulation))
        q = linear(y, w_q, None, spec).view(s, b, nh, q_head_dim)
        rotated = _rotate(q[..., qk_head_dim:], cos, sin)
        return _QuantizeQuery.apply(torch.cat((q[..., :qk_head_dim], rotated), dim=-1))


def _check(
    x: Tensor,
    w_q: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: tuple[int, ...],
    tp_group: Any,
    normalization: str,
) -> None:
    """Raise RuntimeError or ValueError for an unsupported group, normalization or tensor shape."""
    nh, q_head_dim, qk_head_dim, rope, s, b = sizes
    if world_size(tp_group) > 1 and tp_group is not None:
        raise RuntimeError(
            f"FusedMLAQUpProjFunction: tp_group has {world_size(tp_group)} ranks; use te.LayerNormLinear, "
            "apply_rotary_pos_emb and a quantizer"
        )
    if normalization != "RMSNorm":
        raise RuntimeError(
            f'FusedMLAQUpProjFunction: normalization={normalization!r}; only "RMSNorm" is supported'
        )
    if (
        x.shape[-1] != w_q.shape[-1]
        or x.numel() != s * b * x.shape[-1]
        or w_q.shape[0] != nh * q_head_dim
    ):
        raise ValueError(
            f"x is {list(x.shape)} and w_q {list(w_q.shape)} for s={s}, b={b}, nh={nh}, q_head_dim={q_head_dim}; give "
            "[s, b, r] and [nh * q_head_dim, r]"
        )
    if qk_head_dim + rope != q_head_dim or rope % 2 or s % _BLOCK or q_head_dim % _BLOCK:
        raise ValueError(
            f"s={s}, q_head_dim={q_head_dim}, qk_head_dim={qk_head_dim}, qk_pos_emb_head_dim={rope}; give multiples of "
            f"{_BLOCK} for s and q_head_dim, which is the sum of the other two, and an even qk_pos_emb_head_dim"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.numel() != s * rope:
            raise ValueError(
                f"{name} is {list(table.shape)}; give [s, 1, 1, qk_pos_emb_head_dim] = [{s}, 1, 1, {rope}]"
            )


def _product_spec(y: Tensor, w_q: Tensor, store: Any, fused: bool) -> LinearSpec:
    records = torch.is_grad_enabled()
    quantized = isinstance(w_q, QuantizedTensorStorage)
    delayed = store if store is not None and store.delay_wgrad_compute() else None
    if fused and records and w_q.requires_grad:
        find_main_grad(w_q)  # pyright: ignore[reportArgumentType] - raises without a buffer
    x, weight, grad = (
        MXFP8Quantizer(DType.kFloat8E4M3) if quantized else IDENTITY for _ in range(3)
    )
    return LinearSpec(
        y.dtype,
        x,
        weight,
        grad,
        Accumulation(),
        TensorParallel(),
        WeightGradient((w_q,), fused, False, delayed),
        needs_grad_input=records and y.requires_grad,
        needs_grad_weight=records and w_q.requires_grad,
        needs_grad=records and (y.requires_grad or w_q.requires_grad),
        traced=torch.compiler.is_compiling(),
        grad_weight_dtype=w_q.dtype,
        communicates=False,
        is_unquantized=not quantized,
    )


def _rotate(pairs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate interleaved pairs [s, b, nh, rope] into halves, in float32."""
    s, rope = pairs.shape[0], pairs.shape[-1]
    (cos_l, cos_r), (sin_l, sin_r) = (
        table.to(torch.bfloat16).float().view(s, 1, 1, rope).chunk(2, dim=-1)
        for table in (cos, sin)
    )
    even, odd = pairs[..., 0::2].float(), pairs[..., 1::2].float()
    return torch.cat((even * cos_l - odd * sin_l, odd * cos_r + even * sin_r), dim=-1).to(
        pairs.dtype
    )


class _QuantizeQuery(Function):
    """MXFP8 codes for queries [s, b, nh, d] with blocks along d, and with blocks along s."""

    OPERATION = "the cast of queries to MXFP8"

    @staticmethod
    def forward(ctx: Any, q: Tensor) -> MXFP8Tensor:
        s, d = q.shape[0], q.shape[-1]
        quantizer = MXFP8Quantizer(DType.kFloat8E4M3)
        # Blocks along s are column-wise blocks in the matrix [s, b nh d].
        codes: Any = quantizer.encode(q.detach().reshape(s, -1), True, True)
        rows, blocks, width = math.prod(q.shape[:-1]), d // _BLOCK, codes.shape[1]
        storage = MXFP8TensorStorage(
            codes._rowwise_data.view(q.shape),
            codes._rowwise_scale_inv[:s, : width // _BLOCK].reshape(*q.shape[:-1], blocks),
            codes._columnwise_data.reshape(q.shape),
            codes._columnwise_scale_inv[: s // _BLOCK, :width].reshape(s // _BLOCK, *q.shape[1:]),
            DType.kFloat8E4M3,
            quantizer,
            dtype=torch.bfloat16,
        )
        assert rows * blocks == storage._rowwise_scale_inv.numel()  # pyright: ignore[reportOptionalMemberAccess]
        return quantizer.wrap(storage)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.dequantize() if isinstance(grad, QuantizedTensorStorage) else grad
