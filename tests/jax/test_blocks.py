"""Re-entering autocast and mesh-resource objects: nested, in sequence, from threads, as decorators."""

from __future__ import annotations

import threading

import pytest

import transformer_engine.jax as te
from transformer_engine.common import recipe
from transformer_engine.jax import sharding
from transformer_engine.jax.quantize import get_global_quantize_recipe

DELAYED, CURRENT = recipe.DelayedScaling(), recipe.Float8CurrentScaling()
BLOCKS = {
    "autocast": (lambda: te.autocast(True, DELAYED), get_global_quantize_recipe),
    "autocast with a mesh": (
        lambda: te.autocast(mesh_resource=te.MeshResource(dp_resource="a")),
        sharding.mesh_resource_or_default,
    ),
    "global_shard_guard": (
        lambda: sharding.global_shard_guard(te.MeshResource(dp_resource="a")),
        sharding.mesh_resource_or_default,
    ),
}


@pytest.fixture(params=BLOCKS)
def block_and_setting(request):
    make, setting = BLOCKS[request.param]
    return make(), setting


def test_one_context_object_can_be_entered_nested_and_in_sequence(block_and_setting):
    block, setting = block_and_setting
    outer = setting()
    for _ in range(2):
        with block:
            inside = setting()
            assert inside != outer
            with block:
                assert setting() == inside
            assert setting() == inside
        assert setting() == outer


def test_an_error_exits_every_nested_entry(block_and_setting):
    block, setting = block_and_setting
    outer = setting()
    with pytest.raises(ZeroDivisionError), block, block:
        raise ZeroDivisionError
    assert setting() == outer


def test_a_rejected_context_is_rejected_again_and_changes_nothing():
    invalid = te.autocast(enabled=object())  # pyright: ignore[reportArgumentType]
    with te.autocast(True, DELAYED):
        for _ in range(2):
            with pytest.raises(TypeError, match=r"enabled=.* is neither True nor False"), invalid:
                pytest.fail("the block was entered")
            assert get_global_quantize_recipe() is DELAYED
    assert get_global_quantize_recipe() is None


def test_overlapping_contexts_each_exit_their_own_entry():
    def suspend():
        with sharding.global_shard_guard(te.MeshResource(dp_resource="a")):
            yield

    generator = suspend()
    next(generator)
    with te.autocast(True, DELAYED):
        generator.close()
        assert get_global_quantize_recipe() is DELAYED
        assert sharding.mesh_resource_or_default() == te.MeshResource()
    assert get_global_quantize_recipe() is None


def test_threads_can_enter_one_context_object():
    block, turns = te.autocast(True, DELAYED), threading.Barrier(2, timeout=60)
    records: dict[str, list[object]] = {"first": [], "second": []}

    def run(name):
        for order in (("first", "second"), ("second", "first")):
            with block:
                turns.wait()
                records[name].append(get_global_quantize_recipe())
                if name == order[1]:
                    turns.wait()
            if name == order[0]:
                turns.wait()
            records[name].append(get_global_quantize_recipe())
            turns.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert records == {name: [DELAYED, None] * 2 for name in records}


def test_a_function_may_be_decorated_and_call_itself():
    @te.autocast(True, CURRENT)
    def recipes(depth):
        """The active recipe at every depth."""
        return [get_global_quantize_recipe()] + (recipes(depth - 1) if depth else [])

    assert recipes(2) == [CURRENT] * 3
    assert recipes.__doc__ == "The active recipe at every depth."
    assert get_global_quantize_recipe() is None


def test_the_former_name_warns_when_entered():
    block = te.fp8_autocast(True, DELAYED)
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="use autocast") as said, block:
            assert get_global_quantize_recipe() is DELAYED
        assert said[0].filename == __file__
