"""Tensor-list operations: Triton kernels against the float32 reference, the reference against torch."""

from __future__ import annotations

import pytest
import torch

from tests.primitives.by_kernels import Kernels
from tests.support.kernels import DEVICE, parametrize_sizes, runs_kernels
from tests.support.tolerances import DTYPES, MULTIPLIED, UNIT
from transformer_engine.common.operation_settings import Adam, Sgd
from transformer_engine.pytorch.primitives import multi_tensor
from transformer_engine.pytorch.primitives.multi_tensor import (
    MultiTensorRequest,
    adam_rates,
    adam_step,
    addresses,
    block_states,
    copy_to_device,
    halves,
    join_halves,
    reference,
    triton,
)

kernels = Kernels(multi_tensor, "multi_tensor")
# Sizes that end inside a block, inside a chunk, at a chunk, and empty ones; then sizes with aligned addresses.
SIZES = parametrize_sizes(
    "sizes",
    [(5, 8193, 0, 300), (64, 8192)],
    [(1, 1 << 20, 0, 4099, 77), (4096, 1 << 21, 16)],
    ids=str,
)
CPU = torch.device("cpu")
RATES = adam_rates(0.1, (0.9, 0.99), 1e-8, 3, True, 0.01)


def sample_lists(sizes, *kinds, device=DEVICE, seed=0):
    """Parallel lists with random numbers, positive in the fourth list; int16: the lower halves of numbers."""
    generator = torch.Generator().manual_seed(seed)
    results = []
    for index, kind in enumerate(kinds):
        if kind is torch.int16:
            drawn = [
                torch.randint(-(1 << 15), 1 << 15, (n,), generator=generator, dtype=kind)
                for n in sizes
            ]
        else:
            drawn = [torch.randn(n, generator=generator) for n in sizes]
            drawn = [(x.abs() + 0.1 if index == 3 else x).to(kind) for x in drawn]
        results.append([x.to(device) for x in drawn])
    return results


def clone_lists(lists):
    return [[x.clone() for x in tensors] for tensors in lists]


def assert_alike(actual, expected):
    for ours, wanted in zip(actual, expected, strict=True):
        for a, b in zip(ours, wanted, strict=True):
            unit = UNIT.get(a.dtype, 0.0)
            torch.testing.assert_close(a.float(), b.float(), rtol=max(unit, 1e-6), atol=1e-6)


