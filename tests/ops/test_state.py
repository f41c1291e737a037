"""Operation state: state dicts, checkpoints, quantized or deferred parameters, recomputation, offload."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.distributed.test_other_checkpoints import ForeignCheckpoint
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch import ops
from transformer_engine.pytorch.quantization.extra_state import ExtraStateError
from transformer_engine.pytorch.tensor import QuantizedTensor

PLACE = {"device": "cuda" if torch.cuda.is_available() else "cpu", "dtype": torch.bfloat16}
RECIPES = [
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]
by_name = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)


def mlp(**position: Any) -> ops.Sequential:
    position = {**PLACE, **position}
    return ops.Sequential(
        ops.RMSNorm(128, **position),
        ops.Linear(128, 256, **position),
        ops.SwiGLU(),
        ops.Linear(128, 128, bias=False, **position),
    )


def step(chain: Any, x: torch.Tensor, recipe: Any = None, run: Any = None) -> list[torch.Tensor]:
    """Output and all gradients from one pass."""
    chain.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = (run or chain)(leaf)
    y.float().square().mean().backward()
    return [y.detach(), leaf.grad, *[p.grad.clone() for p in chain.parameters()]]  # pyright: ignore


def sample_input() -> torch.Tensor:
    return torch.randn(128, 128, generator=torch.Generator().manual_seed(1)).to(**PLACE)


def test_state_dicts_contain_parameter_and_extra_state_names():
    chain = mlp()
    assert [key for key in chain.state_dict() if not key.endswith("_extra_state")] == [
        "0.weight",
        "1.basic_ops.0.weight",
        "1.basic_ops.1.bias",
        "3.basic_ops.0.weight",
    ]
    extra = {key for key in chain.state_dict() if key.endswith("_extra_state")}
    assert extra == {
        f"{name}._extra_state"
        for name in ("0", "1.basic_ops.0", "1.basic_ops.1", "2", "3.basic_ops.0")
    }
    clamped = ops.ScaledClampedQGeGLU()
    assert set(clamped.state_dict()) == {"_extra_state", "_clamped._extra_state"}
    assert [name for name, _ in chain[1].named_parameters()] == ["weight", "bias"]
    assert set(te.RMSNorm(8, **PLACE).state_dict()) == {"weight"}


def test_linear_loads_both_kinds_of_names():
    linear, source = ops.Linear(16, 16, **PLACE), ops.Linear(16, 16, **PLACE)
    linear.load_state_dict(source.state_dict())
    assert torch.equal(linear.weight, source.weight)
    plain = torch.nn.Linear(16, 16, **PLACE)
    missing, unexpected = linear.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and all(key.endswith("_extra_state") for key in missing)
    assert torch.equal(linear.basic_ops[0].weight, plain.weight)
    with pytest.raises(RuntimeError, match=r"basic_ops.0.weight"):
        linear.load_state_dict({})
    weight = torch.nn.Parameter(torch.ones(16, 16, **PLACE))
    linear.weight = weight
    assert linear.basic_ops[0].weight is weight and linear.weight is weight


@pytest.mark.parametrize("bias", [True, False])
def test_reset_parameters_initializes_as_the_constructor(bias):
    torch.manual_seed(0)
    expected = ops.Linear(64, 32, bias=bias, device=PLACE["device"])
    layer = ops.Linear(64, 32, bias=bias, device="meta")
    for _ in range(2):
        torch.manual_seed(0)
        layer.reset_parameters()
        assert torch.equal(layer.weight, expected.weight)
        assert (layer.bias is None) != bias
        if bias:
            assert not layer.bias.any() and layer.bias.device == expected.bias.device
            torch.nn.init.ones_(layer.bias)


def test_parameters_move_and_copy_together_with_their_aliases():
    linear = ops.Linear(16, 16, device="meta")
    moved = linear.to_empty(device=PLACE["device"])
    assert moved.weight is moved.basic_ops[0].weight and not moved.weight.is_meta
    copied = copy.deepcopy(moved)
    assert copied.weight is copied.basic_ops[0].weight and copied.weight is not moved.weight


def test_deferred_parameters_are_allocated_in_the_first_forward_pass():
    chain = mlp(device="meta")
    assert all(p.is_meta for p in chain.parameters())
    y = chain(sample_input())
    assert not any(p.is_meta for p in chain.parameters()) and y.isfinite().all()
    assert chain[1].weight is chain[1].basic_ops[0].weight


@by_name
def test_delayed_scaling_continues_from_a_checkpoint(recipe, emulated):
    chain, x = mlp(), sample_input()
    for _ in range(3):
        step(chain, x, recipe)
    other = mlp()
    other.load_state_dict(chain.state_dict())
    stateful = isinstance(recipe, DelayedScaling)
    assert bool(chain.state_dict()["1.basic_ops.0._extra_state"].numel()) == stateful
    expected = step(chain, x, recipe)
    actual = step(other, x, recipe)
    if not isinstance(recipe, NVFP4BlockScaling):  # its gradients are rounded stochastically
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def scaling_states(op):
    """Copies of an operation's scales and histories."""
    metas = [meta for meta in op._fp8_metas.values() if meta is not None]
    states = [state for meta in metas for state in meta.values() if hasattr(state, "amax_history")]
    return [tensor.clone() for state in states for tensor in (state.scale, state.amax_history)]


