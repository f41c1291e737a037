"""GatedDeltaNetAttention, GatedDeltaNet2Attention and GatedDeltaProductAttention against their recurrences."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import transformer_engine.pytorch as te
from tests.attention.linear_attention_cases import (
    BOUNDS,
    RULES,
    Case,
    compare,
    error,
    module_call,
    operation_inputs,
    random_case,
    reference_results,
    run_with_gradients,
)
from transformer_engine.common.dispatch import use_backend
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.primitives.linear_attention import linear_attention
from transformer_engine.pytorch.primitives.linear_attention.gates import shrink_gates
from transformer_engine.pytorch.primitives.linear_attention.request import (
    DeltaInputs,
    DeltaSpec,
    Option,
    Rule,
)

CASES, PER_TEST = 300, 10
BACKENDS = ("chunked", "reference")
# One module per rule, and the kernels' usual inputs.
PLAIN = {
    "gdn": Case("gdn", options={"output_final_state": True}),
    "gdn2": Case("gdn2", sizes=(64, 64), options={"output_final_state": True}),
    "gdp": Case("gdp", sizes=(64, 64), updates=2, options={"output_final_state": True}),
}


@pytest.mark.parametrize("first", range(0, CASES, PER_TEST))
def test_random_calls_match_the_recurrence_in_float64(first):
    for seed in range(first, first + PER_TEST):
        case = random_case(seed)
        # The chunks need two updates; the other cases are for the reference.
        backend = BACKENDS[seed % 2] if max(case.lengths) * case.updates > 1 else "reference"
        with use_backend(linear_attention=backend):
            compare(case, module_call(case), seed)


@pytest.mark.parametrize("length", (63, 64, 65, 130))
@pytest.mark.parametrize("rule", RULES)
def test_chunks_match_the_recurrence(rule, length):
    case = replace(
        PLAIN[rule], lengths=(length, length), dtype=torch.float32, gate_dtype=torch.float32
    )
    with use_backend(linear_attention="chunked"):
        compare(case, module_call(case))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("setting", ["high", "medium"])
def test_chunks_do_not_depend_on_the_precision_of_float32_products(rule, setting, device):
    case = replace(
        PLAIN[rule], lengths=(70, 70), sizes=(64, 64), dtype=torch.float32, gate_dtype=torch.float32
    )
    tensors, call = case.tensors(device=device), module_call(case, device)
    with use_backend(linear_attention="chunked"):
        expected = run_with_gradients(case, tensors, call)
        torch.set_float32_matmul_precision(setting)
        try:
            actual = run_with_gradients(case, tensors, call)
            compare(case, call, device=device)
        finally:
            torch.set_float32_matmul_precision("highest")
    for got, reference in zip((*actual[0], *actual[1]), (*expected[0], *expected[1]), strict=True):
        assert got is not None and reference is not None and torch.equal(got, reference)


@pytest.mark.parametrize("rule", RULES)
def test_packed_sequences_match_separate_calls(rule):
    case = replace(PLAIN[rule], format="thd", lengths=(5, 0, 70, 1))
    tensors = case.tensors()
    output, states = module_call(case)(**tensors)
    begin = 0
    for index, length in enumerate(case.lengths):
        single = replace(case, format="bshd", lengths=(length,))
        part = {
            name: x[index : index + 1]
            if name == "initial_state"
            else x[begin : begin + length].unsqueeze(0)
            for name, x in tensors.items()
        }
        separate, state = module_call(single)(**part)
        assert error(output[begin : begin + length], separate[0]) < 1e-12
        assert error(states[index], state[0]) < 1e-12
        begin += length


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_state_continues_a_sequence_and_passes_gradients(rule, backend):
    if rule != "gdn" and backend == "reference":
        pytest.skip("one recurrence serves all rules")
    case = replace(PLAIN[rule], lengths=(50, 50))

    def run_in_halves(**tensors):
        state, outputs = tensors.pop("initial_state"), []
        for part in (slice(0, 17), slice(17, 50)):
            shares = {name: x[:, part] for name, x in tensors.items()}
            output, state = module_call(case)(**shares, initial_state=state)
            outputs.append(output)
        return torch.cat(outputs, 1), state

    with use_backend(linear_attention=backend):
        compare(case, run_in_halves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_states_continue_packed_sequences_over_several_calls(rule, backend):
    """Each call has a ragged part of every sequence, some empty; gradients from all calls are compared."""
    parts = ((3, 0, 17), (66, 1, 0), (2, 5, 18))
    case = replace(PLAIN[rule], format="thd", lengths=tuple(map(sum, zip(*parts, strict=True))))
    starts = [0, *accumulate(case.lengths)]

    def run_in_chunks(**tensors):
        state, outputs = tensors.pop("initial_state"), [[] for _ in case.lengths]
        begins = list(starts[:-1])
        for lengths in parts:
            index = torch.cat(
                [torch.arange(b, b + n) for b, n in zip(begins, lengths, strict=True)]
            )
            share = {name: x[index] for name, x in tensors.items()}
            output, state = module_call(replace(case, lengths=lengths))(
                **share, initial_state=state
            )
            for rows, part in zip(outputs, output.split(lengths), strict=True):
                rows.append(part)
            begins = [b + n for b, n in zip(begins, lengths, strict=True)]
        return torch.cat([row for rows in outputs for row in rows]), state

    with use_backend(linear_attention=backend):
        compare(case, run_in_chunks)


@pytest.mark.parametrize("layout", ("sbhd", "bshd", "thd"))
@pytest.mark.parametrize("rule", RULES)
def test_no_tokens_return_the_initial_state(rule, layout):
    case = replace(PLAIN[rule], format=layout, lengths=(0, 0))
    tensors = case.tensors()
    (output, state), gradients = run_with_gradients(case, tensors, module_call(case))
    assert output.numel() == 0 and output.requires_grad
    assert torch.equal(state, tensors["initial_state"])
    assert gradients[-1] is not None
    no_sequences = replace(case, format="thd", lengths=())
    output, state = module_call(no_sequences)(**no_sequences.tensors())
    assert output.shape[0] == state.shape[0] == 0


@pytest.mark.parametrize("rule", RULES)
def test_the_state_of_empty_sequences_is_a_copy(rule):
    case = replace(PLAIN[rule], format="thd", lengths=(3, 5))
    tensors = case.tensors()
    states = tensors["initial_state"].detach().clone()
    bounds = torch.zeros(3, dtype=torch.int32)
    _, state = case.module()(
        **{**tensors, "initial_state": states}, cu_seqlens=bounds, **case.options
    )
    assert torch.equal(state, states) and state.data_ptr() != states.data_ptr()


def test_tokens_after_the_last_sequence_are_zero_and_get_no_gradient():
    case = replace(PLAIN["gdn"], format="thd", lengths=(3, 4), padding=6)
    tensors = case.tensors()
    (output, _), gradients = run_with_gradients(case, tensors, module_call(case))
    assert not output[7:].any() and output[:7].any()
    for name, gradient in zip(tensors, gradients, strict=True):
        assert name == "initial_state" or (not gradient[7:].any() and gradient[:7].any())


# Finite differences for all options, with small heads.
OPTIONS = {
    Rule.GDN: ((), (Option.L2_NORM,)),
    Rule.GDN2: ((), (Option.L2_NORM, Option.SIGMOID), (Option.SIGMOID, Option.NEGATIVE)),
    Rule.GDP: (
        (),
        (Option.L2_NORM, Option.SIGMOID, Option.NEGATIVE),
        (Option.SAFE_GATE,),
        (Option.LINEAR_GATE,),
    ),
}


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rule", "options"), [(rule, o) for rule in OPTIONS for o in OPTIONS[rule]]
)
def test_gradients_match_finite_differences(rule, options, backend, packed):
    inputs, spec = _small_inputs(rule, options, packed)
    places = [i for i, x in enumerate(inputs) if x is not None and x.is_floating_point()]
    leaves = [inputs[i].requires_grad_() for i in places]

    def function(*tensors):
        args = list(inputs)
        for i, tensor in zip(places, tensors, strict=True):
            args[i] = tensor
        return linear_attention(DeltaInputs(*args), spec)

    with use_backend(linear_attention=backend):
        options = {"eps": 1e-6, "atol": 1e-7, "rtol": 1e-5, "fast_mode": packed}
        assert torch.autograd.gradcheck(function, leaves, **options)


def test_second_derivatives_match_finite_differences():
    inputs, spec = _small_inputs(Rule.GDN, (Option.L2_NORM,), packed=False)
    leaves = [x[:1, :2].detach().requires_grad_() for x in inputs[:5]]
    inputs = inputs._replace(initial_state=None)

    def function(*tensors):
        return linear_attention(
            inputs._replace(
                **dict(zip("qkv", tensors, strict=False)), g=tensors[3], beta=tensors[4]
            ),
            spec,
        )

    for backend in BACKENDS:
        with use_backend(linear_attention=backend):
            assert torch.autograd.gradgradcheck(function, leaves, eps=1e-6, atol=1e-6, rtol=1e-4)


def _small_inputs(rule, options, packed):
    torch.manual_seed(3)
    tokens, (heads, dk, dv) = (1, 6) if packed else (2, 3), (2, 3, 2)
    sub, channels = (2,) if rule == Rule.GDP else (), (dk,) if rule == Rule.GDN2 else ()

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64)

    g = normal(*tokens, heads, *channels)
    inputs = DeltaInputs(
        normal(*tokens, heads, dk),
        normal(*tokens, *sub, heads, dk),
        normal(*tokens, *sub, heads, dv),
        g.sigmoid()
        if Option.LINEAR_GATE in options
        else g
        if Option.SAFE_GATE in options
        else -g.exp(),
        normal(*tokens, *sub, heads, *channels),
        normal(*tokens, heads, dv) if rule == Rule.GDN2 else None,
        normal(heads) if Option.SAFE_GATE in options else None,
        normal(heads) if Option.SAFE_GATE in options else None,
        normal(3 if packed else 2, heads, dv, dk),
        torch.tensor([0, 2, 2, 6], dtype=torch.int32) if packed else None,
    )
    return inputs, DeltaSpec(rule, (0.7).hex(), ("final_state", *options))


def test_equal_channel_gates_reduce_to_gated_delta_net():
    case = replace(PLAIN["gdn"], sizes=(64, 64), lengths=(20, 20))
    tensors = case.tensors()
    channels = {name: tensors[name].unsqueeze(-1).expand(-1, -1, -1, 64) for name in ("g", "beta")}
    by_channels = module_call(replace(case, rule="gdn2"))(
        **{**tensors, **channels}, w=channels["beta"]
    )
    for actual, exact in zip(by_channels, module_call(case)(**tensors), strict=True):
        assert error(actual, exact) < 1e-12


def test_one_householder_update_reduces_to_gated_delta_net():
    case = replace(PLAIN["gdn"], sizes=(64, 64), lengths=(20, 20))
    tensors = case.tensors()
    updates = {name: tensors[name].unsqueeze(2) for name in ("key_layer", "value_layer", "beta")}
    for actual, exact in zip(
        module_call(replace(case, rule="gdp"))(**{**tensors, **updates}),
        module_call(case)(**tensors),
        strict=True,
    ):
        assert error(actual, exact) < 1e-12


def test_strong_decays_are_finite():
    case = replace(PLAIN["gdn"], lengths=(130,), dtype=torch.float32, gate_dtype=torch.float32)
    for value in (-1e4, -torch.inf, -88.0):
        tensors = case.tensors()
        with torch.no_grad():
            tensors["g"][:, ::7] = value
        actual, gradients = run_with_gradients(case, tensors, module_call(case))
        assert all(x.isfinite().all() for x in (*actual, *gradients))
        exact, _ = reference_results(case, tensors)
        assert error(actual[0], exact) < 2e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_gates_below_zero_are_floored(backend):
    case = Case(
        "gdp",
        sizes=(64, 64),
        updates=2,
        options={"gate_domain": "linear", "output_final_state": True},
    )
    tensors = case.tensors()
    with torch.no_grad():
        tensors["g"][:, 3] = -0.5
        zero = {**tensors, "g": tensors["g"].clamp(min=0.0)}
        with use_backend(linear_attention=backend):
            for actual, expected in zip(
                module_call(case)(**tensors), module_call(case)(**zero), strict=True
            ):
                assert torch.equal(actual, expected) and actual.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_linear_gates_near_zero_have_the_recurrences_gradient(backend, dtype):
    gates = torch.float64 if dtype == torch.float64 else torch.float32
    case = Case("gdp", "bshd", (70, 70), sizes=(64, 64), updates=2, dtype=dtype, gate_dtype=gates)
    case.options = {"gate_domain": "linear", "use_qk_l2norm_in_kernel": True}
    tensors = case.tensors()
    with torch.no_grad():
        tensors["g"][:, 2::7], tensors["g"][:, 5::9] = 0.0, 1e-7
    exact = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    with use_backend(linear_attention=backend):
        actual, gradients = run_with_gradients(case, tensors, module_call(case))
    expected, wanted_gradients = run_with_gradients(
        case, exact, lambda **x: reference_results(case, x)[:1]
    )
    limit = max(BOUNDS[dtype], 1e-8)
    assert error(actual[0], expected[0]) < limit
    for dx, exact_dx in zip(gradients, wanted_gradients, strict=True):
        assert error(dx, exact_dx) < 3 * limit


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64))
def test_guarded_erase_gates_enlarge_no_state(dtype):
    torch.manual_seed(1)
    k = torch.randn(1, 400, 1, 8).to(dtype)
    g = -torch.rand(1, 400, 1, 8).square().to(torch.promote_types(dtype, torch.float32))
    beta = (2 * torch.rand(1, 400, 1, 8)).to(dtype)
    empty = k.new_zeros(0)
    inputs = operation_inputs(q=k, k=k, v=empty, g=g, beta=beta)
    spec = DeltaSpec(Rule.GDN2, (1.0).hex(), (Option.L2_NORM, Option.GUARD))
    wide = torch.promote_types(dtype, torch.float32)
    limited = shrink_gates(beta.to(wide), inputs, spec).double()

    def norms(gates):
        """Spectral norm of (I - k (gates * k)^T) diag(exp(max g)), an upper bound for one token's step."""
        key = (k.double() / k.double().norm(dim=-1, keepdim=True))[0, :, 0]
        step = (
            torch.eye(8, dtype=torch.float64) - key[:, :, None] * (gates[0, :, 0] * key)[:, None, :]
        )
        return torch.linalg.matrix_norm(step, 2) * torch.exp(g.double().amax(-1))[0, :, 0]

    before, after = norms(beta.double()), norms(limited)
    assert (before > 1.01).sum() > 50
    # A rounded gate may pass the limit by the second test's tolerance.
    assert after.max() < 1 + (0.03 if dtype == torch.bfloat16 else 1e-5)
    admissible = before < 0.999
    assert admissible.sum() > 20
    assert torch.equal(limited[0, admissible, 0], beta.double()[0, admissible, 0])
    weight = (k.double() / k.double().norm(dim=-1, keepdim=True)).square()
    assert error((limited * weight).sum(-1), (beta.double() * weight).sum(-1)) < (
        2e-2 if dtype == torch.bfloat16 else 1e-5
    )


