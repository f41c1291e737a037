"""CommOverlap and CommOverlapP2P: buffers of ranks, and products with their collectives, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from tests.distributed.ranks import run_on_ranks
from transformer_engine.pytorch.cpp_extensions import general_gemm

AG, RS = tex.CommOverlapType.AG, tex.CommOverlapType.RS
ROWS, DEPTH, COLUMNS, SIZE = 32, 64, 48, 2
CLASSES = (tex.CommOverlap, tex.CommOverlapP2P)


def values(*shape: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def create_buffer(
    cls: Any, dtype: torch.dtype, comm_type: Any, columns: int = DEPTH, **options: Any
) -> Any:
    helper = tex.CommOverlapHelper(dist.group.WORLD)
    return cls(
        [ROWS, columns], dtype, helper, dist.get_world_size(), comm_type=comm_type, **options
    )


def all_gather_products(device: torch.device) -> list[torch.Tensor]:
    local = slice(dist.get_rank() * ROWS // SIZE, (dist.get_rank() + 1) * ROWS // SIZE)
    x, w = values(ROWS, DEPTH, seed=1, device=device), values(COLUMNS, DEPTH, seed=2, device=device)
    results = []
    for cls in CLASSES:
        ub = create_buffer(cls, torch.float32, AG)
        ub.copy_into_buffer(x[local], local_chunk=True)
        assert (
            torch.equal(ub.get_buffer(True), x[local])
            and ub.get_buffer(shape=[ROWS * DEPTH]).dim() == 1
        )
        extra = torch.empty(ROWS // SIZE, DEPTH, device=device)
        y, _, _, returned = general_gemm(
            w, ub.get_buffer(), torch.float32, ub=ub, ub_type=AG, extra_output=extra
        )
        assert (
            returned is extra and torch.equal(extra, x[local]) and torch.equal(ub.get_buffer(), x)
        )
        assert torch.equal(y, general_gemm(w, x, torch.float32)[0])
        with pytest.raises(ValueError, match="B has other memory"):
            general_gemm(w, x, torch.float32, ub=ub, ub_type=AG)
        # FP8: the buffer holds all ranks' codes, with one scale.
        quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device, columnwise=False)
        full = quantizer(x)
        codes = create_buffer(cls, torch.uint8, AG)
        assert codes.is_fp8_ubuf() and not ub.is_fp8_ubuf()
        codes.copy_into_buffer(full._data[local], local_chunk=True)
        scattered = te.Float8Tensor(
            shape=(ROWS, DEPTH),
            dtype=torch.float32,
            data=codes.get_buffer(),
            fp8_scale_inv=full._scale_inv,
            fp8_dtype=te.DType.kFloat8E4M3,
            quantizer=quantizer,
        )
        weight = quantizer(w)
        y = general_gemm(weight, scattered, torch.float32, ub=codes, ub_type=AG)[0]
        assert torch.equal(y, general_gemm(weight, full, torch.float32)[0])
        results.append(y)
    return results


def reduce_scatter_products(device: torch.device) -> list[torch.Tensor]:
    rank, half = dist.get_rank(), DEPTH // SIZE
    local = slice(rank * half, (rank + 1) * half)
    x, w = values(ROWS, DEPTH, seed=1, device=device), values(COLUMNS, DEPTH, seed=2, device=device)
    results = []
    for cls in CLASSES:
        ub = create_buffer(cls, torch.float32, RS, COLUMNS)
        rows = torch.empty(ROWS // SIZE, COLUMNS, device=device)
        y, _, _, extra = general_gemm(
            w[:, local], x[:, local], torch.float32, ub=ub, ub_type=RS, extra_output=rows
        )
        assert extra is rows and torch.equal(
            y, general_gemm(w[:, local], x[:, local], torch.float32)[0]
        )
        with pytest.raises(ValueError, match="RS without extra_output"):
            general_gemm(w[:, local], x[:, local], torch.float32, ub=ub, ub_type=RS)
        results.append(rows)
    return results


def bulk_collectives(device: torch.device) -> list[torch.Tensor]:
    rank = dist.get_rank()
    local = slice(rank * ROWS // SIZE, (rank + 1) * ROWS // SIZE)
    x, w = values(ROWS, DEPTH, seed=1, device=device), values(COLUMNS, DEPTH, seed=2, device=device)
    expected = general_gemm(w, x, torch.float32)[0]
    ub = create_buffer(tex.CommOverlap, torch.float32, AG)
    ub.copy_into_buffer(x[local], local_chunk=True)
    assert torch.equal(
        general_gemm(w, x, torch.float32, ub=ub, ub_type=AG, bulk_overlap=True)[0], expected
    )
    gathered = ub.get_buffer().clone()
    ub.copy_into_buffer(x * (rank + 1))
    y = general_gemm(w, x, torch.float32, ub=ub, ub_type=RS, bulk_overlap=True)[0]
    assert torch.equal(y, expected)
    into_chunk = ub.get_buffer(True).clone()
    ub.copy_into_buffer(x * (rank + 1))
    extra = torch.empty(ROWS // SIZE, DEPTH, device=device)
    general_gemm(w, x, torch.float32, ub=ub, ub_type=RS, bulk_overlap=True, extra_output=extra)
    assert torch.equal(extra, into_chunk)
    codes = create_buffer(tex.CommOverlapP2P, torch.uint8, RS)
    with pytest.raises(ValueError, match="codes have no scale"):
        general_gemm(w, x, torch.float32, ub=codes, ub_type=RS, bulk_overlap=True)
    external = create_buffer(tex.CommOverlapP2P, torch.float32, AG)
    external.copy_into_buffer(x[local], local_chunk=True)
    send, receive = external.get_communication_stream()
    tex.bulk_overlap_ag_with_external_gemm(external, send, receive)
    if receive is not None:
        torch.cuda.current_stream().wait_stream(receive)
    return [gathered, into_chunk, external.get_buffer().clone()]


def test_all_gather_products_equal_one_process(tmp_path):
    results = run_on_ranks(all_gather_products, SIZE, tmp_path)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_reduce_scatter_products_equal_one_process(tmp_path):
    cpu = torch.device("cpu")
    x, w = values(ROWS, DEPTH, seed=1, device=cpu), values(COLUMNS, DEPTH, seed=2, device=cpu)
    expected = (x.double() @ w.double().t()).chunk(SIZE)
    for actual, rows in zip(
        run_on_ranks(reduce_scatter_products, SIZE, tmp_path), expected, strict=True
    ):
        for result in actual:
            torch.testing.assert_close(result.double(), rows, rtol=1e-4, atol=1e-4)


def test_bulk_collectives_run_beside_other_products(tmp_path):
    x = values(ROWS, DEPTH, seed=1, device=torch.device("cpu"))
    results = run_on_ranks(bulk_collectives, SIZE, tmp_path)
    for (gathered, summed, external), rows in zip(results, x.chunk(SIZE), strict=True):
        assert torch.equal(gathered, x) and torch.equal(external, x)
        torch.testing.assert_close(summed, rows * 3)


def test_one_rank_needs_no_group(device):
    ub = tex.CommOverlapP2P(
        [8, 4],
        torch.bfloat16,
        tex.CommOverlapHelper(),
        1,
        AG,
        atomic_gemm=True,
        use_ce=False,
        aggregate=True,
    )
    assert (ub.get_tp_size(), ub.is_p2p_overlap(), ub.is_atomic_gemm(), ub.with_cublasmp()) == (
        1,
        True,
        True,
        False,
    )
    assert not tex.CommOverlap(
        [8, 4], torch.bfloat16, tex.CommOverlapHelper(), 1, num_splits=2
    ).is_p2p_overlap()
    x, w = torch.randn(8, 4).bfloat16(), torch.randn(6, 4).bfloat16()
    ub.copy_into_buffer(x.to(ub.get_buffer().device))
    y = general_gemm(w.to(ub.get_buffer()), ub.get_buffer(), ub=ub, ub_type=AG)[0]
    torch.testing.assert_close(y.cpu(), x @ w.t())


@pytest.mark.parametrize(
    ("shape", "tp_size", "helper", "error", "words"),
    [
        ([9, 4], 2, None, ValueError, r"buffer_shape=\[9, 4\] for tp_size=2"),
        ([8], 1, None, ValueError, r"give \[rows, columns\]"),
        ([8, 4], 1, "mpi", TypeError, "is not a CommOverlapHelper"),
        ([8, 4], 2, None, ValueError, "tp_size=2, but the world has 1 ranks"),
    ],
)
def test_buffers_without_ranks_or_rows_are_rejected(shape, tp_size, helper, error, words):
    with pytest.raises(error, match=words):
        tex.CommOverlap(shape, torch.bfloat16, helper or tex.CommOverlapHelper(), tp_size)


def test_values_that_do_not_fit_the_buffer_are_rejected():
    ub = tex.CommOverlap([8, 4], torch.bfloat16, tex.CommOverlapHelper(), 1)
    for value in (torch.ones(4, 4).bfloat16(), torch.ones(8, 4)):
        with pytest.raises(ValueError, match=r"for torch.bfloat16 \[8, 4\] of the buffer"):
            ub.copy_into_buffer(value)
