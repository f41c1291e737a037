"""All quantizer types by name, for tests that hold for each."""

from __future__ import annotations

import torch

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2


class State:
    """Delayed scaling for three tensors, the second with scale 2."""

    def __init__(self, device: torch.device):
        self.scale = torch.full((3,), 2.0, device=device)
        self.amax_history = torch.zeros(4, 3, device=device)

    @property
    def scale_in_place(self) -> torch.Tensor:
        return self.scale


CASES = {
    "delayed": lambda device, **usage: Float8Quantizer(
        torch.full((1,), 4.0, device=device), torch.zeros(1, device=device), E4M3, **usage
    ),
    "state": lambda device, **usage: Float8Quantizer.from_state(State(device), 1, E5M2, **usage),
    "current": lambda device, **usage: Float8CurrentScalingQuantizer(E4M3, device, **usage),
    "mxfp8": lambda device, **usage: MXFP8Quantizer(E4M3, **usage),
    "mxfp8_2d": lambda device, **usage: MXFP8Quantizer(E4M3, with_2d_quantization=True, **usage),
    "block_1d": lambda device, **usage: Float8BlockQuantizer(E4M3, block_scaling_dim=1, **usage),
    "block_2d": lambda device, **usage: Float8BlockQuantizer(E4M3, **usage),
    "nvfp4": lambda device, **usage: NVFP4Quantizer(**usage),
    "nvfp4_2d": lambda device, **usage: NVFP4Quantizer(with_2d_quantization=True, **usage),
    "nvfp4_rht": lambda device, **usage: NVFP4Quantizer(
        with_rht=True, with_post_rht_amax=True, stochastic_rounding=True, **usage
    ),
    "hybrid": lambda device, **usage: HybridQuantizer(
        MXFP8Quantizer(E4M3), Float8CurrentScalingQuantizer(E5M2, device), **usage
    ),
    "identity": lambda device, **usage: IdentityQuantizer(**usage),
}
NAMES = tuple(CASES)
QUANTIZED = tuple(name for name in NAMES if name != "identity")
# Formats whose column-wise codes are computed from the row-wise codes, and formats that need the values again.
TRANSPOSABLE = ("delayed", "state", "current", "mxfp8_2d", "block_2d", "nvfp4_2d")
INDEPENDENT = ("mxfp8", "block_1d", "nvfp4", "nvfp4_rht", "hybrid")
# Quantizing the dequantized values gives the same codes, except with stochastic rounding.
DETERMINISTIC = tuple(name for name in NAMES if name != "nvfp4_rht")


def create_quantizer(
    name: str, device: torch.device, rowwise: bool = True, columnwise: bool = True
):
    return CASES[name](device, rowwise=rowwise, columnwise=columnwise)


def values(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Seeded values with an outlier in the first block."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(shape, generator=generator)
    x.view(-1)[3] *= 20
    return x.to(device, dtype)


def payload(tensor) -> dict[str, torch.Tensor]:
    """The tensors that a quantized tensor holds, by attribute."""
    return {
        name: getattr(tensor, name) for name in tensor.TENSORS if getattr(tensor, name) is not None
    }


def same_payload(first, second) -> bool:
    actual, reference = payload(first), payload(second)
    return actual.keys() == reference.keys() and all(
        torch.equal(actual[name], reference[name]) for name in actual
    )