def test_the_gradient_passes_the_guard_unchanged():
    options = {"use_qk_l2norm_in_kernel": True, "beta_guard": True}
    case = replace(PLAIN["gdn2"], lengths=(6, 6), options=options)
    tensors = case.tensors()
    with torch.no_grad():
        tensors["beta"].mul_(2.0)
    (actual,), gradients = run_with_gradients(case, tensors, module_call(case))
    unguarded = replace(case, options={"use_qk_l2norm_in_kernel": True})
    assert not torch.equal(module_call(unguarded)(**tensors), actual)
    spec = DeltaSpec(Rule.GDN2, (1.0).hex(), (Option.L2_NORM, Option.GUARD))
    q, k, v, g, beta = list(tensors.values())[:5]
    limited = (
        shrink_gates(beta, operation_inputs(q=q, k=k, v=v, g=g, beta=beta), spec)
        .detach()
        .requires_grad_()
    )
    (exact,), exact_gradients = run_with_gradients(
        unguarded, {**tensors, "beta": limited}, module_call(unguarded)
    )
    assert error(actual, exact) < 1e-12
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert error(gradient, exact_gradient) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_checkpoints_repeat_the_call(rule):
    case = PLAIN[rule]
    compare(case, module_call(case, checkpoint_core_attention=True))


