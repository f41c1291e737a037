"""memory_plan: planned and actual saved bytes are equal, and on a GPU planned and measured peak."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.common.formats import BLOCK_1D, BLOCK_2D, E2M1, E4M3, FLOAT8, MXFP8, NVFP4
from transformer_engine.common.hardware import nvidia
from transformer_engine.pytorch.inspect.memory_ledger import (
    GRANULE,
    Ledger,
    scratch_bytes,
    sum_over_rows,
)
from transformer_engine.pytorch.inspect.memory_plan import MIB, memory_plan
from transformer_engine.pytorch.inspect.planned_backends import planning
from transformer_engine.pytorch.primitives import activation, norm, quantize
from transformer_engine.pytorch.primitives.activation import ActivationParams
from transformer_engine.pytorch.primitives.column_sums import column_sums
from transformer_engine.pytorch.primitives.dropout import (
    bias_add,
    dropout_backward,
    dropout_forward,
)
from transformer_engine.pytorch.primitives.gemm import (
    Epilogue,
    GemmRequest,
    cublaslt_library,
    gemm,
    gemm_gelu,
    gemm_gelu_gradient,
    plain,
    request,
)
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.primitives.quantize import Cast, QuantizeSpec
from transformer_engine.pytorch.primitives.rope import (
    rope_backward,
    rope_forward,
    rope_qkv_backward,
    rope_qkv_forward,
)
from transformer_engine.pytorch.primitives.rope.reference import Positions, RopeSpec
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, delayed_scaling

BF16 = torch.bfloat16
RECIPES = {
    "bf16": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
}
Make = Callable[..., nn.Module]


def linear(width: int, **options) -> nn.Module:
    return te.Linear(width, 2 * width, params_dtype=BF16, **options)


def layernorm_linear(width: int, **options) -> nn.Module:
    return te.LayerNormLinear(width, 2 * width, params_dtype=BF16, **options)


def layernorm_mlp(width: int, **options) -> te.LayerNormMLP:
    return te.LayerNormMLP(width, 3 * width, params_dtype=BF16, **options)


def gated_mlp(width: int, **options) -> nn.Module:
    gated = {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}
    return te.LayerNormMLP(width, 3 * width, params_dtype=BF16, **gated, **options)


def layer(width: int, **options) -> nn.Module:
    return te.TransformerLayer(
        width,
        3 * width,
        width // 64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=BF16,
        fuse_qkv_params=True,
        **options,
    )


MODULES: dict[str, Make] = {
    "linear": linear,
    "layernorm_linear": layernorm_linear,
    "layernorm_mlp": layernorm_mlp,
    "gated_mlp": gated_mlp,
}


def count_saved_bytes(
    model: nn.Module,
    recipe: recipes.Recipe | None,
    x: torch.Tensor,
    parameters: list[torch.Tensor] | None = None,
) -> int:
    """Total storage bytes that a forward pass saves, except for parameters, its input and its output."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = -(-storage.nbytes() // GRANULE) * GRANULE
        return tensor

    precision = te.autocast(enabled=recipe is not None, recipe=recipe)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), precision:
        y = model(x)
    recognized = [*(model.parameters() if parameters is None else parameters), x, y]
    saved = set(storages) - {tensor.untyped_storage().data_ptr() for tensor in recognized} - {0}
    return sum(storages[pointer] for pointer in saved)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sampled
def test_planned_saved_bytes_equal_the_saved_bytes(name: str, recipe: str):
    with te.emulate():
        model = MODULES[name](256, device="cpu")
        x = torch.randn(512, 256, dtype=BF16, requires_grad=True)
        plan = memory_plan(model, RECIPES[recipe], 512)
        count_saved_bytes(model, RECIPES[recipe], x)  # creates the recipe's states
        actual = count_saved_bytes(model, RECIPES[recipe], x)
    copies = sum(module.weight_copies for module in plan.modules)
    assert plan.saved + copies == actual


def test_the_parts_at_the_peak_add_up_to_it():
    plan = memory_plan(gated_mlp(256, device="cpu"), RECIPES["current"], 512)
    parts = (
        "parameters",
        "gradients",
        "weight_copies",
        "activations",
        "boundary",
        "transient",
        "workspace",
    )
    assert sum(getattr(plan, part) for part in parts) == plan.peak
    assert plan.parameters == sum(module.parameters for module in plan.modules)


