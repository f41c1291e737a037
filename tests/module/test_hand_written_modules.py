"""User modules based on TransformerEngineBaseModule, with products and attention by the flat functions."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.constants import FP8BwdTensorIdx, FP8FwdTensorIdx
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.cpp_extensions.fused_attn import (
    FusedAttnBackend,
    fused_attn_bwd,
    fused_attn_fwd,
)
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

BATCH, LENGTH, HEADS, SIZE = 2, 16, 2, 32
HIDDEN = HEADS * SIZE
DTYPE = torch.float32


class _Attend(torch.autograd.Function):
    """proj(attention(qkv(x))) by general_gemm and fused_attn_fwd/bwd, every operand in FP8."""

    @staticmethod
    def forward(ctx, x, qkv_weight, proj_weight, codes, module):
        quantizers = module.quantizers["scaling_fwd"]
        x8 = quantizers[FP8FwdTensorIdx.GEMM1_INPUT](x)
        qkv, *_ = general_gemm(codes[0], x8, out_dtype=DTYPE)
        qkv8 = [
            quantizers[FP8FwdTensorIdx.GEMM1_OUTPUT](part.unflatten(-1, (HEADS, SIZE)).contiguous())
            for part in qkv.view(BATCH, LENGTH, 3 * HIDDEN).chunk(3, dim=-1)
        ]
        bounds = torch.arange(0, (BATCH + 1) * LENGTH, LENGTH, dtype=torch.int32, device=x.device)
        options = {
            "fused_attention_backend": FusedAttnBackend["FP8"],
            "attn_mask_type": "causal",
            "qkv_layout": "bshd_bshd_bshd",
        }
        out8, aux = fused_attn_fwd(
            True,
            LENGTH,
            LENGTH,
            bounds,
            bounds,
            *qkv8,
            DTYPE,
            s_quantizer=quantizers[FP8FwdTensorIdx.GEMM3_OUTPUT],
            o_quantizer=quantizers[FP8FwdTensorIdx.GEMM2_INPUT],
            **options,
        )
        y, *_ = general_gemm(codes[1], out8.view(-1, HIDDEN), out_dtype=DTYPE)
        tensors, ctx.tensor_objects = te.prepare_for_saving(x8, *qkv8, out8, *codes)
        ctx.save_for_backward(*tensors, *aux, bounds)
        ctx.kept, ctx.options = len(tensors), options
        ctx.quantizers = module.quantizers["scaling_bwd"]
        ctx.first = FP8GlobalStateManager.is_first_fp8_module()
        return y

    @staticmethod
    def backward(ctx, grad_output):
        saved, (*aux, bounds) = ctx.saved_tensors[: ctx.kept], ctx.saved_tensors[ctx.kept :]
        x8, q8, k8, v8, out8, *codes = te.restore_from_saved(ctx.tensor_objects, saved)
        dy8 = ctx.quantizers[FP8BwdTensorIdx.GRAD_OUTPUT2](grad_output.contiguous())
        exact = {"use_split_accumulator": True, "grad": True, "out_dtype": DTYPE}
        d_out, *_ = general_gemm(codes[1], dy8, layout="NN", **exact)
        flat8 = out8.view(-1, HIDDEN)
        flat8.update_usage(columnwise_usage=True)
        d_proj, *_ = general_gemm(flat8, dy8, layout="NT", **exact)
        d_out = d_out.view(BATCH, LENGTH, HEADS, SIZE)
        d_qkv = fused_attn_bwd(
            LENGTH,
            LENGTH,
            bounds,
            bounds,
            q8,
            k8,
            v8,
            out8.view(BATCH, LENGTH, HEADS, SIZE),
            d_out,
            DTYPE,
            aux,
            **ctx.options,
        )[:3]
        d_qkv8 = ctx.quantizers[FP8BwdTensorIdx.GRAD_OUTPUT1](
            torch.cat([g.flatten(2) for g in d_qkv], -1).flatten(0, 1)
        )
        d_x, *_ = general_gemm(codes[0], d_qkv8, layout="NN", **exact)
        d_weight, *_ = general_gemm(x8, d_qkv8, layout="NT", **exact)
        if ctx.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return d_x, d_weight, d_proj, None, None


class OwnAttention(TransformerEngineBaseModule):
    """Self attention over tokens [BATCH * LENGTH, HIDDEN], in FP8 inside autocast."""

    def __init__(self, device):
        super().__init__(name="own")
        for name, rows, slot in (
            ("qkv_weight", 3 * HIDDEN, FP8FwdTensorIdx.GEMM1_WEIGHT),
            ("proj_weight", HIDDEN, FP8FwdTensorIdx.GEMM2_WEIGHT),
        ):
            weight = torch.nn.Parameter(torch.empty(rows, HIDDEN, device=device))
            self.register_parameter(
                name, weight, init_fn=torch.nn.init.xavier_normal_, fp8_meta_index=slot
            )
        self.reset_parameters()

    def forward(self, x, is_first_microbatch=None):
        with self.prepare_forward_ctx(x, num_gemms=3) as x:
            if not self.fp8:
                return self.plain(x)
            forward = self.quantizers["scaling_fwd"]
            saved = is_first_microbatch is not None
            codes = [
                self.get_weight_workspace(
                    tensor=weight,
                    quantizer=forward[slot],
                    cache_name=name if saved else None,
                    update_workspace=not saved or is_first_microbatch,
                )
                for name, weight, slot in (
                    ("qkv", self.qkv_weight, FP8FwdTensorIdx.GEMM1_WEIGHT),
                    ("proj", self.proj_weight, FP8FwdTensorIdx.GEMM2_WEIGHT),
                )
            ]
            return _Attend.apply(x, self.qkv_weight, self.proj_weight, codes, self)

    def plain(self, x):
        q, k, v = (
            (x @ self.qkv_weight.t()).view(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(-1, HIDDEN) @ self.proj_weight.t()


def train(module, recipe, device, steps=4):
    """(losses, parameters) after gradient descent steps towards fixed targets."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * LENGTH, HIDDEN, generator=generator).to(device)
    target = torch.randn(BATCH * LENGTH, HIDDEN, generator=generator).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=2.0)
    losses = []
    for _ in range(steps):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = torch.nn.functional.mse_loss(module(x.requires_grad_()), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses), [p.detach() for p in module.parameters()]


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(amax_history_len=4), Float8CurrentScaling()],
    ids=lambda r: type(r).__name__,
)
def test_an_attention_written_on_the_base_class_trains_in_fp8_as_in_float32(recipe, device):
    module = OwnAttention(device)
    twin = copy.deepcopy(module)
    before = [p.detach().clone() for p in module.parameters()]
    losses, moved = train(module, recipe, device)
    wanted_losses, expected = train(twin, None, device)
    assert wanted_losses[-1] < wanted_losses[0] - 0.02
    torch.testing.assert_close(losses, wanted_losses, rtol=0.01, atol=0.0)
    for start, got, reference in zip(before, moved, expected, strict=True):
        # two roundings to E4M3 (1/16 each) for every gradient's operands, averaged over the sum
        assert (got - reference).norm() < 0.15 * (reference - start).norm()
    if recipe.delayed():
        for key in ("scaling_fwd", "scaling_bwd"):
            assert (module.fp8_meta[key].scale != 1.0).any()
        assert [tuple(module.fp8_meta[k].scale.shape) for k in ("scaling_fwd", "scaling_bwd")] == [
            (9,),
            (6,),
        ]