def test_damaged_extra_states_raise_and_change_nothing(emulated):
    chain = ops.Sequential(ops.BasicLinear(128, 128, **PLACE))
    step(chain, sample_input(), DelayedScaling())
    other = ops.Sequential(ops.GroupedLinear(2, 128, 128, **PLACE))
    with te.autocast(recipe=DelayedScaling()):
        other(sample_input(), torch.tensor([64, 64]))
    before = scaling_states(chain[0])  # leaving an autocast moves the histories of all operations
    for state in (torch.arange(7, dtype=torch.uint8), other[0].get_extra_state()):
        with pytest.raises(ExtraStateError):
            chain[0].set_extra_state(state)
    after = scaling_states(chain[0])
    assert before and all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@by_name
def test_quantized_parameters_compute_as_parameters_that_are_quantized_in_each_call(
    recipe, emulated
):
    with te.quantized_model_init(recipe=recipe):
        quantized = ops.Sequential(ops.Linear(128, 128, **PLACE), ops.GELU())
    assert isinstance(quantized[0].weight, QuantizedTensor)
    plain = ops.Sequential(ops.Linear(128, 128, **PLACE), ops.GELU())
    with torch.no_grad():
        plain[0].weight.copy_(quantized[0].weight.dequantize())
        plain[0].bias.copy_(quantized[0].bias)
    x = sample_input()
    actual, expected = step(quantized, x, recipe), step(plain, x, recipe)
    # Codes of decoded values may differ from the codes that were decoded, by a scale or by random rounding.
    bound = 0.3 if isinstance(recipe, NVFP4BlockScaling) else 0.05
    for ours, reference in zip(actual[:2], expected[:2], strict=True):
        assert (ours - reference).norm() <= bound * reference.norm()
    torch.optim.SGD(quantized.parameters(), lr=0.1).step()
    assert isinstance(quantized[0].weight, QuantizedTensor)
    step(quantized, x)  # without a recipe the codes are dequantized


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling()], ids=str)
def test_checkpointed_chains_repeat_the_first_run(use_reentrant, recipe, emulated):
    chain, x = mlp(), sample_input()
    states = []
    for checkpointed in (False, True):
        te.fp8.FP8GlobalStateManager.reset()
        fresh = mlp()
        fresh.load_state_dict(chain.state_dict())

        def run(y: torch.Tensor, chain: Any = fresh, again: bool = checkpointed) -> torch.Tensor:
            return te.checkpoint(chain, y, use_reentrant=use_reentrant) if again else chain(y)

        states.append([step(fresh, x, recipe, run) for _ in range(3)])
    for plain, repeated in zip(*states, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, repeated, strict=True))


def test_offloaded_activations_give_the_same_gradients():
    chain, x = mlp(), sample_input()
    expected = step(chain, x)
    context, sync = te.get_cpu_offload_context(enabled=True, num_layers=1, model_layers=2)

    def run(y: torch.Tensor) -> torch.Tensor:
        with context:
            y = chain(y)
        return sync(y)

    actual = step(chain, x, run=run)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("in_segments", [False, True])
