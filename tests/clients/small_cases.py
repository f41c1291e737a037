"""Client programs that each use one part of the engine.

`CASES` maps a name to the program's parts. The program finds the variable `device` set.
"""

ESM_STACK = """
import torch
import transformer_engine.pytorch as te
from esm.models.esmc.layers import EsmcTransformerStack

torch.manual_seed(0)
plain = EsmcTransformerStack(64, 4, 2)
fused = EsmcTransformerStack(64, 4, 2, use_te=True)
assert {type(m).__module__.split('.')[0] for m in fused.modules()} >= {"transformer_engine"}
fused.load_state_dict(plain.state_dict())
x = torch.randn(2, 32, 64)
"""

ESM_PARITY = """
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
    ours, theirs = (stack.to(dtype)(x.to(dtype))[0].float() for stack in (fused, plain))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
"""

ESM_GRADIENTS = """
for stack in (plain, fused):
    stack(x)[0].square().sum().backward()
expected = dict(plain.named_parameters())
for name, parameter in fused.named_parameters():
    torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-4)
"""

ESM_FP8 = """
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

expected = plain(x)[0]
delayed = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent")
for recipe in (delayed, Float8CurrentScaling()):
    with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
        for _ in range(2):
            found = fused(x)[0]
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.1, error
"""

ESM_WEIGHTS = """
bfloat16 = {k: v.to(torch.bfloat16) for k, v in plain.state_dict().items()}
with te.quantized_model_init(enabled=True):
    stored = EsmcTransformerStack(64, 4, 2, use_te=True)
stored.load_state_dict(bfloat16, strict=False)
assert hasattr(stored.blocks[0].ffn.fc1_weight, "_data")
stored = stored.to(device).eval().requires_grad_(False)
with torch.no_grad(), te.autocast(enabled=True):
    found = stored(x)[0]
expected = plain(x)[0]
error = (found - expected).norm() / expected.norm()
assert 0 < error < 0.1, error
"""

OLMO_ATTENTION = """
import torch
from olmo_core.nn.attention import AttentionBackendName, TEAttentionBackend, TorchAttentionBackend

AttentionBackendName.te.assert_supported()
torch.manual_seed(0)
for window in ((-1, -1), (4, 0)):
    options = dict(head_dim=16, n_heads=4, n_kv_heads=2, window_size=window)
    ours, theirs = TEAttentionBackend(**options), TorchAttentionBackend(**options)
    q, k, v = (torch.randn(2, 16, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    found, expected = ours((q, k, v)).view(2, 16, 4, 16), theirs((q, k, v)).view(2, 16, 4, 16)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for mine, its in zip(*(torch.autograd.grad(y.square().sum(), (q, k, v)) for y in (found, expected))):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
"""

OLMO_EXPERTS = """
import torch
from olmo_core.nn.moe import utils

assert utils.tex is not None and utils.TE_DType is not None
torch.manual_seed(0)
tokens = torch.randn(8, 16, requires_grad=True)
chosen = torch.stack([torch.randperm(4)[:2] for _ in range(8)]).int()
weights = torch.rand(8, 2)
permuted, rows = utils.moe_permute_no_compile(
    tokens, routing_map=chosen, num_out_tokens=16, map_type="index"
)
back = utils.moe_unpermute_no_compile(permuted, rows, merging_probs=weights, map_type="index")
torch.testing.assert_close(back, tokens * weights.sum(1, keepdim=True))
back.sum().backward()
torch.testing.assert_close(tokens.grad, weights.sum(1, keepdim=True).expand(8, 16))
"""

OLMO_CODES = """
import torch
from olmo_core.kernels import mxfp8_utils

tex, tensor, quantizer = mxfp8_utils._get_te_mxfp8_state()
torch.manual_seed(0)
x = torch.randn(128, 128)
made = quantizer(x)
codes, scales = mxfp8_utils.quantize_to_mxfp8(x, block_size=32, scale_mode="rceil")
assert torch.equal(made._rowwise_data.view(torch.float8_e4m3fn)[:128], codes)
assert torch.equal(made._rowwise_scale_inv[:128, :4].view(torch.uint8), scales.view(torch.uint8)[:128, :4])
"""