def test_state_of_a_hand_written_module_survives_a_checkpoint(device):
    module = OwnAttention(device)
    train(module, DelayedScaling(), device)
    fresh = OwnAttention(device)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.fp8_meta["scaling_fwd"].scale, module.fp8_meta["scaling_fwd"].scale)
    assert torch.equal(
        fresh.fp8_meta["scaling_bwd"].amax_history, module.fp8_meta["scaling_bwd"].amax_history
    )


def test_prepare_forward_sets_formats_and_dtype(device):
    module = OwnAttention(device)
    x = torch.randn(2 * BATCH * LENGTH, HIDDEN, device=device)[::2]
    assert module.prepare_forward(x, num_gemms=2).is_contiguous()
    assert module.prepare_forward(x, allow_non_contiguous=True) is x
    assert (module.fp8, module.fp8_calibration, module.activation_dtype) == (
        False,
        False,
        torch.float32,
    )
    assert not module.fp8_meta_tensors_initialized
    with te.autocast(recipe=Float8CurrentScaling()):
        module.prepare_forward(x, num_gemms=2)
        module.end_forward()
    assert module.fp8 and module.fp8_meta_tensors_initialized
    assert [len(module.quantizers[key]) for key in ("scaling_fwd", "scaling_bwd")] == [6, 4]
    with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        module.prepare_forward(x)
    assert (module.fp8, module.fp8_calibration) == (False, True)
    with pytest.raises(
        TypeError, match=r"the input is torch.bfloat16, parameter qkv_weight is torch.float32"
    ):
        module.prepare_forward(x.bfloat16())
    module.prepare_forward(x.bfloat16(), allow_different_data_and_param_types=True)
    assert module.activation_dtype is torch.bfloat16
    with pytest.raises(TypeError, match="inp is a list"):
        module.prepare_forward([x])
    module.tp_size = 2
    with pytest.raises(RuntimeError, match=r"tp_size=2.*set_tensor_parallel_group"):
        module.prepare_forward(x)


