"""cuBLASLt plans: their descriptors, checked on a stand-in for the library, and the library itself on a GPU.

Longer than 400 lines because plans, their choice and their tuning share the stand-in and its records.
"""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch

from tests.primitives.cublaslt_on_cpu import ALGORITHMS, REJECTED, install
from transformer_engine.common import dispatch, formats
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.hardware import nvidia
from transformer_engine.common.memory import Memory
from transformer_engine.pytorch import autotune
from transformer_engine.pytorch.primitives.gemm import (
    TABLE,
    Epilogue,
    cublaslt,
    cublaslt_library,
    cublaslt_plan,
    gemm,
    plain,
    tuning,
)
from transformer_engine.pytorch.primitives.gemm.request import (
    GemmRequest,
    MatrixLayout,
    requests_tuning,
)
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import QuantizeSpec, dequantize, quantize

FLOAT8 = QuantizeSpec(formats.FLOAT8, formats.E4M3)
GRADIENT = QuantizeSpec(formats.FLOAT8, formats.E5M2)
BLOCK_1D = QuantizeSpec(formats.BLOCK_1D, formats.E4M3)
BLOCK_2D = QuantizeSpec(formats.BLOCK_2D, formats.E4M3)
GRADIENT_1D = QuantizeSpec(formats.BLOCK_1D, formats.E5M2)


@pytest.fixture
def library(monkeypatch):
    return install(monkeypatch)


def h200_request(a: Operand, b: Operand, epilogue: Epilogue) -> GemmRequest:
    """The request as it would be for the same tensors on an H200."""
    return dataclasses.replace(
        GemmRequest.of(a, b, epilogue), device="cuda", hardware=nvidia(9, 0), index=0
    )


def run(a: Operand, b: Operand, epilogue: Epilogue) -> torch.Tensor:
    request = h200_request(a, b, epilogue)
    assert cublaslt.unsupported_reason(request) is None
    return cublaslt.find_plan(request).run(a, b, epilogue)


def quantized(spec: QuantizeSpec, rows: int, depth: int, device="cpu") -> Operand:
    values = torch.randn(rows, depth, device=device)
    values[0] *= 30.0
    q = quantize(values.bfloat16(), spec)
    return Operand(q.codes, q.scale, spec.format, None, torch.bfloat16)


def dequantize_operand(x: Operand) -> torch.Tensor:
    return x.codes.float() if x.format is None else dequantize(x._replace(dtype=torch.float32))


def reference_product(a: Operand, b: Operand, bias=None) -> torch.Tensor:
    out = dequantize_operand(a) @ dequantize_operand(b).t()
    return out if bias is None else out + bias.float()