VTX_LINEAR = """
import torch
from vortex.model.layers import HAS_TE, TELinear

assert HAS_TE
torch.manual_seed(0)
exact = TELinear(32, 48, init_method=torch.nn.init.xavier_uniform_, skip_bias_add=True)
rough = TELinear(32, 48, init_method=torch.nn.init.xavier_uniform_, use_fp8=True)
rough.load_state_dict({"weight": exact.weight, "bias": torch.zeros(48)}, strict=False)
x = torch.randn(16, 32, dtype=torch.bfloat16)
y, bias = exact(x)
torch.testing.assert_close(y, torch.nn.functional.linear(x, exact.weight))
assert bias is exact.bias
for _ in range(2):
    z, none = rough(x)
assert none is None and rough.fp8_meta["scaling_fwd"].amax_history.shape[0] == 16
error = (z - y).float().norm() / y.float().norm()
assert 0 < error < 0.1, error
z.sum().backward()
"""

VTX_STATES = """
import io
import torch
from transformer_engine.common.recipe import DelayedScaling, Format, _FormatHelper
from vortex.model.layers import TELinear
from vortex.model.utils import fixup_te_workspace

fixup_te_workspace()
torch.serialization.add_safe_globals([DelayedScaling, Format, _FormatHelper])
torch.manual_seed(0)
model = TELinear(32, 48, init_method=torch.nn.init.xavier_uniform_, use_fp8=True)
x = torch.randn(16, 32, dtype=torch.bfloat16)
for _ in range(2):
    before = model(x)[0]
file = io.BytesIO()
torch.save(model.state_dict(), file)
file.seek(0)
model.load_state_dict(torch.load(file, weights_only=True))
# The steps of vortex on a loaded layer, except that it enters a CUDA device.
model.fp8_meta_tensors_initialized = False
model.set_extra_state(model.get_extra_state())
for direction in ("scaling_fwd", "scaling_bwd"):
    assert model.fp8_meta[direction].scale.device == model.fp8_meta[direction].amax_history.device == x.device
assert torch.equal(model(x)[0], before)
"""


NEMO_MODELS = """
import torch
import transformers
from nemo_automodel._transformers.te_attention import get_te_attention_stats, inject_te_attention

common = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa")
models = (
    (transformers.LlamaForCausalLM, transformers.LlamaConfig(**common)),
    (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(
        **common, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(
        **common, head_dim=32, sliding_window=4, query_pre_attn_scalar=32, attn_logit_softcapping=None)),
)
tokens = torch.randint(0, 64, (2, 32))
"""

NEMO_ATTENTION = """
from transformer_engine.common.recipe import Float8CurrentScaling
from nemo_automodel.components.models.common.utils import TEFp8Config

for kind, config in models:
    torch.manual_seed(0)
    model = kind(config).to(device, torch.bfloat16)
    before = model(tokens, labels=tokens)
    before.loss.backward()
    expected = [p.grad.float() for p in model.parameters()]
    model.zero_grad()
    inject_te_attention(model)
    for recipe in (None, "current", Float8CurrentScaling(fp8_dpa=True)):
        if recipe is None:
            after = model(tokens, labels=tokens)
        else:
            with TEFp8Config(recipe=recipe).maybe_te_autocast():
                after = model(tokens, labels=tokens)
        after.loss.backward()
        error = (after.logits - before.logits).float().norm() / before.logits.float().norm()
        fp8 = getattr(recipe, "fp8_dpa", False)     # the one part of these models that this engine computes
        assert error < (0.1 if fp8 else 0.03), (kind, recipe, error)
        for p, grad in zip(model.parameters(), expected):
            limit = (0.3 if fp8 else 0.15) * grad.norm() + 1e-4
            assert (p.grad.float() - grad).norm() <= limit, (kind, recipe)
        model.zero_grad()
    print(kind.__name__, get_te_attention_stats())
"""

