"""The Triton attention against float64; without a GPU its kernels run in Triton's interpreter, on small sizes."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from tests.attention.triton_cases import PLAIN, Case, build, literal, pairs, philox_kept
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives.attention import mask, reference
from transformer_engine.pytorch.primitives.attention.backends import triton, triton_decode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GROWN = 1 if INTERPRETED else 7

runs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED),
    reason="needs a CUDA device or TRITON_INTERPRET=1",
)


def assert_as_accurate(
    actual: torch.Tensor,
    exact: torch.Tensor,
    plain: torch.Tensor,
    name: str = "output",
    rounding: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Assert that the error of actual is at most twice plain PyTorch's error in the same dtype, in norms.

    rounding: for a gradient that is a sum, which may nearly cancel, the contribution from half a unit in each
    term's last place; in float32 two units, because there the partial sums are rounded as coarsely as the
    terms.
    """
    norm = exact.double().norm()
    error = (actual.double() - exact.double()).norm()
    allowed = 2.0 * (plain.double() - exact.double()).norm() + 2e-6 * norm
    if rounding is not None:
        units = 2.0 if dtype == torch.float32 else 0.5
        allowed = allowed + units * torch.finfo(dtype).eps * rounding.norm()
    assert error <= allowed, (
        f"{name}: error {error / norm:.2e}, plain PyTorch {allowed / 2 / norm:.2e}"
    )


def compare(case: Case, device: torch.device) -> None:
    request, inputs = build(case, device, GROWN)
    attended = triton.forward(request, inputs)
    grad_output = torch.randn_like(attended.output) if case.gradient else None
    saved = None
    if case.dropout:
        assert attended.rng_state is not None
        shape = (case.batch, case.heads, request.seqlen_q, request.seqlen_kv)
        saved = philox_kept(attended.rng_state, shape, case.dropout)
    exact = literal(request, inputs, grad_output, torch.float64, saved)
    plain = literal(request, inputs, grad_output, case.dtype, saved)
    assert attended.output.dtype == case.dtype
    assert_as_accurate(attended.output, exact.output, plain.output)
    if case.max_logit:
        assert attended.max_logit is not None
        assert_as_accurate(attended.max_logit, exact.max_logit, plain.max_logit, "max_logit")
    if grad_output is None:
        return
    gradients = triton.backward(request, inputs, attended, grad_output)._asdict()
    for name, expected in exact.gradients.items():
        actual = gradients[name]
        assert actual is not None and actual.shape == expected.shape
        assert actual.dtype == getattr(inputs, name).dtype
        rounding = exact.rounding.get(name)
        assert_as_accurate(actual, expected, plain.gradients[name], name, rounding, case.dtype)


@runs_kernels
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_output_and_gradients_are_as_accurate_as_plain_pytorch(case, device):
    compare(case, device)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("case", pairs() if torch.cuda.is_available() else (), ids=str)
def test_every_two_options_work_together(case, device):
    compare(case, device)


@runs_kernels
def test_without_a_gradient_the_output_is_the_same(device):
    case = Case(
        "no gradient",
        mask="padding_causal",
        softmax="learnable",
        lengths_kv=(40, 23),
        max_logit=True,
    )
    request, inputs = build(case, device, GROWN)
    training = triton.forward(request, inputs)
    evaluating = triton.forward(dataclasses.replace(request, needs_gradient=False), inputs)
    assert torch.equal(training.output, evaluating.output)
    assert evaluating.lse is None


@runs_kernels
def test_lse_is_a_natural_logarithm_and_includes_the_sink(device):
    case = Case("lse", mask="padding", softmax="learnable", lengths_q=(40, 40), lengths_kv=(56, 31))
    request, inputs = build(case, device, GROWN)
    lse = triton.forward(request, inputs).lse
    q, k = (x.double().transpose(1, 2) for x in (inputs.q, inputs.k))
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * request.scale
    assert (
        inputs.lengths_kv is not None and inputs.lengths_q is not None and inputs.sink is not None
    )
    position = torch.arange(request.seqlen_kv, device=device)
    logits = logits.masked_fill((position >= inputs.lengths_kv[:, None])[:, None, None], -torch.inf)
    exact = torch.logaddexp(logits.logsumexp(-1), inputs.sink.double()[:, None])
    real = torch.arange(request.seqlen_q, device=device) < inputs.lengths_q[:, None]
    exact = torch.where(real[:, None], exact, inputs.sink.double()[:, None])
    assert lse is not None
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


