"""Exported layers run in onnxruntime on a CPU with the results of the layers.

Tolerances: float32 results agree to 2e-6 of the largest value, which is the order of sums. Under a recipe a float32
value next to a rounding boundary may get the neighboring code, because QuantizeLinear divides by the scale where the
layers multiply; 0.2 % of the largest value, and a mean error of 1e-4 of it, allow for a few such codes.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.export import te_translation_table

onnx = pytest.importorskip("onnx", reason="the export to ONNX needs the extra onnx")
pytest.importorskip("onnxscript", reason="the export to ONNX needs the extra onnx")
ort = pytest.importorskip(
    "onnxruntime", reason="exported models run in onnxruntime, of the extra onnx"
)

RECIPES = {
    "float32": None,
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
PER_TENSOR = ("delayed", "current")
ROWS, BATCH = torch.export.Dim("rows"), torch.export.Dim("batch")


@pytest.fixture(scope="module", autouse=True)
def _one_registry_per_opset():
    """Build the registry of ONNX functions once; otherwise torch.onnx spends half of each export on it."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry  # imports onnx

    build = functools.cache(ONNXRegistry.from_torchlib)

    def copy_values(**options: int) -> ONNXRegistry:
        registry = copy.copy(build(**options))
        registry.functions = {
            name: list(functions) for name, functions in registry.functions.items()
        }
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copy_values))
        yield


def recipe_autocast(chosen: recipe.Recipe | None) -> te.autocast:
    return te.autocast(enabled=chosen is not None, recipe=chosen)


def warm_up(layer: torch.nn.Module, chosen: recipe.Recipe | None, *shape: int) -> torch.nn.Module:
    """Run three training steps, so that delayed scales and weights are not the initial ones."""
    for _ in range(3 if chosen is not None else 0):
        with recipe_autocast(chosen):
            layer(torch.randn(*shape) * 3.0).square().mean().backward()
    return layer.eval()


def export(
    layer: torch.nn.Module, x: torch.Tensor, chosen: recipe.Recipe | None, **options: Any
) -> Any:
    """Return the ONNX model of a layer, with all dimensions but the last dynamic unless `options` say otherwise."""
    names = [{0: ROWS, 1: BATCH}] if x.dim() == 3 else [{0: ROWS}]
    options = {"dynamic_shapes": names, "opset_version": 21} | options
    with torch.no_grad(), recipe_autocast(chosen), te.onnx_export(enabled=True):
        program = torch.onnx.export(
            layer,
            (x,),
            dynamo=True,
            custom_translation_table=te_translation_table,
            verbose=False,
            **options,
        )
    assert program is not None
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program.model_proto


def run(model: Any, x: torch.Tensor) -> np.ndarray:
    settings = ort.SessionOptions()
    # QGemm has no FP8 kernel; docs/export.md names the setting
    if Version(ort.__version__) < Version("1.28"):
        settings.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def nodes(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node]


def compare(
    layer: torch.nn.Module, model: Any, chosen: recipe.Recipe | None, *shapes: tuple[int, ...]
) -> None:
    for shape in shapes:
        x = torch.randn(*shape) * 3.0
        with torch.no_grad(), recipe_autocast(chosen):
            expected = layer(x).numpy()
        error = np.abs(run(model, x) - expected) / np.abs(expected).max()
        if chosen is None:
            assert error.max() < 2e-6
        else:
            assert error.max() < 2e-3 and error.mean() < 1e-4


LAYERS = {
    "Linear": lambda: te.Linear(64, 96, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96, zero_centered_gamma=True, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(
        64, 128, activation="swiglu", normalization="RMSNorm", device="cpu"
    ),
}


# LayerNormMLP contains a norm and products like the two other layers.
COVER = [("LayerNormMLP", "current"), ("LayerNormMLP", "mxfp8"), ("Linear", "delayed")]
OTHERS = [(kind, name) for kind in LAYERS for name in RECIPES if (kind, name) not in COVER]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("kind", "name"), [*COVER, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)]
)
def test_an_exported_layer_computes_the_same_results(kind: str, name: str):
    torch.manual_seed(0)
    chosen = RECIPES[name]
    layer = warm_up(LAYERS[kind](), chosen, 32, 64)
    model = export(layer, torch.randn(32, 64), chosen)
    compare(layer, model, chosen, (32, 64), (64, 64), (160, 64))
    products = 2 if kind == "LayerNormMLP" else 1
    pairs = 0 if chosen is None else 2 * products
    assert nodes(model).count("QuantizeLinear") == nodes(model).count("DequantizeLinear") == pairs


