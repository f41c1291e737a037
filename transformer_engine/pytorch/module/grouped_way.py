"""Whether the groups of a GroupedLinear go together through one call, or one by one: the table, with its reasons.

Together they go on a GPU, in bfloat16 or float16, without quantization or with delayed, current or block scaling as
the recipes' defaults have it. One by one they go always.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...common.dispatch import Backend, Table

TOGETHER, ONE_BY_ONE = "together", "one_by_one"

# What a call may ask for beside its products.
QUANTIZED_PARAMETERS = "quantized parameters"
OTHER_PARAMETERS = "parameters that are no plain nn.Parameter"
DELAYED_WEIGHT_GRADIENTS = "put-off weight gradients"
KEPT_INPUT = "save_original_input"
CALIBRATION = "calibration"
RECOMPUTATION = "recomputation under a recipe"
OTHER_BACKWARD = "a backward pass in another precision"
SINGLE_QUANTIZERS = "quantizers that work one by one"
IRREGULAR = "groups whose parameters differ"
FLAGGED_WEIGHTS = "weights that a flag on the device renews"
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
    }
)
_HALVES = (torch.bfloat16, torch.float16)


class GroupedWay(NamedTuple):
    """One forward of a GroupedLinear.

    features   of those above, what the call or the module asks for
    asked      what NVTE_USE_CUTLASS_GROUPED_GEMM says, None where it is not set
    native     is the input torch's own tensor, no subclass?
    shape      of the input, flattened to a matrix
    computing  the dtype that values are multiplied in: torch's autocast's, or the weights'
    read       the weights' dtype where products read them as they are; None where they read codes
    """

    features: tuple[str, ...]
    asked: bool | None
    native: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    extents: tuple[int, int]
    weights: torch.device
    computing: torch.dtype
    read: torch.dtype | None


def _refuses_together(way: GroupedWay) -> str | None:
    if way.asked is False:
        return "NVTE_USE_CUTLASS_GROUPED_GEMM=0 asks for one product a group"
    if way.device.type != "cuda" and not way.asked:
        return f"the input is on {way.device.type}, where it saves nothing; NVTE_USE_CUTLASS_GROUPED_GEMM=1 asks for it"
    if not way.native:
        return "the input is of a subclass of Tensor"
    if way.dtype not in _HALVES:
        return f"the input is {way.dtype}; it takes bfloat16 and float16"
    if len(way.shape) != 2 or way.shape[1] != way.extents[1] or way.device != way.weights:
        return f"the input {list(way.shape)} on {way.device} does not fit the weights"
    if way.shape[0] == 0:
        return "there are no rows"
    if way.extents[0] % 16 or way.extents[1] % 16:
        return f"the weights are {list(way.extents)}; it takes multiples of 16"
    if way.computing != way.dtype:
        return f"the input is {way.dtype} and is multiplied in {way.computing}"
    if way.read is not None and way.read != way.dtype:
        return f"the input is {way.dtype} and the weights {way.read}"
    return None


TABLE: Table[GroupedWay] = Table(
    "grouped_linear",
    (Backend(TOGETHER, refuses=_refuses_together), Backend(ONE_BY_ONE, takes=_FEATURES)),
    describe=GroupedWay,
)
