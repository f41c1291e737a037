"""te.convert: modules of torch.nn in any model compute with this engine, and te.restore undoes it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from tests.integrations.torch_models import (
    WIDTH,
    Block,
    Decoder,
    Encoder,
    Experts,
    features,
    tokens,
)
from tests.support import pages
from tests.support.tolerances import UNIT
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from transformer_engine.pytorch.integrations.torch_modules.attention import convert_attention

pytestmark = pytest.mark.usefixtures("emulated")

RECIPES = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "decoder": (Decoder, tokens),
    "encoder": (Encoder, features),
    "experts": (Experts, lambda: features().flatten(0, 1)),
}


def convert_model(model: Any, recipe: Recipe | None = None, **options: Any) -> Any:
    return te.convert(model, recipe, verbose=False, **options)


def choices(model: nn.Module) -> dict[str, str]:
    return {row.name: row.choice for row in te.conversion_table(model)}


def reasons(model: nn.Module) -> dict[str, str]:
    return {row.name: row.reason for row in te.conversion_table(model)}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all parameter gradients."""
    y = model(x)
    return [
        y,
        *torch.autograd.grad(
            y.float().square().mean(), list(model.parameters()), allow_unused=True
        ),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_conversion_without_a_recipe_matches_the_original(name: str, dtype: torch.dtype):
    make, batch = MODELS[name]
    model, x = make().to(dtype), batch()
    x = x.to(dtype) if x.is_floating_point() else x
    expected = gradients(model, x)
    results = gradients(convert_model(model, sample=x), x)
    assert "te" in choices(model).values()
    for result, exact in zip(results, expected, strict=True):
        # Sums in another order, through a few layers: some units of the largest element.
        atol = 8 * UNIT[dtype] * exact.abs().max().item()
        torch.testing.assert_close(result, exact, rtol=8 * UNIT[dtype], atol=atol)


class ByHand(nn.Module):
    """The decoder's layers with every Linear replaced by a te.Linear of the same weight, under autocast."""

    def __init__(self, layer: nn.Linear, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.layer = te.Linear(
            layer.in_features, layer.out_features, bias=layer.bias is not None, device="cpu"
        )
        self.layer.weight = layer.weight
        if layer.bias is not None:
            self.layer.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        with te.autocast(recipe=self.recipe):
            return self.layer(x)


@pytest.mark.parametrize("name", RECIPES)
def test_converted_layers_equal_te_linear_bit_for_bit(name: str):
    recipe, model, x = RECIPES[name], Encoder(), features(4)
    expected = copy.deepcopy(model)
    for path in ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "mlp.0", "mlp.2"):
        expected.set_submodule(path, ByHand(expected.get_submodule(path), recipe))
    convert_model(model, recipe, sample=x, exclude=["norm*", "head"])
    assert list(choices(model).values()).count(type(recipe).__name__) == 6
    x = features(16)  # 384 rows, a multiple of every alignment
    for result, exact in zip(gradients(model, x), gradients(expected, x), strict=True):
        assert torch.equal(result, exact)


@pytest.mark.parametrize("rows", [0, 1, 15, 33])
def test_uneven_rows_equal_rows_that_are_padded_by_hand(rows: int):
    recipe, layer = Float8CurrentScaling(), nn.Linear(WIDTH, 32)
    exact = ByHand(copy.deepcopy(layer), recipe)
    x = torch.randn(rows, WIDTH)
    padded = nn.functional.pad(x, (0, 0, 0, -rows % 16))
    convert_model(layer, recipe, convert_outputs=True)
    ours, reference = x.clone().requires_grad_(), padded.requires_grad_()
    y, z = layer(ours), exact(reference)[:rows]
    assert torch.equal(y, z)
    (y * torch.arange(32)).sum().backward()
    (z * torch.arange(32)).sum().backward()
    assert reference.grad is not None and ours.grad is not None
    assert torch.equal(ours.grad, reference.grad[:rows])
    assert torch.equal(layer.weight.grad, exact.layer.weight.grad)
    assert torch.equal(layer.bias.grad, exact.layer.bias.grad)


def test_state_dicts_load_strictly_in_both_directions():
    original, model = Decoder(), Decoder()
    keys = list(model.state_dict())
    convert_model(model, Float8CurrentScaling(), sample=tokens())
    model(tokens()).sum().backward()
    assert list(model.state_dict()) == keys
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.1)
    model.load_state_dict(original.state_dict())
    original.load_state_dict(model.state_dict())
    for ours, reference in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(ours, reference)