@runs_kernels
def test_a_row_without_a_key_is_zero_with_lse_of_minus_infinity(device):
    case = Case("blind rows", mask="causal_bottom_right", size_q=56, size_kv=40)
    request, inputs = build(case, device, GROWN)
    attended = triton.forward(request, inputs)
    assert attended.lse is not None
    blind = request.seqlen_q - request.seqlen_kv
    assert (attended.output[:, :blind] == 0).all() and (
        attended.lse[..., :blind] == -torch.inf
    ).all()
    assert torch.isfinite(attended.lse[..., blind:]).all()
    gradients = triton.backward(request, inputs, attended, torch.ones_like(attended.output))
    assert (gradients.q[:, :blind] == 0).all()


@runs_kernels
def test_tokens_outside_all_sequences_get_zeros(device):
    case = Case("gaps", mask="padding_causal", form="thd", gaps=True, lengths_kv=(40, 23))
    request, inputs = build(case, device, GROWN)
    attended = triton.forward(request, inputs)
    gradients = triton.backward(request, inputs, attended, torch.ones_like(attended.output))
    for starts, lengths, tensors in (
        (inputs.starts_q, inputs.lengths_q, (attended.output, gradients.q)),
        (inputs.starts_kv, inputs.lengths_kv, (gradients.k, gradients.v)),
    ):
        assert starts is not None and lengths is not None
        position = torch.arange(tensors[0].shape[0], device=device)[:, None]
        outer = ~((position >= starts[:-1]) & (position < starts[:-1] + lengths)).any(1)
        assert int(outer.sum()) >= 13
        assert all((x[outer] == 0).all() for x in tensors)


@runs_kernels
def test_dropout_follows_torchs_seed_and_the_backward_replays_it(device):
    case = Case("dropout replays", dropout=0.5, size_kv=32, head=(32, 32))
    request, inputs = build(case, device, 1)
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        outputs.append(triton.forward(request, inputs))
    other = triton.forward(request, inputs)
    assert torch.equal(outputs[0].output, outputs[1].output)
    assert not torch.equal(outputs[0].output, other.output)
    # dv = p^T do with the dropped p: for do = e, dv shows the same pattern as the output for v = 1
    ones = inputs._replace(v=torch.ones_like(inputs.v))
    torch.manual_seed(7)
    row_sums = triton.forward(request, ones).output.float()
    gradients = triton.backward(request, inputs, outputs[0], torch.ones_like(outputs[0].output))
    torch.testing.assert_close(
        gradients.v.float().sum((0, 1)).sum(0), row_sums.sum((0, 1, 2)), rtol=2e-2, atol=0.5
    )


@runs_kernels
def test_two_runs_give_the_same_bits(device):
    case = Case(
        "repeat",
        mask="causal",
        batch=1,
        size_q=24,
        size_kv=24,
        bias="post_scale_bias",
        bias_shape=(0, 1, 1, 1),
        heads=4,
        groups=1,
    )
    request, inputs = build(case, device, GROWN)
    runs = []
    for _ in range(2):
        attended = triton.forward(request, inputs)
        grad_output = torch.ones_like(attended.output)
        runs.append((attended.output, *triton.backward(request, inputs, attended, grad_output)[:4]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@runs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["q", "k"])
def test_nan_and_infinities_reach_logits_and_denominators_as_in_the_reference(name, value, device):
    case = Case("special", mask="padding", mask_tensors=True, softmax="learnable", max_logit=True)
    call, inputs = build(case, device, 1)
    getattr(inputs, name)[0, 7, 0, 1] = value
    ours, original = triton.forward(call, inputs), reference.forward(call, inputs)
    close = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True}
    torch.testing.assert_close(ours.max_logit, original.max_logit, **close)
    torch.testing.assert_close(ours.lse, original.lse, **close)
    assert torch.equal(ours.output.isnan(), original.output.isnan())


