"""The original's keywords and members behave as documented; `signatures` lists their names."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
)
from transformer_engine.pytorch import cpp_extensions, utils
from transformer_engine.pytorch.attention.dot_product_attention import softmax
from transformer_engine.pytorch.attention.rope import (
    FusedQKVRoPEFunc,
    FusedRoPEFunc,
    RotaryPositionEmbedding,
    apply_fused_qkv_rotary_pos_emb,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.module._common import WeightGradStore
from transformer_engine.pytorch.quantization import FP8GlobalState, QuantizerRole
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import GroupedTensorStorage

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
QUANTIZERS = {
    "current": lambda device: te.Float8CurrentScalingQuantizer(E4M3, device),
    "mxfp8": lambda device: te.MXFP8Quantizer(E4M3),
    "block": lambda device: te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
}


def values(device, *shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


# Storages and tensors.


@pytest.mark.parametrize("name", QUANTIZERS)
def test_storages_and_tensors_take_the_nominal_dtype_as_fake_dtype(name, device):
    instance = QUANTIZERS[name](device)(values(device, 64, 128))
    payload = {k: v for k, v in instance.get_metadata().items() if k != "dtype"}
    storage = instance.storage_class()(**payload, fake_dtype=torch.bfloat16)
    assert storage.dtype is torch.bfloat16 and storage.dequantize().dtype is torch.bfloat16
    tensor = type(instance)((64, 128), **payload, fake_dtype=torch.float16)
    assert tensor.dtype is torch.float16
    with pytest.raises(ValueError, match="are one setting"):
        instance.storage_class()(**payload, fake_dtype=torch.float16, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_tensor_presents_the_strides_and_the_offset_that_it_is_given(name, device):
    instance = QUANTIZERS[name](device)(values(device, 64, 128))
    payload = {k: v for k, v in instance.get_metadata().items() if k != "dtype"}
    tensor = type(instance)((64, 128), torch.float32, **payload, stride=(256, 1), storage_offset=8)
    assert tensor.stride() == (256, 1) and tensor.storage_offset() == 8
    assert torch.equal(tensor.dequantize(), instance.dequantize())
    dense = tensor.contiguous()
    assert dense.stride() == (128, 1) and torch.equal(dense.dequantize(), instance.dequantize())
    with pytest.raises(ValueError, match="one for each dimension"):
        type(instance)((64, 128), torch.float32, **payload, stride=(1,))


def test_block_scales_take_the_format_that_products_read(device):
    instance = QUANTIZERS["block"](device)(values(device, 128, 128))
    payload = instance.get_metadata()
    for data_format in (None, 0):
        repeated = te.Float8BlockwiseQTensorStorage(**payload, data_format=data_format)
        assert torch.equal(repeated.dequantize(), instance.dequantize())
    with pytest.raises(ValueError, match="GEMM_READY"):
        te.Float8BlockwiseQTensorStorage(**payload, data_format=1)


def test_saved_tensors_that_no_object_took_are_returned(device):
    result = QUANTIZERS["current"](device)(values(device, 32, 32)).as_storage()

    class Context:
        pass

    ctx, rest = Context(), torch.ones(1)
    expected = result.dequantize()
    tensors, ctx.tensor_objects = te.prepare_for_saving(result)
    ctx.saved_tensors = [*tensors, rest]
    restored, unused = te.restore_from_func_ctx(ctx, return_saved_tensors=True)
    assert torch.equal(restored[0].dequantize(), expected)
    assert unused == [rest] and ctx.tensor_objects is None


@pytest.mark.parametrize("name", [*QUANTIZERS, "plain"])
def test_a_grouped_tensor_is_made_of_buffers_by_keyword(name, device):
    quantizer = None if name == "plain" else QUANTIZERS[name](device)
    members = [values(device, 128, 256, seed=seed) for seed in range(3)]
    outputs = [m if quantizer is None else quantizer(m) for m in members]
    full = GroupedTensor.of_members(outputs)
    buffers = {
        "data": full.rowwise_data,
        "columnwise_data": full.columnwise_data,
        "scale_inv": full.scale_inv,
        "columnwise_scale_inv": full.columnwise_scale_inv,
        "quantizer": quantizer,
    }
    for shape in ((3 * 128, 256), (3, 128, 256)):
        group = GroupedTensor(shape, torch.float32, num_tensors=3, **buffers, requires_grad=True)
        assert (
            group.shape == (3, 128, 256)
            and group.logical_shape == (384, 256)
            and group.requires_grad
        )
        for part, member in zip(group.split_into_quantized_tensors(), outputs, strict=True):
            assert torch.equal(part.dequantize(), member.dequantize()) and type(part) is type(
                member
            )
    storage = GroupedTensorStorage((384, 256), torch.float32, num_tensors=3, **buffers)
    twice = [2 * m for m in members]
    storage.quantize(twice)
    fresh = [m if quantizer is None else quantizer(m) for m in twice]
    for part, member in zip(storage.split_into_quantized_tensors(), fresh, strict=True):
        assert torch.equal(part.dequantize(), member.dequantize())
    with pytest.raises(ValueError, match=r"rowwise_data has 3 elements; .* need 98304"):
        GroupedTensor(
            (384, 256), num_tensors=3, **buffers | {"data": torch.zeros(3, device=device)}
        )


def test_members_of_unequal_rows_are_found_by_their_extents_and_offsets(device):
    data = torch.arange(40.0, device=device)
    first_dims = torch.tensor([2, 0, 3], device=device)
    group = GroupedTensor((5, 8), num_tensors=3, data=data, first_dims=first_dims)
    assert [list(m.shape) for m in group.quantized_tensors] == [[2, 8], [0, 8], [3, 8]]
    assert torch.equal(group.quantized_tensors[2], data[16:].view(3, 8))
    assert group.tensor_offsets.tolist() == [0, 16, 16, 40]
    separate = GroupedTensor(num_tensors=2, shapes=[(1, 8), (1, 8)], data=data, offsets=[8, 32])
    assert torch.equal(separate.quantized_tensors[1], data[32:].view(1, 8))
    for keywords, reason in (
        (
            {"num_tensors": 2, "first_dims": first_dims},
            "first_dims has 3 numbers for num_tensors=2",
        ),
        ({"num_tensors": 3}, "does not divide"),
    ):
        with pytest.raises(ValueError, match=reason):
            GroupedTensor((5, 8), data=data, **keywords)


def test_the_storage_class_makes_grouped_tensors(device):
    result = GroupedTensorStorage.make_grouped_tensor_with_shapes(
        2, [(4, 8), (4, 8)], device=device
    )
    assert isinstance(result, GroupedTensor) and result.shape == (2, 4, 8)
    first = torch.tensor([1, 3], device=device)
    assert GroupedTensorStorage.make_grouped_tensor(2, first, None, 4, 8, device=device).shape == (
        4,
        8,
    )
    buffer = torch.zeros(64, device=device)
    for internal in (False, True):
        result = GroupedTensorStorage.make_grouped_tensor_from_rowwise_data(
            num_tensors=2, tensor_shape=(4, 8), rowwise_data=buffer, internal=internal
        )
        assert isinstance(result, GroupedTensor) is not internal and result.num_tensors == 2
    assert GroupedTensorStorage.make_tensor_offsets([2, 0, 3], 8).tolist() == [0, 16, 16, 40]


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_shards_are_joined_by_the_methods_of_the_original(name, device):
    full = QUANTIZERS[name](device)(values(device, 256, 128))
    halves = [full[:128], full[128:]]
    parts = [half.fsdp_extract_buffers() for half in halves]
    fields = halves[0].fsdp_buffer_fields()
    assert len(fields) == len(parts[0][0])
    assert fields[0] in ("_data", "_rowwise_data") and all(
        isinstance(getattr(full, f), torch.Tensor) for f in fields
    )
    gathered = [torch.cat(pair) for pair in zip(parts[0][0], parts[1][0], strict=True)]
    empty = QUANTIZERS[name](device).make_empty((256, 128), device=device)
    empty.fsdp_assign_gathered(gathered, parts[0][1])
    assert torch.equal(empty.dequantize(), full.dequantize())
    with pytest.raises(ValueError, match="on a tensor of the whole shape"):
        halves[0].fsdp_assign_gathered(gathered, parts[0][1])


# Quantizers.


def test_quantizer_members_behave_as_documented(device):
    current = te.Float8CurrentScalingQuantizer(E4M3, device)
    x = values(device, 32, 64)
    assert current.scale.item() == 1.0 and current.amax.item() == 0.0
    amax, scale = current.amax, current.scale
    result = current(x)
    assert current.amax is amax and amax.item() == x.abs().max().item()
    assert scale.item() == pytest.approx(1 / result._scale_inv.item())
    several = current.multi_quantize([x, 2 * x])
    assert torch.equal(several[1].dequantize(), current(2 * x).dequantize())
    assert result._get_quantizer() is current
    delayed = te.Float8Quantizer(torch.ones(1, device=device), torch.zeros(1, device=device), E4M3)
    random = te.NVFP4Quantizer(te.DType.kFloat4E2M1, stochastic_rounding=True)
    assert current.is_requantization_safe()
    assert not delayed.is_requantization_safe() and not random.is_requantization_safe()
    hybrid = te.HybridQuantizer(rowwise_quantizer=current, columnwise_quantizer=delayed)
    assert not hybrid.is_requantization_safe()
    hybrid.set_usage(columnwise=False)
    assert hybrid.is_requantization_safe()


def test_parts_of_hybrid_and_identity_tensors(device):
    x = values(device, 32, 64)
    current = te.Float8CurrentScalingQuantizer(E4M3, device)
    result = te.HybridQuantizer(
        rowwise_quantizer=current, columnwise_quantizer=te.MXFP8Quantizer(E4M3)
    )(x)
    for part, names in (
        (result.rowwise_storage, ("_rowwise_storage", "rowwise_sub_storage")),
        (result.columnwise_storage, ("_columnwise_storage", "columnwise_sub_storage")),
    ):
        for name in names:
            assert torch.equal(getattr(result, name).dequantize(), part.dequantize())
    plain = te.IdentityQuantizer()(x)
    assert torch.equal(plain._hp_data, x)
    plain._hp_data = 2 * x
    assert torch.equal(plain.dequantize(), 2 * x)


def test_a_quantized_parameter_follows_a_recipe_of_another_history(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    with te.quantized_model_init(recipe=DelayedScaling(amax_history_len=1024)):
        layer = te.Linear(32, 32, device=device)
    x = values(device, 16, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with te.autocast(recipe=DelayedScaling(amax_history_len=1024)):
            layer(x)
    expected = "Quantizer is being updated, this may affect model behavior"
    with (
        pytest.warns(UserWarning, match=expected),
        te.autocast(recipe=DelayedScaling(amax_history_len=1)),
    ):
        layer(x)
    scaling = layer.fp8_meta["scaling_fwd"]
    assert layer.weight._quantizer.scale.data_ptr() == scaling.scale[1:2].data_ptr()
    with pytest.raises(RuntimeError, match="no quantizer to be updated"):
        tensor = te.Float8Tensor(
            **te.Float8CurrentScalingQuantizer(E4M3)(x).get_metadata() | {"quantizer": None}
        )
        tensor.update_quantizer(te.Float8CurrentScalingQuantizer(E4M3))


def test_a_layer_under_another_recipe_warns_of_the_change(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    layer, x = te.Linear(32, 32, device=device), values(device, 16, 32)
    with te.autocast(recipe=DelayedScaling()):
        layer(x)
    expected = "Recipe type changed from DelayedScaling to Float8CurrentScaling"
    with pytest.warns(UserWarning, match=expected), te.autocast(recipe=Float8CurrentScaling()):
        layer(x)


# Roles in custom recipes.


def role_layer(device, requested):
    def factory(role):
        requested.append(role)
        grad = role is not None and role.tensor_type.startswith("grad")
        return te.DelayedScalingRequest(amax_history_len=4) if not grad else te.IdentityQuantizer()

    layer = te.Linear(32, 32, name="fc", device=device)
    return layer, CustomRecipe(qfactory=factory)


def test_only_a_different_role_calls_the_factory_again(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    queries = []
    layer, recipe = role_layer(device, queries)
    x = values(device, 16, 32)
    with te.autocast(recipe=recipe):
        layer(x)
    first = list(queries)
    assert [role.tensor_type for role in first] == [
        "input",
        "weight",
        "output",
        "grad_output",
        "grad_input",
    ]
    assert {role.module_type for role in first} == {"linear"} and {role.name for role in first} == {
        "fc"
    }
    layer.output_quantizer_role = None
    quantizers = [*layer.quantizers["scaling_fwd"]]
    with te.autocast(recipe=recipe):
        layer(x)
    assert queries == first and [*layer.quantizers["scaling_fwd"]] == quantizers
    layer.output_quantizer_role = QuantizerRole("dpa", "qkv", "next")
    layer.output_quantizer_role = QuantizerRole("dpa", "qkv", "next")
    layer.grad_input_quantizer_role = QuantizerRole("linear", "grad_output", "previous")
    with te.autocast(recipe=recipe):
        layer(x)
    repeated = queries[len(first) :]
    assert repeated[2] == QuantizerRole("dpa", "qkv", "next")
    assert repeated[4] == QuantizerRole("linear", "grad_output", "previous")
    count = len(queries)
    layer.output_quantizer_role = QuantizerRole("dpa", "qkv", "next")
    with te.autocast(recipe=recipe):
        layer(x)
    assert len(queries) == count


def test_slots_keep_their_scales_when_another_slot_gets_another_role(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")

    def factory(role):
        if role is not None and role.tensor_type in ("weight", "qkv"):
            return te.DelayedScalingRequest(amax_history_len=4)
        if role is not None and role.tensor_type == "output":
            return te.DelayedScalingRequest(amax_history_len=4)
        return te.IdentityQuantizer()

    layer, recipe = te.Linear(32, 32, device=device), CustomRecipe(qfactory=factory)
    x = values(device, 16, 32)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            layer(x)
    before = layer.quantizers["scaling_fwd"][1].scale.item()
    assert before == pytest.approx(448 / layer.weight.abs().max().item())
    layer.output_quantizer_role = QuantizerRole("linear", "input", "next")  # now in high precision
    with te.autocast(recipe=recipe):
        layer(x)
        assert layer.quantizers["scaling_fwd"][1].scale.item() == before
    (state,) = layer.fp8_meta["scaling_fwd"].delayed_states
    assert state.num_quantizers == 1 and state.registration is not None
    assert layer.fp8_meta["scaling_fwd"]._slot_role(2) == QuantizerRole("linear", "input", "next")


# The global state.


def test_a_block_is_entered_and_left_by_the_manager(device):
    recipe = Float8CurrentScaling()
    state = Manager.get_autocast_state()
    Manager.autocast_enter(enabled=True, fp8_recipe=recipe)
    assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is recipe
    Manager.autocast_enter(enabled=False)
    assert not Manager.is_fp8_enabled()
    Manager.autocast_exit(False, _graph=False)
    assert Manager.is_fp8_enabled()
    with pytest.raises(
        RuntimeError, match=r"does not match .*autocast_enter\(enabled=True, _graph=False\)"
    ):
        Manager.autocast_exit(False, _graph=False)
    Manager.set_autocast_state(state=state)
    Manager.autocast_exit(True, _graph=False)
    assert not Manager.is_fp8_enabled() and Manager.AUTOCAST_DEPTH == 0
    with pytest.raises(RuntimeError, match="call autocast_enter first"):
        Manager.autocast_exit(True, _graph=False)
    assert isinstance(Manager.quantization_state, FP8GlobalState)


def test_leaving_the_managers_outermost_block_updates_scales(device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    layer = te.Linear(32, 32, device=device)
    Manager.autocast_enter(enabled=True, fp8_recipe=DelayedScaling())
    layer(values(device, 16, 32))
    scale = layer.fp8_meta["scaling_fwd"].scale.clone()
    Manager.autocast_exit(True, _graph=False)
    assert (scale[:2] == 1).all() and (layer.fp8_meta["scaling_fwd"].scale[:2] != 1).all()


# Layers.


def test_delayed_weight_gradients_name_their_parameters(device):
    late = te.Linear(32, 16, delay_wgrad_compute=True, device=device)
    assert late.get_backward_dw_params() == [late.weight]
    assert late.weight.skip_backward_post_hook and not hasattr(late.bias, "skip_backward_post_hook")
    assert te.Linear(32, 16, device=device).get_backward_dw_params() == []
    group = te.GroupedLinear(2, 32, 16, delay_wgrad_compute=True, device=device)
    group.weight1.requires_grad_(False)
    assert group.get_backward_dw_params() == [group.weight0]
    mlp = te.LayerNormMLP(32, 64, delay_wgrad_compute=True, device=device)
    assert mlp.get_backward_dw_params() == [mlp.fc1_weight, mlp.fc2_weight]


def test_the_store_of_delayed_gradients():
    store = WeightGradStore(delay_wgrad_compute=True)
    assert store.delay_wgrad_compute() and not WeightGradStore().delay_wgrad_compute()
    store.put([2, 3], lambda a, b: a * b)
    with pytest.raises(AssertionError, match="1 delayed weight gradients"):
        store.assert_empty()
    assert store.pop() == (6, [2, 3])
    store.assert_empty()
    with pytest.raises(RuntimeError, match="no weight gradient waits"):
        store.pop()
    with pytest.raises(RuntimeError, match="delay_wgrad_compute=True"):
        WeightGradStore().put([], print)
    with pytest.raises(ValueError, match="exclude each other"):
        WeightGradStore(True, True)


@pytest.mark.parametrize("quantized", [False, True])
def test_grouped_weights_are_those_of_the_groups(quantized, device, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")
    recipe = Float8CurrentScaling() if quantized else None
    with te.quantized_model_init(
        enabled=quantized, recipe=recipe, preserve_high_precision_init_val=quantized
    ):
        layer = te.GroupedLinear(2, 32, 16, device=device)
    x = values(device, 16, 32).requires_grad_()
    with te.autocast(enabled=quantized, recipe=recipe):
        expected = layer(x, [8, 8])
    plain = lambda weight: (weight.dequantize() if quantized else weight).detach()  # noqa: E731
    weights = [plain(layer.weight0), plain(layer.weight1)]
    layer.make_grouped_weights(defer_init=True)
    assert hasattr(layer, "weight0")
    initial = layer.weight1.get_high_precision_init_val() if quantized else None
    layer.make_grouped_weights()
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias0", "bias1"]
    assert torch.equal(plain(layer.weight), torch.stack(weights))
    if quantized:
        assert torch.equal(layer.weight.get_high_precision_init_val()[1], initial)
    with te.autocast(enabled=quantized, recipe=recipe):
        got = layer(x, [8, 8])
    assert torch.equal(got, expected) and layer.single_grouped_weight
    got.sum().backward()
    assert layer.weight.grad.shape == (2, 16, 32)
    layer.make_grouped_weights()
    assert layer.weight.shape == (2, 16, 32)


def test_margins_and_plain_attributes_of_norms(device):
    norm = te.RMSNorm(16, sm_margin={"forward": 1, "backward": 2, "inference": 3}, device=device)
    assert (norm.fwd_rmsnorm_sm_margin, norm.bwd_rmsnorm_sm_margin, norm.inf_rmsnorm_sm_margin) == (
        1,
        2,
        3,
    )
    norm.fwd_rmsnorm_sm_margin = 5
    assert norm.fwd_ln_sm_margin == 5
    layers = (
        norm,
        te.Linear(16, 16, device=device),
        te.DotProductAttention(2, 8),
        te.LayerNorm(16, device=device),
    )
    for layer in layers:
        layer.fast_setattr("tag", 3)
        assert layer.tag == 3


# Functions.


def call_attention(layout, device):
    order = {"sbhd": (1, 0, 2, 3), "bshd": (0, 1, 2, 3)}[layout]
    q, k, v = (
        values(device, 2, 16, 2, 32, seed=seed).permute(order).contiguous() for seed in (1, 2, 3)
    )
    lengths = torch.tensor([0, 16, 32], dtype=torch.int32, device=device)
    return q, k, v, lengths


@pytest.mark.parametrize(("local", "other"), [("sbhd", "bshd"), ("bshd", "sbhd"), ("bshd", "bhsd")])
def test_fused_attention_keeps_the_requested_order_of_axes(local, other, device):
    q, k, v, lengths = call_attention(local, device)
    layout = "_".join([local] * 3)
    kind = cpp_extensions.fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
    options = {"qkv_layout": layout, "attn_mask_type": "causal"}
    forward = (True, 16, 16, lengths, lengths, q, k, v, q.dtype, kind)
    out, aux = cpp_extensions.fused_attn_fwd(*forward, **options)
    transposed, _ = cpp_extensions.fused_attn_fwd(*forward, **options, o_format=other)
    axes = [local.index(axis) for axis in other]
    assert torch.equal(transposed, out.permute(axes))
    grad = values(device, *out.shape, seed=9)
    backward = (16, 16, lengths, lengths, q, k, v)
    rest = (q.dtype, q.dtype, aux, kind)
    expected = cpp_extensions.fused_attn_bwd(*backward, out, grad, *rest, **options)
    got = cpp_extensions.fused_attn_bwd(
        *backward,
        transposed,
        grad.permute(axes),
        *rest,
        **options,
        o_format=other,
        do_format=other,
        dqkv_layout="_".join([other] * 3),
    )
    for actual, reference in zip(got[:3], expected[:3], strict=True):
        assert torch.equal(actual, reference.permute(axes))


def test_formats_without_effect_warn_once_and_wrong_ones_are_named(device):
    from transformer_engine.common.warning import forget_issued

    forget_issued()
    q, k, v, lengths = call_attention("bshd", device)
    kind = cpp_extensions.fused_attn.FusedAttnBackend["F16_arbitrary_seqlen"]
    call = (False, 16, 16, lengths, lengths, q, k, v, q.dtype, kind)
    options = {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "causal"}
    with pytest.warns(UserWarning, match="qkv_scale_inv_format='bhsd' has no effect"):
        cpp_extensions.fused_attn_fwd(*call, **options, qkv_scale_inv_format="bhsd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpp_extensions.fused_attn_fwd(*call, **options, qkv_scale_inv_format="bhsd")
    with pytest.raises(ValueError, match="o_format='thd' has other axes"):
        cpp_extensions.fused_attn_fwd(*call, **options, o_format="thd")
    with pytest.raises(ValueError, match="not an order of axes"):
        cpp_extensions.fused_attn_fwd(*call, **options, o_format="dhsb")


def test_rotations_are_the_same_as_autograd_functions(device):
    angles = RotaryPositionEmbedding(16)(8).to(device)
    x = values(device, 8, 2, 3, 16).requires_grad_()
    got = FusedRoPEFunc.apply(x, angles, None, "sbhd", False, None, 1, 0)
    expected = apply_rotary_pos_emb(x, angles)
    assert torch.equal(got, expected)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, expected)]
    assert torch.equal(*grads)
    packed = values(device, 8, 2, 1, 64).requires_grad_()
    ours = FusedQKVRoPEFunc.apply(packed, angles, angles, (32, 16, 16))
    reference = apply_fused_qkv_rotary_pos_emb(packed, angles, angles, (32, 16, 16))
    assert all(map(torch.equal, ours, reference))
    grads = [
        torch.autograd.grad(sum(y.square().sum() for y in result), packed)[0]
        for result in (ours, reference)
    ]
    assert torch.equal(*grads)


def test_softmax_classes_are_those_of_torch_under_their_masks(device):
    x = values(device, 2, 3, 4, 4).requires_grad_()
    mask = torch.zeros(2, 1, 4, 4, dtype=torch.bool, device=device)
    mask[..., 3] = True
    above = torch.ones(4, 4, dtype=torch.bool, device=device).triu(1)
    for got, hidden in (
        (softmax.ScaledSoftmax.apply(x, 0.5), None),
        (softmax.ScaledMaskedSoftmax.apply(x, mask, 0.5), mask),
        (softmax.ScaledUpperTriangMaskedSoftmax.apply(x, 0.5), above),
        (softmax.ScaledAlignedCausalMaskedSoftmax.apply(x, 0.5), above),
    ):
        scores = 0.5 * x
        expected = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).softmax(
            -1
        )
        torch.testing.assert_close(got, expected)
        first, second = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, expected))
        torch.testing.assert_close(first, second)


def test_utility_functions_behave_as_documented(device):
    scores = torch.zeros(1, 1, 2, 2, device=device)
    hidden = torch.tensor([[False, True], [False, False]], device=device)
    assert utils.attention_mask_func(scores, hidden) is scores and scores[0, 0, 0, 1] == -10000.0
    kind = torch.device("cuda" if torch.cuda.is_available() else "cpu").type
    with utils.gpu_autocast_ctx(dtype=torch.bfloat16):
        assert utils.torch_get_autocast_gpu_dtype() is torch.bfloat16
        assert torch.is_autocast_enabled(kind)
    assert utils.make_weak_ref([1, None, {"a": (2.0, scores)}])[2]["a"][1].shape == scores.shape
    with pytest.raises(TypeError, match="not str"):
        utils.make_weak_ref(x="text")
    utils.nvtx_range_push(msg="range")
    utils.nvtx_range_pop(msg="range")
    assert (
        te.distributed.get_distributed_world_size() == 1
        and te.distributed.get_distributed_rank() == 0
    )


def test_element_types_are_cast_from_torch_and_numbers():
    tex = importlib.import_module("transformer_engine_torch")
    assert te.DType.cast(torch.bfloat16) is te.DType.kBFloat16
    assert te.DType.cast(7) is E4M3 and te.DType.cast(tex.DType.kFloat8E5M2) is E5M2
    with pytest.raises(ValueError, match=r"torch\.int64 has no DType"):
        te.DType.cast(torch.int64)
    with pytest.raises(TypeError, match="'bf16'"):
        te.DType.cast("bf16")


def test_positions_of_recipes_are_those_of_the_original():
    assert CustomRecipe(print, Format.E4M3).fp8_format is Format.E4M3
    nvfp4 = te.recipe.NVFP4BlockScaling(False, False, False, False, "none", "all", "MSE")
    assert nvfp4.nvfp4_4over6_err_mode == "MSE"
    assert te.LayerNormMLP(*(16, 32, 1e-5), device="cpu", name="named").name == "named"
    assert te.fp8.DelayedScaling is DelayedScaling
    assert te.constants.AttnBiasTypes == ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
    assert te.constants.QKVLayouts[:2] == ("sb3hd", "sbh3d") and len(te.constants.QKVLayouts) == 26
    assert te.module.initialize_ub is te.initialize_ub
