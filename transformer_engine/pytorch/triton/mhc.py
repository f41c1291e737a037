"""Manifold-constrained hyper-connections (mHC, arXiv:2512.24880): n residual streams that are mixed around a layer.

A hidden state is x [s, b, C, n] with n streams. From it a small projection computes three mixings for each token:
H_pre [n] aggregates the streams to the layer's input, H_post [n] distributes the layer's output f to them, and the
doubly stochastic matrix H_res [n, n] mixes the streams, so that x' = f H_post^T + x H_res.

The functions are plain PyTorch operations in float32, differentiable by autograd, on any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...common import absent, env
from ..runtime.determinism import is_demanded
from ..runtime.warn_once import warn_once

__all__ = [
    "mhc_fused_aggregate",
    "mhc_fused_expand_combine",
    "mhc_fused_projection",
    "mhc_fused_scale",
    "mhc_fused_sinkhorn",
    "mhc_generate_mix_and_aggregate",
]

if TYPE_CHECKING:
    ENFORCE_DETERMINISTIC: bool

# ENFORCE_DETERMINISTIC is read from the environment and torch's switch with each access.
absent.install_getter(__name__, {"ENFORCE_DETERMINISTIC": is_demanded})

_WIDTH = 32  # the projection's result is padded to a multiple of this


def _check(use_split_k: bool, buffer: Tensor | None) -> None:
    """Raise RuntimeError for a nondeterministic option that is forbidden; warn about a buffer without effect."""
    if use_split_k and not env.flag("NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        raise RuntimeError(
            "use_split_k=True requires NVTE_ALLOW_NONDETERMINISTIC_ALGO=1; set the variable, or use_split_k=False"
        )
    if buffer is not None:
        warn_once(
            "mhc: fused_grad_x_acc_buffer",
            "fused_grad_x_acc_buffer has no effect: autograd adds up the gradients of x; leave it out",
            stacklevel=4,
        )


def mhc_fused_projection(
    x: Tensor,
    phi: Tensor,
    use_tf32: bool = True,
    norm_weight: Tensor | None = None,
    fused_grad_x_acc_buffer: Tensor | None = None,
    use_split_k: bool = False,
) -> tuple[Tensor, Tensor]:
    """Project flattened hidden states, and compute their mean squares.

    Args:
        x: Hidden states [M, K] with K = C n.
        phi: Projection [n (n + 2), K]; 24 rows for n = 4.
        use_tf32: Has no effect: torch's `torch.backends.cuda.matmul` settings choose the precision of the product.
        norm_weight: [K], multiplies the columns of `phi`.
        fused_grad_x_acc_buffer: Has no effect.
        use_split_k: Has no effect on the result; requires NVTE_ALLOW_NONDETERMINISTIC_ALGO=1.

    Returns:
        `(H float32 [M, 32], mean squares float32 [M])`. The first n (n + 2) columns of H are x @ (phi * norm_weight).T,
        the others 0.

    Raises:
        RuntimeError: `use_split_k` without the variable.
    """
    _check(use_split_k, fused_grad_x_acc_buffer)
    wide = x.float()
    weight = phi.float() if norm_weight is None else phi.float() * norm_weight.float()
    projected = wide @ weight.t()
    padding = -projected.shape[1] % _WIDTH
    return torch.nn.functional.pad(projected, (0, padding)), wide.square().mean(-1)


def mhc_fused_scale(
    H: Tensor, alpha: Tensor, beta: Tensor, ms: Tensor, n: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale the projection by the root mean square, and apply the activations of the three mixings.

    Args:
        H: Projection [M, at least n (n + 2)]: n columns for H_pre, n for H_post, and n * n for H_res.
        alpha: Factors [3] for the three parts.
        beta: Offsets [1, n (n + 2)].
        ms: Mean squares [M] from `mhc_fused_projection`.
        n: Stream count.

    Returns:
        `(H_pre [M, n], H_post [M, n], H_res [M, n * n])` in the dtype of `H`, computed in float32,
        with z = H alpha / sqrt(ms) + beta: sigmoid(z), 2 sigmoid(z) and z.
    """
    sizes = (n, n, n * n)
    normalized = H[:, : sum(sizes)].float() * torch.rsqrt(ms.float())[:, None]
    offsets = beta.float().view(-1)[: sum(sizes)].split(sizes)
    parts = normalized.split(sizes, dim=1)
    before, after, residual = (
        part * alpha[index].float() + offset
        for index, (part, offset) in enumerate(zip(parts, offsets, strict=True))
    )
    pre = torch.sigmoid(before)
    post = 2.0 * torch.sigmoid(after)
    return pre.to(H.dtype), post.to(H.dtype), residual.to(H.dtype)