@pytest.mark.parametrize("rule", RULES)
def test_autocast_has_no_effect(rule):
    case = replace(PLAIN[rule], dtype=torch.float32, gate_dtype=torch.float32)
    tensors = case.tensors()
    plain = run_with_gradients(case, tensors, module_call(case))

    def run_in_contexts(**tensors):
        with (
            torch.autocast("cpu", torch.bfloat16),
            te.autocast(enabled=True, recipe=Float8CurrentScaling()),
        ):
            return module_call(case)(**tensors)

    cast = run_with_gradients(case, tensors, run_in_contexts)
    for actual, exact in zip((*plain[0], *plain[1]), (*cast[0], *cast[1]), strict=True):
        assert torch.equal(actual, exact)


@pytest.mark.any_device
@pytest.mark.parametrize("layout", ("sbhd", "thd"))
@pytest.mark.parametrize("rule", RULES)
def test_modules_compile_without_graph_breaks(rule, layout):
    lengths = (9, 30) if layout == "thd" else (20, 20)
    case = replace(PLAIN[rule], format=layout, lengths=lengths)
    module, bounds = case.module(), case.bounds()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compare(case, lambda **x: compiled(**x, cu_seqlens=bounds, **case.options))
    without_state = replace(case, has_state=False, options={})
    compare(without_state, lambda **x: compiled(**x, cu_seqlens=bounds))


