"""cuDNN's MXFP8 attention: from q, k and v codes with block scales to an output in 16 bits, and its gradients.

Every product contracts blocks of 32 elements. Codes with blocks along d serve the products that contract d; codes with
blocks along the sequence, which are quantized from the values, serve the products that contract tokens. The forward
pass contracts d in q k^T and the tokens of v in p v. The backward pass contracts d in do v^T, and the tokens of do in
p^T do, of k in ds k, and of q in ds^T q.

The kernels round p and ds to MXFP8. Scales are exponents in swizzled order, one matrix per batch and head: [s, d / 32]
along d and [d, s / 32] along the sequence, padded to tiles of 128 x 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .....common.formats import MXFP8, round_up
from .....common.memory import Memory
from ....runtime.device import get_cudnn_version
from ....runtime.self_tested import untested_reason
from ...operand import Operand
from ...scale_order import TILE, swizzled
from ..call import AttentionCall, Feature, Gradients
from .cudnn_fp8 import DECODED, fp8_options
from .cudnn_graph import (
    MOST_PLANS,
    REMEDY,
    CudnnPlan,
    Description,
    data_type,
    library,
    load_bindings,
    planned,
    unavailable_reason,
)
from .cudnn_plan import Strided, Tensors, bottom_right
from .limits import UPGRADE_CUDNN, unsupported_by_environment

NAME, SCALING = "cudnn_mxfp8", "mxfp8"
PATH = "mxfp8 attention"  # of the self-test
TAKES = frozenset(
    {
        Feature.FP8,
        Feature.WINDOW,
        Feature.TOP_LEFT,
        Feature.GROUPS,
        Feature.TWO_SIZES,
        Feature.DETERMINISTIC,
    }
)
E4M3 = torch.float8_e4m3fn
_BLOCK = MXFP8.length
_FIRST, _DETERMINISTIC = (9, 21, 0), (9, 18, 0)
# Releases with wrong results: 9.23.0 and 9.23.1 in any call; 9.24 writes zeros to 16-bit outputs
# for several queries and 4096 keys or more without a band, which 9.25 corrects.
_WRONG = ((9, 23, 0), (9, 23, 1))
_ZEROS, _CORRECTED, _LONG = (9, 24, 0), (9, 25, 0), 4096


def _format_version(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return the reason why the forward pass does not support the call; None if it does."""
    if call.fp8 != SCALING:
        return "supported: the recipe MXFP8BlockScaling"
    if (
        reason := unsupported_by_environment(call, "cudnn mxfp8 attention", other_kind="1")
    ) is not None:
        return f"{reason}; {DECODED}"
    if (reason := _unsupported_version(call)) is not None:
        return f"{reason}; {DECODED}"
    if "thd" in (call.q_format, call.kv_format):
        return "packed sequences (thd), whose blocks of tokens would belong to two sequences"
    if bottom_right(call):
        return "a bottom-right diagonal over sequences of unequal lengths"
    sizes = call.head_dim_qk, call.head_dim_v
    if max(sizes) > 128 and sizes != (192, 128):
        return f"head sizes {sizes[0]} and {sizes[1]}; supported: up to 128, and 192/128"
    odd = [size for size in (*sizes, call.seqlen_q, call.seqlen_kv) if size % _BLOCK]
    if odd:
        return f"{odd[0]}, a head size or a number of tokens, is not a multiple of {_BLOCK}, the elements of a block"
    return _unsupported_library() or untested_reason(PATH)


def _unsupported_library() -> str | None:
    """Return the reason why the library is missing or too old, or None."""
    if (reason := unavailable_reason()) is not None:
        return reason
    graph = load_bindings(library()).graph
    lacking = next(
        (name for name in ("sdpa_mxfp8", "sdpa_mxfp8_backward") if not hasattr(graph, name)), None
    )
    return None if lacking is None else f"nvidia-cudnn-frontend has no {lacking}; {REMEDY}"


