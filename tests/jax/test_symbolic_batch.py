"""Programs that jax.export makes for every batch: a batch is computed as by a program for its size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from tests.jax.compiled import draw_variables, normal, ones
from transformer_engine.common import recipe
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.jax.layernorm import layernorm

WIDTH = 32
EXPERTS = te_flax._MoEBlock(num_experts=4, intermediate_size=16)
HEADS = te_flax.MultiHeadAttention(head_dim=8, num_attention_heads=4)
MODULES = {
    "attention": (HEADS, lambda x: (x, x)),
    "experts": (EXPERTS, lambda x: (x,)),
    "mlp": (te_flax.LayerNormMLP(intermediate_dim=16), lambda x: (x,)),
}


def export_layer(name, x, platforms):
    """A function on (parameters, x), its parameters, and the function exported for any batch."""
    module, arguments = MODULES[name]
    variables = draw_variables(module, *arguments(x))
    function = jax.jit(lambda variables, x: module.apply(variables, *arguments(x))[0])
    (batch,) = export.symbolic_shape("batch")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), variables)
    any_batch = jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype)
    return function, variables, export.export(function, platforms=platforms)(shapes, any_batch)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sampled(1)
def test_a_symbolic_batch_equals_a_concrete_batch(name):
    """Comparing symbolic extents with kernel limits is "inconclusive", so tracing must not do so."""
    x = normal(jax.random.key(1), (3, 8, WIDTH))
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
        function, variables, program = export_layer(name, x, None)
        for batch in (1, 3):
            expected = function(variables, x[:batch])
            np.testing.assert_allclose(
                program.call(variables, x[:batch]), expected, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("name", MODULES)
def test_kernels_are_not_launched_for_a_symbolic_batch(name, monkeypatch):
    monkeypatch.setenv("TE_JAX_KERNELS", "1")
    x = ones((2, 8, WIDTH), jnp.bfloat16)
    _, _, program = export_layer(name, x, ("cuda",))
    assert "triton_kernel_call_ffi" not in program.mlir_module()


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_a_program_for_cuda_is_exported_with_the_calls_that_the_documentation_allows(
    kernels, monkeypatch
):
    monkeypatch.setenv("TE_JAX_KERNELS", kernels)
    module, x = te_flax.DenseGeneral(features=64), ones((64, 64), jnp.bfloat16)
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
        variables = draw_variables(module, x)
        run = jax.jit(module.apply)
        needed = "triton_kernel_call_ffi" if kernels == "1" else "LayoutConstraint"
        with pytest.raises(ValueError, match=needed):
            export.export(run, platforms=["cuda"])(variables, x)
        allowed = [
            export.DisabledSafetyCheck.custom_call(name)
            for name in ("LayoutConstraint", "triton_kernel_call_ffi")
        ]
        program = export.export(run, platforms=["cuda"], disabled_checks=allowed)(variables, x)
    assert needed in program.mlir_module()


def test_a_kernel_forced_on_a_symbolic_batch_is_rejected():
    gamma = ones(WIDTH)
    (batch,) = export.symbolic_shape("batch")
    program = jax.jit(lambda x: layernorm(x, gamma, None, "rmsnorm"))
    with (
        use_backend(jax_norm="triton"),
        pytest.raises(Unsupported, match="'triton' was asked for, but extents"),
    ):
        export.export(program)(jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))