NEMO_LAYERS = """
import torch
from nemo_automodel.components.models.common.utils import (
    TEFp8Config, initialize_linear_module, initialize_rms_norm_module,
)

made = {}
for backend in ("torch", "te"):
    torch.manual_seed(0)
    made[backend] = torch.nn.Sequential(
        initialize_rms_norm_module(backend, 128, device=device),
        initialize_linear_module(backend, 128, 256, bias=True, device=device),
        torch.nn.GELU(),
        initialize_linear_module(backend, 256, 128, device=device),
    )
assert {type(m).__module__.split(".")[0] for m in made["te"]} == {"torch", "transformer_engine"}
made["te"].load_state_dict(made["torch"].state_dict())
x = torch.randn(128, 128, dtype=torch.bfloat16)
expected = made["torch"](x)
for recipe, limit in ((None, 0.01), ("current", 0.1), ("block", 0.1)):
    if recipe is None:
        found = made["te"](x)
    else:
        with TEFp8Config(recipe=recipe).maybe_te_autocast():
            found = made["te"](x)
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < limit and (recipe is None or error > 0.005), (recipe, error)
    found.sum().backward()
"""

NEMO_EXPERTS = """
import torch
import transformer_engine.pytorch as te
from nemo_automodel.components.models.common.utils import TEFp8Config
from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.experts import GroupedExpertsTE

torch.manual_seed(0)
config = MoEConfig(
    n_routed_experts=4, n_shared_experts=0, n_activated_experts=2, n_expert_groups=1, n_limited_groups=1,
    train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0, score_func="softmax", route_scale=1.0,
    dim=128, inter_dim=256, moe_inter_dim=256, norm_topk_prob=True, dtype=torch.bfloat16,
)


class OneProcess:
    # What its dispatcher does over DeepEP, in one process by this engine's permutation.
    def token_permutation2(self, hidden_states, num_local_tokens, token_probs, token_indices):
        routing = torch.zeros(num_local_tokens, 4, dtype=torch.bool).scatter_(1, token_indices, True)
        probs = torch.zeros(num_local_tokens, 4).scatter(1, token_indices, token_probs.float())
        self.shape = hidden_states.shape
        tokens, permuted, self.rows = te.moe_permute_with_probs(
            hidden_states, probs, routing, num_out_tokens=token_indices.numel()
        )
        return tokens, routing.sum(0), permuted

    def token_unpermutation(self, tokens):
        return te.moe_unpermute(tokens, self.rows, restore_shape=self.shape)


experts = GroupedExpertsTE(config)
experts.token_dispatcher, experts.ep_size = OneProcess(), 1
experts.to_empty(device=device)
experts.init_weights(device)
x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
indices = torch.stack([torch.randperm(4)[:2] for _ in range(64)])
weights = torch.rand(64, 2)

gates, downs = experts.gate_and_up_projs.float(), experts.down_projs.float()
reference = torch.zeros(64, 128)
for slot in range(2):
    for expert in range(4):
        rows = indices[:, slot] == expert
        gate, up = (x[rows].float() @ gates[expert]).chunk(2, -1)
        reference[rows] += weights[rows, slot, None] * (
            (torch.nn.functional.silu(gate) * up) @ downs[expert]
        )
for recipe, limit in ((None, 0.02), ("current", 0.12), ("block", 0.12)):
    arguments = (x, torch.ones(64, dtype=torch.bool), weights, indices)
    if recipe is None:
        found = experts(*arguments)
    else:
        with TEFp8Config(recipe=recipe).maybe_te_autocast():
            found = experts(*arguments)
    error = (found.float() - reference).norm() / reference.norm()
    assert error < limit, (recipe, error)
    found.sum().backward()
assert all(p.grad is not None for p in experts.parameters())
"""

NEMO_OPTIMIZER = """
import torch
from nemo_automodel.components.optim.optimizer import FusedAdamConfig

torch.manual_seed(0)
model = torch.nn.Linear(32, 32).bfloat16()
(optimizer,) = FusedAdamConfig(lr=1e-2, weight_decay=0.0).build(model)
assert type(optimizer).__module__.startswith("transformer_engine")
x = torch.randn(64, 32, dtype=torch.bfloat16)
losses = []
for _ in range(20):
    loss = (model(x).float() - x.float()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.8 * losses[0], losses
"""

