"""Fewer and faster compilations in the tests of JAX, which compile more than they compute."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax._src import compiler
from jax._src.interpreters import mlir

_jit = jax.jit  # a test may have replaced it when the first program is compiled

# A layer and its gradients on a CPU: 0.65 s of compiling, 0.08 s with these (jax 0.10.2, without optimizations).
_QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
_as_users = compiler.get_compile_options
_new_context = mlir.make_ir_context
_PROGRAMS_PER_CONTEXT = 100  # a context never frees attributes, such as large constants
_LEAST_DRAW = 2**14


def compile_quickly(quickly: bool) -> None:
    """Compile every program from here on without XLA's optimizations, in an MLIR context shared by many programs.

    XLA_FLAGS are read once per process. Therefore, this function replaces JAX's function for a program's
    compile options. A new MLIR context takes 6 of the 25 ms that a one-operation program needs.
    """
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", quickly)
    compiler.get_compile_options = _quick_options if quickly else _as_users
    programs = itertools.count()
    shared_context = functools.lru_cache(maxsize=1)(lambda _: _new_context())
    mlir.make_ir_context = (
        (lambda: shared_context(next(programs) // _PROGRAMS_PER_CONTEXT))
        if quickly
        else _new_context
    )


def start_on_host_devices() -> None:
    """Prepare a program on eight host devices: quick compilation, and no garbage collection, 5% of its time."""
    assert jax.device_count() == 8
    compile_quickly(True)
    gc.disable()


def _quick_options(
    *arguments: Any, env_options_overrides: dict[str, Any] | None = None, **options: Any
) -> Any:
    overrides = {name: value for name, value in _QUICK.items() if _is_xla_option(name)} | (
        env_options_overrides or {}
    )
    return _as_users(*arguments, env_options_overrides=overrides, **options)


@functools.cache
def _is_xla_option(option: str) -> bool:
    """Whether this XLA has an option with this name; XLA rejects unknown options."""
    compiler.get_compile_options = _as_users
    try:
        _jit(lambda x: x).lower(1.0).compile(compiler_options={option: _QUICK[option]})
    except jax.errors.JaxRuntimeError:
        return False
    finally:
        compiler.get_compile_options = _quick_options
    return True


def normal(key: jax.Array, shape: Sequence[int] = (), dtype: Any = float) -> jax.Array:
    """The numbers from jax.random.normal, sliced from a larger draw whose program serves many shapes.

    A program for each shape takes 0.12 s. The slice has the same bits, because numbers depend on their index alone.
    """
    assert jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    count = int(np.prod(shape))
    drawn = jax.random.normal(key, (max(_LEAST_DRAW, 1 << (count - 1).bit_length()),), dtype)
    return array(np.asarray(drawn)[:count].reshape(shape))


def array(values: Any, dtype: Any = None) -> jax.Array:
    """Return jnp.array(values, dtype) without a program for each shape."""
    return jax.device_put(np.asarray(values, dtype))


def ones(shape: int | Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Return jnp.ones(shape, dtype) without a program for each shape."""
    return array(np.ones(shape), dtype)


def zeros(shape: int | Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Return jnp.zeros(shape, dtype) without a program for each shape."""
    return array(np.zeros(shape), dtype)


def values_and_gradients(function: Callable[..., Any], dy: Any, *arguments: Any) -> tuple[Any, ...]:
    """Return (y, *gradients of the arguments) for y = function(*arguments) and its cotangent dy."""

    def both(dy, *arguments):
        y, pullback = jax.vjp(function, *arguments)
        return y, *pullback(dy)

    return jax.jit(both)(dy, *arguments)


def init_variables(model: nn.Module, rngs: Any, *inputs: Any, **options: Any) -> Any:
    """Initialize variables with model.init, without boxes; options are static."""
    return nn.meta.unbox(
        jax.jit(lambda rngs, *inputs: model.init(rngs, *inputs, **options))(rngs, *inputs)
    )


def draw_unboxed_variables(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Return `draw_variables` without boxes."""
    return nn.meta.unbox(draw_variables(model, *inputs, **options))


def draw_variables(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    """Draw variables with the boxes and shapes from model.init, without compiling its program.

    Kernels are normal numbers divided by 2 * sqrt(rows). Other parameters are normal numbers around
    their initial values: one for "scale", zero for the rest. Scales of the quantization state are 1, its histories 0.
    """
    keys = {name: jax.random.key(0) for name in ("params", "dropout", "sr_rng")}
    # Inputs are not arguments: queries and keys that are the same object make an attention of one sequence.
    shapes = jax.eval_shape(lambda: model.init(keys, *inputs, **options))
    random = np.random.default_rng(0)

    def draw(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
        names = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
        if names[0] != "params":
            return array(np.full(shape.shape, float(names[-1].endswith("_scale")), shape.dtype))
        numbers = random.standard_normal(shape.shape)
        if len(shape.shape) > 1:
            return array(0.5 * numbers / shape.shape[0] ** 0.5, shape.dtype)
        return array(float(names[-1] == "scale") + 0.1 * numbers, shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
