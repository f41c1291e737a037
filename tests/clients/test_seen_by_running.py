"""Undocumented package uses in clients; each once made a client fail."""

from __future__ import annotations

import inspect
import io
import pickle
import pickletools
import sys
import types
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import cpp_extensions
from transformer_engine.pytorch.distributed import (
    gather_along_first_dim,
    get_activation_recompute_contexts,
    prepare_te_modules_for_fsdp,
    reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.module import (
    _common,
    grouped_linear,
    layernorm_linear,
    layernorm_mlp,
    linear,
)
from transformer_engine.pytorch.ops.op import BasicOperation
from transformer_engine.pytorch.tensor.utils import post_all_gather_processing, replace_raw_data
from transformer_engine.pytorch.utils import SplitAlongDim

pytestmark = pytest.mark.usefixtures("emulated")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {
    "Linear": lambda **k: te.Linear(32, 32, **k),
    "LayerNormLinear": lambda **k: te.LayerNormLinear(32, 32, **k),
    "LayerNormMLP": lambda **k: te.LayerNormMLP(32, 64, **k),
    "GroupedLinear": lambda **k: te.GroupedLinear(2, 32, 32, **k),
    "LayerNorm": lambda **k: te.LayerNorm(32, **k),
    "RMSNorm": lambda **k: te.RMSNorm(32, **k),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_has_a_name_that_data_parallelism_empties(name):
    """Megatron's distributed optimizer sets weight_tensor = None wherever it exists."""
    assert not hasattr(LAYERS[name](), "weight_tensor")


def train_linear() -> te.Linear:
    torch.manual_seed(0)
    layer = te.Linear(32, 32)
    with te.autocast(recipe=recipe.DelayedScaling()):
        layer(torch.randn(16, 32, device=DEVICE)).sum().backward()
    return layer


def test_an_extra_state_may_name_megatrons_loader_of_storages(monkeypatch):
    """Megatron replaces torch's loader by safe_load_from_bytes, whose name pickle stores; loading does not run it."""
    module = types.ModuleType("megatron.core.safe_globals")
    ran = []

    def safe_load_from_bytes(data: bytes) -> object:
        ran.append(data)
        return torch.load(io.BytesIO(data), weights_only=True)

    safe_load_from_bytes.__module__ = module.__name__
    safe_load_from_bytes.__qualname__ = "safe_load_from_bytes"
    module.safe_load_from_bytes = safe_load_from_bytes
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.storage, "_load_from_bytes", safe_load_from_bytes)
    layer = train_linear()
    state = layer.state_dict()
    names = [
        op[1]
        for op in pickletools.genops(bytes(state["_extra_state"].numpy()))
        if isinstance(op[1], str)
    ]
    assert any("safe_load_from_bytes" in name for name in names)
    fresh = te.Linear(32, 32)
    fresh.load_state_dict(state)
    assert torch.equal(
        fresh.fp8_meta["scaling_fwd"].amax_history, layer.fp8_meta["scaling_fwd"].amax_history
    )
    assert ran == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_the_recipe_of_quantized_parameters_is_there_after_construction(name, device):
    chosen = recipe.MXFP8BlockScaling()
    with te.quantized_model_init(recipe=chosen):
        layer = LAYERS[name](device=device)
    assert layer.fp8_meta["recipe"] is chosen
    assert layer.fp8_meta["recipe"].mxfp8()


def test_codes_of_mxfp8_are_not_views_and_may_use_a_callers_buffer():
    chosen = recipe.MXFP8BlockScaling()
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=chosen):
        layer = te.Linear(64, 32, bias=False)
    weight = layer.weight
    for name in (
        "_rowwise_data",
        "_columnwise_data",
        "_rowwise_scale_inv",
        "_columnwise_scale_inv",
    ):
        assert getattr(weight, name)._base is None
    x = torch.randn(32, 64, device=DEVICE, requires_grad=True)

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        with te.autocast(recipe=chosen):
            y = layer(x)
        return y, torch.autograd.grad(y.square().sum(), x)[0]

    before = results()
    replace_raw_data(weight, torch.empty_like(weight._rowwise_data))
    weight._columnwise_data = weight._columnwise_data.clone(memory_format=torch.contiguous_format)
    assert all(torch.equal(a, b) for a, b in zip(results(), before, strict=True))


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scales [128 r, 4 c] as a product reads them, in memory of the same shape."""
    rows, columns = scale.shape
    return (
        scale.reshape(rows // 128, 4, 32, columns // 4, 4)
        .permute(0, 3, 2, 1, 4)
        .reshape(rows, columns)
    )


@pytest.mark.parametrize("shape", [(32, 64), (256, 160), (2, 64, 96)])
def test_mxfp8_tensors_of_swizzled_scales_have_the_same_values_and_products(shape):
    result = te.MXFP8Quantizer(te.DType.kFloat8E4M3)(torch.randn(shape))
    rowwise, columnwise = result._rowwise_scale_inv, result._columnwise_scale_inv
    build = partial(
        te.MXFP8Tensor,
        shape=result.shape,
        dtype=result.dtype,
        fp8_dtype=result._fp8_dtype,
        quantizer=None,
        rowwise_data=result._rowwise_data,
        columnwise_data=result._columnwise_data,
    )
    plain = build(
        rowwise_scale_inv=rowwise, columnwise_scale_inv=columnwise, with_gemm_swizzled_scales=False
    )
    assert result._with_gemm_swizzled_scales is False
    in_tiles = build(
        rowwise_scale_inv=swizzle_scales(rowwise),
        columnwise_scale_inv=swizzle_scales(columnwise.t()).reshape(columnwise.shape),
        with_gemm_swizzled_scales=True,
    )
    assert torch.equal(in_tiles.dequantize(), plain.dequantize())
    assert torch.equal(in_tiles.order_scales(False)._columnwise_scale_inv, columnwise)
    in_tiles.update_usage(rowwise_usage=False)
    plain.update_usage(rowwise_usage=False)
    assert torch.equal(in_tiles.dequantize(), plain.dequantize())


def test_post_processing_after_a_gather_takes_a_single_weight():
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=torch.device("cpu"))
    weight = quantizer(torch.randn(32, 32))
    weight.update_usage(columnwise_usage=False)
    post_all_gather_processing(weight)
    assert weight.get_usages()["columnwise"]


def test_collectives_write_into_a_callers_tensor():
    x = torch.randn(4, 8)
    out = torch.empty(4, 8)
    for collective in (
        lambda: gather_along_first_dim(x, None, output_tensor=out, external_coalescing=True),
        lambda: reduce_scatter_along_first_dim(x, None, output=out),
    ):
        assert collective()[0] is out
        assert torch.equal(out, x)
        out.zero_()
    with pytest.raises(ValueError, match="a rank's rows"):
        reduce_scatter_along_first_dim(x, None, output=torch.empty(3, 8))


@contextmanager
def replace_function(owner, name, value):
    """Replace a function as nvidia-modelopt does: an attribute with a leading underscore keeps the former one."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    setattr(owner, f"_{name}", former)
    try:
        yield
    finally:
        setattr(owner, name, former)
        delattr(owner, f"_{name}")


