"""Under te.batch_invariant(), bits of a token's output and input gradient do not depend on its batch."""

from __future__ import annotations

import random
import threading

import batch_invariance
import pytest
import torch
from batch_invariance import RECIPES, Subjects

import transformer_engine.pytorch as te
from transformer_engine.common import dispatch, env
from transformer_engine.common.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

DTYPES = ("bfloat16", "float32")
COMPOSITIONS = 10


@pytest.fixture(autouse=True)
def _off_again():
    assert not te.is_batch_invariant()
    yield
    te.batch_invariant(False)
    assert not te.is_batch_invariant()


@pytest.fixture(scope="module", params=DTYPES)
def subjects(request):
    return Subjects("cpu", getattr(torch, request.param), seed=3)


def count_differing(compare, recipe, seed):
    """Elements that differ, over several compositions."""
    draw, compared, differing = random.Random(seed), 0, 0
    with te.batch_invariant():
        for _ in range(COMPOSITIONS):
            for result in compare(draw, RECIPES[recipe], recipe):
                compared += result.compared
                differing += result.differing
    assert compared > 0
    return differing


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("number", range(9))
@pytest.mark.sampled
def test_rows_do_not_depend_on_their_batch(subjects, number, recipe):
    operation = subjects.rows[number]
    assert count_differing(operation.compare, recipe, number) == 0, operation.name


@pytest.mark.sampled
def test_attention_does_not_depend_on_the_other_sequences(subjects):
    assert count_differing(subjects.attention.compare, "none", 1) == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.sampled
def test_a_layer_and_its_cached_steps_do_not_depend_on_the_batch(subjects, recipe):
    assert count_differing(subjects.layer.compare, recipe, 2) == 0
    assert count_differing(subjects.layer.compare_cached, recipe, 3) == 0


def test_the_comparison_finds_one_differing_bit():
    x = torch.randn(4, 5)
    other = x.clone()
    other.view(torch.int32)[2, 3] ^= 1
    assert batch_invariance.difference(x, x.clone()).differing == 0
    assert batch_invariance.difference(other, x).differing == 1
    assert batch_invariance.difference(torch.zeros(1), -torch.zeros(1)).differing == 1