def test_an_optimizer_from_before_the_conversion_trains_the_model():
    model, x = Decoder(), tokens()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    convert_model(model, Float8CurrentScaling(), sample=x)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())

    def step() -> float:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [step() for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_restored_models_compute_the_same_bits(name: str):
    make, batch = MODELS[name]
    model, x = make(), batch()
    expected = gradients(model, x)
    attributes = {path: (type(module), set(vars(module))) for path, module in model.named_modules()}
    convert_model(model, Float8CurrentScaling(), sample=x)
    gradients(model, x)
    assert te.restore(model) is model
    assert {
        path: (type(module), set(vars(module))) for path, module in model.named_modules()
    } == attributes
    for result, exact in zip(gradients(model, x), expected, strict=True):
        assert torch.equal(result, exact)


@pytest.mark.parametrize(
    ("filters", "selected"),
    [
        ({"include": "layers.0.attention.*"}, 4),
        ({"include": ["layers.*.w1", "layers.*.w2"]}, 4),
        ({"include": lambda name, module: name.endswith("wq")}, 2),
        ({"exclude": "layers.*"}, 1),
        (
            {"include": "layers.*", "exclude": lambda name, module: isinstance(module, nn.RMSNorm)},
            14,
        ),
    ],
)
def test_filters_select_modules_by_name(filters: dict[str, Any], selected: int):
    model = convert_model(Decoder(), Float8CurrentScaling(), sample=tokens(), **filters)
    assert sum(choice != "torch" for choice in choices(model).values()) == selected


def test_a_weight_shared_with_an_embedding_is_not_converted():
    model = convert_model(
        Decoder(tied=True), Float8CurrentScaling(), sample=tokens(), convert_outputs=True
    )
    assert type(model.output) is nn.Linear
    assert reasons(model)["output"] == "shares its weight with tok_embeddings"


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _add_hook() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def _replace_forward() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda input: input
    return layer


def _quantized() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return layer


def _quantized_tensor() -> nn.Linear:
    layer = nn.Linear(WIDTH, WIDTH)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer.weight = te.Linear(WIDTH, WIDTH, device="cpu").weight
    return layer


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: Scaled(WIDTH, WIDTH), "Scaled is a subclass of Linear"),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        "parametrized",
    ),
    "spectral": (lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), "hooks"),
    "hooked": (_add_hook, "hooks"),
    "replaced": (_replace_forward, "forward was replaced"),
    "quantized": (_quantized, "float8_e4m3fn"),
    "tensor": (_quantized_tensor, "a Float8Tensor, which is quantized"),
    "float64": (lambda: nn.Linear(WIDTH, WIDTH).double(), "float64"),
    "odd": (lambda: nn.Linear(WIDTH, 40), "out_features=40 is not divisible by 16"),
    "unbiased": (lambda: nn.LayerNorm(WIDTH, bias=False), "without a bias"),
    "fixed": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "no weight parameter"),
    "epsilon": (lambda: nn.RMSNorm(WIDTH), "eps=None"),
}


@pytest.mark.parametrize("name", LEFT)
def test_unsupported_modules_are_not_converted_and_have_a_reason(name: str):
    make, reason = LEFT[name]
    model = nn.ModuleDict({"layer": make()})
    before = type(model["layer"]), set(vars(model["layer"]))
    convert_model(model, Float8CurrentScaling())
    assert (type(model["layer"]), set(vars(model["layer"]))) == before
    assert reason in reasons(model)["layer"]