def _unsupported_version(call: AttentionCall) -> str | None:
    """Return the reason why the cuDNN release does not support the call, or None."""
    version = get_cudnn_version()
    release = f"cuDNN {_format_version(version)}"
    if version < _FIRST:
        return f"{release} has no MXFP8 attention, {_format_version(_FIRST)} has; {UPGRADE_CUDNN}"
    if version in _WRONG:
        return f"{release} computes wrong MXFP8 attention, 9.24 corrects it; {UPGRADE_CUDNN}"
    several = call.seqlen_q > 1 and call.seqlen_kv >= _LONG and not call.mask.banded
    if _ZEROS <= version < _CORRECTED and several:
        return (
            f"{release} writes zeros for {call.seqlen_kv} keys without a band, from {_LONG} on, "
            f"{_format_version(_CORRECTED)} corrects it; {UPGRADE_CUDNN}"
        )
    if call.demands_determinism and version < _DETERMINISTIC:
        return f"{release} has no deterministic gradients, {_format_version(_DETERMINISTIC)} has; {UPGRADE_CUDNN}"
    return None


def _scale_shape(
    call: AttentionCall, heads: int, size: int, depth: int, along_tokens: bool
) -> tuple[int, ...]:
    """Shape [b, h, s, d] of a tensor's scales, padded to whole tiles; size and depth are the tensor's."""
    if along_tokens:
        return call.batch, heads, round_up(size // _BLOCK, TILE[1]), round_up(depth, TILE[0])
    return call.batch, heads, round_up(size, TILE[0]), round_up(depth // _BLOCK, TILE[1])


def _scales(
    tensors: Tensors, role: str, heads: int, depth: int, of_queries: bool, along_tokens: bool
) -> Any:
    """Describe the scales of a tensor in swizzled order; blocks along the tokens are contiguous along the tokens."""
    size = tensors.size_q if of_queries else tensors.size_kv
    shape = _scale_shape(tensors.call, heads, size, depth, along_tokens)
    rows, columns = shape[2:]
    strides = (
        heads * rows * columns,
        rows * columns,
        *((1, rows) if along_tokens else (columns, 1)),
    )
    return tensors.description.tensor(role, shape, strides, torch.float8_e8m0fnu, swizzled=True)


def describe_forward(call: AttentionCall, strided: Strided, **where: Any) -> Description:
    """Describe the graph from q, k and v codes and scales to the output in 16 bits, and stats."""
    description = Description(E4M3, **where)
    tensors = Tensors(call, strided, description, E4M3)
    of_q, of_k = (call.heads, call.head_dim_qk, True), (call.groups, call.head_dim_qk, False)
    of_v = (call.groups, call.head_dim_v, False)
    output, stats, amax = description.graph.sdpa_mxfp8(
        q=tensors.given("q", *of_q[:2], strided.q, True),
        k=tensors.given("k", *of_k[:2], strided.k, False),
        v=tensors.given("v", *of_v[:2], strided.v, False),
        descale_q=_scales(tensors, "descale_q", *of_q, False),
        descale_k=_scales(tensors, "descale_k", *of_k, False),
        descale_v=_scales(tensors, "descale_v", *of_v, True),
        **tensors.options(),
        generate_stats=call.needs_gradient,
    )
    tensors.dense("output", call.heads, call.head_dim_v, True, output, dtype=call.dtype)
    if call.needs_gradient:
        shape, strides, ragged = tensors.row_statistics()
        description.output("stats", stats, shape, strides, ragged=ragged)
    description.output("amax_output", amax, (1, 1, 1, 1))
    return description


def describe_backward(call: AttentionCall, strided: Strided, **where: Any) -> Description:
    """Describe the graph from codes with both block directions, output, grad_output and stats to 16-bit gradients."""
    description = Description(E4M3, **where)
    tensors = Tensors(call, strided, description, E4M3)
    assert strided.grad_output is not None
    of_q, of_k = (call.heads, call.head_dim_qk, True), (call.groups, call.head_dim_qk, False)
    of_v, of_output = (call.groups, call.head_dim_v, False), (call.heads, call.head_dim_v, True)
    shape, strides, ragged = tensors.row_statistics()
    grads = description.graph.sdpa_mxfp8_backward(
        q=tensors.given("q", *of_q[:2], strided.q, True),
        q_T=tensors.given("q_t", *of_q[:2], strided.q, True),
        k=tensors.given("k", *of_k[:2], strided.k, False),
        k_T=tensors.given("k_t", *of_k[:2], strided.k, False),
        v=tensors.given("v", *of_v[:2], strided.v, False),
        o_f16=tensors.dense("output", *of_output, dtype=call.dtype),
        dO_f16=tensors.given(
            "grad_output", *of_output[:2], strided.grad_output, True, dtype=call.dtype
        ),
        dO=tensors.given("grad_output_codes", *of_output[:2], strided.grad_output, True),
        dO_T=tensors.given("grad_output_t", *of_output[:2], strided.grad_output, True),
        stats=description.tensor("stats", shape, strides, ragged=ragged),
        descale_q=_scales(tensors, "descale_q", *of_q, False),
        descale_q_T=_scales(tensors, "descale_q_t", *of_q, True),
        descale_k=_scales(tensors, "descale_k", *of_k, False),
        descale_k_T=_scales(tensors, "descale_k_t", *of_k, True),
        descale_v=_scales(tensors, "descale_v", *of_v, False),
        descale_dO=_scales(tensors, "descale_grad_output", *of_output, False),
        descale_dO_T=_scales(tensors, "descale_grad_output_t", *of_output, True),
        use_deterministic_algorithm=call.deterministic,
        **fp8_options(tensors),
    )
    tensors.dense("grad_q", *of_q, grads[0], dtype=call.dtype)
    tensors.dense("grad_k", *of_k, grads[1], dtype=call.dtype)
    tensors.dense("grad_v", *of_v, grads[2], dtype=call.dtype)
    for amax in grads[3:6]:  # not requested
        amax.set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(data_type(torch.float32))
    return description


def unsupported_backward(call: AttentionCall) -> str | None:
    """Return the reason why the MXFP8 backward pass does not support the call; None if it does."""
    if call.head_dim_qk > TILE[0]:
        return f"head size {call.head_dim_qk}; scales along the tokens of more than {TILE[0]} columns are unsupported"
    return unsupported_reason(call)


class BlockCodes(NamedTuple):
    """A tensor in MXFP8.

    Attributes:
        codes: Codes in the shape of the tensor, [b, s, h, d] or [s, b, h, d], contiguous.
        scales: Exponents uint8 in swizzled order, in memory shaped like `_scale_shape`.
    """

    codes: Tensor
    scales: Tensor


def as_matrix_of_tokens(x: Tensor, tensor_format: str) -> Tensor:
    """View x as a matrix whose columns of blocks contain tokens of one sequence: [b * s, h * d] or [s, b * h * d]."""
    rows = 2 if tensor_format == "bshd" else 1
    return x.contiguous().flatten(rows).flatten(0, rows - 1)


def block_codes(
    operand: Operand, shape: torch.Size, tensor_format: str, along_tokens: bool
) -> BlockCodes:
    """Arrange codes from `as_matrix_of_tokens` as the kernels read them.

    Args:
        operand: One quantized direction: blocks along d, or along the tokens, which are contracted.
        shape: Tensor shape.
        tensor_format: "bshd" or "sbhd".
        along_tokens: The operand contracts tokens.
    """
    assert operand.scale is not None
    codes, scale = operand.codes, operand.scale.view(torch.uint8)
    sequence_first = tensor_format == "sbhd"
    tokens, batch = shape[0 if sequence_first else 1], shape[1 if sequence_first else 0]
    heads, depth = shape[2:]
    if along_tokens:
        codes = codes.t()
        if sequence_first:
            scale = scale.reshape(batch, heads, depth, tokens // _BLOCK)
        else:
            scale = scale.reshape(heads, depth, batch, tokens // _BLOCK).permute(2, 0, 1, 3)
    else:
        scale = scale.reshape(*shape[:3], depth // _BLOCK)
        scale = scale.permute(1, 2, 0, 3) if sequence_first else scale.permute(0, 2, 1, 3)
    rows, columns = scale.shape[2:]
    padding = round_up(columns, TILE[1]) - columns, round_up(rows, TILE[0]) - rows
    padded = F.pad(scale, (0, padding[0], 0, padding[1])) if any(padding) else scale.contiguous()
    return BlockCodes(codes.contiguous().view(shape), swizzled(padded.flatten(0, 2)))


_PLANS: Memory[tuple[Any, ...], CudnnPlan] = Memory(lambda key: planned(*key), MOST_PLANS)


def _pointers(tensors: dict[str, BlockCodes]) -> dict[str, int]:
    """Code and scale addresses by role."""
    pointers = {}
    for role, tensor in tensors.items():
        pointers[role] = tensor.codes.data_ptr()
        pointers[f"descale_{role.removesuffix('_codes')}"] = tensor.scales.data_ptr()
    return pointers


def forward(
    call: AttentionCall, q: BlockCodes, k: BlockCodes, v: BlockCodes
) -> tuple[Tensor, Tensor | None]:
    """Compute o [.., h, d_v] in the call's dtype and the logs of the softmax denominators [b, h, s].

    Args:
        call: The attention.
        q, k: Codes with blocks along d.
        v: Codes with blocks along the tokens.
    """
    device = q.codes.device
    strided = Strided(q.codes.stride(), k.codes.stride(), v.codes.stride())
    plan = _PLANS[describe_forward, device.index, call, strided]
    output = torch.empty((*q.codes.shape[:-1], call.head_dim_v), dtype=call.dtype, device=device)
    amax = torch.empty(1, dtype=torch.float32, device=device)
    pointers = _pointers({"q": q, "k": k, "v": v})
    pointers |= {"output": output.data_ptr(), "amax_output": amax.data_ptr()}
    lse = None
    if call.needs_gradient:
        lse = torch.empty(
            (call.batch, call.heads, call.seqlen_q), dtype=torch.float32, device=device
        )
        pointers["stats"] = lse.data_ptr()
    plan.run(pointers, device)
    return output, lse


def backward(
    call: AttentionCall,
    codes: dict[str, BlockCodes],
    output: Tensor,
    grad_output: Tensor,
    lse: Tensor,
) -> Gradients:
    """Compute dq, dk and dv in the call's dtype.

    Args:
        call: The attention.
        codes: By role, with blocks along d: q, k, v and grad_output_codes; along the tokens: q_t, k_t, grad_output_t.
        output: o [.., h, d_v], contiguous.
        grad_output: do in the same shape, contiguous.
        lse: Forward-pass result.
    """
    device = output.device
    q, k, v = (codes[role].codes for role in ("q", "k", "v"))
    strided = Strided(q.stride(), k.stride(), v.stride())._replace(grad_output=grad_output.stride())
    plan = _PLANS[describe_backward, device.index, call, strided]
    grads = [torch.empty(x.shape, dtype=call.dtype, device=device) for x in (q, k, v)]
    pointers = _pointers(codes)
    pointers |= {
        "output": output.data_ptr(),
        "grad_output": grad_output.data_ptr(),
        "stats": lse.data_ptr(),
    }
    pointers |= {f"grad_{role}": x.data_ptr() for role, x in zip("qkv", grads, strict=True)}
    plan.run(pointers, device)
    return Gradients(*grads)