# Of these claims, test_an_exported_attention_rotates_and_normalizes (any batch and sequence under a recipe, grouped
# queries, a window) and test_an_exported_layer_computes_the_same_results (products under recipes) always run.
@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_an_exported_transformer_layer_takes_any_batch_and_sequence(name: str):
    torch.manual_seed(0)
    chosen = RECIPES[name]
    layer = te.TransformerLayer(64, 128, 4, num_gqa_groups=2, window_size=(9, 0), device="cpu")
    layer = warm_up(layer, chosen, 16, 2, 64)
    model = export(layer, torch.randn(16, 2, 64), chosen)
    compare(layer, model, chosen, (16, 2, 64), (32, 1, 64), (1, 32, 64), (48, 4, 64))
    pairs = 0 if chosen is None else 8
    assert nodes(model).count("QuantizeLinear") == pairs


class Rotated(torch.nn.Module):
    """A windowed attention of grouped queries with rotary angles, norms of queries and keys, and a learnable sink."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = te.MultiheadAttention(
            64,
            4,
            num_gqa_groups=2,
            attention_dropout=0.0,
            qk_norm_type="RMSNorm",
            input_layernorm=True,
            qkv_format="bshd",
            attn_mask_type="causal",
            window_size=(9, 0),
            softmax_type="learnable",
            fuse_qkv_params=True,
            device="cpu",
        )
        self.register_buffer("angles", te.RotaryPositionEmbedding(16)(64).cpu())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, rotary_pos_emb=self.angles)


@pytest.mark.parametrize(
    ("name", "others"),
    [("float32", [(3, 7, 64), (1, 64, 64)]), ("delayed", [(4, 8, 64), (1, 64, 64)])],
)
def test_an_exported_attention_rotates_and_normalizes(
    name: str, others: list[tuple[int, int, int]]
):
    torch.manual_seed(0)
    chosen = RECIPES[name]
    layer = Rotated().eval()
    torch.nn.init.normal_(layer.attention.core_attention.softmax_offset)
    shapes = [{0: BATCH, 1: torch.export.Dim("sequence", max=64)}]
    layer = warm_up(layer, chosen, 2, 16, 64)
    model = export(layer, torch.randn(2, 16, 64), chosen, dynamic_shapes=shapes)
    compare(layer, model, chosen, (2, 16, 64), *others)
    assert nodes(model).count("QuantizeLinear") == (0 if chosen is None else 4)


class Masked(torch.nn.Module):
    """A cross attention with padding masks of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = te.DotProductAttention(
            4, 16, qkv_format="bshd", attn_mask_type="padding", attention_type="cross"
        )

    def forward(self, q, k, v, hidden_q, hidden_kv):
        return self.attention(q, k, v, attention_mask=(hidden_q, hidden_kv))