def test_output_layers_stay_in_high_precision_unless_requested():
    model = convert_model(Decoder(), Float8CurrentScaling(), sample=tokens())
    assert "computes an output" in reasons(model)["output"]

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(
            model(tokens()).flatten(0, 1).float(), tokens().flatten()
        )

    te.restore(model)
    assert choices(convert_model(model, Float8CurrentScaling(), sample=loss))["output"] == "torch"
    te.restore(model)
    assert choices(convert_model(Decoder().bfloat16(), sample=loss))["output"] == "torch"
    every = convert_model(model, Float8CurrentScaling(), sample=loss, convert_outputs=True)
    assert choices(every)["output"] == "Float8CurrentScaling"


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, WIDTH, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("esk,ekn->esn", x, self.w1)


def test_experts_in_one_parameter_are_not_converted_and_have_a_reason():
    model = convert_model(
        nn.ModuleDict({"experts": StackedExperts(), "conv": nn.Conv1d(4, 8, 3)}),
        Float8CurrentScaling(),
    )
    assert list(reasons(model)) == ["experts"] and "grouped_mm" in reasons(model)["experts"]


def test_modules_unused_by_the_sample_are_not_converted():
    model = Decoder()
    model.unused = nn.Linear(WIDTH, WIDTH)
    assert (
        reasons(convert_model(model, Float8CurrentScaling(), sample=tokens()))["unused"]
        == "not called by the sample"
    )


@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: (x,), lambda x: {"tokens": x}, lambda x: lambda m: m(x)]
)
def test_samples_are_tensors_arguments_or_functions(form: Callable[[Tensor], Any]):
    model = convert_model(Decoder(), Float8CurrentScaling(), sample=form(tokens()))
    assert choices(model)["layers.0.w1"] == "Float8CurrentScaling"


