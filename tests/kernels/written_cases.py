"""Every launch's declared and actual writes, from the code that Triton generates without a GPU, as JSON.

For crossed options, the program compiles each option's values, or with --all every combination.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.attention_compile_cases import problem
from tests.kernels.written_pointers import find_pointers, triton_code
from transformer_engine.common.formats import E4M3, FLOAT32_MAX
from transformer_engine.common.kernels import (
    activation,
    activation_cast,
    activation_recompute,
    attention,
    attention_backward,
    attention_bias,
    attention_decode,
    attention_delta,
    block_cast,
    block_fused,
    block_product,
    cast,
    column_sums,
    cross_entropy,
    delayed_scaling,
    dropout,
    fp8_attention,
    grouped_block_cast,
    grouped_block_product,
    grouped_cast,
    grouped_gemm,
    grouped_held_cast,
    grouped_layout,
    grouped_product,
    grouped_scaled,
    kv_cache,
    multi_tensor,
    mxfp8,
    norm,
    nvfp4,
    packed_sequences,
    part_sums,
    permutation,
    promoted_product,
    rope,
    rope_packed,
    router,
    router_margins,
    routes,
    scaled_product,
    softmax,
    statistics,
    swizzled_scales,
    symmetric_product,
    transpose,
)
from transformer_engine.common.kernels.launch import NUMBER, WRITTEN, Launch, Machine
from transformer_engine.common.kernels.product_parts import ProductEpilogue, Side, TmaOptions
from transformer_engine.common.operation_settings import Adam, Labels, Sgd

Case = tuple[str, Launch, tuple["str | None", ...]]

HALF, FLOAT, CODES, BYTES, INDEX, ADDRESS = "*bf16", "*fp32", "*fp8e4nv", "*u8", "*i32", "*i64"
SHAPE = (512, 1024)
EVERY_COMBINATION = "--all" in sys.argv
CONSTANTS = (7.0, 1.7, 1.0)
MACHINE = Machine(3, 1 << 17, 2)
BLOCKS = block_cast.Blocks(
    E4M3, columnwise=True, square=False, power_of_two=True, epsilon=0.0, value_for_inf=FLOAT32_MAX
)
SCALES = {"power_of_two": False, "epsilon": 0.0, "value_for_inf": FLOAT32_MAX}


def casts() -> Iterator[Case]:
    yield "maximum", cast.absolute_maximum(math.prod(SHAPE)), (HALF,)
    yield "cast", cast.cast(SHAPE, E4M3, True, False, records=True), (HALF, FLOAT, FLOAT)
    yield (
        "cast, measured before",
        cast.cast(SHAPE, E4M3, True, False, follows=True),
        (HALF, None, FLOAT),
    )
    yield "cast both", cast.cast(SHAPE, E4M3, True, True, records=True), (HALF, FLOAT, FLOAT)
    yield "cast columns", cast.cast(SHAPE, E4M3, False, True), (HALF, None, FLOAT)
    yield (
        "rows",
        block_cast.row_blocks(SHAPE, E4M3, True, False, machine=MACHINE, **SCALES),
        (HALF,),
    )
    yield (
        "rows and columns",
        block_cast.row_blocks(SHAPE, E4M3, True, True, machine=MACHINE, **SCALES),
        (HALF,),
    )
    yield (
        "columns",
        block_cast.row_blocks(SHAPE, E4M3, False, True, machine=MACHINE, **SCALES),
        (HALF,),
    )
    yield "squares", block_cast.square_blocks(SHAPE, E4M3, True, True, **SCALES), (HALF,)
    yield "squares of rows", block_cast.square_blocks(SHAPE, E4M3, True, False, **SCALES), (HALF,)
    yield "mxfp8", mxfp8.blocks(SHAPE, E4M3, True, True, square=False), (HALF,)
    fourbit = nvfp4.Options(hadamard=True)
    yield "nvfp4", nvfp4.blocks(SHAPE, True, True, fourbit), (HALF, FLOAT, FLOAT, FLOAT, None)
    yield "nvfp4 rows", nvfp4.blocks(SHAPE, True, False, fourbit), (HALF, FLOAT, FLOAT, None, None)
    per_row = nvfp4.Options(per_row=True, four_over_six="MAE")
    yield "nvfp4 4over6", nvfp4.blocks(SHAPE, True, True, per_row), (HALF, FLOAT, FLOAT, None, None)
    by_tile = nvfp4.Options(hadamard=True, by_tile=True)
    yield (
        "nvfp4 by tile",
        nvfp4.blocks(SHAPE, True, True, by_tile),
        (HALF, FLOAT, FLOAT, None, None),
    )
    yield "row maxima", nvfp4.row_maxima(SHAPE), (HALF,)
    yield "transformed maximum", nvfp4.hadamard_maximum(SHAPE, True), (HALF,)
    yield "transpose", transpose.transpose(SHAPE), (BYTES,)
    for added in (None, HALF):
        launch = symmetric_product.symmetric_product(2, 384, 128, "bfloat16", (1.0, 2.0))
        yield f"symmetric product {added}", launch, (HALF, HALF, added)
    yield "part sums", part_sums.part_sums(math.prod(SHAPE), math.prod(SHAPE), 3), (HALF, HALF)
    yield (
        "scale update",
        delayed_scaling.advance(
            4, 16, 3, takes_maximum=True, keeps_idle=True, fp8_max=448.0, margin=0
        ),
        (ADDRESS,),
    )
    yield (
        "scale update, new arrays",
        delayed_scaling.advance_new(1024, True, (448.0, 57344.0), 0.0),
        ((FLOAT, FLOAT, *[None] * (delayed_scaling.STATES - 2)) * 3),
    )


def activations() -> Iterator[Case]:
    for name, gated in (("gelu", False), ("swiglu", True)):
        yield (
            name,
            activation.forward(name, gated, *SHAPE, 2 * SHAPE[1], "bfloat16", CONSTANTS),
            (HALF,),
        )
        backward = activation.backward(
            name, gated, *SHAPE, (SHAPE[1], 2 * SHAPE[1]), "bfloat16", CONSTANTS
        )
        yield f"{name} backward", backward, (HALF, HALF)
        plain = (SHAPE, 2 * SHAPE[1], "bfloat16", CONSTANTS)
        for element, scale in ((E4M3, FLOAT), (None, None)):
            codes = element is not None
            launch = activation_cast.forward(name, gated, *plain, element, codes)
            yield f"{name} codes={codes}", launch, (HALF, scale, FLOAT)
            strided = (SHAPE, (SHAPE[1], 2 * SHAPE[1]), "bfloat16", CONSTANTS)
            launch = activation_cast.backward(name, gated, *strided, element, codes, True)
            yield f"{name} backward codes={codes}", launch, (HALF, HALF, scale, FLOAT)
            output = activation_recompute.OutputCodes(E4M3, power_of_two=False, epsilon=0.0)
            (step,) = activation_recompute.backward(
                name, gated, *strided, element, codes, output
            ).steps
            record = (FLOAT,) if codes else ()
            yield (
                f"{name} backward and output {codes=}",
                step.launch,
                (HALF, HALF, None, scale, FLOAT, None, *record),
            )
        machine = block_fused.Machine(3, 1 << 17, 6)
        launch = block_fused.forward(name, gated, SHAPE, 2 * SHAPE[1], CONSTANTS, BLOCKS, machine)
        yield f"{name} blocks", launch, (HALF,)
        squares = BLOCKS._replace(square=True)
        strided = (SHAPE, (SHAPE[1], 2 * SHAPE[1]), CONSTANTS)
        launch = block_fused.backward(name, gated, *strided, squares, True, machine)
        yield f"{name} backward squares", launch, (HALF, HALF)
        launch = block_fused.backward(name, gated, *strided, BLOCKS, False, machine)
        yield f"{name} backward blocks", launch, (HALF, HALF)
    yield "sum of strips", column_sums.sum_columns((8, 1024), "bfloat16"), (FLOAT,)
    yield from _statistics()
    yield "column sums", column_sums.column_sums(SHAPE, SHAPE[1], MACHINE), (HALF,)
    yield (
        "column sums and maximum",
        column_sums.column_sums(SHAPE, SHAPE[1], MACHINE, measures=True),
        (HALF,),
    )


def _statistics() -> Iterator[Case]:
    codes = statistics.Codes(statistics.TWO_LEVELS, True, (1, 16), 6.0, 7 / 6, (512, 1, 64, 1))
    measure, add = (
        step.launch for step in statistics.statistics(SHAPE, (SHAPE[1], 1), codes).steps
    )
    yield "statistics of codes", measure, (HALF, BYTES, CODES, FLOAT)
    yield "sum of statistics", add, (FLOAT, "*fp64")


def norms() -> Iterator[Case]:
    for number, (width, centered) in enumerate(
        itertools.product((1024, 5120, 9000, 20480), (False, True))
    ):
        # The cover has every kind with every width and with both norms, but not all three-way combinations.
        kinds = (_norm_forwards(width, centered), _norm_backwards(width, centered))
        for kind, case in enumerate(itertools.chain(*kinds)):
            if EVERY_COMBINATION or (number // 2 + number + kind) % 2 == 0:
                yield case


def _norm_forwards(width: int, centered: bool) -> Iterator[Case]:
    rows, beta = BLOCKS._replace(columnwise=False), HALF if centered else None
    plain = norm.NormRows(64, width, width, "bfloat16", 1e-5, False, centered, 3)
    name = f"norm {width} centered={centered}"
    yield name, norm.forward(plain), (HALF, HALF, beta, None, None)
    yield f"{name} measured", norm.forward(plain), (HALF, HALF, beta, None, FLOAT)
    yield f"{name} codes", norm.forward(plain, E4M3), (HALF, HALF, beta, FLOAT, FLOAT)
    yield f"{name} blocks", norm.forward(plain, None, rows), (HALF, HALF, beta, None, None)


def _norm_backwards(width: int, centered: bool) -> Iterator[Case]:
    args = ("bfloat16", "float32", False, centered, 6, 3, 1 << 17)
    program = norm.backward(64, width, (width, width, width), *args)
    types = {"dy": HALF, "x": HALF, "add": HALF, "gamma": HALF, "rstdev": FLOAT, "workspace": FLOAT}
    types |= {"mean": FLOAT} if centered else {}
    for number, step in enumerate(program.steps):
        inputs = tuple(None if part is None else types.get(part) for part in step.inputs)
        yield f"norm {width} centered={centered} backward {number}", step.launch, inputs


def others() -> Iterator[Case]:
    for keys in (2048, 20000):
        shape = (1, 2, 64, keys)
        yield (
            f"softmax {keys}",
            softmax.forward(shape, (0, 0, keys, 1), "bfloat16", 0.1, 0),
            (HALF, BYTES),
        )
        yield (
            f"softmax backward {keys}",
            softmax.backward(shape, "bfloat16", 0.1, None),
            (HALF, HALF),
        )
    yield (
        "dropout",
        dropout.forward(math.prod(SHAPE), SHAPE[1], "bfloat16", 6554, 1.1),
        (HALF, HALF, HALF, ADDRESS),
    )
    added = dropout.forward(math.prod(SHAPE), SHAPE[1], "bfloat16", 0, 1.0, drops=False)
    yield "bias and residual", added, (HALF, HALF, HALF, None)
    yield "dropout backward", dropout.backward(math.prod(SHAPE), "bfloat16", 1.1), (HALF, BYTES)
    options = {"layout": "thd", "interleaved": False, "context": (2, 0)}
    for transposed in (False, True):
        options |= {"transposed": transposed}
        rotated = rope.rotate((64, 1, 8, 96), (768, 0, 96), (64, 64), 3, "bfloat16", **options)
        yield f"rotate transposed={transposed}", rotated, (HALF, FLOAT, INDEX, INDEX)
        strides = (8192, 0, 768)
        packed = rope_packed.rotate_packed(
            (64, 1), (8, 4), (128, 64), strides, (64, 64, 64), 3, "bfloat16", **options
        )
        operands = (None, HALF, HALF, HALF) if transposed else (HALF,)
        inputs = (FLOAT, FLOAT, INDEX, INDEX, *operands)
        yield f"rotate packed transposed={transposed}", packed, inputs
    for transposed in (False, True):
        joint = rope_packed.rotate_packed(
            (64, 2), (8, 1), (64, 64), (3072, 1536, 64), (64, 64, 64), 0, "bfloat16", layout="sbhd",
            interleaved=True, transposed=transposed, context=(1, 0), separate=True,
        )  # fmt: skip
        operands = (None, HALF, HALF, HALF) if transposed else (HALF,)
        yield (
            f"rotate a joint projection transposed={transposed}",
            joint,
            (FLOAT, FLOAT, None, None, *operands),
        )
    for paged in (False, True):
        strides = (0, 1024, 128) * 2
        sizes = {"capacity": 4096, "page_size": 64, "pages": 64, "table_stride": 64}
        launch = kv_cache.append(4, 16, 8, (128, 96), strides, packed=paged, **sizes)
        inputs = (HALF, HALF, HALF, HALF, INDEX if paged else None, INDEX, INDEX)
        yield f"kv cache paged={paged}", launch, inputs
    yield "zero behind", packed_sequences.zero_padding_launch(*SHAPE, 2), (HALF, INDEX)
    yield "zero unseen", packed_sequences.zero_unseen(*SHAPE), (HALF, BYTES)


def losses() -> Iterator[Case]:
    labels = Labels(-100, 0.1, 0, SHAPE[1])
    yield "statistics of logits", cross_entropy.statistics(*SHAPE, 2, labels), (HALF, ADDRESS)
    yield "losses", cross_entropy.losses(SHAPE[0], 2, labels), (FLOAT, ADDRESS)
    for in_place in (False, True):
        launch = cross_entropy.gradient(*SHAPE, labels, "bfloat16", True, in_place)
        yield f"gradient of logits in_place={in_place}", launch, (HALF, ADDRESS, FLOAT, FLOAT)
    yield "rescaled gradient", cross_entropy.rescale(*SHAPE), (HALF, FLOAT)


def steps() -> Iterator[Case]:
    half, full = "bfloat16", "float32"
    yield "scaling", multi_tensor.scale(3, (half, full), True), (ADDRESS, FLOAT, INDEX)
    yield "sums of squares", multi_tensor.squares(3, half, True), (ADDRESS, None)
    states = {"masters": (full,), "remainders": ("int16",), "no masters": ()}
    for name, masters in states.items():
        launch = multi_tensor.adam(3, (half, half, full, full, *masters), Adam(), not masters)
        yield f"adam, {name}", launch, (ADDRESS, FLOAT, INDEX if masters else None)
    for how in (Sgd(), Sgd(momentum=True)):
        launch = multi_tensor.sgd(3, (full, full, full, "float16"), how, True)
        yield f"sgd momentum={how.momentum}", launch, (ADDRESS, FLOAT, INDEX)


def grouped() -> Iterator[Case]:
    measured = grouped_cast.maximum(SHAPE, 4, False)
    yield "grouped maximum", measured, (HALF, ADDRESS, None)
    yield "grouped maximum of rows", grouped_cast.maximum(SHAPE, 4, True), (HALF, None, INDEX)
    steps = (E4M3, 3, 1, False, 0.0)
    rows = grouped_cast.cast(SHAPE, 4, True, *steps, True, True, records=True)
    yield "grouped cast of rows", rows, (HALF, None, INDEX, FLOAT, FLOAT)
    rows = grouped_cast.cast(SHAPE, 4, True, *steps, True, True, records=True, tiled=True)
    yield "grouped cast of rows to tiles", rows, (HALF, None, INDEX, FLOAT, FLOAT)
    rows = grouped_cast.cast(SHAPE, 4, True, *steps, True, False, records=True, rest=True)
    yield "grouped cast of all rows", rows, (HALF, None, INDEX, FLOAT, FLOAT)
    matrices = grouped_cast.cast(SHAPE, 4, False, *steps, False, True, records=False)
    yield "grouped cast", matrices, (HALF, ADDRESS, None, None, FLOAT)
    blocks = (SHAPE, 4, E4M3, True, 0.0, FLOAT32_MAX)
    yield "grouped blocks", grouped_block_cast.row_blocks(*blocks, True, True), (HALF, None, INDEX)
    yield (
        "grouped blocks of columns",
        grouped_block_cast.row_blocks(*blocks, False, True),
        (HALF, None, INDEX),
    )
    yield (
        "grouped squares",
        grouped_block_cast.square_blocks(*blocks, True, True),
        (HALF, ADDRESS, None),
    )
    yield (
        "grouped squares of rows",
        grouped_block_cast.square_blocks(*blocks, True, False),
        (HALF, ADDRESS, None),
    )
    for rowwise, columnwise in ((True, True), (True, False)):
        launch = mxfp8.matrices(SHAPE, 4, E4M3, rowwise, columnwise, square=True)
        yield f"mxfp8 matrices columnwise={columnwise}", launch, (HALF, ADDRESS)
    scaled = (
        (
            "mxfp8",
            grouped_scaled.BlockScales(("e4m3", "e4m3")),
            (CODES, CODES),
            (BYTES, BYTES, None, None),
        ),
        (
            "nvfp4",
            grouped_scaled.BlockScales(("e2m1", "e2m1"), 16, 0.1),
            (BYTES, BYTES),
            (CODES, CODES, FLOAT, FLOAT),
        ),
    )
    for name, scales, codes, factors in scaled:
        for tma in (False, True):
            launch = grouped_scaled.product_of_rows(*SHAPE, 512, 4, scales, tma=tma)
            yield f"grouped {name} product tma={tma}", launch, (*codes, INDEX, *factors, HALF)
        launch = grouped_scaled.product_of_rows(*SHAPE, 512, 4, scales, clears=True)
        yield f"grouped {name} product that clears", launch, (*codes, INDEX, *factors, HALF)
        for by_address in (False, True):
            table, args = (ADDRESS, (FLOAT,)) if by_address else (None, ())
            kind = {"accumulates": by_address, "by_address": by_address}
            launch = grouped_scaled.product_of_columns(*SHAPE, 512, 4, scales, **kind)
            yield (
                f"grouped {name} gradient by_address={by_address}",
                launch,
                (*codes, *factors, INDEX, table, *args),
            )
    yield "layout", grouped_layout.group_layout(SHAPE[0], 4), (ADDRESS,)
    yield "row sums", grouped_gemm.row_sums(SHAPE[1], 4), (HALF, INDEX)
    for by_address in (False, True):
        table = ADDRESS if by_address else None
        launch = grouped_gemm.product_of_rows(*SHAPE, 512, 4, scaling=0, by_address=by_address)
        inputs = (HALF, HALF, table, None, None, HALF, INDEX)
        yield f"grouped product by_address={by_address}", launch, inputs
        if not by_address:
            clearing = grouped_gemm.product_of_rows(*SHAPE, 512, 4, scaling=0, clears=True)
            yield "grouped product that clears", clearing, inputs
        for accumulates in (False, True):
            launch = grouped_gemm.product_of_columns(
                SHAPE[1], 512, 4, scaling=0, accumulates=accumulates, by_address=by_address
            )
            # an allocated result is not an input
            args = [FLOAT] if by_address or accumulates else []
            inputs = (HALF, HALF, None, None, INDEX, table, *args)
            yield (
                f"grouped gradient by_address={by_address} accumulates={accumulates}",
                launch,
                inputs,
            )
    for scaling in (grouped_gemm.TENSOR_SCALES, grouped_gemm.BLOCK_SCALES):
        launch = grouped_gemm.product_of_rows(*SHAPE, SHAPE[1], 4, scaling=scaling)
        yield (
            f"grouped product scaling={scaling}",
            launch,
            (CODES, CODES, None, FLOAT, FLOAT, HALF, INDEX),
        )
        launch = grouped_gemm.product_of_columns(SHAPE[1], 512, 4, scaling=scaling)
        yield (
            f"grouped gradient scaling={scaling}",
            launch,
            (CODES, CODES, FLOAT, FLOAT, INDEX, None),
        )
    blocks = {"scaling": grouped_gemm.BLOCK_SCALES}
    launch = grouped_gemm.product_of_rows(
        *SHAPE, SHAPE[1], 4, clears=True, row_major=True, **blocks
    )
    yield (
        "grouped product of row-major scales",
        launch,
        (CODES, CODES, None, FLOAT, FLOAT, None, INDEX),
    )
    launch = grouped_gemm.product_of_columns(SHAPE[1], 512, 4, together=384, **blocks)
    yield "grouped gradient of one matrix", launch, (CODES, CODES, FLOAT, FLOAT, INDEX, None)
    for by_row in (False, True):
        launch = block_product.product(*SHAPE, 512, "bfloat16", by_row=by_row, processors=132)
        yield f"block product by_row={by_row}", launch, (CODES, CODES, FLOAT, FLOAT)
    yield from hopper_grouped()
    yield from scaled_products()


def hopper_grouped() -> Iterator[Case]:
    scales = (FLOAT, FLOAT)
    options = {"exact": True, "processors": 132}
    launch = grouped_product.product_of_rows(*SHAPE, 512, 4, "bfloat16", **options)
    yield "hopper product of rows", launch, (CODES, CODES, *scales, HALF, INDEX, None)
    for by_address in (False, True):
        table = ADDRESS if by_address else None
        for accumulates in (False, True):
            launch = grouped_product.product_of_columns(
                SHAPE[1],
                512,
                4,
                "float32",
                accumulates=accumulates,
                by_address=by_address,
                **options,
            )
            args = [FLOAT] if by_address or accumulates else []
            inputs = (CODES, CODES, *scales, None, INDEX, table, *args)
            yield (
                f"hopper gradient by_address={by_address} accumulates={accumulates}",
                launch,
                inputs,
            )
            launch = grouped_block_product.product_of_columns(
                SHAPE[1],
                512,
                4,
                "float32",
                accumulates=accumulates,
                by_address=by_address,
                processors=132,
            )
            name = f"hopper gradient of blocks by_address={by_address} accumulates={accumulates}"
            yield name, launch, inputs
    for by_rows, tables in ((False, (ADDRESS, None)), (True, (None, INDEX))):
        launch = grouped_held_cast.held_cast(
            SHAPE, 4, by_rows, E4M3, False, 0.0, True, True, processors=132
        )
        yield f"hopper held cast by_rows={by_rows}", launch, (HALF, *tables)
    launch = grouped_block_product.product_of_rows(*SHAPE, 512, 4, "bfloat16", processors=132)
    yield "hopper product of rows of blocks", launch, (CODES, CODES, *scales, HALF, INDEX, None)


def scaled_products() -> Iterator[Case]:
    for back in (False, True):
        yield (
            f"swizzled scales back={back}",
            swizzled_scales.swizzle(300, 18, (18, 1), back),
            (BYTES,),
        )
    for unit in (1, 128):
        launch = swizzled_scales.swizzle_exponents(300, 18, (5, 1), unit)
        yield f"swizzled exponents unit={unit}", launch, (FLOAT,)
    side = Side
    for rows in (16, 300):  # the result's transpose, and the result
        for accumulates in (False, True):
            end = (None, None, FLOAT, None) if accumulates else (HALF, HALF)
            after = (
                ProductEpilogue(True) if accumulates else ProductEpilogue(False, "gelu_gradient")
            )
            options = {"epilogue": after, "dtype": None if accumulates else "bfloat16"}
            name = f"rows={rows} accumulates={accumulates}"
            sides = (side(rows, 512, "e4m3"), side(320, 512, "e4m3"))
            launch = scaled_product.product(*sides, 512, 320, length=32, **options)
            yield f"mxfp8 product {name}", launch, (CODES, CODES, BYTES, BYTES, None, None, *end)
            launch = scaled_product.product(
                *sides, 512, 320, length=32, tma=TmaOptions(operands=True, results=True), **options
            )
            yield (
                f"mxfp8 product by TMA {name}",
                launch,
                (CODES, CODES, BYTES, BYTES, None, None, *end),
            )
            sides = (side(rows, 256, "e2m1", rows), side(320, 256, "e2m1", 1))
            launch = scaled_product.product(
                *sides, 512, 320, length=16, packing=2, factor=0.5, **options
            )
            yield f"nvfp4 product {name}", launch, (BYTES, BYTES, BYTES, BYTES, FLOAT, FLOAT, *end)
            sides = (side(rows, 512, "e4m3", 0, 1, (4, 1)), side(320, 512, "e4m3", 0, 128, (4, 1)))
            launch = promoted_product.block_product(*sides, 512, 320, **options)
            yield f"product of blocks {name}", launch, (CODES, CODES, FLOAT, FLOAT, *end)
            launch = scaled_product.exponent_product(*sides, 512, 320, **options)
            yield (
                f"product by exponents {name}",
                launch,
                (CODES, CODES, FLOAT, FLOAT, None, None, *end),
            )
            options = {"epilogue": ProductEpilogue(False, "gelu", True), "dtype": "bfloat16"}
            launch = promoted_product.block_product(*sides, 512, 320, **options)
            yield (
                f"product of blocks with gelu {name}",
                launch,
                (CODES, CODES, FLOAT, FLOAT, HALF, None),
            )


def experts() -> Iterator[Case]:
    counting, ranking = (part.launch for part in routes.map_of_mask(SHAPE[0], 64, (64, 1)).steps)
    yield "count", counting, (BYTES,)
    yield "rank", ranking, (BYTES, INDEX)
    chunks, segments = (part.launch for part in routes.map_of_chunks(SHAPE[0], 24).steps)
    yield "chunks", chunks, (ADDRESS, ADDRESS)
    yield "segments", segments, (INDEX,)
    for by_mask in (False, True):
        pads = ADDRESS if by_mask else None
        sizes = (SHAPE, 8 * SHAPE[0], 64, by_mask)
        for probs in (None, "float32"):
            adjacent = FLOAT if probs else None
            sending, clearing = (
                part.launch for part in permutation.send(*sizes, "bfloat16", probs, False).steps
            )
            yield f"send by_mask={by_mask} probs={probs}", sending, (HALF, INDEX, pads, adjacent)
            yield f"clear by_mask={by_mask} probs={probs}", clearing, (HALF, adjacent, BYTES)
            (every,) = (
                part.launch for part in permutation.send(*sizes, "bfloat16", probs, True).steps
            )
            yield (
                f"send every row by_mask={by_mask} probs={probs}",
                every,
                (HALF, INDEX, pads, adjacent),
            )
            launch = permutation.collect(*sizes, "bfloat16", probs)
            yield (
                f"collect by_mask={by_mask} values={probs}",
                launch,
                (HALF, INDEX, pads, FLOAT, adjacent),
            )
        weighted = permutation.send_weighted(*sizes, ("bfloat16", "float32")).steps[0].launch
        yield f"send weighted by_mask={by_mask}", weighted, (HALF, INDEX, pads, FLOAT, HALF)
        alone = permutation.send_weighted(*sizes, ("bfloat16", None)).steps[0].launch
        yield f"send weighted alone by_mask={by_mask}", alone, (HALF, INDEX, pads, FLOAT, None)

    for first, (name, kind) in enumerate(router.SCORES.items()):
        for second, (way, number) in enumerate(router.MAPS.items()):
            if not EVERY_COMBINATION and (first + second) % len(router.MAPS):
                continue
            biased = name in ("sigmoid", "sqrtsoftplus")
            written = INDEX if way == "indices" else None
            chosen = router.choose(
                SHAPE[0], 160, 8, kind, False, (8, 4), 1.0, number, "bfloat16", True
            )
            yield f"choose {name} {way}", chosen, (HALF, FLOAT if biased else None, written)
            back = router.gradient(SHAPE[0], 160, 8, kind, False, 1.0, number, "bfloat16")
            yield f"gradient {name} {way}", back, (INDEX if written else BYTES, FLOAT, HALF)
        full = router.choose(
            SHAPE[0],
            256,
            8,
            kind,
            whole=True,
            groups=None,
            scale=1.0,
            map=0,
            probs="float32",
            keeps=False,
        )
        yield f"scores {name}", full, (HALF, None, None)
    yield "margins", router_margins.margins(SHAPE[0], 160, 8, 64), (HALF, FLOAT, INDEX, FLOAT)
    for total in (None, ADDRESS):
        parts, summing = (part.launch for part in router.loss(SHAPE[0], 256, 0.1, "float32").steps)
        yield f"loss parts total={total}", parts, (FLOAT, ADDRESS)
        yield f"loss total={total}", summing, (FLOAT, total)


def attentions() -> Iterator[Case]:
    plain, biased = problem(227 << 10), problem(227 << 10, biased=True)
    lengths, masks = (INDEX, INDEX, None, None), (None, None, None)
    sources = (HALF, HALF, HALF, *lengths, *masks, None, None)
    for keeps in (False, True):
        launch = attention.forward(plain, keeps, keeps, keeps)
        yield f"attention lse={keeps}", launch, (*sources, FLOAT, None, None)
        launch = attention_delta.delta(plain, plain.q, keeps)
        yield (
            f"delta sink={keeps}",
            launch,
            (HALF, HALF, FLOAT, FLOAT if keeps else None, INDEX, None, None),
        )
    context = (*sources, None, HALF, FLOAT, FLOAT)
    yield "keys", attention_backward.keys(plain, (0, *plain.k), (0, *plain.v), 1), context
    yield "queries", attention_backward.queries(plain, plain.q), context
    added = (HALF, HALF, HALF, *lengths, *masks, HALF, None, None, HALF, FLOAT, FLOAT)
    yield "bias", attention_bias.added(biased, (1, 32, 4096, 4096))[0], added
    paged = attention_decode.stretches(problem(227 << 10, queries=1, page=64), 132)[0]
    yield "decode", paged, (HALF, HALF, HALF, *lengths, None, INDEX)
    merging = attention_decode.merging(problem(227 << 10, queries=1), 4, follows=True, packed=True)
    yield "decode merging", merging, (FLOAT, FLOAT, FLOAT, INDEX, None)
    three = fp8_attention.codes_of_three((SHAPE[0] * SHAPE[1], 300, 200), (2, 3), "float8_e4m3fn")
    yield "codes of three", three, (HALF, HALF, HALF, FLOAT, FLOAT)
    values = fp8_attention.value_launch(math.prod(SHAPE), (8, 3), "bfloat16")
    yield "values", values, (CODES, FLOAT, FLOAT, FLOAT)
    yield "values without a history", values, (CODES, FLOAT, None, None)


def launch_writes(launch: Launch, inputs: tuple[str | None, ...]) -> dict[str, list[str] | str]:
    """The written arguments and tables, as declared by the record and as found in the code."""
    names = launch.kernel.arg_names
    result = find_pointers(triton_code(launch, inputs))
    outputs = zip(names[launch.inputs :], launch.outputs, strict=False)
    written = {name for name, output in outputs if output is not None}
    written |= {names[index] for index in launch.in_place if inputs[index] is not None}
    tables = {names[table.place]: table.columns for table in launch.tables}
    return {
        "kernel": f"{launch.kernel.fn.__module__.rsplit('.', 1)[1]}.{launch.kernel.fn.__name__}",
        "declared": sorted(written),
        "written": sorted(result.written),
        "declared tables": sorted(tables),
        "tables": sorted(result.tables),
        "declared through": sorted(name for name, columns in tables.items() if WRITTEN in columns),
        "through": sorted(result.written_through),
        "numbers": sorted(name for name, columns in tables.items() if set(columns) == {NUMBER}),
    }


GROUPS = (casts, activations, norms, others, losses, steps, grouped, experts, attentions)


def main() -> None:
    results: dict[str, dict[str, list[str] | str]] = {}
    for group in GROUPS:
        for name, launch, inputs in group():
            if name in results:
                raise ValueError(f"two cases are called {name!r}: one would hide the other")
            results[name] = launch_writes(launch, inputs)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
