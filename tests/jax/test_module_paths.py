"""The original's JAX module paths: expert-parallel settings, padded scales, and names from other modules."""

from __future__ import annotations

import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_engine.jax import cpp_extensions, ep, permutation, router
from transformer_engine.jax.cpp_extensions import ep as ep_extension
from transformer_engine.jax.cpp_extensions import flex_attention
from transformer_engine.jax.cpp_extensions import router as router_extension
from transformer_engine.jax.debug.experimental import inspect, inspect_array
from transformer_engine.jax.primitives import launching, platforms
from transformer_engine.jax.primitives.launching import kernels_unsupported_reason
from transformer_engine.jax.quantize import (
    QuantizeLayout,
    QuantizerFactory,
    ScalingMode,
    dequantizer,
)
from transformer_engine.jax.quantize.helper import (
    apply_padding_to_scale_inv,
    remove_padding_from_scale_inv,
)
from transformer_engine.jax.runtime import platform as gpu_platform
from transformer_engine.jax.triton_extensions import permutation as triton_permutation
from transformer_engine.jax.triton_extensions import utils

# the package has a function gemm
gemm = importlib.import_module("transformer_engine.jax.cpp_extensions.gemm")


@pytest.fixture(autouse=True)
def forgotten():
    yield
    ep.ep_finalize()


@pytest.mark.parametrize(("experts", "devices"), ((5, 2), (2, 4), (0, 1), (4, 0)))
def test_every_device_has_the_same_number_of_experts(experts, devices):
    with pytest.raises(ValueError, match=f"num_experts={experts} on devices={devices}"):
        ep_extension.EpConfig(experts, devices)


def test_a_world_size_of_zero_raises():
    with pytest.raises(ValueError, match="world_size"):
        ep.ep_bootstrap(
            world_size=0,
            rank=None,
            num_experts=8,
            max_tokens_per_rank=16,
            recv_capacity_per_rank=64,
            hidden_dim=32,
        )


def test_a_placement_is_set_read_and_reset():
    with pytest.raises(RuntimeError, match="call ep_bootstrap or set_ep_config first"):
        ep_extension.get_ep_config()
    config = ep_extension.EpConfig(8, 2)
    ep_extension.set_ep_config(config)
    assert ep_extension.get_ep_config() is config and ep.bootstrap_capacity() is None
    layer = ep_extension.EpLayerConfig(top_k=2)
    assert layer.dispatch_output_per_expert_alignment == 0
    with pytest.raises(RuntimeError, match="largest number of tokens is unknown"):
        ep_extension.ep_handle_mem_size(layer)
    with pytest.raises(
        RuntimeError, match=r"set_ep_config does not set it: call ep_finalize, then ep_bootstrap"
    ):
        ep.ep_prepare(layer, jnp.zeros((4, 2), jnp.int32))
    with pytest.raises(
        RuntimeError, match=r"set_ep_config has set EpConfig\(.*\); call ep_finalize first"
    ):
        ep.ep_bootstrap(2, 0, 8, 16, 64, 32)
    ep_extension.reset_ep_config()
    assert ep.ep_bootstrap(2, 0, 8, 16, 64, 32) == ep_extension.get_ep_config() == config
    assert ep_extension.ep_handle_mem_size(layer) > 0
    with pytest.raises(
        RuntimeError,
        match=r"ep_bootstrap was called with \{'tokens': 16, .*\}; call ep_finalize first",
    ):
        ep.ep_bootstrap(2, 0, 8, 16, 64, 32)


@pytest.mark.parametrize("mode", [ScalingMode.MXFP8_1D_SCALING, ScalingMode.NVFP4_1D_SCALING])
@pytest.mark.parametrize(("shape", "axis"), [((160, 96), -1), ((4, 32, 64), -1), ((64, 2, 32), -2)])
def test_padding_of_scales_is_removed_again(mode, shape, axis):
    dtype = jnp.float8_e4m3fn if mode is ScalingMode.MXFP8_1D_SCALING else jnp.float4_e2m1fn
    quantizer = QuantizerFactory.create(
        n_quantizers=1, scaling_mode=mode, q_dtype=dtype, q_layout=QuantizeLayout.ROWWISE_COLWISE
    )
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    both = quantizer.quantize(x, flatten_axis=axis)
    for tensor, columns in ((both.rowwise_tensor, False), (both.colwise_tensor, True)):
        scale = tensor.scale_inv
        padded = apply_padding_to_scale_inv(scale, mode, shape, columns, axis)
        last = columns and not mode.is_colwise_transposed
        rows, blocks = padded.shape[::-1] if last else padded.shape
        assert rows % 128 == 0 and blocks % 4 == 0 and padded.dtype == scale.dtype
        back = remove_padding_from_scale_inv(padded, mode, shape, columns, axis)
        np.testing.assert_array_equal(np.asarray(back), np.asarray(scale))
        bits = np.asarray(padded.view(jnp.uint8))
        assert not bits[scale.shape[0] :].any() and not bits[:, scale.shape[1] :].any()
        with pytest.raises(ValueError, match="pass at least"):
            remove_padding_from_scale_inv(scale[:1, :1], mode, shape, columns, axis)
    one = jnp.ones(1)
    assert apply_padding_to_scale_inv(one, ScalingMode.CURRENT_TENSOR_SCALING, shape) is one
    with pytest.raises(ValueError, match="without padding"):
        apply_padding_to_scale_inv(jnp.ones((math.prod(shape), 1)), mode, shape)


