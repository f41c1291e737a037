"""The Triton kernels against the reference on the same GPU and on the CPU, bit for bit."""

from __future__ import annotations

import pytest
import torch

from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.formats import (
    BLOCK_1D,
    BLOCK_2D,
    E2M1,
    E4M3,
    E5M2,
    FLOAT8,
    MXFP8,
    NVFP4,
)
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.primitives.quantize import (
    TABLE,
    Quantized,
    QuantizeRequest,
    QuantizeSpec,
    quantize,
)
from transformer_engine.pytorch.primitives.quantize.backends import TRITON
from transformer_engine.pytorch.runtime import launching

SPECS = {
    f"{form.name}-{element.name}-{direction}{'-power-of-two' * power}": QuantizeSpec(
        form,
        element,
        rowwise=direction != "columns",
        columnwise=direction != "rows",
        power_of_two=power,
    )
    for form in (FLOAT8, BLOCK_1D, BLOCK_2D)
    for element in (E4M3, E5M2)
    for direction in ("rows", "columns", "both")
    for power in (False, True)
}
SPECS |= {
    f"mxfp8-{element.name}-{direction}{'-square' * square}": QuantizeSpec(
        MXFP8,
        element,
        rowwise=direction != "columns",
        columnwise=direction != "rows",
        two_dimensional=square,
    )
    for element in (E4M3, E5M2)
    for direction in ("rows", "columns", "both")
    for square in (False, True)
}
SPECS |= {
    f"nvfp4-{direction}-{variant}{'-stochastic' * stochastic}": QuantizeSpec(
        NVFP4,
        E2M1,
        rowwise=direction != "columns",
        columnwise=direction != "rows",
        two_dimensional=variant == "square",
        hadamard=variant == "hadamard",
        stochastic=stochastic,
    )
    for direction in ("rows", "columns", "both")
    for variant in ("plain", "square", "hadamard")
    for stochastic in (False, True)
}
EPSILON = {
    form.name + "-epsilon": QuantizeSpec(form, E4M3, columnwise=True, epsilon=0.5)
    for form in (FLOAT8, BLOCK_1D, BLOCK_2D)
}
SPECS |= EPSILON

# Around the tiles of 32, 64, 128 and 256 rows or columns; extents odd, even, and multiples of 16.
SHAPES = [(1, 1), (128, 128), (129, 130), (130, 127), (80, 272), (257, 65), (512, 2048)]
CONTENTS = ("normal", "special", "tiny", "huge", "zero")


