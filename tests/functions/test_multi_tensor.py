"""multi_tensor_* extension functions: results, and rejected arguments that change nothing."""

from __future__ import annotations

import pytest
import torch

import transformer_engine_torch as tex
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, MXFP8Quantizer, optimizers
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.optimizers import MultiTensorApply, multi_tensor_applier
from transformer_engine.pytorch.primitives.quantize import scale_from_amax

CHUNK = 65536


@pytest.fixture
def flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def tensors(device, *sizes, dtype=torch.float32):
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


def test_l2norm_covers_all_tensors_and_each_tensor(device, flag):
    argument = tensors(device, 5, 70000, 3)
    norm, each = tex.multi_tensor_l2norm(CHUNK, flag, [argument], True)
    torch.testing.assert_close(norm, torch.cat(argument).norm().view(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(each, torch.stack([x.norm() for x in argument]), rtol=1e-5, atol=0)
    norm, each = multi_tensor_applier(tex.multi_tensor_l2norm, flag, [argument], False)
    assert norm.shape == (1,) and each.numel() == 0 and flag.item() == 0
    half = torch.tensor([0.5], device=device)
    scaled, _ = tex.multi_tensor_unscale_l2norm(CHUNK, flag, [argument], half, False)
    torch.testing.assert_close(scaled, norm / 2)
    argument[1][7] = float("nan")
    tex.multi_tensor_l2norm(CHUNK, flag, [argument])
    assert flag.item() == 1


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_are_scaled_by_a_number_or_a_tensor(to, device, flag):
    argument = tensors(device, 5, 300)
    outputs = [torch.empty_like(x, dtype=to) for x in argument]
    tex.multi_tensor_scale(CHUNK, flag, [argument, outputs], 0.25)
    assert all(torch.equal(y, (x * 0.25).to(to)) for x, y in zip(argument, outputs, strict=True))
    expected = [x * 3 for x in argument]
    multi_tensor_applier(
        tex.multi_tensor_scale_tensor,
        flag,
        [argument, argument],
        torch.tensor([3.0], device=device),
    )
    assert all(torch.equal(x, y) for x, y in zip(argument, expected, strict=True))
    assert flag.item() == 0


@pytest.mark.parametrize(("power_of_two", "epsilon"), [(True, 0.0), (False, 1e-3)])
def test_scales_are_bitwise_equal_to_current_scaling(power_of_two, epsilon, device, flag):
    amaxes = [torch.tensor([x], device=device) for x in (0.0, 3.0, 1e-7, float("inf"), 448.0)]
    scales, inverses = ([torch.empty_like(x) for x in amaxes] for _ in range(2))
    tex.multi_tensor_compute_scale_and_scale_inv(
        CHUNK, flag, [amaxes, scales, inverses], 448.0, power_of_two, epsilon
    )
    expected = scale_from_amax(torch.cat(amaxes), 448.0, power_of_two=power_of_two, epsilon=epsilon)
    assert torch.equal(torch.cat(scales), expected)
    assert torch.equal(torch.cat(inverses), expected.reciprocal())
    x = torch.randn(32, 32, device=device)
    quantizer = Float8CurrentScalingQuantizer(
        DType.kFloat8E4M3, device, force_pow_2_scales=power_of_two, amax_epsilon=epsilon
    )
    outputs = [[torch.zeros(1, device=device)] for _ in range(2)]
    lists = [[x.abs().max().view(1)], *outputs]
    tex.multi_tensor_compute_scale_and_scale_inv(CHUNK, flag, lists, 448.0, power_of_two, epsilon)
    assert torch.equal(outputs[1][0], quantizer(x)._scale_inv)


def test_exponents_equal_mxfp8_scales(device):
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    amax = x.view(32, 2, 32).abs().amax(-1)
    result = torch.zeros_like(amax, dtype=torch.uint8)
    tex.multi_tensor_compute_scale_inv_e8m0(CHUNK, None, [[amax], [result]])
    assert torch.equal(result, MXFP8Quantizer(DType.kFloat8E4M3)(x)._rowwise_scale_inv[:32, :2])


def test_adam_writes_the_master_parameters_codes(device, flag):
    sizes = (5, 64)
    grads, masters = tensors(device, *sizes), tensors(device, *sizes)
    twins = [x.clone() for x in masters]
    moments = [[torch.zeros(n, device=device) for n in sizes] for _ in range(4)]
    codes = [torch.zeros(n, dtype=torch.uint8, device=device) for n in sizes]
    scale, amax, inverse = (
        [torch.full((1,), x, device=device) for _ in sizes] for x in (16.0, 0.0, 0.0)
    )
    numbers = (0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.01)
    lists = [grads, codes, *moments[:2], masters, scale, amax, inverse]
    tex.multi_tensor_adam_fp8(CHUNK, flag, lists, *numbers, DType.kFloat8E4M3)
    tex.multi_tensor_adam(CHUNK, flag, [grads, twins, *moments[2:]], *numbers)
    for code, master, twin, most, inv in zip(codes, masters, twins, amax, inverse, strict=True):
        assert torch.equal(master, twin)
        assert torch.equal(code.view(torch.float8_e4m3fn), (twin * 16).to(torch.float8_e4m3fn))
        assert most.item() == twin.abs().max().item() and inv.item() == 1 / 16


def test_the_capturable_step_equals_the_plain_step_with_device_numbers(device, flag):
    grads, params = tensors(device, 5, 64), tensors(device, 5, 64)
    twins = [x.clone() for x in params]
    moments = [[torch.zeros_like(x) for x in params] for _ in range(4)]
    tex.multi_tensor_adam(
        CHUNK, flag, [grads, params, *moments[:2]], 0.1, 0.9, 0.99, 1e-8, 3, 0, 1, 0.01
    )
    lr, step, half = (torch.tensor([x], device=device) for x in (0.1, 3, 0.5))
    doubled = [2 * x for x in grads]
    masters = [x.clone() for x in twins]
    lists = [doubled, twins, *moments[2:], masters]
    tex.multi_tensor_adam_capturable_master(
        CHUNK, flag, lists, lr, 0.9, 0.99, 1e-8, step.int(), 0, 1, 0.01, half
    )
    for p, q, master in zip(params, twins, masters, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-6)
        assert torch.equal(q, master)


def test_the_applier_skips_empty_lists_and_counts(device, flag):
    records = []
    apply = MultiTensorApply(2048)

    def op(chunk, noop, lists, word):
        records.append((chunk, [len(tensors) for tensors in lists], word))
        return word

    full, empty = torch.ones(3, device=device), torch.ones(0, device=device)
    assert apply(op, flag, [[full, empty], [full, empty]], "done") == "done"
    assert records == [(2048, [1, 1], "done")]
    assert apply(op, flag, [[empty], [empty]], "none") is None
    with pytest.raises(RuntimeError, match=r"the lists have \[1, 2\] tensors"):
        apply(op, flag, [[full], [full, full]], "")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda lists: lists[1].pop(), ValueError, r"the lists have \[2, 1\] tensors"),
        (lambda lists: lists.pop(), ValueError, r"give 2 lists of tensors"),
        (
            lambda lists: lists[0].__setitem__(1, torch.ones(4)),
            ValueError,
            r"has 300 elements, that of list 0 4",
        ),
        (lambda lists: lists[0].__setitem__(1, torch.ones(300).double()), TypeError, "float64"),
        (
            lambda lists: lists[0].__setitem__(1, torch.ones(300).half()),
            TypeError,
            "make one call a dtype",
        ),
        (
            lambda lists: lists[1].__setitem__(1, torch.ones(2, 150).t()),
            ValueError,
            "give contiguous tensors",
        ),
        (
            lambda lists: lists[1].__setitem__(1, torch.ones(300, device="meta")),
            ValueError,
            "one call a device",
        ),
        (lambda lists: lists[1].__setitem__(1, [1.0]), TypeError, "tensor 1 of list 1"),
    ],
)
def test_mismatched_lists_raise_and_change_nothing(change, error, words):
    flag = torch.zeros(1, dtype=torch.int32)
    lists = [[torch.ones(5), torch.ones(300)], [torch.zeros(5), torch.zeros(300)]]
    first = lists[1][0]
    change(lists)
    with pytest.raises(error, match=words):
        tex.multi_tensor_scale(CHUNK, flag, lists, 2.0)
    assert (first == 0).all() and flag.item() == 0