def gradients(layer, x, *arguments):
    y = layer(x, *arguments)
    return y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "GroupedLinear"])
def test_a_monkey_patched_general_gemm_computes_every_product(name):
    file = {"Linear": linear, "LayerNormLinear": layernorm_linear, "GroupedLinear": grouped_linear}[
        name
    ]
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(16, 32, device=DEVICE, requires_grad=True)
    arguments = ([6, 10],) if name == "GroupedLinear" else ()
    before, calls = gradients(layer, x, *arguments), []

    def count_calls(*args, **kwargs):
        calls.append(kwargs["layout"])
        return cpp_extensions.general_gemm(*args, **kwargs)

    with replace_function(file, "general_gemm", count_calls):
        during = gradients(layer, x, *arguments)
        with torch.no_grad():
            layer(x, *arguments)
    groups = 2 if name == "GroupedLinear" else 1
    assert calls == ["TN"] * groups + ["NN", "NT"] * groups + ["TN"] * groups
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(before, during, strict=True)
    )
    after = gradients(layer, x, *arguments)
    assert len(calls) == 4 * groups
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_replaced_product_rejects_quantized_operands():
    layer = te.Linear(32, 32)
    local = partial(cpp_extensions.general_gemm)
    rejected = pytest.raises(NotImplementedError, match="restore the original")
    with replace_function(linear, "general_gemm", local), rejected, te.autocast():
        layer(torch.randn(16, 32, device=DEVICE))


