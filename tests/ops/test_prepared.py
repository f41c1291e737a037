"""Prepared chains: a warm call builds nothing, and everything that a chain depends on takes effect in the next call."""

from __future__ import annotations

import copy
import importlib.util
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.fast_path import needs_fast_path
from tests.support.layers import same
from tests.support.programs import output_without_gpu
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.ops.fuser import OperationFuser

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLACE = {"device": DEVICE, "dtype": torch.float32}


def mlp() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.LayerNorm(64, **PLACE),
        ops.Linear(64, 128, **PLACE),
        ops.ClampedSwiGLU(),
        ops.Dropout(0.0),
        ops.Linear(64, 64, **PLACE),
        ops.ConstantScale(2.0),
    )


def step(
    chain: Any, recipe: Any = None, x: torch.Tensor | None = None, grad: bool = True
) -> list[torch.Tensor]:
    """Output and all gradients from one pass."""
    chain.zero_grad()
    x = (
        torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        if x is None
        else x
    )
    leaf = x.detach().clone().requires_grad_(grad)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = chain(leaf)
    if not y.requires_grad:
        return [y]
    y.float().square().mean().backward()
    grads = [tensor.grad for tensor in (leaf, *chain.parameters()) if tensor.grad is not None]
    return [y.detach(), *[g.clone() for g in grads]]


def warm(chain: Any, recipe: Any = None) -> list[torch.Tensor]:
    return [step(chain, recipe) for _ in range(3)][-1]


def descriptions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that receives each operation's name when it describes itself."""
    outputs: list[str] = []
    for kind in (ops.BasicLinear, ops.Bias, ops.LayerNorm, ops.ClampedSwiGLU, ops.ConstantScale):
        passes = kind.passes

        def counted(self: Any, *args: Any, passes: Any = passes) -> Any:
            outputs.append(type(self).__name__)
            return passes(self, *args)

        monkeypatch.setattr(kind, "passes", counted)
    return outputs


@pytest.mark.parametrize(
    "recipe", [None, DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling()]
)
def test_a_warm_call_builds_nothing(recipe, emulated, monkeypatch):
    chain, result = mlp(), descriptions(monkeypatch)
    warm(chain, recipe)
    assert result
    result.clear()
    step(chain, recipe)
    with torch.no_grad(), te.autocast(enabled=recipe is not None, recipe=recipe):
        chain(torch.zeros(32, 64, device=DEVICE))
        first = len(result)
        chain(torch.zeros(32, 64, device=DEVICE))
    assert (
        first == len(result) and not step(chain, recipe)[0].isnan().any() and len(result) == first
    )


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling(), MXFP8BlockScaling()])
def test_calls_without_a_recipe_between_steps_build_nothing(recipe, emulated, monkeypatch):
    chain, unevaluated, result = mlp(), mlp(), descriptions(monkeypatch)

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return chain(torch.ones(32, 64, device=DEVICE))

    first = evaluate()
    for _ in range(2):  # the second step is the first one with the scales of delayed scaling
        step(chain, recipe), step(unevaluated, recipe), evaluate()
    quantizer = unevaluated[1].basic_ops[0].get_input_quantizer()
    result.clear()
    for _ in range(3):
        assert same(step(chain, recipe), step(unevaluated, recipe))
        assert isinstance(chain[1].basic_ops[0].get_input_quantizer(), type(quantizer))
        assert (
            torch.equal(evaluate(), first) and chain[1].basic_ops[0].get_input_quantizer() is None
        )
    assert not result


def _set_scale(chain: Any, recipe: Any) -> None:
    chain[5].scale = 3.0


def _replace_weight(chain: Any, recipe: Any) -> None:
    chain[1].weight = torch.nn.Parameter(chain[1].weight.detach() * 2)


def _load_state(chain: Any, recipe: Any) -> None:
    other = mlp()
    step(other, DelayedScaling(amax_history_len=4), 100 * torch.ones(32, 64, device=DEVICE))
    chain.load_state_dict(other.state_dict())


def _step_with_another_recipe(chain: Any, recipe: Any) -> None:
    step(chain, Float8CurrentScaling() if isinstance(recipe, DelayedScaling) else DelayedScaling())


def _reset_quantizers(chain: Any, recipe: Any) -> None:
    for operation in chain[1].basic_ops:
        operation.reset_recipe_state(recipe=recipe)


@pytest.mark.parametrize("recipe_class", [DelayedScaling, Float8CurrentScaling])
@pytest.mark.parametrize(
    "change",
    [_set_scale, _replace_weight, _load_state, _step_with_another_recipe, _reset_quantizers],
)
def test_changes_between_steps_are_the_same_with_and_without_an_evaluation(
    change, recipe_class, emulated
):
    results: list[list[torch.Tensor]] = []
    for evaluates in (False, True):
        chain, recipe = mlp(), recipe_class()
        warm(chain, recipe)
        if evaluates:
            step(chain)
        change(chain, recipe)
        if evaluates:
            step(chain)
        results.append([*step(chain, recipe), *step(chain, recipe)])
    assert same(*results)