@pytest.mark.parametrize(
    "options",
    [
        {"core_attention_bias_type": "alibi"},
        {"window_size": (5, 0)},
        {"softmax_type": "learnable"},
        {"softcap": 5.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_attention_options_do_not_depend_on_the_other_sequences(options):
    torch.manual_seed(0)
    result = {name: value for name, value in options.items() if name in ("softmax_type", "softcap")}
    call = {name: value for name, value in options.items() if name not in result}
    layer = te.DotProductAttention(
        4,
        16,
        num_gqa_groups=2,
        qkv_format="bshd",
        attn_mask_type="causal",
        attention_dropout=0.0,
        **result,
    )
    q, k, v = (torch.randn(3, 90, heads, 16) for heads in (4, 2, 2))
    with te.batch_invariant():
        y = layer(q, k, v, **call)
        for row, tokens in ((0, 90), (1, 70), (2, 1)):
            alone = layer(*(x[row : row + 1, :tokens].contiguous() for x in (q, k, v)), **call)
            assert torch.equal(y[row : row + 1, :tokens], alone)


def test_a_long_row_alone_is_summed_as_among_others():
    logits = torch.randn(3, 1, 40000)
    target = torch.tensor([[1], [7], [39999]])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with te.batch_invariant():
            losses = te.parallel_cross_entropy(logits.clone(), target)
            for row in range(3):
                alone = te.parallel_cross_entropy(
                    logits[row : row + 1].clone(), target[row : row + 1]
                )
                assert torch.equal(losses[row], alone[0])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Float8CurrentScaling(), "maximum of the whole tensor; use DelayedScaling"),
        (NVFP4BlockScaling(), "set row_scaled_activation=True"),
        (
            NVFP4BlockScaling(
                row_scaled_activation=True, disable_rht=True, disable_2d_quantization=True
            ),
            "backward_override='high_precision'",
        ),
        (Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), "set it to 1"),
        (CustomRecipe(qfactory=lambda role: None), "may share scales among rows"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_a_recipe_with_scales_of_the_batch_raises_its_reason(recipe, message):
    name = type(recipe).__name__
    with (
        te.batch_invariant(),
        pytest.raises(RuntimeError, match=f"{name} is unsupported.*{message}"),
    ):
        te.autocast(recipe=recipe).__enter__()
    with te.autocast(recipe=recipe), pytest.raises(RuntimeError, match=f"{name} is unsupported"):
        te.batch_invariant().__enter__()
    assert not te.is_batch_invariant()
    with te.autocast(recipe=recipe), pytest.raises(RuntimeError, match=f"{name} is unsupported"):
        te.batch_invariant()
    assert not te.is_batch_invariant()
    with te.batch_invariant(), te.autocast(enabled=False, recipe=recipe):
        pass


def test_row_scaled_nvfp4_does_not_depend_on_the_batch():
    recipe = NVFP4BlockScaling(
        row_scaled_activation=True,
        disable_rht=True,
        disable_2d_quantization=True,
        backward_override="high_precision",
    )
    layer, x = te.Linear(64, 96, device="cpu"), torch.randn(64, 64)
    with te.batch_invariant(), te.autocast(recipe=recipe), torch.no_grad():
        y = layer(x)
        for rows in ([3], [5, 1, 60], list(range(33))):
            assert torch.equal(layer(x[rows]), y[rows])


def test_rows_that_mxfp8_cannot_quantize_for_gradients_raise_instead_of_another_precision():
    layer, x = te.Linear(64, 96, device="cpu"), torch.randn(33, 64)
    with te.batch_invariant(), te.autocast(recipe=MXFP8BlockScaling()):
        with pytest.raises(ValueError, match="33 is not a multiple of 32; pad it to 64"):
            layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x)[5:6], layer(x[5:6]))


def test_blocks_nest_and_end_with_an_exception():
    with te.batch_invariant():
        assert te.is_batch_invariant()
        with te.batch_invariant(False):
            assert not te.is_batch_invariant()
            with te.batch_invariant():
                assert te.is_batch_invariant()
            assert not te.is_batch_invariant()
        assert te.is_batch_invariant()
    with pytest.raises(KeyError), te.batch_invariant():
        raise KeyError
    assert not te.is_batch_invariant()


def test_a_call_sets_the_process_and_a_block_restores_it():
    te.batch_invariant()
    assert te.is_batch_invariant()
    with te.batch_invariant(False):
        assert not te.is_batch_invariant()
    assert te.is_batch_invariant()
    te.batch_invariant(False)
    assert not te.is_batch_invariant()


def test_decorating_a_function_leaves_the_process_as_before():
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory

    @te.batch_invariant()
    def run():
        return te.is_batch_invariant()

    @te.deterministic()
    def run_deterministic():
        return torch.are_deterministic_algorithms_enabled()

    for _ in range(2):
        assert not te.is_batch_invariant() and run()
        assert torch.are_deterministic_algorithms_enabled() is before and run_deterministic()
    assert torch.utils.deterministic.fill_uninitialized_memory is fills


def test_objects_that_are_constructed_before_others_are_entered_leave_no_trace():
    first, second = te.batch_invariant(), te.batch_invariant()
    with first, second:
        assert te.is_batch_invariant()
    assert not te.is_batch_invariant()
    te.batch_invariant()
    waiting = te.batch_invariant(False)  # the latest setting, until it is entered
    assert not te.is_batch_invariant()
    with waiting:
        assert not te.is_batch_invariant()
    assert te.is_batch_invariant()
    te.batch_invariant(False)


