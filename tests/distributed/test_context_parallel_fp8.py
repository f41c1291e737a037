"""FP8 attention over ranks is as good as FP8 attention on one device, and its codes travel."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from tests.distributed.context_parallel_cases import (
    Case,
    communication_groups,
    convert_layout,
    create_attention,
    exact,
    packed,
    problem,
    rank_results,
    rank_tokens,
    shared,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.threaded_ranks import run_on_threads
from tests.support.tolerances import assert_as_good_as
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch.functions.attention.context_parallel import attention
from transformer_engine.pytorch.quantization import delayed_scaling

CASE = Case(tokens=64, heads=4, groups=4, head_dim=(16, 16), dtype=torch.bfloat16)
PACKED = replace(CASE, layout="thd", mask="padding_causal", lengths=(33, 60), padded=(48, 64))
CASES = [
    replace(CASE, comm="p2p"),
    replace(CASE, comm="p2p", size=4, groups=2, mask="no_mask", layout="bshd"),
    replace(CASE, comm="all_gather", layout="bshd"),
    replace(CASE, comm="a2a", groups=2),
    replace(CASE, comm="a2a+p2p", size=4),
    replace(PACKED, comm="p2p"),
    replace(PACKED, comm="a2a"),
]
RECIPES = {"delayed": DelayedScaling(fp8_dpa=True), "current": Float8CurrentScaling(fp8_dpa=True)}


@pytest.fixture(autouse=True)
def _states_on_the_cpu(monkeypatch):
    """The module has no parameters, whose device its states would have; its inputs are on the CPU."""
    monkeypatch.setattr(te.DotProductAttention, "_state_device", lambda self: torch.device("cpu"))
    # States of delayed scaling belong to a process: ranks that are threads cannot reduce them one after the other, nor
    # update them while another rank computes.
    monkeypatch.setattr(delayed_scaling, "reduction_group", lambda recipe, group: group)
    monkeypatch.setattr(delayed_scaling, "update_states", lambda *args: None)


def _run(case: Case, recipe, rank: int):
    with te.autocast(enabled=True, recipe=recipe):
        return shared(case, rank)


@pytest.mark.parametrize("backward", ["0", "1"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp8_errors_are_at_most_twice_the_one_device_errors(case, recipe, backward, monkeypatch):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    full = exact(case)
    alone = run_on_threads(partial(_run, replace(case, comm="p2p", size=1), recipe), 1)[0]
    for rank, result in enumerate(run_on_threads(partial(_run, case, recipe), case.size)):
        plain = rank_results(case, alone, rank)
        for name, expected in rank_results(case, full, rank).items():
            assert_as_good_as(result[name], plain[name], expected)


def _shared_output(case: Case, recipe, fp8_output: bool, recompute: bool, rank: int):
    argument, rows = problem(case), rank_tokens((case.tokens,) * case.batch, case.size, rank)
    q, k, v = (
        convert_layout(argument[name][rows], case.layout, case.batch).requires_grad_()
        for name in "qkv"
    )
    module = create_attention(case, dist.group.WORLD)
    with te.autocast(enabled=True, recipe=recipe):
        out = module(q, k, v, fp8_output=fp8_output, checkpoint_core_attention=recompute)
    codes = isinstance(out, te.Float8Tensor)
    out = out.dequantize() if codes else out
    out.backward(torch.ones_like(out))
    return codes, packed(out.detach().unflatten(-1, (case.heads, -1)), case.layout), q.grad


@pytest.mark.parametrize("comm", ["p2p", "a2a"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_codes_are_returned_if_the_caller_requests_them(comm, recompute):
    case, recipe = replace(CASE, comm=comm), RECIPES["current"]
    plain = run_on_threads(partial(_shared_output, case, recipe, False, recompute), 2)
    actual = run_on_threads(partial(_shared_output, case, recipe, True, recompute), 2)
    for (is_codes, out, grad), (values, expected, expected_grad) in zip(actual, plain, strict=True):
        assert is_codes and not values
        # One more rounding to e4m3 of merged outputs; none where the codes themselves have travelled.
        torch.testing.assert_close(out, expected, rtol=2**-3, atol=0.02)
        torch.testing.assert_close(grad, expected_grad, rtol=2**-3, atol=0.05)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("comm", ["p2p", "a2a", "all_gather"])
def test_the_forward_pass_sends_bytes_of_codes(comm, recipe, monkeypatch):
    sent = []
    # it sends a hash in the first step
    monkeypatch.setattr(attention, "checks_step", lambda *_: False)
    for name in ("all_to_all_single", "all_gather_into_tensor"):
        plain = getattr(dist, name)

        def recording(output, x, *args, _plain=plain, **kwargs):
            sent.append(x.dtype)
            return _plain(output, x, *args, **kwargs)

        monkeypatch.setattr(dist, name, recording)

    def run(rank):
        case = replace(CASE, comm=comm)
        given, rows = problem(case), rank_tokens((64, 64), 2, rank)
        q, k, v = (convert_layout(given[name][rows], "sbhd", 2) for name in "qkv")
        # in training mode a second run may need gradients
        module = create_attention(case, dist.group.WORLD).eval()
        with te.autocast(enabled=True, recipe=recipe), torch.no_grad():
            module(q, k, v)

    run_on_threads(run, 2)
    assert sent and set(sent) == {torch.uint8}


def test_current_scaling_has_the_scale_of_one_device():
    """All ranks' q, k and v have the one-device codes, so outputs after a head exchange are equal."""
    case, recipe = replace(CASE, comm="a2a"), RECIPES["current"]
    alone = run_on_threads(partial(_run, replace(case, comm="p2p", size=1), recipe), 1)[0]
    for rank, result in enumerate(run_on_threads(partial(_run, case, recipe), 2)):
        expected = rank_results(case, alone, rank)
        assert torch.equal(result["out"], expected["out"])


