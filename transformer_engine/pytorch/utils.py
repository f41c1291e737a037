"""Small functions that other libraries import from here: splits, sizes, layouts, profiler ranges, initial values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.checks import described, suggests_keywords, whole
from .constants import dist_group_type
from .functions.split_heads import SplitAlongDim
from .graph import make_weak_ref
from .module.grouped_parameters import single_parameters
from .module.parameters import default_init_method
from .numerics_debug import all_close, compare_tensors, print_rank_0
from .quantization import is_bf16_available
from .runtime.checks import group_or_none, tensor_dtype
from .runtime.checks import tensor as tensor_of
from .runtime.device import canonical_device, get_cudnn_version, get_device_compute_capability
from .runtime.device import current_hardware as _hardware
from .runtime.device_tables import get_cached_ones_tensor
from .runtime.profiler_ranges import get_nvtx_range_context, nvtx_range_pop, nvtx_range_push
from .tensor.hybrid_tensor import HybridQuantizer
from .tensor.identity_tensor import IdentityQuantizer
from .tensor.quantized_tensor import QuantizedTensorStorage
from .tensor.quantizer import Quantizer
from .tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from .tensor.storage.identity_tensor_storage import IdentityTensorStorage

__all__ = [
    "SplitAlongDim",
    "all_close",
    "assert_dim_for_fp8_exec",
    "assert_viewless_tensor",
    "attention_mask_func",
    "canonicalize_device",
    "canonicalize_dtype",
    "canonicalize_process_group",
    "cast_if_needed",
    "ceil_div",
    "check_dim_for_fp8_exec",
    "clear_tensor_data",
    "combine_tensors",
    "compare_tensors",
    "deinterleave_glu_tensor",
    "devices_match",
    "divide",
    "ensure_divisibility",
    "get_cached_ones_tensor",
    "get_cudnn_version",
    "get_default_init_method",
    "get_device_compute_capability",
    "get_nvtx_range_context",
    "get_sm_count",
    "gpu_autocast_ctx",
    "init_method_constant",
    "init_method_normal",
    "interleave_glu_tensor",
    "is_bf16_available",
    "is_bf16_compatible",
    "is_non_tn_fp8_gemm_supported",
    "make_weak_ref",
    "needs_quantized_gemm",
    "nvtx_range_pop",
    "nvtx_range_push",
    "print_rank_0",
    "requires_grad",
    "resolve_grouped_linear_single_param_flags",
    "round_up_to_nearest_multiple",
    "safely_set_viewless_tensor_data",
    "scaled_init_method_normal",
    "split_tensor_along_dim",
    "torch_get_autocast_gpu_dtype",
    "validate_ctx_manager",
    "validate_rng_states_func",
]

_ROWS, _DEPTH = (
    8,
    16,
)  # FP8 products of tensors with one scale have sizes that are multiples of these


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below value; raise ValueError for a multiple of 0."""
    if multiple == 0:
        raise ValueError("multiple=0; give the number whose multiple is wanted")
    return -(-value // multiple) * multiple


def divide(numerator: int, denominator: int) -> int:
    """Return numerator / denominator; raise ValueError if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{denominator} does not divide {numerator}; pad it to a multiple")
    return numerator // denominator


def check_dim_for_fp8_exec(tensor: Tensor) -> bool:
    """Return whether a matrix [M, K] fits FP8 products: M is a multiple of 8, and K of 16."""
    return tensor.shape[0] % _ROWS == 0 and tensor.shape[-1] % _DEPTH == 0


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """Raise ValueError unless all matrices fit FP8 products."""
    for tensor in tensors:
        if not check_dim_for_fp8_exec(tensor):
            raise ValueError(
                f"FP8 products take [multiple of {_ROWS}, multiple of {_DEPTH}], this is {list(tensor.shape)}; pad it"
            )


def cast_if_needed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the tensor in dtype; the tensor itself, or None, if no conversion is needed."""
    return tensor if tensor is None or tensor.dtype == dtype else tensor.to(dtype)


@suggests_keywords
def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Reorder [2f, ..], the f rows of a gate and then the f rows that it multiplies, into blocks of both in turn.

    Args:
        tensor: Weight or bias [2f, ..].
        interleave_size: Rows per block.

    Returns:
        A new tensor.

    Raises:
        ValueError: 2f is not a multiple of 2 * interleave_size.
    """
    return _glu_blocks(tensor, interleave_size, (2, -1, interleave_size))


@suggests_keywords
def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Invert `interleave_glu_tensor`: all gate rows before all rows that it multiplies.

    Args:
        tensor: Weight or bias [2f, ..] in blocks.
        interleave_size: Rows per block.
    """
    return _glu_blocks(tensor, interleave_size, (-1, 2, interleave_size))


def _glu_blocks(tensor: Tensor, interleave_size: int, blocks: tuple[int, int, int]) -> Tensor:
    tensor_of("tensor", tensor)
    whole("interleave_size", interleave_size)
    rows = tensor.shape[0] if tensor.dim() else 0
    if rows % (2 * interleave_size) or not tensor.dim():
        raise ValueError(
            f"the first dimension of {list(tensor.shape)} is no multiple of 2 interleave_size = {2 * interleave_size}; "
            "give the rows of a gate and of what it multiplies, in whole blocks"
        )
    transposed = tensor.unflatten(0, blocks).transpose(0, 1)
    return transposed.clone(memory_format=torch.contiguous_format).view(tensor.shape)


def is_non_tn_fp8_gemm_supported() -> bool:
    """Return whether FP8 matrices whose depth is not the last dimension can be multiplied without transposed copies."""
    return _hardware().has("fp8 products in all layouts")


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return equal parts along a dimension; raise ValueError if they cannot be equal."""
    whole("num_partitions", num_partitions)
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


def get_default_init_method() -> Callable[[Tensor], Tensor]:
    """Return the default weight initialization: N(0, 0.023)."""
    return default_init_method


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a tensor by N(0, sigma)."""
    return lambda tensor: torch.nn.init.normal_(tensor, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a tensor by N(0, sigma / sqrt(2 num_layers)), for layers on a residual stream."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Set the scores of hidden keys (mask True) to -10000 in place, and return the scores."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def gpu_autocast_ctx(**settings: Any) -> torch.amp.autocast:
    """Return `torch.amp.autocast` for the default device: CUDA, or the CPU on a machine without a GPU.

    Args:
        settings: `torch.amp.autocast` keywords, such as `dtype` and `enabled`.
    """
    settings.setdefault("device_type", canonical_device("cuda").type)
    return torch.amp.autocast(**settings)


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """Return the dtype that `gpu_autocast_ctx` computes in unless it is given another."""
    return torch.get_autocast_dtype(canonical_device("cuda").type)


def requires_grad(*tensors: Tensor | None) -> bool:
    """Return whether any tensor requires a gradient; None does not."""
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def clear_tensor_data(*tensors: Tensor | QuantizedTensorStorage | None) -> None:
    """Free the memory of tensors that are not read again; tensors with the attribute `_do_not_clear` are kept.

    Args:
        tensors: Plain tensors, whose `data` becomes empty, or quantized ones, whose codes and scales are dropped.
    """
    for tensor in tensors:
        if tensor is None or getattr(tensor, "_do_not_clear", False):
            continue
        if isinstance(tensor, QuantizedTensorStorage):
            parts = [getattr(tensor, name) for name in tensor.TENSORS]
            if not any(getattr(part, "_do_not_clear", False) for part in parts):
                tensor.clear()
        else:
            tensor.data = tensor.new_empty(0)


def get_sm_count() -> int:
    """Return the multiprocessor count of the current GPU; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def is_bf16_compatible() -> bool:
    """Return whether the device computes in bfloat16, as `is_bf16_available` does."""
    return is_bf16_available()


def init_method_constant(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that fills a tensor with a constant."""
    return lambda tensor: torch.nn.init.constant_(tensor, value)


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ValueError unless the denominator divides the numerator."""
    divide(numerator, denominator)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return numerator / denominator, rounded up."""
    return -(-numerator // denominator)


def combine_tensors(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Return views that are equally spaced in one memory as one view, stacked along a new dimension, without a copy.

    Args:
        tensors: Views with one shape and layout, such as query, key and value in a packed projection.
        dim: The new dimension's position in the result.

    Raises:
        ValueError: The tensors do not have one shape, layout and memory, or their distances differ.
    """
    first = tensors[0]
    offsets = [tensor.storage_offset() for tensor in tensors]
    step = offsets[1] - offsets[0] if len(offsets) > 1 else 0
    memory = first.untyped_storage().data_ptr()
    for index, tensor in enumerate(tensors):
        same = (tensor.shape, tensor.stride(), tensor.dtype) == (
            first.shape,
            first.stride(),
            first.dtype,
        )
        if (
            not same
            or tensor.untyped_storage().data_ptr() != memory
            or offsets[index] != offsets[0] + index * step
        ):
            raise ValueError(
                f"tensor {index} is not an equally spaced view of one memory; use torch.stack"
            )
    axis = dim + first.dim() + 1 if dim < 0 else dim
    shape: list[Any] = list(first.shape)
    stride: list[Any] = list(first.stride())
    shape.insert(axis, len(tensors))
    stride.insert(axis, step)
    return first.as_strided(shape, stride, offsets[0])


def validate_ctx_manager(ctx: Any) -> None:
    """Raise ValueError unless a value is a context manager."""
    if not (hasattr(ctx, "__enter__") and hasattr(ctx, "__exit__")):
        raise ValueError(
            f"{described(ctx)} is not a context manager; give an object with __enter__ and __exit__"
        )


def validate_rng_states_func(get_rng_tracker: Callable[[], Any]) -> None:
    """Check a function that returns a random state tracker.

    Raises:
        TypeError: The value is not callable.
        RuntimeError: The tracker lacks `get_states`, `set_states` or `fork`.
        ValueError: `fork` does not return a context manager.
    """
    if not callable(get_rng_tracker):
        raise TypeError(
            f"get_rng_tracker={described(get_rng_tracker)} is not callable; give a function"
        )
    tracker = get_rng_tracker()
    for method in ("get_states", "set_states", "fork"):
        if not callable(getattr(tracker, method, None)):
            raise RuntimeError(
                f"{type(tracker).__name__} has no method {method}; use te.CudaRNGStatesTracker"
            )
    validate_ctx_manager(tracker.fork())


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """Return tensors unchanged; raise RuntimeError for a view, whose memory deallocation would not free.

    Args:
        tensor: A tensor or a tensor list; other values are not checked.
        extra_msg: Text for the message.
    """
    for value in tensor if isinstance(tensor, list) else [tensor]:
        if isinstance(value, Tensor) and value._base is not None:
            raise RuntimeError(
                f"a tensor {list(value.shape)} is a view of another tensor{'; ' + extra_msg if extra_msg else ''}; "
                "clone() it"
            )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data: Tensor) -> None:
    """Set `tensor.data`; raise RuntimeError if the tensor is a view, and do not change it then."""
    assert_viewless_tensor(tensor, "its data cannot be replaced")
    tensor.data = new_data


def canonicalize_device(device: torch.device | str | None) -> torch.device:
    """Return a device with its index; None means torch's default device if that is a GPU, else the current GPU.

    Without a GPU, "cuda" and None mean the CPU.
    """
    default = torch.get_default_device()
    return canonical_device(
        (default if default.type == "cuda" else "cuda") if device is None else device
    )


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return a dtype; None means the default dtype."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    tensor_dtype("dtype", dtype)
    return dtype


def devices_match(device1: torch.device, device2: torch.device) -> bool:
    """Return whether two devices are the same; a CUDA device without an index is the current one."""
    return canonical_device(device1) == canonical_device(device2)


def canonicalize_process_group(group: dist_group_type | None) -> dist_group_type:
    """Return a process group; None means the group of all ranks."""
    group_or_none("group", group)
    if group is not None:
        return group
    world = torch.distributed.group.WORLD
    if world is None:
        raise RuntimeError(
            "torch.distributed is not initialized; call init_process_group, or give a group"
        )
    return world


def needs_quantized_gemm(obj: Any, rowwise: bool = True) -> bool:
    """Return whether a product reads narrow codes of an operand, or of a quantizer's result.

    Args:
        obj: Tensor, quantized tensor, quantizer, or None.
        rowwise: The product reads the row direction; False for the column direction. Matters for hybrid formats.
    """
    if isinstance(obj, HybridQuantizer):
        obj = obj.rowwise_quantizer if rowwise else obj.columnwise_quantizer
    elif isinstance(obj, HybridQuantizedTensorStorage):
        obj = obj.rowwise_sub_storage if rowwise else obj.columnwise_sub_storage
    if isinstance(obj, (IdentityQuantizer, IdentityTensorStorage)):
        return False
    return isinstance(obj, (Quantizer, QuantizedTensorStorage))


def resolve_grouped_linear_single_param_flags(
    single_grouped_weight: bool, single_grouped_bias: bool
) -> tuple[bool, bool]:
    """Return whether a `GroupedLinear` has one weight and one bias for all groups, as requested.

    Without NVTE_GROUPED_LINEAR_SINGLE_PARAM=1 both are False, and a request warns.
    """
    flags = single_parameters(
        single_grouped_weight=single_grouped_weight, single_grouped_bias=single_grouped_bias
    )
    return flags["single_grouped_weight"], flags["single_grouped_bias"]