def _replace_parameter(chain: Any) -> None:
    chain[1].weight = torch.nn.Parameter(chain[1].weight.detach() * 2)


def _write_data(chain: Any) -> None:
    for parameter in chain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)


def _replace_operation(chain: Any) -> None:
    chain[2] = ops.SwiGLU()


MUTATIONS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda chain: setattr(chain[5], "scale", 3.0),
    "eps": lambda chain: setattr(chain[0], "eps", 0.5),
    "zero_centered_gamma": lambda chain: setattr(chain[0], "zero_centered_gamma", True),
    "limit": lambda chain: setattr(chain[2], "limit", 0.25),
    "interleaved": lambda chain: setattr(chain[2], "glu_interleave_size", 32),
    "dropout": lambda chain: setattr(chain[3], "dropout_probability", 1.0),
    "replaced parameter": _replace_parameter,
    "frozen parameter": lambda chain: chain[4].weight.requires_grad_(False),
    "frozen chain": lambda chain: chain.requires_grad_(False),
    "moved": lambda chain: chain[4].to(torch.bfloat16),
    "written data": _write_data,
    "replaced operation": _replace_operation,
    "removed operation": lambda chain: chain.pop(5),
}


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
def test_a_mutation_takes_effect_in_the_next_call(name, recipe, emulated):
    chain = mlp()
    before = warm(chain, recipe)
    MUTATIONS[name](chain)
    fresh = copy.deepcopy(chain)
    after = step(chain, recipe)
    assert same(after, step(fresh, recipe))
    assert same(after, step(chain, recipe)) and not same(after, before)


def test_evaluation_mode_takes_effect_in_the_next_call():
    chain = ops.Sequential(ops.Dropout(1.0), ops.Identity())
    x = torch.ones(4, 64, device=DEVICE)
    for _ in range(2):
        assert not chain(x).any() and torch.equal(chain.eval()(x), x)
        chain.train()


def test_a_childs_constants_take_effect_in_the_next_call():
    op = ops.ScaledClampedQGeGLU()
    x, scales = torch.ones(4, 8, device=DEVICE), torch.ones(4, device=DEVICE)
    before = [op(x, scales) for _ in range(2)][-1]
    op._clamped.alpha = 3.0
    assert not torch.equal(op(x, scales), before)
    assert torch.equal(op(x, scales), copy.deepcopy(op)(x, scales))


def test_recipes_take_effect_in_the_next_call(emulated):
    chain = mlp()
    recipes = [None, Float8CurrentScaling(), MXFP8BlockScaling(), None]
    expected = [warm(mlp(), recipe) for recipe in recipes]
    for _ in range(2):
        for recipe, results in zip(recipes, expected, strict=True):
            assert same(step(chain, recipe), results)
    written = Float8CurrentScaling()
    exact = [warm(mlp(), Float8CurrentScaling(use_power_2_scales=value)) for value in (False, True)]
    assert same(step(chain, written), exact[0]) and not same(*exact)
    written.use_power_2_scales = True
    assert same(step(chain, written), exact[1])


def test_delayed_scales_advance_as_without_preparing(emulated):
    prepared, built = mlp(), mlp()
    for number in range(4):
        x = (
            torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE)
            * 2**number
        )
        result = step(prepared, DelayedScaling(amax_history_len=2), x)
        for group in built._module_groups or []:
            group._prepared.clear()
        assert same(result, step(built, DelayedScaling(amax_history_len=2), x))


def test_inputs_and_modes_take_effect_in_the_next_call():
    chain = mlp()
    fresh = copy.deepcopy(chain)
    warm(chain)
    x = torch.randn(16, 64, device=DEVICE)
    assert same(step(chain, None, x), step(fresh, None, x))
    assert same(step(chain, None, x, grad=False), step(copy.deepcopy(fresh), None, x, grad=False))
    assert len(step(chain, None, x)) == len(step(chain, None, x, grad=False)) + 1
    with torch.no_grad():
        assert not chain(x).requires_grad
    with torch.autocast(DEVICE, torch.bfloat16):
        assert chain(x).dtype == torch.bfloat16
    assert chain(x).dtype == torch.float32 and chain(x).requires_grad


def test_hooks_run_in_warm_calls():
    chain, records = mlp(), []
    expected = warm(chain)
    handles = [
        chain.register_forward_hook(lambda module, given, y: records.append("module")),
        chain[1].weight.register_hook(lambda grad: records.append("gradient")),
    ]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (records.append("saved"), t.clone())[1], lambda t: t
    ):
        assert same(step(chain), expected)
    assert records.count("module") == records.count("gradient") == 1 and records.count("saved") > 4
    for handle in handles:
        handle.remove()
    records.clear()
    assert same(step(chain), expected) and not records


