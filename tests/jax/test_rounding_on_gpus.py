"""Programs have a barrier where XLA for GPUs would skip a rounding, or round a value that must stay float32.

XLA for CPUs does neither. These tests therefore inspect programs lowered for CUDA; the test marked gpu runs one.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.bits import matrix
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.jax.primitives.gemm import gemm
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.jax.primitives.quantize import Quantized, dequantize, quantize

SPECS = {
    "float8": QuantizeSpec(FLOAT8, E4M3),
    "float8 of gradients": QuantizeSpec(FLOAT8, E5M2),
    "blocks": QuantizeSpec(BLOCK_1D, E4M3),
    "squares": QuantizeSpec(BLOCK_2D, E4M3),
    "mxfp8": QuantizeSpec(MXFP8, E4M3),
    "nvfp4": QuantizeSpec(NVFP4, E2M1),
}
# Codes: a conversion, and what selects NaNs among their bytes.
CODES = re.compile(
    r"(%\w+) = stablehlo\.(?:convert %\w+ : |bitcast_convert %\w+ : \(tensor<(?:\d+x)*ui8>\)).*"
    r"-> tensor<(?:\d+x)*f[48]E(?!8M0)\w+>"
)
BYTES = re.compile(r"stablehlo\.bitcast_convert %\w+ : .*-> tensor<(?:\d+x)*ui8>")


def reference_codes(x, spec: QuantizeSpec) -> Quantized:
    with use_backend(jax_quantize="reference"):
        return quantize(x, spec)


def values(result: Quantized, spec: QuantizeSpec) -> jax.Array:
    return dequantize(
        Operand(result.codes, result.scale, result.amax, spec.format, jnp.dtype(jnp.float32))
    )


@pytest.mark.parametrize("name", SPECS)
def test_codes_are_rounded_before_their_program_reads_them(name, monkeypatch):
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    spec, x = SPECS[name], jax.ShapeDtypeStruct((128, 256), jnp.float32)
    program = jax.jit(lambda x: values(quantize(x, spec), spec))
    text = program.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in text
    result = 0
    for function in text.split("func.func")[1:]:
        for code in CODES.findall(function):
            number = re.compile(re.escape(code) + r"\b")
            readers = [
                line for line in function.splitlines() if number.search(line.partition("=")[2])
            ]
            guarded = ["optimization_barrier" in line for line in readers]
            # A reader of bytes cannot be merged with the conversion; every other reader needs the barrier.
            assert readers and all(
                barrier or BYTES.search(line)
                for barrier, line in zip(guarded, readers, strict=True)
            ), readers
            result += any(guarded)
    assert result == 1


@pytest.mark.gpu
@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize("name", SPECS)
def test_values_in_the_program_of_codes_equal_the_codes(name):
    spec, x = SPECS[name], jnp.asarray(matrix("normal", (128, 256), "float32"))

    def both(x):
        output = reference_codes(x, spec)
        return output, values(output, spec)

    result, actual = jax.jit(both)(x)
    expected = jax.jit(lambda output: values(output, spec))(result)
    np.testing.assert_array_equal(actual, expected)
    assert not np.array_equal(actual, x)


def test_the_scale_of_a_product_in_cublaslt_stays_float32(monkeypatch):
    """The barrier precedes a conversion that XLA would otherwise remove together with the one back to float32."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    codes, scale = (
        jax.ShapeDtypeStruct(*one) for one in (((32, 64), jnp.float8_e4m3fn), ((1,), jnp.float32))
    )

    def product(a, scale_a, b, scale_b):
        operands = [
            Operand(c, s, None, FLOAT8, jnp.dtype(jnp.bfloat16))
            for c, s in ((a, scale_a), (b, scale_b))
        ]
        return gemm(*operands, jnp.dtype(jnp.bfloat16))

    text = (
        jax.jit(product)
        .trace(codes, scale, codes, scale)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    narrowed = re.findall(r"stablehlo\.convert (%[\w#]+) : \(tensor<f32>\) -> tensor<bf16>", text)
    # One barrier for both products: without it, XLA would merge products that share an operand's values.
    (saved,) = re.findall(
        r"(%\w+):2 = stablehlo\.optimization_barrier %\w+, %\w+ : tensor<f32>, tensor<f32>", text
    )
    assert sorted(narrowed) == [f"{saved}#0", f"{saved}#1"]
