"""Blocks and scale updates under torch.compile(fullgraph=True), with the smallest module that uses them."""

import pytest
import torch
from torch import nn

from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch import quantization as q
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager

STEPS = 4


class Scale(torch.autograd.Function):
    """y = x * weight * scale of the input slot; amaxes of x, weight and grad_output are recorded."""

    @staticmethod
    def forward(ctx, x, weight, forward_state, backward_state, first):
        ctx.save_for_backward(x, weight)
        ctx.backward_state = backward_state
        ctx.first = first
        record(forward_state.amax_history, 0, x)
        record(forward_state.amax_history, 1, weight)
        return x * weight * forward_state.scale[0:1]

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        record(ctx.backward_state.amax_history, 0, grad_output)
        grads = grad_output * weight * ctx.backward_state.scale[0:1], grad_output * x
        if ctx.first:
            Manager.reduce_and_update_fp8_tensors(forward=False)
        return *grads, None, None, None


def record(history, slot, tensor):
    history[0, slot : slot + 1].copy_(torch.maximum(history[0, slot : slot + 1], tensor.abs().amax()))


class Module(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0, device=device))
        self.fp8_meta = {}

    def forward(self, x):
        state = q.current()
        if not state.enabled:
            return x * self.weight
        meta = self.fp8_meta
        for key, mode, slots in (("scaling_fwd", "forward", 3), ("scaling_bwd", "backward", 2)):
            meta[key] = q.RecipeState.renew(
                meta.get(key), state.recipe, mode=mode, num_quantizers=slots, device=x.device
            )
        if not state.recipe.delayed():
            return 3 * x * self.weight
        meta["recipe"] = state.recipe
        meta["fp8_group"] = state.group
        Manager.add_fp8_tensors_to_global_buffer(meta)
        first = Manager.is_first_fp8_module()
        return Scale.apply(x, self.weight, meta["scaling_fwd"], meta["scaling_bwd"], first)


class Model(nn.Module):
    """The recipe's block is inside of the forward pass, or left to the caller."""

    def __init__(self, device, recipe, inside, group=None):
        super().__init__()
        self.layers = nn.Sequential(Module(device), Module(device))
        self.recipe = recipe
        self.inside = inside
        self.group = group

    def forward(self, x):
        if not self.inside:
            return self.layers(x)
        with q.autocast(recipe=self.recipe, amax_reduction_group=self.group):
            return self.layers(x)


def train(device, recipe, inside, compiles, *, warm=True, group=None):
    """Outputs, gradients, scales and histories of every step."""
    Manager.reset()
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Model(device, recipe, inside, group)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
    seen = []
    for step in range(STEPS):
        x = ((step + 1) * torch.randn(4, device=device)).requires_grad_()
        run = model if warm and step == 0 else compiled
        with q.autocast(enabled=not inside, recipe=recipe, amax_reduction_group=group):
            y = run(x)
        y.sum().backward()
        states = [m.fp8_meta[key] for m in model.layers for key in ("scaling_fwd", "scaling_bwd")]
        values = [t.clone() for s in states for d in s.delayed_states for t in (d.scale, d.amax_history)]
        seen.append([y.detach(), x.grad.clone(), *values])
    return seen


def differing_steps(a, b):
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not all(map(torch.equal, x, y))]


@pytest.fixture(autouse=True)
def _no_compiled_code_left():
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("unfused", ["0", "1"])
def test_compiled_training_steps_equal_eager_ones_bit_for_bit(monkeypatch, device, inside, unfused):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", unfused)
    recipe = DelayedScaling(amax_history_len=3, margin=1)
    eager = train(device, recipe, inside, False)
    assert differing_steps(eager, train(device, recipe, inside, True)) == []
    assert eager[-1][2].ne(1).any()


@pytest.mark.parametrize("inside", [False, True])
def test_modules_first_met_while_compiling_catch_up_before_the_second_step(device, inside):
    recipe = DelayedScaling(amax_history_len=3)
    eager = train(device, recipe, inside, False)
    cold = train(device, recipe, inside, True, warm=False)
    assert set(differing_steps(eager, cold)) <= {0}
    assert all(map(torch.equal, eager[0][:2], cold[0][:2]))


def test_callables_are_traced_into_the_graph(device):
    recipe = DelayedScaling(
        amax_history_len=3,
        amax_compute_algo=lambda history: history.sum(dim=0),
        scaling_factor_compute_algo=lambda amax, old, fp8_max, recipe: old + fp8_max / (amax + 1),
    )
    assert differing_steps(train(device, recipe, True, False), train(device, recipe, True, True)) == []


def test_a_reduction_group_can_be_traced(device, tmp_path):
    if device.type == "cuda":
        pytest.skip("gloo reduces CPU tensors")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        recipe = DelayedScaling(amax_history_len=3)
        eager = train(device, recipe, True, False)
        assert differing_steps(eager, train(device, recipe, True, True, group=group)) == []
    finally:
        torch.distributed.destroy_process_group()


def test_two_forward_passes_before_their_backward_passes(device):
    def losses(compiles):
        Manager.reset()
        torch._dynamo.reset()
        torch.manual_seed(1)
        recipe = DelayedScaling(amax_history_len=3)
        model = Model(device, recipe, False)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        seen = []
        for step in range(STEPS):
            outputs = []
            for _ in range(2):
                with q.autocast(recipe=recipe):
                    outputs.append((model if step == 0 else compiled)(torch.randn(4, device=device)))
            for output in outputs:
                output.sum().backward()
            seen.append(
                [*(output.detach() for output in outputs), *(p.grad.clone() for p in model.parameters())]
            )
        return seen

    assert differing_steps(losses(False), losses(True)) == []


def test_other_recipes_and_disabled_blocks_trace_as_well(device):
    x = torch.randn(4, device=device)
    module = Module(device)
    recipe = Float8CurrentScaling()

    def nested(x):
        with q.autocast(recipe=recipe):
            quantized = module(x)
            with q.autocast(enabled=False):
                return quantized, module(x)

    quantized, plain = torch.compile(nested, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(plain, 2 * x)
    assert torch.equal(quantized, 6 * x)
    assert not Manager.is_fp8_enabled()


def test_a_block_without_a_recipe_traces(device):
    def default(x):
        with q.autocast():
            return x + 1 if q.current().recipe is not None else x

    x = torch.randn(4, device=device)
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