STEP = Case(
    "a step",
    mask="padding_causal_bottom_right",
    size_q=1,
    lengths_q=(1, 1),
    heads=4,
    gradient=False,
)
DECODING = (
    dataclasses.replace(STEP, name="one token", groups=2),
    dataclasses.replace(STEP, name="one token, pages", page=16),
    dataclasses.replace(STEP, name="a chunk, pages", size_q=5, lengths_q=(5, 2), page=32),
    dataclasses.replace(STEP, name="pages of 24", size_q=2, lengths_q=(2, 1), page=24, heads=2),
    dataclasses.replace(
        STEP,
        name="packed",
        size_q=3,
        lengths_q=(3, 1),
        page=16,
        form="thd",
        gaps=True,
        softmax="learnable",
    ),
    dataclasses.replace(
        STEP, name="a window", window=(17, 0), size_q=2, lengths_q=(2, 1), softmax="off-by-one"
    ),
    dataclasses.replace(
        STEP, name="a window of 2^31 - 1", window=(2**31 - 1, 0), size_q=2, lengths_q=(2, 1)
    ),
    dataclasses.replace(
        STEP, name="alibi", bias="alibi", size_q=2, lengths_q=(2, 2), head=(48, 24)
    ),
    dataclasses.replace(
        STEP, name="no lengths", mask="no_mask", form="sbhd", groups=2, dtype=torch.float16
    ),
)


def decoding(case: Case, grown: int) -> Case:
    """Case with `grown` times as many keys and an unchanged number of queries."""
    return dataclasses.replace(
        case,
        size_kv=case.size_kv * grown,
        lengths_kv=tuple(length * grown for length in case.lengths_kv),
        window=case.window and (case.window[0] * grown, 0),
    )


@runs_kernels
@pytest.mark.parametrize(
    ("case", "splits"),
    # The interpreter is slow: there each case runs in one mode only.
    [(c, s) for n, c in enumerate(DECODING) for s in (0, 3) if not INTERPRETED or s == 3 * (n % 2)],
    ids=str,
)
def test_decoding_is_as_accurate_as_plain_pytorch(case, splits, device):
    case = decoding(case, GROWN)
    request, inputs = build(case, device, 1)
    request = dataclasses.replace(request, num_splits=splits)
    assert triton_decode.takes(request)
    output = triton.forward(request, inputs).output
    exact = literal(request, inputs, None, torch.float64, None)
    assert_as_accurate(
        output, exact.output, literal(request, inputs, None, case.dtype, None).output
    )


@runs_kernels
@pytest.mark.parametrize("page", [24, 64])
def test_a_long_chunk_reads_pages_too(page, device):
    case = Case(
        "prefill",
        mask="padding_causal_bottom_right",
        size_q=33,
        lengths_q=(33, 20),
        page=page,
        gradient=False,
        lengths_kv=(56, 41),
    )
    request, inputs = build(case, device, 1)
    assert not triton_decode.takes(request)
    exact = literal(request, inputs, None, torch.float64, None)
    plain = literal(request, inputs, None, case.dtype, None)
    assert_as_accurate(triton.forward(request, inputs).output, exact.output, plain.output)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [0, 64])
