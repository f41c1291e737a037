"""Recomputation: the plain gradients, the same random numbers, the same autocast, and less memory."""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.distributed.ranks import run_on_ranks
from transformer_engine.common import warning
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    activation_recompute_forward,
    checkpoint,
    has_te_modules,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
    recompute,
)
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.quantization import autocast as quantized
from transformer_engine.pytorch.quantization.autocast import current
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
FLAGS = (is_fp8_activation_recompute_enabled, in_fp8_activation_recompute_phase)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1234)


def _block(device):
    return torch.nn.Sequential(
        LayerNorm(16, device=device),
        torch.nn.Linear(16, 16, device=device),
        torch.nn.Dropout(0.3),
        torch.nn.GELU(),
    )


def _gradients(block, x, call):
    block.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(99)
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters()), torch.rand(3)]


@BOTH
def test_outputs_gradients_and_later_random_numbers_equal_the_uncheckpointed_run(reentrant, device):
    block, x = _block(device), torch.randn(4, 16, device=device)
    expected = _gradients(block, x, block)
    actual = _gradients(block, x, lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@BOTH
def test_intermediate_activations_are_not_saved(reentrant, device):
    block, x = _block(device), torch.randn(4, 16, device=device, requires_grad=True)
    runs = []
    block[1].register_forward_hook(lambda *_: runs.append(1))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = checkpoint(block, x, use_reentrant=reentrant)
    assert [tuple(t.shape) for t in saved if t.numel() and t.data_ptr() != x.data_ptr()] == []
    assert len(runs) == 1
    y.sum().backward()
    assert len(runs) == 2


@BOTH
def test_gradients_reach_tensors_inside_nested_arguments(reentrant, device):
    def function(x, pair, *, options, power):
        return {"y": (x * pair[0] + pair[1]) * options["scale"] ** power, "n": None}, options[
            "name"
        ]

    x, a, b, scale = (torch.rand(4, device=device).add(0.5).requires_grad_() for _ in range(4))
    arguments = (x, [a, b]), {"options": {"scale": scale, "name": "here"}, "power": 3}
    (expected, _), reference = function(*arguments[0], **arguments[1]), (x, a, b, scale)
    expected["y"].sum().backward()
    expected_grads = [t.grad for t in reference]
    for tensor in reference:
        tensor.grad = None
    result, name = checkpoint(function, *arguments[0], use_reentrant=reentrant, **arguments[1])
    assert name == "here" and result["n"] is None and torch.equal(result["y"], expected["y"])
    result["y"].sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip(reference, expected_grads, strict=True))


@BOTH
def test_outputs_without_a_gradient_are_left_out(reentrant, device):
    def function(x):
        return x * 2, x.argmax(), x * 3

    x = torch.rand(4, device=device, requires_grad=True)
    doubled, index, _ = checkpoint(function, x, use_reentrant=reentrant)
    assert index.dtype == torch.int64 and not index.requires_grad
    doubled.sum().backward()
    assert bool((x.grad == 2).all())


@BOTH
def test_backward_may_run_twice(reentrant, device):
    block, x = _block(device), torch.randn(4, 16, device=device, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=reentrant)
    y.sum().backward(retain_graph=True)
    once = x.grad.clone()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * once)


@BOTH
def test_parameters_get_gradients_if_no_argument_requires_one(reentrant, device):
    block = _block(device)
    checkpoint(block, torch.randn(4, 16, device=device), use_reentrant=reentrant).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


@BOTH
def test_a_frozen_function_of_constants_needs_no_gradient(reentrant, device):
    block = _block(device).requires_grad_(False)
    assert not checkpoint(
        block, torch.randn(4, 16, device=device), use_reentrant=reentrant
    ).requires_grad


@BOTH
def test_without_gradients_the_function_runs_once_unmodified(reentrant, device):
    calls = []

    def function(x):
        calls.append([flag() for flag in FLAGS])
        return x

    with torch.no_grad(), quantized(recipe=DelayedScaling()):
        checkpoint(
            function, torch.ones(2, device=device, requires_grad=True), use_reentrant=reentrant
        )
    assert calls == [[False, False]]


