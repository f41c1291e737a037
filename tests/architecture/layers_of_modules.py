"""The layers of the product: a module imports from its own layer and those below it.

`docs/layers_table.py` writes the tables in docs/architecture.md from these rows.
"""

from __future__ import annotations

# A framework's rows: layer, dotted module and package names, contents. The longest matching name applies.
SHARED = (
    (12, "transformer_engine", "the root package, which imports a framework on first access"),
    (11, "transformer_engine_tools", "the `te` command"),
    (0, "transformer_engine._version transformer_engine.jax.requirements", "versions"),
    (
        0,
        "transformer_engine.common",
        "recipes, formats, the table of hardware, environment, dispatch, the simulator of `te plan`: no tensor "
        "library; `common/kernels`: Triton device code",
    ),
)
PYTORCH = (
    (
        11,
        "transformer_engine.pytorch transformer_engine_torch",
        "the public names; names and call shapes of the original's extension",
    ),
    (
        10,
        "transformer_engine.pytorch.integrations",
        "layers for models of other libraries, a folder each",
    ),
    (
        10,
        "transformer_engine.pytorch.inspect",
        "`explain`, the memory plan, autotuning, `observe`, `verify`, the self-test: they read every layer, none reads "
        "them",
    ),
    (
        10,
        "transformer_engine.pytorch.conversion",
        "checkpoints of other libraries as stacks of `TransformerLayer`",
    ),
    (10, "transformer_engine.pytorch.graphs", "modules captured in CUDA graphs"),
    (
        10,
        "transformer_engine.pytorch.export",
        "export to ONNX: its mode, and the translation of quantizations",
    ),
    (
        10,
        "transformer_engine.debug",
        "sessions of `nvdlfw_inspect`: quantizers that features of a file control",
    ),
    (
        9,
        "transformer_engine.pytorch.attention transformer_engine.pytorch.transformer "
        "transformer_engine.pytorch.transformer_settings",
        "attention modules, and the layer made of everything",
    ),
    (
        8,
        "transformer_engine.pytorch.module transformer_engine.pytorch.optimizers "
        "transformer_engine.pytorch.cross_entropy transformer_engine.pytorch.permutation "
        "transformer_engine.pytorch.router transformer_engine.pytorch.ep",
        "the other `nn.Module` classes, optimizers, losses, routing of tokens to experts, experts over ranks",
    ),
    (
        8,
        "transformer_engine.pytorch.ops",
        "operations that fuse in a `Sequential`; never import `pytorch/module`, whose norms are operations",
    ),
    (
        7,
        "transformer_engine.pytorch.compat.by_name",
        "layers that call names which programs monkey-patch",
    ),
    (
        7,
        "transformer_engine.pytorch.functions",
        "forward and backward passes as plain functions, in thin `autograd.Function` classes",
    ),
    (
        6,
        "transformer_engine.pytorch.fast",
        "pieces that exist for host time alone: generated passes, collectives in them, the switch `TE_FAST`",
    ),
    (
        5,
        "transformer_engine.pytorch.distributed transformer_engine.pytorch.distributed_weight "
        "transformer_engine.pytorch.offload",
        "collectives, faults of ranks, tensor parallelism, random states, recomputation; saved tensors on the host",
    ),
    (
        5,
        "transformer_engine.pytorch.custom_recipes",
        "a quantizer for each role of an operand, as each recipe has it: the defaults of custom recipes",
    ),
    (
        4,
        "transformer_engine.pytorch.quantization",
        "recipe families, quantizers and scaling states, `autocast`, extra state",
    ),
    (3, "transformer_engine.pytorch.tensor", "quantizers and quantized tensors"),
    (
        2,
        "transformer_engine.pytorch.primitives",
        "stateless operations on plain tensors and operands, one table of backends for each",
    ),
    (
        3,
        "transformer_engine.pytorch.compat.functional_linear transformer_engine.pytorch.compat.combined_quantization",
        "functions of the original that no layer calls",
    ),
    (
        1,
        "transformer_engine.pytorch.compat",
        "names, signatures and paths of the original and of earlier releases",
    ),
    (
        1,
        "transformer_engine.pytorch.fast.symbols",
        "symbols of tensors, on which a pass lists its launches and products instead of starting them",
    ),
    (
        1,
        "transformer_engine.pytorch.runtime transformer_engine.pytorch.constants",
        "the device, tracing, threads, kernel launches, checks of values",
    ),
)
JAX = (
    (12, "transformer_engine_jax", "names of the original's extension"),
    (11, "transformer_engine.jax", "the public names"),
    (
        10,
        "transformer_engine.jax.explain transformer_engine.jax.checkpoint_policies "
        "transformer_engine.jax.version_utils transformer_engine.jax.debug transformer_engine.jax.cpp_extensions "
        "transformer_engine.jax.self_test",
        "`explain`, checkpoint policies, the self-test, functions on arrays that the original has in `cpp_extensions`",
    ),
    (9, "transformer_engine.jax.nnx", "the Flax modules as modules of `flax.nnx`"),
    (8, "transformer_engine.jax.flax", "Flax modules"),
    (
        7,
        "transformer_engine.jax.functions transformer_engine.jax.dense transformer_engine.jax.router "
        "transformer_engine.jax.permutation transformer_engine.jax.ep transformer_engine.jax.moe "
        "transformer_engine.jax.activation transformer_engine.jax.layernorm transformer_engine.jax.layernorm_dense "
        "transformer_engine.jax.layernorm_mlp transformer_engine.jax.softmax transformer_engine.jax.attention "
        "transformer_engine.jax.collective",
        "differentiable functions",
    ),
    (
        6,
        "transformer_engine.jax.context_parallel",
        "attention over several devices",
    ),
    (
        4,
        "transformer_engine.jax.quantize",
        "quantizers, scaled tensors, recipes as collections of Flax",
    ),
    (
        2,
        "transformer_engine.jax.primitives",
        "stateless operations, one table of backends for each",
    ),
    (
        1,
        "transformer_engine.jax.runtime transformer_engine.jax.sharding",
        "the platform, sharding, checks of values",
    ),
)
LAYERS = {name: number for number, names, _ in (*SHARED, *PYTORCH, *JAX) for name in names.split()}


def layer(name: str) -> int:
    """A module's layer, by the longest name in the tables that begins its dotted name."""
    while name not in LAYERS:
        name = name.rpartition(".")[0]
    return LAYERS[name]
