"""Kernels sharded over devices by their rules, with the values of one device; lowered for CUDA without a GPU."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.jax.compiled import array, normal, ones, zeros
from tests.jax.test_sharding import run_on_host_devices
from tests.support.tolerances import LAYERS_OVER_DEVICES
from transformer_engine.common import formats
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E2M1, E4M3, FLOAT8
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.quantize_spec import QuantizeSpec
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    fused_attn,
)
from transformer_engine.jax.attention import SequenceDescriptor as Descriptor
from transformer_engine.jax.dense import grouped_dense
from transformer_engine.jax.primitives import launching
from transformer_engine.jax.primitives.attention.request import AttentionRequest
from transformer_engine.jax.primitives.attention.triton import (
    unsupported_reason as attention_unsupported_reason,
)
from transformer_engine.jax.primitives.attention.triton_kernels import head_factors
from transformer_engine.jax.primitives.gemm import TABLE, decoded, gemm
from transformer_engine.jax.primitives.gemm.codes_product import one_group
from transformer_engine.jax.primitives.gemm.request import GemmRequest
from transformer_engine.jax.primitives.grouped_gemm import grouped_contraction, grouped_gemm
from transformer_engine.jax.primitives.operand import Operand
from transformer_engine.jax.primitives.partitioning import (
    ParsedRule,
    ShardingRule,
    extent,
    order_factors,
    placement,
    unknown_sizes,
)
from transformer_engine.jax.primitives.quantize import quantize
from transformer_engine.jax.quantize import QuantizeMeta, QuantizeMetaSet, QuantizerFactory

UNSUPPORTED = launching.kernels_unsupported_reason()
needs_bridge = pytest.mark.skipif(
    UNSUPPORTED is not None, reason=f"no kernel can be lowered for CUDA here: {UNSUPPORTED}"
)


def run_on_eight_devices(program: str, *options: str) -> tuple[dict, str]:
    """Run a program on eight host devices; return the JSON that it prints and its stderr."""
    printed, said = run_on_host_devices(Path(__file__).with_name(program), *options)
    return json.loads(printed.splitlines()[-1]), said


def test_sharded_kernels_follow_their_rules_and_agree_with_one_device():
    result, said = run_on_eight_devices("host_kernels.py")
    warned = [
        line for line in said.splitlines() if "UserWarning: a program over several devices" in line
    ]
    assert len(warned) == 1 and "jax.set_mesh(mesh)" in warned[0], (
        "programs without a mesh say so once"
    )
    gathers = {name: result.pop(name) for name in [*result] if name.endswith(": gathers")}
    assert result.pop("ragged exchanges between GPUs") >= 4, "rows and weights, there and back"
    assert result.pop("misnamed") == 0
    assert result.pop("not cut") == 0, "the partitioner would take a kernel for one whole"
    assert all(value < 1e-5 for value in result.values()), result
    # No communication unless a shard splits a block, an operand has another sharding, or one axis shards both rows.
    free = (
        "rows",
        "both axes",
        "one axis twice",
        "blocks",
        "columns",
        "contraction",
        "heads",
        "a mask",
        "a mask of one row",
        "rows and features of two axes",
        "contraction of two axes",
        "of all that are mapped",
        "maxima of several axes",
        "blocks of several axes",
    )
    assert not any(gathers[f"{name}: gathers"] for name in free), gathers


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--others",), marks=pytest.mark.slow)], ids=str
)
def test_layers_exchange_only_the_expected_arrays(options):
    """Devices exchange no kernel under tensor parallelism, and only codes for a sharded kernel.

    Block formats also exchange scales, one per 16 or 32 elements, if several axes are the rows or columns of a matrix.
    """
    result, said = run_on_eight_devices("host_layers.py", *options)
    assert "without a mesh" not in said
    for case, facts in result.items():
        _, recipe, layout = case.split()
        for part, tolerance in LAYERS_OVER_DEVICES[recipe].items():
            assert facts[part] < tolerance, (case, part, facts)
        assert {kind for kind, *_ in facts["exchanged"]} <= {"all-gather", "all-reduce"}, (
            case,
            facts,
        )
        gathers = [
            (dtype, shape) for kind, dtype, shape in facts["exchanged"] if kind == "all-gather"
        ]
        if facts["in blocks"]:
            # Scales are an eighth of codes at most, and a row of them, on two axes too, is short.
            scales = {
                True: facts["tokens"] * facts["width"] / 8,
                False: facts["smallest kernel"] / 8,
            }
            gathers = [
                (dtype, shape)
                for dtype, shape in gathers
                if prod(shape) > scales[has_token_axis(shape, facts)] and prod(shape[-2:]) >= 64
            ]
        tokens = [dtype for dtype, shape in gathers if has_token_axis(shape, facts)]
        kernels = [dtype for dtype, shape in gathers if not has_token_axis(shape, facts)]
        # XLA for a CPU carries codes as float16, bfloat16 as float32.
        assert set(kernels) <= {"f16"}, (case, gathers)
        both_directions = 2 * facts["kernels"] if layout in ("fsdp", "both") else 0
        assert len(kernels) == both_directions, (case, gathers)
        assert bool(tokens) == (layout in ("tpsp", "both")), (case, gathers)
        # Values are gathered where two products read them with two scales: after an attention's norm, which
        # the kernel gradient reads again. Blocks have scales of their own.
        assert recipe == "values" or tokens.count("f32") <= (0 if facts["in blocks"] else 2), (
            case,
            gathers,
        )


def has_token_axis(shape: list[int], facts: dict[str, Any]) -> bool:
    """Whether an array has a token axis, or an axis over blocks of 16 or 32 tokens."""
    return any(
        facts["tokens"] // block in shape
        for block in (1, *((16, 32) if facts["in blocks"] else ()))
    )


MESH: Any = jax.sharding.AbstractMesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def propose_sharding(spec, *shape):
    return jax.ShapeDtypeStruct(
        shape, jnp.bfloat16, sharding=NamedSharding(MESH, PartitionSpec(*spec))
    )


@pytest.mark.parametrize(
    ("a", "b", "out", "cuts", "reduced"),
    [
        (("tp", None), (None, "tp"), ("tp", None), "m", ()),  # kernel shards, with all tokens
        (("tp", None), ("tp", None), (None, "tp"), "n", ()),  # token shards, with all their columns
        (("tp", None), ("tp", None), (), "m", ()),
        ((None, "tp"), (None, "tp"), ("tp", None), "k", ("tp",)),
        ((None, "tp"), (), (), "k", ("tp",)),
    ],
)
def test_a_mesh_axis_shards_the_axis_of_both_operands_or_of_the_result(a, b, out, cuts, reduced):
    operands, results = (
        [propose_sharding(a, 16, 32), propose_sharding(b, 24, 32)],
        [propose_sharding(out, 16, 24)],
    )
    placed = placement(
        ShardingRule("m k, n k -> m n", led_by_results=True), MESH, operands, results
    )
    expected = [
        tuple("tp" if factor == cuts else None for factor in axes) for axes in ("mk", "nk", "mn")
    ]
    assert [tuple(one.spec) for one in (*placed.operands, *placed.results)] == expected
    assert placed.reduced == (reduced,)


@pytest.mark.slow
def test_attention_of_cudnn_takes_arrays_with_other_shardings():
    """JAX's own rules do not support sharded tokens, or keys and lengths sharded differently from queries."""
    result, _ = run_on_eight_devices("host_cudnn.py")
    rounded = {
        name: result.pop(name)
        for name in ("a bias of all rows", "a bias of one query", "under vmap")
    }
    assert all(value < 1e-2 for value, _ in rounded.values()), "sums of bfloat16 in another order"
    assert rounded["under vmap"][1] == 0, "one call for all"
    assert all(value < 2**-8 for value, _ in result.values()), (
        f"more than one rounding of bfloat16, where sums in float32 may take another order: {result}"
    )
    assert result["heads"][1] == result["lengths"][1] == 0, (
        "arrays that are sharded alike are not gathered"
    )