def test_a_recomputed_forward_uses_the_first_runs_scales(device):
    records = []

    class Watching(OwnAttention):
        def forward(self, x):
            with self.prepare_forward_ctx(x, num_gemms=3) as x:
                records.append(self.quantizers["scaling_fwd"][0].scale.item())
                return self.quantizers["scaling_fwd"][0](x).dequantize() @ self.proj_weight.t()

    module = Watching(device)
    x = torch.full((BATCH * LENGTH, HIDDEN), 3.0, device=device, requires_grad=True)
    with te.autocast(recipe=DelayedScaling(amax_history_len=1)):
        y = te.checkpoint(module, x)
    after = module.fp8_meta["scaling_fwd"].scale[0].item()
    y.sum().backward()
    assert records == [1.0, 1.0] and after == pytest.approx(448 / 3)
    assert module.fp8_meta["scaling_fwd"].scale[0].item() == after


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_in_any_order_use_their_first_runs_scales(reentrant, device):
    records = []

    class Watching(OwnAttention):
        def forward(self, x):
            with self.prepare_forward_ctx(x, num_gemms=3) as x:
                records.append(round(self.quantizers["scaling_fwd"][0].scale.item(), 3))
                return self.quantizers["scaling_fwd"][0](x).dequantize() @ self.proj_weight.t()

    module = Watching(device)
    loss = torch.zeros((), device=device)
    for size in (3.0, 7.0, 11.0):
        x = torch.full((BATCH * LENGTH, HIDDEN), size, device=device, requires_grad=True)
        with te.autocast(recipe=DelayedScaling(amax_history_len=1)):
            loss = loss + te.checkpoint(module, x, use_reentrant=reentrant).sum()
    after = module.fp8_meta["scaling_fwd"].scale[0].item()
    loss.backward()  # the last call is repeated first
    assert records[3:] == records[2::-1] and len(set(records)) == 3
    assert module.fp8_meta["scaling_fwd"].scale[0].item() == after


def test_scaling_states_per_direction_are_created_kept_and_reset(device):
    module = OwnAttention(device)
    recipe = DelayedScaling(amax_history_len=3)
    module.set_meta_tensor(True, recipe)
    forward = module.fp8_meta["scaling_fwd"]
    assert "scaling_bwd" not in module.fp8_meta and forward.amax_history.shape == (3, 3)
    module.init_fp8_meta_tensors(recipe)
    assert module.fp8_meta["scaling_fwd"] is forward and module.fp8_meta[
        "scaling_bwd"
    ].scale.shape == (2,)
    forward.scale.fill_(4.0)
    saved = module.get_fp8_meta_tensors()
    module.reset_fp8_meta_tensors()
    assert forward.scale.tolist() == [1.0] * 3
    module.reset_fp8_meta_tensors(saved)
    assert forward.scale.tolist() == [4.0] * 3
    module.adjust_amax_history_length(5, fwd=True)
    assert forward.amax_history.shape == (5, 3) and module.fp8_meta[
        "scaling_bwd"
    ].amax_history.shape == (
        3,
        2,
    )
    with pytest.raises(ValueError, match="length=0 < 1"):
        module.adjust_amax_history_length(0)
    module.fp8_meta_tensors_initialized = False
    module.set_extra_state(module.get_extra_state())
    assert (
        module.fp8_meta_tensors_initialized
        and module.fp8_meta["scaling_fwd"].scale.tolist() == [4.0] * 3
    )
    with pytest.raises(ValueError, match="init_fp8_meta_tensors"):
        OwnAttention(device).fp8_meta_tensors_initialized = True


