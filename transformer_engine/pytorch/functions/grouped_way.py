"""The table that chooses how a grouped linear layer computes: all groups in one launch per step, or in a loop.

One launch serves a GPU, bfloat16 and float16, unquantized or with the default settings of delayed, current and block
scaling. The loop serves every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...common import env
from ...common.dispatch import Backend, Table, undisturbed

AT_ONCE, LOOP = "together", "one_by_one"

# Features of a call that only the loop supports.
QUANTIZED_PARAMETERS = "quantized parameters"
OTHER_PARAMETERS = "parameters that are not plain nn.Parameters"
DELAYED_WEIGHT_GRADIENTS = "delayed weight gradients"
KEPT_INPUT = "save_original_input"
CALIBRATION = "calibration"
RECOMPUTATION = "recomputation under a recipe"
OTHER_BACKWARD = "a backward pass in another precision"
SINGLE_QUANTIZERS = "quantizers that cannot be merged into one"
IRREGULAR = "groups whose parameters differ"
FLAGGED_WEIGHTS = "weights whose quantization a flag on the device controls"
SCALED_BIAS = "biases that are multiplied by a scale per row"
UNASSIGNED_ROWS = "rows that belong to no group"
_FEATURES = frozenset(
    {
        QUANTIZED_PARAMETERS,
        OTHER_PARAMETERS,
        DELAYED_WEIGHT_GRADIENTS,
        KEPT_INPUT,
        CALIBRATION,
        RECOMPUTATION,
        OTHER_BACKWARD,
        SINGLE_QUANTIZERS,
        IRREGULAR,
        FLAGGED_WEIGHTS,
        SCALED_BIAS,
        UNASSIGNED_ROWS,
    }
)
_NAME = "NVTE_USE_CUTLASS_GROUPED_GEMM"
_text = env.watch_in_eager_mode(_NAME)
_HALVES = (torch.bfloat16, torch.float16)


class GroupedWay(NamedTuple):
    """One forward pass of a grouped linear layer.

    Attributes:
        features: Those of the features above that the call or the module uses.
        asked: Value of NVTE_USE_CUTLASS_GROUPED_GEMM; None if it is not set.
        native: The input is a plain tensor, not a subclass.
        has_rows: The input has rows.
        width: Last dimension of the input.
        dtype: Dtype of the input.
        device: Device of the input.
        extents: Extents (N, K) of a weight.
        weights: Device of the weights.
        computing: Dtype that values are multiplied in: that of torch.autocast, or the weights'.
        read: Dtype of the weights where products read them unquantized; otherwise None.
    """

    features: tuple[str, ...]
    asked: bool | None
    native: bool
    has_rows: bool
    width: int
    dtype: torch.dtype
    device: torch.device
    extents: tuple[int, int]
    weights: torch.device
    computing: torch.dtype
    read: torch.dtype | None


def asked_for() -> bool | None:
    """Return the value of NVTE_USE_CUTLASS_GROUPED_GEMM; None if it is not set."""
    return None if _text() is None else env.flag(_NAME)


def are_regular(weights: Sequence[Tensor]) -> bool:
    """Return whether one launch can read weights: they are contiguous and begin at multiples of 16 bytes.

    Addresses may change between two calls.
    """
    addresses = 0
    for address in map(Tensor.data_ptr, weights):
        addresses |= address
    return not addresses % 16 and all(map(Tensor.is_contiguous, weights))


def _unsupported_together(way: GroupedWay) -> str | None:
    if way.asked is False:
        return "NVTE_USE_CUTLASS_GROUPED_GEMM=0 asks for one product per group"
    if way.device.type != "cuda" and not way.asked:
        return f"the input is on {way.device.type}, where it saves nothing; NVTE_USE_CUTLASS_GROUPED_GEMM=1 asks for it"
    if not way.native:
        return "the input is a subclass of Tensor"
    if way.dtype not in _HALVES:
        return f"the input is {way.dtype}; it supports bfloat16 and float16"
    if way.width != way.extents[1] or way.device != way.weights:
        return f"the input [.., {way.width}] on {way.device} does not fit the weights"
    if not way.has_rows:
        return "there are no rows"
    if way.extents[0] % 16 or way.extents[1] % 16:
        return f"the weights are {list(way.extents)}; it supports multiples of 16"
    if way.computing != way.dtype:
        return f"the input is {way.dtype} and is multiplied in {way.computing}"
    if way.read is not None and way.read != way.dtype:
        return f"the input is {way.dtype} and the weights {way.read}"
    return None


TABLE: Table[GroupedWay] = Table(
    "grouped_linear",
    (Backend(AT_ONCE, unsupported_reason=_unsupported_together), Backend(LOOP, takes=_FEATURES)),
    describe=GroupedWay,
)


def chosen_at_once(way: GroupedWay, supported: bool, features: tuple[str, ...], has_rows: bool) -> bool:
    """Return whether all groups of a call are computed in one launch per step.

    Args:
        way: The request of a kind of call.
        supported: One launch supports this kind of call.
        features: Further features of the call.
        has_rows: The input has rows.
    """
    if undisturbed():
        return supported and not features and has_rows
    return TABLE.choose(way._replace(features=way.features + features, has_rows=has_rows)) == AT_ONCE
