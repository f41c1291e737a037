"""FusedMuon steps as torch.optim.Muon does, and as a loop in float64 where torch's optimizer has no such parameter."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch.optimizers import FusedMuon, orthogonal_updates
from transformer_engine.pytorch.optimizers.newton_schulz import get_coefficients
from transformer_engine.pytorch.optimizers.orthogonal_updates import orthogonalize

SHAPES = [(16, 32), (32, 16), (24, 24), (16, 32), (1, 8)]


def parameters(shapes=SHAPES, dtype=torch.float32, seed: int = 3) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def set_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def orthogonal(u: Tensor, steps: int = 5, coefficients=(3.4445, -4.775, 2.0315)) -> Tensor:
    """Newton-Schulz iterations on one matrix in float64."""
    x = u.double() if u.shape[0] <= u.shape[1] else u.double().T
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = coefficients
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if u.shape[0] <= u.shape[1] else x.T


def reference_steps(
    start: Tensor, grads: list[Tensor], lr=0.02, decay=0.1, momentum=0.95
) -> Tensor:
    """Nesterov steps on one matrix in float64."""
    p, m = start.double().clone(), torch.zeros_like(start, dtype=torch.float64)
    for grad in grads:
        m = m.lerp(grad.double(), 1 - momentum)
        update = orthogonal(grad.double().lerp(m, momentum))
        p = p * (1 - lr * decay) - lr * math.sqrt(max(1, p.shape[0] / p.shape[1])) * update
    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjustment", [None, "original", "match_rms_adamw"])
def test_single_matrices_equal_torch_bit_for_bit(dtype, nesterov, adjustment):
    for shape in SHAPES:
        ours, original = parameters([shape], dtype), parameters([shape], dtype)
        settings = {
            "lr": 0.02,
            "weight_decay": 0.3,
            "nesterov": nesterov,
            "adjust_lr_fn": adjustment,
        }
        actual, reference = FusedMuon(ours, **settings), torch.optim.Muon(original, **settings)
        for step in range(4):
            set_gradients(ours, step)
            set_gradients(original, step)
            actual.step()
            if dtype == torch.bfloat16 and not nesterov:
                # torch 2.13 divides the bfloat16 momentum itself by its norm.
                buffer = actual.state[ours[0]]["momentum_buffer"].clone()
                reference.step()
                reference.state[original[0]]["momentum_buffer"].copy_(buffer)
            else:
                reference.step()
            if dtype == torch.bfloat16 and shape[0] > shape[1]:
                # torch adds a transposed update to a bfloat16 parameter by a kernel with another rounding.
                torch.testing.assert_close(ours[0], original[0], rtol=2.0**-7, atol=2.0**-9)
                original[0].data.copy_(ours[0])
            else:
                assert torch.equal(ours[0], original[0])


def test_batches_of_equal_shapes_equal_the_iteration_in_float64():
    params = parameters()
    starts, grads = [p.detach().clone() for p in params], [[] for _ in params]
    optimizer = FusedMuon(params, lr=0.02, ns_dtype=torch.float32)
    for step in range(3):
        set_gradients(params, step)
        for parameter, local in zip(params, grads, strict=True):
            local.append(parameter.grad.clone())
        optimizer.step()
    for parameter, start, local in zip(params, starts, grads, strict=True):
        torch.testing.assert_close(
            parameter.double(), reference_steps(start, local), rtol=1e-5, atol=1e-5
        )


def low_rank(rows: int, columns: int) -> Tensor:
    """A matrix with a few large singular values, like a gradient."""
    generator = torch.Generator().manual_seed(2)
    left, right = (
        torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in (rows, columns)
    )
    noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return (left @ right.T + 0.01 * noise).float()


@pytest.mark.parametrize("shape", [(128, 512), (512, 128), (128, 128), (96, 104)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "low rank"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
def test_symmetric_iterations_have_smaller_errors_than_bfloat16(shape, kind, steps):
    x = low_rank(*shape) if kind == "low rank" else torch.randn(shape)
    exact, errors = orthogonal(x, steps), {}
    for dtype in (torch.float16, torch.bfloat16):
        result = x[None].clone()
        orthogonalize([result], [(3.4445, -4.775, 2.0315)] * steps, 1e-7, dtype)
        errors[dtype] = ((result[0].double() - exact).norm() / exact.norm()).item()
    assert errors[torch.float16] < errors[torch.bfloat16] < 0.7


@pytest.mark.parametrize("name", ["quintic", "polar_express", "cans", "aol"])
def test_symmetric_iterations_support_every_coefficient_set(name):
    x, coefficients, results = low_rank(128, 256), get_coefficients(5, name), {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        results[dtype] = x[None].clone()
        orthogonalize([results[dtype]], coefficients, 1e-7, dtype)
    exact = results.pop(torch.float32)
    errors = {dtype: (result - exact).norm() / exact.norm() for dtype, result in results.items()}
    assert errors[torch.float16] < 0.5 * errors[torch.bfloat16]


def test_symmetric_iterations_of_batches_equal_those_of_single_matrices():
    batch, zero = torch.randn(3, 2, 24, 64), torch.zeros(1, 48, 64)
    one_by_one = [matrix.clone()[None] for matrix in batch.reshape(3, 48, 64)]
    coefficients = [(3.4445, -4.775, 2.0315)] * 5
    orthogonalize([batch, zero], coefficients, 1e-7, torch.float16)
    orthogonalize(one_by_one, coefficients, 1e-7, torch.float16)
    assert not zero.any()
    for result, single in zip(batch.reshape(3, 48, 64), one_by_one, strict=True):
        torch.testing.assert_close(result, single[0], rtol=1e-2, atol=1e-3)


def test_float16_is_the_default_where_the_kernel_runs(monkeypatch):
    expected, params = parameters([(24, 64)]), parameters([(24, 64)])
    monkeypatch.setattr(orthogonal_updates.TABLE, "name_of", lambda request: "triton")
    for owner, dtype in ((expected, torch.float16), (params, None)):
        set_gradients(owner, 1)
        FusedMuon(owner, ns_dtype=dtype).step()
    assert torch.equal(expected[0], params[0])


def test_large_stacks_are_divided(monkeypatch):
    full, divided = parameters([(8, 16)] * 5), parameters([(8, 16)] * 5)
    set_gradients(full, 1)
    set_gradients(divided, 1)
    FusedMuon(full, ns_dtype=torch.float32).step()
    monkeypatch.setattr(
        "transformer_engine.pytorch.optimizers.orthogonal_updates._STACKED", 8 * 16 * 2
    )
    FusedMuon(divided, ns_dtype=torch.float32).step()
    for one, other in zip(full, divided, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_experts_are_orthogonalized_one_by_one():
    (stack,), separate = parameters([(3, 8, 16)]), []
    separate = [torch.nn.Parameter(part.detach().clone()) for part in stack]
    set_gradients([stack], 5)
    for parameter, grad in zip(separate, stack.grad, strict=True):
        parameter.grad = grad.clone()
    FusedMuon([stack], ns_dtype=torch.float32).step()
    FusedMuon(separate, ns_dtype=torch.float32).step()
    torch.testing.assert_close(stack, torch.stack(list(separate)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "split", [(8, 8), (12, 4), (4, 2, 2)], ids=["gate_up", "unequal", "qkv_in_two_groups"]
)
def test_parts_of_fused_weights_have_their_own_factors(split):
    (fused,) = parameters([(16, 24)])
    start = fused.detach().clone()
    set_gradients([fused], 2)
    grad = fused.grad.clone()
    FusedMuon([fused], lr=0.02, split=split, ns_dtype=torch.float32).step()
    repeats, begin = 16 // sum(split), 0
    for rows in split:
        index = torch.cat(
            [torch.arange(rows) + begin + repeat * sum(split) for repeat in range(repeats)]
        )
        expected = reference_steps(start[index], [grad[index]])
        torch.testing.assert_close(fused[index].double(), expected, rtol=1e-5, atol=1e-5)
        begin += rows


@pytest.mark.parametrize(
    "recipe", [Float8CurrentScaling(), MXFP8BlockScaling()], ids=["current", "mxfp8"]
)
def test_quantized_parameters_follow_their_masters(recipe):
    with te.emulate(), te.quantized_model_init(recipe=recipe):
        layer = te.Linear(64, 96, bias=False, device="cpu", params_dtype=torch.float32)
    plain = torch.nn.Parameter(layer.weight.dequantize(dtype=torch.float32))
    quantized, reference = FusedMuon([layer.weight], master_weights=True), FusedMuon([plain])
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(96, 64, generator=generator)
        layer.weight.grad, plain.grad = grad.clone(), grad.clone()
        quantized.step()
        reference.step()
        assert torch.equal(quantized.state[layer.weight]["master_param"], plain)
        expected = layer.weight._quantizer(plain.detach())
        assert torch.equal(layer.weight.dequantize(), expected.dequantize())


def test_masters_of_bfloat16_parameters_do_not_lose_updates():
    (narrow,), (wide,) = (
        parameters([(16, 32)], torch.bfloat16),
        parameters([(16, 32)], torch.bfloat16),
    )
    wide = torch.nn.Parameter(wide.detach().float())
    saved, reference = FusedMuon([narrow], lr=1e-5, master_weights=True), FusedMuon([wide], lr=1e-5)
    for step in range(5):
        set_gradients([narrow], step)
        wide.grad = narrow.grad.float()
        saved.step()
        reference.step()
    # The momentum has the gradient's dtype, bfloat16.
    torch.testing.assert_close(
        saved.state[narrow]["master_param"], wide.detach(), rtol=0, atol=1e-6
    )
    assert torch.equal(narrow, saved.state[narrow]["master_param"].bfloat16())


def test_state_dict_resumes_and_reads_the_state_of_torch():
    def steps(optimizer, params, numbers):
        for step in numbers:
            set_gradients(params, step)
            optimizer.step()

    params = parameters(dtype=torch.bfloat16)
    optimizer = FusedMuon(params, master_weights=True)
    steps(optimizer, params, range(2))
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    repeated = FusedMuon(resumed, lr=1.0, master_weights=True)
    repeated.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert repeated.state[resumed[0]]["master_param"].dtype == torch.float32
    steps(optimizer, params, range(2, 4))
    steps(repeated, resumed, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))

    (original,), (ours,) = parameters([(8, 16)]), parameters([(8, 16)])
    reference, actual = torch.optim.Muon([original]), FusedMuon([ours])
    steps(reference, [original], range(2))
    ours.data.copy_(original)
    actual.load_state_dict(reference.state_dict())
    steps(reference, [original], range(2, 4))
    steps(actual, [ours], range(2, 4))
    assert torch.equal(ours, original)


def test_copies_step_alike():
    params = parameters()
    optimizer = FusedMuon(params, ns_coefficients=get_coefficients(4, "polar_express"), ns_steps=6)
    set_gradients(params, 0)
    optimizer.step()
    model = copy.deepcopy(optimizer)
    copied = model.param_groups[0]["params"]
    set_gradients(params, 1)
    set_gradients(copied, 1)
    optimizer.step()
    model.step()
    assert all(torch.equal(a, b) for a, b in zip(params, copied, strict=True))


def test_orthogonal_factor_has_singular_values_near_one():
    (parameter,) = parameters([(64, 96)])
    parameter.data.zero_()
    set_gradients([parameter], 9)
    coefficients = get_coefficients(8, "polar_express")
    FusedMuon(
        [parameter], lr=1.0, ns_coefficients=coefficients, ns_steps=8, ns_dtype=torch.float32
    ).step()
    singular = torch.linalg.svdvals(parameter.detach().double())
    assert (singular - 1).abs().max() < 0.02


def test_autocast_and_gradient_modes_do_not_change_a_step():
    one, other = parameters(), parameters()
    set_gradients(one, 0)
    set_gradients(other, 0)
    FusedMuon(one, ns_dtype=torch.float32).step()
    with torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        FusedMuon(other, ns_dtype=torch.float32).step()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"lr": -1.0}, ValueError, "lr=-1.0 is out of range; give a number of at least 0"),
        ({"momentum": 1.0}, ValueError, "momentum=1.0 is out of range"),
        ({"ns_steps": 0}, ValueError, "ns_steps=0 is below 1"),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, "give three numbers"),
        ({"adjust_lr_fn": "half"}, ValueError, "adjust_lr_fn"),
        ({"split": (5,)}, ValueError, "which do not divide the 16 rows"),
        ({"ns_dtype": torch.float64}, ValueError, "give torch.float16"),
    ],
)
def test_settings_out_of_range_raise_an_error(settings, error, sentence):
    with pytest.raises(error, match=sentence):
        FusedMuon(parameters([(16, 32)]), **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_without_elements_are_accepted_as_by_torch(dtype):
    shapes = [(0, 32), (16, 32), (0, 32)]
    ours, theirs = parameters(shapes, dtype), parameters(shapes, dtype)
    for params, optimizer in ((ours, FusedMuon(ours)), (theirs, torch.optim.Muon(theirs))):
        for seed in range(2):
            set_gradients(params, seed)
            optimizer.step()
    for parameter, expected in zip(ours, theirs, strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 32, 16), (2, 0, 16), (2, 32, 0)], ids=str)
@pytest.mark.parametrize("split", [None, (2, 2)], ids=str)
def test_an_optimizer_of_parameters_without_elements_steps(shape, split):
    params = parameters([shape])
    optimizer = FusedMuon(params, split=split)
    set_gradients(params, 0)
    optimizer.step()
    assert params[0].shape == shape and optimizer.state[params[0]]["momentum_buffer"].shape == shape


def test_vectors_and_unsupported_gradients_are_rejected_before_any_change():
    with pytest.raises(ValueError, match="use FusedAdam for the others"):
        FusedMuon(parameters([(16,)]))
    params = parameters([(16, 32), (8, 8)])
    set_gradients(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    before = params[0].detach().clone()
    with pytest.raises(RuntimeError, match="no sparse gradients"):
        FusedMuon(params).step()
    assert torch.equal(params[0], before)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.Linear(16, 16, device="cpu")
    layer.weight.grad = torch.ones(16, 16)
    with pytest.raises(RuntimeError, match="cannot be stepped without masters"):
        FusedMuon([layer.weight]).step()
