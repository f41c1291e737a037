"""Linear attention by flash-linear-attention and cuDNN: when each is used, and its results."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te
from tests.attention.linear_attention_cases import (
    RULES,
    Case,
    compare,
    error,
    module_call,
    operation_inputs,
)
from transformer_engine.common import hardware, optional
from transformer_engine.common.dispatch import use_backend
from transformer_engine.pytorch.primitives.linear_attention import (
    TABLE,
    cudnn,
    fla,
    linear_attention,
    request,
)
from transformer_engine.pytorch.primitives.linear_attention.library import differentiable_once
from transformer_engine.pytorch.primitives.linear_attention.request import (
    DeltaInputs,
    DeltaRequest,
    DeltaSpec,
    Option,
    Rule,
)

HAS_FLA = importlib.util.find_spec("fla") is not None
# One rounding to float16 per product of a chunk.
INTERPRETED_BOUND = 4e-3


def test_flash_linear_attention_matches_the_recurrence_in_the_interpreter():
    if not HAS_FLA:
        pytest.skip("fla-core is not installed")
    script = Path(__file__).with_name("linear_attention_interpreter.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 5
    assert {name: e for name, e in errors.items() if not e < INTERPRETED_BOUND} == {}


BASE = DeltaRequest(
    DeltaSpec(Rule.GDN, (0.125).hex()),
    (2, 512, 4, 64),
    64,
    1,
    None,
    torch.bfloat16,
    "cuda",
    has_state=False,
    needs_gradient=True,
)
LIBRARIES = {"fla": (0, 6), "fla-core": (0, 6), "triton": (3, 7), "nvidia-cudnn-frontend": (1, 32)}


@pytest.fixture
def machine(monkeypatch):
    """Function that simulates a GPU and library releases; (0, 0) means not installed."""

    def simulate(architecture: str, **releases: tuple[int, int]) -> None:
        result = LIBRARIES | {name.replace("_", "-"): release for name, release in releases.items()}
        modules = {
            "fla": result["fla-core"],
            "cudnn": result["nvidia-cudnn-frontend"],
            "tilelang": (0, 0),
        }
        monkeypatch.setattr(
            request, "current_hardware", lambda: hardware.hardware_named("nvidia", architecture)
        )
        monkeypatch.setattr(optional, "installed", lambda module: modules[module] != (0, 0))
        monkeypatch.setattr(optional, "release", lambda name: result[name])
        monkeypatch.setattr(optional, "failure", lambda module, *names: None)
        TABLE.forget()

    yield simulate
    TABLE.forget()


@pytest.mark.parametrize(
    ("architecture", "changes", "chosen"),
    [
        ("9.0", {}, "fla"),
        ("8.9", {}, "fla"),
        ("12.0", {}, "fla"),
        ("10.0", {}, "cudnn"),
        ("10.3", {"spec": DeltaSpec(Rule.GDN2, "0x1p-3")}, "cudnn"),
        ("10.0", {"q": (2, 512, 4, 96)}, "fla"),
        ("9.0", {"q": (2, 512, 4, 512)}, "chunked"),
        ("9.0", {"q": (2, 512, 4, 8)}, "chunked"),
        ("9.0", {"dtype": torch.float32}, "chunked"),
        ("9.0", {"q": (2, 0, 4, 64)}, "reference"),
        ("9.0", {"device_type": "cpu", "q": (2, 1, 4, 64)}, "reference"),
        ("9.0", {"device_type": "cpu", "q": (2, 1, 4, 64), "updates": 2}, "chunked"),
    ],
)
def test_the_first_supported_library_is_chosen(machine, architecture, changes, chosen):
    machine(architecture)
    assert TABLE.chosen(BASE._replace(**changes)) == chosen


def test_reasons_name_the_library_and_the_remedy(machine):
    machine("9.0", fla_core=(0, 0), nvidia_cudnn_frontend=(0, 0))
    assert "linear-attention" in fla.unsupported_reason(BASE)
    assert "compute capability 10.0 and 10.3" in str(
        cudnn.unsupported_reason(BASE)
    ) or "10.0 to 10.3" in str(cudnn.unsupported_reason(BASE))
    machine("9.0", fla_core=(0, 5))
    assert "fla-core 0.5 < 0.6" in fla.unsupported_reason(BASE)
    machine("10.0", nvidia_cudnn_frontend=(0, 0))
    assert "nvidia-cudnn-frontend is not installed" in cudnn.unsupported_reason(BASE)
    machine("10.0", nvidia_cudnn_frontend=(1, 28))
    assert "1.28 < 1.29" in cudnn.unsupported_reason(BASE)
    assert "heads have sizes 96 and 64" in cudnn.unsupported_reason(BASE._replace(q=(2, 8, 4, 96)))


@pytest.mark.parametrize(
    ("backend", "distribution", "first", "end"),
    [(fla, "fla-core", (0, 6), (0, 7)), (cudnn, "nvidia-cudnn-frontend", (1, 29), (2, 0))],
    ids=["fla", "cudnn"],
)
def test_releases_outside_the_tested_range_are_unsupported(
    machine, backend, distribution, first, end
):
    """One rule for both libraries; (0, 0), a development build without metadata, is supported."""
    bounds = f"pip install '{distribution}>={first[0]}.{first[1]},<{end[0]}.{end[1]}'"
    for release, reason in (
        (
            (first[0], first[1] - 1),
            f"{distribution} {first[0]}.{first[1] - 1} < {first[0]}.{first[1]}; {bounds}",
        ),
        (first, None),
        (
            end,
            f"{distribution} {end[0]}.{end[1]} >= {end[0]}.{end[1]}, which is not tested; {bounds}",
        ),
    ):
        machine("10.0", **{distribution.replace("-", "_"): release})
        assert backend.unsupported_reason(BASE) == reason
    machine("10.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optional, "release", lambda name: (0, 0))
        assert backend.unsupported_reason(BASE) is None


def test_release_bounds_equal_the_bounds_in_the_extras():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())[
        "project"
    ]
    extras = project["optional-dependencies"]
    (library,) = [text for text in extras["linear-attention"] if text.startswith("fla-core")]
    first, end = (".".join(map(str, release)) for release in fla._RELEASES)
    assert library == f"fla-core>={first},<{end}"
    (frontend,) = [text for text in extras["cuda"] if text.startswith("nvidia-cudnn-frontend")]
    assert frontend.endswith(f",<{cudnn._RELEASES[1][0]}")


def test_gradients_on_hopper_need_a_triton_that_computes_them(machine):
    machine("9.0", triton=(3, 6))
    assert "triton 3.6" in fla.unsupported_reason(BASE)
    assert fla.unsupported_reason(BASE._replace(needs_gradient=False)) is None
    assert fla.unsupported_reason(BASE._replace(spec=DeltaSpec(Rule.GDN2, "0x1p-3"))) is None
    machine("10.0", triton=(3, 6))
    assert fla.unsupported_reason(BASE) is None


def test_linear_gate_gradients_are_computed_by_the_chunks(machine):
    machine("9.0")
    spec = DeltaSpec(Rule.GDP, "0x1p-3", (Option.LINEAR_GATE,))
    call = BASE._replace(spec=spec)
    assert (
        "linear gate near 0" in str(fla.unsupported_reason(call))
        and TABLE.chosen(call) == "chunked"
    )
    assert fla.unsupported_reason(call._replace(needs_gradient=False)) is None


# Parameters that this package passes to the functions in nvidia-cudnn-frontend 1.32, in order.
_SHARED = "cu_seqlens scale initial_state output_final_state use_qk_l2norm_in_kernel"
_CUDNN = {
    "gated_delta_net": f"q k v g beta {_SHARED}",
    "gated_delta_net_v2": f"q k v g beta w {_SHARED} use_beta_sigmoid_in_kernel allow_neg_eigval beta_guard",
    "gated_delta_product": "q k v g beta cu_seqlens num_householder scale initial_state output_final_state "
    "use_qk_l2norm_in_kernel use_beta_sigmoid_in_kernel allow_neg_eigval safe_gate gate_domain a_log dt_bias",
}
_CUDNN_OPTIONS = {
    "output_final_state": Option.FINAL_STATE,
    "use_qk_l2norm_in_kernel": Option.L2_NORM,
    "use_beta_sigmoid_in_kernel": Option.SIGMOID,
    "allow_neg_eigval": Option.NEGATIVE,
    "beta_guard": Option.GUARD,
    "safe_gate": Option.SAFE_GATE,
}


def _reference_cudnn_module() -> types.ModuleType:
    """Module whose functions compute packed tokens [t, ..] by the reference, as cuDNN's functions specify."""
    module = types.ModuleType(cudnn.MODULE)

    def function(rule, parameters):
        def compute(**kwargs):
            assert set(kwargs) == set(parameters.split())
            assert kwargs["q"].dim() == 3 and all(
                kwargs[name].is_contiguous() for name in ("q", "k", "v", "g", "beta")
            )
            names = [name for name in DeltaInputs._fields[:6] if kwargs.get(name) is not None]
            tensors = {name: kwargs[name].unsqueeze(0) for name in names}
            rest = {
                name: kwargs.get(name)
                for name in ("a_log", "dt_bias", "initial_state", "cu_seqlens")
            }
            options = [option for name, option in _CUDNN_OPTIONS.items() if kwargs.get(name)]
            if kwargs.get("gate_domain") == "linear":
                options.append(Option.LINEAR_GATE)
            spec = DeltaSpec(rule, kwargs["scale"].hex(), tuple(options))
            with use_backend(linear_attention="reference"):
                output, state = linear_attention(operation_inputs(**tensors, **rest), spec)
            return output.squeeze(0), output.new_empty(0) if state is None else state

        return compute

    for rule, name in cudnn.FUNCTIONS.items():
        setattr(module, name, function(rule, _CUDNN[name]))
    return module


