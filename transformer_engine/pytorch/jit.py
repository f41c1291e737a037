"""Compilation decorators, and the small fused functions that other libraries import from here.

The functions are plain PyTorch operations in float32 whose result is rounded once, so they compute the same values
with and without `torch.compile`. Apply `jit_fuser` to compile one of them as a single kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..common import env

__all__ = [
    "bgrad_dgelu_fused",
    "bias_dropout_add",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_train",
    "bias_gelu_fused",
    "dgelu_fused_",
    "dropout_fuser",
    "get_bias_dropout_add",
    "jit_fuser",
    "l2normalization_backward_fused",
    "l2normalization_fused",
    "l2normalization_fwd_fused",
    "lazy_compile",
    "no_torch_dynamo",
    "set_jit_fusion_options",
    "torch_version",
    "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes",
    "warmup_jit_bias_gelu",
    "warmup_jit_bias_gelu_all_dtypes",
    "warmup_jit_l2normalization",
    "warmup_jit_l2normalization_all_dtypes",
]

F = TypeVar("F", bound=Callable[..., Any])

# GELU with tanh (arXiv:1606.08415): 0.5 x (1 + tanh(sqrt(2 / pi) x (1 + 0.044715 x^2))).
_SLOPE, _CUBIC = 0.79788456, 0.044715


@functools.cache
def torch_version() -> tuple[int, ...]:
    """Return the release of the installed PyTorch as numbers, for example (2, 13, 0)."""
    return tuple(
        int(part) for part in torch.__version__.partition("+")[0].split(".")[:3] if part.isdigit()
    )


def lazy_compile(func: F) -> F:
    """Return a function that compiles `func` with `torch.compile` in its first call.

    While a compiler traces the caller, `func` itself is traced.

    Args:
        func: Function on tensors.
    """
    compiled: list[Callable[..., Any]] = []

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(func))
        return compiled[0](*args, **kwargs)

    return cast(F, call)


def jit_fuser(function: F) -> F:
    """Compile a function in its first call; with NVTE_TORCH_COMPILE=0 at decoration, return it unchanged.

    Args:
        function: Function on tensors.
    """
    return lazy_compile(function) if env.flag("NVTE_TORCH_COMPILE") else function


dropout_fuser = jit_fuser


def no_torch_dynamo(
    recursive: bool = True, when: Callable[[dict[str, Any]], str | None] | None = None
) -> Callable[[F], F]:
    """Return a decorator that excludes a function from `torch.compile`, which then splits the graph there.

    Args:
        recursive: Also exclude the functions that the function calls.
        when: Function on the call's arguments `{"args": .., "kwargs": ..}` that returns the reason to exclude
            this call, or None. An excluded call warns with the reason. By default every call is excluded.
    """

    def decorate(function: F) -> F:
        excluded: Any = torch.compiler.disable(function, recursive=recursive)
        if when is None:
            return excluded
        reason_of = when

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            reason = (
                reason_of({"args": args, "kwargs": kwargs})
                if torch.compiler.is_compiling()
                else None
            )
            if reason is None:
                return function(*args, **kwargs)
            name = getattr(function, "__qualname__", "function")
            warnings.warn(
                f"{name} is excluded from torch.compile: {reason}", UserWarning, stacklevel=2
            )
            return excluded(*args, **kwargs)

        return cast(F, call)

    return decorate


def bias_gelu_fused(inp: Tensor, bias: Tensor | None) -> Tensor:
    """Compute gelu(inp + bias) by the tanh formula.

    Args:
        inp: Values [.., N].
        bias: Bias [N]; None or an empty tensor for no bias.

    Returns:
        Values [.., N] in the dtype of `inp`, differentiable in both arguments.
    """
    x = inp.float() if bias is None or bias.numel() == 0 else inp.float() + bias.float()
    return torch.nn.functional.gelu(x, approximate="tanh").to(inp.dtype)


def dgelu_fused_(grad_output: Tensor, inp: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the gradient of `inp` in `bias_gelu_fused`.

    Args:
        grad_output: Result gradient [.., N].
        inp: Forward-pass values [.., N].
        bias: Bias [N]; None or an empty tensor for no bias.

    Returns:
        Gradient [.., N] in the dtype of `grad_output`.
    """
    x = inp.float() if bias is None or bias.numel() == 0 else inp.float() + bias.float()
    tanh = torch.tanh(_SLOPE * x * (1.0 + _CUBIC * x * x))
    inner = _SLOPE * (1.0 + 3.0 * _CUBIC * x * x)
    slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
    return (grad_output.float() * slope).to(grad_output.dtype)


def bgrad_dgelu_fused(
    grad_output: Tensor, inp: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Compute the gradients of `bias_gelu_fused`.

    The arguments are as in `dgelu_fused_`.

    Args:
        grad_output: Result gradient [.., N].
        inp: Forward-pass input [.., N].
        bias: Bias [N], or None.

    Returns:
        `(bias gradient [N], inp gradient [.., N])`; the first is None without a bias. It is summed
        in float32 over the rounded gradient of `inp`.
    """
    grad_input = dgelu_fused_(grad_output, inp, bias)
    if bias is None or bias.numel() == 0:
        return None, grad_input
    rows = grad_input.reshape(-1, grad_input.shape[-1])
    return rows.sum(0, dtype=torch.float32).to(bias.dtype), grad_input


def l2normalization_fwd_fused(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute y = x * r with r = 1 / sqrt(sum(x^2) + eps) over the last dimension.

    Args:
        x: Values [.., N].
        eps: Added to the sum of squares.

    Returns:
        `(y [.., N] in the dtype of x, r float32 [.., 1])`.
    """
    wide = x.float()
    factor = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * factor).to(x.dtype), factor