@pytest.mark.slow
def test_an_exported_attention_reads_padding_masks():
    torch.manual_seed(0)
    layer = Masked().eval()

    def inputs(batch: int, queries: int, keys: int) -> tuple[torch.Tensor, ...]:
        q, k, v = (torch.randn(batch, n, 4, 16) for n in (queries, keys, keys))
        hidden = [
            torch.arange(n)[None, None, None] >= torch.randint(1, n + 1, (batch, 1, 1, 1))
            for n in (queries, keys)
        ]
        return (q, k, v, *hidden)

    q, kv = torch.export.Dim("q"), torch.export.Dim("kv")
    names = [
        {0: BATCH, 1: q},
        {0: BATCH, 1: kv},
        {0: BATCH, 1: kv},
        {0: BATCH, 3: q},
        {0: BATCH, 3: kv},
    ]
    with torch.no_grad(), te.onnx_export(True):
        program = torch.onnx.export(
            layer, inputs(3, 8, 12), dynamo=True, dynamic_shapes=names, verbose=False
        )
    assert program is not None
    session = ort.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for sizes in ((3, 8, 12), (2, 5, 3), (1, 1, 9)):
        given = inputs(*sizes)
        with torch.no_grad():
            want = layer(*given)
        named = {info.name: x.numpy() for info, x in zip(session.get_inputs(), given, strict=True)}
        torch.testing.assert_close(
            torch.from_numpy(session.run(None, named)[0]), want, rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_a_bfloat16_model_is_exported_in_bfloat16():
    """onnxruntime multiplies no bfloat16 on a CPU; ONNX's reference evaluator does."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 of NumPy is in ml_dtypes")
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(0)
    layer = te.TransformerLayer(32, 64, 2, params_dtype=torch.bfloat16, device="cpu").eval()
    x = torch.randn(4, 2, 32, dtype=torch.bfloat16)
    model = export(layer, x, None)
    assert {entry.data_type for entry in model.graph.initializer if entry.dims} >= {
        onnx.TensorProto.BFLOAT16
    }
    given = {model.graph.input[0].name: x.float().numpy().astype(ml_dtypes.bfloat16)}
    got = np.asarray(ReferenceEvaluator(model).run(None, given)[0], dtype=np.float32)
    with torch.no_grad():
        want = layer(x).float().numpy()
    # one step of bfloat16 at the largest value
    assert np.abs(got - want).max() <= 2.0**-7 * np.abs(want).max()


def divide(x: torch.Tensor) -> torch.Tensor:
    """Return the values of the codes that QuantizeLinear specifies for current scaling: x divided by the scale."""
    multiplier = torch.tensor(448.0) / x.float().abs().max()
    scale = multiplier.reciprocal()
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    "name",
    [
        "current",
        pytest.param("delayed", marks=pytest.mark.slow),
        pytest.param("mxfp8", marks=pytest.mark.slow),
    ],
)
def test_a_bfloat16_layer_is_exported_under_a_recipe(name: str):
    """Products in FP8 are computed in float32 between casts, which onnxruntime runs on a CPU.

    bfloat16 values are often exactly between two codes of current scaling, where a product with the inverse scale and a
    quotient round differently. The oracle of current scaling therefore divides, as ONNX specifies.
    """
    torch.manual_seed(0)
    chosen = RECIPES[name]
    layer = te.LayerNormLinear(64, 64, params_dtype=torch.bfloat16, device="cpu").eval()
    x = torch.randn(32, 64)

    class Cast(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layer(x.bfloat16()).float()

    model = Cast()
    model.layer = layer
    with torch.no_grad(), recipe_autocast(chosen):
        want = model(x)
        if name == "current":
            norm = torch.nn.functional.layer_norm(
                x.bfloat16().float(), (64,), eps=layer.eps
            ).bfloat16()
            want = (divide(norm) @ divide(layer.weight).t() + layer.bias.float()).bfloat16().float()
    got = torch.from_numpy(run(export(model, x, chosen), x))
    assert (got - want).abs().max() <= 2.0**-8 * want.abs().max()  # one step of bfloat16


@pytest.mark.parametrize("name", PER_TENSOR)
def test_one_scale_per_tensor_needs_no_other_opset_than_the_default(name: str):
    torch.manual_seed(0)
    chosen = RECIPES[name]
    layer = warm_up(te.Linear(32, 32, device="cpu"), chosen, 32, 32)
    model = export(layer, torch.randn(32, 32), chosen, opset_version=None)
    assert model.opset_import[0].version >= 19
    compare(layer, model, chosen, (48, 32))


@pytest.mark.parametrize(
    "chosen",
    [
        recipe.Float8CurrentScaling(use_power_2_scales=True),
        recipe.MXFP8BlockScaling(),
        recipe.DelayedScaling(fp8_format=recipe.Format.E4M3),
    ],
    ids=lambda chosen: type(chosen).__name__,
)
def test_extreme_values_get_the_codes_of_the_layer(chosen: recipe.Recipe):
    """Zero blocks, powers of two, values beyond the range: products by the identity return the decoded values."""
    layer = te.Linear(32, 32, bias=False, device="cpu").eval()
    torch.nn.init.eye_(layer.weight)
    x = torch.zeros(64, 32)
    x[1] = 2.0 ** torch.arange(-16, 16)
    x[2] = torch.linspace(-500.0, 500.0, 32)
    x[3:32] = torch.randn(29, 32) * 10.0 ** torch.arange(-14, 15)[:, None].float()
    x[32:] = torch.nextafter(x[:32], torch.tensor(torch.inf))
    with torch.no_grad(), recipe_autocast(chosen):
        want = layer(x)
    got = torch.from_numpy(run(export(layer, x, chosen), x))
    differ = got != want
    assert differ.float().mean() < 0.002  # next to a rounding boundary
    torch.testing.assert_close(got, want, rtol=2.0**-2, atol=0.0)
