"""Collectives on two ranks: order, sums, dtypes that travel as bytes, asynchronous handles, errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import run_on_ranks
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.distributed import (
    _NVFP4AllGatherAsyncHandle,
    allreduce,
    collectives,
    gather_along_first_dim,
    rank,
    reduce_scatter_along_first_dim,
    symmetric_all_reduce,
    world_size,
)
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

SIZE = 2


def _own(device):
    return torch.arange(12, dtype=torch.float32, device=device).view(4, 3) + 100 * dist.get_rank()


def _rows(device):
    return torch.linspace(-3, 3, 128 * 128, device=device).view(128, 128) * (1 + dist.get_rank())


def _quantizers(device):
    one = torch.ones(1, device=device)
    return [
        ("delayed", Float8Quantizer(one * 8, one * 0, torch.float8_e4m3fn)),
        ("mxfp8", MXFP8Quantizer(DType.kFloat8E4M3)),
    ]


def _gather_quantized(quantizer, device):
    """Return a matrix quantized after gathering, and gathered after quantizing as a tensor and as a storage."""
    full = quantizer(gather_along_first_dim(_rows(device), None)[0])
    as_tensor = gather_along_first_dim(quantizer(_rows(device)), None)[0]
    assert type(as_tensor) is type(full)
    as_storage = gather_along_first_dim(quantizer.encode(_rows(device), True, False), None)[0]
    assert not isinstance(as_storage, torch.Tensor)
    return [tensor.dequantize() for tensor in (full, as_tensor, as_storage)]


def _collect(device):
    group = dist.group.WORLD
    x = _own(device)
    results = {"gather": gather_along_first_dim(x, group)[0]}
    results["gather_strided"] = gather_along_first_dim(x.t(), group)[0]
    results["gather_3d"] = gather_along_first_dim(x.view(4, 3, 1), group)[0]
    results["gather_fp8"] = gather_along_first_dim(x.to(torch.float8_e5m2), group)[0].float()
    results["gather_quantized"] = gather_along_first_dim(x, group, quantizer=lambda t: t * 2)[0]
    results |= {
        f"gather_{name}": _gather_quantized(quantizer, device)
        for name, quantizer in _quantizers(device)
    }
    gathered, handle = gather_along_first_dim(x, group, async_op=True)
    handle.wait()
    results["gather_async"] = gathered
    results["gather_into"] = _gather_into_buffers(x, group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        results[f"scatter_{dtype}"] = reduce_scatter_along_first_dim(x.to(dtype), group)[0]
        results[f"reduce_{dtype}"] = allreduce(x.to(dtype, copy=True), group)[0]
    results["symmetric"] = symmetric_all_reduce(x.clone(), group, all_reduce_type="two_shot")[0]
    scattered, handle = reduce_scatter_along_first_dim(x, group, async_op=True)
    handle.wait()
    results["scatter_async"] = scattered
    in_place = x.clone()
    summed, handle = allreduce(in_place, group, async_op=True)
    handle.wait()
    results["reduce_in_place"] = torch.tensor(summed is in_place)
    with pytest.raises(ValueError, match="not a multiple of the 2 ranks"):
        reduce_scatter_along_first_dim(x[:3], group)
    _gather_ragged(device, group)
    results["world"] = torch.tensor([rank(group), world_size(group)])
    results["compiled"] = torch.compile(_all_three, fullgraph=True, backend="eager")(x)
    return results


def _gather_ragged(device, group):
    """Rows that end inside a block of one scale are gathered as values and quantized again."""
    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True)
    ragged = quantizer(_rows(device)[:3])
    expected = quantizer(gather_along_first_dim(ragged.dequantize(), group)[0])
    with pytest.warns(
        UserWarning, match="3 rows ends inside a block of 128 rows of one scale: it is gathered in"
    ):
        actual, _ = gather_along_first_dim(ragged, group)
    assert type(actual) is type(expected) and torch.equal(
        actual._rowwise_data, expected._rowwise_data
    )
    assert torch.equal(actual._columnwise_data, expected._columnwise_data)
    later, handle = gather_along_first_dim(ragged, group, async_op=True, quantizer=quantizer)
    handle.wait()
    assert torch.equal(later._rowwise_data, expected._rowwise_data)
    target = quantizer.make_empty(expected.shape, device=device)
    assert gather_along_first_dim(ragged, group, output_tensor=target)[0] is target
    assert torch.equal(target.dequantize(), expected.dequantize())
    ragged._quantizer = None
    with pytest.raises(ValueError, match="inside a block of 128 rows of one scale, "):
        gather_along_first_dim(ragged, group)


def _gather_into_buffers(x, group):
    """Gathered into a tensor of the caller's: plain, FP8, quantized on the way and before, and coalesced."""
    tokens = [torch.zeros(2 * x.shape[0], *x.shape[1:], device=x.device) for _ in range(3)]
    outputs = [gather_along_first_dim(x, group, output_tensor=tokens[0])[0]]
    with dist._coalescing_manager(group, async_ops=False):
        outputs += [
            gather_along_first_dim(x * factor, group, output_tensor=out, external_coalescing=True)[
                0
            ]
            for factor, out in ((1, tokens[1]), (2, tokens[2]))
        ]
    assert all(a is b for a, b in zip(outputs, tokens, strict=True))
    codes = torch.zeros(tokens[0].shape, dtype=torch.float8_e5m2, device=x.device)
    assert gather_along_first_dim(x.to(torch.float8_e5m2), group, output_tensor=codes)[0] is codes
    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
    rows = torch.cat([x, x]).repeat(16, 43)[:128, :128].contiguous()
    for source, options in ((rows, {"quantizer": quantizer}), (quantizer(rows), {})):
        target = quantizer.make_empty((256, 128), device=x.device)
        result = gather_along_first_dim(source, group, output_tensor=target, **options)[0]
        assert result is target
        assert torch.equal(
            target.dequantize(), gather_along_first_dim(source, group, **options)[0].dequantize()
        )
    _quantized_later(quantizer, rows, group)
    with pytest.raises(ValueError, match="the gathered rows are"):
        gather_along_first_dim(x, group, output_tensor=tokens[0][1:])
    with pytest.raises(TypeError, match="give a plain tensor"):
        gather_along_first_dim(x, group, output_tensor=target)
    assert torch.equal(codes.float(), tokens[0].to(codes.dtype).float())
    return torch.stack([tokens[0], tokens[1], tokens[2] / 2])