def l2normalization_fused(x: Tensor, eps: float) -> Tensor:
    """Return the first result of `l2normalization_fwd_fused`, differentiable in `x`.

    Args:
        x: Values [.., N].
        eps: Added to the sum of squares.
    """
    return l2normalization_fwd_fused(x, eps)[0]


def l2normalization_backward_fused(
    grad_output: Tensor, x: Tensor, rsqrt_norm: Tensor, eps: float
) -> Tensor:
    """Compute the gradient r * (dy - x * r^2 * sum(x * dy)) for `x` in `l2normalization_fwd_fused`.

    Args:
        grad_output: Result gradient dy [.., N].
        x: Forward-pass values [.., N].
        rsqrt_norm: r, float32 [.., 1], from the forward pass.
        eps: Has no effect, because r includes it.

    Returns:
        Gradient [.., N] in the dtype of `x`.
    """
    dy, wide = grad_output.float(), x.float()
    projection = (wide * dy).sum(-1, keepdim=True) * rsqrt_norm.square()
    return (rsqrt_norm * (dy - wide * projection)).to(x.dtype)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool
) -> Tensor:
    """Compute residual + dropout(x + bias).

    Args:
        x: Values [.., N].
        bias: Bias [N]; None or an empty tensor for no bias.
        residual: Values [.., N] that are added.
        prob: Probability with which a value becomes zero.
        training: Apply the dropout.

    Returns:
        Values [.., N], differentiable in the first three arguments.
    """
    if bias is not None and bias.numel() != 0:
        x = x + bias
    return residual + torch.nn.functional.dropout(x, p=prob, training=training)


def get_bias_dropout_add(
    training: bool,
) -> Callable[[Tensor, Tensor | None, Tensor, float], Tensor]:
    """Return `bias_dropout_add` for training or inference, called with (x, bias, residual, prob).

    Args:
        training: Whether dropout is applied.
    """
    return functools.partial(bias_dropout_add, training=training)


bias_dropout_add_fused_train = functools.partial(bias_dropout_add, training=True)
"""`bias_dropout_add` in training, called with (x, bias, residual, prob)."""

bias_dropout_add_fused_inference = functools.partial(bias_dropout_add, training=False)
"""`bias_dropout_add` in inference, called with (x, bias, residual, prob)."""


def set_jit_fusion_options() -> None:
    """Do nothing: the fusers that NVIDIA's engine configures were replaced by `torch.compile` in PyTorch 2.2."""


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _values(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.rand(*shape, dtype=dtype, device=device)


def warmup_jit_bias_dropout_add(
    hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Run `bias_dropout_add` once in each mode, so that a training step loads no kernels.

    The random state is unchanged.
    """
    shape = (seq_length, micro_batch_size, hidden_size)
    with torch.random.fork_rng():
        for training in (True, False):
            x, residual, bias = (
                _values(shape, dtype),
                _values(shape, dtype),
                _values(shape[2:], dtype),
            )
            x.requires_grad_(training)
            result = bias_dropout_add(x, bias, residual, 0.1, training)
            if training:
                result.sum().backward()


def warmup_jit_bias_gelu(
    ffn_hidden_size_per_partition: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Run `bias_gelu_fused` and its gradient once, so that a training step loads no kernels.

    The random state is unchanged.
    """
    shape = (seq_length * micro_batch_size, ffn_hidden_size_per_partition)
    with torch.random.fork_rng():
        x, bias = _values(shape, dtype), _values(shape[1:], dtype)
        bgrad_dgelu_fused(bias_gelu_fused(x, bias), x, bias)


def warmup_jit_l2normalization(
    hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Run `l2normalization_fwd_fused` and its gradient once, so that a training step loads no kernels.

    The random state is unchanged.
    """
    with torch.random.fork_rng():
        x = _values((seq_length * micro_batch_size, hidden_size), dtype)
        y, factor = l2normalization_fwd_fused(x, 1e-6)
        l2normalization_backward_fused(y, x, factor, 1e-6)


def warmup_jit_bias_dropout_add_all_dtypes(
    hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Call `warmup_jit_bias_dropout_add` for float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_bias_dropout_add(hidden_size, dtype, seq_length, micro_batch_size)


def warmup_jit_bias_gelu_all_dtypes(
    ffn_hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Call `warmup_jit_bias_gelu` for float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_bias_gelu(ffn_hidden_size, dtype, seq_length, micro_batch_size)


def warmup_jit_l2normalization_all_dtypes(
    hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Call `warmup_jit_l2normalization` for float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_l2normalization(hidden_size, dtype, seq_length, micro_batch_size)
