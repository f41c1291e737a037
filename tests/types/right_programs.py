"""Correct programs as users write them: mypy and pyright must accept each line."""

from __future__ import annotations

from tests.types.wrong_programs import IN_JAX, IN_TORCH

IN_PYTORCH = {
    "train": """\
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = te.LayerNormLinear(width, 4 * width, normalization="RMSNorm")
        self.down = te.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def train(model: nn.Module, steps: int) -> float:
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-3, master_weights=False)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=16)):
            y: Tensor = model(x)
        loss = y.square().mean()
        optimizer.step()
    return loss.item()


print(train(Block(64), 2))
""",
    "recipes": """\
from transformer_engine.common.recipe import Recipe

recipes: dict[str, Recipe] = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(disable_rht=True),
}
for name, scaling in recipes.items():
    print(name, scaling.fp8_format if isinstance(scaling, recipe.DelayedScaling) else "")
    if scaling.delayed():
        with te.autocast(recipe=scaling):
            print(te.Linear(64, 64)(x).shape)
""",
    "model_init": """\
with te.quantized_model_init(enabled=True, recipe=recipe.Float8CurrentScaling(), preserve_high_precision_init_val=True):
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu")
weight = layer.weight
if isinstance(weight, te.QuantizedTensor):
    print(weight.dequantize().sum().item())
print(layer.in_features + 1, layer.out_features // 2, layer.tp_size)
""",
    "quantizer": """\
from transformer_engine.pytorch import DType

quantizer = te.Float8CurrentScalingQuantizer(DType.kFloat8E4M3, device=torch.device("cpu"))
quantized = quantizer(x)
back = quantized.dequantize(dtype=torch.float32)
assert isinstance(quantized, te.QuantizedTensor)
print((back - x).abs().max().item(), te.MXFP8Quantizer(DType.kFloat8E4M3)(x).shape)
""",
    "checkpoint": """\
layer = te.TransformerLayer(64, 128, 4, layer_number=1, hidden_dropout=0.0, attention_dropout=0.0)
hidden = torch.ones(4, 2, 64, requires_grad=True)
y = te.checkpoint(layer, hidden, use_reentrant=False)
print(y)
state = layer.state_dict()
layer.load_state_dict(state)
""",
    "attention": """\
attention = te.DotProductAttention(4, 16, num_gqa_groups=2, attention_dropout=0.0, qkv_format="bshd")
q = torch.ones(2, 8, 4, 16)
k = torch.ones(2, 8, 2, 16)
out = attention(q, k, k, attn_mask_type="causal", window_size=(4, 0))
print(out.sum().item())
bounds = torch.tensor([0, 8, 16], dtype=torch.int32)
packed = te.DotProductAttention(4, 16, qkv_format="thd", attn_mask_type="padding_causal")
rows = torch.ones(16, 4, 16)
print(packed(rows, rows, rows, cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=8, max_seqlen_kv=8).shape)
""",
    "experts": """\
indices = torch.zeros(32, 2, dtype=torch.int32)
rows, order = te.moe_permute(x, indices, map_type="index")
experts = te.GroupedLinear(2, 64, 128, bias=False)
y = experts(rows, [32, 32])
print(te.moe_unpermute(te.Linear(128, 64)(y), order, map_type="index").shape)
""",
    "ops": """\
model = te.ops.Sequential(
    te.ops.LayerNorm(64),
    te.ops.Linear(64, 128, bias=False),
    te.ops.GELU(),
    te.ops.Linear(128, 64),
)
with te.autocast(enabled=True, recipe=recipe.Float8CurrentScaling()):
    y = model(x)
print(y.sum().item(), len(model))
for operation in model:
    print(operation)
""",
    "inspect": """\
layer = te.LayerNormMLP(64, 128)
explanation = te.explain(layer, x)
for decision in explanation.decisions:
    print(decision.operation, decision.chosen)
plan = te.memory_plan(layer, recipe.DelayedScaling(), 32)
print(plan.peak)
available, reason = te.is_nvfp4_available(return_reason=True)
print(available, reason, te.get_device_compute_capability() if torch.cuda.is_available() else None)
""",
    "generic": """\
from collections.abc import Callable
from typing import Literal

Normalization = Literal["LayerNorm", "RMSNorm"]


def build(norm: Normalization, init: Callable[[torch.Tensor], torch.Tensor | None] | None = None) -> te.LayerNormLinear:
    return te.LayerNormLinear(64, 64, normalization=norm, init_method=init)


layers: list[te.LayerNormLinear] = [build("RMSNorm"), build("LayerNorm")]
print(layers[0](x).shape)
""",
    "graphs": """\
layer = te.Linear(64, 64)
graphed = te.make_graphed_callables(layer, (x,))
print(graphed)


@te.graphed
def step(batch: torch.Tensor) -> torch.Tensor:
    return layer(batch).sum()


print(step(x))
""",
    "inference": """\
layer = te.TransformerLayer(64, 128, 4, layer_number=1, self_attn_mask_type="causal", attn_input_format="bshd").eval()
cache = te.InferenceParams(max_batch_size=2, max_sequence_length=64, num_heads_kv=4, head_dim_k=16, dtype=torch.float32)
from collections import OrderedDict

with torch.no_grad():
    cache.pre_step(OrderedDict({0: 4, 1: 2}))
    y = layer(torch.ones(2, 4, 64), inference_params=cache)
print(y.shape)
""",
    "extension": """\
import transformer_engine_torch as tex

codes = tex.quantize(x, te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device=torch.device("cpu")))
print(codes, tex.DType.kBFloat16, tex.gelu(x, None).shape)
""",
}

IN_FLAX = {
    "jax_flax": """\
import jax

model = te_flax.LayerNormMLP(intermediate_dim=128, activations=("gelu",))
inputs = jax.random.normal(jax.random.key(0), (32, 64))
with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
    variables = model.init(jax.random.key(1), inputs)
print(variables)
""",
    "jax_layer": """\
layer = te_flax.TransformerLayer(
    hidden_size=64, mlp_hidden_size=128, num_attention_heads=4, layer_type=te_flax.TransformerLayerType.ENCODER,
    self_attn_mask_type="padding_causal", dtype=jnp.bfloat16, name="layer",
)
print(layer.hidden_size, te_flax.DenseGeneral(features=64, use_bias=True, dtype=jnp.float32))
""",
}


def right_programs() -> dict[str, str]:
    """{name: text} of all programs."""
    return {f"right_{name}": f"{IN_TORCH}\n{text}" for name, text in IN_PYTORCH.items()} | {
        f"right_{name}": f"{IN_JAX}\n{text}" for name, text in IN_FLAX.items()
    }