def test_a_bfloat16_linear_layers_memory_equals_a_count_by_hand():
    tokens, width = 512, 256
    plan = memory_plan(linear(width, device="cpu", bias=False), None, tokens)
    matrix = BF16.itemsize * width * 2 * width
    x, y = BF16.itemsize * tokens * width, BF16.itemsize * tokens * 2 * width
    # At the end of the backward pass: weight and gradient; x, y and their gradients. Nothing else is needed.
    assert plan.peak == 2 * matrix + 2 * (x + y)
    assert (plan.saved, plan.weight_copies, plan.transient) == (0, 0, 0)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_saved_activations_grow_with_the_tokens_and_weights_do_not(recipe: str):
    model = layer(128, device="cpu")
    small, large = (memory_plan(model, RECIPES[recipe], tokens) for tokens in (128, 256))
    assert large.saved == pytest.approx(2 * small.saved, rel=0.01)
    assert [m.weight_copies for m in large.modules] == [m.weight_copies for m in small.modules]


def test_a_stacks_saved_bytes_are_the_sum_over_its_layers():
    one, three = (nn.Sequential(*(layer(128, device="cpu") for _ in range(n))) for n in (1, 3))
    first, all_of_them = memory_plan(one, None, 128), memory_plan(three, None, 128)
    hidden = BF16.itemsize * 128 * 128  # outputs between layers
    assert all_of_them.saved == 3 * first.saved + 2 * hidden


def test_planning_changes_neither_the_model_nor_shared_state():
    model = layernorm_mlp(128, device="cpu")
    recipe = RECIPES["delayed"]
    x = torch.randn(128, 128, dtype=BF16)
    with te.autocast(recipe=recipe):
        model(x).sum().backward()
    pools = dict(delayed_scaling.registry.pools)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    history = model.fp8_meta["scaling_fwd"].amax_history.clone()
    memory_plan(model, recipe, 4096)
    assert delayed_scaling.registry.pools == pools
    assert torch.equal(model.fp8_meta["scaling_fwd"].amax_history, history)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not FP8GlobalStateManager.is_fp8_enabled()
    with te.autocast(recipe=recipe):
        assert model(x).isfinite().all()


def test_a_model_on_the_meta_device_is_planned_without_memory():
    model = nn.Sequential(*(layer(4096, device="meta") for _ in range(4)))
    plan = memory_plan(model, RECIPES["current"], 65536)
    assert plan.parameters > 4 * 2 * 4096 * 4096
    assert plan.peak > plan.parameters + plan.saved / 2


def test_a_model_with_another_first_layer_needs_explicit_inputs():
    model = nn.Sequential(nn.Embedding(100, 128, dtype=BF16), linear(128, device="cpu"))
    with pytest.raises(
        ValueError, match=r"does not follow from its modules; give inputs=\(tensor, \.\.\)"
    ):
        memory_plan(model, None, 64)
    plan = memory_plan(
        model, recipe=None, tokens=0, inputs=(torch.empty(64, dtype=torch.int64, device="meta"),)
    )
    assert plan.parameters == BF16.itemsize * (100 * 128 + 128 * 256 + 256)