@needs_bridge
def test_attention_of_a_sharded_sequence_runs_kernels_of_one_device():
    """Three blocks forward and three of three kernels backward; no array is larger than the queries, scores least.

    With a causal window that reaches one chunk, two blocks; with a window to both sides, three.
    """
    result, _ = run_on_eight_devices("host_parts.py")
    for name, facts in result["cuda"].items():
        assert (
            facts["kernels"] == (2 + 2 * 3 if name == "causal window" else 3 + 3 * 3)
            and facts["largest"] == facts["queries"]
        ), result
    for strategy, moves in (("ALL_GATHER", "all-gather"), ("RING", "collective-permute")):
        facts = result["cudnn"][strategy]
        assert facts["difference"] < 1e-2, "gradients are rounded to bfloat16 block by block"
        assert facts["moves"] == [moves], "batches and heads stay where they are"
    assert all(value < 2e-5 for value in result["within"].values()), result["within"]
    assert "triton: tokens over devices with" in result["explained"]["window of other keys"]
    for selection in ("whole", "causal window", "window"):
        assert "tokens over devices" not in result["explained"][selection]


def test_a_rule_has_factors_and_the_sizes_that_no_axis_determines():
    assert ParsedRule.of("r (k b), w -> k r").operands == ((("r",), ("k", "b")), (("w",),))
    assert unknown_sizes("r (k b) -> k r, (k c)", {"k": 2, "b": 3, "c": 4}) == {"b": 3, "c": 4}
    assert extent("m", 256, 128).whole == "(m min)"
    assert (
        extent("m", 200, 128).replicated
        == extent("m", 128, 128).replicated
        == ("m", "min", "mhalf")
    )
    assert head_factors(1, 4) == "r", "Shardy rejects a factor of one element next to another"
    assert order_factors("b s (g r) d, b t -> b s", ("r", "d", "s", "t")) == ("s", "r", "d", "t"), (
        "as Shardy demands"
    )
    assert extent("m", 200, 1).blocks == "m"


