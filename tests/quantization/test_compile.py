"""Blocks and scale updates under torch.compile(fullgraph=True), with one or two Linear layers."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from transformer_engine.common import recipe
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, living
from transformer_engine.pytorch import quantization as q
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

pytestmark = pytest.mark.any_device

STEPS = 4


class Model(nn.Module):
    """The recipe's block is inside of the forward pass, or left to the caller."""

    def __init__(self, device, recipe, inside, group=None, layers=2):
        super().__init__()
        self.layers = nn.Sequential(*(Linear(16, 16, device=device) for _ in range(layers)))
        self.recipe = recipe
        self.inside = inside
        self.group = group

    def forward(self, x):
        if not self.inside:
            return self.layers(x)
        with q.autocast(recipe=self.recipe, amax_reduction_group=self.group):
            return self.layers(x)


def train(device, recipe, inside, compiles, *, warm=True, group=None, layers=2):
    """Outputs, gradients, scales and histories from every step."""
    Manager.reset()
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Model(device, recipe, inside, group, layers)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
    records = []
    for step in range(STEPS):
        x = ((step + 1) * torch.randn(16, 16, device=device)).requires_grad_()
        run = model if warm and step == 0 else compiled
        with q.autocast(enabled=not inside, recipe=recipe, amax_reduction_group=group):
            y = run(x)
        y.sum().backward()
        states = [m.fp8_meta[key] for m in model.layers for key in ("scaling_fwd", "scaling_bwd")]
        values = [
            t.clone() for s in states for d in s.delayed_states for t in (d.scale, d.amax_history)
        ]
        records.append([y.detach(), x.grad.clone(), *values])
    return records


def differing_steps(a, b):
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not all(map(torch.equal, x, y))]


@pytest.fixture(autouse=True)
def _no_compiled_code_left():
    yield
    torch._dynamo.reset()


# All pairs from the three settings.
@pytest.mark.parametrize(
    ("inside", "unfused", "warm"),
    [(False, "0", False), (False, "1", True), (True, "0", True), (True, "1", False)],
)
@pytest.mark.sampled(1)
def test_compiled_training_steps_equal_eager_ones_bit_for_bit(
    monkeypatch, device, inside, unfused, warm
):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
    recipe = DelayedScaling(amax_history_len=3, margin=1)
    eager = train(device, recipe, inside, False)
    assert differing_steps(eager, train(device, recipe, inside, True, warm=warm)) == []
    assert eager[-1][2].ne(1).any()


def test_callables_are_traced_into_the_graph(device):
    recipe = DelayedScaling(
        amax_history_len=3,
        amax_compute_algo=lambda history: history.sum(dim=0),
        scaling_factor_compute_algo=lambda amax, old, fp8_max, recipe: old + fp8_max / (amax + 1),
    )
    eager, compiled = (
        train(device, recipe, True, compiles, layers=1) for compiles in (False, True)
    )
    assert differing_steps(eager, compiled) == []