PAIRS = {
    "bf16": lambda: (plain(torch.randn(48, 64).bfloat16()), plain(torch.randn(32, 64).bfloat16())),
    "fp16": lambda: (plain(torch.randn(48, 64).half()), plain(torch.randn(32, 64).half())),
    "fp32": lambda: (plain(torch.randn(48, 64)), plain(torch.randn(32, 64))),
    "a.t": lambda: (
        plain(torch.randn(64, 48).bfloat16().t()),
        plain(torch.randn(32, 64).bfloat16()),
    ),
    "b.t": lambda: (
        plain(torch.randn(48, 64).bfloat16()),
        plain(torch.randn(64, 32).bfloat16().t()),
    ),
    "both.t": lambda: (
        plain(torch.randn(64, 48).bfloat16().t()),
        plain(torch.randn(64, 32).bfloat16().t()),
    ),
    "slices": lambda: (
        plain(torch.randn(48, 96).bfloat16()[:, :64]),
        plain(torch.randn(64, 80).bfloat16()[:, 16:48].t()),
    ),
    "odd": lambda: (plain(torch.randn(7, 5).bfloat16()), plain(torch.randn(3, 5).bfloat16())),
    "vector": lambda: (plain(torch.randn(1, 5).bfloat16()), plain(torch.randn(1, 5).bfloat16())),
    "float8": lambda: (quantized(FLOAT8, 48, 64), quantized(FLOAT8, 32, 64)),
    "e5m2 x e4m3": lambda: (quantized(GRADIENT, 48, 64), quantized(FLOAT8, 32, 64)),
    "1d x 2d": lambda: (quantized(BLOCK_1D, 48, 384), quantized(BLOCK_2D, 256, 384)),
    "2d x 1d": lambda: (quantized(BLOCK_2D, 256, 512), quantized(BLOCK_1D, 48, 512)),
    "1d x 1d": lambda: (quantized(BLOCK_1D, 48, 256), quantized(BLOCK_1D, 32, 256)),
    "e5m2 1d x 2d": lambda: (quantized(GRADIENT_1D, 48, 384), quantized(BLOCK_2D, 256, 384)),
    "2d x e5m2 1d": lambda: (quantized(BLOCK_2D, 256, 384), quantized(GRADIENT_1D, 48, 384)),
    "e5m2 1d x 1d": lambda: (quantized(GRADIENT_1D, 48, 256), quantized(BLOCK_1D, 32, 256)),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_a_plan_describes_the_product(library, pair, biased):
    a, b = PAIRS[pair]()
    dtype = a.dtype
    bias = torch.randn(b.rows).to(dtype) if biased else None
    out = run(a, b, Epilogue(dtype, bias))
    torch.testing.assert_close(out, reference_product(a, b, bias).to(dtype), rtol=1e-2, atol=1e-2)
    assert out.is_contiguous()


@pytest.mark.parametrize("pair", ["bf16", "both.t", "float8", "1d x 1d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_out_is_written_or_added_to_by_the_product_itself(library, pair, dtype):
    a, b = PAIRS[pair]()
    wide = torch.full((a.rows, b.rows + 16), 3.0, dtype=dtype)
    out = wide[:, : b.rows]
    exact = reference_product(a, b)
    assert run(a, b, Epilogue(torch.bfloat16, out=out)) is out
    torch.testing.assert_close(out, exact.to(dtype), rtol=1e-2, atol=1e-2)
    run(a, b, Epilogue(torch.bfloat16, out=out, accumulate=True))
    torch.testing.assert_close(out, (2 * exact).to(dtype), rtol=2e-2, atol=2e-2)
    assert (wide[:, b.rows :] == 3.0).all()


def test_a_bias_is_cast_to_the_dtype_that_the_library_reads(library):
    a, b = PAIRS["bf16"]()
    bias = torch.randn(b.rows)
    out = run(a, b, Epilogue(torch.bfloat16, bias))
    torch.testing.assert_close(
        out, reference_product(a, b, bias.bfloat16()).bfloat16(), rtol=1e-2, atol=1e-2
    )


def test_equal_problems_share_one_plan_and_scales_may_move(library):
    a, b = PAIRS["float8"]()
    c, d = PAIRS["float8"]()
    first, second = (
        cublaslt.find_plan(h200_request(x, y, Epilogue(torch.bfloat16)))
        for x, y in ((a, b), (c, d))
    )
    assert first is second
    out = torch.empty(a.rows, b.rows, dtype=torch.bfloat16)
    alive = []
    for x, y in ((a, b), (c, d), (a, b), (c, d)):
        first.run(x, y, Epilogue(torch.bfloat16, out=out))
        torch.testing.assert_close(out, reference_product(x, y).bfloat16(), rtol=1e-2, atol=1e-2)
        alive.append(len(library.alive))
    assert alive[3] == alive[1]  # descriptors are used again


def test_each_thread_that_runs_a_plan_uses_its_own_descriptors(library, monkeypatch):
    a, b = PAIRS["float8"]()
    epilogue = Epilogue(torch.float32)
    joint = threading.Barrier(2, timeout=60)
    used = []

    def matmul(handle, descriptor, *rest):
        used.append(descriptor)
        joint.wait()

    # a plan keeps the function found at its creation
    monkeypatch.setattr(library, "matmul", matmul)
    # CPU tensors are aligned to 16 bytes, some to 256, which would select another plan in one thread.
    plan = cublaslt_plan.build_plan(
        cublaslt.make_problem(h200_request(a, b, epilogue))._replace(alignment=16)
    )
    threads = [threading.Thread(target=plan.run, args=(a, b, epilogue)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(used) == len(set(used)) == 2
    assert len(cublaslt_plan._plans) == 1


def test_a_deleted_plan_destroys_its_descriptors(library):
    a, b = PAIRS["bf16"]()
    run(a, b, Epilogue(torch.bfloat16))
    assert library.alive
    cublaslt_plan._plans.clear()
    assert not library.alive


def test_fast_accumulation_is_requested_only_if_fp8_allows_it(library):
    for pair, fast in (("float8", True), ("bf16", False), ("1d x 1d", False)):
        a, b = PAIRS[pair]()
        assert (
            cublaslt.make_problem(h200_request(a, b, Epilogue(torch.bfloat16, exact=False))).fast
            is fast
        )
        assert not cublaslt.make_problem(
            h200_request(a, b, Epilogue(torch.bfloat16, exact=True))
        ).fast


@pytest.mark.parametrize("spec", [None, FLOAT8], ids=["bf16", "float8"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulate"])
def test_pointers_with_little_alignment_give_the_same_result(library, spec, accumulate):
    if spec is None:
        a, b = (plain(torch.randn(32 * 64 + 1).bfloat16()[1:].view(32, 64)) for _ in range(2))
    else:
        a = quantized(spec, 32, 64)
        b = quantized(spec, 32, 64)
        shifted = torch.empty(32 * 64 + 4, dtype=torch.uint8)[4:].view(32, 64)
        shifted.copy_(a.codes.view(torch.uint8))
        a = a._replace(codes=shifted.view(torch.float8_e4m3fn))
    out = torch.full((32 * 32 + 1,), 1.0)[1:].view(32, 32)
    run(a, b, Epilogue(torch.float32, out=out, accumulate=accumulate))
    torch.testing.assert_close(out, reference_product(a, b) + accumulate, rtol=1e-4, atol=1e-3)


REJECTIONS = {
    "a CUDA device": {"device": "cpu"},
    "subclass": {"native": False},
    "7.5 has no cublaslt": {"hardware": nvidia(7, 5)},
    "neither axis": {"a_layout": MatrixLayout(row_major=True, stride=0)},
    "dtypes differ": {"b_element": torch.float16},
    "operands are torch.float64": {"a_element": torch.float64, "b_element": torch.float64},
    "supported: their dtype or float32": {"dtype": torch.float16},
    "one operand is quantized": {"a_format": formats.FLOAT8},
    "rows of `out`": {"out_layout": MatrixLayout(False, 32)},
    "bias is torch.float64": {"bias": torch.float64},
}
FP8_REJECTIONS = {
    "multiple of 16 bytes": {"b_layout": MatrixLayout(True, 72)},
    "K-contiguous": {"a_layout": MatrixLayout(False, 48)},
    "K=72": {"k": 72},
    "N=40": {"n": 40},
    "two E5M2": {"a_element": torch.float8_e5m2, "b_element": torch.float8_e5m2},
    "do not mix": {"b_format": formats.BLOCK_1D},
    "mxfp8 x float8": {"a_format": formats.MXFP8},
    "two operands of 128x128": {"a_format": formats.BLOCK_2D, "b_format": formats.BLOCK_2D},
    "8.0 has no fp8 products": {"hardware": nvidia(8, 0)},
    "10.0 has no fp8 block products": {
        "a_format": formats.BLOCK_1D,
        "b_format": formats.BLOCK_1D,
        "hardware": nvidia(10, 0),
    },
    "K=64 is not a multiple of 128": {"a_format": formats.BLOCK_1D, "b_format": formats.BLOCK_1D},
    "N=32 is not a multiple of 128": {
        "a_format": formats.BLOCK_1D,
        "b_format": formats.BLOCK_2D,
        "k": 128,
    },
    "M=47": {"a_format": formats.BLOCK_1D, "b_format": formats.BLOCK_1D, "k": 128, "m": 47},
    "supported: float32": {"dtype": torch.float64},
    "bfloat16 bias": {"dtype": torch.float32, "bias": torch.float16},
}


@pytest.mark.parametrize(
    ("pair", "reason", "change"),
    [("bf16", reason, change) for reason, change in REJECTIONS.items()]
    + [("float8", reason, change) for reason, change in FP8_REJECTIONS.items()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_an_unsupported_request_is_rejected_with_the_reason(library, pair, reason, change):
    request = h200_request(*PAIRS[pair](), Epilogue(torch.bfloat16))
    assert cublaslt.unsupported_reason(request) is None
    assert reason in (cublaslt.unsupported_reason(dataclasses.replace(request, **change)) or "")


def test_a_problem_without_an_algorithm_is_rejected(library):
    library.algorithms = []
    request = h200_request(*PAIRS["bf16"](), Epilogue(torch.bfloat16))
    assert cublaslt.unsupported_reason(request) is None  # it plans nothing
    assert "no algorithm" in cublaslt.bind(request).reason


def test_a_missing_library_is_a_reason_with_a_remedy(monkeypatch):
    monkeypatch.setattr(cublaslt_library.optional, "installed", lambda name: False)
    cublaslt_library._unavailable_reason.cache_clear()
    try:
        assert 'pip install ".[cuda]"' in (cublaslt_library.unavailable_reason() or "")
    finally:
        cublaslt_library._unavailable_reason.cache_clear()


@pytest.fixture
def timed(library, monkeypatch, tmp_path):
    """Make the second candidate the fastest; return the folder that stores choices."""
    monkeypatch.setenv("TE_CACHE_DIR", str(tmp_path))
    seconds = dict(zip(ALGORITHMS, (2.0, 1.0, 3.0, 4.0), strict=True))
    monkeypatch.setattr(tuning, "_seconds", lambda plan, a, b, epilogue: seconds[plan.algorithm])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 / test")
    tuning._library_and_gpu.cache_clear()
    yield tmp_path
    tuning._library_and_gpu.cache_clear()


def tune_plan(a, b, epilogue):
    plan = cublaslt.find_plan(h200_request(a, b, epilogue))
    tuning.tune(plan, a, b, epilogue)
    return plan


def test_the_fastest_candidate_is_used_and_stored_for_the_next_process(timed, monkeypatch):
    a, b = PAIRS["bf16"]()
    plan = tune_plan(a, b, Epilogue(torch.bfloat16))
    assert plan.algorithm == ALGORITHMS[1]
    (path,) = (timed / "autotune").iterdir()
    assert tuning.CHOICES.read(path) == ALGORITHMS[1]
    cublaslt_plan._plans.clear()
    tuning._library_and_gpu.cache_clear()
    monkeypatch.setattr(tuning, "_seconds", None)  # a second timing would fail
    assert tune_plan(a, b, Epilogue(torch.bfloat16)).algorithm == ALGORITHMS[1]


def test_a_small_gain_does_not_change_the_algorithm(timed, monkeypatch):
    seconds = dict(zip(ALGORITHMS, (1.0, 0.99, 3.0, 4.0), strict=True))
    monkeypatch.setattr(tuning, "_seconds", lambda plan, a, b, epilogue: seconds[plan.algorithm])
    assert tune_plan(*PAIRS["bf16"](), Epilogue(torch.bfloat16)).algorithm == ALGORITHMS[0]


@pytest.mark.parametrize("code", [REJECTED, b"\0"], ids=["rejected", "short"])
def test_a_stored_algorithm_that_the_library_rejects_is_timed_again(timed, code):
    a, b = PAIRS["bf16"]()
    plan = cublaslt.find_plan(h200_request(a, b, Epilogue(torch.bfloat16)))
    tuning.CHOICES.write(tuning.algorithm_file(plan), code)
    assert tune_plan(a, b, Epilogue(torch.bfloat16)).algorithm == ALGORITHMS[1]


def test_a_damaged_choice_is_reported_and_replaced(timed, caplog):
    a, b = PAIRS["bf16"]()
    path = tuning.algorithm_file(cublaslt.find_plan(h200_request(a, b, Epilogue(torch.bfloat16))))
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"torn")
    assert tune_plan(a, b, Epilogue(torch.bfloat16)).algorithm == ALGORITHMS[1]
    assert "its 4 bytes do not begin as those of tuned algorithms do" in caplog.text
    assert tuning.CHOICES.read(path) == ALGORITHMS[1]


def test_tuning_works_where_nothing_can_be_stored(timed, caplog):
    (timed / "autotune").write_text("a file where the folder should be")
    assert tune_plan(*PAIRS["bf16"](), Epilogue(torch.bfloat16)).algorithm == ALGORITHMS[1]
    assert "tuned algorithms cannot be kept in" in caplog.text
    assert [path.name for path in timed.iterdir()] == ["autotune"]


def test_tuning_does_not_write_the_callers_output(timed, monkeypatch):
    monkeypatch.setattr(
        tuning, "_seconds", lambda plan, a, b, epilogue: plan.run(a, b, epilogue).sum() * 0 + 1
    )
    a, b = PAIRS["bf16"]()
    out = torch.full((a.rows, b.rows), 5.0)
    tune_plan(a, b, Epilogue(torch.float32, out=out, accumulate=True))
    assert (out == 5.0).all()


def test_autotune_is_enabled_by_the_block_or_the_environment(monkeypatch):
    monkeypatch.delenv("NVTE_AUTOTUNE", raising=False)
    assert not requests_tuning()
    with autotune(), autotune():
        assert requests_tuning()
    assert not requests_tuning()
    monkeypatch.setenv("NVTE_AUTOTUNE", "1")
    assert requests_tuning()


def gpu_operand(spec: QuantizeSpec | None, rows: int, depth: int) -> Operand:
    if spec is None:
        return plain(torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16))
    return quantized(spec, rows, depth, "cuda")


GPU_PAIRS = {
    "bf16": (None, None, "matmul"),
    "float8": (FLOAT8, FLOAT8, "scaled_mm"),
    "gradient": (GRADIENT, FLOAT8, "scaled_mm"),
    "1d x 2d": (BLOCK_1D, BLOCK_2D, "scaled_mm_block"),
    "1d x 1d": (BLOCK_1D, BLOCK_1D, "scaled_mm_block"),
    "gradient 1d x 1d": (
        GRADIENT_1D,
        BLOCK_1D,
        "reference",
    ),  # torch's scaled_mm takes no E5M2 in blocks
    "gradient 1d x 2d": (GRADIENT_1D, BLOCK_2D, "reference"),
}


def skip_unless_taken(a: Operand, b: Operand, epilogue: Epilogue) -> None:
    if reason := cublaslt.unsupported_reason(GemmRequest.of(a, b, epilogue)):
        pytest.skip(f"cublaslt: {reason}")


@pytest.mark.gpu
@pytest.mark.parametrize("pair", GPU_PAIRS)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_the_result_equals_the_same_library_through_torch(pair, exact, biased):
    a_spec, b_spec, other = GPU_PAIRS[pair]
    a, b = gpu_operand(a_spec, 512, 1024), gpu_operand(b_spec, 768, 1024)
    bias = torch.randn(768, device="cuda", dtype=torch.bfloat16) if biased else None
    epilogue = Epilogue(torch.bfloat16, bias, exact=exact)
    skip_unless_taken(a, b, epilogue)
    with use_backend(gemm="cublaslt"):
        ours = gemm(a, b, epilogue)
    with use_backend(gemm=other):
        reference = gemm(a, b, epilogue)
    # Another algorithm may add in another order; then a sum may round to the neighbouring bfloat16.
    torch.testing.assert_close(
        ours, reference, rtol=2.0**-7, atol=2.0**-7 * reference.float().std().item()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("pair", GPU_PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulation_adds_to_the_output(pair, dtype):
    a_spec, b_spec, _ = GPU_PAIRS[pair]
    a, b = gpu_operand(a_spec, 256, 512), gpu_operand(b_spec, 384, 512)
    before = torch.randn(256, 384, device="cuda").to(dtype)
    out = before.clone()
    epilogue = Epilogue(torch.bfloat16, out=out, accumulate=True)
    skip_unless_taken(a, b, epilogue)
    with use_backend(gemm="cublaslt"):
        assert gemm(a, b, epilogue) is out
    exact = dequantize_operand(a).double() @ dequantize_operand(b).double().t()
    magnitudes = dequantize_operand(a).double().abs() @ dequantize_operand(b).double().abs().t()
    # Into 16 bits the library rounds the product before it adds.
    rounding = 2.0**-20 if dtype == torch.float32 else 2.0**-7
    bound = (
        magnitudes * 2.0**-11
        + exact.abs().maximum((exact + before.double()).abs()) * rounding
        + 1e-6
    )
    assert ((out.double() - (exact + before.double())).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["bf16", "float8", "1d x 2d"])
def test_a_replayed_product_reads_its_current_operands(pair):
    a_spec, b_spec, _ = GPU_PAIRS[pair]
    a, b = gpu_operand(a_spec, 256, 512), gpu_operand(b_spec, 384, 512)
    epilogue = Epilogue(torch.bfloat16)
    skip_unless_taken(a, b, epilogue)
    gemm(a, b, epilogue)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gemm(a, b, epilogue)
    other = gpu_operand(a_spec, 256, 512)
    a.codes.copy_(other.codes)
    if a.scale is not None:
        a.scale.copy_(other.scale)
    graph.replay()
    assert torch.equal(out, gemm(other, b, epilogue))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["bf16", "float8", "1d x 2d"])
def test_a_compiled_product_is_bitwise_equal_to_the_eager_one(pair):
    a_spec, b_spec, _ = GPU_PAIRS[pair]
    a, b = gpu_operand(a_spec, 256, 512), gpu_operand(b_spec, 384, 512)
    bias = torch.randn(384, device="cuda", dtype=torch.bfloat16)
    skip_unless_taken(a, b, Epilogue(torch.bfloat16))

    def step(a_codes, b_codes, a_scale, b_scale, out):
        left, right = Operand(a_codes, a_scale, a.format), Operand(b_codes, b_scale, b.format)
        y = gemm(left, right, Epilogue(torch.bfloat16, bias, exact=False))
        gemm(left, right, Epilogue(torch.float32, out=out, accumulate=True))
        return y * 2

    first, second = (torch.ones(256, 384, device="cuda") for _ in range(2))
    eager = step(a.codes, b.codes, a.scale, b.scale, first)
    compiled = torch.compile(step, fullgraph=True)(a.codes, b.codes, a.scale, b.scale, second)
    assert torch.equal(eager, compiled)
    assert torch.equal(first, second)


@pytest.mark.gpu
def test_a_dispatch_mode_sees_a_torch_operator():
    from torch.utils.flop_counter import FlopCounterMode

    a, b = gpu_operand(None, 256, 512), gpu_operand(None, 384, 512)
    gemm(a, b, Epilogue(torch.bfloat16))
    with FlopCounterMode(display=False) as counter:
        gemm(a, b, Epilogue(torch.bfloat16))
    assert counter.get_total_flops() == 2 * 256 * 384 * 512


@pytest.mark.gpu
def test_fake_tensors_use_other_backends():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        a, b = (plain(torch.empty(32, 64, device="cuda", dtype=torch.bfloat16)) for _ in range(2))
        assert gemm(a, b, Epilogue(torch.bfloat16)).shape == (32, 32)


@pytest.mark.gpu
def test_tuning_stores_its_choice(tmp_path, monkeypatch):
    a, b = gpu_operand(None, 256, 512), gpu_operand(None, 384, 512)
    skip_unless_taken(a, b, Epilogue(torch.bfloat16))
    monkeypatch.setenv("TE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cublaslt_plan, "_plans", Memory(cublaslt_plan._find_plan, 4096))
    TABLE.forget()
    tuning._library_and_gpu.cache_clear()
    out = torch.ones(256, 384, device="cuda")
    with autotune():
        gemm(a, b, Epilogue(torch.float32, out=out, accumulate=True))
    tuning._library_and_gpu.cache_clear()
    torch.testing.assert_close(out, reference_product(a, b) + 1, rtol=1e-3, atol=1e-2)
    assert len(list((tmp_path / "autotune").iterdir())) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cublaslt", "scaled_mm"])
def test_scales_may_be_adjacent_in_memory(backend):
    """A stack's members have adjacent scales; cuBLASLt itself accepts only addresses aligned to 16 bytes."""
    a, b = gpu_operand(FLOAT8, 64, 128), gpu_operand(FLOAT8, 64, 128)
    scales = torch.cat([torch.ones(1, device="cuda"), a.scale, b.scale])
    epilogue = Epilogue(torch.bfloat16)
    skip_unless_taken(a, b, epilogue)
    with use_backend(gemm=backend):
        expected = gemm(a, b, epilogue)
        actual = gemm(a._replace(scale=scales[1:2]), b._replace(scale=scales[2:3]), epilogue)
    assert torch.equal(actual, expected)


@pytest.fixture
def any_rows():
    dispatch.require_batch_invariance(True)
    yield
    dispatch.require_batch_invariance(False)


def bound(a: Operand, b: Operand, epilogue: Epilogue) -> torch.Tensor:
    request = h200_request(a, b, epilogue)
    assert cublaslt.unsupported_reason(request) is None
    return cublaslt.bind(request)(a, b, epilogue)


def test_batch_invariant_products_share_one_algorithm_without_split_sums(library, any_rows):
    queries = []

    def heuristic(handle, descriptor, a, b, c, d, preference, count, results, result):
        rows = library.alive[b]["columns"]
        queries.append((rows, library.alive[preference]["REDUCTION_SCHEME_MASK"]))
        library.algorithms = [bytes([1 + (rows < 100)]) * 64]  # another one for few rows
        type(library).matmul_algo_get_heuristic(
            library, handle, descriptor, a, b, c, d, preference, count, results, result
        )

    library.matmul_algo_get_heuristic = heuristic
    b = torch.randn(48, 64).bfloat16()
    for rows in (1, 7, 64, 300):
        a = torch.randn(rows, 64).bfloat16()
        y = bound(plain(a), plain(b), Epilogue(torch.float32))
        torch.testing.assert_close(y, a.float() @ b.float().t())
    assert queries == [(8192, 0)]
    assert set(library.started) == {ALGORITHMS[0]} and len(library.started) == 4


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 33])
def test_batch_invariant_block_products_pad_the_rows(library, any_rows, rows, accumulate):
    a, b = quantized(BLOCK_1D, rows, 256), quantized(BLOCK_2D, 128, 256)
    out = torch.randn(rows, 128) if accumulate else None
    values = [dequantize(operand._replace(dtype=torch.float32)) for operand in (a, b)]
    expected = values[0] @ values[1].t() + (0.0 if out is None else out)
    y = bound(a, b, Epilogue(torch.float32, out=out, accumulate=accumulate))
    assert y.shape == (rows, 128) and (out is None or y is out)
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


def test_a_batch_invariant_product_pads_rows_whose_algorithm_is_rejected(library, any_rows):
    def check(handle, descriptor, a, b, c, d, algorithm, result):
        if library.alive[b]["columns"] % 16:
            raise library.cuBLASLtError("the algorithm needs 16 rows")

    library.matmul_algo_check = check
    a, b = torch.randn(3, 64), torch.randn(48, 64)
    bias = torch.randn(48)
    y = bound(plain(a), plain(b), Epilogue(torch.float32, bias))
    assert y.shape == (3, 48)
    torch.testing.assert_close(y, a @ b.t() + bias)


def test_a_batch_invariant_product_copies_unaligned_matrices(library, any_rows):
    memory = torch.randn(3 * 64 + 1)
    a, b = memory[1:].view(3, 64), torch.randn(48, 64)
    out = torch.randn(3, 48)
    expected = a @ b.t() + out
    y = bound(plain(a), plain(b), Epilogue(torch.float32, out=out, accumulate=True))
    assert y is out
    torch.testing.assert_close(y, expected)
    assert set(library.started) == {ALGORITHMS[0]}


def test_backends_with_an_algorithm_per_row_count_are_unsupported_if_batch_invariant(any_rows):
    a, b = plain(torch.randn(8, 64).bfloat16()), plain(torch.randn(48, 64).bfloat16())
    request = h200_request(a, b, Epilogue(torch.bfloat16))
    reasons = {row.name: row.rejection_reason(request) for row in TABLE.backends}
    assert reasons["matmul"] == (
        "a row's result depends on the other rows, by an algorithm that the library chooses for their number"
    )
    assert reasons["reference"] == reasons["matmul"]
    on_a_cpu = dataclasses.replace(request, device="cpu")
    assert TABLE.named("matmul").rejection_reason(on_a_cpu) is None
