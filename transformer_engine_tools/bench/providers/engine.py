"""This package: modules and quantizers under `te.autocast`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from transformer_engine import pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.quantization import family_named
from transformer_engine.pytorch.router import fused_topk_with_score_function
from transformer_engine.pytorch.runtime import launching

from ..cases import QUANTIZATIONS, RECIPES, Case
from ..kernel_cases import GpuLimits, kernel_call
from ..workload import Workload, draw_routed_tokens
from .provider import Builders, Provider

BF16 = torch.bfloat16
BUILDERS = Builders()


def recipe_named(name: str, **options: Any) -> recipes.Recipe | None:
    """Build the recipe with these options, or None for bf16."""
    return None if name == RECIPES[0] else family_named(name).recipe(**options)


def module_workload(module: torch.nn.Module, x: Tensor, case: Case, **keywords: Any) -> Workload:
    recipe = recipe_named(case.recipe)
    context = functools.partial(_precision, recipe)
    return Workload(module, (x,), keywords, context)


def _precision(recipe: recipes.Recipe | None) -> AbstractContextManager[Any]:
    return te.autocast(enabled=recipe is not None, recipe=recipe)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=BF16)


@BUILDERS.of("quantize")
def _quantize(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    _, sample = QUANTIZATIONS[case.recipe]
    quantizer = sample.make(device, rowwise=True, columnwise=a["both"])
    return Workload(quantizer, (_random(device, a["rows"], a["depth"]),))


@BUILDERS.of("norm")
def _norm(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    norm = {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}[a["kind"]]
    return module_workload(
        norm(a["width"], dtype=BF16, device=device), _random(device, a["rows"], a["width"]), case
    )


@BUILDERS.of("linear", "dense")
def _linear(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    module = te.Linear(a["depth"], a["width"], bias=a["bias"], params_dtype=BF16, device=device)
    return module_workload(module, _random(device, a["rows"], a["depth"]), case)


@BUILDERS.of("layernorm_linear")
def _layernorm_linear(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    module = te.LayerNormLinear(
        a["depth"],
        a["width"],
        bias=False,
        normalization="RMSNorm",
        params_dtype=BF16,
        device=device,
    )
    return module_workload(module, _random(device, a["rows"], a["depth"]), case)


@BUILDERS.of("layernorm_mlp")
def _layernorm_mlp(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    gated = a["activation"] == "swiglu"
    module = te.LayerNormMLP(
        a["hidden"],
        a["inner"],
        bias=not gated,
        activation=a["activation"],
        normalization="RMSNorm" if gated else "LayerNorm",
        params_dtype=BF16,
        device=device,
    )
    return module_workload(module, _random(device, a["rows"], 1, a["hidden"]), case)


@BUILDERS.of("grouped_linear")
def _grouped_linear(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    module = te.GroupedLinear(
        a["groups"], a["depth"], a["width"], bias=False, params_dtype=BF16, device=device
    )
    splits = [a["rows"] // a["groups"]] * a["groups"]
    return module_workload(module, _random(device, a["rows"], a["depth"]), case, m_splits=splits)


@BUILDERS.of("attention")
def _attention(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    batch, sequence, packed = a["batch"], a["sequence"], a["packed"]
    module = te.DotProductAttention(
        a["heads"],
        a["size"],
        num_gqa_groups=a["groups"],
        attention_dropout=0.0,
        qkv_format="thd" if packed else "bshd",
        attn_mask_type="padding_causal" if packed else "causal",
    )
    tokens = (batch * sequence,) if packed else (batch, sequence)
    q, k, v = (
        _random(device, *tokens, heads, a["size"])
        for heads in (a["heads"], a["groups"], a["groups"])
    )
    keywords: dict[str, Any] = {}
    if a["window"] is not None:
        keywords["window_size"] = (a["window"], 0)
    if packed:
        starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * sequence
        keywords |= {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        keywords |= {"max_seqlen_q": sequence, "max_seqlen_kv": sequence}
    context = functools.partial(
        _attention_precision, recipe_named(case.recipe, fp8_dpa=True), a["fp8_backward"]
    )
    return Workload(module, (q, k, v), keywords, context)


@contextmanager
def _attention_precision(recipe: recipes.Recipe | None, fp8_backward: bool) -> Iterator[None]:
    """Select by environment variable whether an attention's backward pass is in FP8 too; its forward pass decides."""
    previous = os.environ.get("NVTE_FP8_DPA_BWD")
    if recipe is not None:
        os.environ["NVTE_FP8_DPA_BWD"] = str(int(fp8_backward))
    try:
        with _precision(recipe):
            yield
    finally:
        if previous is not None:
            os.environ["NVTE_FP8_DPA_BWD"] = previous
        else:
            os.environ.pop("NVTE_FP8_DPA_BWD", None)