class _Probe(torch.nn.Module):
    """Multiplies by a weight and records the context in each run."""

    def __init__(self, device):
        super().__init__()
        self.norm = LayerNorm(4, device=device)
        self.runs = []

    def forward(self, x):
        flags = tuple(flag() for flag in FLAGS)
        kind = x.device.type
        self.runs.append(
            (*flags, current(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        )
        return self.norm(x)


@BOTH
def test_both_runs_set_their_phase_and_see_the_same_autocasts(reentrant, device):
    probe, recipe = _Probe(device), DelayedScaling()
    x = torch.randn(2, 4, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16), quantized(recipe=recipe):
        y = checkpoint(probe, x, use_reentrant=reentrant)
        inside = current()
    outer = current()
    y.float().sum().backward()
    first, second = probe.runs
    assert first == (True, False, inside, True, torch.bfloat16)
    assert second == (True, True, inside, True, torch.bfloat16)
    assert current() is outer and not outer.enabled and not any(flag() for flag in FLAGS)


@BOTH
def test_without_quantization_only_the_phase_is_marked(reentrant, device):
    probe = _Probe(device)
    y = checkpoint(
        probe, torch.randn(2, 4, device=device, requires_grad=True), use_reentrant=reentrant
    )
    y.sum().backward()
    assert [run[:2] for run in probe.runs] == [(False, False), (False, True)]


@BOTH
def test_a_checkpoint_within_a_quantized_checkpoint_does_not_run_a_third_time(reentrant, device):
    probe = _Probe(device)

    def outer(x):
        return checkpoint(probe, x * 2, use_reentrant=reentrant)

    x = torch.randn(2, 4, device=device, requires_grad=True)
    with quantized(recipe=DelayedScaling()):
        y = checkpoint(outer, x, use_reentrant=reentrant)
    y.sum().backward()
    assert [run[:2] for run in probe.runs] == [(True, False), (True, True)]


@BOTH
def test_an_exception_restores_the_recomputation_phase(reentrant, device):
    def function(x):
        raise ZeroDivisionError

    with quantized(recipe=DelayedScaling()), pytest.raises(ZeroDivisionError):
        checkpoint(
            function, torch.ones(2, device=device, requires_grad=True), use_reentrant=reentrant
        )
    assert not any(flag() for flag in FLAGS)


@BOTH
def test_tracked_random_states_repeat_and_then_continue(reentrant, device):
    def seed_generator():
        torch.manual_seed(3)
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 4)
        return tracker

    def run(tracker, call):
        x = torch.ones(64, device=device, requires_grad=True)

        def function(x):
            with tracker.fork():
                return F.dropout(x, 0.5) * F.dropout(x, 0.5)

        y = call(function, x)
        y.sum().backward()
        with tracker.fork():
            return [y.detach(), x.grad, torch.rand(4, device=device)]

    expected = run(seed_generator(), lambda function, x: function(x))
    tracker = seed_generator()
    actual = run(
        tracker,
        lambda function, x: checkpoint(
            function, x, get_rng_state_tracker=lambda: tracker, use_reentrant=reentrant
        ),
    )
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def _training(block, recipe, call, device):
    """Everything that three steps leave behind: outputs, gradients, delayed-scaling state."""
    torch.manual_seed(5)
    outcome = []
    for step in range(3):
        x = (torch.randn(16, 32, device=device) * (step + 1)).requires_grad_()
        with quantized(recipe=recipe):
            y = call(block, x)
        y.square().mean().backward()
        outcome += [y.detach(), x.grad]
    for module in block.modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(module, "fp8_meta", {}).get(key)
            if hasattr(state, "scale"):
                outcome += [state.scale, state.amax_history]
    return outcome + [p.grad for p in block.parameters()]


@BOTH
@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(amax_history_len=4), Float8CurrentScaling()],
    ids=["delayed", "current"],
)
def test_quantized_training_with_recomputation_is_bitwise_unchanged(reentrant, recipe, device):
    block = torch.nn.Sequential(
        LayerNorm(32, device=device),
        Linear(32, 64, device=device),
        torch.nn.GELU(),
        Linear(64, 32, device=device),
    )
    twin = copy.deepcopy(block)
    expected = _training(block, recipe, lambda block, x: block(x), device)
    actual = _training(
        twin, recipe, lambda twin, x: checkpoint(twin, x, use_reentrant=reentrant), device
    )
    assert len(actual) == len(expected) == (12 + 8 if isinstance(recipe, DelayedScaling) else 12)
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_modules_of_this_package_are_found_at_any_depth_and_by_inheritance():
    class Child(LayerNorm):
        pass

    assert has_te_modules(torch.nn.Sequential(torch.nn.Sequential(LayerNorm(2, device="meta"))))
    assert has_te_modules(Child(2, device="meta"))
    assert not has_te_modules(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert has_te_modules(lambda x: x)


@BOTH
def test_a_function_without_modules_of_this_package_goes_to_torch(reentrant, device, monkeypatch):
    handed = []
    original = recompute.torch_checkpoint

    def spy(*args, **kwargs):
        handed.append(kwargs["use_reentrant"])
        return original(*args, **kwargs)

    monkeypatch.setattr(recompute, "torch_checkpoint", spy)
    linear = torch.nn.Linear(4, 4, device=device)
    x = torch.randn(2, 4, device=device, requires_grad=True)
    checkpoint(linear, x, use_reentrant=reentrant).sum().backward()
    assert handed == [reentrant]
    torch.testing.assert_close(x.grad, linear.weight.detach().sum(0).expand(2, 4))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_contexts_of_the_caller_surround_both_runs(use_reentrant, device):
    entered = []

    @contextlib.contextmanager
    def note(name):
        entered.append(name)
        yield
        entered.append(f"end of {name}")

    def contexts():
        return note("first"), note("second")

    x = torch.randn(2, 4, device=device, requires_grad=True)
    y = checkpoint(_Probe(device), x, use_reentrant=use_reentrant, context_fn=contexts)
    assert entered == ["first", "end of first"]
    y.sum().backward()
    assert [name for name in entered if not name.startswith("end")] == ["first", "second"]
    plain = x.detach().requires_grad_()
    _Probe(device)(plain).sum().backward()
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize(
    ("options", "reentrant"),
    [({"distribute_saved_activations": True}, False), ({"debug": True}, True), ({"debug": 1}, 2)],
)
def test_options_of_the_other_mode_warn_once(options, reentrant, monkeypatch, device):
    monkeypatch.setattr(warning, "_issued", set())
    x = torch.ones(2, device=device, requires_grad=True)
    with pytest.warns(UserWarning, match=f"{next(iter(options))} has no effect with use_reentrant"):
        y = checkpoint(torch.sin, x, use_reentrant=reentrant, **options)
    y.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint(torch.sin, x, use_reentrant=reentrant, **options)


def test_a_reentrant_checkpoint_ignores_the_check_of_determinism(device):
    x = torch.ones(2, device=device, requires_grad=True)
    checkpoint(torch.sin, x, determinism_check="strict").sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    with pytest.raises(ValueError, match="determinism_check='strict' does not exist"):
        checkpoint(torch.sin, x, determinism_check="strict", use_reentrant=False)


def test_a_reentrant_checkpoint_rejects_autograd_grad(device):
    x = torch.ones(2, device=device, requires_grad=True)
    y = checkpoint(torch.sin, x)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        torch.autograd.grad(y.sum(), x)


def test_the_marks_are_restored_from_block_to_block():
    with quantized(recipe=DelayedScaling()):
        with activation_recompute_forward(activation_recompute=True):
            with activation_recompute_forward(activation_recompute=True, recompute_phase=True):
                assert [flag() for flag in FLAGS] == [True, True]
            assert [flag() for flag in FLAGS] == [True, False]
        assert [flag() for flag in FLAGS] == [False, False]


def test_compiled_code_reads_the_marks(device):
    def run(x):
        return (
            x + 1
            if is_fp8_activation_recompute_enabled() and in_fp8_activation_recompute_phase()
            else x
        )

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    x = torch.zeros(2, device=device)
    assert not compiled(x).any()
    with (
        quantized(recipe=DelayedScaling()),
        activation_recompute_forward(activation_recompute=True, recompute_phase=True),
    ):
        assert bool(compiled(x).all())


def _distributed(device):
    torch.manual_seed(1)
    block = _block(device)
    x = torch.randn(4, 16, device=device)
    torch.manual_seed(99)
    saved = []

    def call(x):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t.numel()) or t, lambda t: t
        ):
            return checkpoint(
                block, x, distribute_saved_activations=True, tp_group=dist.group.WORLD
            )

    pairs = zip(_gradients(block, x, call), _gradients(block, x, block), strict=True)
    equal = all(torch.equal(a, b) for a, b in pairs)
    return torch.tensor([equal, saved == [x.numel() // 2]])


def test_ranks_share_the_saved_activation_and_get_the_same_gradients(tmp_path):
    for result in run_on_ranks(_distributed, 2, tmp_path):
        assert result.tolist() == [True, True]


def _shared_arguments(device):
    """Return, for first arguments of several kinds, whether gradients are the plain ones, and the saved elements."""
    torch.manual_seed(1)  # the first argument is equal on all ranks
    layer = Linear(16, 16, device=device)

    def function(x, factor, *, names):
        records.append(type(x))
        return (layer(x) if x.shape[-1:] == (16,) else x * layer.bias.sum()) * factor + len(names)

    uneven, scalar, none = (torch.rand(shape, device=device) for shape in ((5, 1), (), (0, 16)))
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device=device)
    codes = quantizer(torch.randn(32, 16, device=device))
    results = {}
    for name, x in {"uneven": uneven, "scalar": scalar, "none": none, "codes": codes}.items():
        gradients, saved, records = [], [], []
        for recomputed in (True, False):
            layer.zero_grad()
            first = x.detach() if name == "codes" else x.clone().requires_grad_()
            factor = torch.tensor(3.0, device=device, requires_grad=True)
            if recomputed:
                with torch.autograd.graph.saved_tensors_hooks(
                    lambda t, remaining=saved: remaining.append(t) or t, lambda t: t
                ):
                    y = checkpoint(
                        function, first, factor, names=["a"], distribute_saved_activations=True
                    )
            else:
                y = function(first, factor, names=["a"])
            y.sum().backward()
            leaves = [t for t in (first, factor, *layer.parameters()) if t.grad is not None]
            gradients.append([y.detach(), *(t.grad.clone() for t in leaves)])
        equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
        results[name] = equal, len(set(records)) == 1, saved[0].numel()
    return results


def test_first_arguments_of_any_size_are_shared_and_codes_are_saved_whole(tmp_path):
    for result in run_on_ranks(_shared_arguments, 2, tmp_path):
        sizes = {"uneven": 3, "scalar": 1, "none": 0, "codes": 32 * 16}
        assert result == {name: (True, True, size) for name, size in sizes.items()}
