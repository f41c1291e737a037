"""The table that chooses how a grouped linear layer computes: all groups in one launch per step, or in a loop.

One launch serves a GPU, bfloat16 and float16, unquantized or with the default settings of a recipe. Under
NVFP4, only the products share a launch, on GPUs with NVFP4 products. The loop serves every call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.dispatch import BY_TILE, Backend, Table, always_depends, interventions
from ..distributed.recompute import is_fp8_activation_recompute_enabled

if TYPE_CHECKING:
    from .grouped_call import GroupedSpec

TOGETHER, LOOP = "together", "loop"

# Call features that only the loop supports.
QUANTIZED_PARAMETERS = "quantized parameters"
OTHER_PARAMETERS = "parameters that are not plain nn.Parameters"
DELAYED_WEIGHT_GRADIENTS = "delayed weight gradients"
SAVED_INPUT = "save_original_input"
CALIBRATION = "calibration"
RECOMPUTATION = "recomputation under a recipe"
OTHER_BACKWARD = "a backward pass in another precision"
SINGLE_QUANTIZERS = "quantizers that cannot be merged into one"
IRREGULAR = "groups whose parameters differ"
FLAGGED_WEIGHTS = "weights whose quantization a flag on the device controls"
SCALED_BIAS = "biases that are multiplied by a scale per row"
UNASSIGNED_ROWS = "rows that belong to no group"
UNFIT_ROWS = (
    "groups whose rows are not multiples of the format's blocks, or are known to the device only"
)
_FEATURES = frozenset(
    {
        QUANTIZED_PARAMETERS,
        OTHER_PARAMETERS,
        DELAYED_WEIGHT_GRADIENTS,
        SAVED_INPUT,
        CALIBRATION,
        RECOMPUTATION,
        OTHER_BACKWARD,
        SINGLE_QUANTIZERS,
        IRREGULAR,
        FLAGGED_WEIGHTS,
        SCALED_BIAS,
        UNASSIGNED_ROWS,
        UNFIT_ROWS,
    }
)
_NAME = "NVTE_USE_CUTLASS_GROUPED_GEMM"
_text = env.watch_in_eager_mode(_NAME)
_HALVES = (torch.bfloat16, torch.float16)


class GroupedRequest(NamedTuple):
    """One grouped linear forward pass.

    Attributes:
        features: The features above that the call or the module uses.
        requested: NVTE_USE_CUTLASS_GROUPED_GEMM value; None if it is not set.
        plain: The input is a plain tensor, not a subclass.
        has_rows: The input has rows.
        width: Last input dimension.
        dtype: Input dtype.
        device: Input device.
        extents: Weight shape (N, K).
        weight_device: Weight device.
        compute_dtype: Product dtype: the torch.autocast dtype, or the weight dtype.
        weight_read_dtype: Weight dtype if products read them unquantized; otherwise None.
        multiple: Extent divisor that the format requires.
    """

    features: tuple[str, ...]
    requested: bool | None
    plain: bool
    has_rows: bool
    width: int
    dtype: torch.dtype
    device: torch.device
    extents: tuple[int, int]
    weight_device: torch.device
    compute_dtype: torch.dtype
    weight_read_dtype: torch.dtype | None
    multiple: int = 1


def environment_request() -> bool | None:
    """Return NVTE_USE_CUTLASS_GROUPED_GEMM; None if it is not set."""
    return None if _text() is None else env.flag(_NAME)


def are_regular(weights: Sequence[Tensor]) -> bool:
    """Return whether one launch can read weights: they are contiguous and begin at multiples of 16 bytes.

    Addresses may change between two calls.
    """
    addresses = functools.reduce(operator.or_, map(Tensor.data_ptr, weights), 0)
    return not addresses % 16 and all(map(Tensor.is_contiguous, weights))


def _unsupported_together(request: GroupedRequest) -> str | None:
    if request.requested is False:
        return "NVTE_USE_CUTLASS_GROUPED_GEMM=0 requests one product per group"
    if request.device.type != "cuda" and not request.requested:
        kind = request.device.type
        return f"the input is on {kind}, where one launch saves no time; NVTE_USE_CUTLASS_GROUPED_GEMM=1 requests it"
    if not request.plain:
        return "the input is a subclass of Tensor"
    if request.dtype not in _HALVES:
        return f"the input is {request.dtype}; it supports bfloat16 and float16"
    if request.width != request.extents[1] or request.device != request.weight_device:
        return f"the input [.., {request.width}] on {request.device} does not fit the weights"
    if not request.has_rows:
        return "there are no rows"
    multiple = max(16, request.multiple)
    if request.extents[0] % multiple or request.extents[1] % multiple:
        return f"the weights are {list(request.extents)}; it supports multiples of {multiple}"
    if request.compute_dtype != request.dtype:
        return f"the input is {request.dtype} and is multiplied in {request.compute_dtype}"
    if request.weight_read_dtype is not None and request.weight_read_dtype != request.dtype:
        return f"the input is {request.dtype} and the weights {request.weight_read_dtype}"
    return None


TABLE: Table[GroupedRequest] = Table(
    "grouped_linear",
    (
        Backend(
            TOGETHER,
            unsupported_reason=_unsupported_together,
            batch_dependent=always_depends(BY_TILE),
        ),
        Backend(LOOP, takes=_FEATURES),
    ),
    describe=GroupedRequest,
)


def runs_together(
    spec: GroupedSpec,
    splits: Sequence[int] | Tensor,
    weights: Sequence[Tensor],
    has_rows: bool,
    features: tuple[str, ...] = (),
) -> bool:
    """Return whether all groups in a call are computed in one launch per step.

    Args:
        spec: The settings.
        splits: Rows per group; a tensor if the host does not read them.
        weights: The weights; not read unless `spec.together`.
        has_rows: The input has rows.
        features: Further call features.
    """
    if spec.request is None:  # a compiler is tracing
        return False
    if spec.together:
        if spec.quantizers.input is not None and is_fp8_activation_recompute_enabled():
            features += (RECOMPUTATION,)
        if not are_regular(weights):
            features += (IRREGULAR,)
        if not spec.quantizers.fit(splits):
            features += (UNFIT_ROWS,)
    if not interventions:
        return spec.together and not features and has_rows
    request = spec.request._replace(features=spec.request.features + features, has_rows=has_rows)
    return TABLE.choose(request) == TOGETHER
