"""Gathered tensors with swizzled scales: scale rows travel, and the result equals a single rank bit for bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from transformer_engine.pytorch import Linear, MXFP8Quantizer, NVFP4Quantizer, autocast
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.distributed import gather_along_first_dim
from transformer_engine.pytorch.quantization import emulate

SIZE, DEPTH, OUT = 2, 160, 64
RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
# Elements per scale. Rows per rank: ending inside a 128 x 4 scale tile, and whole tiles.
LENGTH = {"mxfp8": 32, "nvfp4": 16}
ROWS = (32, 96, 128, 160)
DIRECTIONS = ((True, False), (False, True), (True, True))


def create_quantizer(name: str, rowwise: bool = True, columnwise: bool = True) -> Any:
    result = MXFP8Quantizer(DType.kFloat8E4M3) if name == "mxfp8" else NVFP4Quantizer()
    result.set_usage(rowwise=rowwise, columnwise=columnwise)
    result.optimize_for_gemm = True
    return result


def values(rows: int) -> Tensor:
    """Values for all ranks, with equal maxima, from which NVFP4 computes its second level."""
    x = torch.randn(SIZE * rows, DEPTH, dtype=torch.bfloat16).clamp_(-8.0, 8.0)
    x[::rows, 0] = 9.0
    return x


def assert_equal_tensors(actual: Any, expected: Any) -> None:
    """Compare the flags and bytes in two quantized tensors."""
    assert actual._with_gemm_swizzled_scales is expected._with_gemm_swizzled_scales is True
    ours, reference = actual.get_metadata(), expected.get_metadata()
    assert ours.keys() == reference.keys()
    for field, value in reference.items():
        if isinstance(value, Tensor):
            assert torch.equal(ours[field].view(torch.uint8), value.view(torch.uint8)), field
        else:
            assert field == "quantizer" or ours[field] == value, field


class Gathered:
    """The bytes that a rank gives to all-gathers while it is entered."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        gather = dist.all_gather_into_tensor

        def call(output: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 0:
                self.bytes.append(sent.numel() * sent.element_size())
            return gather(output, sent, *args, **kwargs)

        self.patch = mock.patch.object(dist, "all_gather_into_tensor", call)

    def __enter__(self) -> Gathered:
        self.patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.stop()


@pytest.mark.parametrize("way", ["at once", "later", "into a tensor"])
@pytest.mark.parametrize(("rowwise", "columnwise"), DIRECTIONS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", RECIPES)
def test_gathered_tensors_have_the_bits_of_one_rank(name, rows, rowwise, columnwise, way):
    x = values(rows)
    expected = create_quantizer(name, rowwise, columnwise)(x)

    def gather(rank: int) -> Any:
        quantizer = create_quantizer(name, rowwise, columnwise)
        shard = quantizer(x[rank * rows : (rank + 1) * rows])
        assert shard._with_gemm_swizzled_scales
        options: dict[str, Any] = {"async_op": way == "later"}
        if way == "into a tensor":
            options["output_tensor"] = quantizer(torch.zeros_like(x))
        full_value, handle = gather_along_first_dim(
            shard, dist.group.WORLD, quantizer=quantizer, **options
        )
        assert (handle is not None) == (way == "later")
        if handle is not None:
            handle.wait()
        return full_value

    for full in run_on_threads(gather, SIZE):
        assert_equal_tensors(full, expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", RECIPES)
def test_scale_rows_are_sent_without_tile_padding(name, rows):
    x = values(rows)

    def gather(rank: int) -> None:
        quantizer = create_quantizer(name, columnwise=False)
        gather_along_first_dim(
            quantizer(x[rank * rows : (rank + 1) * rows]), None, quantizer=quantizer
        )

    with Gathered() as sent:
        run_on_threads(gather, SIZE)
    codes = rows * DEPTH // (2 if name == "nvfp4" else 1)
    scales = rows * DEPTH // LENGTH[name]
    tiles = -(-rows // 128) * 128 * (-(-DEPTH // LENGTH[name] // 4) * 4)
    # NVFP4: the second level is compared, and the maximum is gathered.
    assert [size for size in sent.bytes if size > 8] == [codes, scales]
    assert scales < tiles or (rows == 128 and DEPTH // LENGTH[name] % 4 == 0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", RECIPES)
def test_products_of_gathered_tensors_have_the_bits_of_one_rank(name, rows):
    x, weight = values(rows), create_quantizer(name)(torch.randn(OUT, DEPTH, dtype=torch.bfloat16))
    expected, *_ = general_gemm(weight, create_quantizer(name)(x), out_dtype=torch.bfloat16)

    def product(rank: int) -> Tensor:
        quantizer = create_quantizer(name)
        shard = quantizer(x[rank * rows : (rank + 1) * rows])
        full, _ = gather_along_first_dim(shard, dist.group.WORLD, quantizer=quantizer)
        return general_gemm(weight, full, out_dtype=torch.bfloat16)[0]

    for result in run_on_threads(product, SIZE):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("rows", [96, 128])
@pytest.mark.parametrize("name", RECIPES)
def test_sequence_parallel_layers_gather_inputs_with_swizzled_scales(name, rows):
    x, grad = values(rows), torch.randn(SIZE * rows, OUT, dtype=torch.bfloat16)
    state = torch.randn(OUT, DEPTH, dtype=torch.bfloat16).clamp_(-4.0, 4.0)
    state[0, 0] = 5.0  # the half's maximum, too

    def step(codes: Any, dy: Tensor, **parallel: Any) -> list[Tensor]:
        layer = Linear(
            DEPTH, OUT, bias=False, params_dtype=torch.bfloat16, device="cpu", **parallel
        )
        with torch.no_grad():
            layer.weight.copy_(state[: layer.weight.shape[0]])
        with autocast(recipe=RECIPES[name]):
            y = layer(codes)
        y.backward(dy)
        return [y.detach(), layer.weight.grad]

    def sharded(rank: int) -> list[Tensor]:
        codes = create_quantizer(name)(x[rank * rows : (rank + 1) * rows])
        parallel = {"parallel_mode": "column", "tp_group": dist.group.WORLD, "tp_size": SIZE}
        half = grad[:, : OUT // SIZE].contiguous()
        return step(codes, half, sequence_parallel=True, **parallel)

    with emulate():
        y, grad_weight = step(create_quantizer(name)(x), grad)
        for results in run_on_threads(sharded, SIZE):
            assert torch.equal(results[0], y[:, : OUT // SIZE])
            # the second-level scale of the gradient equals the one for its half
            if name == "mxfp8":
                assert torch.equal(results[1], grad_weight[: OUT // SIZE])
