"""Kernels that quantize their results: their rules fit their arrays, and a quantized MLP for CUDA uses them."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from tests.jax.compiled import ones, values_and_gradients, zeros
from transformer_engine.common.dispatch import observing
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E4M3, FLOAT8, MXFP8
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.primitives import launching
from transformer_engine.jax.primitives.activation import ActivationParams
from transformer_engine.jax.primitives.activation import triton as activations
from transformer_engine.jax.primitives.activation_codes import TABLE as ACTIVATION_CODES
from transformer_engine.jax.primitives.activation_codes import activation_backward_codes
from transformer_engine.jax.primitives.activation_codes import triton as activation_codes
from transformer_engine.jax.primitives.norm import triton as norms
from transformer_engine.jax.primitives.norm_codes import triton as norm_codes
from transformer_engine.jax.primitives.partitioning import ParsedRule
from transformer_engine.jax.primitives.quantize import OutputCast
from transformer_engine.jax.primitives.scale_update import triton as scale_update
from transformer_engine.jax.primitives.several_axes import OverVmap, SeveralAxes
from transformer_engine.jax.quantize import QuantizeMeta, QuantizeMetaSet, QuantizerFactory

UNSUPPORTED = launching.kernels_unsupported_reason()
needs_bridge = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)
NAMES, PARAMS = ("silu", "linear"), ActivationParams()
SPECS = {
    f"{form.name}{' both' * both}": QuantizeSpec(form, E4M3, columnwise=both)
    for form, both in itertools.product((FLOAT8, BLOCK_1D, BLOCK_2D), (False, True))
}


def shape(*extents, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(extents, dtype)


ONE = shape(1, dtype=jnp.float32)
X, DY, ROWS, GAMMA = shape(256, 2, 384), shape(256, 384), shape(256, 384), shape(384)


def kernels_with_operands():
    for name, spec in SPECS.items():
        scale = [ONE] * (spec.format == FLOAT8)
        yield (
            f"forward {name}",
            activation_codes.ActivationCodes(NAMES, PARAMS, spec, (256, 384), 384),
            [X, *scale],
        )
        for sums in (None, "bfloat16"):
            kernel = activation_codes.GradientCodes(NAMES, PARAMS, spec, (256, 768), 384, sums)
            yield f"backward {name} sums={sums}", kernel, [DY, X, *scale]
    yield "measured", activation_codes.MeasuredActivation(NAMES, PARAMS, False), [X]
    yield (
        "measured backward",
        activation_codes.MeasuredActivation(NAMES, PARAMS, True, "bfloat16"),
        [DY, X],
    )
    yield "plain", activations.ActivationForward(NAMES, PARAMS), [X]
    yield "plain backward", activations.ActivationBackward(NAMES, PARAMS), [DY, X]
    for centered in (False, True):
        args = [ROWS, GAMMA, *[GAMMA] * centered]
        for both in (False, True):
            kernel = norm_codes.ScaledNormCodes(
                centered, False, 1e-5, QuantizeSpec(FLOAT8, E4M3, columnwise=both)
            )
            yield f"norm {centered} {both}", kernel, [*args, ONE]
        statistics = [shape(256, dtype=jnp.float32)] * (1 + centered)
        for adds in (False, True):
            backward = norms.NormBackward(centered, False, "bfloat16", adds)
            yield (
                f"norm backward {centered} {adds}",
                backward,
                [*[ROWS] * (2 + adds), GAMMA, *statistics],
            )
        yield f"norm measured {centered}", norm_codes.MeasuredNorm(centered, False, 1e-5), args
        blocks = norm_codes.BlockNormCodes(centered, False, 1e-5, QuantizeSpec(BLOCK_1D, E4M3))
        yield f"norm blocks {centered}", blocks, args
    for states in (1, 3, 6):
        kernel = scale_update.AdvanceScales(True, (448.0,) * states, 0.0)
        history = shape(16, dtype=jnp.float32)
        yield f"{states} states", kernel, [*[history] * states, *[ONE] * (2 * states)]


def test_a_rule_has_a_factor_for_every_axis_of_a_kernels_arrays():
    for name, kernel, operands in kernels_with_operands():
        rule, results = ParsedRule.of(kernel.rule.text), kernel.results(*operands)
        for arrays, said in ((operands, rule.operands), (results, rule.results)):
            assert [array.ndim for array in arrays] == [len(axes) for axes in said], (
                name,
                kernel.rule.text,
            )
        assert all(
            position < len(results) for position in (*kernel.rule.summed, *kernel.rule.maxed)
        ), name
        for index in kernel.rule.maxed:
            assert results[index].shape == (1,), name
        for index in kernel.rule.summed:
            assert kernel.in_parts.results(*operands)[index].dtype == jnp.float32, name


def test_wrapped_kernels_keep_the_kernel_metadata():
    """If a wrapper lost `summed` or `maxed`, devices would not reduce the sums or maxima of their shards."""
    for case, kernel, operands in kernels_with_operands():
        for wrapped in (SeveralAxes(kernel, ()), OverVmap(kernel, (True,) * len(operands))):
            assert wrapped.name == kernel.name, (case, wrapped)
            for fact in ("led_by_results", "summed", "maxed"):
                assert getattr(wrapped.rule, fact) == getattr(kernel.rule, fact), (
                    case,
                    wrapped,
                    fact,
                )
            assert wrapped.in_parts == dataclasses.replace(wrapped, kernel=kernel.in_parts), (
                case,
                wrapped,
            )


def quantizers():
    metas = [
        QuantizeMeta(scale=jnp.full(1, scale), amax_history=zeros(4)) for scale in (3.0, 5.0, 7.0)
    ]
    return QuantizerFactory.create_set(
        fp8_recipe=DelayedScaling(amax_history_len=4), quantize_meta_set=QuantizeMetaSet(*metas)
    )


def mlp(x, gamma, kernels, sets):
    return layernorm_mlp(
        x, gamma, None, kernels, (None, None), "rmsnorm", activation_type=NAMES, quantizer_sets=sets
    )


ARGUMENTS = (
    lambda: ones((32, 128), jnp.bfloat16), lambda: ones(128),
    lambda: [ones((128, 2, 256), jnp.bfloat16) * 0.1, ones((256, 128), jnp.bfloat16) * 0.1],
    lambda: (quantizers(), quantizers()),
)  # fmt: skip


@needs_bridge
def test_a_quantized_mlp_on_cuda_has_one_kernel_per_tensor(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    arguments = [make() for make in ARGUMENTS]

    def step(*arguments):
        y, pullback = jax.vjp(mlp, *arguments)
        return y, pullback(jnp.ones_like(y))

    text = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    # Norm and its transpose, two kernels, the activation; dy, the activation's gradient; the norm's gradient and its
    # sums; six states in one; six products.
    assert len(re.findall("triton_kernel_call_ffi", text)) == 2 + 2 + 1 + 1 + 1 + 2 + 1 + 6
    # Kernels read a scale of 0 as 1; a separate operation before each would be another kernel.
    assert re.findall(r"stablehlo\.(?:compare|select).*tensor<1xf32>", text) == []


def test_both_products_of_an_mlp_advance_their_states():
    arguments = [make() for make in ARGUMENTS]
    dy = ones((32, 128), jnp.bfloat16)
    y, _, _, kernels, sets = values_and_gradients(mlp, dy, *arguments)
    assert y.shape == dy.shape and [k.shape for k in kernels] == [(128, 2, 256), (256, 128)]
    for one in sets:
        for quantizer in (one.x, one.kernel, one.dgrad):
            assert float(quantizer.amax_history[-1]) > 0 and float(quantizer.scale[0]) > 0


def test_unsupported_quantization_has_a_reason(monkeypatch):
    for module in ("activation.triton", "quantize.triton"):
        monkeypatch.setattr(
            f"transformer_engine.jax.primitives.{module}.platform_failure",
            lambda platform, name: None,
        )
    records = []
    with observing(lambda operation, request: records.append((operation, request))):
        for spec, width in ((QuantizeSpec(MXFP8, E4M3), 256), (SPECS["block2d both"], 160)):
            x, dy = ones((64, 2, width), jnp.bfloat16), ones((64, width), jnp.bfloat16)
            jax.eval_shape(
                lambda dy, x, s=spec: activation_backward_codes(
                    dy, x, OutputCast(s), NAMES, PARAMS, None
                )[0],
                dy,
                x,
            )
    requests = [
        request for operation, request in records if operation == ACTIVATION_CODES.operation
    ]
    reasons = [activation_codes.unsupported_reason(request) for request in requests]
    assert any("format mxfp8" in (reason or "") for reason in reasons)
    assert any("no multiple of 128" in (reason or "") for reason in reasons)
