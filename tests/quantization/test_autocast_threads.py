"""An autocast block is local to its thread and to code that runs in a copy of its context."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import current, delayed_scaling

WIDTH = 32


def run_in_thread(function: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_thread_outside_of_any_block_computes_in_high_precision(device):
    layer, x = te.Linear(WIDTH, WIDTH, device=device), torch.randn(16, WIDTH, device=device)
    plain = layer(x)
    with te.autocast(recipe=Float8CurrentScaling()):
        quantized = layer(x)
        elsewhere = run_in_thread(lambda: layer(x))
    assert torch.equal(elsewhere, plain)
    assert not torch.equal(quantized, plain)


def test_a_block_that_ends_in_another_thread_has_no_effect_here():
    recipe, other = DelayedScaling(), Float8CurrentScaling()

    def elsewhere():
        before = current().enabled
        with te.autocast(recipe=other):
            inside = current().recipe
        return before, inside, current().enabled

    with te.autocast(recipe=recipe):
        assert run_in_thread(elsewhere) == (False, other, False)
        assert current().recipe is recipe
    assert not current().enabled


def test_leaving_the_outermost_block_updates_scales_despite_blocks_of_other_threads(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)
    x = torch.randn(16, WIDTH, device=device)

    def elsewhere():
        with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
            layer(x)
        return layer.fp8_meta["scaling_fwd"].scale.clone()

    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        assert bool((run_in_thread(elsewhere)[:2] != 1).all())


def test_a_thread_or_call_in_a_copied_context_is_in_the_block():
    recipe = Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        context = contextvars.copy_context()
        assert asyncio.run(_run_in_worker()) is recipe
    assert run_in_thread(lambda: context.run(lambda: current().recipe)) is recipe
    assert not current().enabled
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(lambda: current().enabled).result()
        assert pool.submit(context.run, lambda: current().recipe).result() is recipe
        assert not pool.submit(lambda: current().enabled).result()


async def _run_in_worker():
    return await asyncio.to_thread(lambda: current().recipe)


def test_tasks_of_one_thread_have_separate_blocks():
    recipes = DelayedScaling(), Float8CurrentScaling()
    records: list[tuple[int, object]] = []

    async def task(number: int):
        for _ in range(2):
            with te.autocast(recipe=recipes[number]):
                await asyncio.sleep(0)
                records.append((number, current().recipe))
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            records.append((number, current().enabled))

    async def both():
        await asyncio.gather(task(0), task(1))

    asyncio.run(both())
    for number in (0, 1):
        assert [what for n, what in records if n == number] == [recipes[number], False] * 2
    assert not current().enabled


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inside", [False, True])
def test_compiled_code_follows_the_thread_that_calls_it(inside, device):
    torch._dynamo.reset()
    layer, x = te.Linear(WIDTH, WIDTH, device=device), torch.randn(16, WIDTH, device=device)
    recipe = Float8CurrentScaling()

    def run(x):
        if not inside:
            return layer(x)
        with te.autocast(recipe=recipe):
            return layer(x)

    plain = layer(x)
    with te.autocast(recipe=recipe):
        quantized = layer(x)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(compiled(x), quantized)
        elsewhere = run_in_thread(torch.no_grad()(lambda: compiled(x)))
    assert torch.equal(elsewhere, quantized if inside else plain)
    assert not current().enabled
    torch._dynamo.reset()


def test_a_graph_break_within_a_block_stays_in_it(device):
    torch._dynamo.reset()
    layer, x, recipe = (
        te.Linear(WIDTH, WIDTH, device=device),
        torch.randn(16, WIDTH, device=device),
        None,
    )
    recipe = Float8CurrentScaling()

    def run(x):
        with te.autocast(recipe=recipe):
            x = layer(x)
            torch._dynamo.graph_break()
            return layer(x)

    with torch.no_grad():
        expected = run(x)
        assert torch.equal(torch.compile(run, backend="eager")(x), expected)
    assert not current().enabled
    torch._dynamo.reset()


def test_layers_may_register_from_many_threads_at_once(device):
    layers = [te.Linear(WIDTH, WIDTH, device=device) for _ in range(40)]
    recipe, barrier = DelayedScaling(amax_history_len=2), threading.Barrier(8, timeout=60)

    def work(mine):
        barrier.wait()
        for layer in mine:
            with te.autocast(recipe=recipe):
                layer(torch.randn(16, WIDTH, device=device))

    threads = [threading.Thread(target=work, args=(layers[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(pool.states) for pool in delayed_scaling.registry.pools.values()] == [40, 40]
    with te.autocast(recipe=recipe):
        for layer in layers:
            layer(torch.randn(16, WIDTH, device=device))
    assert all(bool((layer.fp8_meta["scaling_fwd"].scale[:2] != 1).all()) for layer in layers)


def test_a_thread_outside_of_a_model_init_block_makes_plain_weights(device):
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        elsewhere = run_in_thread(lambda: te.Linear(16, 16, device=device))
        copied = contextvars.copy_context()
        inside = run_in_thread(lambda: copied.run(te.Linear, 16, 16, device=device))
    assert type(elsewhere.weight.data) is torch.Tensor
    assert isinstance(inside.weight, te.QuantizedTensor)