def _quantized_later(quantizer, rows, group):
    """Asynchronous and coalesced gathers of quantized tensors are whole when their handles have waited."""
    for source, options in ((rows, {"quantizer": quantizer}), (quantizer(rows), {})):
        expected = gather_along_first_dim(source, group, **options)[0].dequantize()
        actual, handle = gather_along_first_dim(source, group, async_op=True, **options)
        handle.wait()
        handle.wait()  # once more changes nothing
        assert torch.equal(actual.dequantize(), expected)
        target = quantizer.make_empty((256, 128), device=rows.device)
        with dist._coalescing_manager(group, async_ops=False):
            actual, handle = gather_along_first_dim(
                source, group, external_coalescing=True, output_tensor=target, **options
            )
        assert isinstance(handle, _NVFP4AllGatherAsyncHandle)
        assert handle.async_handle is None
        handle.wait()
        assert actual is target
        assert torch.equal(target.dequantize(), expected)


def _all_three(x):
    gathered = gather_along_first_dim(x, None)[0]
    return reduce_scatter_along_first_dim(gathered, None)[0] + allreduce(x * 1, None)[0]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(_collect, SIZE, tmp_path_factory.mktemp("collectives"))


X0 = torch.arange(12, dtype=torch.float32).view(4, 3)
X1 = X0 + 100


def test_a_gather_has_all_ranks_in_rank_order(results):
    for result in results:
        assert torch.equal(result["gather"], torch.cat((X0, X1)))
        assert torch.equal(result["gather_3d"], torch.cat((X0, X1)).view(8, 3, 1))
        assert torch.equal(result["gather_strided"], torch.cat((X0.t(), X1.t())))
        assert torch.equal(result["gather_async"], result["gather"])