@pytest.mark.parametrize("chosen", [None, recipe.MXFP8BlockScaling()])
@pytest.mark.parametrize("position", ["the layer's file", "_common", "both"])
@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
def test_a_monkey_patched_norm_is_used(name, position, chosen):
    """Megatron replaces the class in the module that defines it and in modules that import it."""
    file = {"LayerNormLinear": layernorm_linear, "LayerNormMLP": layernorm_mlp}[name]
    files = {"the layer's file": [file], "_common": [_common], "both": [_common, file]}[position]
    torch.manual_seed(0)
    layer, x = (
        LAYERS[name](normalization="RMSNorm"),
        torch.randn(32, 32, device=DEVICE, requires_grad=True),
    )
    calls, original = [], _common.apply_normalization

    def count_calls(*args):
        calls.append(args[7])
        return original(*args)

    with te.autocast(enabled=chosen is not None, recipe=chosen):
        before = gradients(layer, x)
        with ExitStack() as stack:
            for each in files:
                stack.enter_context(replace_function(each, "apply_normalization", count_calls))
            during = gradients(layer, x)
        after = gradients(layer, x)
    assert calls == ["RMSNorm"]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(before, during, strict=True)
    )


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["Linear", "GroupedLinear"])
def test_a_replaced_step_of_an_autograd_class_finds_input_and_weight(name, grad):
    """nvidia-modelopt quantizes the parameters called inp and weight, or the trailing tensors."""
    owner = linear._Linear if name == "Linear" else grouped_linear._GroupedLinear
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(16, 32, device=DEVICE)
    arguments = ([6, 10],) if name == "GroupedLinear" else ()
    expected = layer(2 * x, *arguments)
    step, saved = ("apply", "_apply") if grad else ("forward", "_forward")
    position = list(inspect.signature(owner.forward).parameters).index("inp") - (1 if grad else 0)

    def double(*args):
        args = list(args)
        args[position] = 2 * args[position]
        return getattr(owner, saved)(*args)

    with torch.set_grad_enabled(grad), replace_function(owner, step, double):
        y = layer(x, *arguments)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert not linear._replaced.names
    assert not grouped_linear._replaced.names


def test_a_replaced_autograd_class_runs_in_place_of_the_layers():
    """The argument order is inp, ln_weight, ln_bias, weight."""
    records = []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inp, ln_weight, ln_bias, weight, *args):
            records.append((inp.shape, ln_weight.shape, ln_bias.shape, weight.shape))
            former = vars(layernorm_linear)["__LayerNormLinear"]
            return former.forward(ctx, inp, ln_weight, ln_bias, weight, *args)

        @staticmethod
        def backward(ctx, *grads):
            return layernorm_linear._LayerNormLinear.backward(ctx, *grads)

    torch.manual_seed(0)
    layer, x = te.LayerNormLinear(32, 48), torch.randn(16, 32, device=DEVICE, requires_grad=True)
    before = gradients(layer, x)
    with replace_function(layernorm_linear, "_LayerNormLinear", Own):
        y = layer(x)
    during = y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert records == [((16, 32), (32,), (32,), (48, 32))]
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(before, during, strict=True)
    )


def test_a_custom_operation_is_a_module():
    class Double(BasicOperation):
        def op_forward(self, ctx, input_, **options):
            return 2 * input_

        def op_backward(self, ctx, grad_output):
            return 2 * grad_output, ()

    x = torch.randn(4, requires_grad=True)
    operation = Double()
    y = operation(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))
    assert operation.get_extra_state().numel() == 0
    operation.load_state_dict(operation.state_dict())
    with pytest.raises(ValueError, match="not a readable pickle"):
        operation.set_extra_state(torch.ones(3, dtype=torch.uint8))


def test_parts_of_a_split_are_views_and_adjacent_gradients_are_not_copied():
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    parts = SplitAlongDim.apply(x, 1, [4, 6])
    assert all(
        part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts
    )
    full = torch.randn(3, 10, dtype=torch.float64)
    (grad,) = torch.autograd.grad(parts, x, full.split([4, 6], dim=1))
    assert grad.data_ptr() == full.data_ptr()
    assert torch.equal(grad, full)
    assert SplitAlongDim.apply(x[:, :2], 1, 1, True)[0].shape == (3,)
    split = partial(lambda t: tuple(p.sin() for p in SplitAlongDim.apply(t, 1, [4, 6])))
    assert torch.autograd.gradgradcheck(split, (x,))


def test_contexts_of_recomputation_serve_torchs_checkpoint():
    layer = train_linear()
    x = torch.randn(16, 32, device=DEVICE, requires_grad=True)
    with te.autocast(recipe=recipe.DelayedScaling()):
        y = torch.utils.checkpoint.checkpoint(
            layer, x, use_reentrant=False, context_fn=get_activation_recompute_contexts
        )
    y.sum().backward()
    assert x.grad.isfinite().all()


def test_preparing_an_unsharded_module_is_rejected():
    with pytest.raises(TypeError, match="FullyShardedDataParallel"):
        prepare_te_modules_for_fsdp(te.Linear(32, 32))


def test_communication_that_overlaps_is_accepted():
    modes = [te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8]
    assert te.initialize_ub([128, 32], 2, quantization_modes=modes) is None
    te.destroy_ub()
    with pytest.raises(TypeError, match="UserBufferQuantizationMode"):
        te.initialize_ub([128, 32], 2, quantization_modes=["fp8"])


def test_recipes_pickle_by_their_public_path():
    assert pickle.loads(pickle.dumps(recipe.DelayedScaling())) == recipe.DelayedScaling()