CUDNN_CASES = [
    Case("gdn", options={"output_final_state": True, "use_qk_l2norm_in_kernel": True}),
    Case("gdn", "thd", lengths=(3, 0, 5), padding=2),
    Case(
        "gdn2",
        sizes=(64, 64),
        options={"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    ),
    Case("gdn2", "sbhd", sizes=(64, 64), options={"use_qk_l2norm_in_kernel": True}),
    Case("gdp", sizes=(64, 64), updates=2, options={"safe_gate": True, "output_final_state": True}),
    Case(
        "gdp",
        "thd",
        lengths=(4, 0, 5),
        sizes=(64, 64),
        updates=3,
        options={"gate_domain": "linear"},
    ),
]


@pytest.mark.parametrize("case", CUDNN_CASES, ids=lambda case: f"{case.rule}-{case.format}")
def test_cudnn_arguments_describe_the_call(monkeypatch, case):
    stand_in = _reference_cudnn_module()
    parent = types.ModuleType("cudnn.linear_attention")
    parent.ops = stand_in  # pyright: ignore[reportAttributeAccessIssue]
    for name, module in (
        ("cudnn", types.ModuleType("cudnn")),
        (parent.__name__, parent),
        (cudnn.MODULE, stand_in),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cudnn, "unsupported_by_kernels", lambda request: None)
    monkeypatch.setattr(
        request, "current_hardware", lambda: hardware.hardware_named("nvidia", "10.0")
    )
    monkeypatch.setattr(optional, "installed", lambda module: True)
    monkeypatch.setattr(optional, "release", lambda name: (1, 32))
    monkeypatch.setattr(cudnn, "_SIZES", (64, 128, *case.sizes))
    TABLE.forget()
    assert dict.fromkeys(["linear_attention"], "cudnn") == {
        decision.operation: decision.chosen
        for decision in te.explain(module_call(case), **case.tensors()).decisions[:1]
    }
    compare(case, module_call(case))
    TABLE.forget()


def test_bounds_for_equal_rows_are_created_in_each_call():
    """Bounds from inference mode, or from a captured graph, must not reach another call."""
    inputs = operation_inputs(
        q=torch.zeros(2, 3, 1, 16), k=torch.zeros(2, 3, 1, 16), v=torch.zeros(2, 3, 1, 16),
        g=torch.zeros(2, 3, 1), beta=torch.zeros(2, 3, 1),
    )  # fmt: skip
    spec = DeltaSpec(Rule.GDN, "0x1p-2")
    with torch.inference_mode():
        first = cudnn.library_arguments(inputs, spec)["cu_seqlens"]
    second = cudnn.library_arguments(inputs, spec)["cu_seqlens"]
    assert first.is_inference() and not second.is_inference()
    assert first.tolist() == second.tolist() == [0, 3, 6]


def test_bounds_changed_in_place_do_not_reuse_cached_chunks(monkeypatch):
    """flash-linear-attention caches chunk indices by the identity of the bounds tensor."""
    index = pytest.importorskip("fla.ops.utils.index")
    chunks = []

    def fake_library(inputs, options):
        chunks.append(index.prepare_chunk_indices(options["cu_seqlens"], 64))
        return inputs.v.clone(), None

    monkeypatch.setitem(fla._RULES, Rule.GDN, fake_library)
    tokens = torch.zeros(1, 200, 1, 16)
    bounds = torch.tensor([0, 200], dtype=torch.int32)
    inputs = operation_inputs(
        q=tokens, k=tokens, v=tokens, g=tokens[..., 0], beta=tokens[..., 0], cu_seqlens=bounds
    )
    spec = DeltaSpec(Rule.GDN, "0x1p-2")
    with torch.inference_mode():
        fla.run(inputs, spec)
    fla.run(inputs, spec)
    bounds[1] = 64
    fla.run(inputs, spec)
    assert [len(x) for x in chunks] == [4, 4, 1]
    assert [x.is_inference() for x in chunks] == [True, False, False]


def test_a_second_derivative_through_a_library_raises():
    q = torch.randn(1, 4, 1, 16, requires_grad=True)
    gate = q[..., 0].detach()
    inputs = operation_inputs(q=q, k=q, v=q, g=gate, beta=gate)
    recorded = differentiable_once(inputs)
    weight = torch.ones((), requires_grad=True)
    loss = (recorded.q * recorded.k * weight).sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="linear attention by a library"):
        gradient.sum().backward()


def test_an_installed_cudnn_has_the_expected_parameters():
    if importlib.util.find_spec("cudnn") is None or optional.release("nvidia-cudnn-frontend") < (
        1,
        29,
    ):
        pytest.skip("nvidia-cudnn-frontend 1.29 is not installed")
    ops = pytest.importorskip(cudnn.MODULE)
    for name, parameters in _CUDNN.items():
        assert set(parameters.split()) <= set(inspect.signature(getattr(ops, name)).parameters)


# On a GPU: (relative error of results, of gradients), for kernels that round product operands to 16 bits.
GPU_BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 1e-2}
GPU_CASES = {
    "gdn": Case("gdn", "sbhd", lengths=(300, 300), sizes=(128, 128), heads=4),
    "gdn, other sizes": Case("gdn", "bshd", lengths=(130,), sizes=(96, 160), heads=3),
    "gdn2": Case("gdn2", "bshd", lengths=(200, 200), sizes=(64, 128), heads=2),
    "gdn2, logits": Case(
        "gdn2", "thd", (100, 0, 65, 1), 2, (128, 64), options={"use_beta_sigmoid_in_kernel": True}
    ),
    "gdp": Case("gdp", "bshd", lengths=(150, 150), sizes=(64, 64), heads=2, updates=2),
    "gdp, safe gate": Case(
        "gdp", "thd", (80, 0, 65, 1), 2, (128, 128), 3, options={"safe_gate": True}, padding=7
    ),
    "gdn, packed": Case("gdn", "thd", (128, 0, 65, 1), 4, (64, 128), padding=9),
}