@pytest.mark.parametrize(
    ("model", "tokens", "error", "message"),
    [
        (lambda: linear(128, device="cpu"), 0, ValueError, "tokens=0 is below 1"),
        (lambda: linear(128, device="cpu"), 2.5, TypeError, "tokens=2.5 must be a whole number"),
        (
            lambda: linear(128, device="cpu", tp_size=2, parallel_mode="column"),
            64,
            NotImplementedError,
            "tp_size=2",
        ),
    ],
)
def test_unplannable_arguments_are_rejected(
    model: Make, tokens: Any, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        memory_plan(model(), None, tokens)


def payload(model: nn.Module) -> list[torch.Tensor]:
    """Codes and scales for quantized parameters, and the other parameters themselves."""
    parts: list[torch.Tensor] = []
    for parameter in model.parameters():
        quantized = isinstance(parameter, te.QuantizedTensor)
        local = parameter.as_storage().flatten()[0] if quantized else (parameter,)
        parts += [part for part in local if part is not None]
    return parts


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe is not None])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.sampled
def test_quantized_parameters_take_their_codes_and_scales_and_no_copies(name: str, recipe: str):
    with te.emulate():
        with te.quantized_model_init(recipe=RECIPES[recipe]):
            model = MODULES[name](256, device="cpu")
        x = torch.randn(512, 256, dtype=BF16, requires_grad=True)
        plan = memory_plan(model, RECIPES[recipe], 512)
        count_saved_bytes(model, RECIPES[recipe], x, payload(model))  # creates the recipe's states
        actual = count_saved_bytes(model, RECIPES[recipe], x, payload(model))
    contents = sum(-(-part.nbytes // GRANULE) * GRANULE for part in payload(model))
    assert sum(module.parameters for module in plan.modules) == contents
    assert plan.weight_copies == 0
    assert plan.saved == actual


class Recomputed(nn.Module):
    """A stack whose layers are recomputed in the backward pass."""

    def __init__(self, layers: list[nn.Module], reentrant: bool):
        super().__init__()
        self.layers, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = te.checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
@pytest.mark.sampled
def test_a_recomputed_stack_keeps_its_layers_inputs(reentrant: bool, recipe: str):
    """4 layers keep 3 inputs [512, 256] in bfloat16 in addition to the model's input. The last backward
    pass, the first layer's, needs this layer's memory plus the other layers' parameters and gradients."""
    chosen, x = RECIPES[recipe], torch.empty(512, 256, dtype=BF16, device="meta")
    layers = [layernorm_mlp(256, device="cpu") for _ in range(4)]
    with te.emulate():
        alone = memory_plan(layers[0], chosen, 512)
        repeated = memory_plan(Recomputed(layers, reentrant), chosen, 512, inputs=(x,))
    inputs = 512 * 256 * 2
    scales = 4 * 2 * 3 * GRANULE if recipe == "delayed" else 0  # layers, products, operands
    assert repeated.saved == 3 * inputs + scales
    # and their gradients
    rest = 3 * (alone.parameters + sum(module.parameters for module in alone.modules))
    assert alone.peak + rest <= repeated.peak <= alone.peak + rest + 2 * (inputs + scales)


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_a_layer_that_recomputes_itself_saves_its_input_only(recipe: str):
    with te.emulate():
        plan = memory_plan(layernorm_mlp(256, device="cpu", checkpoint=True), RECIPES[recipe], 512)
    assert plan.saved == 0


def test_the_table_names_modules_and_parts():
    text = str(memory_plan(layer(128, device="cpu"), None, 128))
    for expected in (
        "self_attention.layernorm_qkv",
        "layernorm_mlp",
        "weight copies",
        "peak",
        "MiB",
    ):
        assert expected in text


def operations() -> dict[str, Callable[[], object]]:
    """One call per operation that has a planned backend."""
    torch.manual_seed(0)
    x, wide, weight = torch.randn(64, 32), torch.randn(64, 64), torch.ones(32)
    spec = QuantizeSpec(FLOAT8, E4M3, columnwise=True)
    scale, ones = torch.ones(1), torch.ones(64)
    epilogue = Epilogue(torch.bfloat16)
    narrow = plain(x.bfloat16()), plain(wide[:48, :32].bfloat16())
    codes = [
        Operand(q.codes, q.scale, FLOAT8)
        for q in (quantize.quantize(m, spec) for m in (x, wide[:48, :32]))
    ]
    specs = {
        "float8": spec,
        "block1d": QuantizeSpec(BLOCK_1D, E4M3, columnwise=True),
        "block2d": QuantizeSpec(BLOCK_2D, E4M3, columnwise=True),
        "mxfp8": QuantizeSpec(MXFP8, E4M3, columnwise=True),
        "nvfp4": QuantizeSpec(NVFP4, E2M1, columnwise=True, hadamard=True),
        "nvfp4 squares": QuantizeSpec(NVFP4, E2M1, columnwise=True, two_dimensional=True),
        "row-wise": QuantizeSpec(MXFP8, E4M3),
    }
    heads, angles = torch.randn(16, 2, 4, 8), torch.randn(16, 8)
    rope = (angles, Positions(start=None, cu_seqlens=None), RopeSpec("sbhd", False, 1, 0))
    calls: dict[str, Callable[[], object]] = {
        f"quantize {name}": partial(quantize.quantize, x, request)
        for name, request in specs.items()
    }
    return calls | {
        "gemm": partial(gemm, plain(x), plain(torch.randn(48, 32)), Epilogue(torch.bfloat16)),
        "gemm gelu": partial(gemm_gelu, *narrow, epilogue),
        "gemm gelu only": partial(gemm_gelu, *narrow, epilogue, False),
        "gemm gelu gradient": partial(
            gemm_gelu_gradient, *narrow, torch.randn(64, 48).bfloat16(), epilogue
        ),
        "gemm codes": lambda: gemm(*codes, epilogue, Cast(QuantizeSpec(FLOAT8, E4M3), scale))[:2],
        "layernorm": partial(norm.layernorm_forward, x, weight, weight, 1e-5, False),
        "layernorm backward": partial(norm.layernorm_backward, x, x, ones, ones, weight, False),
        "rmsnorm": partial(norm.rmsnorm_forward, x, weight, 1e-5, False),
        "rmsnorm backward": partial(norm.rmsnorm_backward, x, x, ones, weight, False),
        "layernorm codes": partial(
            norm.layernorm_forward, x, weight, None, 1e-5, False, Cast(spec)
        ),
        "rmsnorm codes": partial(norm.rmsnorm_forward, x, weight, 1e-5, False, Cast(spec, scale)),
        "gelu": partial(activation.activation_forward, "gelu", x),
        "swiglu": partial(activation.activation_forward, "swiglu", wide),
        "swiglu backward": partial(activation.activation_backward, "swiglu", x, wide),
        "swiglu codes": partial(
            activation.activation_forward, "swiglu", wide, ActivationParams(), Cast(spec)
        ),
        "swiglu backward codes": partial(
            activation.activation_backward,
            *("swiglu", x, wide, ActivationParams(), Cast(spec)),
            dbias=torch.bfloat16,
        ),
        "swiglu block codes": partial(
            activation.activation_forward,
            "swiglu",
            wide,
            ActivationParams(),
            Cast(specs["block1d"]),
        ),
        "swiglu backward block codes": partial(
            activation.activation_backward,
            *("swiglu", x, wide, ActivationParams(), Cast(specs["block1d"])),
            dbias=torch.bfloat16,
        ),
        "swiglu backward block codes alone": partial(
            activation.activation_backward,
            "swiglu",
            x,
            wide,
            ActivationParams(),
            Cast(specs["block1d"]),
        ),
        "layernorm block codes": partial(
            norm.layernorm_forward, x, weight, None, 1e-5, False, Cast(specs["block1d"])
        ),
        "rmsnorm block rows": partial(
            norm.rmsnorm_forward, x, weight, 1e-5, False, Cast(QuantizeSpec(BLOCK_1D, E4M3))
        ),
        "cast with sums": partial(column_sums, x, torch.bfloat16, Cast(spec)),
        "column sums": partial(column_sums, x, torch.bfloat16),
        "dropout": partial(dropout_forward, x, 0.5),
        "bias add": partial(bias_add, x, x[0], x),
        "dropout backward": partial(dropout_backward, x, torch.zeros(256, dtype=torch.uint8), 0.5),
        "rope": partial(rope_forward, heads, *rope),
        "rope backward": partial(rope_backward, heads, *rope),
        "rope of qkv": partial(
            rope_qkv_forward, torch.randn(16, 2, 2, 32), angles, *rope[:2], (16, 8, 8), rope[2]
        ),
        "rope of qkv backward": partial(
            *(
                rope_qkv_backward,
                heads,
                heads[:, :, :2],
                heads[:, :, :2],
                angles,
                *rope[:2],
                (16, 8, 8),
                rope[2],
            )
        ),
    }


@pytest.mark.parametrize("name", operations())
def test_a_planned_operation_returns_the_operations_shapes(name: str):
    call = operations()[name]
    expected = call()
    with planning(lambda x, result: None):
        planned = call()
    pairs = list(zip(tree_leaves(planned), tree_leaves(expected), strict=True))
    assert pairs
    for ours, reference in pairs:
        assert (ours is None) == (reference is None)
        if reference is not None:
            assert (ours.shape, ours.dtype) == (reference.shape, reference.dtype)


@pytest.mark.parametrize(
    "name", ["gemm gelu", "gemm gelu only", "gemm gelu gradient", "gemm codes"]
)
def test_a_planned_product_is_one_library_call(name: str, monkeypatch: pytest.MonkeyPatch):
    call = operations()[name]
    expected = call()
    described = request.described

    def on_gpu(*key: Any) -> GemmRequest:
        return dataclasses.replace(described(*key), device="cuda", hardware=nvidia(9, 0))

    monkeypatch.setattr(cublaslt_library, "unavailable_reason", lambda: None)
    monkeypatch.setattr(request, "described", on_gpu)
    ledger = Ledger(lambda: "")
    with planning(lambda x, result: None), ledger:
        planned = call()
    pairs = list(zip(tree_leaves(planned), tree_leaves(expected), strict=True))
    assert all(
        (x is None and y is None) or (x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs
    )
    outputs = [x for x in tree_leaves(planned) if x is not None]
    # and no other allocations
    assert sum(allocated for _, allocated in ledger.events) == len(outputs)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("rmsnorm block rows", 0),
        ("layernorm block codes", 1),
        ("swiglu block codes", 0),
        ("swiglu backward block codes alone", 1),
    ],
)
def test_block_format_results_are_allocated_only_if_a_cast_follows(name: str, stored: int):
    call, ledger = operations()[name], Ledger(lambda: "")
    with planning(lambda x, result: None), ledger:
        planned = call()
    outputs = [x for x in tree_leaves(planned) if x is not None]
    assert sum(allocated for _, allocated in ledger.events) == len(outputs) + stored


def test_the_ledger_counts_a_storage_once_until_it_is_freed():
    ledger = Ledger(lambda: "here")
    with ledger:
        x = torch.empty(1000, dtype=torch.uint8)
        view = x.view(10, 100)
        assert ledger.bytes(ledger.live()) == 1024
        del x, view
        gc.collect()
        y = torch.empty(512, dtype=torch.uint8)
    assert ledger.bytes(ledger.live()) == 512
    assert ledger.bytes(ledger.live(ledger.peak(0))) == 1024
    del y


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(8192, 14336, 139_460_608), (4096, 4096, 128 * MIB), (64, 4096, 0), (0, 16, 0)],
)
def test_a_row_sums_planned_scratch_equals_the_figure_for_132_multiprocessors(
    rows: int, columns: int, expected: int
):
    assert sum_over_rows(rows, columns, 132) == expected


