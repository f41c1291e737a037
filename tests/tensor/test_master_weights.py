"""Weights written from master shards equal weights quantized in full."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.distributed.ranks import run_on_ranks
from tests.tensor.quantizer_cases import create_quantizer, payload, same_payload, values
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.tensor import (
    cast_master_weights_to_fp8,
    post_all_gather_processing,
    quantize_master_weights,
    replace_raw_data,
)
from transformer_engine.pytorch.tensor.utils import clear_columnwise_cache

WEIGHTS = ("delayed", "current", "mxfp8", "mxfp8_2d", "block_2d", "nvfp4_2d")
SHAPE = (160, 96)


def master(device):
    return values(device, *SHAPE, dtype=torch.float32)


def create_weight(name, device):
    with torch.no_grad():
        return create_quantizer(name, device)(
            torch.ones(SHAPE, dtype=torch.bfloat16, device=device)
        )


def test_weights_of_4over6_are_written_whole_or_not_at_all(device):
    quantizer = te.NVFP4Quantizer(
        with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256
    )
    full = master(device)
    weight = quantizer(torch.ones(SHAPE, dtype=torch.bfloat16, device=device))
    cast_master_weights_to_fp8([weight], [full.view(-1)], [0], None)
    post_all_gather_processing([weight])
    assert same_payload(weight, quantizer(full.bfloat16()))
    with pytest.raises(ValueError, match=r"a shard of elements 0:64 .* with 4over6 cannot be"):
        cast_master_weights_to_fp8([weight], [full.view(-1)[:64]], [0], None)


@pytest.mark.parametrize("name", WEIGHTS)
def test_one_process_writes_the_result_of_quantize(name, device):
    weight = create_weight(name, device)
    cast_master_weights_to_fp8([weight], [master(device).view(-1)], [0], None)
    if weight.transposable:
        assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    post_all_gather_processing([weight])
    quantizer = create_quantizer(name, device)
    assert same_payload(weight, quantizer(master(device).bfloat16()))
    if name == "delayed":
        assert weight._quantizer.amax.item() == quantizer.amax.item()


def _run_with_one_owner_per_weight(device):
    """The weights after rank 0, which which owns the first weight, and rank 1, which owns the second, wrote them."""
    rank, results = torch.distributed.get_rank(), {}
    flat = master(device).view(-1)
    for name in WEIGHTS:
        weights = [create_weight(name, device), create_weight(name, device)]
        masters = [flat if rank == i else None for i in range(2)]
        offsets = [0 if rank == i else None for i in range(2)]
        cast_master_weights_to_fp8(weights, masters, offsets, torch.distributed.group.WORLD)
        results[name] = [payload(weight) for weight in weights]
    return results


def test_a_rank_without_a_part_of_a_weight_has_its_scales(tmp_path):
    ranks = run_on_ranks(_run_with_one_owner_per_weight, 2, tmp_path)
    for name in WEIGHTS:
        expected = payload(create_quantizer(name, torch.device("cpu"))(master("cpu").bfloat16()))
        for rank, results in enumerate(ranks):
            for index, actual in enumerate(results[name]):
                for field, part in actual.items():
                    if rank == index or "scale" in field or "amax" in field:
                        assert torch.equal(part, expected[field]), (name, rank, index, field)


def _sharded(device):
    """Both ranks' weights after each wrote its part and the codes were exchanged."""
    rank, results = torch.distributed.get_rank(), {}
    flat = master(device).view(-1)
    start, stop = ((0, 5000), (5000, flat.numel()))[rank]
    for name in WEIGHTS:
        weight = create_weight(name, device)
        untouched = create_weight(name, device)
        arguments = [weight, untouched], [flat[start:stop], None], [start, None]
        quantize_master_weights(*arguments, torch.distributed.group.WORLD)
        for field in ("_data", "_rowwise_data", "_columnwise_data"):
            codes = getattr(weight, field, None)
            if codes is not None:
                packing = weight.format.packing
                run = codes.contiguous().view(-1)
                run[: start // packing] = 0
                run[stop // packing :] = 0
                torch.distributed.all_reduce(run)
                codes.copy_(run.view(codes.shape))
        post_all_gather_processing([weight])
        results[name] = payload(weight)
    return results


def test_ranks_write_the_same_weights_together(tmp_path, device):
    first, second = run_on_ranks(_sharded, 2, tmp_path)
    for name in WEIGHTS:
        expected = payload(create_quantizer(name, torch.device("cpu"))(master("cpu").bfloat16()))
        for rank in (first, second):
            assert rank[name].keys() == expected.keys(), name
            for field, part in expected.items():
                assert torch.equal(rank[name][field], part), (name, field)


def test_codes_can_be_written_to_a_separate_shard(device):
    flat = master(device).view(-1)
    weight, expected = (
        create_weight("mxfp8", device),
        create_quantizer("mxfp8", device)(master(device).bfloat16()),
    )
    before = weight._rowwise_data.clone()
    target = tuple(torch.zeros(3072, dtype=torch.uint8, device=device) for _ in range(2))
    quantize_master_weights([weight], [flat[:3072]], [0], None, [target])
    assert torch.equal(target[0], expected._rowwise_data.reshape(-1)[:3072])
    assert torch.equal(target[1], expected._columnwise_data.reshape(-1)[:3072])
    assert torch.equal(weight._rowwise_data, before)
    weight, expected = (
        create_weight("delayed", device),
        create_quantizer("delayed", device)(master(device).bfloat16()),
    )
    quantize_master_weights([weight], [flat[:3072]], [0], None, [target[0]])
    assert torch.equal(target[0], expected._data.view(-1)[:3072])


def test_unsupported_arguments_are_rejected(device):
    flat = master(device).view(-1)
    with pytest.raises(ValueError, match="check start_offsets"):
        quantize_master_weights([create_weight("current", device)], [flat], [1], None)
    with pytest.raises(ValueError, match="one of each"):
        quantize_master_weights([create_weight("current", device)], [flat, flat], [0], None)
    with pytest.raises(ValueError, match="two-dimensional blocks"):
        quantize_master_weights([create_weight("block_1d", device)], [flat], [0], None)
    with pytest.raises(ValueError, match="align shards to bytes"):
        quantize_master_weights([create_weight("nvfp4_2d", device)], [flat[:31]], [0], None)


E4M3 = te.DType.kFloat8E4M3


def hybrid_quantizer(device, kind, **settings):
    current = te.Float8CurrentScalingQuantizer
    pairs = {
        "current": lambda: (current(E4M3, device), current(te.DType.kFloat8E5M2, device)),
        "delayed": lambda: tuple(
            te.Float8Quantizer(
                torch.full((1,), scale, device=device), torch.zeros(1, device=device), E4M3
            )
            for scale in (8.0, 16.0)
        ),
        "identity": lambda: (current(E4M3, device), te.IdentityQuantizer()),
        "mxfp8": lambda: (current(E4M3, device), te.MXFP8Quantizer(E4M3)),
    }
    rows, columns = pairs[kind]()
    return te.HybridQuantizer(rowwise_quantizer=rows, columnwise_quantizer=columns, **settings)


@pytest.mark.parametrize("kind", ["current", "delayed", "identity", "mxfp8"])
def test_both_directions_of_a_hybrid_weight_are_written(kind, device):
    weight = hybrid_quantizer(device, kind)(torch.ones(SHAPE, dtype=torch.bfloat16, device=device))
    flat = master(device).view(-1)
    cut = 50 * SHAPE[1]
    quantize_master_weights([weight], [flat], [0], None)
    full = hybrid_quantizer(device, kind)
    expected = full(master(device).bfloat16())
    assert torch.equal(weight.dequantize(), expected.dequantize())
    assert torch.equal(
        weight.columnwise_sub_storage.dequantize(), expected.columnwise_sub_storage.dequantize()
    )
    if kind == "delayed":
        assert (
            weight._quantizer.columnwise_quantizer.amax.item()
            == full.columnwise_quantizer.amax.item()
            > 0
        )
    before = weight.columnwise_sub_storage.dequantize().clone()
    quantize_master_weights([weight], [flat[:cut] / 2], [0], None)
    after = weight.columnwise_sub_storage.dequantize()
    if kind == "delayed":  # the scale stays, so the other ranks' values do too
        assert torch.equal(after[50:], before[50:]) and not torch.equal(after[:50], before[:50])


def test_hybrid_columns_that_follow_from_rows_have_no_master_weights(device):
    quantizer = hybrid_quantizer(device, "current", columnwise_source="rowwise_dequantized")
    weight = quantizer(torch.ones(SHAPE, device=device))
    with pytest.raises(NotImplementedError, match='columnwise_source="original"'):
        quantize_master_weights([weight], [master(device).view(-1)], [0], None)


def test_weights_without_codes_are_written_in_high_precision(device):
    flat, weight = master(device).view(-1), create_weight("identity", device)
    quantize_master_weights([weight], [flat[:100]], [7], None)
    assert torch.equal(weight.dequantize().view(-1)[7:107], flat[:100].bfloat16())
    assert (weight.dequantize().view(-1)[107:] == 1).all()


@pytest.mark.parametrize("name", ["current", "block_2d"])
def test_columns_are_updated_by_the_callers_post_processing(name, device):
    weight = create_weight(name, device)
    quantize_master_weights(
        [weight], [master(device).view(-1)], [0], None, manual_post_all_gather_processing=True
    )
    assert weight.get_usages() == {"rowwise": True, "columnwise": True}
    post_all_gather_processing(weight)
    assert same_payload(weight, create_quantizer(name, device)(master(device).bfloat16()))
    post_all_gather_processing([torch.ones(3), weight])
    clear_columnwise_cache(weight)
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}


@pytest.mark.parametrize(
    "recipe", [recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.Float8BlockScaling]
)
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.usefixtures("emulated")
def test_a_backward_reads_columns_that_were_made_after_its_forward(recipe, saved, device):
    """As a sharding that gathers before each pass has it: codes, forward, columns, backward."""

    def gradient(columns_before_the_forward: bool) -> torch.Tensor:
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=recipe()):
            layer = te.Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device=device)
        weight: Any = layer.weight
        x = values(device, 32, 128, dtype=torch.bfloat16).requires_grad_()
        with te.autocast(recipe=recipe()):
            layer(x).square().sum().backward()
        masters = values(device, 128, 128, dtype=torch.float32).view(-1)
        quantize_master_weights(
            [weight], [masters], [0], None, manual_post_all_gather_processing=True
        )
        x.grad = None
        if columns_before_the_forward:
            post_all_gather_processing(weight)
        with te.autocast(recipe=recipe()):
            y = layer(x)
        if not saved:
            weight.update_usage(columnwise_usage=False)
        post_all_gather_processing(weight)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    actual, expected = gradient(False), gradient(True)
    assert expected.abs().max() > 0
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["delayed", "current", "block_2d"])
def test_existing_columns_are_recomputed_in_place(name, device):
    weight = create_weight(name, device)
    weight.update_usage(columnwise_usage=True)
    fields = [
        field
        for field in ("_transpose", "_columnwise_data", "_columnwise_scale_inv")
        if hasattr(weight, field)
    ]
    before = [getattr(weight, field) for field in fields]
    arguments = [weight], [master(device).view(-1)], [0], None
    quantize_master_weights(*arguments, manual_post_all_gather_processing=True)
    post_all_gather_processing(weight)
    assert all(getattr(weight, field) is old for field, old in zip(fields, before, strict=True))
    assert same_payload(weight, create_quantizer(name, device)(master(device).bfloat16()))