@runs_kernels
@SIZES
@DTYPES
def test_the_scaling_kernel_is_bitwise_equal_to_the_reference(sizes, dtype):
    lists = sample_lists(sizes, dtype, torch.bfloat16)
    expected, factor = clone_lists(lists), torch.tensor([0.37], device=DEVICE)
    flags = [torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    kernels.scale_all(lists, factor, flags[0])
    reference.scale(expected, factor, flags[1])
    assert flags[0].item() == flags[1].item() == 0
    for ours, original in zip(lists[1], expected[1], strict=True):
        assert torch.equal(ours, original)


@runs_kernels
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_the_scaling_kernel_flags_nonfinite_values(value):
    lists, flag = (
        sample_lists((5, 9000), torch.float16, torch.float32),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    lists[0][1][8999] = value
    kernels.scale_all(lists, torch.ones(1, device=DEVICE), flag)
    assert flag.item() == 1


@runs_kernels
@SIZES
@DTYPES
def test_sums_of_squares_equal_the_reference(sizes, dtype):
    (tensors,) = sample_lists(sizes, dtype)
    for factor in (None, torch.tensor([0.5], device=DEVICE)):
        actual = kernels.squares_of_all(tensors, factor)
        expected = torch.stack(
            [(x.double() * (1 if factor is None else 0.5)).square().sum() for x in tensors]
        )
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=0.0)


STATES = {
    "fp32": (torch.float32,) * 4,
    "bf16 gradients": (torch.bfloat16, torch.float32, torch.float32, torch.float32),
    "bf16 moments": (torch.bfloat16,) * 4,
    "bf16, fp32 moments": (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
    "fp16, masters": (torch.float16, torch.float16, torch.float32, torch.float32, torch.float32),
    "bf16, remainders": (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.int16),
}


def whole(lists):
    """Lists with masters in place of parameters and the lower halves that complete them."""
    if lists[-1][0].dtype is not torch.int16:
        return lists
    gradients, upper, first, second, lower = lists
    return [
        gradients,
        [join_halves(u, low) for u, low in zip(upper, lower, strict=True)],
        first,
        second,
    ]


@runs_kernels
@SIZES
@pytest.mark.parametrize("kinds", STATES.values(), ids=STATES)
@pytest.mark.parametrize("decoupled", [True, False])
def test_an_adam_step_equals_the_reference(sizes, kinds, decoupled):
    lists = sample_lists(sizes, *kinds)
    rates = copy_to_device(RATES, torch.device(DEVICE))
    for flag in (None, torch.zeros(1, dtype=torch.int32, device=DEVICE)):
        # a moment that rounds the other way would show in the next step, and larger
        expected = clone_lists(lists)
        kernels.adam_step(lists, rates, Adam(decoupled), flag)
        reference.adam(expected, rates, flag, Adam(decoupled))
        assert_alike(whole(lists), whole(expected))


BLOCK_STATES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16, fp32 gradients": (torch.float32, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "bf16, masters": (torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16, remainders": (torch.bfloat16, torch.bfloat16, torch.int16),
}


def sample_block_lists(sizes, grads, parameters, *masters):
    """Lists with block-scaled moments, whose blocks have different magnitudes, zeros among them."""
    lists = sample_lists(
        sizes, grads, parameters, torch.float32, torch.float32, *masters, device="cpu"
    )
    codes: list[list[torch.Tensor]] = [[], [], [], []]
    for first, second in zip(lists[2], lists[3], strict=True):
        magnitudes = 10.0 ** -(torch.arange(first.numel()) // 128 % 12).float()
        first = torch.where(magnitudes < 1e-10, 0.0, first * magnitudes)
        pairs = (block_states.encode(first, block_states.FIRST),)
        pairs += (block_states.encode(second * magnitudes.square(), block_states.SECOND),)
        for place, values in enumerate((pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1])):
            codes[place].append(values)
    lists = [*lists[:2], *codes, *lists[4:]]
    return [[x.to(DEVICE) for x in tensors] for tensors in lists]


@runs_kernels
@SIZES
@pytest.mark.parametrize("kinds", BLOCK_STATES.values(), ids=BLOCK_STATES)
@pytest.mark.parametrize("stochastic", [True, False])
def test_block_scaled_moments_have_the_codes_of_the_reference(sizes, kinds, stochastic):
    lists = sample_block_lists(sizes, *kinds)
    rates = copy_to_device(
        adam_rates(0.1, (0.9, 0.99), 1e-8, 3, True, 0.01, first_chunk=5), torch.device(DEVICE)
    )
    how = Adam(block_scaled=True, stochastic=stochastic)
    expected = clone_lists(lists)
    kernels.adam_step(lists, rates, how)
    reference.adam(expected, rates, None, how)
    for place in range(2, 6):
        assert all(map(torch.equal, lists[place], expected[place]))
    # Divisions may differ in the last bit of float32, which a bfloat16 parameter shows where rounding changes.
    if kinds[-1] is torch.int16:
        lists, expected = ([x[0], x[1], x[6]] for x in (lists, expected))
        lists, expected = (
            [[join_halves(u, low) for u, low in zip(x[1], x[2], strict=True)]]
            for x in (lists, expected)
        )
    assert_alike(lists, expected)


@runs_kernels
@SIZES
def test_stochastically_rounded_parameters_have_the_random_bits_of_the_reference(sizes):
    """A fused multiply-add may change the last bits of float32, and with them few of the rounded parameters."""
    lists = sample_lists(sizes, *STATES["bf16, fp32 moments"])
    expected, how = clone_lists(lists), Adam(stochastic=True)
    rates = copy_to_device(RATES, torch.device(DEVICE))
    kernels.adam_step(lists, rates, how)
    reference.adam(expected, rates, None, how)
    assert_alike(lists[2:], expected[2:])
    for a, b in zip(lists[1], expected[1], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2.0**-7, atol=1e-6)
    equal = torch.cat([a == b for a, b in zip(lists[1], expected[1], strict=True)])
    assert equal.float().mean() > 0.99


@runs_kernels
def test_a_set_flag_leaves_all_block_scaled_moments_unchanged():
    lists = sample_block_lists((5, 300), *BLOCK_STATES["bf16"])
    before = clone_lists(lists)
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    rates = copy_to_device(RATES, torch.device(DEVICE))
    kernels.adam_step(lists, rates, Adam(block_scaled=True, stochastic=True), flag)
    for ours, wanted in zip(lists, before, strict=True):
        assert all(map(torch.equal, ours, wanted))


@runs_kernels
def test_a_gradient_that_is_not_a_number_reaches_its_block_only():
    lists = sample_block_lists((300,), *BLOCK_STATES["bf16"])
    lists[0][0][130] = torch.nan
    rates = copy_to_device(RATES, torch.device(DEVICE))
    kernels.adam_step(lists, rates, Adam(block_scaled=True))
    for codes, exponents, of in (
        (lists[2][0], lists[4][0], block_states.FIRST),
        (lists[3][0], lists[5][0], block_states.SECOND),
    ):
        broken = block_states.decode(codes, exponents, of).isnan().tolist()
        assert broken == [128 <= index < 256 for index in range(300)]


@runs_kernels
def test_a_set_flag_leaves_all_tensors_unchanged():
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    lists = sample_lists((5, 300), *STATES["bf16, remainders"])
    before = clone_lists(lists)
    kernels.adam_step(lists, copy_to_device(RATES, torch.device(DEVICE)), Adam(), flag)
    momenta = sample_lists((5, 300), *(torch.float32,) * 3)
    saved = clone_lists(momenta)
    kernels.sgd_step(momenta, torch.ones(5, device=DEVICE), Sgd(momentum=True), flag)
    for ours, wanted in zip((*lists, *momenta), (*before, *saved), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@runs_kernels
@SIZES
@pytest.mark.parametrize(
    "how",
    [
        Sgd(),
        Sgd(momentum=True, nesterov=False, first=True),
        Sgd(momentum=True, nesterov=True),
        Sgd(True, late=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("copies", [False, True])
def test_a_gradient_descent_step_equals_the_reference(sizes, how, copies):
    kinds = (torch.float16, *(torch.float32,) * 2, torch.float16)[: 3 + copies]
    lists = sample_lists(sizes, *kinds)
    expected = clone_lists(lists)
    rates = torch.tensor([0.01, 0.9, 0.8, 0.1, 0.5], device=DEVICE)
    flag = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    kernels.sgd_step(lists, rates, how, flag)
    reference.sgd(expected, rates, flag, how)
    assert_alike(lists, expected)


def test_joining_the_halves_of_a_float32_number_restores_it_bitwise():
    every = torch.randint(-(2**31), 2**31, (20000,), dtype=torch.int64).to(torch.int32)
    numbers = torch.cat(
        (every, torch.tensor([0, -(2**31), 0x3F80C000, 0x3F804000, 0x3F808000]).to(torch.int32))
    )
    finite = numbers.view(torch.float32)[~torch.isnan(numbers.view(torch.float32))]
    upper, lower = halves(finite)
    assert torch.equal(join_halves(upper, lower).view(torch.int32), finite.view(torch.int32))
    upper, lower = halves(
        torch.tensor([0x3F80C000, 0x3F804000], dtype=torch.int32).view(torch.float32)
    )
    assert upper.view(torch.int16).tolist() == [0x3F81, 0x3F80] and lower.tolist() == [
        -16384,
        0x4000,
    ]


@pytest.mark.parametrize(("decoupled", "expected"), [(True, 0.899), (False, 0.9)])
def test_one_adam_step_equals_values_computed_by_hand(decoupled, expected, device):
    p, m, v = (torch.full((1,), value, device=device) for value in (1.0, 0.0, 0.0))
    rates = copy_to_device(adam_rates(0.1, (0.9, 0.999), 1e-8, 1, True, 0.01), device)
    adam_step([[torch.full((1,), 0.5, device=device)], [p], [m], [v]], rates, Adam(decoupled))
    assert p.item() == pytest.approx(expected, abs=1e-6)


def test_the_first_bias_correction_is_exact_in_float32():
    second = copy_to_device(
        adam_rates(0.1, (0.9, 0.999), 1e-8, 1, bias_correction=True, weight_decay=0.0), CPU
    )[8]
    assert abs(second.item() / 0.001 - 1) < MULTIPLIED[torch.float32]


def test_the_kernels_reject_tensors_on_the_cpu():
    kinds = (torch.float32, torch.float32)
    assert "on cpu" in (triton.unsupported_reason(MultiTensorRequest("scale", CPU, kinds)) or "")
    if triton.unsupported_elementwise(torch.device("cpu"), torch.float32):
        request = MultiTensorRequest("adam", CPU, kinds, Adam())
        assert [v.backend for v in multi_tensor.TABLE.explain(request) if v.chosen] == ["reference"]


def test_a_table_is_reused_while_its_tensors_addresses_are_unchanged(monkeypatch):
    def addresses_equal(tensors, where, places):
        return [tensors[index].data_ptr() for index in places] == where

    monkeypatch.setattr(addresses, "_addresses_equal", addresses_equal)
    lists = [[torch.zeros(40), torch.zeros(7)], [torch.ones(40), torch.ones(7)]]
    extents = addresses.Extents((40, 7))
    first = addresses.chunk_table(lists, extents, 16)
    assert addresses.chunk_table(lists, extents, 16) is first
    lists[1][0].data = torch.ones(40)
    moved = addresses.chunk_table(lists, extents, 16)
    assert first is not None and moved is not None
    assert moved.table[0].tolist() == [16, lists[0][0].data_ptr(), lists[1][0].data_ptr()]
    assert first.table[0, 2] != moved.table[0, 2]
