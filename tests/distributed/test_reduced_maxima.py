"""NVFP4 amax reduction over ranks whose quantizers compute different directions."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.threaded_ranks import run_on_threads

ROWS, DEPTH = 32, 64
USAGES = ((True, True), (True, False), (False, True))
# Settings of the quantizer, by name. A quantizer by rows takes the group only from `with_reduction_group`.
SETTINGS = {
    "plain": {},
    "transform": {"with_rht": True, "with_post_rht_amax": True},
    "square": {"with_2d_quantization": True},
    "rows": {"row_scaled_nvfp4": True},
}


def _values(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (rank + 1) * torch.randn(ROWS, DEPTH, generator=generator, dtype=torch.bfloat16)


def _maxima(
    name: str, usages: dict[int, tuple[bool, bool]]
) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Per rank: its collectives' sizes and its quantized tensor's maxima."""
    sizes: dict[int, list[int]] = {rank: [] for rank in usages}
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: object, **options: object) -> object:
        sizes[dist.get_rank()].append(tensor.numel())
        return reduce(tensor, *args, **options)

    def quantize(rank: int) -> dict[str, torch.Tensor]:
        rowwise, columnwise = usages[rank]
        quantizer = te.NVFP4Quantizer(rowwise=rowwise, columnwise=columnwise, **SETTINGS[name])
        quantized = quantizer.with_reduction_group(dist.group.WORLD)(_values(rank))
        results = {"rows": quantized._amax_rowwise, "columns": quantized._amax_columnwise}
        return {direction: amax.clone() for direction, amax in results.items() if amax is not None}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        maxima = run_on_threads(quantize, len(usages))
    return [(sizes[rank], maxima[rank]) for rank in usages]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("second", USAGES)
@pytest.mark.parametrize("first", USAGES)
def test_collectives_are_equal_whatever_the_directions_of_a_rank(first, second, name):
    of_ranks = _maxima(name, {0: first, 1: second})
    sizes = [size for size, _ in of_ranks]
    assert sizes[0] == sizes[1] == [2 if name == "transform" else 1]
    for _, result in of_ranks:
        if name != "rows" and "rows" in result:
            assert float(result["rows"]) == float(torch.cat([_values(0), _values(1)]).abs().max())
        if name != "transform" and "columns" in result:
            assert float(result["columns"]) == float(
                torch.cat([_values(0), _values(1)]).abs().max()
            )


@pytest.mark.parametrize("second", USAGES)
def test_the_maximum_of_transformed_columns_is_that_of_the_ranks_which_compute_them(second):
    quantizer = te.NVFP4Quantizer(**SETTINGS["transform"])
    local = [float(quantizer(_values(rank))._amax_columnwise) for rank in (0, 1)]
    (_, result), (_, other) = _maxima("transform", {0: (True, True), 1: second})
    assert local[1] > local[0]
    assert float(result["columns"]) == (local[1] if second[1] else local[0])
    assert ("columns" in other) == second[1]