MODELOPT = """
import modelopt.torch.quantization as mtq
import torch
import transformer_engine.pytorch as te

torch.manual_seed(0)
for config in (mtq.INT8_DEFAULT_CFG, mtq.FP8_DEFAULT_CFG):
    model = torch.nn.Sequential(te.LayerNormLinear(32, 32), te.Linear(32, 32))
    x = torch.randn(64, 32, device=device)
    exact = model(x)
    model = mtq.quantize(model, config, lambda m: m(x))
    y = model(x)
    error = (y - exact).norm() / exact.norm()
    assert 0 < error < 0.1, error
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
"""

COMPOSER = """
import torch
torch.set_default_device(None)      # composer's own tensors lie on the CPU
from composer import Trainer
from composer.models import ComposerModel

import transformer_engine.pytorch as te


class Regression(ComposerModel):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(te.LayerNormMLP(64, 128), te.Linear(64, 64))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        value = torch.nn.functional.mse_loss(outputs.float(), batch[1].float())
        losses.append(value.item())
        return value


losses = []
torch.manual_seed(0)
dtype = torch.bfloat16 if device == "cuda" else torch.float32
x = torch.randn(64, 64).to(dtype)
data = [(x, x.roll(1, 0))]
model = Regression().to(dtype)
trainer = Trainer(
    model=model,
    train_dataloader=data,
    max_duration="20ep",
    optimizers=torch.optim.AdamW(model.parameters(), lr=5e-3),
    device_train_microbatch_size=64,
    precision="amp_fp8" if device == "cuda" else "fp32",
    device="gpu" if device == "cuda" else "cpu",
    progress_bar=False,
)
trainer.fit()
assert len(losses) == 20 and losses[-1] < losses[0] - 0.2, losses
linear = model.layers[1]
assert bool(linear.fp8_initialized) == (device == "cuda")
"""

THUNDER_MODEL = """
import torch
torch.set_default_device(None)      # thunder's traces would hold it
import thunder
from thunder.executors.transformer_engineex import TransformerEngineTransform, transformer_engine_ex

import transformer_engine.pytorch as te

torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
plain = plain.to(device, torch.bfloat16)
x = torch.randn(64, 64, dtype=torch.bfloat16, device=device)
expected = plain(x)


def error(found, expected):
    return (found - expected).float().norm() / expected.float().norm()


assert error(thunder.jit(plain)(x), expected) < 0.01
"""

# What its executor calls in a trace, which it makes on a GPU only.
THUNDER_PASSES = """
from thunder.executors import transformer_engineex_impl as impl
from transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling

for recipe in (DelayedScaling(), MXFP8BlockScaling()):
    with te.quantization.emulate():
        forward, backward = impl.TERecipeState(), impl.TERecipeState()
        weight, bias = plain[0].weight.detach(), plain[0].bias.detach()
        for _ in range(2):
            states = forward(recipe, "forward", 2), backward(recipe, "backward", 1)
            (q_x, q_w), (q_dy,) = (impl.TEQuantizerState()(state, n) for state, n in zip(states, (2, 1)))
            y, x_codes, w_codes = impl._linear_fwd_impl(x, weight, bias, q_x, q_w)
            dy = torch.randn_like(y)
            dx, dw = impl._linear_bwd_impl(dy, x_codes, w_codes, q_x, q_w, q_dy)
            impl._te_fp8_amax_and_scale_update_impl(recipe, states, (y,))
    for found, exact in ((y, plain[0](x)), (dx, dy @ weight), (dw, dy.t() @ x)):
        assert 0.005 < error(found, exact) < 0.1, (recipe, error(found, exact))
"""

THUNDER_FP8 = """
from transformer_engine.common.recipe import DelayedScaling

recipe = DelayedScaling()
compiled = thunder.jit(plain, executors=[transformer_engine_ex], transforms=[TransformerEngineTransform()])
for _ in range(3):
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        found = compiled(x)
    found.sum().backward()
if device == "cuda":
    assert "te_functional_linear_fwd" in str(thunder.last_traces(compiled)[-1])
assert (0.005 if device == "cuda" else -1) < error(found, expected) < 0.1
"""