@BUILDERS.of("layer", "layer_small")
def _layer(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    module = transformer_layer(a, device)
    keywords = {}
    if a["rotary"]:
        positions = RotaryPositionEmbedding(a["hidden"] // a["heads"])
        keywords["rotary_pos_emb"] = positions(max_seq_len=a["sequence"]).to(device)
    return module_workload(module, _random(device, a["sequence"], 1, a["hidden"]), case, **keywords)


def transformer_layer(
    arguments: dict[str, Any], device: torch.device, **options: Any
) -> te.TransformerLayer:
    """Build the bfloat16 layer of a case, with further options."""
    return te.TransformerLayer(
        arguments["hidden"],
        arguments["inner"],
        arguments["heads"],
        num_gqa_groups=arguments["groups"],
        bias=False,
        activation="swiglu",
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=BF16,
        device=device,
        **options,
    )


class Recomputed(torch.nn.Module):
    """y = layer(x), recomputed in the backward pass by `checkpoint`."""

    def __init__(self, layer: Any, checkpoint: Any):
        super().__init__()
        self.layer, self.checkpoint = layer, checkpoint

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        return self.checkpoint(self.layer, x, use_reentrant=False, **keywords)


@BUILDERS.of("layer_graphed", "layer_recomputed", "layer_observed")
def _layer_variant(case: Case, device: torch.device) -> Workload:
    eager = _layer(case, device)
    assert isinstance(eager.function, torch.nn.Module)
    if case.family == "layer_observed":
        te.observe(eager.function)  # a step without an end
        return eager
    if case.family == "layer_recomputed":
        return replace(eager, function=Recomputed(eager.function, te.checkpoint))
    return replace(eager, function=te.graphed(eager.function, after=1))


class OffloadedStack(torch.nn.Module):
    """y = layers(x); the saved tensors of the first layers are offloaded to the host, except on a CPU."""

    def __init__(self, layers: Sequence[torch.nn.Module], offloaded: int):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        enabled = torch.cuda.is_available()
        self.context, self.synchronize = te.get_cpu_offload_context(
            enabled, offloaded, len(layers)
        )[:2]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with self.context:
                x = layer(x)
            x = self.synchronize(x) if x.requires_grad else x
        return x


@BUILDERS.of("offload")
def _offload(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    layers = [
        te.Linear(a["width"], a["width"], bias=False, params_dtype=BF16, device=device)
        for _ in range(a["layers"])
    ]
    return module_workload(
        OffloadedStack(layers, a["offloaded"]), _random(device, a["rows"], a["width"]), case
    )


@BUILDERS.of("rope")
def _rope(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    angles = RotaryPositionEmbedding(a["size"])(max_seq_len=a["sequence"]).to(device)
    x = _random(device, a["sequence"], a["batch"], a["heads"], a["size"])
    return Workload(
        functools.partial(apply_rotary_pos_emb, freqs=angles, tensor_format="sbhd"), (x,)
    )


@BUILDERS.of("permute")
def _permute(case: Case, device: torch.device) -> Workload:
    tokens, mask, probs = draw_routed_tokens(case, device)
    rows = case.arguments["tokens"] * case.arguments["places"]

    def there_and_back(x: Tensor, probs: Tensor) -> Tensor:
        y, row_id_map = te.moe_permute(x, mask, rows)
        return te.moe_unpermute(y, row_id_map, probs)

    return Workload(there_and_back, (tokens,), {"probs": probs})


@BUILDERS.of("padding")
def _padding(case: Case, device: torch.device) -> Workload:
    a, splits = case.arguments, uneven_splits(case)
    padding, unpadding = te.Fp8Padding(a["groups"], 128), te.Fp8Unpadding(a["groups"], 128)

    def there_and_back(x: Tensor) -> Tensor:
        rows, _ = padding(x, splits)
        return unpadding(rows, splits)

    return Workload(there_and_back, (_random(device, a["rows"], a["width"]),))


def uneven_splits(case: Case) -> list[int]:
    """Row counts per group, all different, which add up to the case's rows."""
    groups, rows = case.arguments["groups"], case.arguments["rows"]
    splits = [rows // groups + number - groups // 2 for number in range(groups)]
    return [*splits[:-1], rows - sum(splits[:-1])]


@BUILDERS.of("router")
def _router(case: Case, device: torch.device) -> Workload:
    a = case.arguments

    def weights(logits: Tensor) -> Tensor:
        options = (a["places"], False, None, None, None, a["score"], None)
        return fused_topk_with_score_function(logits, *options)[0]

    return Workload(weights, (torch.randn(a["tokens"], a["experts"], device=device),))


@BUILDERS.of("cross_entropy")
def _cross_entropy(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    loss = functools.partial(te.parallel_cross_entropy, reduce_loss=True, overwrite_input=True)
    return Workload(loss, (_random(device, 1, a["rows"], a["ids"]), target_ids(case, device)))


@BUILDERS.of("linear_cross_entropy")
def _linear_cross_entropy(case: Case, device: torch.device) -> Workload:
    a = case.arguments
    hidden, weight = (
        _random(device, 1, a["rows"], a["depth"]),
        _random(device, a["ids"], a["depth"]),
    )
    return Workload(te.fused_linear_cross_entropy, (hidden, weight, target_ids(case, device)))


def target_ids(case: Case, device: torch.device) -> Tensor:
    """Draw a target for every row."""
    return torch.randint(0, case.arguments["ids"], (1, case.arguments["rows"]), device=device)


@BUILDERS.of("adam")
def _adam(case: Case, device: torch.device) -> Workload:
    recipe = recipe_named(case.recipe)
    if recipe is None:
        return stepping(te.optimizers.FusedAdam(float_parameters(case, device), lr=1e-4))
    # Quantized parameters, which the optimizer writes from float32 master weights.
    count, width = case.arguments["count"], case.arguments["width"]
    with te.quantized_model_init(recipe=recipe):
        layers = [
            te.Linear(width, width, bias=False, params_dtype=BF16, device=device)
            for _ in range(count)
        ]
    for layer in layers:
        layer.weight.grad = _random(device, width, width)
    weights = [layer.weight for layer in layers]
    return stepping(te.optimizers.FusedAdam(weights, lr=1e-4, master_weights=True))


@BUILDERS.of("sgd")
def _sgd(case: Case, device: torch.device) -> Workload:
    return stepping(te.optimizers.FusedSGD(float_parameters(case, device), lr=1e-4, momentum=0.9))


@BUILDERS.of("kernel")
def _kernel(case: Case, device: torch.device) -> Workload | None:
    """Build the launch itself, which needs a GPU."""
    a = case.arguments
    if device.type != "cuda":
        return None
    limits = GpuLimits(*launching.processors(device.index))
    call = kernel_call(a["kernel"], a["rows"], a["width"], limits)
    operands = [
        None
        if operand is None
        else torch.randn(*operand[0], device=device, dtype=getattr(torch, operand[1])).abs()
        for operand in call.given
    ]
    return Workload(lambda *x: launching.perform(call.program, operands), ())


def float_parameters(case: Case, device: torch.device) -> list[torch.nn.Parameter]:
    """Create float32 parameters with gradients."""
    a = case.arguments
    parameters = [
        torch.nn.Parameter(torch.randn(a["size"], device=device)) for _ in range(a["count"])
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def stepping(optimizer: torch.optim.Optimizer) -> Workload:
    """Build a workload for one optimizer step, whose result is the first parameter."""

    def step() -> Tensor:
        optimizer.step()
        return optimizer.param_groups[0]["params"][0]

    return Workload(step, ())


ENGINE = Provider("te", RECIPES, BUILDERS, quantizations=tuple(QUANTIZATIONS))