def test_the_sample_changes_no_random_state_buffer_or_gradient():
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 32))
    state, buffers = torch.get_rng_state(), copy.deepcopy(dict(model.named_buffers()))
    convert_model(model, Float8CurrentScaling(), sample=torch.zeros(16, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("present", [True, False], ids=["accumulated", "absent"])
def test_a_sample_with_a_backward_pass_leaves_gradients_as_they_were(present: bool):
    model, x = Encoder(), features()
    if present:
        model(x).square().sum().backward()
    objects = [parameter.grad for parameter in model.parameters()]
    values = copy.deepcopy(objects)

    def sample(model: nn.Module) -> None:
        model(x).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

    convert_model(model, Float8CurrentScaling(), sample=sample)
    for parameter, gradient, value in zip(model.parameters(), objects, values, strict=True):
        assert parameter.grad is gradient
        assert gradient is None or torch.equal(gradient, value)


def test_gradients_are_restored_after_a_sample_that_fails():
    model, x = Encoder(), features()
    model(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]

    def sample(model: nn.Module) -> None:
        model(x).sum().backward()
        raise KeyError("sample")

    with pytest.raises(KeyError, match="sample"):
        convert_model(model, Float8CurrentScaling(), sample=sample)
    assert [parameter.grad for parameter in model.parameters()] == gradients


def test_torch_autocast_gives_the_dtypes_of_the_original():
    model, x = Encoder(), features()
    with torch.autocast("cpu", torch.bfloat16):
        expected = [model.norm1(x), model.mlp[0](x), model(x)]
        convert_model(model, sample=x)
        results = [model.norm1(x), model.mlp[0](x), model(x)]
    assert [result.dtype for result in results] == [exact.dtype for exact in expected]
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=4 * UNIT[torch.bfloat16], atol=0.03)


def test_without_a_recipe_the_callers_autocast_applies():
    model, x, recipe = Encoder(), features(), Float8CurrentScaling()
    exact = convert_model(copy.deepcopy(model), recipe, sample=x)(x)
    convert_model(model, sample=x)
    assert not torch.equal(model(x), exact)
    with te.autocast(recipe=recipe):
        assert torch.equal(model(x), exact)


def test_copies_and_pickles_compute_the_same():
    model, x = convert_model(Decoder(), Float8CurrentScaling(), sample=tokens()), tokens()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for result, exact in zip(gradients(other, x), gradients(model, x), strict=True):
            assert torch.equal(result, exact)
        te.restore(other)
    assert "Converted" in repr(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_forward_pass(reentrant: bool):
    block = convert_model(Block(), Float8CurrentScaling(), exclude="w2")
    x = features().requires_grad_()
    block(x).square().sum().backward()
    expected = [x.grad, *[parameter.grad for parameter in block.parameters()]]
    x.grad = None
    block.zero_grad()
    checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()  # pyright: ignore
    for result, exact in zip(
        [x.grad, *[p.grad for p in block.parameters()]], expected, strict=True
    ):
        assert torch.equal(result, exact)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "recipe", [None, Float8CurrentScaling()], ids=["high precision", "current"]
)
def test_compiled_models_compute_the_same(recipe: Recipe | None):
    block, x = convert_model(Block(), recipe), features()
    expected = gradients(block, x)
    results = gradients(torch.compile(block, backend="aot_eager", fullgraph=True), x)  # pyright: ignore
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "autocast", "dtype"),
    [
        ({}, False, torch.float32),
        ({}, True, torch.float32),
        ({"use_power_2_scales": True}, False, torch.bfloat16),
        ({"fp8_format": Format.E4M3}, True, torch.bfloat16),
    ],
    ids=str,
)
def test_current_scaling_is_traced_as_torch_operations_with_equal_bits(options, autocast, dtype):
    """A compiler fuses them, which it cannot do with the engine's operators."""
    torch._dynamo.reset()
    layers = (
        nn.Linear(WIDTH, 128),
        nn.GELU(),
        nn.Linear(128, WIDTH, bias=False),
        nn.LayerNorm(WIDTH),
    )
    model, x = nn.Sequential(*layers).to(dtype), features().to(dtype)
    convert_model(model, Float8CurrentScaling(**options), sample=x, compiled=True)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_autograd(fw_compiler=lambda graph, _: graph.forward)(graph, inputs)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(model, x)
        results = gradients(torch.compile(model, backend=backend, fullgraph=True), x)  # pyright: ignore
    for result, exact in zip(results, expected, strict=True):
        assert torch.equal(result, exact)
    (graph,) = graphs
    names = {
        str(node.target)
        for part in graph.modules()
        for node in getattr(part, "graph", torch.fx.Graph()).nodes
    }
    assert not [name for name in names if "transformer_engine" in name]
    assert any("amax" in name for name in names)


@pytest.mark.parametrize("frozen", ["weights", "input", "everything"])
def test_traced_layers_without_some_gradients_compute_the_others(frozen: str):
    torch._dynamo.reset()
    model, x = convert_model(Block(), Float8CurrentScaling()), features()
    model.requires_grad_(frozen == "input")
    x.requires_grad_(frozen == "weights")
    tensors = [tensor for tensor in (x, *model.parameters()) if tensor.requires_grad]
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    exact, y = model(x), compiled(x)
    assert torch.equal(y, exact)
    if tensors:
        expected = torch.autograd.grad(exact.square().sum(), tensors)
        for result, gradient in zip(
            torch.autograd.grad(y.square().sum(), tensors), expected, strict=True
        ):
            assert torch.equal(result, gradient)


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_traced_layers_take_any_number_of_rows(rows: int):
    torch._dynamo.reset()
    layer = convert_model(nn.Linear(WIDTH, 32), Float8CurrentScaling(), convert_outputs=True)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(rows, WIDTH)
    assert torch.equal(compiled(x), layer(x))


