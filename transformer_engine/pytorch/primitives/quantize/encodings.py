"""Element and scale encodings in float32 torch operations: FP8, E2M1, E8M0, and the Hadamard transform."""

from __future__ import annotations

import torch
from torch import Tensor

from ....common.formats import E2M1, Element, float32_max
from .spec import CODE_DTYPES

_SIGN_AND_EXPONENT = -(1 << 23)  # int32 of 0xFF800000: every bit of a float32 but its mantissa
_MANTISSA = (1 << 23) - 1
_LEAST_EXPONENT = 1 << 22  # bits of 2^-127, a subnormal number


def divide(numerator: float, denominator: Tensor) -> Tensor:
    """Return numerator / denominator, correctly rounded on every device.

    `number / tensor` is tensor.reciprocal() * number in torch, which rounds twice.
    """
    return torch.div(torch.full_like(denominator, numerator), denominator)


def absolute_maximum(x: Tensor) -> Tensor:
    """Return max|x| as float32 [1]; 0 for an empty tensor, NaN if any element is NaN."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    # One pass without a temporary; abs().amax() takes 2.5 times as long on a CPU.
    least, greatest = torch.aminmax(x)
    return torch.maximum(least.abs(), greatest.abs()).to(torch.float32).reshape(1)


def row_maxima(x: Tensor) -> Tensor:
    """Return max|x| for every row of x [M, K] as float32 [M]; 0 for empty rows, NaN for a row with a NaN."""
    if x.shape[1] == 0:
        return torch.zeros(x.shape[0], dtype=torch.float32, device=x.device)
    least, greatest = torch.aminmax(x, dim=1)
    return torch.maximum(least.abs(), greatest.abs()).to(torch.float32)


def scale_from_amax(
    amax: Tensor,
    maximum: float,
    *,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    value_for_inf: float | None = None,
) -> Tensor:
    """Return scale = maximum / max(amax, epsilon) in float32; 1 if that amax is 0, infinite or NaN.

    An infinite quotient becomes value_for_inf, by default the largest float32; power_of_two rounds down by clearing the
    mantissa.
    """
    amax = amax.to(torch.float32)
    if epsilon > 0.0:
        amax = amax.clamp(min=epsilon)
    scale = divide(maximum, amax)
    largest = torch.finfo(torch.float32).max if value_for_inf is None else value_for_inf
    scale = torch.where(scale == torch.inf, largest, scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32)
    usable = (amax > 0.0) & (amax < torch.inf)
    return torch.where(usable, scale, 1.0)


def second_level_scale(amax: Tensor, unit: float) -> Tensor:
    """Return S = unit / amax in float32, at most FLOAT32_MAX; 1 if amax or S is 0. unit: S for amax 1."""
    scale = divide(unit, amax).clamp(max=float32_max())
    return torch.where((amax == 0.0) | (scale == 0.0), 1.0, scale)


def is_power_of_two(scale: Tensor) -> bool:
    """Return whether float32 scales are 0 or powers of two from 2^-127 to 2^127; waits for the device."""
    bits = scale.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & _MANTISSA
    normal = (mantissa == 0) & (exponent >= 0) & (exponent < 255)
    return bool((normal | (bits == _LEAST_EXPONENT)).all())


def cast(x: Tensor, element: Element) -> Tensor:
    """Cast float32 x to the nearest E4M3 or E5M2 codes, ties to even.

    Infinity becomes the maximum, and NaN of either sign becomes 0x7F.

    0x7F is NVIDIA's canonical NaN in both formats, which the conversion instruction in the kernels produces.
    """
    # torch keeps the sign of a NaN, so every NaN is made positive. Values beyond the maximum are
    # clamped first, since the GPU's cast turns them into NaN or infinity.
    dtype = CODE_DTYPES[element.name]
    limits = torch.finfo(dtype)
    x = x.nan_to_num(nan=torch.nan, posinf=limits.max, neginf=limits.min)
    return x.clamp(limits.min, limits.max).to(dtype)


def transposed(matrix: Tensor) -> Tensor:
    """Transpose a matrix [R, K] of values, codes or scales to [K, R], row-major."""
    # contiguous() would keep [K, 1] with strides (1, K), which cannot be viewed as another dtype.
    return matrix.t().clone(memory_format=torch.contiguous_format)


def widen(codes: Tensor) -> Tensor:
    """Return float8 codes as float32, exactly."""
    if codes.dtype == torch.float8_e4m3fn and codes.device.type == "cpu":
        # torch's own cast takes 10.7 ms for 2048 x 2048 on one core, a 256-value table 2.5 ms.
        table = (
            torch.arange(256, dtype=torch.uint8, device="cpu")
            .view(torch.float8_e4m3fn)
            .to(torch.float32)
        )
        indices = codes.view(torch.uint8).flatten().to(torch.int32)
        return table.index_select(0, indices).view(codes.shape)
    return codes.to(torch.float32)


def encode_e2m1(x: Tensor, random: Tensor | None = None) -> Tensor:
    """Return uint8 codes for float32 x: nearest, ties to the even code; above 6 the code for 6, NaN becomes +6.

    With random (uniform in [0, 1), shape of x): floor(|x| + random * gap) on the grid; gap is the
    distance between the two magnitudes that enclose |x|.
    """
    x = x.nan_to_num(nan=E2M1.maximum, posinf=E2M1.maximum, neginf=-E2M1.maximum)
    magnitude = x.abs()
    # The grid has gaps of 1/2 up to 2, 1 up to 4 and 2 up to 6: three ranges with 4, 2 and 1 codes. A code
    # sums the parts of the three ranges below |x|, each divided by its gap. Every term is exact in float32.
    # torch.where() would cost 10 ms per call for 2048 x 2048 on one core, each of these about 0.6 ms.
    stretches = (
        magnitude.clamp(max=2.0) * 2.0,
        magnitude.clamp(2.0, 4.0) - 2.0,
        (magnitude.clamp(4.0, 6.0) - 4.0) * 0.5,
    )
    if random is None:
        first, second, third = (stretch.round() for stretch in stretches)
        codes = first + second + third
    else:
        first, second, third = (stretch.floor() for stretch in stretches)
        floors = first + second + third
        # At most one range is partly filled.
        fraction = (stretches[0] - first) + (stretches[1] - second) + (stretches[2] - third)
        codes = floors + (fraction + random).floor()
    return codes.to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Decode uint8 codes 0..15 to float32, with the sign in bit 3."""
    # Computed on the device: CUDA graph capture does not allow a copy from the host.
    every = torch.arange(16, dtype=torch.float32, device=codes.device)
    magnitude = every % 8.0
    magnitudes = (
        magnitude.clamp(max=4.0) * 0.5
        + (magnitude.clamp(4.0, 6.0) - 4.0)
        + (magnitude.clamp(min=6.0) - 6.0) * 2.0
    )
    table = torch.where(every < 8.0, magnitudes, -magnitudes)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def pack_fp4(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., K] into bytes [..., K / 2]; the even index is in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(
            f"K={codes.shape[-1]} codes do not fill whole bytes; pad K to a multiple of 2"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Unpack bytes [..., K / 2] into uint8 codes [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


_NAN = 0xFF
LARGEST = 0xFE
# float32 bits of 2^-127, the least scale: as a subnormal it is the leading mantissa bit.
_HALF_LEAST_NORMAL = 0x00400000
_QUIET_NAN = 0x7FC00000


def e8m0_from_float(v: Tensor) -> Tensor:
    """Return the smallest exponent byte e with 2^(e - 127) >= v, for float32 v >= 0; NaN -> 255, above 2^127 -> 254."""
    bits = v.view(torch.int32) & 0x7FFFFFFF
    exponent = bits >> 23
    mantissa = bits & 0x007FFFFF
    above = torch.where(exponent == 0, mantissa > _HALF_LEAST_NORMAL, mantissa != 0)
    rounded = (exponent + above.to(torch.int32)).clamp(max=LARGEST)
    return torch.where(bits > 0x7F800000, _NAN, rounded).to(torch.uint8)


def e8m0_to_float(codes: Tensor) -> Tensor:
    """Return 2^(e - 127) as float32, exactly (2^-127 is subnormal); 255 -> NaN."""
    exponent = codes.to(torch.int32)
    bits = torch.where(exponent == 0, _HALF_LEAST_NORMAL, exponent << 23)
    return torch.where(exponent == _NAN, _QUIET_NAN, bits).view(torch.float32)


GROUP = 16  # elements that the Hadamard transform mixes
_NEGATIVE = 0b1101_0111_1110_1000  # bit i: element i of a group changes its sign


def hadamard_transform(x: Tensor, random_sign: bool = True) -> Tensor:
    """Return y = (x * signs) @ H / 4 on groups of 16 along the last axis [..., 16 n], in float32, rounded to x's dtype.

    H is the 16 x 16 Hadamard matrix by Sylvester's construction.

    Four rounds of sums and differences instead of a product: the addition order, and so the bits,
    are the same on every device.
    """
    depth = x.shape[-1]
    if depth % GROUP:
        raise ValueError(
            f"the Hadamard transform takes groups of {GROUP}, {depth} elements are not a multiple; pad them"
        )
    groups = x.to(torch.float32).reshape(-1, GROUP)
    if random_sign:
        # Computed on the device: CUDA graph capture does not allow a copy from the host.
        bits = torch.arange(GROUP, dtype=torch.int32, device=x.device)
        groups = groups * (1 - 2 * ((_NEGATIVE >> bits) & 1)).to(torch.float32)
    for distance in (1, 2, 4, 8):
        first, second = groups.view(-1, GROUP // (2 * distance), 2, distance).unbind(2)
        groups = torch.stack((first + second, first - second), dim=2).view(-1, GROUP)
    return (groups * 0.25).view(x.shape).to(x.dtype)
