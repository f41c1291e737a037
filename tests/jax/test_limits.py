"""Counts, margins, states and specs outside their range raise errors; numbers of any library are accepted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_unboxed_variables
from tests.jax.test_bad_calls import attend, ones
from transformer_engine.common import recipe
from transformer_engine.jax import permutation, quantize, sharding
from transformer_engine.jax.attention import SequenceDescriptor
from transformer_engine.jax.debug.experimental import inspect_array
from transformer_engine.jax.flax.kv_cache import KeyValueCache
from transformer_engine.jax.quantize import (
    DelayedScaleQuantizer,
    GroupedQuantizer,
    QuantizerFactory,
)
from transformer_engine.jax.runtime.checks import check_sizes

E4M3, DELAYED_MODE = jnp.float8_e4m3fn, quantize.ScalingMode.DELAYED_TENSOR_SCALING
MANY = 10**9


def delayed(scale, history, **options):
    state = {"scale": jnp.ones(scale), "amax_history": jnp.zeros(history)}
    return DelayedScaleQuantizer(jnp.dtype(E4M3), **state, **options)


def constrain_sharding(pspec: Any, x: Any = None):
    return sharding.with_sharding_constraint(jnp.ones((2, 4)) if x is None else x, pspec)


BEYOND_LIMITS = {
    "a margin of a recipe": (
        ValueError,
        r"DelayedScaling: margin=10000: 2\^10000 is not a normal float32; give a number from -126 to 127",
        lambda: recipe.DelayedScaling(margin=10**4),
    ),
    "a margin below": (
        ValueError,
        "margin=-127: .* from -126 to 127",
        lambda: recipe.DelayedScaling(margin=-127),
    ),
    "a margin of a quantizer": (
        ValueError,
        "margin=128.0: .* from -126",
        lambda: delayed(1, 4, margin=128.0),
    ),
    "a margin of a scale": (
        ValueError,
        "margin=10000: ",
        lambda: quantize.compute_scale_from_amax(jnp.ones(1), E4M3, margin=10**4),
    ),
    "quantizers": (
        ValueError,
        "n_quantizers=1000000000 is above 65536; pass an integer from 1 to 65536",
        lambda: QuantizerFactory.create(MANY, DELAYED_MODE, E4M3),
    ),
    "sets": (
        ValueError,
        "n_quantizer_sets=1000000000 is above 65536",
        lambda: QuantizerFactory.create_set(MANY, DELAYED_MODE, E4M3, E4M3),
    ),
    "groups": (
        ValueError,
        "n_groups=1000000000 is above 65536",
        lambda: QuantizerFactory.create(1, DELAYED_MODE, E4M3, n_groups=MANY),
    ),
    "groups of sets": (
        ValueError,
        "n_groups=1000000000 is above 65536",
        lambda: QuantizerFactory.create_set(1, DELAYED_MODE, E4M3, E4M3, n_groups=MANY),
    ),
    "an unknown keyword of a set": (
        TypeError,
        r"QuantizerFactory.create_set\(\) takes no margin=; leave it out",
        lambda: QuantizerFactory.create_set(1, DELAYED_MODE, E4M3, E4M3, margin=1),
    ),
    "three scales of one history": (
        ValueError,
        r"scale has shape \[3\] and amax_history \[4\]; give one scale a history",
        lambda: delayed(3, 4),
    ),
    "one scale of three histories": (
        ValueError,
        r"scale has shape \[1\] and amax_history \[3, 4\]",
        lambda: delayed(1, (3, 4)),
    ),
    "a history of no steps": (
        ValueError,
        r"amax_history \[0\]; give one scale a history",
        lambda: delayed(1, 0),
    ),
    "a state of three tensors for one": (
        ValueError,
        r"scale has shape \[3\]; a tensor has one scale, \[1\]",
        lambda: delayed(3, (3, 4)).quantize(jnp.ones((2, 3))),
    ),
    "a state of one tensor for three groups": (
        ValueError,
        r"scale has shape \[1\]; give one per group, \[3\], and a history \[3, length\]",
        lambda: GroupedQuantizer(delayed(1, 4), 3).quantize(jnp.ones((3, 2, 4))),
    ),
    "a spec by its text": (
        TypeError,
        "pspec='dp' is a str; give a PartitionSpec, or None",
        lambda: constrain_sharding("dp"),
    ),
    "a spec by a number": (TypeError, "pspec=3 is an int; give", lambda: constrain_sharding(3)),
    "a number in a spec": (
        TypeError,
        "holds 0; give the name of an axis",
        lambda: constrain_sharding((0, None)),
    ),
    "a spec of more axes": (
        ValueError,
        "has 3 entries for an array of 2 axes; give at most 2",
        lambda: constrain_sharding(PartitionSpec("dp", None, None)),
    ),
    "a constraint of no array": (
        TypeError,
        "x=3.0 is a float; give an array",
        lambda: constrain_sharding(None, 3.0),
    ),
    "an inspection of no array": (
        TypeError,
        r"x=\[1.0\] is a list; give an array",
        lambda: inspect_array([1.0], "x"),  # pyright: ignore
    ),
    "an expert by half": (
        TypeError,
        "roll_to_expert_id=0.5 must be a whole number",
        lambda: permutation.pure_jax_token_dispatch(
            ones(5, 4),
            np.zeros((5, 1), np.int32),
            4,
            1,
            roll_to_expert_id=0.5,  # pyright: ignore
        ),
    ),
    "a window of a bool": (
        ValueError,
        "both sides are whole numbers",
        lambda: attend(window_size=(True, 0)),
    ),
}


@pytest.mark.parametrize("name", BEYOND_LIMITS)
def test_values_beyond_their_limits_are_rejected(name):
    error, sentence, call = BEYOND_LIMITS[name]
    with pytest.raises(error, match=sentence):
        call()


@pytest.mark.parametrize("margin", [-126, 127, np.int64(2), np.float32(1.5)])
def test_margins_within_the_limits_scale_by_powers_of_two(margin):
    if not isinstance(margin, np.float32):
        assert recipe.DelayedScaling(margin=margin).margin == margin
    result = delayed(1, 4, margin=margin).advanced(jnp.full(1, 448.0))
    np.testing.assert_allclose(np.float64(result.scale[0]), 2.0 ** -float(margin), rtol=1e-7)


@pytest.mark.parametrize(
    ("scale", "history"), [((1,), (1,)), ((3,), (3, 4)), ((2, 1), (2, 4)), ((2, 3), (2, 3, 4))]
)
def test_states_of_groups_and_of_scanned_layers_are_accepted(scale, history):
    assert delayed(scale, history).amax_history.shape == history


def test_a_history_keeps_its_length_under_a_recipe_with_another():
    x, layer = jnp.full((8, 16), 3.0), te_flax.DenseGeneral(features=4)
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=3)):
        variables = draw_unboxed_variables(layer, x)
    loss = jax.grad(lambda variables: layer.apply(variables, x).sum())
    with te.autocast(True, recipe.DelayedScaling(amax_history_len=8)):
        following = loss(variables)["fp8_metas"]
    assert following["x_amax_history"].tolist() == [0.0, 0.0, 3.0]
    assert float(following["x_scale"][0]) == np.float32(448) / np.float32(3)


def test_the_first_expert_may_be_a_traced_number():
    """As in a shard_map in which every device starts at its own experts, by lax.axis_index."""
    inputs, experts = jnp.arange(20.0).reshape(5, 4), jnp.asarray([[0], [3], [1], [2], [3]])

    def record_dispatch(first):
        rows, _, counts = permutation.pure_jax_token_dispatch(
            inputs, experts, 4, 1, roll_to_expert_id=first
        )
        return rows, counts

    expected = record_dispatch(2)
    assert expected[1].tolist() == [1, 2, 1, 1]
    for first in (
        jax.jit(record_dispatch)(2),
        record_dispatch(jnp.asarray(2)),
        record_dispatch(np.int64(2)),
    ):
        jax.tree.map(np.testing.assert_array_equal, first, expected)


class OfTwoProcesses(jax.Array):  # pyright: ignore
    """Local attributes of an array that is sharded over several processes."""

    shape, ndim, dtype, size = (2,), 1, np.dtype(np.int32), 2
    is_fully_addressable = is_fully_replicated = False

    def __array__(self, *_, **__):
        raise RuntimeError("spans devices that are not addressable")


OfTwoProcesses.__abstractmethods__ = frozenset()


def test_group_sizes_on_other_processes_are_not_read():
    check_sizes("group_sizes", OfTwoProcesses(), 2, 4)
    with pytest.raises(ValueError, match="give 3 whole numbers"):
        check_sizes("group_sizes", OfTwoProcesses(), 3, 4)


def test_sequence_lengths_on_other_processes_are_not_read():
    """Values of other processes are not checked; as for traced arrays, they are clamped to the valid range."""
    other, none, current = OfTwoProcesses(), jnp.zeros((0,), jnp.int32), jnp.asarray([[1, 2]])
    by_lengths = SequenceDescriptor((other, other), (none, none), (none, none), (none, none))
    by_offsets = SequenceDescriptor((current, current), (other, other), (none, none), (none, none))
    by_numbers = SequenceDescriptor(
        (none, none), (none, none), (other, current), (current, current)
    )
    for descriptor in (by_lengths, by_offsets, by_numbers):
        descriptor.check_segments(2)
        descriptor.check_lengths(1, 1)
    with pytest.raises(ValueError, match="max_segments_per_seq=1"):
        by_numbers.check_segments(1)
    recognized = replace(by_numbers, segment_ids=(current, current))
    assert recognized.within(1) is recognized
    with pytest.raises(Exception, match="abstract method __lt__"):
        by_numbers.within(1)  # it computes with them, which this array stub does not support


def test_a_cache_index_on_other_processes_is_not_read():
    saved = SimpleNamespace(value=jnp.zeros((1, 4, 2, 8)))
    cache = KeyValueCache(saved, saved, SimpleNamespace(value=OfTwoProcesses()), True, 1)
    step = jnp.zeros((1, 1, 2, 8))
    cache._check(step, step)
    full = replace(cache, index=SimpleNamespace(value=jnp.asarray(4)))
    with pytest.raises(ValueError, match="cache_index=4"):
        full._check(step, step)


def test_a_window_may_hold_numpy_integers():
    np.testing.assert_array_equal(
        attend(window_size=(np.int64(1), np.int32(0))), attend(window_size=(1, 0))
    )


class Renamed(te_flax.DenseGeneral):
    """A user's module with a field `axis_name` that is not a name."""

    axis_name: tuple[str, ...] = ("a", "b")


def test_a_subclass_may_add_fields():
    layer = Renamed(features=4)
    assert jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 8)))["params"][
        "kernel"
    ].value.shape == (8, 4)


@pytest.mark.parametrize(
    "pspec",
    [
        None,
        PartitionSpec("a"),
        PartitionSpec(("a", "b"), None),
        PartitionSpec(PartitionSpec.UNCONSTRAINED),
        ("a",),
    ],
)
def test_specs_of_every_form_keep_the_values_of_an_array(pspec):
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        x = jnp.arange(8.0).reshape(2, 4)
        np.testing.assert_array_equal(jax.jit(lambda x: constrain_sharding(pspec, x))(x), x)
