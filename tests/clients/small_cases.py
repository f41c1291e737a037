"""Programs of clients that use one part of the engine each, as a CPU can run them: `client: parts of a program`."""

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
stored = stored.to("cpu").eval().requires_grad_(False)
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
# What vortex does to a loaded layer, but for the CUDA device that it enters.
model.fp8_meta_tensors_initialized = False
model.set_extra_state(model.get_extra_state())
for direction in ("scaling_fwd", "scaling_bwd"):
    assert model.fp8_meta[direction].scale.device == model.fp8_meta[direction].amax_history.device == x.device
assert torch.equal(model(x)[0], before)
"""

# One process a client: importing it takes longer than its cases.
CASES = {
    "esm": (ESM_STACK, ESM_PARITY, ESM_STACK, ESM_GRADIENTS, ESM_STACK, ESM_FP8, ESM_WEIGHTS),
    "olmo_core": (OLMO_ATTENTION, OLMO_EXPERTS, OLMO_CODES),
    "vortex": (VTX_LINEAR, VTX_STATES),
}