def test_scratch_memory_counts_at_the_peak_and_is_freed():
    ledger = Ledger(
        lambda: "", lambda operation, arguments: scratch_bytes(operation, arguments, 132)
    )
    with ledger:
        x = torch.empty(4096, 4096, dtype=BF16)
        other = x.sum(1, dtype=torch.float32)
        sums = x.sum(0, dtype=torch.float32)
    saved = x.nbytes + other.nbytes + sums.nbytes
    assert ledger.bytes(ledger.live(ledger.peak(0))) == saved + 128 * MIB
    assert ledger.bytes(ledger.live()) == saved


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8192, 14336), (4096, 4096), (4096, 1, 2048), (256, 1024)])
def test_a_row_sums_planned_memory_equals_the_measured_memory(shape: tuple[int, ...]):
    x = torch.zeros(shape, dtype=BF16, device="cuda")
    axes = tuple(range(x.dim() - 1))
    x.sum(axes, dtype=torch.float32)
    torch.cuda.synchronize()
    # Requested bytes: the allocator's blocks may be up to a MiB larger.
    requested = "requested_bytes.all."
    before = torch.cuda.memory_stats()[f"{requested}current"]
    torch.cuda.reset_peak_memory_stats()
    sums = x.sum(axes, dtype=torch.float32)
    measured = torch.cuda.memory_stats()[f"{requested}peak"] - before - sums.nbytes
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    assert measured == pytest.approx(
        sum_over_rows(x.numel() // shape[-1], shape[-1], processors), abs=MIB
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block"])
@pytest.mark.parametrize("name", [*MODULES, "layer"])
def test_the_planned_peak_equals_the_measured_peak(name: str, recipe: str):
    width, tokens = 2048, 4096
    model = {**MODULES, "layer": layer}[name](width, device="cuda")
    x = torch.randn(tokens, 1, width, dtype=BF16, device="cuda", requires_grad=True)
    plan = memory_plan(model, RECIPES[recipe], tokens)
    measured = plan.parameters + x.nbytes + measure_step(model, RECIPES[recipe], x)
    # The first product in an earlier test has allocated the libraries' workspaces.
    planned = plan.peak - plan.workspace
    assert abs(planned - measured) <= 0.05 * measured, f"{measured / MIB:.1f} MiB measured\n{plan}"


def measure_step(model: nn.Module, recipe: recipes.Recipe | None, x: torch.Tensor) -> int:
    """Peak bytes that a warm step allocates beyond the parameters, the recipe's state and its input."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = model(x)
        y.backward(torch.empty_like(y))

    for _ in range(2):
        step()
    model.zero_grad(set_to_none=True)
    x.grad = None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


BLOCKS = {
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.uint8,
    "block_scaled_states": True,
}


@pytest.mark.parametrize(
    ("options", "bytes_per_parameter"),
    [
        ({}, 8),
        ({"master_weights": True}, 12),
        ({"master_weights": True, "store_param_remainders": True}, 10),
        ({**BLOCKS, "stochastic_rounding": True}, 2 + 2 / 128),
        ({**BLOCKS, "master_weights": True, "store_param_remainders": True}, 4 + 2 / 128),
    ],
)
def test_the_states_of_a_fused_adam_are_planned_before_they_exist(options, bytes_per_parameter):
    layer = te.Linear(256, 256, bias=False, params_dtype=torch.bfloat16, device="cpu")
    optimizer = te.optimizers.FusedAdam(layer.parameters(), **options)
    plain = te.memory_plan(layer, None, 64)
    plan = te.memory_plan(layer, None, 64, optimizer=optimizer)
    assert plan.optimizer == bytes_per_parameter * 256 * 256
    assert plan.peak == plain.peak + plan.optimizer
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    states = [*optimizer.state[layer.weight].values()]
    states += optimizer._scales.get(layer.weight, {}).values()
    assert plan.optimizer == sum(state.nbytes for state in states)
    assert "optimizer" in str(plan) and "optimizer" not in str(plain)


def test_gradients_that_are_freed_in_the_backward_pass_are_not_planned_together():
    layers = torch.nn.Sequential(*(te.Linear(512, 512, bias=False, device="cpu") for _ in range(8)))
    weight = 512 * 512 * 4
    together = te.memory_plan(layers, None, 16)
    freed = te.memory_plan(layers, None, 16, step_in_backward=True)
    assert together.gradients >= 7 * weight
    assert freed.gradients <= weight and freed.peak <= together.peak - 6 * weight


def test_an_optimizer_without_states_cannot_be_planned():
    layer = te.Linear(64, 64, device="cpu")
    optimizer = torch.optim.AdamW(layer.parameters())
    with pytest.raises(ValueError, match="AdamW has no states before its first step"):
        te.memory_plan(layer, None, 16, optimizer=optimizer)
    layer(torch.randn(16, 64)).sum().backward()
    optimizer.step()
    plan = te.memory_plan(layer, None, 16, optimizer=optimizer)
    assert plan.optimizer == 2 * 4 * (64 * 64 + 64) + 2 * 4  # and two step counts


def test_a_budget_includes_the_states_of_a_planned_optimizer():
    layer = te.LayerNormMLP(64, 256, device="cpu")
    optimizer = te.optimizers.FusedAdam(layer.parameters())
    without = te.memory_plan(layer, None, 64)
    budget = 1.01 * without.peak / 2**30
    assert te.memory_plan(layer, None, 64, budget=budget).fits
    assert not te.memory_plan(layer, None, 64, budget=budget, optimizer=optimizer).fits
