"""Functions whose parameters were renamed, added or removed accept the calls of both releases, with equal results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.jax.compiled import array, normal, ones
from transformer_engine.jax import cpp_extensions as tex
from transformer_engine.jax import permutation, sharding, version_utils
from transformer_engine.jax.cpp_extensions import amax
from transformer_engine.jax.layernorm import canonicalize_norm_type
from transformer_engine.jax.primitives.quantize import hadamard_transform
from transformer_engine.jax.quantize import (
    GroupedNoScaleTensor,
    GroupedScaledTensor1x,
    NoScaleTensor,
    QuantizerFactory,
    ScalingMode,
    get_quantization_recipe,
)
from transformer_engine.jax.sharding import MeshResource, global_shard_guard
from transformer_engine.jax.softmax import SoftmaxFusionType


def equal(first, second) -> None:
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    ("call", "present", "former", "value"),
    [
        (get_quantization_recipe, "name", "recipe_name", "MXFP8BlockScaling"),
        (canonicalize_norm_type, "x", "norm_type", "RMS-Norm"),
        (version_utils.jax_version_meet_requirement, "version", "least", "0.5.3"),
        (version_utils.jax_version_meet_requirement, "version", "requirement", "0.5.3"),
    ],
)
def test_a_renamed_parameter_is_accepted_under_both_names(call, present, former, value):
    expected = call(value)
    assert type(call(**{present: value})) is type(expected) and str(call(**{former: value})) == str(
        expected
    )
    with pytest.raises(TypeError, match=f"got {present} and {former}, its former name"):
        call(**{present: value, former: value})


def test_a_field_of_the_mesh_resource_is_named_by_both_keywords():
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("tp",))
    with jax.set_mesh(mesh), global_shard_guard(MeshResource(tp_resource="tp")):
        for name in ("resource_name", "mesh_resource_name"):
            assert sharding.get_active_resource_axis(**{name: "tp_resource"}) is None
        with pytest.raises(ValueError, match="resource_name='x' is not a field"):
            sharding.get_active_resource_axis("x")


def test_mesh_axes_of_a_quantizer_are_accepted_under_both_names():
    quantizer = QuantizerFactory.create(
        scaling_mode=ScalingMode.MXFP8_1D_SCALING, q_dtype=jnp.float8_e4m3fn
    )
    x = normal(jax.random.key(0), (32, 64))
    equal(quantizer.quantize(x, over=()), quantizer.quantize(x, mesh_axes=()))


def test_the_order_of_received_rows_is_accepted_under_both_names():
    rows, order = normal(jax.random.key(0), (4, 3)), array([2, 0, 3, 1], jnp.int32)
    expected = permutation.local_unpermute_before_a2a(rows, order)
    equal(permutation.local_unpermute_before_a2a(rows, goes_to=order), expected)
    equal(permutation.local_unpermute_before_a2a(rows, state=order), expected)


def test_gradients_of_norms_are_accepted_with_beta_and_without():
    x, dz = normal(jax.random.key(0), (6, 8)), normal(jax.random.key(1), (6, 8))
    gamma, beta = ones(8), ones(8, jnp.bfloat16)
    _, mean, rstdev = tex.layernorm_fwd(x, gamma, beta, False, 1e-5)
    former = tex.layernorm_bwd(dz, x, mean, rstdev, gamma, False, 1e-5)
    equal(tex.layernorm_bwd(dz, x, mean, rstdev, gamma, None, False, 1e-5), former)
    equal(
        tex.layernorm_bwd(
            dz, x, mean, rstdev, gamma=gamma, zero_centered_gamma=False, epsilon=1e-5
        ),
        former,
    )
    with_beta = tex.layernorm_bwd(dz, x, mean, rstdev, gamma, beta, False, 1e-5)
    equal(with_beta[:2], former[:2])
    assert with_beta[2].dtype == jnp.bfloat16 and former[2].dtype == jnp.float32
    plain = tex.normalization_bwd(dz, x, mean, rstdev, gamma, False, 1e-5, "layernorm")
    equal(plain, tex.normalization_bwd(dz, x, mean, rstdev, gamma, None, False, 1e-5, "layernorm"))
    with pytest.raises(ValueError, match="beta"):
        tex.layernorm_bwd(dz, x, mean, rstdev, gamma, ones(7), False, 1e-5)


def test_gradients_of_softmax_are_accepted_with_the_inputs_and_without():
    logits, dz = normal(jax.random.key(0), (2, 4, 8, 16)), normal(jax.random.key(1), (2, 4, 8, 16))
    mask = jnp.zeros(logits.shape, bool)
    p = tex.scaled_softmax_fwd(logits, 0.5)
    expected = tex.scaled_softmax_bwd(dz, p, 0.5)
    _, pullback = jax.vjp(lambda logits: jax.nn.softmax(0.5 * logits), logits)
    np.testing.assert_allclose(expected, pullback(dz)[0], atol=1e-6)
    equal(tex.scaled_softmax_bwd(dz, p, logits, 0.5), expected)
    equal(tex.scaled_softmax_bwd(dz, p, scale_factor=0.5), expected)
    equal(tex.scaled_softmax_bwd(dz, p, logits=logits, scale_factor=0.5), expected)
    equal(tex.scaled_masked_softmax_bwd(dz, p, 0.5), expected)
    equal(tex.scaled_masked_softmax_bwd(dz, p, logits, mask, 0.5), expected)
    equal(tex.scaled_masked_softmax_bwd(dz, p, logits, mask, scale_factor=0.5), expected)
    equal(tex.scaled_upper_triang_masked_softmax_bwd(dz, p, logits, 0.5), expected)
    sizes = {
        "softmax_type": tex.softmax.AttnSoftmaxType.VANILLA_SOFTMAX,
        "batch": 2,
        "heads": 4,
        "q_seqlen": 64,
    }
    sizes |= {"k_seqlen": 64, "dtype": jnp.bfloat16}
    for name in ("fusion_type", "softmax_fusion_type"):
        assert tex.is_softmax_kernel_available(**{name: SoftmaxFusionType.SCALED}, **sizes)


def test_a_grouped_product_reads_the_sizes_of_its_rows_or_of_a_third_argument():
    x, kernel, sizes = (
        normal(jax.random.key(0), (6, 16)),
        normal(jax.random.key(1), (2, 16, 3)),
        array([2, 4]),
    )
    rows = GroupedNoScaleTensor(x, None, sizes)
    expected = tex.grouped_gemm(x, kernel, sizes)
    ends = np.repeat(np.arange(2), np.asarray(sizes))
    np.testing.assert_allclose(
        expected, np.einsum("mk,mkn->mn", x, np.asarray(kernel)[ends]), rtol=1e-4, atol=1e-5
    )
    for got in (
        tex.grouped_gemm(rows, kernel),
        tex.grouped_gemm(rows, kernel, ((1,), (1,)), use_async_d2h_group_sizes=True),
        tex.grouped_gemm(x, kernel, group_sizes=sizes, contracting_dims=((1,), (1,))),
        tex.grouped_gemm(rows, kernel, None, ((1,), (1,))),
    ):
        equal(got, expected)
    assert GroupedNoScaleTensor(x, group_sizes=sizes).group_sizes is sizes
    assert GroupedNoScaleTensor(x.T, None, None, sizes, (16, 6)).group_sizes is sizes
    with pytest.raises(ValueError, match="pre_swizzled=True, but scale_inv is stored row by row"):
        GroupedScaledTensor1x(x, x, x, pre_swizzled=True)


def test_results_without_a_quantizer_contain_their_maximum_if_asked():
    x, gamma = normal(jax.random.key(0), (6, 2, 8)), ones(8)
    for tensor in (
        tex.act_lu(x, ("silu", "linear"), output_amax_when_no_scaling=True),
        tex.dact_lu(x[:, 0], x, ("silu", "linear"), output_amax_when_no_scaling=True),
        tex.rmsnorm_fwd(x, gamma, False, 1e-5, output_amax_when_no_scaling=True)[0],
        tex.layernorm_fwd(x, gamma, gamma, False, 1e-5, output_amax_when_no_scaling=True)[0],
        tex.dact_lu_dbias(x[:, 0], x, ("silu", "linear"), output_amax_when_no_scaling=True)[0],
    ):
        assert isinstance(tensor, NoScaleTensor) and tensor.amax is not None
        np.testing.assert_array_equal(tensor.amax, np.abs(tensor.data).max().reshape(1))
    assert tex.act_lu(x, ("silu", "linear")).amax is None


def test_maxima_of_tensors_and_of_their_transforms():
    x = normal(jax.random.key(0), (32, 2, 6))
    np.testing.assert_array_equal(
        amax.calculate_amax(x, amax.AmaxScope.LOCAL, True), [np.abs(x).max()]
    )
    transformed = hadamard_transform(x.reshape(32, 12).T, True)
    result = amax.calculate_post_rht_amax(x, flatten_axis=1)
    np.testing.assert_array_equal(result, [np.abs(transformed).max()])


def test_maxima_and_versions_have_their_modules():
    assert tex.gemm is not None and tex.AmaxScope is amax.AmaxScope
    supported = version_utils.jax_version_meet_requirement("0.11.2")
    assert version_utils.is_xla_ffi_collectives_supported() is supported