def test_invalid_flags_and_numbers_are_rejected():
    lists = [[torch.ones(5)], [torch.ones(5)]]
    with pytest.raises(ValueError, match="int32 tensor of one element"):
        tex.multi_tensor_scale(CHUNK, torch.zeros(1), lists, 2.0)
    with pytest.raises(TypeError, match="scale"):
        tex.multi_tensor_scale(CHUNK, torch.zeros(1, dtype=torch.int32), lists, "2")
    with pytest.raises(ValueError, match="mode"):
        four = [[torch.ones(5)] for _ in range(4)]
        tex.multi_tensor_adam(
            CHUNK, torch.zeros(1, dtype=torch.int32), four, 0.1, 0.9, 0.99, 1e-8, 1, 2, 1, 0.0
        )


def test_the_names_are_public():
    for name in optimizers.__all__:
        assert getattr(optimizers, name) is not None
        if name.startswith("multi_tensor_") and name != "multi_tensor_applier":
            assert getattr(tex, name) is getattr(optimizers, name)


@pytest.mark.parametrize("scales", [[], [1], [1, 1, 1], [1, 2]])
def test_codes_without_one_scale_per_tensor_raise_before_the_step(scales, device, flag):
    lists = [tensors(device, 6, 4) for _ in range(5)]
    lists[1] = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (6, 4)]
    lists += [[torch.ones(size, device=device) for size in scales] for _ in range(3)]
    before = [[x.clone() for x in part] for part in lists]
    with pytest.raises(
        ValueError, match=r"the scales have \[.*\] elements for 2 tensors of codes;"
    ):
        tex.multi_tensor_adam_fp8(
            CHUNK, flag, lists, 1e-3, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, DType.kFloat8E4M3
        )
    for part, was in zip(lists, before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(part, was, strict=True))


@pytest.mark.gpu
def test_a_factor_on_another_device_raises():
    flag, argument = torch.zeros(1, dtype=torch.int32, device="cuda"), tensors("cuda", 5)
    with pytest.raises(ValueError, match="scale is on cpu, the flag on cuda:0"):
        tex.multi_tensor_scale_tensor(CHUNK, flag, [argument, argument], torch.ones(1))
    with pytest.raises(ValueError, match="inv_scale is on cpu, the flag on cuda:0"):
        tex.multi_tensor_unscale_l2norm(CHUNK, flag, [argument], torch.ones(1))