def test_a_captured_step_serves_other_lengths(page, device):
    case = Case(
        "graph",
        mask="padding_causal_bottom_right",
        size_q=1,
        lengths_q=(1, 1),
        page=page,
        gradient=False,
        size_kv=3000,
        lengths_kv=(2000, 100),
        heads=8,
        groups=2,
        head=(128, 128),
    )
    request, inputs = build(case, device, 1)
    triton.forward(request, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = triton.forward(request, inputs).output
    assert inputs.lengths_kv is not None
    for lengths in ((17, 3000), (1, 1500)):
        inputs.lengths_kv.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(captured, triton.forward(request, inputs).output)
        exact = literal(request, inputs, None, torch.float64, None)
        assert_as_accurate(
            captured, exact.output, literal(request, inputs, None, case.dtype, None).output
        )


@pytest.mark.gpu
@pytest.mark.parametrize("head", [(576, 512), (8, 8), (80, 80), (224, 160), (512, 512)], ids=str)
@pytest.mark.parametrize("size_q", [1, 150])
def test_unusual_head_sizes_are_computed_without_gradients(head, size_q, device):
    case = Case(
        "heads",
        mask="padding_causal_bottom_right",
        size_q=size_q,
        lengths_q=(size_q, 1),
        head=head,
        gradient=False,
        size_kv=300,
        lengths_kv=(290, 260),
        heads=4,
    )
    request, inputs = build(case, device, 1)
    exact = literal(request, inputs, None, torch.float64, None)
    plain = literal(request, inputs, None, case.dtype, None)
    assert_as_accurate(triton.forward(request, inputs).output, exact.output, plain.output)


def hopper_request(**changes):
    request, _ = build(Case("rejections"), torch.device("cpu"), 1)
    return dataclasses.replace(
        request, **{"device_type": "cuda", "hardware": nvidia(9, 0), **changes}
    )


def test_rejections_name_the_value_and_the_limit():
    assert triton.BACKEND.rejection_reason(hopper_request()) is None
    assert (
        triton.BACKEND.rejection_reason(
            hopper_request(head_dim_qk=576, head_dim_v=512, needs_gradient=False)
        )
        is None
    )
    for changes, words in (
        ({"device_type": "cpu"}, "on cpu"),
        ({"hardware": nvidia(7, 5)}, "7.5 has no triton kernels"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim_qk": 264}, "264 > 256 with"),
        ({"head_dim_qk": 640, "needs_gradient": False}, "640 > 576 without"),
        ({"page_size": 16}, "no gradient"),
        ({"seqlen_q": 0}, "empty"),
        ({"fp8": "current"}, "FP8"),
        ({"score_mod": max}, "score_mod"),
    ):
        reason = triton.BACKEND.rejection_reason(hopper_request(**changes))
        assert reason is not None and words in reason


@runs_kernels
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("chunks", [(130,), (1, 129), (100, 1, 1, 28), (64, 66)])
def test_batch_invariant_chunks_have_the_bits_of_the_whole_sequence(chunks, size, device):
    tokens = sum(chunks)
    case = Case(
        "whole",
        "causal",
        batch=1,
        size_q=tokens,
        size_kv=tokens,
        heads=2,
        groups=1,
        head=(size, size),
        gradient=False,
    )
    request, inputs = build(case, device, 1)
    request = dataclasses.replace(request, batch_invariant=True)
    full = triton.forward(request, inputs).output
    begin = 0
    for count in chunks:
        end = begin + count
        step = dataclasses.replace(
            request,
            seqlen_q=count,
            seqlen_kv=end,
            mask=mask.resolve("causal_bottom_right", window_size=None, bottom_right_diagonal=None),
            cached=True,
        )
        assert not triton_decode.takes(step)
        q, k, v = inputs.q[:, begin:end], inputs.k[:, :end], inputs.v[:, :end]
        part = triton.forward(step, inputs._replace(q=q, k=k, v=v)).output
        assert torch.equal(part, full[:, begin:end])
        begin = end


@runs_kernels
def test_batch_invariant_gradients_do_not_depend_on_the_other_sequences(device):
    case = Case("three", "causal", batch=3, size_q=70, size_kv=70, heads=4, groups=2)
    request, inputs = build(case, device, 1)
    request = dataclasses.replace(request, batch_invariant=True)
    attended = triton.forward(request, inputs)
    grad = torch.randn_like(attended.output)
    grads = triton.backward(request, inputs, attended, grad)
    for row in range(3):
        one = inputs._replace(**{name: getattr(inputs, name)[row : row + 1] for name in "qkv"})
        alone = dataclasses.replace(request, batch=1)
        result = triton.forward(alone, one)
        assert torch.equal(result.output, attended.output[row : row + 1])
        actual = triton.backward(alone, one, result, grad[row : row + 1])
        for name in "qkv":
            assert torch.equal(getattr(actual, name), getattr(grads, name)[row : row + 1]), name