class Negated(ops.FusedOperation):
    """A user's fused operation that replaces one ConstantScale and flips its sign."""

    def fuser_forward(self, basic_op_ctxs, input_, **kwargs):
        return -input_ * self.basic_ops[0].scale, [()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **kwargs):
        return -grad_output * self.basic_ops[0].scale, [()], [()]


def _replace_with_negated(argument, *, recipe):
    return [Negated([op]) if type(op) is ops.ConstantScale else op for op in argument]


def test_a_fusion_that_is_registered_later_takes_effect_in_the_next_call(monkeypatch):
    chain = mlp()
    before = warm(chain)
    with monkeypatch.context() as patch:
        patch.setattr(OperationFuser, "forward_backward_fusion_functions", [])
        ops.register_forward_backward_fusion(_replace_with_negated)
        assert torch.equal(step(chain)[0], -before[0])
        assert type(chain._module_groups[0]._forward_ops[-1][0]) is Negated
    assert same(step(chain), before)


def test_a_missing_gradient_buffer_raises_in_a_warm_call():
    chain = ops.Sequential(ops.Linear(64, 64, bias=False, accumulate_into_main_grad=True, **PLACE))
    weight: Any = chain[0].weight
    weight.main_grad = torch.zeros_like(weight)
    warm(chain)
    assert weight.main_grad.any()
    weight.main_grad = None
    with pytest.raises(RuntimeError, match="main_grad"):
        step(chain)


def test_gradients_go_to_the_buffer_of_a_replaced_weight():
    chain = ops.Sequential(ops.BasicLinear(64, 64, accumulate_into_main_grad=True, **PLACE))
    for _ in range(2):
        chain[0].weight = weight = torch.nn.Parameter(chain[0].weight.detach().clone())
        weight.main_grad = torch.zeros_like(weight)  # pyright: ignore[reportAttributeAccessIssue]
        warm(chain)
        assert weight.main_grad.any()  # pyright: ignore[reportAttributeAccessIssue]


def test_group_row_counts_take_effect_in_the_next_call():
    grouped = ops.GroupedLinear(2, 64, 32, **PLACE)
    chain, x = ops.Sequential(grouped), torch.randn(8, 64, device=DEVICE)
    for rows in ([4, 4], [4, 4], [1, 7], [8, 0], [4, 4]):
        sizes = torch.tensor(rows)
        parts = [part @ getattr(grouped, f"weight{i}").t() for i, part in enumerate(x.split(rows))]
        expected = torch.cat([part + getattr(grouped, f"bias{i}") for i, part in enumerate(parts)])
        torch.testing.assert_close(chain(x, sizes), expected)
    with pytest.raises(ValueError, match="do not fit"):
        chain(x, torch.tensor([8, 1]))


def test_absent_extra_output_gradients_count_as_zero():
    chain = ops.Sequential(
        ops.ConstantScale(2.0), ops.MakeExtraOutput(in_place=True), ops.ConstantScale(3.0)
    )
    x = torch.ones(4, 64, device=DEVICE, requires_grad=True)
    for used, expected in (
        ("both", 8.0),
        ("main", 6.0),
        ("extra", 2.0),
        ("expanded", 8.0),
        ("both", 8.0),
    ):
        x.grad = None
        y, extra = chain(x)
        if used in ("both", "expanded"):
            (y.sum() + (extra.sum() if used == "expanded" else (extra * 1).sum())).backward()
        else:
            (y if used == "main" else extra).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, expected))


def test_threads_share_a_prepared_chain(emulated):
    chain = mlp()
    recipes = [None, Float8CurrentScaling()]
    expected = [warm(copy.deepcopy(chain), recipe) for recipe in recipes]
    results: dict[int, list[torch.Tensor]] = {}
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def work(number: int) -> None:
        leaf = x.clone().requires_grad_()
        for _ in range(5):
            leaf.grad = None
            with te.autocast(enabled=False):
                y = chain(leaf)
            (grad,) = torch.autograd.grad(y.square().mean(), leaf)
            results[number] = [y.detach(), grad]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for actual in results.values():
        assert same(actual, expected[0][:2])
    assert same(step(chain, recipes[1]), expected[1])


def test_copies_prepare_their_own_chains():
    op = ops.Linear(64, 64, **PLACE)
    x = torch.randn(4, 64, device=DEVICE)
    y = op(x)
    copied = copy.deepcopy(op)
    with torch.no_grad():
        copied.weight.zero_()
    assert torch.equal(op(x), y) and torch.equal(copied(x), copied.bias.expand(4, 64))
    assert op._own_fuser is not copied._own_fuser


@pytest.mark.slow
@needs_fast_path
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_compiled_chains_launch_the_kernels_of_their_steps():
    result = json.loads(output_without_gpu("tests/ops/generated_chains.py").splitlines()[-1])
    assert len(result) == 20
    assert {case: what for case, what in result.items() if what is not None} == {}