def test_fp8_codes_arrive_unchanged(results):
    expected = torch.cat((X0, X1)).to(torch.float8_e5m2).float()
    assert all(torch.equal(result["gather_fp8"], expected) for result in results)


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_quantized_rows_are_sent_as_codes(results, name):
    for result in results:
        full, as_tensor, as_storage = result[f"gather_{name}"]
        assert full.shape == (256, 128)
        assert torch.equal(as_tensor, full) and torch.equal(as_storage, full)


def test_a_quantizer_receives_the_gathered_tensor(results):
    assert all(
        torch.equal(result["gather_quantized"], torch.cat((X0, X1)) * 2) for result in results
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reduce_scatter_sums_reach_their_rank_in_every_dtype(results, dtype):
    total = X0.to(dtype) + X1.to(dtype)
    for index, result in enumerate(results):
        assert torch.equal(result[f"reduce_{dtype}"], total)
        assert torch.equal(result[f"scatter_{dtype}"], total[2 * index : 2 * index + 2])


def test_asynchronous_and_symmetric_sums_equal_the_plain_ones(results):
    for result in results:
        assert torch.equal(result["scatter_async"], result["scatter_torch.float32"])
        assert torch.equal(result["symmetric"], X0 + X1)
        assert bool(result["reduce_in_place"])


def test_rank_and_size_come_from_the_group(results):
    assert [result["world"].tolist() for result in results] == [[0, SIZE], [1, SIZE]]


def test_a_gather_fills_the_output_tensor(results):
    for result in results:
        assert all(torch.equal(actual, torch.cat((X0, X1))) for actual in result["gather_into"])


def test_compiled_collectives_equal_eager_ones(results):
    for index, result in enumerate(results):
        local = (X0, X1)[index]
        assert torch.equal(result["compiled"], local * SIZE + X0 + X1)


def test_without_a_process_group_every_collective_is_the_identity():
    x = torch.ones(3, 2)
    assert world_size(None) == 1 and rank(None) == 0
    for collective in (
        gather_along_first_dim,
        reduce_scatter_along_first_dim,
        allreduce,
        symmetric_all_reduce,
    ):
        result, handle = collective(x, None)
        assert result is x and handle is None


@pytest.mark.parametrize("later", ["async_op", "external_coalescing"])
def test_a_quantized_gather_on_one_rank_returns_no_handle(later):
    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
    rows = torch.randn(128, 128)
    gathered, handle = gather_along_first_dim(rows, None, quantizer=quantizer, **{later: True})
    assert handle is None
    assert torch.equal(gathered.dequantize(), quantizer(rows).dequantize())


def test_a_gather_on_one_rank_fills_the_output_tensor():
    x, out = torch.ones(3, 2), torch.zeros(3, 2)
    assert gather_along_first_dim(x, None, output_tensor=out)[0] is out and torch.equal(out, x)
    assert allreduce(x) == (x, None)


def test_an_unknown_symmetric_all_reduce_is_rejected():
    with pytest.raises(ValueError, match="two_shot"):
        symmetric_all_reduce(torch.ones(2), None, all_reduce_type="three_shot")


def test_a_gather_of_a_quantized_tensor_waits_for_every_part_of_it(monkeypatch):
    """Gloo ends collectives in any order: codes may arrive after the scales that were sent behind them."""
    waited = []

    class Work:
        def __init__(self, target, rows):
            self.target, self.rows = target, rows

        def wait(self):
            self.target.copy_(self.rows)
            waited.append(self.target)

    def gather(part, group, async_op, output=None):
        target = torch.zeros((2 * part.shape[0], *part.shape[1:]), dtype=part.dtype)
        return target, Work(target, torch.cat([part, part]))

    monkeypatch.setattr(collectives, "world_size", lambda group: 2)
    monkeypatch.setattr(collectives, "_gather", gather)
    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
    quantized = quantizer(torch.randn(128, 256))
    result, handle = gather_along_first_dim(quantized, None, async_op=True)
    assert handle is not None
    handle.wait()
    assert len(waited) == 2, "codes and scales"
    assert torch.equal(result.dequantize(), torch.cat([quantized.dequantize()] * 2))
