"""Choosing the attention backend: rejection reasons, and errors for wrong calls."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch

from tests.attention.attention_oracle import cumulative, padding_mask
from transformer_engine.common import optional
from transformer_engine.common.dispatch import Unsupported, use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.kernels.launch import MISSING
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import get_qkv_layout, utils
from transformer_engine.pytorch.attention.dot_product_attention import plan as plans
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionLogging,
    AttentionParams,
    FlashAttentionUtils,
    NVTE_Fused_Attn_Backend,
    get_attention_backend,
    get_cu_seqlens,
)
from transformer_engine.pytorch.inspect.explain import explain as explain_call
from transformer_engine.pytorch.primitives.attention.backends import cudnn_fp8, flash4, triton
from transformer_engine.pytorch.primitives.attention.call import AttentionCall, Switches
from transformer_engine.pytorch.primitives.attention.choose import (
    TABLE,
    check,
    choose,
    choose_passes,
    explain,
    preference,
)
from transformer_engine.pytorch.primitives.attention.mask import (
    canonical_name,
    check_set_window_size,
    resolve,
)

SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch):
    versions = ("NVTE_FLASH_ATTN_V2", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")
    for name in (
        *SWITCHES,
        *versions,
        "NVTE_FUSED_ATTN_BACKEND",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
    ):
        monkeypatch.delenv(name, raising=False)
    # Queries without tensors are about a CPU.
    monkeypatch.setattr(utils, "canonical_device", lambda name: torch.device("cpu"))


def qkv(device, size=5):
    return torch.randn(3, 2, size, 2, 4, device=device)


def select_backend(**fields):
    return choose(AttentionParams(**fields).request()).name


def rejection_reason(backend, **fields):
    return {v.backend: v.reason for v in explain(AttentionParams(**fields).request())}[backend]


def test_torch_has_priority_and_the_reference_computes_the_rest():
    assert select_backend() == "torch_sdpa"
    assert select_backend(core_attention_bias_type="alibi") == "reference"


@pytest.mark.parametrize(
    "fields, reason",
    [
        (
            {"core_attention_bias_type": "post_scale_bias"},
            "core_attention_bias_type='post_scale_bias'",
        ),
        ({"softmax_type": "learnable"}, "softmax_type='learnable'"),
        ({"return_max_logit": True}, "return_max_logit"),
        ({"max_seqlen_q": 0}, "an empty tensor"),
    ],
)
def test_torch_reports_why_it_rejects(fields, reason):
    assert reason in rejection_reason("torch_sdpa", **fields)


def test_torch_rejects_determinism_on_cuda_unless_torch_provides_it():
    request = AttentionParams(deterministic=True).request()
    on_cuda = dataclasses.replace(request, device_type="cuda")
    assert (
        "only deterministic under" in {v.backend: v.reason for v in explain(on_cuda)}["torch_sdpa"]
    )


@pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"batch": 65535}, None),
        ({"batch": 65536}, "65536 sequences > 65535, the most programs that CUDA starts there"),
        ({"bias_shape": (4096, 16, 8, 8)}, None),
        (
            {"bias_shape": (4096, 16, 8, 8), "bias_gradient": True},
            "65536 planes [s_q, s_kv] of a bias with a gradient > 65535, the most programs that CUDA starts there",
        ),
    ],
)
def test_our_kernels_reject_calls_larger_than_a_cuda_grid(fields, reason):
    """Without this check, CUDA reports "invalid argument"."""
    requested = AttentionParams(qkv_dtype=torch.bfloat16).request()
    requested = dataclasses.replace(
        requested, device_type="cuda", hardware=nvidia(9, 0), needs_gradient=True, **fields
    )
    assert triton.unsupported_reason(requested) == reason


def question(
    seqlen: int, mask: str = "causal", dtype: torch.dtype = torch.bfloat16
) -> AttentionCall:
    """A request on a GPU, with 16 heads of 64."""
    return AttentionCall(
        dtype=dtype,
        device_type="cuda",
        batch=1,
        heads=16,
        groups=16,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        head_dim_qk=64,
        head_dim_v=64,
        q_format="sbhd",
        kv_format="sbhd",
        mask=resolve(mask, window_size=None, bottom_right_diagonal=None),
        scale=0.125,
        switches=Switches(),
    )


@pytest.mark.parametrize(
    ("request_", "first"),
    [
        (question(128), "torch_sdpa"),
        (question(128, "no_mask"), "torch_sdpa"),
        (question(128, "padding"), "flash4"),
        (question(4096), "flash4"),
        (question(4096, dtype=torch.float32), "torch_sdpa"),
    ],
    ids=["small causal", "small", "small with padding", "large", "float32"],
)
def test_small_calls_and_float32_prefer_torchs_own_attention(request_, first):
    order = preference(request_)
    assert order[0] == first
    assert sorted(order) == sorted(TABLE.names()), "every backend has a place"


@pytest.mark.parametrize(
    "off, expected",
    [
        (("NVTE_FLASH_ATTN",), "torch_sdpa"),
        (("NVTE_FUSED_ATTN",), "torch_sdpa"),
        (("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"), "reference"),
        (("NVTE_UNFUSED_ATTN",), "torch_sdpa"),
    ],
)
def test_environment_switches_disable_backend_families(off, expected, monkeypatch):
    for name in off:
        monkeypatch.setenv(name, "0")
    assert select_backend() == expected


def test_turning_off_all_switches_raises_in_the_call_only(monkeypatch, device):
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    module = DotProductAttention(2, 4, qkv_format="bshd")
    with pytest.raises(
        Unsupported, match=r"NVTE_FLASH_ATTN=0 and NVTE_FUSED_ATTN=0.*: NVTE_UNFUSED_ATTN=0"
    ):
        module(*qkv(device))
    with pytest.raises(ValueError, match="No dot product attention backend is available"):
        module(*qkv(device))


def test_a_switch_set_after_a_call_changes_the_next_one(monkeypatch, device):
    module = DotProductAttention(2, 4, qkv_format="bshd")
    module(*qkv(device))
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")
    with pytest.raises(ValueError, match="No dot product attention backend"):
        module(*qkv(device))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("1hss", (1, 16, 128, 64)),
        ("b1ss", (3, 1, 128, 64)),
        ("111s", (1, 1, 1, 64)),
        (None, (1, 16, 128, 64)),
        ((3, 16, 1, 64), (3, 16, 1, 64)),
    ],
)
def test_a_bias_shape_is_spelled_by_its_axes_or_extents(kind, shape):
    options = {"core_attention_bias_type": "post_scale_bias", "batch_size": 3, "max_seqlen_kv": 64}
    assert AttentionParams(core_attention_bias_shape=kind, **options).request().bias_shape == shape


@pytest.mark.parametrize("kind", ["hbss", "1hs", "1hsx"])
def test_an_unknown_bias_shape_is_an_error(kind):
    params = AttentionParams(
        core_attention_bias_type="post_scale_bias", core_attention_bias_shape=kind
    )
    with pytest.raises(ValueError, match=f"core_attention_bias_shape='{kind}'.*write b, h, s, s"):
        params.request()


def test_a_bias_shape_that_does_not_broadcast_is_an_error():
    shape = (2, 16, 128, 128)
    params = AttentionParams(
        core_attention_bias_type="post_scale_bias", core_attention_bias_shape=shape
    )
    with pytest.raises(
        ValueError, match=r"core_attention_bias_shape=\(2, 16, 128, 128\) does not broadcast"
    ):
        params.request()


def test_attention_params_survive_conversion_to_a_request():
    options = {
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias_shape": (1, 16, 1, 128),
    }
    params = AttentionParams(**options, qkv_layout="bshd_bshd_bshd", softmax_scale=0.5, softcap=2.0)
    assert AttentionParams.of(params.request()) == params
    assert params.request().scale == 0.5 and AttentionParams().request().scale == 64**-0.5


def test_a_forced_backend_that_rejects_raises_its_reason(device):
    module = DotProductAttention(2, 4, qkv_format="bshd", softmax_type="off-by-one")
    reason = "does not support softmax_type='off-by-one'"
    with use_backend(attention="torch_sdpa"), pytest.raises(Unsupported, match=reason):
        module(*qkv(device))


def test_the_originals_query_returns_our_choice(monkeypatch):
    fused = NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    assert get_attention_backend(AttentionParams()) == (
        False,
        None,
        True,
        fused,
        False,
        [False, True, True],
    )
    biased = AttentionParams(core_attention_bias_type="post_scale_bias")
    assert get_attention_backend(biased) == (False, None, False, None, True, [False, False, True])
    on_fp8 = AttentionParams(fp8=True, fp8_meta={"recipe": Float8CurrentScaling(fp8_dpa=True)})
    assert get_attention_backend(on_fp8) == (False, None, False, None, True, [False, False, True])
    assert get_attention_backend(AttentionParams(context_parallel=True)) == get_attention_backend(
        AttentionParams()
    )
    monkeypatch.setenv("NVTE_FUSED_ATTN_BACKEND", "2")
    assert get_attention_backend(AttentionParams())[-1] == [False, False, True]
    monkeypatch.delenv("NVTE_FUSED_ATTN_BACKEND")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert get_attention_backend(AttentionParams())[-1] == [False, False, True]


def test_attention_parameters_compare_by_value_and_know_their_formats():
    assert AttentionParams(fp8_meta={"a": 1}) == AttentionParams(fp8_meta={"a": 2})
    assert AttentionParams() != AttentionParams(head_dim_qk=128)
    request = AttentionParams(qkv_layout="thd_2bshd", attn_mask_type="padding").request()
    assert (request.q_format, request.kv_format) == ("thd", "bshd")
    assert AttentionParams(qkv_layout="bs3hd").request().q_format == "bshd"


def test_a_choice_is_cached_until_the_call_or_the_switches_change(monkeypatch, device):
    asked = []

    def counting(request):
        asked.append(request)
        return choose(request)

    monkeypatch.setattr(plans, "choose", counting)
    module = DotProductAttention(2, 4, qkv_format="bshd", attention_dropout=0.1)
    for _ in range(3):
        module(*qkv(device))
    assert len(asked) == 1
    module(*qkv(device, size=6))
    module.eval()
    module(*qkv(device))
    module(*qkv(device), window_size=(2, 0))
    assert len(asked) == 4
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    module(*qkv(device))
    assert len(asked) == 5 and not asked[-1].switches.fused
    q, k, v = qkv(device)
    module(q.requires_grad_(), k, v)
    assert len(asked) == 6 and asked[-1].needs_gradient and not asked[-2].needs_gradient


def test_forced_or_explained_calls_choose_a_backend_again(device):
    module = DotProductAttention(2, 4, qkv_format="bshd")
    module(*qkv(device))
    with use_backend(attention="reference"):
        (decision,) = explain_call(module, *qkv(device)).decisions
    assert decision.chosen == "reference"


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_explaining_a_choice_binds_no_backend(device_type, monkeypatch):
    def bound(request):
        raise AssertionError("a backend was bound, which may compile for seconds")

    rows = tuple(dataclasses.replace(backend, bind=bound) for backend in TABLE.backends)
    monkeypatch.setattr(TABLE, "backends", rows)
    request = dataclasses.replace(
        AttentionParams().request(), device_type=device_type, hardware=nvidia(9, 0)
    )
    assert [verdict.chosen for verdict in explain(request)].count(True) == 1
    check(request)


def test_the_number_of_cached_plans_is_bounded(monkeypatch, device):
    module = DotProductAttention(2, 4, qkv_format="bshd")
    monkeypatch.setattr(module._plans, "most", 2)
    for size in range(2, 7):
        module(*qkv(device, size=size))
    assert len(module._plans) <= 2


def test_separate_passes_without_a_gpu_come_from_the_reference():
    assert choose_passes(AttentionParams().request()).name == "reference"


def test_installed_flash_packages_are_reported_when_chosen(monkeypatch):
    monkeypatch.setattr(flash4, "VERSION", "4.0.0b36")
    monkeypatch.setattr(optional, "failure", lambda *_: None)
    monkeypatch.setattr(utils, "canonical_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(utils, "current_hardware", lambda: nvidia(9, 0))
    long = AttentionParams(max_seqlen_q=4096, max_seqlen_kv=4096)
    use_flash, version, use_fused, _, use_unfused, takes = get_attention_backend(long)
    assert (use_flash, str(version), use_fused, use_unfused) == (True, "4.0.0b36", False, False)
    assert takes == [True, True, True]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert get_attention_backend(long)[:3] == (False, None, True)


def test_fp8_kernels_are_reported_as_the_original_numbers_them(monkeypatch):
    monkeypatch.setattr(cudnn_fp8, "unavailable_reason", lambda: None)
    monkeypatch.setattr(utils, "canonical_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(utils, "current_hardware", lambda: nvidia(9, 0))
    on_fp8 = AttentionParams(fp8=True, attn_mask_type="causal", head_dim_qk=128, head_dim_v=128)
    kind = NVTE_Fused_Attn_Backend.NVTE_FP8
    assert get_attention_backend(on_fp8) == (False, None, True, kind, False, [False, True, True])


def test_flash_attention_is_not_reported_as_installed():
    assert not (FlashAttentionUtils.is_installed or FlashAttentionUtils.v3_is_installed)
    assert FlashAttentionUtils.is_version_supported(FlashAttentionUtils.max_version)


def test_the_choice_is_logged_on_request(monkeypatch, caplog):
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", "2")
    AttentionLogging.setup_logging()
    with caplog.at_level(logging.DEBUG, logger="DotProductAttention"):
        select_backend(softmax_type="off-by-one")
    monkeypatch.setenv("NVTE_DEBUG", "0")
    AttentionLogging.setup_logging()
    assert "Selected backend = reference" in caplog.text
    assert "torch_sdpa: it does not support softmax_type='off-by-one'" in caplog.text
    assert AttentionLogging._log_level == logging.WARNING


@pytest.mark.parametrize(
    "mask, window, expected",
    [
        ("causal", None, (-1, 0)),
        ("padding_causal", (-1, -1), (-1, 0)),
        ("causal_bottom_right", (4, 2), (4, 0)),
        ("causal", (4, 0), (4, 0)),
        ("no_mask", None, (-1, -1)),
        ("padding", (-1, 0), (-1, -1)),
        ("arbitrary", (3, 5), (3, 5)),
    ],
)
@pytest.mark.filterwarnings("ignore:window_size")
def test_windows_are_adjusted_to_the_mask(mask, window, expected):
    assert check_set_window_size(mask, window) == expected


@pytest.mark.parametrize(
    "mask, window", [("causal", (-1, -1)), ("causal", (4, 2)), ("no_mask", (-1, 0))]
)
def test_an_adjusted_window_warns(mask, window):
    with pytest.warns(UserWarning, match="window_size=.* becomes"):
        check_set_window_size(mask, window)


@pytest.mark.parametrize(
    "mask, window", [("causal", (-2, 0)), ("no_mask", (-1, 3)), ("padding", (3, -1))]
)
def test_impossible_windows_are_rejected(mask, window):
    with pytest.raises(ValueError, match="window_size="):
        check_set_window_size(mask, window)


def test_unknown_names_list_the_known_ones(device):
    with pytest.raises(
        ValueError, match="attn_mask_type='casual' does not exist; choose one of no_mask"
    ):
        canonical_name("casual")
    for option in ("attention_type", "softmax_type", "qkv_format"):
        with pytest.raises(ValueError, match=f"{option}='x' does not exist; choose one of"):
            DotProductAttention(2, 4, **{option: "x"})
    with pytest.raises(ValueError, match=r"cp_comm_type='x'"):
        DotProductAttention(2, 4, cp_comm_type="x")
    with pytest.raises(ValueError, match="core_attention_bias_type='x'"):
        DotProductAttention(2, 4, qkv_format="bshd")(*qkv(device), core_attention_bias_type="x")


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"num_attention_heads": 6, "tp_size": 4},
            "tp_size=4 does not divide num_attention_heads=6",
        ),
        (
            {"num_attention_heads": 8, "num_gqa_groups": 2, "tp_size": 4},
            "tp_size=4 does not divide num_gqa_groups=2",
        ),
        (
            {"num_attention_heads": 6, "num_gqa_groups": 4},
            "num_gqa_groups=4 does not divide num_attention_heads=6",
        ),
    ],
)
def test_heads_that_cannot_be_shared_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        DotProductAttention(kv_channels=4, **options)


def test_tensors_that_do_not_fit_are_rejected(device):
    q, k, v = qkv(device)
    module = DotProductAttention(2, 4, qkv_format="bshd")
    with pytest.raises(
        ValueError, match=r"key_layer is \[2, 5, 1, 4\].*\(heads, size\) = \(2, 4\)"
    ):
        module(q, k[:, :, :1], v)
    with pytest.raises(ValueError, match=r"query_layer is .* needs 3 axes"):
        module(q, k, v, qkv_format="thd")
    with pytest.raises(ValueError, match=r"value_layer is torch\.float16"):
        module(q, k, v.half())
    with pytest.raises(ValueError, match="differ in their tokens"):
        module(q, k, v[:, :3])
    with pytest.raises(ValueError, match="queries have 2 sequences, keys 1"):
        module(q, k[:1], v[:1])
    with pytest.raises(ValueError, match="missing"):
        module(q)


def test_masks_and_biases_that_do_not_fit_are_rejected(device):
    q, k, v = qkv(device)
    module = DotProductAttention(2, 4, qkv_format="bshd")
    with pytest.raises(ValueError, match="a padding mask needs cu_seqlens_q"):
        module(q, k, v, attn_mask_type="padding")
    with pytest.raises(ValueError, match="'arbitrary' needs attention_mask"):
        module(q, k, v, attn_mask_type="arbitrary")
    with pytest.raises(
        ValueError, match=r"attention_mask of kv is \[2, 1, 1, 5\].*a pair of masks"
    ):
        module(q, k[:, :4], v[:, :4], padding_mask([5, 3], 5, device), attn_mask_type="padding")
    with pytest.raises(ValueError, match="has 3 sequences, the tensor 2"):
        module(q, k, v, attn_mask_type="padding", cu_seqlens_q=cumulative([1, 2, 3], device))
    with pytest.raises(ValueError, match="'alibi' takes no core_attention_bias"):
        bias = torch.zeros(1, 1, 5, 5, device=device)
        module(q, k, v, core_attention_bias_type="alibi", core_attention_bias=bias)
    with pytest.raises(ValueError, match="'post_scale_bias' needs core_attention_bias"):
        module(q, k, v, core_attention_bias_type="post_scale_bias")
    with pytest.raises(ValueError, match=r"\[1, 1, 5, 4\] does not broadcast to \[2, 2, 5, 5\]"):
        bias = torch.zeros(1, 1, 5, 4, device=device)
        module(q, k, v, core_attention_bias_type="pre_scale_bias", core_attention_bias=bias)
    with pytest.raises(ValueError, match="does not end in 2 heads"):
        module(q, k, v, core_attention_bias_type="alibi", alibi_slopes=torch.ones(3, device=device))


@pytest.mark.parametrize(
    ("options", "reader"),
    [
        ({"score_mod_bprop": lambda *_: None}, "score_mod"),
        ({"score_mod_tensors": {}}, "score_mod"),
        ({"score_mod_bprop_tensors": {}}, "score_mod_bprop"),
    ],
)
def test_score_mod_gradient_or_tensors_without_score_mod_are_rejected(options, reader, device):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.* without {reader}; give both"):
        DotProductAttention(2, 4, qkv_format="bshd")(*qkv(device), **options)


def test_context_parallel_groups_of_one_rank_are_accepted_and_errors_change_nothing(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.ranks)
    alone, two = SimpleNamespace(ranks=1), SimpleNamespace(ranks=2)
    module = DotProductAttention(2, 4, cp_group=alone)
    module.set_context_parallel_group(None, None, None, "all_gather")
    assert module.cp_comm_type == "all_gather"
    with pytest.raises(
        ValueError, match=r"cp_group holds 2 groups, of sizes .2, 2.; cp_comm_type='p2p' takes one"
    ):
        module.set_context_parallel_group([two, two], [0, 1, 2, 3], None, "p2p")
    with pytest.raises(ValueError, match=r"cp_comm_type='a2a.p2p' takes a list of two"):
        module.set_context_parallel_group(two, [0, 1], None, "a2a+p2p")
    with pytest.raises(ValueError, match=r"cp_comm_type='ring'; choose one of p2p"):
        module.set_context_parallel_group(two, [0, 1], None, "ring")
    assert module.cp_group is None and module.cp_comm_type == "all_gather"


def test_checkpoints_with_moved_or_missing_extra_state_load(device):
    module = torch.nn.ModuleDict({"core_attention": DotProductAttention(2, 4)})
    assert list(module.state_dict()) == ["core_attention._extra_state"]
    assert not module.load_state_dict({}, strict=True).missing_keys
    older = {"core_attention.fused_attention._extra_state": torch.empty(0, dtype=torch.uint8)}
    assert not module.load_state_dict(older, strict=True).unexpected_keys


def test_tensor_parallel_ranks_use_their_own_alibi_slopes(device, monkeypatch):
    q, k, v = (
        torch.randn(2, 5, 4, 4, generator=torch.Generator().manual_seed(i)).to(device)
        for i in range(3)
    )
    options = {"core_attention_bias_type": "alibi"}
    full = DotProductAttention(4, 4, qkv_format="bshd")(q, k, v, **options)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    second = DotProductAttention(4, 4, qkv_format="bshd", tp_group=object())
    torch.testing.assert_close(
        second(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], **options), full[..., 8:]
    )


def test_packed_buffer_layouts_are_recognised(device):
    def layout(*tensors, qkv_format, argument="qkv_layer"):
        with pytest.warns(DeprecationWarning, match=f"pass the buffer as {argument}"):
            return get_qkv_layout(*tensors, qkv_format)[0]

    packed = torch.randn(5, 2, 3, 4, 8, device=device)
    assert layout(*packed.unbind(2), qkv_format="sbhd") == "sb3hd"
    packed = torch.randn(5, 2, 4, 3, 8, device=device)
    assert layout(*packed.unbind(3), qkv_format="bshd") == "bsh3d"
    q, kv = torch.randn(10, 4, 8, device=device), torch.randn(10, 2, 4, 8, device=device)
    assert layout(q, *kv.unbind(1), qkv_format="thd", argument="kv_layer") == "thd_t2hd"
    kv = torch.randn(10, 4, 2, 8, device=device)
    assert layout(q, *kv.unbind(2), qkv_format="thd", argument="kv_layer") == "thd_th2d"
    separate = torch.randn(3, 5, 2, 4, 8, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_qkv_layout(*separate, "sbhd")[0] == "sbhd_sbhd_sbhd"
    name, q, k, v, *formats = get_qkv_layout(*(x.transpose(0, 1) for x in separate), "bshd")
    assert (
        name == "bshd_bshd_bshd"
        and all(x.is_contiguous() for x in (q, k, v))
        and formats == ["bshd"] * 2
    )
    assert get_qkv_layout(q, k, v, "sbhd", inference_params=object())[::4] == ("sbhd_2bshd", "sbhd")


def test_cumulative_lengths_of_a_padding_mask(device):
    got = get_cu_seqlens(padding_mask([2, 0, 3], 4, device))
    assert got.tolist() == [0, 2, 2, 5] and got.dtype == torch.int32
    assert utils.check_set_window_size is check_set_window_size