def lower_for_cuda(function, *arguments) -> int:
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("triton_kernel_call_ffi")


SPECS = {
    "delayed": (QuantizeSpec(FLOAT8, E4M3, columnwise=True), True, 1),
    "current": (QuantizeSpec(FLOAT8, E4M3, columnwise=True), False, 2),
    "blocks": (QuantizeSpec(BLOCK_1D, E4M3, columnwise=True), False, 1),
    "squares": (QuantizeSpec(BLOCK_2D, E4M3, columnwise=True), False, 1),
    "mxfp8": (QuantizeSpec(formats.MXFP8, E4M3, columnwise=True), False, 1),
    "nvfp4": (
        QuantizeSpec(formats.NVFP4, E2M1, columnwise=True, hadamard=True, stochastic=True),
        False,
        3,
    ),
    "4over6": (
        QuantizeSpec(
            formats.NVFP4_256, E2M1, columnwise=True, two_dimensional=True, four_over_six="MSE"
        ),
        False,
        2,
    ),
    "rows": (QuantizeSpec(formats.NVFP4_ROWS, E2M1, columnwise=True), False, 3),
}


@needs_bridge
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.sampled(3)
def test_quantization_is_kernels_on_cuda_also_inside_shard_map(name, monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    spec, scaled, kernels = SPECS[name]
    x = ones((128, 256), jnp.bfloat16)
    random = (zeros(x.shape), zeros(x.shape[::-1])) if spec.stochastic else None

    def create(x):
        return quantize(x, spec, multiplier=ones(1) if scaled else None, random=random)

    assert lower_for_cuda(create, x) == kernels
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    full = PartitionSpec()
    mapped = jax.shard_map(create, mesh=mesh, in_specs=full, out_specs=full, check_vma=False)
    assert lower_for_cuda(mapped, x) == kernels


@needs_bridge
@pytest.mark.parametrize(("shape", "axis"), [((4, 128, 2, 256), 2), ((128, 3, 24), 1)])
@pytest.mark.parametrize("name", ["blocks", "squares", "mxfp8", "nvfp4", "rows"])
@pytest.mark.sampled(3)
def test_block_codes_over_several_axes_equal_the_matrix_codes(name, shape, axis, monkeypatch):
    """The number of kernels is the same; the second case has blocks across two axes."""
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    (spec, *_), x = SPECS[name], normal(jax.random.key(0), shape, jnp.bfloat16)
    rows, columns = prod(shape[:axis]), prod(shape[axis:])
    random = [
        jax.random.uniform(jax.random.key(1), one) for one in ((rows, columns), (columns, rows))
    ]

    def create(x, axis):
        return quantize(x, spec, random=tuple(random) if spec.stochastic else None, axis=axis)

    def matrix_codes(x):
        return create(x.reshape(rows, columns), 1)

    for got, expected in zip(
        *map(jax.tree.leaves, (create(x, axis), matrix_codes(x))), strict=True
    ):
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    assert lower_for_cuda(lambda x: create(x, axis), x) == lower_for_cuda(matrix_codes, x)


def operand(form, rows, depth):
    scales = {
        "float8": (1,),
        "block1d": (rows, depth // 128),
        "block2d": (-(-rows // 128), depth // 128),
    }
    codes = ones((rows, depth), jnp.float8_e4m3fn)
    return Operand(codes, ones(scales[form.name]), None, form, jnp.dtype(jnp.bfloat16))


@needs_bridge
@pytest.mark.parametrize("forms", [(FLOAT8, FLOAT8), (BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D)])
def test_products_of_codes_are_a_kernel_on_cuda_with_the_values_of_the_reference_here(
    forms, monkeypatch
):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    a, b = operand(forms[0], 64, 256), operand(forms[1], 160, 256)
    product = jax.jit(lambda a, b: gemm(a, b, jnp.dtype(jnp.bfloat16)))
    assert lower_for_cuda(product, a, b) == 1
    if jax.default_backend() == "cpu":
        assert float(product(a, b)[0, 0]) == 256


@needs_bridge
def test_products_of_codes_with_several_axes_are_one_product_of_matrices_on_cuda(monkeypatch):
    """cuBLASLt's form, also under vmap: XLA only supports matrix products; a loop has one call per matrix."""
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    a, b = operand(FLOAT8, 64, 256), operand(FLOAT8, 160, 256)
    a = dataclasses.replace(a, codes=a.codes.reshape(4, 16, 256), axis=2)
    b = dataclasses.replace(b, codes=b.codes.reshape(2, 80, 256), axis=2)

    def product(codes):
        return gemm(dataclasses.replace(a, codes=codes), b, jnp.dtype(jnp.bfloat16))

    for function, codes, result in (
        (product, a.codes, "tensor<64x160xbf16>"),
        (jax.vmap(product), ones((3, *a.codes.shape), a.codes.dtype), "tensor<3x64x160xbf16>"),
    ):
        text = jax.jit(function).trace(codes).lower(lowering_platforms=("cuda",)).as_text()
        (dot,) = (line for line in text.splitlines() if "stablehlo.dot_general" in line)
        assert dot.endswith(result) and "stablehlo.while" not in text
        if jax.default_backend() == "cpu":
            output = function(codes)
            assert output.shape == (*codes.shape[:-1], 2, 80) and float(output.ravel()[0]) == 256


def test_contracted_axes_that_differ_have_a_reason():
    a, b = operand(FLOAT8, 64, 256), operand(FLOAT8, 160, 256)
    b = dataclasses.replace(b, codes=b.codes.reshape(160, 2, 128))
    with pytest.raises(ValueError, match="contract 256 and 2 x 128 elements"):
        gemm(a, b, jnp.dtype(jnp.bfloat16))
    with pytest.raises(ValueError, match="axis=3 leaves no rows or no columns"):
        quantize(ones((2, 3, 4)), SPECS["delayed"][0], axis=3)


@needs_bridge
@pytest.mark.parametrize("depth", [128, 512])
@pytest.mark.parametrize("forms", [(FLOAT8, FLOAT8), (BLOCK_1D, BLOCK_2D), (BLOCK_1D, BLOCK_1D)])
def test_products_of_codes_may_be_sharded(forms, depth, monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    assert not jax.make_jaxpr(lambda: one_group(300))().consts, (
        "jax partitions no function with a constant"
    )
    mesh = jax.sharding.AbstractMesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    laid = NamedSharding(mesh, PartitionSpec("tp"))
    a, b = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operand(form, 256, depth))
        for form in forms
    )
    a = dataclasses.replace(
        a, codes=jax.ShapeDtypeStruct(a.codes.shape, a.codes.dtype, sharding=laid)
    )
    traced = jax.jit(lambda a, b: gemm(a, b, jnp.dtype(jnp.bfloat16))).trace(a, b)
    assert "triton_kernel_call_ffi" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, None),
        ({"a_format": formats.NVFP4, "b_format": formats.NVFP4}, None),
        ({"platform": "cpu"}, "it needs a CUDA device, the program is for cpu"),
        ({"a_format": FLOAT8}, "an operand has no block scales"),
        ({"b_format": None}, "an operand has no block scales"),
        ({"b_format": formats.NVFP4}, "scales of 32 and of 16 contracted elements"),
        ({"n": 0}, "a product without elements"),
    ],
)
def test_block_codes_without_a_kernel_are_decoded_or_have_a_reason(change, sentence):
    codes = jnp.dtype(jnp.float8_e4m3fn)
    request = GemmRequest(
        formats.MXFP8,
        formats.MXFP8,
        codes,
        codes,
        64,
        32,
        96,
        jnp.dtype(jnp.bfloat16),
        "cuda",
        nvidia(9, 0),
        True,
    )
    request = dataclasses.replace(request, **change)
    assert decoded.unsupported_reason(request) == sentence
    selection = next(
        one.name for one in TABLE.candidates(request) if one.rejection_reason(request) is None
    )
    assert selection == ("widen" if sentence is None else "reference")