def test_a_checkpoint_that_loses_the_autocast_raises(in_segments, emulated):
    copy, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    if in_segments:
        copy.set_extra_output_channel(0, "residual", output_to_caller=False)
        add.set_extra_input_channel(0, "residual")
    chain = (
        ops.Sequential(copy, ops.BasicLinear(64, 64, **PLACE), add)
        if in_segments
        else ops.Linear(64, 64)
    )
    x = torch.randn(32, 64, device=PLACE["device"], requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = ForeignCheckpoint.apply(chain, x)
    with pytest.raises(
        RuntimeError, match=r"under no autocast, its first run was under Float8CurrentScaling"
    ):
        y.sum().backward()  # pyright: ignore


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backward_override_changes_gradients_but_not_results(override, emulated):
    chain, x = mlp(), sample_input()
    recipe = Float8CurrentScaling(backward_override=override)
    overridden, quantized = step(chain, x, recipe), step(chain, x, Float8CurrentScaling())
    assert torch.equal(overridden[0], quantized[0])
    assert not torch.equal(overridden[1], quantized[1])
    module = te.Linear(128, 128, device=PLACE["device"], params_dtype=torch.bfloat16)
    op = ops.Linear(128, 128, **PLACE)
    op.load_state_dict({"weight": module.weight, "bias": module.bias}, strict=False)
    for ours, reference in zip(step(op, x, recipe), step(module, x, recipe), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1.6e-2, atol=1e-5)


@by_name
def test_a_chain_computes_as_the_fused_modules(recipe, emulated):
    """The same codes: only the rounding of a bias in a product's epilogue may differ."""
    if isinstance(recipe, NVFP4BlockScaling):
        recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
    position = {"device": PLACE["device"], "params_dtype": torch.bfloat16}
    module = te.LayerNormMLP(128, 256, activation="gelu", normalization="RMSNorm", **position)
    chain = ops.Sequential(
        ops.RMSNorm(128, **PLACE),
        ops.Linear(128, 256, **PLACE),
        ops.GELU(),
        ops.Linear(256, 128, **PLACE),
    )
    names = ("layer_norm_weight", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
    with torch.no_grad():
        for name, parameter in zip(names, chain.parameters(), strict=True):
            parameter.copy_(getattr(module, name))
    x = sample_input()
    for _ in range(2):
        actual, expected = step(chain, x, recipe), step(module, x, recipe)
    expected = [*expected[:2], *[getattr(module, name).grad for name in names]]
    for ours, reference in zip(actual, expected, strict=True):
        assert (ours - reference).norm() <= 2e-2 * reference.norm()


def test_memory_plans_and_explanations_cover_operations(emulated):
    chain, x = mlp(), sample_input()
    assert te.memory_plan(chain, Float8CurrentScaling(), 128, inputs=(sample_input(),)).peak > 0
    with te.autocast(recipe=Float8CurrentScaling()):
        assert "gemm" in str(te.explain(chain, x))


WITH_QUANTIZED_WEIGHTS = {
    "BasicLinear": lambda: ops.BasicLinear(32, 32, device="cpu"),
    "Linear": lambda: ops.Linear(32, 32, device="cpu").basic_ops[0],
    "GroupedLinear": lambda: ops.GroupedLinear(2, 32, 32, device="cpu"),
}


def _call(op: Any, recipe: Any) -> None:
    splits = [torch.tensor([16, 16])] if isinstance(op, ops.GroupedLinear) else []
    with te.autocast(recipe=recipe):
        op(torch.randn(32, 32), *splits)


@pytest.mark.parametrize("name", WITH_QUANTIZED_WEIGHTS)
@pytest.mark.parametrize("change", ["call", "reset_recipe_state", "set_extra_state"])
def test_a_quantized_weight_follows_a_new_recipes_state(name, change, emulated):
    """Updates of a weight read the scale of the operation's current state, and record their maximum in it."""
    with te.quantized_model_init(recipe=DelayedScaling()):
        op = WITH_QUANTIZED_WEIGHTS[name]()
    _call(op, DelayedScaling())
    (before,) = op.delayed_states("forward")
    recipe = DelayedScaling(margin=1, amax_history_len=3)
    if change == "reset_recipe_state":
        op.reset_recipe_state(recipe=recipe)
    elif change == "set_extra_state":
        other = WITH_QUANTIZED_WEIGHTS[name]()
        _call(other, recipe)
        op.set_extra_state(other.get_extra_state())
    if change != "reset_recipe_state":
        _call(op, recipe)
    (state,) = op.delayed_states("forward")
    assert state is not before and state.amax_history.shape[0] == 3
    weights = [tensor for tensor in op.own_tensors() if isinstance(tensor, QuantizedTensor)]
    assert len(weights) == (2 if name == "GroupedLinear" else 1)
    for group, weight in enumerate(weights):
        position = 2 * group + 1
        state.scale[position] = 2.0 ** (group + 3)
        state.amax_history.zero_()
        with torch.no_grad():
            weight.copy_(torch.full((32, 32), group + 1.25))
        assert weight._scale_inv.item() == 2.0 ** -(group + 3)
        assert weight._data.view(torch.float8_e4m3fn).float().unique().item() == 2.0 ** (
            group + 3
        ) * (group + 1.25)
        assert state.amax_history[0].tolist() == [
            group + 1.25 if i == position else 0.0 for i in range(len(state.scale))
        ]


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Single-rank process group."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def _linear_keys(state: dict[str, Any]) -> list[str]:
    return [key for key in state if key.endswith(("weight", "bias"))]


ORIGINAL_KEYS = ["0.basic_ops.0.weight", "0.basic_ops.1.bias"]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_distributed_checkpoints_load_full_state_dicts(plain: bool, sharded: bool):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    options = StateDictOptions(full_state_dict=True)
    source, chain = [ops.Sequential(ops.Linear(16, 16, device="cpu"), ops.GELU()) for _ in range(2)]
    state = get_model_state_dict(source, options=options)
    assert _linear_keys(state) == ORIGINAL_KEYS
    if plain:
        state = {"0.weight": source[0].weight.detach(), "0.bias": source[0].bias.detach()}
    if sharded:
        fully_shard(chain, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    set_model_state_dict(chain, dict(state), options=options)
    x = torch.randn(4, 16)
    torch.testing.assert_close(chain(x), source(x))
    repeated = get_model_state_dict(chain, options=options)
    assert _linear_keys(repeated) == ORIGINAL_KEYS
    set_model_state_dict(chain, repeated, options=options)
    torch.testing.assert_close(chain(x), source(x))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "wrapped", [(), (ops.Linear,), (ops.BasicLinear, ops.Bias)], ids=["root", "layer", "ops"]
)
def test_fully_sharded_1_saves_parameters_by_name(wrapped: tuple[type, ...], use_orig_params: bool):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    source = ops.Sequential(ops.Linear(16, 16, device="cpu"), ops.GELU())
    x = torch.randn(4, 16)
    expected = source(x)
    chain = FullyShardedDataParallel(
        copy.deepcopy(source),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy(wrapped) if wrapped else None,
    )
    torch.testing.assert_close(chain(x), expected)
    with FullyShardedDataParallel.state_dict_type(chain, StateDictType.FULL_STATE_DICT):
        state = chain.state_dict()
        assert _linear_keys(state) == ["0.weight", "0.bias"]
        for parameter in chain.parameters():
            torch.nn.init.zeros_(parameter)
        chain.load_state_dict(state)
        incomplete = {key: value for key, value in state.items() if key != "0.bias"}
        assert chain.load_state_dict(incomplete, strict=False).missing_keys == ["0.bias"]
    torch.testing.assert_close(chain(x), expected)
    source.load_state_dict(
        {key.replace("._checkpoint", ""): value for key, value in state.items()}, strict=False
    )
    torch.testing.assert_close(source(x), expected)


def test_functional_call_accepts_both_kinds_of_names():
    chain = mlp()
    parameters, x = dict(chain.named_parameters()), sample_input()
    chain(x)
    prepared = len(chain._module_groups[0]._prepared)  # pyright: ignore
    records: list[list[torch.Tensor]] = []
    for values in (parameters, chain.state_dict()):
        doubled = {
            key: (2 * value).detach().requires_grad_() if value.is_floating_point() else value
            for key, value in values.items()
        }
        for _ in range(2):
            y = torch.func.functional_call(chain, doubled, (x,))
            y.square().sum().backward()
        gradients = [value.grad for value in doubled.values() if value.is_floating_point()]
        assert all(gradient is not None for gradient in gradients)
        records.append([y.detach(), *gradients])  # pyright: ignore
        after = dict(chain.named_parameters())
        assert list(after) == list(parameters) and all(
            after[key] is parameters[key] for key in after
        )
    assert len(records[0]) == 1 + len(parameters)
    for by_parameter, by_state in zip(*records, strict=True):
        assert torch.equal(by_parameter, by_state)
    assert not torch.equal(records[0][0], chain(x))
    assert len(chain._module_groups[0]._prepared) == prepared + 1  # pyright: ignore


def test_an_unexpected_key_of_a_linear_is_reported_as_it_is_in_the_state_dict():
    linear = te.ops.Linear(32, 32, bias=False, device="cpu")
    torch.nn.utils.parametrize.register_parametrization(linear, "weight", torch.nn.Identity())
    state = {"basic_ops.0.weight": torch.zeros(32, 32)}
    _, unexpected = linear.load_state_dict(state, strict=False)
    assert unexpected == ["basic_ops.0.weight"]