SEEN = {
    "itself": lambda weight: weight,
    "an alias": lambda weight: weight.detach(),
    "a clone": lambda weight: weight.clone(),
    "a copy": copy.deepcopy,
    "a pickle": lambda weight: pickle.loads(pickle.dumps(weight)),
    "a view": lambda weight: weight.view(SHAPE),
}


@pytest.mark.parametrize("observed", SEEN)
@pytest.mark.parametrize("name", ["delayed", "current", "block_2d"])
def test_stale_columns_are_updated_on_request(name, observed, device):
    weight = create_weight(name, device)
    weight.update_usage(columnwise_usage=True)
    arguments = [weight], [master(device).view(-1)], [0], None
    quantize_master_weights(*arguments, manual_post_all_gather_processing=True)
    actual = SEEN[observed](weight)
    actual.update_usage(rowwise_usage=True, columnwise_usage=True)
    expected = create_quantizer(name, device)(master(device).bfloat16())
    expected.update_usage(columnwise_usage=True)
    assert same_payload(actual, expected)
    repeated = payload(actual)
    actual.update_usage(columnwise_usage=True)
    assert all(payload(actual)[field] is part for field, part in repeated.items())


@pytest.mark.parametrize("name", ["delayed", "current", "block_2d"])
def test_columns_out_of_date_do_not_stay_alone(name, device):
    weight = create_weight(name, device)
    weight.update_usage(columnwise_usage=True)
    arguments = [weight], [master(device).view(-1)], [0], None
    quantize_master_weights(*arguments, manual_post_all_gather_processing=True)
    weight.update_usage(rowwise_usage=False)
    expected = create_quantizer(name, device)(master(device).bfloat16())
    assert torch.equal(weight.dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", ["delayed", "block_2d"])
def test_assigned_data_keeps_whether_its_columns_are_stale(name, device):
    stale, fresh = (
        create_weight(name, device),
        create_quantizer(name, device)(master(device).bfloat16()),
    )
    for weight in (stale, fresh):
        weight.update_usage(columnwise_usage=True)
    arguments = [stale], [master(device).view(-1)], [0], None
    quantize_master_weights(*arguments, manual_post_all_gather_processing=True)
    target = create_weight(name, device)
    target.data = stale
    target.update_usage(columnwise_usage=True)
    assert same_payload(target, fresh)


def test_updated_columns_are_the_tensors_that_the_gather_frees(device):
    shard = create_weight("current", device)
    tensors, metadata = shard.fsdp_pre_all_gather(None, None, None, None, None)
    full, derived = shard.fsdp_post_all_gather(tensors, metadata, shard.dtype)
    before = list(derived)
    assert any(part is full._transpose for part in before)
    post_all_gather_processing(full)
    assert len(derived) == len(before) and all(a is b for a, b in zip(derived, before, strict=True))
    assert any(part is full._transpose for part in derived)


def test_a_pair_of_shards_may_be_a_list_and_initial_values_are_dropped(device):
    flat = master(device).view(-1)
    weight, expected = (
        create_weight("mxfp8", device),
        create_quantizer("mxfp8", device)(master(device).bfloat16()),
    )
    weight._high_precision_init_val = flat.cpu()
    target = [torch.zeros(3072, dtype=torch.uint8, device=device) for _ in range(2)]
    quantize_master_weights([weight], [flat[:3072]], [0], None, [target])
    assert torch.equal(target[1], expected._columnwise_data.reshape(-1)[:3072])
    assert not hasattr(weight, "_high_precision_init_val")


@pytest.mark.parametrize(("name", "field"), [("current", "_data"), ("nvfp4_2d", "_rowwise_data")])
def test_codes_move_to_another_buffer(name, field, device):
    weight = create_weight(name, device)
    old = getattr(weight, field)
    buffer = torch.empty_like(old)
    replace_raw_data(weight, buffer)
    assert getattr(weight, field) is buffer and torch.equal(buffer, old)
    with pytest.raises(ValueError, match="codes' dtype and shape"):
        replace_raw_data(weight, buffer[:1])
    weight.update_usage(rowwise_usage=False)
    with pytest.raises(ValueError, match="no row-wise codes"):
        replace_raw_data(weight, buffer)
