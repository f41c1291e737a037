"""Names and numbers that callers of NVIDIA's engine import by path."""

from __future__ import annotations

import enum
import types
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ..common.enums import NVTE_QKV_Layout
from ..common.numbers import with_article


class DType(enum.IntEnum):
    """Element types by the numbers that NVIDIA's checkpoints and callers use."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: DType | int | torch.dtype) -> DType:
        """Convert a `torch.dtype`, a number, or a member of another such enumeration to a DType.

        Raises:
            TypeError: dtype has another type.
            ValueError: No element type corresponds to dtype.
        """
        if isinstance(dtype, torch.dtype):
            if dtype not in TE_DType:
                raise ValueError(
                    f"dtype={dtype} has no DType; give one of {', '.join(map(str, TE_DType))}"
                )
            return TE_DType[dtype]
        if isinstance(dtype, bool) or not hasattr(dtype, "__int__"):
            raise TypeError(
                f"dtype={dtype!r} is {with_article(type(dtype))}; give a torch.dtype, a DType or its number"
            )
        return cls(int(dtype))

    def __reduce_ex__(self, protocol):
        return (DType, (int(self),))


class CPLoadBalancingStrategy(enum.Enum):
    """Token assignment among the ranks that share packed sequences.

    DUAL_CHUNK_SWAP: rank r of n holds the chunks r and 2 n - 1 - r among the 2 n chunks of every
    sequence, which gives every rank the same share of a causal mask. NO_LOAD_BALANCE: each rank
    holds one contiguous packed buffer piece.
    """

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"

    @classmethod
    def check(cls, strategy: object) -> None:
        """Raise AssertionError, as NVIDIA's engine does, unless `strategy` is a member."""
        if not isinstance(strategy, cls):
            raise AssertionError(
                f"load_balancing_strategy={strategy!r} is not a CPLoadBalancingStrategy; give one of "
                f"{', '.join(str(member) for member in cls)}"
            )


DType.__module__ = "transformer_engine_torch"  # callers and pickles know it by this path

TE_DType = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
TE_DType_To_Torch = {number: dtype for dtype, number in TE_DType.items()}

# Slots in a module's scaling states: three per product in the forward pass, two in the backward pass.
FP8FwdTensorIdx = types.SimpleNamespace(
    **{
        f"GEMM{product}_{tensor}": 3 * (product - 1) + slot
        for product in (1, 2, 3)
        for slot, tensor in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
    }
)
FP8BwdTensorIdx = types.SimpleNamespace(
    **{
        f"GRAD_{tensor}{product}": 2 * (product - 1) + slot
        for product in (1, 2, 3)
        for slot, tensor in enumerate(("OUTPUT", "INPUT"))
    }
)

# Values along K that share a scale, for the formats whose scales are narrow numbers too.
MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16

# Types of the string options of layers, by name: annotations name them.
ParallelMode = Literal["row", "column"]
NormalizationName = Literal["LayerNorm", "RMSNorm"]
ActivationName = Literal[
    "gelu",
    "geglu",
    "glu",
    "qgelu",
    "qgeglu",
    "relu",
    "reglu",
    "srelu",
    "sreglu",
    "silu",
    "swiglu",
    "clamped_swiglu",
]
TensorFormat = Literal["sbhd", "bshd", "thd"]
SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
AttentionType = Literal["self", "cross"]

AttnMaskTypes = (
    "no_mask",
    "padding",
    "causal",
    "padding,causal",
    "causal,padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
AttnTypes = get_args(AttentionType)
AttnBiasTypes = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
QKVLayouts = tuple(layout.name.removeprefix("NVTE_").lower() for layout in NVTE_QKV_Layout)
LayerTypes = ("encoder", "decoder")
GemmParallelModes = (*get_args(ParallelMode), None)

if TYPE_CHECKING:
    from typing import TypeAlias

    dist_group_type: TypeAlias = torch.distributed.ProcessGroup
else:
    dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else object
