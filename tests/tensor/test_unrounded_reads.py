"""Values of a quantized tensor reach wider tensors unrounded: the nominal dtype, bfloat16, is not an intermediate."""

from __future__ import annotations

import pytest
import torch

from tests.tensor.quantizer_cases import CASES, E4M3, QUANTIZED, values
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, HybridQuantizer

SHAPE = (128, 64)
WIDE = (torch.float32, torch.float64, torch.float16)


def create_target(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(SHAPE, dtype=dtype, device=device)


def write_slice(target, source):
    target[:] = source


def write_rows(target, source):
    target[32:96] = source[32:96]
    target[:32].copy_(source[:32])
    target[96:].copy_(source[96:])


def load_module_weight(target, source):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(target, requires_grad=False)
    module.load_state_dict({"weight": source})


WAYS = {
    "copy_": lambda target, source: target.copy_(source),
    "slice": write_slice,
    "rows": write_rows,
    "data": lambda target, source: target.data.copy_(source),
    "foreach_copy": lambda target, source: torch._foreach_copy_([target], [source]),
    "foreach_add": lambda target, source: torch._foreach_add_([target], [source]),
    "add_": lambda target, source: target.add_(source),
    "sub_": lambda target, source: target.sub_(source).neg_(),
    "out": lambda target, source: torch.add(target, source, out=target),
    "state dict": load_module_weight,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("name", ["current", "delayed", "nvfp4", "hybrid"])
def test_wider_targets_receive_every_bit(name, dtype, way, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact = source.dequantize(dtype=torch.float32)
    target = create_target(dtype, device)
    WAYS[way](target, source)
    assert torch.equal(target, exact.to(dtype))


VIEWS = {
    "columns": lambda t: t[:, 3:40],
    "transpose": lambda t: t.t(),
    "flat": lambda t: t.view(-1),
    "flat chunk": lambda t: t.view(-1).chunk(5)[2],
    "row of a transpose": lambda t: t.t()[7],
    "element": lambda t: t[5, 6],
    "block": lambda t: t[5:9, 3:40],
    "odd rows": lambda t: t[1::2],
    "diagonal": lambda t: t.diagonal(),
    "split columns": lambda t: t.split(24, dim=1)[1],
}
READS = {
    **{name: WAYS[name] for name in ("copy_", "data", "foreach_copy", "state dict")},
    "to": lambda target, view: view.to(target.dtype),
    "to like": lambda target, view: view.to(target),
    "type": lambda target, view: view.type(target.dtype),
    "method": lambda target, view: METHODS[target.dtype](view),
}
READS_WITH_DIMENSIONS = {name: WAYS[name] for name in ("slice", "add_", "foreach_add", "out")} | {
    "stack": lambda target, view: torch.stack([target, view])[1],
    "rows": lambda target, view: [
        target.copy_(view) if i else target[0].copy_(view[0]) for i in range(2)
    ],
}
METHODS = {
    torch.float32: torch.Tensor.float,
    torch.float64: torch.Tensor.double,
    torch.float16: torch.Tensor.half,
}


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["current", "nvfp4", "block_1d", "hybrid"])
def test_views_without_codes_reach_wider_targets_unrounded(name, view, dtype, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact = VIEWS[view](source.dequantize(dtype=torch.float32))
    for way, read in (READS | (READS_WITH_DIMENSIONS if exact.dim() else {})).items():
        target = torch.zeros(exact.shape, dtype=dtype, device=device)
        result = read(target, VIEWS[view](source))
        written = result if isinstance(result, torch.Tensor) else target
        assert torch.equal(written.to(dtype), exact.to(dtype)), way


@pytest.mark.parametrize("name", ["current", "nvfp4", "mxfp8"])
def test_views_of_parameters_are_read_unrounded_with_gradients(name, device):
    parameter = torch.nn.Parameter(CASES[name](device)(values(device, *SHAPE) * 0.37))
    exact = parameter.detach().dequantize(dtype=torch.float32)  # pyright: ignore[reportCallIssue]
    for view in (lambda t: t.t(), lambda t: t[:, 3:40]):
        part, wide = view(parameter), view(exact)
        assert torch.equal(part.float(), wide)
        result = part + torch.zeros_like(wide)
        assert torch.equal(result, wide)
        result.sum().backward()
        expected = torch.zeros_like(exact)
        view(expected).fill_(1.0)
        assert parameter.grad is not None and torch.equal(parameter.grad.float(), expected)
        parameter.grad = None


@pytest.mark.parametrize("name", ["current", "nvfp4", "mxfp8"])
def test_writes_to_views_of_views_raise_before_they_change_anything(name, device):
    source = CASES[name](device)(values(device, *SHAPE))
    for view in (source[5:9, 3:40], source.t()[3:9], source[5, 6], source[:, 3:40][1]):
        before = view.clone()
        for write in (lambda t: t.fill_(0), lambda t: t.add_(1), lambda t: torch.add(t, 1, out=t)):
            with pytest.raises(NotImplementedError, match=r"writes to .* which it would not reach"):
                write(view)
        assert torch.equal(view, before)


def test_gradients_of_products_with_views_are_unrounded(device):
    source = CASES["current"](device)(values(device, *SHAPE) * 0.37)
    exact = source.dequantize(dtype=torch.float32).t()
    wide = torch.ones(exact.shape, device=device, requires_grad=True)
    (wide * source.t()).sum().backward()
    assert wide.grad is not None and torch.equal(wide.grad, exact)


def test_views_without_codes_keep_the_values_of_their_time(device):
    """A view that is a copy does not follow later writes, in any dtype."""
    source = CASES["current"](device)(values(device, *SHAPE) * 0.37)
    before = source.dequantize(dtype=torch.float32).t()
    view = source.t()
    source.copy_(torch.ones(SHAPE, device=device))
    assert torch.equal(view.float(), before)
    assert torch.equal(view, before.bfloat16())


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_reductions_read_values_in_their_dtype(name, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact = source.dequantize(dtype=torch.float32)
    assert torch.equal(source.sum(0, dtype=torch.float32), exact.sum(0))
    assert torch.equal(source[:, 3:40].sum(0, dtype=torch.float32), exact[:, 3:40].sum(0))


def test_codes_quantize_unrounded_views(device):
    source = CASES["current"](device)(values(device, *SHAPE) * 0.37)
    copied, expected = (CASES["mxfp8"](device)(values(device, 64, 128)) for _ in range(2))
    copied.copy_(source.t())
    expected.copy_(source.dequantize(dtype=torch.float32).t())
    assert torch.equal(copied.dequantize(), expected.dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_functions_promote_before_they_round(name, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact, zeros = source.dequantize(dtype=torch.float32), create_target(torch.float32, device)
    assert torch.equal(torch.add(zeros, source), exact)
    assert torch.equal(zeros + source, exact)
    assert torch.equal(torch.cat([source, zeros])[: SHAPE[0]], exact)
    assert torch.equal(torch.where(zeros == 0, source, zeros), exact)


def test_a_number_does_not_promote(device):
    """As for plain tensors: a tensor without dimensions does not widen the result."""
    source = CASES["current"](device)(values(device, *SHAPE))
    assert (source + torch.ones((), device=device)).dtype == torch.bfloat16
    assert torch.equal(source * 1.0, source.dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_results_of_float64_tensors_are_float64(name, device):
    source = CASES[name](device)(values(device, *SHAPE) * 0.37)
    exact, wide = source.dequantize(dtype=torch.float32).double(), source.to(torch.float64)
    zeros = create_target(torch.float64, device)
    for result in (
        wide * 1.0,
        wide + 0,
        zeros.lerp(wide, 1.0),
        torch.maximum(wide, wide),
        torch.cat([wide]),
    ):
        assert result.dtype == torch.float64
        assert torch.equal(result, exact)


def test_narrow_targets_keep_their_dtype(device):
    source = CASES["current"](device)(values(device, *SHAPE))
    target = create_target(torch.bfloat16, device)
    assert torch.equal(target.copy_(source), source.dequantize())


@pytest.mark.parametrize("name", ["mxfp8", "block_2d", "nvfp4"])
def test_codes_of_another_format_quantize_unrounded_values(name, device):
    source = CASES["current"](device)(values(device, *SHAPE) * 0.37)
    copied = CASES[name](device)(values(device, *SHAPE))
    expected = CASES[name](device)(values(device, *SHAPE))
    copied.copy_(source)
    expected.copy_(source.dequantize(dtype=torch.float32))
    assert copied.dtype == torch.bfloat16
    assert torch.equal(copied.dequantize(), expected.dequantize())


FOREACH = {
    "add": lambda sources, rest: torch._foreach_add(sources, rest),
    "addcmul": lambda sources, rest: torch._foreach_addcmul(sources, rest, rest),
    "norm": lambda sources, rest: torch._foreach_norm(sources),
    "mul by a tensor": lambda sources, rest: torch._foreach_mul(sources, torch.tensor(2.0)),
}


@pytest.mark.parametrize("way", FOREACH)
def test_each_entry_of_a_list_is_promoted_alone(way, device):
    """A float32 tensor in the lists does not change the dtype of another entry's result."""
    source = CASES["current"](device)(values(device, *SHAPE))
    wide, rest = (
        torch.randn(SHAPE, device=device),
        [torch.randn(SHAPE, device=device) for _ in range(2)],
    )
    rest[0] = rest[0].bfloat16()
    results = FOREACH[way]([source, wide], rest)
    expected = FOREACH[way]([source.dequantize(), wide], rest)
    assert [result.dtype for result in results] == [result.dtype for result in expected]
    assert all(map(torch.equal, results, expected))


def test_an_item_assignment_leaves_other_values(device):
    """A single element cuts a block, so that the whole tensor is quantized again, from unrounded values."""
    tensor = CASES["current"](device)(values(device, *SHAPE) * 0.37)
    before = tensor.dequantize(dtype=torch.float32)
    tensor[3, 5] = 0.0
    after = tensor.dequantize(dtype=torch.float32)
    after[3, 5] = before[3, 5]
    assert torch.equal(after, before)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("start", "stop", "offset", "rows"), [(0, 63, 1, 63), (8, 40, 0, 32), (8, 40, 4, 40)]
)
def test_as_strided_of_a_narrowed_tensor_reaches_the_rows_behind_it(
    hybrid, start, stop, offset, rows, device
):
    def one():
        return Float8CurrentScalingQuantizer(E4M3, device)

    full = (HybridQuantizer(one(), one()) if hybrid else one())(values(device, 64, 32))
    narrowed = torch.ops.aten.slice.Tensor(full, 0, start, stop)
    view = torch.ops.aten.as_strided.default(narrowed, (rows, 32), narrowed.stride(), offset * 32)
    first = start + offset
    assert view.shape == (rows, 32)
    assert torch.equal(view.dequantize(), full.dequantize()[first : first + rows])


def test_as_strided_beyond_the_whole_tensor_raises(device):
    full = Float8CurrentScalingQuantizer(E4M3, device)(values(device, 64, 32))
    narrowed = torch.ops.aten.slice.Tensor(full, 0, 0, 63)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.ops.aten.as_strided.default(narrowed, (64, 32), narrowed.stride(), 32)