def test_a_workspace_is_kept_until_it_is_updated_or_lacks_a_direction(device):
    module = OwnAttention(device)
    weight = torch.randn(32, 32, device=device)
    quantizer = te.Float8CurrentScalingQuantizer(
        te.DType.kFloat8E4M3, device, rowwise=True, columnwise=False
    )
    options = {"quantizer": quantizer, "cache_name": "w"}
    first = module.get_weight_workspace(tensor=weight, **options)
    values = first.dequantize()
    assert module.get_weight_workspace(update_workspace=False, **options) is first
    weight.mul_(2)
    skip = torch.ones(1, device=device)
    assert module.get_weight_workspace(tensor=weight, skip_update_flag=skip, **options) is first
    assert torch.equal(first.dequantize(), values)
    module.get_weight_workspace(
        tensor=weight, skip_update_flag=torch.zeros(1, device=device), **options
    )
    assert torch.equal(first.dequantize(), 2 * values)
    quantizer.set_usage(columnwise=True)
    both = module.get_weight_workspace(tensor=weight, update_workspace=False, **options)
    assert both is not first and both.get_usages() == {"rowwise": True, "columnwise": True}
    assert module.get_weight_workspace(tensor=both) is both
    with pytest.raises(ValueError, match="no workspace is kept under cache_name='other'"):
        module.get_weight_workspace(cache_name="other")


def test_parameters_without_an_init_function_get_the_default(device):
    module = TransformerEngineBaseModule()
    module.weight = torch.nn.Parameter(torch.full((64, 64), 7.0, device=device))
    module.register_parameter(
        "scale", torch.nn.Parameter(torch.empty(8, device=device)), init_fn=torch.nn.init.ones_
    )
    module.reset_parameters()
    assert 0.02 < module.weight.std().item() < 0.026
    assert module.scale.tolist() == [1.0] * 8


class Adapted(te.Linear):
    """A client's linear layer: its own keywords, a second parameter, a forward that wraps the original's."""

    def __init__(self, *args, rank=8, **kwargs):
        self.config = {"rank": rank}  # before the base class's constructor, as clients do
        super().__init__(*args, **kwargs)
        self.down = torch.nn.Parameter(
            torch.full((rank, self.in_features), 0.01, device=self.weight.device)
        )
        self.up = torch.nn.Parameter(
            torch.zeros(self.out_features, rank, device=self.weight.device)
        )

    def forward(self, x, is_first_microbatch=None):
        y = super().forward(x, is_first_microbatch=is_first_microbatch)
        y, bias = y if self.return_bias else (y, None)
        y = y + (x @ self.down.t()) @ self.up.t()
        return (y, bias) if self.return_bias else y

    def get_quantizer_roles(self, *, fwd, num_quantizers):
        roles = super().get_quantizer_roles(fwd=fwd, num_quantizers=num_quantizers)
        roles[-1] = None
        return roles

    def set_extra_state(self, state):
        self.loaded = state


@pytest.mark.parametrize(
    "recipe", [None, DelayedScaling(), MXFP8BlockScaling()], ids=lambda r: type(r).__name__
)
def test_a_subclass_of_linear_adds_parameters_and_overrides_methods(recipe, device):
    layer = Adapted(64, 32, rank=4, return_bias=True, device=device, name="adapted")
    x = torch.randn(32, 64, device=device, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y, bias = layer(x)
        plain, _ = te.Linear.forward(layer, x)
    assert torch.equal(y, plain) and bias is layer.bias  # up is zero
    y.sum().backward()
    assert layer.up.grad.abs().sum() > 0 and layer.weight.grad is not None
    layer.load_state_dict(layer.state_dict())
    assert layer.loaded is not None and layer.config == {"rank": 4}


def record_roles(module, x, **call):
    """Roles that a factory receives in one module step."""
    queries = []

    def factory(role):
        queries.append(role)
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, x.device)

    recipe = CustomRecipe(qfactory=factory)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = module(x, **call)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
    return queries


