"""A projection's heads and their attention are one node, bitwise equal to two, and hooks see the core."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from transformer_engine.pytorch.attention.rotation import Rotation
from transformer_engine.pytorch.functions.attention.autograd import Projection, attend
from transformer_engine.pytorch.functions.split_heads import split_views
from transformer_engine.pytorch.primitives.attention import reference
from transformer_engine.pytorch.primitives.attention.call import AttentionInputs

pytestmark = pytest.mark.any_device
HIDDEN, HEADS, TOKENS, BATCH = 32, 4, 12, 2
JOINT = "_ProjectedAttentionBackward"
SHAPES = {"sbhd": (TOKENS, BATCH), "bshd": (BATCH, TOKENS), "thd": (TOKENS * BATCH,)}


def make(device, **options):
    torch.manual_seed(0)
    options = {"attention_dropout": 0.0, "device": device, **options}
    return MultiheadAttention(HIDDEN, HEADS, **options)


def call(layer, form="sbhd", dtype=torch.float32, **more):
    """Output, every gradient, and whether the graph has the joint node."""
    torch.manual_seed(1)
    device = layer.proj.weight.device
    x = torch.randn(*SHAPES[form], HIDDEN, dtype=dtype).to(device).requires_grad_()
    bounds = torch.tensor([0, TOKENS - 2, TOKENS * BATCH], dtype=torch.int32, device=device)
    longest = TOKENS + 2
    options = {
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    y = layer(x, **(options if form == "thd" else {}), **more)
    joint = JOINT in nodes(y)
    y.backward(torch.randn(y.shape).to(y))
    results = [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]
    return results, joint


def nodes(y):
    """Names of all nodes below y."""
    result, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        result.add(type(node).__name__)
        waiting += [below for below, _ in node.next_functions if below is not None]
    return result


def with_core_hook(layer):
    """Layer with a hook on its core, which prevents the joint node."""
    layer.core_attention.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("form", SHAPES)
def test_the_joint_node_is_bitwise_equal_to_two_nodes(form, groups, fused, device):
    mask = "padding_causal" if form == "thd" else "causal"
    options = {"qkv_format": form, "attn_mask_type": mask, "num_gqa_groups": groups}
    options |= {"fuse_qkv_params": fused, "params_dtype": torch.bfloat16}
    ours, _ = call(make(device, **options), form, torch.bfloat16)
    reference, joint = call(with_core_hook(make(device, **options)), form, torch.bfloat16)
    assert not joint
    for a, b in zip(ours, reference, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("form", SHAPES)
def test_gradients_written_into_one_buffer_equal_concatenated_ones_bitwise(
    form, groups, interleaved, device
):
    mask = "padding_causal" if form == "thd" else "causal"
    core = DotProductAttention(
        HEADS, 8, num_gqa_groups=groups, qkv_format=form, attn_mask_type=mask
    )
    x = torch.randn(*SHAPES[form], (HEADS + 2 * groups) * 8, device=device)
    starts = torch.tensor([0, TOKENS - 2, TOKENS * BATCH - 3], dtype=torch.int32, device=device)
    lengths, longest = starts.diff(), TOKENS
    packed = {
        "cu_seqlens_q": starts,
        "cu_seqlens_kv": starts,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }
    core(*split_views(x, HEADS, groups, 8, interleaved), **(packed if form == "thd" else {}))
    (plan,) = core._plans.values()
    request = replace(plan.call, needs_gradient=True)
    rest = (lengths, lengths, starts, starts) if form == "thd" else ()
    written = []

    def write_backward(request, inputs, attended, grad_output, into):
        gradients = reference.backward(request, inputs, attended, grad_output)
        # nothing is written after the last sequence
        tokens = TOKENS * BATCH - 3 if request.packed else None
        for target, gradient, part in zip(into, gradients[:3], inputs[:3], strict=True):
            assert target.stride() == part.stride()
            target[:tokens] = gradient[:tokens]
        written.append({target.untyped_storage().data_ptr() for target in into})
        return gradients._replace(q=into[0], k=into[1], v=into[2])

    results = []
    for passes in (reference.PASSES, reference.PASSES._replace(backward_into=write_backward)):
        projection = x.clone().requires_grad_()
        parts = split_views(projection.detach(), HEADS, groups, 8, interleaved)
        inputs = AttentionInputs(*parts, *rest)
        y = attend(passes, request, inputs, Projection(projection, interleaved)).output
        y.backward(torch.sin(torch.arange(y.numel(), device=device)).view_as(y))
        results.append(projection.grad)
    assert torch.equal(*results)
    assert [len(memory) for memory in written] == ([] if interleaved and groups == 2 else [1])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("form", SHAPES)
def test_rotated_heads_are_bitwise_equal_to_separate_rotations(
    form, groups, fused, device, monkeypatch
):
    mask = "padding_causal" if form == "thd" else "causal"
    options = {"qkv_format": form, "attn_mask_type": mask, "num_gqa_groups": groups}
    options |= {"fuse_qkv_params": fused, "params_dtype": torch.bfloat16}
    angles = RotaryPositionEmbedding(HIDDEN // HEADS)(TOKENS * BATCH).to(device)
    ours, _ = call(make(device, **options), form, torch.bfloat16, rotary_pos_emb=angles)

    def rotate_apart(rotation, x, heads):
        q, k, v = heads.split_qkv(x)
        return *rotation(q, k), v

    monkeypatch.setattr(Rotation, "rotate_projection", rotate_apart)
    reference, _ = call(make(device, **options), form, torch.bfloat16, rotary_pos_emb=angles)
    for a, b in zip(ours, reference, strict=True):
        assert torch.equal(a, b)


def test_the_joint_node_exists_where_torch_has_separate_passes(device):
    assert call(make(device), dtype=torch.float32)[1] or device.type == "cuda"
    with sdpa_kernel(SDPBackend.MATH):
        results, joint = call(make(device))
    assert not joint or device.type == "cuda"
    assert all(torch.isfinite(x).all() for x in results)


@pytest.mark.parametrize(
    "position",
    ["hook before", "hook behind", "forward of the object", "forward of the class", "all modules"],
)
def test_observers_of_the_core_see_its_call(position, device, monkeypatch):
    layer = make(device)
    call(layer)
    core, records = layer.core_attention, []
    forward = DotProductAttention.forward

    def watch(self, *args, **kwargs):
        records.append(len(args))
        return forward(self, *args, **kwargs)

    removed = None
    if position == "hook before":
        core.register_forward_pre_hook(lambda _, args: records.append(len(args)))
    elif position == "hook behind":
        core.register_forward_hook(lambda _, args, out: records.append(len(args)))
    elif position == "forward of the object":
        monkeypatch.setattr(core, "forward", lambda *args, **kwargs: watch(core, *args, **kwargs))
    elif position == "forward of the class":
        monkeypatch.setattr(DotProductAttention, "forward", watch)
    else:
        removed = torch.nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: records.append(len(args)) if module is core else None
        )
    call(layer)
    if removed is not None:
        removed.remove()
    assert records == [3]


def test_the_joint_nodes_second_derivative_is_correct(device):
    layer = make(device)
    core = layer.core_attention
    x = torch.randn(TOKENS, BATCH, 3 * HIDDEN).to(device)
    size = HIDDEN // HEADS
    core(*split_views(x, HEADS, HEADS, size, True))
    (plan,) = core._plans.values()
    request = replace(plan.call, needs_gradient=True)

    def ours(x):
        inputs = AttentionInputs(*split_views(x.detach(), HEADS, HEADS, size, True))
        return attend(reference.PASSES, request, inputs, Projection(x, True)).output

    def plain(x):
        q, k, v = (part.permute(1, 2, 0, 3) for part in split_views(x, HEADS, HEADS, size, True))
        hidden = torch.ones(TOKENS, TOKENS, device=device).triu(1).bool()
        p = torch.softmax(
            (q @ k.transpose(-1, -2) * size**-0.5).masked_fill(hidden, -torch.inf), -1
        )
        return (p @ v).permute(2, 0, 1, 3).flatten(-2)

    results = []
    for function, at in ((ours, x.requires_grad_()), (plain, x.detach().double().requires_grad_())):
        (first,) = torch.autograd.grad(function(at).sin().sum(), at, create_graph=True)
        results += [(first.detach(), *torch.autograd.grad(first.square().sum(), at))]
    for a, b in zip(*results, strict=True):
        assert float((a - b).norm()) <= 2e-5 * float(b.norm()) + 1e-6


def test_dropout_recomputation_and_no_gradient_take_no_joint_node(device):
    layer = make(device, attention_dropout=0.5)
    x = torch.randn(TOKENS, BATCH, HIDDEN, device=device, requires_grad=True)
    assert JOINT not in nodes(layer(x)) or device.type == "cuda"
    assert JOINT not in nodes(make(device)(x, checkpoint_core_attention=True))
    with torch.no_grad():
        assert make(device)(x).grad_fn is None


def test_the_next_step_sees_a_changed_cache(device):
    """A cached step is not reused for another batch, limit, cache or page table."""
    layer = make(device, qkv_format="bshd", layer_number=1).eval()
    options = {
        "num_heads_kv": HEADS,
        "head_dim_k": HIDDEN // HEADS,
        "dtype": torch.float32,
        "device": device,
    }
    cache = InferenceParams(2, 16, **options)
    x = torch.randn(2, 1, HIDDEN, device=device)

    def step(rows=2):
        cache.pre_step(dict.fromkeys(range(rows), 1))
        with torch.no_grad():
            return layer(x[:rows], inference_params=cache, attn_mask_type="padding_causal")

    for _ in range(3):
        step()
    held = cache.cache_manager.cache[1]
    cache.cache_manager.cache[1] = tuple(tensor.clone() for tensor in held)
    before = held[0].clone()
    step()
    assert torch.equal(held[0], before), "the new cache is written"
    cache.num_heads_kv = HEADS + 1
    with pytest.raises(ValueError, match="the cache holds"):
        step()
    cache.num_heads_kv = HEADS
    cache.dtype = torch.bfloat16
    with pytest.raises(ValueError, match="inference_params has dtype"):
        step()
    cache.dtype = torch.float32
    assert step(1).shape[0] == 1
    cache.pre_step(dict.fromkeys(range(1), 1))
    with pytest.raises(ValueError, match="pre_step announced 1"), torch.no_grad():
        layer(x, inference_params=cache, attn_mask_type="padding_causal")
