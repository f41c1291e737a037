"""Functions other than layers: explain, policies, dumps, extension names, kernel switches, NNX."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
import transformer_engine_jax as tex_enums
from tests.jax.compiled import array, normal, ones, zeros
from transformer_engine.common import recipe
from transformer_engine.common.hardware import nvidia
from transformer_engine.jax import attention
from transformer_engine.jax import cpp_extensions as tex
from transformer_engine.jax.attention import availability
from transformer_engine.jax.cpp_extensions import activation as tex_activation
from transformer_engine.jax.cpp_extensions import normalization as tex_normalization
from transformer_engine.jax.cpp_extensions import quantization as tex_quantization
from transformer_engine.jax.cpp_extensions.gemm import GemmPrimitive
from transformer_engine.jax.cpp_extensions.misc import get_cudnn_version, get_xla_flag
from transformer_engine.jax.cpp_extensions.normalization import NormFwdPrimitive
from transformer_engine.jax.debug.experimental import inspect_array, load_array_dump
from transformer_engine.jax.nnx import bridged, state_type, value_and_grad
from transformer_engine.jax.primitives import launching
from transformer_engine.jax.primitives.gemm import float8
from transformer_engine.jax.primitives.launching import disabled_reason
from transformer_engine.jax.runtime.platform import has_gpu
from transformer_engine.jax.version_utils import jax_version_meet_requirement

DELAYED = recipe.DelayedScaling(amax_history_len=4)


def test_explain_names_every_operation_and_every_rejection(cpu_alone):
    model = te_flax.LayerNormMLP(intermediate_dim=32)
    x = ones((4, 16))
    with te.autocast(True, DELAYED):
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        explanation = te.explain(
            model.apply, jax.tree.map(jnp.zeros_like, variables), x, deterministic=True
        )
    results = {
        d.operation: d
        for d in explanation.decisions
        if getattr(d.request, "platform", "cpu") == "cpu"
    }
    assert {"jax_gemm", "jax_quantize", "jax_norm", "jax_activation", "jax_scale_update"} <= set(
        results
    )
    assert results["jax_gemm"].chosen == "reference"
    reasons = {v.backend: v.reason for v in results["jax_gemm"].verdicts}
    assert "it needs a CUDA device" in reasons["scaled"]
    assert "jax_norm: reference" in str(explanation)
    operations = [d.request.operation for d in explanation.decisions if d.operation == "jax_norm"]
    assert set(operations) == {"forward", "backward"}
    forward = te.explain(
        model.apply,
        {"params": jax.tree.map(jnp.zeros_like, variables)["params"]},
        x,
        backward=False,
    )
    assert all(
        d.request.operation == "forward" for d in forward.decisions if d.operation == "jax_norm"
    )


@pytest.mark.parametrize("name", te.checkpoint_policies.__all__)
def test_policies_keep_the_results_of_products(name):
    x, kernel = ones((8, 16)), ones((16, 4))

    def products(policy):
        function = jax.checkpoint(lambda k: jnp.tanh(te.dense.dense(x, k)).sum(), policy=policy)
        # Every product has this name. Its operations are printed once for products that are traced once.
        return str(jax.make_jaxpr(jax.grad(function))(kernel)).count("name=transformer_engine_gemm")

    saved = products(getattr(te.checkpoint_policies, name))
    assert saved < products(jax.checkpoint_policies.nothing_saveable)


def test_inspect_array_writes_the_array_to_disk(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x = jnp.arange(6.0).reshape(2, 3)
    y = jax.jit(lambda x: inspect_array(x, "scores") * 1)(x)
    jax.effects_barrier()
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(
        load_array_dump("my_tensor_gpu0_scores.bin", (2, 3), jnp.float32), x
    )
    facts = json.loads((tmp_path / "my_tensor_gpu0_scores_meta.json").read_text())
    assert (facts["shape"], facts["max"], facts["mean"]) == ([2, 3], 5.0, 2.5)
    assert "my_tensor_gpu0_scores" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds 6 elements"):
        load_array_dump("my_tensor_gpu0_scores.bin", (7,), jnp.float32)
    with pytest.raises(ValueError, match="part of a file's name"):
        inspect_array(x, "a/b")


def test_extension_functions_match_their_equations():
    x, gamma = normal(jax.random.key(0), (4, 16)), ones(16)
    y, rstdev = tex.rmsnorm_fwd(x, gamma, False, 1e-6, None)
    np.testing.assert_allclose(y.dequantize(), x * rstdev[:, None], rtol=1e-5)
    y, mean, _ = tex.layernorm_fwd(x, gamma, zeros(16), False, 1e-6, None)
    np.testing.assert_allclose(mean, x.mean(-1), atol=1e-6)
    with te.autocast(True, recipe.Float8CurrentScaling()):
        quantizer = te.quantize.QuantizerFactory.create_set().x
    codes, dbias = tex.quantize_dbias(x, quantizer)
    np.testing.assert_allclose(dbias, x.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(codes.dequantize(), x, atol=0.2)
    hidden = x.reshape(2, 2, 2, 8)
    z = tex.act_lu(hidden, ("silu", "linear")).data
    np.testing.assert_allclose(
        z, jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :], rtol=1e-4, atol=1e-6
    )
    assert tex.dact_lu(z, hidden, ("silu", "linear")).data.shape == hidden.shape
    np.testing.assert_allclose(
        tex.gemm(x, ones((16, 3))), x.sum(1, keepdims=True).repeat(3, 1), rtol=1e-4, atol=1e-4
    )
    groups = tex.grouped_gemm(x, ones((2, 16, 3)), array([1, 3]))
    np.testing.assert_allclose(groups, x.sum(1, keepdims=True).repeat(3, 1), rtol=1e-4, atol=1e-4)
    assert tex.grouped_quantize(x, None, array([1, 3])).dequantize() is x


@pytest.mark.parametrize(
    ("queries", "keys", "dtype", "remote"),
    [
        (16, 16, jnp.bfloat16, True),
        (16, 8, jnp.bfloat16, False),
        (16, 16, jnp.float32, False),
        (12, 64, jnp.float16, False),
    ],
)
def test_availability_of_a_softmax_kernel_by_scores(queries, keys, dtype, remote):
    kind, vanilla = (
        te.softmax.SoftmaxFusionType.SCALED,
        te.attention.AttnSoftmaxType.VANILLA_SOFTMAX,
    )
    assert tex.is_softmax_kernel_available(kind, vanilla, 2, 2, queries, keys, dtype) is remote


def test_collectives_change_no_value_and_have_a_counterpart():
    gather = tex.CollectiveOpSet.create(tex.CollectiveOp.ALL_GATHER)
    assert gather.backward is tex.CollectiveOp.REDUCE_SCATTER
    x, kernel = ones((4, 8)), ones((8, 2))
    np.testing.assert_array_equal(
        te.dense.dense(x, kernel, collective_op_set=gather), te.dense.dense(x, kernel)
    )
    tex.collective_gemm_bootstrap(8, 4, 1, 2)
    with pytest.raises(ValueError, match="does not divide num_total_devices=8"):
        tex.collective_gemm_bootstrap(8, 3, 0, 2)
    with pytest.raises(ValueError, match="process_id=2"):
        tex.collective_gemm_bootstrap(8, 4, 2, 2)
    with pytest.raises(TypeError, match=r"give one of CollectiveOp\.NONE"):
        tex.CollectiveOpSet.create("ALL_GATHER")


def test_enumerations_have_the_numbers_of_the_torch_side():
    import transformer_engine_torch as torch_enums

    for name in ("NVTE_Bias_Type", "NVTE_Mask_Type", "NVTE_QKV_Layout", "NVTE_Softmax_Type"):
        assert getattr(tex_enums, name) is getattr(torch_enums, name)
    for member in torch_enums.DType:
        assert tex_enums.DType[member.name] == member
    assert [m.value for m in tex_enums.JAXX_Scaling_Mode] == list(range(6))
    assert tex_enums.get_device_compute_capability(0) == te.quantize.get_device_compute_capability(
        0
    )
    assert not tex_enums.nvte_built_with_cublasmp()


def test_kernels_are_switched_off_by_their_names(monkeypatch):
    assert disabled_reason("GemmPrimitive") is None
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "GemmPrimitive=false,ActLuPrimitive=true")
    assert "GemmPrimitive=false" in (disabled_reason("GemmPrimitive") or "")
    assert disabled_reason("ActLuPrimitive") is None and disabled_reason("NormFwdPrimitive") is None
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    assert disabled_reason("NormFwdPrimitive") == "NVTE_JAX_CUSTOM_CALLS=false"
    for wrong in ("maybe", "GemmPrimitive=no", "NormFwdPrimitive=no,GemmPrimitive=true"):
        monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", wrong)
        with pytest.raises(ValueError, match="neither true nor false"):
            disabled_reason("GemmPrimitive")


def test_a_primitive_is_switched_off_by_its_class(monkeypatch):
    monkeypatch.setattr(launching, "_switched", {})
    assert GemmPrimitive.enabled() and NormFwdPrimitive.enabled()
    GemmPrimitive.set_enabled(False)
    assert not GemmPrimitive.enabled() and NormFwdPrimitive.enabled()
    assert disabled_reason("GemmPrimitive") == "GemmPrimitive.set_enabled(False) was called"
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    GemmPrimitive.set_enabled(True)
    assert GemmPrimitive.enabled() and not NormFwdPrimitive.enabled()
    with pytest.raises(NotImplementedError, match=r"jax\.ffi, or in Triton"):
        tex.register_primitive(GemmPrimitive)


def test_reference_functions_equal_the_operations():
    x, gamma = normal(jax.random.key(0), (4, 16)), ones(16)
    hidden = x.reshape(2, 2, 2, 8)
    plain = tex_quantization._jax_quantize_dbias(x, None)
    np.testing.assert_array_equal(plain[1], tex.quantize_dbias(x, None)[1])
    assert tex_quantization._jax_quantize(x, None).data is x
    y = tex_activation._jax_act_lu(hidden, ("silu", "linear")).data
    np.testing.assert_allclose(y, tex.act_lu(hidden, ("silu", "linear")).data, rtol=1e-6)
    dx, dbias = tex_activation._jax_quantize_dact_dbias(y, hidden, ("silu", "linear"))
    np.testing.assert_allclose(dx.data, tex.dact_lu(y, hidden, ("silu", "linear")).data, rtol=1e-6)
    np.testing.assert_allclose(dbias, dx.data.sum((0, 1)), rtol=1e-5, atol=1e-6)
    actual = tex_normalization._jax_rmsnorm(x, gamma, False, 1e-6)
    expected = tex.rmsnorm_fwd(x, gamma, False, 1e-6, None)[0].data
    np.testing.assert_allclose(actual[0].data, expected, rtol=1e-6)
    assert tex_normalization._jax_layernorm(x, gamma, gamma, False, 1e-6)[1].shape == (4,)
    scaling = te.quantize.ScalingMode.NO_SCALING
    assert not tex_normalization.is_norm_zero_centered_gamma_in_weight_dtype(scaling)


def test_libraries_have_versions_where_there_is_a_gpu():
    numbers = (
        tex_enums.get_cuda_version(),
        tex_enums.get_cudnn_version(),
        tex_enums.get_cublasLt_version(),
    )
    assert [number > 0 for number in numbers] == [has_gpu()] * 3
    assert any(get_cudnn_version()) is has_gpu()
    assert tex_enums.registrations() == {} and tex_enums.get_num_compute_streams() == 1


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("SB3HD", "SBHD"),
        ("BSHD_BSH2D", "BSHD"),
        ("THD_THD_THD", "THD"),
        ("Paged_KV_SBHD_BSHD_BSHD", "SBHD_2BSHD"),
    ],
)
def test_a_layout_has_an_order_of_axes(layout, axes):
    layouts, formats = tex_enums.NVTE_QKV_Layout, tex_enums.NVTE_QKV_Format
    assert tex_enums.nvte_get_qkv_format(layouts[f"NVTE_{layout}"]) is formats[f"NVTE_{axes}"]


def test_fused_attention_is_unavailable_where_the_reference_runs(monkeypatch):
    causal, vanilla = (
        tex_enums.NVTE_Mask_Type.NVTE_CAUSAL_MASK,
        tex_enums.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX,
    )

    def record_query(
        dtype, layout, bias=tex_enums.NVTE_Bias_Type.NVTE_NO_BIAS, mask=causal, softmax=vanilla
    ):
        return tex_enums.get_fused_attn_backend(
            True, dtype, dtype, layout, bias, mask, softmax, 0.0, 8, 8, 128, 128, 64, 64
        ).name

    monkeypatch.setattr(availability, "has_gpu", lambda: False)
    half, full = tex_enums.DType.kBFloat16, tex_enums.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    assert (
        record_query(half, full) == record_query(tex_enums.DType.kByte, full) == "NVTE_No_Backend"
    )
    with pytest.raises(ValueError, match="choose one of NVTE_BS3HD"):
        record_query(half, tex_enums.NVTE_QKV_Layout.NVTE_SBH3D)
    for kinds, name in (
        ((7, causal), "bias_type=7"),
        ((0, 6), "attn_mask_type=6"),
        ((0, 2, "x"), "softmax_type='x'"),
    ):
        with pytest.raises(ValueError, match=f"{name}; choose one of NVTE_"):
            record_query(half, full, *kinds)
    selection = lambda self: True  # noqa: E731
    monkeypatch.setattr(tex.FusedAttnHelper, "is_fused_attn_kernel_available", selection)
    assert record_query(half, full) == "NVTE_F16_arbitrary_seqlen"
    assert record_query(half, full, tex_enums.NVTE_Bias_Type.NVTE_ALIBI) == "NVTE_No_Backend"


def test_score_mod_config_equals_separate_score_mod_arguments():
    config = tex.make_fused_attn_score_mod_config(jnp.tanh, score_mod_tensors=1.0)
    assert vars(config)["score_mod"] is jnp.tanh and vars(config)["score_mod_tensors"] == 1.0
    with pytest.raises(ValueError, match="give both, or neither"):
        tex.make_fused_attn_score_mod_config(None, jnp.tanh)


def test_a_missing_flag_of_xla_warns_once(monkeypatch):
    monkeypatch.setattr(float8, "has_gpu", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "")
    float8._warn.cache_clear()
    request = float8.GemmRequest(
        a_format=None,
        b_format=None,
        a_element=jnp.dtype(jnp.float8_e4m3fn),
        b_element=jnp.dtype(jnp.float8_e4m3fn),
        m=16,
        n=16,
        k=16,
        dtype=jnp.dtype(jnp.bfloat16),
        platform="cuda",
        hardware=nvidia(9, 0),
        exact=False,
    )
    with pytest.warns(UserWarning, match="--xla_gpu_enable_triton_gemm=false") as observed:
        float8.bind_direct(request)
        float8.bind_direct(request)
    assert len([w for w in observed if w.category is UserWarning]) == 1
    float8._warn.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    assert get_xla_flag("--xla_gpu_enable_triton_gemm") is False


def test_versions_of_jax_are_compared_as_numbers():
    assert jax_version_meet_requirement("0.5.3") and not jax_version_meet_requirement("1.0")


def test_a_module_within_nnx_trains_and_keeps_its_state():
    x = normal(jax.random.key(0), (8, 16))
    with te.autocast(True, DELAYED):
        model = bridged(te_flax.DenseGeneral(features=4), nnx.Rngs(0), x)

        @nnx.jit
        def step(model, x):
            value, gradients = value_and_grad(lambda model, x: (model(x) ** 2).mean(), model, x)
            nnx.update(
                model,
                jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients),
            )
            return value

        losses = [float(step(model, x)) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    metas = nnx.state(model, state_type())
    scales = {path[-1]: leaf for path, leaf in nnx.to_flat_state(metas)}
    np.testing.assert_array_equal(scales["x_amax_history"][...][-3:], jnp.full(3, jnp.abs(x).max()))
    with pytest.raises(TypeError, match=r"give a module of flax\.linen"):
        bridged(nn.Dense, nnx.Rngs(0), x)


def test_an_optimizer_of_nnx_takes_the_gradients():
    x = normal(jax.random.key(0), (8, 16))
    with te.autocast(True, DELAYED):
        model = bridged(te_flax.DenseGeneral(features=4), nnx.Rngs(0), x)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        losses = []
        for _ in range(3):
            value, gradients = value_and_grad(lambda model, x: (model(x) ** 2).mean(), model, x)
            optimizer.update(model, gradients)
            losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    assert model.x_amax_history[...][-1] == jnp.abs(x).max()


def test_a_model_of_nnx_that_a_loss_calls_twice_keeps_the_larger_amax():
    x = normal(jax.random.key(0), (8, 16))
    with te.autocast(True, DELAYED):
        model = bridged(te_flax.DenseGeneral(features=4), nnx.Rngs(0), x)
        value_and_grad(lambda model: (model(x) ** 2).mean() + (model(5 * x) ** 2).mean(), model)
    assert model.x_amax_history[...][-1] == jnp.abs(5 * x).max()
    assert model.x_scale[...][0] == np.float32(448) / np.abs(5 * np.asarray(x)).max()
    assert (
        model.kernel_scale[...][0] == np.float32(448) / np.abs(np.asarray(model.kernel[...])).max()
    )


def test_a_loss_of_nnx_takes_keywords_and_returns_auxiliary_values():
    x = normal(jax.random.key(0), (8, 16))

    def loss(model, x, *, factor):
        y = model(x)
        return factor * (y**2).mean(), y

    with te.autocast(True, DELAYED):
        model = bridged(te_flax.DenseGeneral(features=4), nnx.Rngs(0), x)
        ones, _ = value_and_grad(lambda model, x: (model(x) ** 2).mean(), nnx.clone(model), x)
        (value, y), gradients = value_and_grad(loss, model, x, has_aux=True, factor=3.0)
    np.testing.assert_allclose(value, 3 * ones, rtol=1e-6)
    np.testing.assert_allclose(value, 3 * (y**2).mean(), rtol=1e-6)
    assert gradients["kernel"][...].shape == (16, 4)
    assert model.x_amax_history[...][-1] == jnp.abs(x).max()


def test_a_keyword_of_a_loss_may_be_an_object_of_nnx_that_it_changes():
    x, rngs = ones((8, 16)), nnx.Rngs(noise=0)

    def loss(model, x, *, rngs, mode):
        assert mode == "noisy"
        return (model(x + jax.random.normal(rngs.noise(), x.shape)) ** 2).mean()

    model = bridged(te_flax.DenseGeneral(features=4), nnx.Rngs(0), x)
    first, second = (
        float(value_and_grad(loss, model, x, rngs=rngs, mode="noisy")[0]) for _ in range(2)
    )
    assert first != second and int(rngs.noise.count[...]) == 2


@pytest.mark.parametrize("module", [te_flax.LayerNorm(), te_flax.LayerNormMLP(intermediate_dim=8)])
def test_a_module_with_names_of_axes_needs_no_mesh_within_nnx(module):
    x = normal(jax.random.key(0), (8, 16))
    with te.autocast(True, DELAYED):
        model = bridged(module, nnx.Rngs(0), x)
        _, gradients = value_and_grad(lambda model: jax.tree.leaves(model(x))[0].sum(), model)
    beta = gradients["ln_bias"][...]
    assert beta.shape == (16,) and float(jnp.abs(beta).max()) > 0


SETTINGS = {
    "attn_bias_type": attention.AttnBiasType.POST_SCALE_BIAS,
    "attn_mask_type": attention.AttnMaskType.CAUSAL_MASK,
    "qkv_layout": attention.QKVLayout.BSHD_BS2HD,
    "softmax_type": attention.AttnSoftmaxType.LEARNABLE_SOFTMAX,
    "scaling_factor": 0.3,
    "dropout_probability": 0.0,
    "is_training": True,
}


def test_separate_attention_passes_match_the_attention_equation():
    """The saved arrays pass from one compiled program to another."""
    keys = jax.random.split(jax.random.key(0), 5)
    query, kv = normal(keys[0], (2, 6, 2, 8)), normal(keys[1], (2, 6, 2, 2, 8))
    bias, sink = normal(keys[2], (1, 2, 6, 6)), normal(keys[3], (1, 2, 1, 1))
    dout = normal(keys[4], query.shape)

    def equation(qkv, bias, sink):
        scores = 0.3 * jnp.einsum("bqhd,bkhd->bhqk", qkv[0], qkv[1][:, :, 0]) + bias
        scores = jnp.where(jnp.tri(6, dtype=bool), scores, -jnp.inf)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (2, 2, 6, 1))], -1)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores)[..., :-1], qkv[1][:, :, 1])

    args = (query, kv), bias, None, None
    forward = jax.jit(
        lambda *arguments, sink: tex.fused_attn_fwd(*arguments, **SETTINGS, softmax_offset=sink)
    )
    output, saved, state, _ = forward(*args, sink=sink)
    expected, pullback = jax.vjp(equation, (query, kv), bias, sink)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    backward = jax.jit(
        lambda *arguments: tex.fused_attn_bwd(*arguments, None, softmax_offset=sink, **SETTINGS)
    )
    actual = backward((query, kv), bias, saved, state, output, dout)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), actual, pullback(dout))


def test_separate_attention_passes_form_a_custom_vjp_with_equal_dropout():
    query, key, value = normal(jax.random.key(0), (3, 2, 6, 2, 8))
    settings = (
        attention.AttnBiasType.NO_BIAS,
        attention.AttnMaskType.NO_MASK,
        attention.QKVLayout.BSHD_BSHD_BSHD,
        attention.AttnSoftmaxType.VANILLA_SOFTMAX,
        0.3,
        0.5,
        True,
    )

    @jax.custom_vjp
    def attend(qkv, seed):
        return tex.fused_attn_fwd(qkv, None, None, seed, *settings)[0]

    def forward(qkv, seed):
        output, saved, state, _ = tex.fused_attn_fwd(qkv, None, None, seed, *settings)
        return output, (qkv, saved, state, output)

    def backward(remaining, dout):
        qkv, saved, state, output = remaining
        gradients, of_bias, of_sink = tex.fused_attn_bwd(
            qkv, None, saved, state, output, dout, None, *settings
        )
        assert of_bias is None and of_sink is None
        return gradients, None

    attend.defvjp(forward, backward)

    def whole(qkv, seed):
        return attention.fused_attn(qkv, None, None, seed, *settings)

    actual, expected = (
        jax.grad(lambda qkv, function=function: (function(qkv, jax.random.key(3)) ** 2).sum())(
            (query, key, value)
        )
        for function in (attend, whole)
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), actual, expected
    )


def test_attention_backward_rejects_arrays_that_the_forward_did_not_save():
    x = ones((1, 4, 1, 8))
    with pytest.raises(
        TypeError, match="is not a result of fused_attn_fwd; pass its second result"
    ):
        tex.fused_attn_bwd((x, x, x), None, ones((1, 1, 4, 1)), None, x, x)