@pytest.mark.parametrize("comm", ["p2p", "a2a"])
def test_projections_that_make_codes_share_a_scale(comm):
    """Under fp8_mha each rank's projection has its own maximum."""
    recipe = Float8CurrentScaling(fp8_dpa=True, fp8_mha=True)

    def layer() -> te.MultiheadAttention:
        return te.MultiheadAttention(
            64,
            4,
            attention_dropout=0.0,
            attn_mask_type="causal",
            device="cpu",
            params_dtype=torch.bfloat16,
        )

    full, layers = layer(), [layer(), layer()]
    for each in layers:
        each.load_state_dict(full.state_dict())
    x = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[:16] *= 8  # rank 0's first chunk
    exact_layer = layer().float()
    exact_layer.load_state_dict(full.state_dict())
    expected = exact_layer(x.float())
    with te.autocast(enabled=True, recipe=recipe):
        alone = full(x)

    def run(rank):
        layers[rank].set_context_parallel_group(dist.group.WORLD, [0, 1], None, comm)
        tokens = torch.tensor(rank_tokens((64,), 2, rank))
        with te.autocast(enabled=True, recipe=recipe):
            assert_as_good_as(layers[rank](x[tokens]), alone[tokens], expected[tokens])

    run_on_threads(run, 2)


def _quantized_shards(case: Case, factor: float) -> list[list[te.Float8Tensor]]:
    """q, k and v per rank, with the rank's scale; odd ranks have values 8 times as large.

    Keys are multiplied, and queries divided, by the factor.
    """
    factors = {"q": 1 / factor, "k": factor, "v": 1.0}
    argument, shards = problem(case), []
    for rank in range(case.size):
        rows = rank_tokens((case.tokens,) * case.batch, case.size, rank)
        shards.append([])
        for name in "qkv":
            x = convert_layout(argument[name][rows], case.layout, case.batch) * (
                8 ** (rank % 2) / 4 * factors[name]
            )
            scale = (448 / x.abs().amax().float()).reshape(1)
            quantizer = te.Float8Quantizer(scale, torch.zeros_like(scale), torch.float8_e4m3fn)
            shards[-1].append(quantizer(x))
    return shards


def _results(
    case: Case, recipe, qkv: list[list[torch.Tensor]], dout: list[torch.Tensor], rank: int
):
    """One rank's output, and its gradients for q, k and v."""
    leaves = [x.detach().requires_grad_() for x in qkv[rank]]
    module = create_attention(case, communication_groups(case, rank)[0])
    with te.autocast(enabled=True, recipe=recipe):
        out = module(*leaves)
    out.backward(dout[rank])
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize(
    ("recipe", "comm", "size", "backward"),
    [(recipe, comm, 2, "1") for recipe in RECIPES for comm in ("p2p", "all_gather", "a2a")]
    + [("delayed", "p2p", 4, "0"), ("delayed", "a2a", 4, "1"), ("delayed", "a2a+p2p", 4, "1")]
    + [("delayed", "a2a", 2, "0"), ("delayed", "a2a+p2p", 4, "0")],
)
def test_quantized_inputs_are_read_with_their_ranks_scale(
    recipe, comm, size, backward, monkeypatch
):
    monkeypatch.setenv("NVTE_FP8_DPA_BWD", backward)
    case = replace(CASE, comm=comm, size=size)
    # At the initial scale of 1, keys with the factor would saturate. Gradients in E5M2 would underflow.
    shards = _quantized_shards(case, 64.0 if backward == "0" else 1.0)
    values = [[x.dequantize() for x in shard] for shard in shards]
    rows = [rank_tokens((case.tokens,), size, rank) for rank in range(size)]
    order = torch.cat([torch.tensor(token_indices) for token_indices in rows]).argsort()
    full = [torch.cat(parts)[order] for parts in zip(*values, strict=True)]
    dout = convert_layout(problem(case)["dout"], case.layout, case.batch).flatten(-2)
    leaves = [x.float().requires_grad_() for x in full]
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in leaves), is_causal=True
    )
    out = attended.permute(2, 0, 1, 3).flatten(-2)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout.float())]
    quantizer = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device=torch.device("cpu"))
    codes = [quantizer(x) for x in full]
    run = partial(_results, replace(case, comm="p2p", size=1), RECIPES[recipe], [codes], [dout])
    alone = run_on_threads(run, 1)[0]
    run = partial(
        _results, case, RECIPES[recipe], shards, [dout[token_indices] for token_indices in rows]
    )
    for tokens, result in zip(rows, run_on_threads(run, size), strict=True):
        for actual, plain, exact_result in zip(result, alone, expected, strict=True):
            assert_as_good_as(actual, plain[tokens], exact_result[tokens])