def test_a_factory_is_called_once_per_slot_in_role_order(device):
    x = torch.randn(32, 64, device=device, requires_grad=True)
    requested = record_roles(Adapted(64, 32, device=device, name="fc"), x)
    kinds = [
        None if role is None else (role.module_type, role.tensor_type, role.name)
        for role in requested
    ]
    assert kinds == [
        ("linear", "input", "fc"),
        ("linear", "weight", "fc"),
        None,
        ("linear", "grad_output", "fc"),
        None,
    ]
    requested = record_roles(te.GroupedLinear(2, 64, 32, device=device), x, m_splits=[16, 16])
    assert len(requested) == 10 and {role.module_type for role in requested} == {"grouped_linear"}
    requested = record_roles(te.LayerNormMLP(64, 64, device=device, name="mlp"), x)
    assert [role.name for role in requested] == ["mlp.fc1"] * 3 + ["mlp.fc2"] * 3 + [
        "mlp.fc1"
    ] * 2 + ["mlp.fc2"] * 2


def test_output_and_grad_input_roles_can_be_set(device):
    x = torch.randn(32, 64, device=device, requires_grad=True)
    layer = te.Linear(64, 32, device=device)
    layer.output_quantizer_role = te.QuantizerRole("dpa", "qkv", "attention")
    layer.grad_input_quantizer_role = te.QuantizerRole("dpa", "do", "attention")
    requested = record_roles(layer, x)
    assert [role.tensor_type for role in requested] == [
        "input",
        "weight",
        "qkv",
        "grad_output",
        "do",
    ]


def test_a_module_without_roles_warns_and_has_empty_roles(device):
    queries = []
    recipe = CustomRecipe(qfactory=lambda role: queries.append(role))
    module = OwnAttention(device)
    with (
        te.autocast(recipe=recipe),
        pytest.warns(UserWarning, match="override get_quantizer_roles"),
    ):
        module.prepare_forward(torch.randn(4, HIDDEN, device=device))
    assert [str(role) for role in queries] == ["QuantizerRole()"] * 5
    assert queries == [
        "linear_input",
        "linear_weight",
        "linear_output",
        "linear_grad_output",
        "linear_grad_input",
    ]


def test_one_factory_mixes_delayed_and_stateless_quantizers(device):
    def factory(role):
        if role.tensor_type in ("input", "weight"):
            return te.DelayedScalingRequest(amax_history_len=1, amax_compute_algo="most_recent")
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, device)

    layer = te.Linear(64, 32, device=device)
    x = torch.full((32, 64), 2.0, device=device, requires_grad=True)
    recipe = CustomRecipe(qfactory=factory)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
    state = layer.fp8_meta["scaling_fwd"]
    assert state.scale.shape == (2,) and state.scale[0].item() == 448 / 2
    assert state.scale[1].item() == pytest.approx(448 / layer.weight.abs().max().item())
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(y, expected, rtol=0.1, atol=0.05)
    with pytest.raises(AttributeError, match="read delayed_states"):
        layer.fp8_meta["scaling_bwd"].scale  # noqa: B018


def test_a_hand_written_modules_roles_choose_a_builtin_recipes_blocks(device):
    class Swapped(TransformerEngineBaseModule):
        def get_quantizer_roles(self, *, fwd, num_quantizers):
            tensors = ("weight", "input", "output") if fwd else ("grad_output", "grad_input")
            return [
                te.QuantizerRole("linear", tensors[i % len(tensors)]) for i in range(num_quantizers)
            ]

    module = Swapped()
    module.init_fp8_meta_tensors(Float8BlockScaling())
    assert [q.block_scaling_dim for q in module.quantizers["scaling_fwd"]] == [2, 1, 1]


def test_modules_with_roles_do_not_warn(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_roles(
            te.Linear(64, 32, device=device), torch.randn(32, 64, device=device, requires_grad=True)
        )
