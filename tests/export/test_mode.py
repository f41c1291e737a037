"""The mode of an export: its scope, the exported programs of torch.export, and the calls that cannot be exported."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch

import transformer_engine.pytorch as te
from tests.support.pages import run as run_page
from transformer_engine.common import recipe
from transformer_engine.pytorch.export import assert_warmed_up, is_in_onnx_export_mode


def test_the_mode_ends_with_its_block_and_belongs_to_a_thread():
    records: list[bool] = []
    with te.onnx_export(enabled=True):
        assert is_in_onnx_export_mode()
        with te.onnx_export():  # off by default
            assert not is_in_onnx_export_mode()
        assert is_in_onnx_export_mode()
        thread = threading.Thread(target=lambda: records.append(is_in_onnx_export_mode()))
        thread.start()
        thread.join()
    assert records == [False] and not is_in_onnx_export_mode()
    with pytest.raises(ZeroDivisionError), te.onnx_export(True):
        raise ZeroDivisionError
    assert not is_in_onnx_export_mode()


def test_an_export_changes_no_scales_and_no_later_results():
    chosen = recipe.DelayedScaling()
    layer = te.Linear(32, 32, device="cpu")
    x = torch.randn(32, 32)
    with te.autocast(recipe=chosen):
        layer(x).sum().backward()
    state = layer.fp8_meta["scaling_fwd"]
    before = state.scale.clone(), state.amax_history.clone()
    with te.onnx_export(True), te.autocast(recipe=chosen):
        inside = layer(x)
    assert torch.equal(before[0], state.scale) and torch.equal(before[1], state.amax_history)
    with torch.no_grad(), te.autocast(recipe=chosen):
        outer = layer(x)
    torch.testing.assert_close(inside, outer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chosen", [None, recipe.MXFP8BlockScaling()], ids=["float32", "mxfp8"])
def test_a_program_of_torch_export_has_aten_and_tex_operators_only(chosen: recipe.Recipe | None):
    layer = te.LayerNormMLP(32, 64, activation="geglu", device="cpu").eval()
    x, rows = torch.randn(32, 32), torch.export.Dim("rows")
    with (
        torch.no_grad(),
        te.onnx_export(True),
        te.autocast(enabled=chosen is not None, recipe=chosen),
    ):
        program = torch.export.export(layer, (x,), strict=False, dynamic_shapes=[{0: rows}])
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    spaces = {target.namespace for target in called if isinstance(target, torch._ops.OpOverload)}
    assert spaces == ({"aten"} if chosen is None else {"aten", "tex"})
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    with torch.no_grad(), te.autocast(enabled=chosen is not None, recipe=chosen):
        for count in (32, 96):
            x = torch.randn(count, 32)
            torch.testing.assert_close(loaded(x), layer(x), rtol=1e-5, atol=1e-6)


def _grouped() -> tuple[Any, tuple[Any, ...]]:
    return te.GroupedLinear(2, 32, 32, device="cpu"), (torch.randn(32, 32), [16, 16])


def _quantized_weight() -> tuple[Any, tuple[Any, ...]]:
    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        return te.Linear(32, 32, device="cpu"), (torch.randn(32, 32),)


def _packed() -> tuple[Any, tuple[Any, ...]]:
    layer = te.DotProductAttention(2, 16, qkv_format="thd", attn_mask_type="padding")
    q = torch.randn(8, 2, 16)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    return lambda *x: layer(*x, cu_seqlens_q=bounds, cu_seqlens_kv=bounds), (q, q, q)


REJECTED = {
    "GroupedLinear cannot be exported": (_grouped, None),
    "Float8Tensor cannot be exported": (_quantized_weight, recipe.Float8CurrentScaling()),
    "qkv_format='thd'": (_packed, None),
    "NVFP4Quantizer cannot be exported": (
        lambda: (te.Linear(32, 32, device="cpu"), (torch.randn(32, 32),)),
        recipe.NVFP4BlockScaling(),
    ),
    "attention_dropout=0.1": (
        lambda: (te.TransformerLayer(32, 64, 2, device="cpu"), (torch.randn(4, 2, 32),)),
        None,
    ),
    "quantized result": (
        lambda: (
            lambda x: te.Linear(32, 32, device="cpu")(x, fp8_output=True),
            (torch.randn(32, 32),),
        ),
        recipe.Float8CurrentScaling(),
    ),
}


@pytest.mark.parametrize("words", REJECTED)
def test_a_call_without_an_export_names_the_reason(words: str):
    make, chosen = REJECTED[words]
    layer, inputs = make()
    with (
        torch.no_grad(),
        te.onnx_export(True),
        te.autocast(enabled=chosen is not None, recipe=chosen),
        pytest.raises(NotImplementedError, match=words),
    ):
        layer(*inputs)
    assert not is_in_onnx_export_mode()


def test_delayed_scaling_needs_scales_before_an_export():
    layer, chosen = te.Linear(32, 32, device="cpu"), recipe.DelayedScaling()
    with pytest.raises(AssertionError, match="no quantizers yet"):
        assert_warmed_up(layer)
    with (
        te.onnx_export(True),
        te.autocast(recipe=chosen),
        pytest.raises(RuntimeError, match="has no scales"),
    ):
        layer(torch.randn(32, 32))
    with torch.no_grad(), te.autocast(recipe=chosen):
        layer(torch.randn(32, 32))
    assert_warmed_up(layer)
    with te.onnx_export(True), te.autocast(recipe=recipe.DelayedScaling()):  # an equal recipe
        assert torch.isfinite(layer(torch.randn(32, 32))).all()


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip(
        "onnxruntime", reason="exported models run in onnxruntime, of the extra onnx"
    )
    pytest.importorskip("onnxscript", reason="the export to ONNX needs the extra onnx")
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "model.onnx").exists() is False
    names = run_page("export.md")
    assert (tmp_path / "model.onnx").exists() and names["output"].shape == (32, 64)
