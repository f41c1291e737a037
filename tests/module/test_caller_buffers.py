"""Caller buffers in GroupedLinear: output and input gradient are written into the caller's memory."""

from __future__ import annotations

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

SPLITS = [16, 0, 32]


def make_layer(device, dtype=torch.float32, **options):
    return te.GroupedLinear(3, 64, 32, device=device, params_dtype=dtype, **options)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=lambda r: type(r).__name__)
def test_results_are_written_into_the_buffers_and_share_them(recipe, joint, device, monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1" if joint else "0")
    dtype = torch.bfloat16 if joint else torch.float32
    layer = make_layer(device, dtype)
    x = torch.randn(48, 64, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(48, 32, device=device, dtype=dtype)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        expected = layer(x, SPLITS)
    expected.backward(grad)
    want_grad, x.grad = x.grad, None
    want_weights = [p.grad.clone() for p in layer.parameters()]
    out = torch.full((48, 32), float("nan"), device=device, dtype=dtype)
    dgrad_out = torch.full((48, 64), float("nan"), device=device, dtype=dtype)
    for _ in range(2):  # a buffer is reused in every step
        x.grad = None
        layer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, SPLITS, out=out, dgrad_out=dgrad_out)
        assert y.data_ptr() == out.data_ptr() and not out.requires_grad and y.requires_grad
        assert torch.equal(out, expected)
        y.backward(grad)
        assert torch.equal(dgrad_out, want_grad) and torch.equal(x.grad, want_grad)
        for p, reference in zip(layer.parameters(), want_weights, strict=True):
            assert torch.equal(p.grad, reference)
        out.fill_(float("nan"))


def test_leading_dimensions_and_inference_support_buffers(device):
    layer = make_layer(device, return_bias=True)
    x = torch.randn(4, 12, 64, device=device)
    out = torch.empty(4, 12, 32, device=device)
    with torch.no_grad():
        y, biases = layer(x, SPLITS, None, out)
        expected, _ = layer(x, SPLITS)
    assert torch.equal(out, expected) and y.data_ptr() == out.data_ptr() and len(biases) == 3


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (lambda d: torch.empty(48, 31, device=d), r"out is \[48, 31\], the result \[48, 32\]"),
        (lambda d: torch.empty(48, 32, device=d).bfloat16(), r"out is torch.bfloat16 on"),
        (lambda d: torch.empty(32, 48, device=d).t(), "out is not contiguous"),
        (lambda d: torch.empty(48, 32, device=d, requires_grad=True), "out requires a gradient"),
    ],
)
def test_a_mismatched_buffer_raises_and_nothing_is_written(buffer, words, device):
    layer = make_layer(device)
    x = torch.randn(48, 64, device=device, requires_grad=True)
    argument = buffer(device)
    with torch.no_grad():
        argument.fill_(7.0)
    with pytest.raises(ValueError, match=words):
        layer(x, SPLITS, out=argument)
    assert (argument == 7.0).all()
    with pytest.raises(ValueError, match="dgrad_out is"):
        layer(x, SPLITS, dgrad_out=torch.empty(48, 32, device=device))
    with pytest.raises(TypeError, match="out is a list"):
        layer(x, SPLITS, out=[argument])


def overlapping(case, device, dtype=torch.float32):
    """input, out and dgrad_out, [48, 64] each, two of which share memory."""
    memory = torch.randn(3, 48 * 64, device=device, dtype=dtype)
    x, out, dgrad_out = memory.clone().view(3, 48, 64)
    flat = memory.view(-1)
    if case == "out is the input":
        x = out
    elif case == "dgrad_out is the input":
        x = dgrad_out
    elif case == "out begins in the middle of the input":
        x, out = flat[: 48 * 64].view(48, 64), flat[24 * 64 :][: 48 * 64].view(48, 64)
    elif case == "out lies over rows of a strided input":
        x, out = memory.view(48, 192)[:, 64:128], flat[: 48 * 64].view(48, 64)
    elif case == "out has another storage over the input's memory":
        x = flat[: 48 * 64].view(48, 64)
        out = torch.from_dlpack(x.detach())
    return x.detach().requires_grad_(), out, dgrad_out


@pytest.mark.parametrize(
    "case",
    [
        "out is the input",
        "dgrad_out is the input",
        "out begins in the middle of the input",
        "out lies over rows of a strided input",
        "out has another storage over the input's memory",
    ],
)
def test_a_buffer_over_the_input_raises_before_anything_is_written(case, device):
    layer = te.GroupedLinear(3, 64, 64, device=device, params_dtype=torch.float32)
    x, out, dgrad_out = overlapping(case, device)
    before = x.detach().clone(), out.clone(), dgrad_out.clone()
    name = "dgrad_out" if case.startswith("dgrad_out") else "out"
    with pytest.raises(
        ValueError, match=f"^{name} shares memory with the input, .* separate memory"
    ):
        layer(x, SPLITS, out=out, dgrad_out=dgrad_out)
    for value, was in zip((x, out, dgrad_out), before, strict=True):
        assert torch.equal(value, was)