PHYSICSNEMO = """
import os

os.environ["PHYSICSNEMO_FORCE_TE"] = "1"
import torch
from physicsnemo.nn.module.dit_layers import TESelfAttention, TimmSelfAttention
from physicsnemo.nn.module.layer_norm import LayerNorm
from physicsnemo.nn.module.mlp_layers import Mlp

import transformer_engine.pytorch as te

torch.manual_seed(0)
x = torch.randn(2, 16, 64, requires_grad=True)

norm, plain = LayerNorm(64), torch.nn.LayerNorm(64)
assert isinstance(norm, te.LayerNorm)
norm.load_state_dict(plain.state_dict())
torch.testing.assert_close(norm(x), plain(x), rtol=1e-5, atol=1e-5)

mlp, plain = Mlp(64, 128, 64, use_te=True), Mlp(64, 128, 64)
assert any(isinstance(layer, te.Linear) for layer in mlp.modules())
mlp.load_state_dict(plain.state_dict(), strict=False)
torch.testing.assert_close(mlp(x), plain(x), rtol=1e-4, atol=1e-5)

attention = TESelfAttention(64, 4)
y = attention(x)
assert y.shape == x.shape
y.square().sum().backward()
assert torch.isfinite(x.grad).all()
"""

PHYSICSNEMO_MODEL = """
from physicsnemo.models.transolver import Transolver

model = Transolver(functional_dim=2, out_dim=1, embedding_dim=3, n_layers=2, n_hidden=64, n_head=4, slice_num=8,
                   unified_pos=False, structured_shape=None, use_te=True).to(device)
assert sum(isinstance(m, (te.Linear, te.LayerNormMLP, te.LayerNorm)) for m in model.modules()) > 4
y = model(torch.randn(1, 32, 2), torch.randn(1, 32, 3))
y.square().sum().backward()
assert y.shape == (1, 32, 1)
"""

NEMO_WINDOWS = """
import torch
from nemo_automodel._transformers.te_attention import get_te_attention_stats, inject_te_attention
import transformers

torch.manual_seed(0)
common = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=64)
qwen = transformers.Qwen2Config(**common, use_sliding_window=True, sliding_window=4, max_window_layers=1)
gemma = transformers.Gemma2Config(**common, head_dim=8, sliding_window=4, query_pre_attn_scalar=8,
                                  attn_logit_softcapping=None, attn_implementation="sdpa")
for config, kind in ((qwen, transformers.Qwen2ForCausalLM), (gemma, transformers.Gemma2ForCausalLM)):
    model = kind(config).eval()
    tokens = torch.randint(0, 64, (2, 16))
    before = model(tokens).logits
    inject_te_attention(model)
    torch.testing.assert_close(before, model(tokens).logits, rtol=1e-4, atol=1e-5)
    print(get_te_attention_stats())
"""

# The first word is the client: its cases share one process, since importing a client takes longer than they do.
CASES = {
    "esm": (ESM_STACK, ESM_PARITY, ESM_STACK, ESM_GRADIENTS, ESM_STACK, ESM_FP8, ESM_WEIGHTS),
    "olmo_core attention": (OLMO_ATTENTION,),
    "olmo_core experts": (OLMO_EXPERTS,),
    "olmo_core codes": (OLMO_CODES,),
    "vortex": (VTX_LINEAR, VTX_STATES),
    "nemo_automodel attention": (NEMO_MODELS, NEMO_ATTENTION),
    "nemo_automodel layers": (NEMO_LAYERS,),
    "nemo_automodel experts": (NEMO_EXPERTS,),
    "nemo_automodel optimizer": (NEMO_OPTIMIZER,),
    "nemo_automodel windows": (NEMO_WINDOWS,),
    "modelopt": (MODELOPT,),
    "composer": (COMPOSER,),
    "thunder": (THUNDER_MODEL, THUNDER_PASSES, THUNDER_FP8),
    "physicsnemo": (PHYSICSNEMO, PHYSICSNEMO_MODEL),
}
