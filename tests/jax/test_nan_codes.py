"""Codes of NaN are 0x7F in both FP8 formats, from every dtype and sign, in both frameworks and in the kernels."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.jax.bits import NUMPY_DTYPES, jax_bytes, to_torch, torch_bytes
from tests.jax.compiled import ones
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import E2M1, E4M3, E5M2, FLOAT8, NVFP4
from transformer_engine.jax.primitives import quantize as ours
from transformer_engine.pytorch.primitives import quantize as theirs

SIGNS = np.asarray([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF], np.uint32)


def with_nans(dtype: str) -> np.ndarray:
    """A matrix [16, 32] whose first column holds NaNs with both signs and several payloads."""
    x = np.linspace(-500, 500, 512, dtype=np.float32).reshape(16, 32).astype(NUMPY_DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        x[:4, 0] = SIGNS.view(np.float32).astype(x.dtype)
    if dtype == "bfloat16":
        x.view(np.uint16)[4:6, 0] = (0x7FC0, 0xFFC0)
    return x


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_nan_of_either_sign_is_one_code_in_both_frameworks(dtype, element):
    x = with_nans(dtype)
    nan = np.isnan(x.astype(np.float32))
    spec = {"format": FLOAT8, "element": element, "rowwise": True, "columnwise": True}
    tensor = ours.quantize(
        jnp.asarray(x), ours.QuantizeSpec(**spec), multiplier=ones(1, jnp.float32)
    )
    with use_backend(quantize="reference"):
        expected = theirs.quantize(
            to_torch(x), theirs.QuantizeSpec(**spec), multiplier=torch.ones(1)
        )
    assert nan.sum() >= 4
    for codes, other, where in (
        (tensor.codes, expected.codes, nan),
        (tensor.codes_t, expected.codes_t, nan.T),
    ):
        np.testing.assert_array_equal(jax_bytes(codes), torch_bytes(other))
        assert set(jax_bytes(codes)[where]) == {0x7F}
        assert not np.isin(jax_bytes(codes)[~where], (0x7F, 0xFF)).any()


def test_the_scale_of_a_block_with_nan_is_one_code_in_both_frameworks():
    x = with_nans("float32")
    spec = {"format": NVFP4, "element": E2M1, "rowwise": True, "columnwise": False}
    amax = jnp.full(1, 500.0, jnp.float32)
    tensor = ours.quantize(jnp.asarray(x), ours.QuantizeSpec(**spec), amax=amax)
    with use_backend(quantize="reference"):
        expected = theirs.quantize(
            to_torch(x), theirs.QuantizeSpec(**spec), amax=torch.full((1,), 500.0)
        )
    np.testing.assert_array_equal(jax_bytes(tensor.scale), torch_bytes(expected.scale))
    assert set(jax_bytes(tensor.scale)[:4, 0]) == {0x7F}