@pytest.mark.any_device
def test_one_tensor_for_several_arguments_compiles(device):
    torch._dynamo.reset()
    module = te.GatedDeltaNetAttention(2, 16, qkv_format="bshd")
    x, gate = torch.randn(1, 9, 2, 16, device=device), -torch.rand(1, 9, 2, device=device)
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        leaves = [y.clone().requires_grad_() for y in (x, gate)]
        out = call(
            leaves[0], leaves[0], leaves[0], leaves[1], leaves[1], use_qk_l2norm_in_kernel=True
        )
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager, atol=1e-6, rtol=1e-6)


@pytest.mark.any_device
def test_checkpoints_compile_without_graph_breaks():
    case = PLAIN["gdn"]
    compiled = torch.compile(case.module(), fullgraph=True, backend="aot_eager")
    compare(case, lambda **x: compiled(**x, checkpoint_core_attention=True, **case.options))


def test_explain_reports_the_backend_and_the_reasons():
    case = replace(PLAIN["gdn"], dtype=torch.bfloat16, gate_dtype=torch.float32)
    explanation = te.explain(case.module(), **case.tensors())
    (decision,) = [d for d in explanation.decisions if d.operation == "linear_attention"]
    assert decision.chosen == "chunked"
    reasons = {verdict.backend: verdict.reason for verdict in decision.verdicts}
    assert (
        "it needs a CUDA device" in reasons["fla"] and "it needs a CUDA device" in reasons["cudnn"]
    )
    one_token = replace(case, lengths=(1, 1))
    explanation = te.explain(one_token.module(), **one_token.tensors())
    assert "linear_attention: reference" in str(explanation)


@pytest.mark.parametrize("rule", RULES)
def test_modules_have_no_state(rule):
    module = PLAIN[rule].module()
    assert not module.state_dict() and not list(module.parameters())
    assert isinstance(copy.deepcopy(module), type(module))
    tensors = PLAIN[rule].tensors()
    assert torch.equal(copy.deepcopy(module)(**tensors), module(**tensors))


def test_memory_plan_describes_a_call():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = te.GatedDeltaNetAttention(2, 16, qkv_format="bshd")

        def forward(self, x):
            gate = torch.nn.functional.logsigmoid(x[..., 0].float())
            return self.attention(x, x, x, gate, gate.exp())

    x = torch.randn(2, 32, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    plan = te.memory_plan(Model(), None, 64, inputs=(x,))
    # The compiled form saves its inputs only: no states for 32-token chunks.
    assert x.nbytes < plan.peak < 20 * x.nbytes