@needs_bridge
def test_products_in_groups_are_kernels_on_cuda(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    a, b, sizes = (
        ones((64, 32), jnp.bfloat16),
        ones((3, 32, 48), jnp.bfloat16),
        ones(3, jnp.int32),
    )
    # the group layout comes first
    assert lower_for_cuda(lambda a, b: grouped_gemm(a, b, sizes, jnp.bfloat16), a, b) == 2
    dy = ones((64, 48), jnp.bfloat16)
    assert lower_for_cuda(lambda a, dy: grouped_contraction(a, dy, sizes, jnp.bfloat16), a, dy) == 2


@needs_bridge
def test_codes_in_groups_are_kernels_on_cuda_and_no_loop(monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    x, kernel, sizes = ones((64, 32)), ones((3, 32, 48)), ones(3, jnp.int32)
    quantizers = QuantizerFactory.create_set(
        n_groups=3,
        fp8_recipe=Float8CurrentScaling(),
        quantize_meta_set=QuantizeMetaSet(QuantizeMeta(), QuantizeMeta(), QuantizeMeta()),
    )

    def step(x, kernel):
        y, pullback = jax.vjp(
            lambda x, k: grouped_dense(x, k, sizes, quantizer_set=quantizers), x, kernel
        )
        return pullback(y)

    text = jax.jit(step).trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    # The stack; rows of x and of dy, their maxima before; two products of rows, each of these behind the layout of its
    # groups; the contraction behind it and two turns.
    assert text.count("triton_kernel_call_ffi") == 1 + 2 * 3 + 2 * 2 + 4
    assert "stablehlo.while" not in text


def attention(mask, descriptor=None, layout=QKVLayout.BSHD_BSHD_BSHD, dropout=0.0):
    def loss(q, k, v, offset, key):
        out = fused_attn(
            (q, k, v),
            None,
            descriptor,
            key,
            AttnBiasType.NO_BIAS,
            mask,
            layout,
            AttnSoftmaxType.LEARNABLE_SOFTMAX,
            0.1,
            dropout,
            True,
            max_segments_per_seq=2,
            softmax_offset=offset,
        )
        return out.astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2, 3))