def test_a_reduction_group_can_be_traced(device, tmp_path):
    if device.type == "cuda":
        pytest.skip("gloo reduces CPU tensors")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        recipe = DelayedScaling(amax_history_len=3)
        eager = train(device, recipe, inside=True, compiles=False, layers=1)
        assert (
            differing_steps(
                eager, train(device, recipe, inside=True, compiles=True, group=group, layers=1)
            )
            == []
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_forward_passes_before_their_backward_passes(device):
    def losses(compiles):
        Manager.reset()
        torch._dynamo.reset()
        torch.manual_seed(1)
        recipe = DelayedScaling(amax_history_len=3)
        model = Model(device, recipe, False)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        records = []
        for step in range(STEPS):
            outputs = []
            for _ in range(2):
                with q.autocast(recipe=recipe):
                    outputs.append(
                        (model if step == 0 else compiled)(torch.randn(16, 16, device=device))
                    )
            for output in outputs:
                output.sum().backward()
            records.append(
                [
                    *(output.detach() for output in outputs),
                    *(p.grad.clone() for p in model.parameters()),
                ]
            )
        return records

    assert differing_steps(losses(False), losses(True)) == []


def test_a_disabled_block_inside_computes_in_high_precision(device):
    x = torch.randn(16, 16, device=device)
    module = Linear(16, 16, device=device)
    recipe = Float8CurrentScaling()

    def nested(x):
        with q.autocast(recipe=recipe):
            quantized = module(x)
            with q.autocast(enabled=False):
                return quantized, module(x)

    quantized, plain = torch.compile(nested, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(plain, module(x))
    assert not torch.equal(quantized, plain)
    assert not Manager.is_fp8_enabled()


def test_a_block_without_a_recipe_traces(device):
    def default(x):
        with q.autocast():
            return x + 1 if q.current().recipe is not None else x

    x = torch.randn(16, 16, device=device)
    assert torch.equal(torch.compile(default, fullgraph=True, backend="aot_eager")(x), x + 1)


def test_the_registered_operators_fulfil_their_schemas(device):
    histories = [torch.rand(3, 2, device=device), torch.rand(3, 1, device=device)]
    scales = [torch.ones(2, device=device), torch.ones(1, device=device)]
    operators = torch.ops.transformer_engine
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        operators.update_scales, (histories, scales, "max", 448.0, 0, True, ""), test_utils=checks
    )
    torch.library.opcheck(operators.scale_snapshot, (scales[0],), test_utils=checks)


class _Shifted(DelayedScaling):
    """A user's recipe."""


class _Marked(DelayedScaling):
    """A user's recipe with a constructor and an attribute that is not a field."""

    def __init__(self, margin):
        super().__init__(margin=margin)
        self.mark = str(margin)


# Earlier versions trace no frozen object as a recipe argument.
_TRACES_FROZEN = TorchVersion(torch.__version__) >= "2.13"


def _loose() -> recipe.Recipe:
    if not _TRACES_FROZEN:
        return Float8CurrentScaling()
    parameters = recipe.MMParams(use_split_accumulator="false")  # pyright: ignore[reportArgumentType]
    return Float8CurrentScaling(fp8_gemm_fprop=parameters)


# Factories, which a compiled function calls.
MADE_INSIDE = {
    "current": _loose,
    "delayed": lambda: DelayedScaling(1, recipe.Format.E4M3, amax_history_len="4"),  # pyright: ignore[reportArgumentType]
    "mxfp8": lambda: recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3),
    "block": lambda: recipe.Float8BlockScaling(fp8_gemm_dgrad={"use_split_accumulator": True}),  # pyright: ignore[reportArgumentType]
    "nvfp4": lambda: recipe.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
    "subclass": lambda: _Shifted(margin=2),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_a_recipe_made_inside_a_compiled_function_has_the_fields_of_an_eager_one(name, monkeypatch):
    monkeypatch.setenv("TE_EMULATE", "1")  # on a GPU without MXFP8 and NVFP4 products
    make = MADE_INSIDE[name]

    def inside(x):
        with q.autocast(recipe=make()):
            return x + 1, q.current().recipe

    torch._dynamo.reset()
    # One recipe's graph is recompiled for another length; the other graphs take any length.
    dynamic = None if name == "current" else True
    run = torch.compile(inside, fullgraph=True, backend="eager", dynamic=dynamic)
    for length in (2, 3, 4):
        _, result = run(torch.zeros(length))
        gc.collect()
        assert result == make() and repr(result) == repr(make()) and type(result) is type(make())


def test_recipes_made_inside_compiled_functions_are_independent_objects():
    def inside(x):
        first, second = DelayedScaling(margin=5), DelayedScaling(margin=5)
        torch._dynamo.graph_break()
        margins = (first.margin, second.margin)
        first.margin = 6
        return x + first.margin, margins, first, second

    torch._dynamo.reset()
    run = torch.compile(inside, backend="eager")
    for _ in range(2):
        y, margins, first, second = run(torch.zeros(1))
        assert margins == (5, 5)
        assert y.item() == first.margin == 6
        assert second.margin == 5
        second.margin = 7  # in the caller


def test_recipes_are_assigned_inside_a_compiled_function():
    def inside(x):
        changed = Float8CurrentScaling()
        changed.use_power_2_scales = True
        marked = _Marked(3)
        marked.mark = "other"
        marked.amax_history_len = 4
        return x, changed, Float8CurrentScaling(), marked

    torch._dynamo.reset()
    run = torch.compile(inside, fullgraph=True, backend="eager")
    for _ in range(2):
        _, changed, other, marked = run(torch.zeros(1))
        assert changed == Float8CurrentScaling(use_power_2_scales=True)
        assert changed.fp8_quant_fwd_weight.power_2_scale
        assert other == Float8CurrentScaling()
        assert (marked.margin, marked.amax_history_len, marked.mark) == (3, 4, "other")


def test_fields_of_recipes_may_be_symbols_of_a_compiled_function():
    def inside(x, epsilon):
        assigned = DelayedScaling(amax_history_len=x.shape[0])
        assigned.margin = x.shape[0] // 4
        params = recipe.QParams(power_2_scale=x.shape[0] > 4, amax_epsilon=epsilon / x.shape[1])
        return x + 1, assigned, params

    torch._dynamo.reset()
    run = torch.compile(inside, fullgraph=True, dynamic=True, backend="eager")
    for rows, epsilon in ((4, 0.5), (8, 0.25), (4, 0.5), (16, 0.25)):
        _, assigned, params = run(torch.zeros(rows, 2), epsilon)
        assert assigned == DelayedScaling(margin=rows // 4, amax_history_len=rows)
        assert repr(assigned) == repr(DelayedScaling(margin=rows // 4, amax_history_len=rows))
        assert params == recipe.QParams(power_2_scale=rows > 4, amax_epsilon=epsilon / 2)


def test_a_field_cannot_be_a_tensor_in_a_compiled_function():
    def inside(x):
        return x + 1, DelayedScaling(amax_history_len=x.sum())

    torch._dynamo.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="construct the recipe outside of the compiled function"
    ):
        torch.compile(inside, fullgraph=True, backend="eager")(torch.ones(4))


def test_threads_construct_for_compilers_at_the_same_time():
    def construct(length):
        for i in range(100):
            name = living._construct(DelayedScaling, amax_history_len=1000 * length + i)
            assert getattr(living._constructed, name).amax_history_len == 1000 * length + i

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(construct, range(8)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_a_recipe_made_inside_a_compiled_function_equals_eager_bit_for_bit(name, device):
    make, results = MADE_INSIDE[name], []
    for compiles in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        module = Linear(32, 32, device=device, params_dtype=torch.bfloat16)

        def step(x, module=module):
            with q.autocast(recipe=make()):
                return module(x)

        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles else step
        collected = []
        for scale in (1.0, 3.0, 9.0):
            x = (torch.randn(32, 32, device=device, dtype=torch.bfloat16) * scale).requires_grad_()
            y = run(x)
            y.sum().backward()
            gc.collect()
            collected += [y, x.grad, module.weight.grad.clone()]
        results.append(collected)
    assert all(torch.equal(traced, eager) for eager, traced in zip(*results, strict=True))