def test_axes_of_transposed_data_follow_the_matrix():
    for shape, axis in (((2, 3, 4, 5), -1), ((2, 3, 4, 5), 2), ((6, 7), 1)):
        split = axis % len(shape)
        transposed = (*shape[split:], *shape[:split])
        places = gemm.transpose_dims(len(shape), range(len(shape)), axis)
        assert tuple(transposed[index] for index in places) == shape
    assert gemm.transpose_dims(3, -1) == (0,)
    with pytest.raises(ValueError, match="has no axis 3"):
        gemm.transpose_dims(3, 3)


@pytest.mark.parametrize("layout", [QuantizeLayout.ROWWISE, QuantizeLayout.ROWWISE_COLWISE])
def test_values_of_quantized_tensors_are_those_of_their_method(layout):
    quantizer = QuantizerFactory.create(
        n_quantizers=1,
        scaling_mode=ScalingMode.MXFP8_1D_SCALING,
        q_dtype=jnp.float8_e4m3fn,
        q_layout=layout,
    )
    x = jax.random.normal(jax.random.key(0), (64, 96), jnp.bfloat16)
    tensor = quantizer.quantize(x)
    values = dequantizer.dequantize(tensor)
    np.testing.assert_array_equal(np.asarray(values), np.asarray(tensor.dequantize()))
    np.testing.assert_allclose(
        np.asarray(values, np.float32), np.asarray(x, np.float32), rtol=0.07, atol=0.02
    )
    with pytest.raises(TypeError, match="is an array; pass a quantized tensor"):
        dequantizer.dequantize(x)


def test_paths_have_the_names_of_other_modules():
    assert inspect.inspect_array is inspect_array
    assert router_extension.fused_moe_aux_loss is router.fused_moe_aux_loss
    assert flex_attention.fused_attn_fwd is cpp_extensions.fused_attn_fwd
    assert triton_permutation.token_dispatch is permutation.token_dispatch
    assert ep_extension.ep_dispatch is ep.ep_dispatch
    assert utils.kernels_unsupported_reason() is None or isinstance(
        utils.kernels_unsupported_reason(), str
    )


def test_arguments_of_passes_of_experts_are_checked():
    cfg = ep.EpConfig(4, 1)
    chosen = jnp.asarray([[0, 1], [3, 2]], jnp.int32)
    tokens, weights, rows = jnp.ones((2, 8)), jnp.ones((2, 2)), jnp.ones((4, 8))
    *_, handle, counts, _ = ep.ep_dispatch(cfg, chosen, tokens, weights, 4)
    received = ep_extension.ep_dispatch_fwd(cfg, handle, chosen, tokens, weights, 4)
    assert [x.shape for x in received] == [(4, 8), (4,)]
    with pytest.raises(TypeError, match="handle_mem=3 is an int"):
        ep_extension.ep_dispatch_fwd(cfg, 3, chosen, tokens, weights, 4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="call ep_prepare with the same topk_idx"):
        ep_extension.ep_dispatch_fwd(cfg, handle, chosen[:1], tokens[:1], weights[:1], 4)
    with pytest.raises(ValueError, match="grad_recv_topk_weights has shape"):
        ep_extension.ep_dispatch_bwd(cfg, handle, rows, rows[:2, 0])
    with pytest.raises(ValueError, match="pass a matrix"):
        ep_extension.ep_dispatch_bwd(cfg, handle, rows[0], rows[0])
    with pytest.raises(ValueError, match="grad has 1 rows; 2 tokens were dispatched"):
        ep_extension.ep_combine_bwd(cfg, handle, counts, tokens[:1], 4)
    with pytest.raises(ValueError, match="add up to 4 of 3 rows"):
        ep_extension.ep_combine_bwd(cfg, handle, counts, tokens, 3)


def test_a_grouped_product_of_one_kernel_is_recognized(monkeypatch):
    rows, stack = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((4, 32, 64), jnp.bfloat16)
    supported = gemm.is_v2_grouped_gemm_supported
    assert supported(rows, stack) == (
        gpu_platform.has_gpu() and kernels_unsupported_reason() is None
    )
    monkeypatch.setattr(platforms, "has_gpu", lambda: True)
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    monkeypatch.setattr(launching, "kernels_unsupported_reason", lambda: None)
    assert supported(rows, stack)
    assert supported(rows, jax.ShapeDtypeStruct((4, 64, 32), jnp.bfloat16), ((1,), (2,)))
    assert not supported(rows.astype(jnp.float32), stack.astype(jnp.float32))
    with pytest.raises(ValueError, match="contracts 32 elements"):
        supported(rows, stack[:, :16])
    with pytest.raises(ValueError, match="holds no sizes"):
        supported(rows, rows, ((0,), (0,)))
