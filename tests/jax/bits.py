"""Arrays of both frameworks as bytes, and matrices with all kinds of values that a cast can receive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

if TYPE_CHECKING:
    import torch

NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def matrix(kind: str, shape: tuple[int, int], dtype: str, seed: int = 0) -> np.ndarray:
    """A seeded matrix of a numpy dtype: normal, spread over 2^80, with special values, constant or zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "spread":
        bits = 20 if dtype == "float16" else 80
        x = np.ldexp(x, rng.integers(-bits // 2, bits // 2, shape)).astype(np.float32)
        if dtype == "float16":
            x = np.clip(x, -60000, 60000)
    elif kind == "special":
        chosen = rng.random(shape)
        for value, below in (
            (np.inf, 0.01),
            (-np.inf, 0.02),
            (np.nan, 0.03),
            (-0.0, 0.1),
            (0.0, 0.2),
        ):
            x = np.where((chosen < below) & (chosen >= below - 0.01), np.float32(value), x)
    elif kind == "infinite":
        x[rng.random(shape) < 0.02] = np.inf
    elif kind == "large":
        # Some blocks end near the greatest float32: their scales are tiny.
        largest = float(ml_dtypes.finfo(NUMPY_DTYPES[dtype]).max)
        x = np.clip(x, -3, 3) * np.float32(largest / 4)
    elif kind == "small":
        # Amaxes whose scales pass the greatest float32, elements above float32's subnormals.
        x = (
            np.sign(x)
            * (np.abs(x) % 1 + 1)
            * np.float32(2.0**-120 if dtype != "float16" else 2.0**-14)
        )
    elif kind == "zero":
        x = x * 0
    return x.astype(NUMPY_DTYPES[dtype])


def to_torch(x: np.ndarray) -> torch.Tensor:
    import torch  # JAX's bits are compared with stored digests where torch is not installed

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def torch_bytes(tensor: torch.Tensor) -> np.ndarray:
    import torch

    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()


def jax_bytes(array: jax.Array) -> np.ndarray:
    """The bytes of an array; FP4 codes two to a byte, as torch packs them."""
    if array.dtype == jnp.float4_e2m1fn:
        codes = np.asarray(lax.bitcast_convert_type(array, jnp.uint4).astype(jnp.uint8))
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    array = np.ascontiguousarray(np.asarray(array))
    return array.view(np.uint8)


def erase_nan_signs(data: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """NaNs of float32 count as equal whatever their sign and payload; codes have one NaN."""
    if dtype == jnp.float32:
        values = data.view(np.int32)
        return np.where((values & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, values)
    return data


def assert_same_bytes(array: jax.Array | None, tensor: torch.Tensor | None, name: str = "") -> None:
    """Equal bytes, NaNs apart; both None or neither."""
    assert (array is None) == (tensor is None), name
    if array is None or tensor is None:
        return
    ours, reference = jax_bytes(array), torch_bytes(tensor)
    assert ours.size == reference.size, f"{name}: {ours.shape} against {reference.shape}"
    ours = erase_nan_signs(ours, array.dtype).ravel()
    reference = erase_nan_signs(reference, array.dtype).ravel()
    different = np.flatnonzero(ours != reference)
    assert not different.size, (
        f"{name}: {different.size} of {ours.size} differ, first at {different[0]}: "
        f"{ours[different[0]]} against {reference[different[0]]}"
    )


def torch_step(
    history: np.ndarray, scale: np.ndarray, algorithm: str, fp8_max: float, margin: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Amax history [length, n] and scales [n] after a torch reference step, idle columns included."""
    import torch

    from transformer_engine.pytorch.primitives.scale_update import reference

    request = reference.ScaleUpdateRequest(
        "cpu",
        len(history),
        history.shape[1],
        algorithm=algorithm,
        fp8_max=fp8_max,
        margin=margin,
        keep_idle=False,
    )
    state = torch.from_numpy(history.copy()), torch.from_numpy(scale.copy())
    reference.bind(request)(*([tensor] for tensor in state))
    return state
