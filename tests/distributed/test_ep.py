"""Expert parallelism on threads as ranks: values and all gradients equal one device in float64."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.distributed.expert_cases import (
    HIDDEN,
    Case,
    inputs,
    one_device_results,
    rank_results,
    rows_within_capacity,
)
from tests.distributed.threaded_ranks import run_on_threads
from transformer_engine.common import recipe
from transformer_engine.pytorch import MXFP8Quantizer, ep
from transformer_engine.pytorch.constants import DType

CASES = {
    "one rank": Case((6,), experts=3),
    "two ranks": Case((6, 6)),
    "unequal tokens": Case((7, 2)),
    "no tokens on a rank": Case((0, 5)),
    "no tokens at all": Case((0, 0)),
    "no tokens to a rank": Case((4, 5), spread=(0, 2, 3)),
    "one expert per rank": Case((5, 3), experts=2, top_k=1),
    "every expert": Case((3, 4), experts=4, top_k=4),
    "absent choices": Case((9, 6), absent=0.4),
    "aligned": Case((7, 5), alignment=8),
    "four ranks": Case((5, 0, 3, 8), top_k=3, alignment=4),
    "capacity": Case((6, 6), capacity=40),
    "capacity, aligned": Case((7, 2), capacity=64, alignment=8),
    "capacity, no tokens on a rank": Case((0, 5), capacity=12),
    "capacity, no tokens to a rank": Case((4, 5), capacity=24, spread=(0, 2, 3)),
    "capacity, four ranks": Case((5, 0, 3, 8), top_k=3, capacity=48, absent=0.2),
}
DROPPED = {
    "some": Case((6, 6), capacity=7),
    "less than the tokens of a rank": Case((8, 3), capacity=2, top_k=3),
    "aligned": Case((7, 5), capacity=12, alignment=8),
    "of one rank": Case((4, 5), capacity=5, spread=(0, 2, 3)),
}


def assert_equal_to_one_device(
    case: Case, actual: list[dict[str, Any]], rtol: float, atol: float
) -> None:
    expected = one_device_results(case)
    local = case.experts // len(case.tokens)
    for rank, of_rank in enumerate(actual):
        separate = slice(rank * local, (rank + 1) * local)
        for name in ("y", "tokens", "weights", "fc1", "fc2"):
            reference = expected[name][separate] if name in ("fc1", "fc2") else expected[name][rank]
            torch.testing.assert_close(
                of_rank[name].double(),
                reference,
                rtol=rtol,
                atol=atol,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_equal_one_device(name):
    case = CASES[name]
    result = run_on_threads(lambda rank: rank_results(case, rank), len(case.tokens))
    assert_equal_to_one_device(case, result, 1e-5, 1e-5)


@pytest.mark.parametrize("name", DROPPED)
def test_rows_beyond_the_capacity_are_dropped_and_counted(name):
    case = DROPPED[name]
    result = run_on_threads(lambda rank: rank_results(case, rank, drop=True), len(case.tokens))
    saved = sum(map(len, rows_within_capacity(case, inputs(case).choices)))
    assert saved < sum(int((chosen >= 0).sum()) for chosen in inputs(case).choices)
    assert_equal_to_one_device(case, result, 1e-5, 1e-5)
    assert max(int(of_rank["total"]) for of_rank in result) > case.capacity  # pyright: ignore[reportOperatorIssue]
    assert all(int(of_rank["counts"].sum()) <= case.capacity for of_rank in result)  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("capacity", [None, 48])
def test_bfloat16_is_within_its_rounding(capacity):
    case = Case((9, 7), dtype=torch.bfloat16, top_k=3, capacity=capacity)
    result = run_on_threads(lambda rank: rank_results(case, rank), 2)
    assert_equal_to_one_device(case, result, 0.02, 0.06)


def test_rows_are_ordered_by_expert_rank_and_token_and_padded_with_zeros():
    case = Case((7, 5), alignment=8)
    argument = inputs(case)
    result = run_on_threads(lambda rank: rank_results(case, rank), 2)
    for rank, of_rank in enumerate(result):
        rows, weights = of_rank["rows"], of_rank["row_weights"]
        begin = 0
        for local, count in enumerate(of_rank["counts"].tolist()):
            expert, row = rank * 4 + local, begin
            for source, chosen in enumerate(argument.choices):
                for token, index in (chosen == expert).nonzero().tolist():
                    assert torch.equal(rows[row], argument.tokens[source][token])
                    assert weights[row] == argument.weights[source][token, index]
                    row += 1
            assert (
                count % 8 == 0
                and not rows[row : begin + count].any()
                and not weights[row : begin + count].any()
            )
            begin += count
        assert begin == rows.shape[0] == int(of_rank["total"])


def test_both_modes_compute_the_same_bits():
    eager, fixed = (
        Case((7, 5), dtype=torch.bfloat16),
        Case((7, 5), dtype=torch.bfloat16, capacity=40),
    )
    results = [
        run_on_threads(lambda rank, case=case: rank_results(case, rank), 2)
        for case in (eager, fixed)
    ]
    for one, other in zip(*results, strict=True):
        for name in ("y", "tokens", "weights", "fc1", "fc2", "counts"):
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("capacity", [None, 64])
def test_mxfp8_dispatch_sends_codes_and_scales(capacity):
    case = Case((7, 5), dtype=torch.bfloat16, alignment=4, capacity=capacity)
    argument = inputs(case)

    def record_received(rank: int) -> dict[str, Any]:
        ep.ep_bootstrap(None, 8, 7, HIDDEN, 2, capacity)
        buffers = [
            ep.EpBuffer(2, 7, HIDDEN, 4, alignment=4, dispatch_fwd_quant_recipe=result)
            for result in (None, recipe.MXFP8BlockScaling())
        ]
        arguments = (argument.tokens[rank], argument.choices[rank], argument.weights[rank])
        rows = [ep.ep_dispatch(buffer, *arguments)[0] for buffer in buffers]
        ep.ep_finalize()
        return {"plain": rows[0], "quantized": rows[1]}

    for of_rank in run_on_threads(record_received, 2):
        expected = MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)(
            of_rank["plain"]
        )
        filled = of_rank["plain"].any(1)
        assert filled.any()
        for name in ("_rowwise_data", "_rowwise_scale_inv"):
            codes = getattr(of_rank["quantized"], name), getattr(expected, name)
            assert torch.equal(*(code[: filled.shape[0]][filled] for code in codes)), name
        assert torch.equal(of_rank["quantized"].dequantize(), expected.dequantize())


@pytest.mark.parametrize(
    "result", [recipe.MXFP8BlockScaling(), recipe.Float8BlockScaling()], ids=["mxfp8", "block"]
)
def test_a_quantized_exchange_trains_within_the_format_s_rounding(result):
    settings = {"dispatch_fwd_quant_recipe": result, "combine_bwd_quant_recipe": result}
    case = Case((7, 5), settings=settings)
    plain = Case((7, 5))
    actual = run_on_threads(lambda rank: rank_results(case, rank), 2)
    expected = one_device_results(case)
    for name in ("y", "tokens", "weights"):
        full = torch.cat(expected[name])
        error = torch.cat([of_rank[name] for of_rank in actual]).double() - full
        assert 0 < error.norm() < 0.06 * full.norm(), name  # E4M3 rounds by up to 1/16
    exact = run_on_threads(lambda rank: rank_results(plain, rank), 2)
    for rank, (a, b) in enumerate(zip(actual, exact, strict=True)):
        error = a["fc1"].double() - expected["fc1"][rank * 4 : rank * 4 + 4]
        assert error.norm() < 0.06 * expected["fc1"].norm()
        assert not torch.equal(a["fc1"], b["fc1"])


@pytest.mark.parametrize(
    "result",
    [recipe.Float8CurrentScaling(), recipe.DelayedScaling(), recipe.NVFP4BlockScaling()],
    ids=["current", "delayed", "nvfp4"],
)
def test_recipes_whose_rows_share_a_scale_are_rejected(result):
    def attempt(rank: int) -> str:
        ep.ep_bootstrap(None, 4, 4, HIDDEN)
        try:
            with pytest.raises(
                NotImplementedError, match=r"share a scale.*pass MXFP8BlockScaling"
            ) as raised:
                ep.EpBuffer(1, 4, HIDDEN, 4, dispatch_fwd_quant_recipe=result)
            return str(raised.value)
        finally:
            ep.ep_finalize()

    assert type(result).__name__ in run_on_threads(attempt, 1)[0]


def test_two_dispatches_in_flight_and_a_buffer_used_again_keep_their_routing():
    case = Case((6, 6))
    argument = inputs(case)

    def attempt(rank: int) -> None:
        ep.ep_bootstrap(None, 8, 6, HIDDEN, 2)
        first, second = (ep.EpBuffer(2, 6, HIDDEN, 4) for _ in range(2))
        x, w = argument.tokens[rank].clone().requires_grad_(), argument.weights[rank]
        transposed = argument.choices[rank].flip(0)
        a = ep.ep_dispatch(first, x, argument.choices[rank], w)[0]
        b = ep.ep_dispatch(second, x, transposed, w)[0]
        y = [
            ep.ep_combine(buffer, rows, num_local_tokens=6)
            for buffer, rows in ((first, a), (second, b))
        ]
        ep.ep_dispatch(first, x, transposed, w)  # before the backward pass for its first use
        torch.testing.assert_close(y[0], 2 * x)
        torch.testing.assert_close(y[1], 2 * x)
        (y[0] + 3 * y[1]).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 8.0))
        ep.ep_finalize()

    run_on_threads(attempt, 2)


def test_buffers_of_the_caller_hold_rows_weights_and_gradient():
    case = Case((6, 5), capacity=32)
    argument = inputs(case)

    def attempt(rank: int) -> None:
        ep.ep_bootstrap(None, 8, 6, HIDDEN, 2, 32)
        buffer = ep.EpBuffer(2, 6, HIDDEN, 4)
        rows, gradient = (
            ep.symm_mem_alloc((32, HIDDEN), torch.float32, None, "cpu") for _ in range(2)
        )
        weights = ep.symm_mem_alloc([32], torch.float32, None, "cpu")
        assert (
            ep.is_symm_backed(rows)
            and ep.is_symm_backed(rows[3:])
            and not ep.is_symm_backed(torch.zeros(3))
        )
        x = argument.tokens[rank].clone().requires_grad_()
        for _ in range(2):  # the second call overwrites the first result
            arguments = (x, argument.choices[rank], argument.weights[rank])
            received, received_weights, counts = ep.ep_dispatch(
                buffer, *arguments, recv_tokens=rows, recv_topk_weights=weights
            )
            assert (
                received.data_ptr() == rows.data_ptr()
                and received_weights.data_ptr() == weights.data_ptr()
            )
            y = ep.ep_combine(buffer, received * 2, grad_out=gradient)
            assert y.shape == (6, HIDDEN) and not y[case.tokens[rank] :].any()
            x.grad = None
            y[: case.tokens[rank]].sum().backward()
            torch.testing.assert_close(x.grad, torch.full_like(x, 4.0))
            assert (
                gradient[: int(counts.sum())].eq(1).all()
                and not gradient[int(counts.sum()) :].any()
            )
        ep.ep_finalize()

    run_on_threads(attempt, 2)


def test_prepare_returns_the_counts_of_a_dispatch_and_frozen_inputs_are_dispatched():
    case = Case((6, 6), alignment=4)
    argument = inputs(case)

    def attempt(rank: int) -> None:
        ep.ep_bootstrap(None, 8, 6, HIDDEN)
        buffer = ep.EpBuffer(2, 6, HIDDEN, 4, alignment=4)
        expected = ep.ep_prepare(buffer, argument.choices[rank].int())
        assert buffer.handle_mem.dtype == torch.uint8 and buffer.tokens_per_expert is expected
        x = argument.tokens[rank].view(2, 3, HIDDEN)
        rows, weights, counts = ep.ep_dispatch(
            buffer, x, argument.choices[rank], argument.weights[rank]
        )
        assert (
            torch.equal(counts, expected) and not rows.requires_grad and not weights.requires_grad
        )
        w = argument.weights[rank].clone().requires_grad_()  # the router alone is trained
        rows, weights, _ = ep.ep_dispatch(buffer, x, argument.choices[rank], w)
        y = ep.ep_combine(buffer, rows * weights[:, None], num_local_tokens=6)
        y.sum().backward()
        torch.testing.assert_close(w.grad, x.reshape(6, HIDDEN).sum(1, keepdim=True).expand(6, 2))
        ep.ep_finalize()

    run_on_threads(attempt, 2)


def test_rows_that_do_not_fit_are_an_error_on_every_rank():
    case = Case((6, 6), capacity=3, spread=(4, 5, 6))

    def attempt(rank: int) -> str:
        with pytest.raises(RuntimeError, match="drop_on_overflow=True") as raised:
            rank_results(case, rank)
        ep.ep_finalize()
        return str(raised.value)

    assert all("24 on rank 1 are needed" in message for message in run_on_threads(attempt, 2))


INVALID: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weights": ({"topk_weights": torch.rand(4, 2).double()}, TypeError, r"pass float32"),
    "width": ({"tokens": torch.rand(4, 8)}, ValueError, r"pass \[T, 32\]"),
    "number of tokens": (
        {"tokens": torch.rand(3, HIDDEN)},
        ValueError,
        "one row of topk_idx per token",
    ),
    "choices": ({"topk_idx": torch.rand(4, 2)}, TypeError, "int32"),
    "number of choices": (
        {"topk_idx": torch.zeros(4, 3, dtype=torch.long)},
        ValueError,
        r"\[T, 2\]",
    ),
    "too many tokens": (
        {"topk_idx": torch.zeros(9, 2, dtype=torch.long)},
        ValueError,
        "max_tokens_per_rank=6",
    ),
    "buffer in eager mode": (
        {"recv_tokens": torch.rand(4, HIDDEN)},
        ValueError,
        "pass recv_capacity_per_rank",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_call_of_one_rank_raises_on_all_ranks(name):
    changed, kind, words = INVALID[name]
    valid = {
        "tokens": torch.rand(4, HIDDEN),
        "topk_idx": torch.arange(8).view(4, 2),
        "topk_weights": torch.rand(4, 2),
    }

    def attempt(rank: int) -> None:
        ep.ep_bootstrap(None, 8, 6, HIDDEN, 2)
        buffer = ep.EpBuffer(2, 6, HIDDEN, 4)
        before = ep.ep_dispatch(buffer, **valid)[2]
        expected = (kind, words) if rank == 1 else (ValueError, r"ranks \[1\] .* invalid arguments")
        with pytest.raises(expected[0], match=expected[1]):
            ep.ep_dispatch(buffer, **({**valid, **changed} if rank == 1 else valid))
        assert buffer.tokens_per_expert is before
        torch.testing.assert_close(
            ep.ep_combine(buffer, torch.ones(8, HIDDEN))[:4], torch.full((4, HIDDEN), 2.0)
        )
        ep.ep_finalize()

    run_on_threads(attempt, 2)


def test_settings_that_differ_over_ranks_are_an_error_on_all():
    def attempt(rank: int) -> None:
        with pytest.raises(ValueError, match=r"hidden_dim is \[32, 33\] on the ranks"):
            ep.ep_bootstrap(None, 8, 6, 32 + rank)
        assert not ep.is_ep_bootstrapped()
        ep.ep_bootstrap(None, 8, 6, 32)
        assert ep.is_ep_bootstrapped() and ep._BOOTSTRAPPED
        ep.ep_finalize()
        ep.ep_finalize()
        assert not ep._BOOTSTRAPPED

    run_on_threads(attempt, 2)


def test_a_process_without_groups_is_a_group_of_one():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ep.ep_bootstrap(None, 4, 8, HIDDEN)
    try:
        with pytest.raises(RuntimeError, match="call ep_finalize before another"):
            ep.ep_bootstrap(None, 4, 8, HIDDEN)
        buffer = ep.EpBuffer(2, 8, HIDDEN, 4)
        with pytest.raises(RuntimeError, match="call ep_dispatch with this buffer first"):
            ep.ep_combine(buffer, torch.zeros(0, HIDDEN))
        x = torch.randn(8, HIDDEN, requires_grad=True)
        choices = torch.rand(8, 4).argsort(1)[:, :2]
        rows, _, _ = ep.ep_dispatch(buffer, x, choices, torch.rand(8, 2))
        with pytest.raises(ValueError, match=r"pass one output per received row, \[16, 32\]"):
            ep.ep_combine(buffer, rows[1:])
        ep.ep_combine(buffer, rows).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))
    finally:
        ep.ep_finalize()
    with pytest.raises(RuntimeError, match="call ep_bootstrap first"):
        ep.EpBuffer(2, 8, HIDDEN, 4)


def test_compiled_code_calls_the_functions_eagerly_with_the_same_bits():
    ep.ep_bootstrap(None, 4, 8, HIDDEN, 2, 16)
    try:

        def mixture(x: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            buffer = ep.EpBuffer(2, 8, HIDDEN, 4)
            rows, row_weights, _ = ep.ep_dispatch(buffer, x.sin(), choices, weights)
            return ep.ep_combine(buffer, rows.tanh() * row_weights[:, None]).cos()

        choices = torch.rand(8, 4).argsort(1)[:, :2]
        leaves = torch.randn(8, HIDDEN, requires_grad=True), torch.rand(8, 2, requires_grad=True)
        results = []
        for called in (mixture, torch.compile(mixture, backend="eager")):
            y = called(leaves[0], choices, leaves[1])
            results.append((y, *torch.autograd.grad(y.sum(), leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        y = mixture(leaves[0], choices, leaves[1])
        (gradient,) = torch.autograd.grad(y.sum(), leaves[:1], create_graph=True)
        # a second derivative
        with pytest.raises(RuntimeError, match=r"moe_permute|expert parallelism"):
            gradient.sum().backward()
    finally:
        ep.ep_finalize()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"zero_copy": True}, "zero_copy=True requires recv_capacity_per_rank"),
        ({"drop_on_overflow": True}, "drop_on_overflow=True requires recv_capacity_per_rank"),
        ({"num_topk": 0}, "num_topk"),
    ],
)
def test_invalid_settings_are_rejected(arguments, words):
    with pytest.raises(ValueError, match=words):
        ep.ep_bootstrap(None, 4, 8, HIDDEN, **arguments)
    assert not ep.is_ep_bootstrapped()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"alignment": 3}, "power of two"),
        ({"num_local_experts": 2}, "pass 4"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_invalid_buffers_are_rejected(arguments, words):
    ep.ep_bootstrap(None, 4, 8, HIDDEN)
    try:
        with pytest.raises(ValueError, match=words):
            ep.EpBuffer(
                **{
                    "top_k": 2,
                    "max_tokens_per_rank": 8,
                    "hidden_dim": 32,
                    "num_local_experts": 4,
                    **arguments,
                }
            )
    finally:
        ep.ep_finalize()


def test_arguments_without_effect_warn_once():
    with pytest.warns(UserWarning, match="max_num_sms=8 has no effect"):
        ep.ep_bootstrap(None, 4, 8, HIDDEN, max_num_sms=8)
    try:
        with pytest.warns(UserWarning, match="pass it to ep_bootstrap too"):
            ep.EpBuffer(2, 8, HIDDEN, 4, recv_capacity_per_rank=16)
    finally:
        ep.ep_finalize()