@needs_bridge
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["lengths", "packed"])
@pytest.mark.sampled(2)
def test_both_passes_of_attention_are_kernels_on_cuda_and_may_be_sharded(kind, groups, monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    q, k = ones((2, 64, 4, 32), jnp.bfloat16), ones((2, 64, groups, 32), jnp.bfloat16)
    offset = zeros((1, 4, 1, 1))
    if kind == "lengths":
        step = attention(AttnMaskType.PADDING_CAUSAL_MASK, Descriptor.from_seqlens(array([40, 64])))
    else:
        ids = jnp.repeat(array([[1, 2], [1, 0]]), 32, axis=1)
        descriptor = Descriptor.from_segment_ids_and_pos(ids, jnp.tile(jnp.arange(32), (2, 2)))
        step = attention(AttnMaskType.PADDING_CAUSAL_MASK, descriptor, QKVLayout.THD_THD_THD, 0.1)
    # The forward pass, then row sums, query gradients, and key and value gradients.
    assert lower_for_cuda(step, q, k, k, offset, jax.random.key(0)) == 4
    mesh = jax.sharding.AbstractMesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    cut = NamedSharding(mesh, PartitionSpec("dp", None, "tp" if groups > 1 else None))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut) for x in (q, k, k)]
    traced = jax.jit(step).trace(*shapes, offset, jax.random.key(0))
    assert "triton_kernel_call_ffi" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_unsupported_attention_has_a_reason(monkeypatch):
    monkeypatch.setattr(
        "transformer_engine.jax.primitives.attention.triton.platform_failure",
        lambda platform, name: None,
    )
    request = AttentionRequest(
        jnp.dtype(jnp.bfloat16),
        QKVLayout.THD_THD_THD,
        AttnBiasType.NO_BIAS,
        AttnMaskType.PADDING_MASK,
        AttnSoftmaxType.VANILLA_SOFTMAX,
        0.0,
        4,
        4,
        64,
        64,
        64,
        64,
        window=None,
        training=True,
        platform="cuda",
    )
    assert attention_unsupported_reason(request) is None
    for change, reason in (
        ({"dtype": jnp.dtype(jnp.float8_e4m3fn)}, "supported: bfloat16"),
        ({"head_dim": 512}, "512 elements > 256"),
        ({"modified": True}, "a score_mod"),
        ({"bias": AttnBiasType.POST_SCALE_BIAS}, "a bias of packed rows"),
        ({"queries": 0}, "without elements"),
        ({"batch": 4096, "segments": 16}, "65536 sequences > 65535"),
        ({"layout": QKVLayout.BSHD_BSHD_BSHD, "batch": 65536}, "65536 sequences > 65535"),
    ):
        assert reason in (attention_unsupported_reason(request._replace(**change)) or "")
    assert attention_unsupported_reason(request._replace(batch=4095, segments=16)) is None
    full = request._replace(layout=QKVLayout.BSHD_BSHD_BSHD, batch=4096, segments=16)
    assert attention_unsupported_reason(full) is None