def mhc_fused_sinkhorn(
    H_res: Tensor, n: int = 4, recompute_hist: bool = True, iters: int = 20
) -> Tensor:
    """Return the doubly stochastic matrices to which exp(H_res) is normalized, row by row and column by column.

    Args:
        H_res: Logits [s, b, n, n].
        n: Stream count.
        recompute_hist: Recompute the iterations in the backward pass instead of saving them.
        iters: Iteration count; each normalizes the rows and then the columns.

    Returns:
        Matrices [s, b, n, n] in the dtype of `H_res`, computed in log space in float32.
    """

    def normalized(logits: Tensor) -> Tensor:
        for _ in range(iters):
            logits = logits - logits.logsumexp(-1, keepdim=True)
            logits = logits - logits.logsumexp(-2, keepdim=True)
        return logits.exp()

    logits = H_res.float().reshape(*H_res.shape[:2], n, n)
    if recompute_hist and torch.is_grad_enabled() and logits.requires_grad:
        result = checkpoint(normalized, logits, use_reentrant=False)
        assert isinstance(result, Tensor)
        return result.to(H_res.dtype)
    return normalized(logits).to(H_res.dtype)


def mhc_fused_aggregate(
    x: Tensor,
    H_pre: Tensor,
    n: int = 4,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
) -> Tensor:
    """Compute the layer's input, the sum of the streams weighted by H_pre.

    Args:
        x: Hidden states [s, b, C, n].
        H_pre: Weights [s, b, n].
        n: Stream count.
        use_tf32: Has no effect.
        fused_grad_x_acc_buffer: Has no effect.

    Returns:
        [s, b, C] in the dtype of `x`, summed in float32.
    """
    _check(False, fused_grad_x_acc_buffer)
    weights = H_pre.float().reshape(*x.shape[:2], 1, n)
    return (x.float() * weights).sum(-1).to(x.dtype)


def mhc_fused_expand_combine(
    f: Tensor,
    bias: Tensor | None,
    H_post: Tensor,
    x: Tensor,
    H_res: Tensor,
    n: int = 4,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
) -> Tensor:
    """Compute the next hidden states (f + bias) H_post^T + x H_res.

    Args:
        f: Layer output [s, b, C].
        bias: Bias [C] on the layer's output; None for no bias.
        H_post: Weights [s, b, n].
        x: Hidden states [s, b, C, n].
        H_res: Mixing matrices [s, b, n, n].
        n: Stream count.
        use_tf32: Has no effect.
        fused_grad_x_acc_buffer: Has no effect.

    Returns:
        [s, b, C, n] in the dtype of `x`, computed in float32.
    """
    _check(False, fused_grad_x_acc_buffer)
    output = f.float() if bias is None else f.float() + bias.float()
    expanded = output[..., None] * H_post.float().reshape(*x.shape[:2], 1, n)
    # Sums of n products, term by term: a matrix product would depend on the precision settings of the device.
    mixing = H_res.float().reshape(*x.shape[:2], 1, n, n)
    mixed = (x.float()[..., None] * mixing).sum(-2)
    return (expanded + mixed).to(x.dtype)


def mhc_generate_mix_and_aggregate(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    norm_weight: Tensor | None = None,
    use_tf32: bool = True,
    fused_grad_x_acc_buffer: Tensor | None = None,
    use_split_k: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the hidden-state mixings and the layer's input: projection, scale, normalization and aggregation.

    Args:
        x: Hidden states [s, b, C, n].

    The other arguments are as in `mhc_fused_projection` and `mhc_fused_scale`.

    Returns:
        `(layer input [s, b, C], H_post float32 [s, b, n], H_res float32 [s, b, n, n])`.
    """
    s, b, channels, n = x.shape
    flat = x.reshape(s * b, channels * n)
    H, ms = mhc_fused_projection(
        flat, phi, use_tf32, norm_weight, fused_grad_x_acc_buffer, use_split_k
    )
    before, after, residual = mhc_fused_scale(H, alpha, beta, ms, n)
    mixing = mhc_fused_sinkhorn(residual.view(s, b, n, n), n)
    return mhc_fused_aggregate(x, before.view(s, b, n), n, use_tf32), after.view(s, b, n), mixing