def matrix(shape: tuple[int, int], dtype: torch.dtype, content: str) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(shape[0] * 31 + shape[1])
    x = torch.randn(shape, device="cuda", generator=generator)
    rows = torch.arange(shape[0], device="cuda") % 7 - 3.0
    x = x * torch.exp2(rows * 4)[:, None]
    if content == "special":
        x[0, 0], x[-1, -1], x[shape[0] // 2, shape[1] // 3] = torch.nan, torch.inf, -torch.inf
    elif content == "tiny":
        x = x * 2.0**-126
    elif content == "huge":
        x = x * 2.0**113
    elif content == "zero":
        x = x * 0.0
    return x.to(dtype)


def assert_same(actual: Quantized, expected: Quantized) -> None:
    for name in Quantized._fields:
        a, e = getattr(actual, name), getattr(expected, name)
        assert (a is None) == (e is None), name
        if a is None:
            continue
        assert a.shape == e.shape and a.dtype == e.dtype, (name, a.shape, e.shape, a.dtype, e.dtype)
        a, e = a.cpu(), e.cpu()
        if e.is_floating_point():
            bits = torch.uint8 if e.element_size() == 1 else torch.int32
            number = ~e.to(torch.float32).isnan()
            assert torch.equal(a.to(torch.float32).isnan(), ~number), f"{name}: NaN elsewhere"
            a, e = a.contiguous().view(bits)[number], e.contiguous().view(bits)[number]
        assert torch.equal(a, e), f"{name}: {int((a != e).sum())} of {e.numel()} differ"


def fits(spec: QuantizeSpec, shape: tuple[int, int]) -> bool:
    if spec.format != NVFP4:
        return True
    unit = 16 if spec.hadamard else 2
    return not (spec.rowwise and shape[1] % 2) and not (spec.columnwise and shape[0] % unit)


def uniform(spec: QuantizeSpec, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not spec.stochastic:
        return None
    return torch.rand(shape, device="cuda"), torch.rand(shape[::-1], device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in SPECS]
    + [
        (name, dtype)
        for name in SPECS
        if "-both" in name
        for dtype in (torch.float16, torch.float32)
    ],
    ids=str,
)
def test_every_shape_and_content_equals_the_reference_bitwise(name, dtype):
    spec = SPECS[name]
    for shape in SHAPES:
        if not fits(spec, shape):
            continue
        for content in CONTENTS if shape[0] < 512 else ("normal",):
            x = matrix(shape, dtype, content)
            random = uniform(spec, shape)
            with use_backend(quantize="triton"):
                actual = quantize(x, spec, random=random)
            with use_backend(quantize="reference"):
                expected = quantize(x, spec, random=random)
            try:
                assert_same(actual, expected)
            except AssertionError as error:
                raise AssertionError(f"{list(shape)} {content}: {error}") from error


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SPECS if "e4m3" in name])
@pytest.mark.parametrize("shape", [(2050, 2070), (2049, 2063), (2048, 4096)], ids=str)
def test_large_matrices_with_larger_tiles_equal_the_reference_bitwise(name, shape):
    x = matrix(shape, torch.bfloat16, "special")
    actual = quantize(x, SPECS[name])
    with use_backend(quantize="reference"):
        assert_same(actual, quantize(x, SPECS[name]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in SPECS if name.endswith(("-both", "-both-plain"))]
)
def test_gpu_results_equal_cpu_results(name):
    spec = SPECS[name]
    for shape in ((128, 128), (130, 258)):
        x = matrix(shape, torch.bfloat16, "special")
        assert_same(quantize(x, spec), quantize(x.cpu(), spec))


@pytest.mark.gpu
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("content", CONTENTS)
def test_an_explicit_scale_is_applied_and_amax_is_still_reported(columnwise, content):
    spec = QuantizeSpec(FLOAT8, E4M3, columnwise=columnwise)
    scale = torch.tensor([0.37], device="cuda")
    for shape in SHAPES:
        x = matrix(shape, torch.bfloat16, content)
        with use_backend(quantize="reference"):
            expected = quantize(x, spec, multiplier=scale)
        assert_same(quantize(x, spec, multiplier=scale), expected)


@pytest.mark.gpu
def test_an_explicit_amax_is_used_and_returned():
    spec = QuantizeSpec(FLOAT8, E5M2, columnwise=True)
    x = matrix((257, 130), torch.bfloat16, "normal")
    for value in (3.0, 0.0, float("nan"), float("inf"), -1.0, 1e-40):
        amax = torch.tensor([value], device="cuda")
        with use_backend(quantize="reference"):
            expected = quantize(x, spec, amax=amax)
        actual = quantize(x, spec, amax=amax)
        assert actual.amax is amax
        assert_same(actual, expected)


@pytest.mark.gpu
def test_strided_and_misaligned_inputs_equal_their_contiguous_copies():
    spec = QuantizeSpec(BLOCK_1D, E4M3, columnwise=True)
    wide = matrix((256, 260), torch.bfloat16, "normal")
    for x in (wide[:, :130], wide.t(), wide[1:], wide.flatten()[1 : 1 + 128 * 256].view(128, 256)):
        assert_same(quantize(x, spec), quantize(x.clone().contiguous(), spec))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_an_empty_matrix_has_empty_codes(shape):
    result = quantize(
        torch.empty(shape, device="cuda", dtype=torch.bfloat16),
        QuantizeSpec(FLOAT8, E4M3, columnwise=True),
    )
    assert result.codes.shape == shape and result.codes_t.shape == shape[::-1]
    assert result.amax.item() == 0.0


