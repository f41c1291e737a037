"""NVFP4 layers and tensors with 4over6 and per-row scales: dequantized products, tensors, settings."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.layers import make_layer
from tests.support.link import RecordedLink
from transformer_engine.common.recipe import CustomRecipe, NVFP4BlockScaling
from transformer_engine.pytorch.offload import marks
from transformer_engine.pytorch.offload.hooks import OffloadContext
from transformer_engine.pytorch.offload.synchronizer import DefaultOffloadSynchronizer
from transformer_engine.pytorch.permutation import moe_permute
from transformer_engine.pytorch.primitives.operand import Operand
from transformer_engine.pytorch.tensor.storage.fsdp import gather_payload, join_payload

_COMMON = {"disable_rht": True, "disable_stochastic_rounding": True}
VARIANTS = {
    "rows": {"row_scaled_activation": True},
    "4over6": {"nvfp4_4over6": "all"},
    "4over6 of weights, MSE, 448": {
        "nvfp4_4over6": "weights",
        "nvfp4_4over6_err_mode": "MSE",
        "nvfp4_4over6_e4m3_use_256": "none",
    },
    "rows and 4over6": {"row_scaled_activation": True, "nvfp4_4over6": "all"},
}
RECIPES = {name: NVFP4BlockScaling(**_COMMON, **options) for name, options in VARIANTS.items()}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def make_quantizers(name: str) -> tuple[te.NVFP4Quantizer, te.NVFP4Quantizer, te.NVFP4Quantizer]:
    """Quantizers for the input, the weight and the gradient, written independently of the recipe's table."""
    options = VARIANTS[name]
    scope = options.get("nvfp4_4over6", "none")
    largest = 448 if options.get("nvfp4_4over6_e4m3_use_256") == "none" else 256
    mode = options.get("nvfp4_4over6_err_mode", "MAE")

    def chosen(kind: str) -> dict:
        if scope not in ("all", kind):
            return {}
        return {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": largest, "nvfp4_4over6_err_mode": mode}

    rows = options.get("row_scaled_activation", False)
    return (
        te.NVFP4Quantizer(row_scaled_nvfp4=rows, **chosen("activations")),
        te.NVFP4Quantizer(with_2d_quantization=True, **chosen("weights")),
        te.NVFP4Quantizer(),
    )


def directions(quantizer: te.NVFP4Quantizer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 values of the row-wise and column-wise codes."""
    values = []
    for rowwise in (True, False):
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=rowwise, columnwise=not rowwise)
        values.append(quantizer(x).dequantize(dtype=torch.float32).double())
    return values[0], values[1]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.double() - expected).abs().max() <= 2e-6 * expected.abs().max()


@every_variant
def test_linear_multiplies_dequantized_operands_forward_and_backward(name):
    torch.manual_seed(0)
    layer = te.Linear(64, 48, device="cpu", params_dtype=torch.float32)
    x = (torch.randn(32, 64) * torch.exp2(torch.arange(32) % 7 - 3.0)[:, None]).requires_grad_()
    dy = torch.randn(32, 48)
    with te.autocast(recipe=RECIPES[name]):
        y = layer(x)
    y.backward(dy)
    of_input, of_weight, of_gradient = make_quantizers(name)
    (x_rows, x_columns), (dy_rows, dy_columns) = (
        directions(of_input, x.detach()),
        directions(of_gradient, dy),
    )
    w_rows, w_columns = directions(of_weight, layer.weight.detach())
    assert torch.equal(w_rows, w_columns)
    assert_near(y.detach(), x_rows @ w_rows.T + layer.bias.double())
    assert_near(x.grad, dy_rows @ w_columns)
    assert_near(layer.weight.grad, dy_columns.T @ x_columns)
    assert_near(layer.bias.grad, dy.double().sum(0))


@every_variant
@pytest.mark.parametrize(
    "kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "TransformerLayer"]
)
@pytest.mark.sampled
def test_every_layer_trains(name, kind):
    options = {"params_dtype": torch.float32}
    layer = make_layer(kind, device="cpu", **options)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    arguments = ([32, 32],) if kind == "GroupedLinear" else ()
    x = torch.randn(64, 64) if kind == "GroupedLinear" else torch.randn(16, 4, 64)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with te.autocast(recipe=RECIPES[name]):
            loss = (layer(x, *arguments) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses


def test_grouped_linear_equals_linear_layers():
    recipe = RECIPES["rows and 4over6"]
    grouped = te.GroupedLinear(2, 64, 48, device="cpu", params_dtype=torch.float32)
    x = torch.randn(48, 64)
    with te.autocast(recipe=recipe):
        joint = grouped(x, [16, 32])
    for group, part in enumerate(x.split([16, 32])):
        single = te.Linear(64, 48, device="cpu", params_dtype=torch.float32)
        with torch.no_grad():
            single.weight.copy_(getattr(grouped, f"weight{group}"))
            single.bias.copy_(getattr(grouped, f"bias{group}"))
        with te.autocast(recipe=recipe):
            assert torch.equal(single(part), joint.split([16, 32])[group])


@every_variant
def test_a_custom_recipe_with_the_same_quantizers_gives_the_same_bits(name):
    layer = te.Linear(64, 48, device="cpu")
    x, results = torch.randn(32, 64), []
    places = {"input": 0, "weight": 1}
    custom = CustomRecipe(
        qfactory=lambda role: make_quantizers(name)[places.get(role.tensor_type, 2)]
    )
    for recipe in (RECIPES[name], custom):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, layer.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "4over6"])
def test_compiled_layers_are_bitwise_equal_to_eager_layers(name):
    layer = te.Linear(64, 48, device="cpu")
    x, results = torch.randn(32, 64), []

    def step(x):
        with te.autocast(recipe=RECIPES[name]):
            return layer(x)

    for run in (step, torch.compile(step, fullgraph=True)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, layer.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_per_row_maxima_are_offloaded_like_codes_and_scales(monkeypatch):
    """The `dequantized` backward reads the row-wise input, whose maxima return from the host too."""
    monkeypatch.setattr(marks, "SMALLEST", 16)
    recipe = NVFP4BlockScaling(
        **_COMMON, row_scaled_activation=True, backward_override="dequantized"
    )
    plain = torch.nn.ModuleList([te.Linear(64, 64, device="cpu") for _ in range(3)])
    moved, x, results = copy.deepcopy(plain), torch.randn(64, 64), []
    link = RecordedLink()
    context = OffloadContext(DefaultOffloadSynchronizer(3, 2, link=link))
    for model, after in ((plain, None), (moved, context.synchronize)):
        y = leaf = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            for layer in model:
                if after is None:
                    y = layer(y)
                    continue
                with context:
                    y = layer(y)
                y = after(y)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    assert link.log.count("out") == link.log.count("back") > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_offloading_lists_per_row_maxima_but_no_single_maximum():
    x = torch.randn(32, 64)
    for rows in (True, False):
        operand = te.NVFP4Quantizer(row_scaled_nvfp4=rows).operands(x, True, False).rowwise
        assert isinstance(operand, Operand)
        assert any(part is operand.amax for part in marks.list_tensors(operand)) is rows


@pytest.fixture(
    params=[{"row_scaled_nvfp4": True}, {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}], ids=str
)
def quantizer(request) -> te.NVFP4Quantizer:
    return te.NVFP4Quantizer(**request.param)


class TestTensors:
    x = (
        torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        * torch.exp2(torch.arange(64.0) / 4)[:, None]
    )

    def test_modes_and_maxima_are_attributes(self, quantizer):
        result = quantizer(self.x)
        per_row = quantizer.row_scaled_nvfp4
        assert result._amax_rowwise.shape == ((64,) if per_row else (1,))
        assert result._amax_columnwise.shape == (1,)
        assert result._row_scaled_nvfp4 is per_row
        assert result._nvfp4_use_4over6 is quantizer.nvfp4_use_4over6
        assert result._nvfp4_e4m3_max == quantizer.nvfp4_e4m3_max
        assert quantizer.is_quantizable(self.x) is not per_row

    def test_pickles_copies_views_and_row_slices_keep_the_values(self, quantizer):
        result = quantizer(self.x)
        values = result.dequantize()
        for twin in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result), result.clone()):
            assert torch.equal(twin.dequantize(), values)
            assert twin._row_scaled_nvfp4 is result._row_scaled_nvfp4
        assert torch.equal(result.view(4, 16, 32).dequantize(), values.view(4, 16, 32))
        for start in (0, 16, 48):
            assert torch.equal(result[start : start + 16].dequantize(), values[start : start + 16])

    def test_writes_requantize_with_the_tensors_own_mode(self, quantizer):
        result, repeated = quantizer(self.x), quantizer.make_empty((64, 32))
        repeated.copy_(self.x)
        assert torch.equal(repeated.dequantize(), result.dequantize())
        repeated.quantize_(2 * self.x)
        repeated[16:32].copy_(self.x[16:32])
        if quantizer.row_scaled_nvfp4:
            quantizer.set_usage(columnwise=False)
            alone = quantizer.make_empty((64, 32))
            alone.quantize_(2 * self.x)
            alone[16:32].copy_(self.x[16:32])
            assert torch.equal(alone.dequantize()[16:32], result.dequantize()[16:32])
            assert torch.equal(alone.dequantize()[32:], quantizer(2 * self.x).dequantize()[32:])

    def test_gathered_shards_are_the_whole(self, quantizer):
        quantizer.set_usage(columnwise=False)
        if not quantizer.row_scaled_nvfp4:
            return
        parts = [gather_payload(quantizer(part).as_storage()) for part in self.x.split(16)]
        gathered = [
            torch.cat(tensors) for tensors in zip(*(tensors for tensors, _ in parts), strict=True)
        ]
        full = join_payload(gathered, parts[0][1], torch.float32)
        assert full._amax_rowwise.shape == (64,)
        assert torch.equal(full.dequantize(), quantizer(self.x).dequantize())

    def test_permuted_tokens_keep_their_values(self, quantizer):
        quantizer.set_usage(columnwise=False)
        result = quantizer(self.x)
        indices = torch.randperm(4).repeat(16)[:, None].int()
        moved, _ = moe_permute(result, indices, map_type="index")
        expected, _ = moe_permute(result.dequantize(), indices, map_type="index")
        assert torch.equal(moved.dequantize(), expected)

    def test_bytes_of_another_mode_are_rejected(self, quantizer):
        plain = te.NVFP4Quantizer()(self.x)
        with pytest.raises(RuntimeError, match="cannot copy NVFP4 data with"):
            plain.copy_from_storage(quantizer(self.x))
        plain.copy_(quantizer(self.x))
        assert plain._nvfp4_e4m3_max == 448

    def test_swizzled_scales_have_the_same_values(self, quantizer):
        result = quantizer(self.x)
        fields = result.get_metadata()
        for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
            rows, columns = fields[name].shape
            tiles = fields[name].view(rows // 128, 4, 32, columns // 4, 4)
            fields[name] = tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)
        shape, dtype = result.shape, fields.pop("dtype")
        fields["with_gemm_swizzled_scales"] = True
        swizzled = te.NVFP4Tensor(shape, dtype, **fields)
        assert torch.equal(swizzled.dequantize(), result.dequantize())


@pytest.mark.parametrize(
    "excluded",
    [{"with_rht": True, "with_post_rht_amax": True}, {"stochastic_rounding": True}],
    ids=str,
)
@pytest.mark.parametrize("variant", ["row_scaled_nvfp4", "nvfp4_use_4over6"])
def test_settings_that_exclude_each_other_are_named(variant, excluded):
    with pytest.raises(ValueError, match=f"{variant}=True excludes {next(iter(excluded))}=True"):
        te.NVFP4Quantizer(**{variant: True}, **excluded)


def test_fast_errors_follow_the_environment_in_the_next_call(monkeypatch):
    quantizer = te.NVFP4Quantizer(nvfp4_use_4over6=True)
    assert quantizer.spec(True, True).four_over_six == "MAE"
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", "1")
    assert quantizer.spec(True, True).four_over_six == "fast MAE"