def test_a_buffer_over_a_parameter_raises(device):
    layer = te.GroupedLinear(2, 48, 48, device=device, params_dtype=torch.float32)
    x = torch.randn(48, 48, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="out shares memory with weight1"):
        layer(x, [16, 32], out=layer.weight1.data)
    with pytest.raises(ValueError, match="dgrad_out shares memory with weight0"):
        layer(x, [16, 32], dgrad_out=layer.weight0.data)


def test_buffers_between_the_rows_of_a_strided_input_are_accepted(device):
    layer = te.GroupedLinear(3, 64, 64, device=device, params_dtype=torch.float32)
    memory = torch.randn(2 * 48 * 64 + 48 * 64, device=device)
    x = memory.as_strided((48, 64), (3 * 64, 1))[
        :1
    ].detach()  # rows 0 and then a gap of 128 elements
    y = layer(x, [1, 0, 0], out=memory[64:128].view(1, 64))
    assert torch.equal(y, layer(x, [1, 0, 0]))


def test_dgrad_out_over_an_input_without_gradient_has_no_effect(device):
    layer = te.GroupedLinear(3, 64, 64, device=device, params_dtype=torch.float32)
    x = torch.randn(48, 64, device=device)
    expected, was = layer(x, SPLITS), x.clone()
    layer(x, SPLITS, dgrad_out=x).sum().backward()
    assert torch.equal(x, was) and torch.equal(layer(x, SPLITS), expected)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("shared", ["one dgrad_out for two layers", "out and dgrad_out"])
def test_a_gradient_in_dgrad_outs_memory_is_read_before_it_is_overwritten(
    shared, joint, device, monkeypatch
):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1" if joint else "0")
    first, second = (
        te.GroupedLinear(3, 64, 64, device=device, params_dtype=torch.bfloat16) for _ in "ab"
    )
    x = torch.randn(48, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.arange(48, device=device).view(1, 48)

    def gradients(out, dgrad_out):
        if shared == "one dgrad_out for two layers":
            y = second(first(x, SPLITS, dgrad_out=dgrad_out), SPLITS, dgrad_out=dgrad_out)
        else:  # the loss computes its gradient in the logits' memory
            y = first(x, SPLITS, out=out, dgrad_out=dgrad_out)
        te.parallel_cross_entropy(y.view(1, 48, 64), target, overwrite_input=True).sum().backward()
        results = [p.grad for p in (x, *first.parameters(), *second.parameters())]
        x.grad = None
        first.zero_grad()
        second.zero_grad()
        return results

    expected, buffer = gradients(None, None), torch.empty_like(x)
    for grad, reference in zip(gradients(buffer, buffer), expected, strict=True):
        assert (grad is None and reference is None) or torch.equal(grad, reference)


@pytest.mark.parametrize("joint", [False, True])
def test_an_output_that_a_later_pass_overwrote_raises_in_the_backward(joint, device, monkeypatch):
    monkeypatch.setenv("NVTE_USE_CUTLASS_GROUPED_GEMM", "1" if joint else "0")
    layer = te.GroupedLinear(3, 64, 64, device=device, params_dtype=torch.bfloat16)
    x = torch.randn(48, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = torch.empty_like(x)
    first = (layer(x, SPLITS, out=out) ** 2).sum()
    (layer(x + 1.0, SPLITS, out=out) ** 2).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_buffers_work_in_inference_mode(device):
    layer = te.GroupedLinear(3, 64, 64, device=device, params_dtype=torch.float32)
    with torch.inference_mode():
        x = torch.randn(48, 64, device=device)
        out = torch.empty_like(x)
        assert torch.equal(layer(x, SPLITS, out=out), layer(x, SPLITS)) and torch.equal(
            out, layer(x, SPLITS)
        )


@pytest.mark.parametrize("detached", [False, True])
def test_input_and_output_may_be_parts_of_one_workspace(detached, device):
    layer = te.GroupedLinear(3, 32, 32, device=device)
    rows = [8, 0, 24]
    workspace = torch.randn(96, 32, device=device)
    x = workspace[:32].detach().requires_grad_()
    twin = x.detach().clone().requires_grad_()
    out = workspace[32:64].detach() if detached else workspace[32:64]
    grad = torch.randn(32, 32, device=device)
    layer(x, rows, out=out, dgrad_out=workspace[64:]).backward(grad)
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    expected = layer(twin, rows)
    expected.backward(grad)
    assert torch.equal(out, expected) and torch.equal(x.grad, twin.grad)
    assert all(map(torch.equal, gradients, (parameter.grad for parameter in layer.parameters())))