def _steps_with_own_maxima(
    case: Case, recipe, values: list[torch.Tensor], alone: bool, backward: str, device: torch.device
) -> list[torch.Tensor]:
    """This rank's outputs from three steps, with the maxima over its local tokens.

    Args:
        case: The attention.
        recipe: Delayed-scaling recipe.
        values: q, k and v for the full sequence.
        alone: Pass autocast a group with only this rank; otherwise no group.
        backward: NVTE_FP8_DPA_BWD, which ranks do not inherit from the test.
        device: Tensor device.
    """
    os.environ["NVTE_FP8_DPA_BWD"] = backward
    rank, size = dist.get_rank(), dist.get_world_size()
    local = [dist.new_group([member]) for member in range(size)][rank] if alone else None
    group, _ = communication_groups(case, rank)
    tokens = rank_tokens((case.tokens,), size, rank)
    module, outputs = create_attention(case, group).to(device), []
    for step in range(3):
        leaves = [(x[tokens] / 2**step).to(device).requires_grad_() for x in values]
        with te.autocast(recipe=recipe, amax_reduction_group=local):
            out = module(*leaves)
        out.backward(torch.ones_like(out))
        outputs += [out.detach(), leaves[2].grad]
    return outputs


@pytest.mark.parametrize(
    ("comm", "backward", "reduce_amax"),
    [
        ("p2p", "0", True),
        ("p2p", "1", True),
        ("p2p", "1", False),
        ("all_gather", "1", True),
        ("a2a", "0", True),
        ("a2a", "1", True),
        ("a2a", "1", False),
    ],
)
def test_ranks_outside_of_the_amax_reduction_group_share_a_scale(
    comm, backward, reduce_amax, tmp_path
):
    """The second rank has values 16 times as large: without a common scale their codes are read with another one."""
    case = replace(CASE, comm=comm, tokens=32)
    recipe = DelayedScaling(fp8_dpa=True, amax_history_len=1, reduce_amax=reduce_amax)
    values = [convert_layout(problem(case)[name], case.layout, case.batch) for name in "qkv"]
    tokens = [rank_tokens((case.tokens,), case.size, rank) for rank in range(case.size)]
    for x, factor in zip(values, (1.0, 1.0, 16.0), strict=True):
        x[tokens[1]] *= factor
    full = replace(case, comm="p2p", size=1)
    (tmp_path / "alone").mkdir()
    alone = run_on_ranks(
        partial(_steps_with_own_maxima, full, recipe, values, False, backward),
        1,
        tmp_path / "alone",
    )[0]
    run = partial(_steps_with_own_maxima, case, recipe, values, reduce_amax, backward)
    actual = run_on_ranks(run, case.size, tmp_path)
    for step in range(3):
        leaves = [(x / 2**step).double().requires_grad_() for x in values]
        attended = torch.nn.functional.scaled_dot_product_attention(
            *(x.permute(1, 2, 0, 3) for x in leaves), is_causal=True
        )
        out = attended.permute(2, 0, 1, 3).flatten(-2)
        out.sum().backward()
        for number, expected in enumerate((out.detach(), leaves[2].grad)):
            for rank, results in enumerate(actual):
                plain = alone[2 * step + number][tokens[rank]]
                assert_as_good_as(results[2 * step + number], plain, expected[tokens[rank]])


def test_recipes_that_scale_blocks_exchange_values(emulated):
    case, recipe = replace(CASE, head_dim=(32, 32)), MXFP8BlockScaling(fp8_dpa=True)
    full = exact(case)
    alone = run_on_threads(partial(_run, replace(case, size=1), recipe), 1)[0]
    for comm in ("p2p", "a2a"):
        for rank, result in enumerate(
            run_on_threads(partial(_run, replace(case, comm=comm), recipe), 2)
        ):
            plain = rank_results(case, alone, rank)
            for name, expected in rank_results(case, full, rank).items():
                assert_as_good_as(result[name], plain[name], expected)