@pytest.mark.parametrize("norm", [te.LayerNorm, te.RMSNorm])
def test_rows_of_transposed_tensors_do_not_depend_on_their_number(norm):
    norm, x = norm(256, device="cpu"), torch.randn(256, 50).t()
    products = torch.randn(256, 256)
    rows = torch.randn(50, 256)
    with te.batch_invariant():
        y = norm(x).detach()
        assert torch.equal(norm(x.contiguous()), y)
        gradients = {}
        for count in (1, 2, 7, 13, 50):
            assert torch.equal(norm(x[:count]), y[:count])
            leaf = rows[:count].clone().requires_grad_()
            norm(leaf).backward(products[:, :count].t())  # a gradient that is not contiguous
            gradients[count] = leaf.grad
    for gradient in gradients.values():
        assert torch.equal(gradient, gradients[50][: len(gradient)])


def test_activations_outside_of_a_block_have_torch_sigmoid_and_its_derivative():
    from transformer_engine.pytorch.primitives.activation import reference

    x = torch.tensor([[-100.0, -89.0, 1.0]], requires_grad=True)
    for requirement in (False, True):
        with te.batch_invariant(requirement):
            y = reference.sigmoid(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(
            gradient, torch.sigmoid(x) * (1 - torch.sigmoid(x)), atol=1e-37, rtol=1e-6
        )
        assert requirement or torch.equal(y, torch.sigmoid(x))


def test_a_decorated_function_and_a_reused_block_set_it_each_time():
    @te.batch_invariant()
    def run(depth):
        assert te.is_batch_invariant()
        return run(depth - 1) if depth else te.is_batch_invariant()

    te.batch_invariant(False)
    assert run(2)
    assert not te.is_batch_invariant()
    block = te.batch_invariant()
    for _ in range(2):
        with block:
            assert te.is_batch_invariant()
        assert not te.is_batch_invariant()


def test_blocks_of_two_threads_that_overlap_leave_no_trace():
    entered, left = threading.Event(), threading.Event()
    records = []

    def other():
        with te.batch_invariant():
            entered.set()
            left.wait(10)
            records.append(te.is_batch_invariant())

    thread = threading.Thread(target=other)
    with te.batch_invariant():
        thread.start()
        assert entered.wait(10)
    assert te.is_batch_invariant()  # of the other thread's block
    left.set()
    thread.join()
    assert records == [True]
    assert not te.is_batch_invariant()


def test_results_outside_of_a_block_are_those_of_before():
    torch.manual_seed(0)
    layer, x = te.LayerNormMLP(64, 128, device="cpu"), torch.randn(3, 64)
    before, generation = layer(x), env.generation()
    choices = {name: dict(table._bound) for name, table in dispatch.tables.items()}
    with te.batch_invariant():
        layer(x)
        assert env.generation() != generation
    assert env.generation() == generation
    assert {name: dict(table._bound) for name, table in dispatch.tables.items()} == choices
    assert torch.equal(layer(x), before)


def test_explain_prints_why_a_backend_is_not_chosen():
    q = torch.randn(2, 8, 4, 16)
    layer = te.DotProductAttention(
        4, 16, qkv_format="bshd", attn_mask_type="causal", attention_dropout=0.0
    )
    with te.batch_invariant():
        text = str(te.explain(layer, q, q, q))
    assert "results that do not depend on the batch (te.batch_invariant)" in text
    assert "te.batch_invariant" not in str(te.explain(layer, q, q, q))


@pytest.mark.sampled(1)
def test_a_compiled_layer_follows_the_state():
    torch.manual_seed(0)
    layer = te.TransformerLayer(
        64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal",
        attn_input_format="bshd", device="cpu",
    )  # fmt: skip
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, 10, 64)
    with torch.no_grad():
        usual = compiled(x)
        with te.batch_invariant():
            y = compiled(x)
            assert torch.equal(y, layer(x))
            assert torch.equal(compiled(x[1:2].contiguous())[0], y[1])
        assert torch.equal(compiled(x), usual) and torch.equal(usual, layer(x))


def test_a_compiled_function_may_contain_the_block():
    layer, x = te.Linear(16, 16, device="cpu"), torch.randn(3, 16)

    @torch.compile(backend="aot_eager")
    def run(x):
        with te.batch_invariant():
            return layer(x) * 2

    with te.batch_invariant():
        expected = layer(x) * 2
    assert torch.equal(run(x), expected)
    assert not te.is_batch_invariant()