def _available(backend: str, case: Case) -> None:
    rule = {"gdn": Rule.GDN, "gdn2": Rule.GDN2, "gdp": Rule.GDP}[case.rule]
    q = (1, 256, case.heads, case.sizes[0])
    call = BASE._replace(
        spec=DeltaSpec(rule, "0x1p-3"), q=q, v_size=case.sizes[1], dtype=case.dtype
    )
    reason = TABLE.named(backend).rejection_reason(call)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize("backend", ("fla", "cudnn", "chunked"))
def test_backends_match_the_recurrence_on_a_gpu(backend, name, dtype):
    case = replace(GPU_CASES[name], dtype=dtype, gate_dtype=torch.float32)
    case.options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, **case.options}
    if backend != "chunked":
        _available(backend, case)
    with use_backend(linear_attention=backend):
        call = module_call(case, "cuda")
        compare(case, call, bound=GPU_BOUNDS[dtype], device="cuda")


@pytest.mark.gpu
def test_guarded_gates_agree_on_a_gpu():
    options = {"use_qk_l2norm_in_kernel": True, "beta_guard": True}
    case = Case(
        "gdn2", lengths=(128,), sizes=(64, 64), dtype=torch.bfloat16, gate_dtype=torch.float32
    )
    case.options = options
    _available("fla", case)
    tensors = case.tensors(device="cuda")
    with torch.no_grad():
        tensors["beta"].mul_(1.8)
    with use_backend(linear_attention="fla"):
        actual = module_call(case, "cuda")(**tensors)
    with use_backend(linear_attention="reference"):
        exact = module_call(case, "cuda")(**tensors)
    assert error(actual, exact) < GPU_BOUNDS[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
def test_libraries_compile_without_graph_breaks_on_a_gpu(rule):
    case = Case(
        rule, "bshd", (130, 130), 2, (64, 64), dtype=torch.bfloat16, gate_dtype=torch.float32
    )
    case.options = {"output_final_state": True}
    compiled = torch.compile(case.module(), fullgraph=True)
    compare(case, lambda **x: compiled(**x, **case.options), bound=2e-2, device="cuda")


@pytest.mark.gpu
def test_a_cuda_graph_repeats_a_call():
    case = Case(
        "gdn", "bshd", (256, 256), 4, (64, 64), dtype=torch.bfloat16, gate_dtype=torch.float32
    )
    case.has_state = False
    module = case.module()
    tensors = {name: x.detach() for name, x in case.tensors(device="cuda").items()}
    expected = module(**tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = module(**tensors)
    graph.replay()
    assert torch.equal(output, expected)


@pytest.mark.gpu
def test_make_graphed_callables_accepts_linear_attention():
    module = te.GatedDeltaNetAttention(4, 64, qkv_format="bshd")
    case = Case(
        "gdn", "bshd", (256, 256), 4, (64, 64), dtype=torch.bfloat16, gate_dtype=torch.float32
    )
    case.has_state = False
    sample = tuple(x.detach().requires_grad_() for x in case.tensors(device="cuda").values())
    graphed = te.make_graphed_callables(module, sample)
    assert torch.equal(graphed(*sample), case.module()(*sample))