def test_repeated_blocks_share_one_compiled_graph():
    """A block that is compiled by itself, as in torchtitan, is compiled once and not once per repetition."""
    model = convert_model(Decoder(layers=10), Float8CurrentScaling(), sample=tokens())
    expected, counter = model(tokens()), CompileCounter()
    for block in model.layers:
        block.compile(backend=counter, fullgraph=True)
    assert torch.equal(model(tokens()), expected)
    assert counter.frame_count == 1


def test_repeated_blocks_with_engine_attention_share_one_compiled_graph():
    """More layers than torch's recompile limit."""
    model = Decoder(layers=10)
    for block in model.layers:
        convert_attention(block.attention, None)
    expected, counter = model(tokens()), CompileCounter()
    for block in model.layers:
        block.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(model(tokens()), expected)
    assert counter.frame_count == 1


def test_models_without_memory_convert_before_their_initialization():
    with torch.device("meta"):
        model = Decoder()
    convert_model(model, Float8CurrentScaling(), sample=tokens().to("meta"))
    model.to_empty(device="cpu")
    original = Decoder()
    model.load_state_dict(original.state_dict())
    assert torch.equal(
        model(tokens()), convert_model(original, Float8CurrentScaling(), sample=tokens())(tokens())
    )
    layer = model.layers[0].w1
    layer.reset_parameters()  # as for nn.Linear
    assert layer.weight.abs().max() <= WIDTH**-0.5


def test_explain_names_the_backends_of_a_converted_layer():
    layer = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
    convert_model(layer, Float8CurrentScaling())
    assert "gemm" in str(te.explain(layer[0], features()))


def test_the_page_runs_and_prints_its_table(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pages.run("convert.md")
    if not torch.cuda.is_available():
        assert pages.examples("convert.md", "text") == [capsys.readouterr().out]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"recipe": DelayedScaling()}, ValueError, "history"),
        ({"recipe": "fp8"}, TypeError, "recipe"),
        ({"include": 3}, TypeError, "include=3"),
        ({"exclude": [nn.Linear]}, TypeError, "exclude="),
        ({"timed": True}, ValueError, "timed=True has no sample"),
    ],
)
def test_wrong_arguments_change_nothing(
    arguments: dict[str, Any], error: type[Exception], words: str
):
    model = Block()
    with pytest.raises(error, match=words):
        te.convert(model, **arguments)
    assert all(
        type(module) is not None and "Converted" not in type(module).__name__
        for module in model.modules()
    )


def test_a_model_is_converted_once_and_restored_once():
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"):
        te.convert(3)  # pyright: ignore
    model = convert_model(Block())
    with pytest.raises(ValueError, match="converted already"):
        te.convert(model)
    te.restore(model)
    with pytest.raises(ValueError, match="nothing to restore"):
        te.restore(model)
    with pytest.raises(ValueError, match="is not converted"):
        te.conversion_table(model)


def test_a_parametrized_layer_names_the_remedy_and_can_be_restored_after_it():
    model = convert_model(nn.Sequential(nn.Linear(WIDTH, WIDTH)), Float8CurrentScaling())
    layer = model[0]
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(
        ValueError, match=r"^0 is parametrized; .*remove_parametrizations for weight$"
    ):
        te.restore(model)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(te.restore(model)[0]) is nn.Linear


def test_the_table_prints_repeated_layers_as_one_row(capsys):
    model = te.convert(Decoder(), Float8CurrentScaling(), sample=tokens())
    printed = capsys.readouterr().out
    assert printed == f"{te.conversion_table(model)}\n"
    assert "layers.*.attention.wq (2)" in printed and "Linear 64 -> 128" in printed
    assert len(list(te.conversion_table(model))) == 1 + 2 * 10 + 1 + 0
    assert "not timed" in printed