@pytest.mark.gpu
def test_row_scales_have_the_block_products_layout():
    result = quantize(
        matrix((256, 384), torch.bfloat16, "normal"), QuantizeSpec(BLOCK_1D, E4M3, columnwise=True)
    )
    assert result.scale.stride() == (1, 256) and result.scale_t.stride() == (1, 384)


@pytest.mark.gpu
def test_amax_tensors_of_two_calls_are_independent():
    spec = QuantizeSpec(FLOAT8, E4M3)
    first = quantize(torch.full((64, 64), 3.0, device="cuda"), spec)
    version = first.amax._version
    second = quantize(torch.full((64, 64), 5.0, device="cuda"), spec)
    second.amax.add_(1.0)
    assert (first.amax.item(), second.amax.item()) == (3.0, 6.0)
    assert first.amax._version == version


@pytest.mark.gpu
def test_a_replayed_graph_records_each_replays_amax():
    spec = QuantizeSpec(FLOAT8, E4M3, columnwise=True)
    x = torch.full((128, 256), 7.0, device="cuda", dtype=torch.bfloat16)
    quantize(x, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = quantize(x, spec)
    for value in (9.0, 2.0):
        x.fill_(value)
        graph.replay()
        assert result.amax.item() == value
        assert_same(result, quantize(x, spec))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SPECS if "both" in name and "e5m2" not in name])
def test_a_compiled_full_graph_keeps_the_kernels(name):
    spec = SPECS[name]
    x = matrix((256, 512), torch.bfloat16, "normal")
    random = uniform(spec, (256, 512))

    def step(x):
        return tuple(field for field in quantize(x * 2, spec, random=random) if field is not None)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    for actual, expected in zip(compiled, step(x), strict=True):
        assert actual.stride() == expected.stride()
        assert torch.equal(
            actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
        )


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", torch.bfloat16, "needs a CUDA device"), ("cuda", torch.float64, "float64")],
)
def test_unsupported_requests_are_rejected_with_the_reason(device, dtype, reason, monkeypatch):
    monkeypatch.setattr(launching, "unavailable_reason", lambda hardware: None)
    request = QuantizeRequest(QuantizeSpec(FLOAT8, E4M3), (16, 16), dtype, torch.device(device))
    result = TRITON.unsupported_reason(request)
    assert result is not None and reason in result


def test_a_missing_triton_is_a_rejection(monkeypatch):
    monkeypatch.setattr(launching, "unavailable_reason", lambda hardware: "triton is not installed")
    request = QuantizeRequest(
        QuantizeSpec(FLOAT8, E4M3), (16, 16), torch.bfloat16, torch.device("cuda")
    )
    assert TRITON.unsupported_reason(request) == "triton is not installed"
    assert TABLE.backends[0] is TRITON


@pytest.mark.parametrize(
    ("capability", "rejected"),
    [((7, 5), True), ((8, 0), False), ((8, 9), False), ((9, 0), False), ((10, 0), False)],
)
def test_architectures_without_cast_kernels_are_rejected(capability, rejected, monkeypatch):
    monkeypatch.setattr(launching, "unavailable_reason", lambda hardware: None)
    monkeypatch.setattr(launching, "current_hardware", lambda: nvidia(*capability))
    request = QuantizeRequest(
        QuantizeSpec(FLOAT8, E4M3), (16, 16), torch.bfloat16, torch.device("cuda")
    )
    reason = TRITON.unsupported_reason(request)
    assert (reason is not None) == rejected
    assert reason is None or f"{capability[0]}.{capability[1]}" in reason
