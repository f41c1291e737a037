"""save_quantized(model, folder, quantization): quantized checkpoints for vLLM, SGLang and transformers.

Linear layers in transformer layers are quantized. Embeddings, norms, biases and the output head are
not, as in exports from llm-compressor and ModelOpt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.checks import described, suggests_keywords, whole
from ...common.recipe import Float8CurrentScaling
from ..attention import DotProductAttention
from ..inspect.observation import observe
from ..module.linear import Linear
from ..quantization.autocast import autocast
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from .correspondence import EXTRA_STATE, Correspondence
from .decoder import Decoder
from .families import QUANTIZED, family_named
from .layouts import GroupedInOne, Transposed
from .quantized_shards import SETTINGS
from .safetensors import SHARD_BYTES, Described, new_folder, write_shards
from .serving_formats import E4M3_MAXIMUM, FORMATS, ServingFormat
from .settings import CONFIG_FILE

# Layers that servers concatenate to one matrix.
CONCATENATED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

Step = tuple[str, ...]  # weight names that are quantized together, or one unquantized tensor


@dataclass(frozen=True)
class SampledMaxima:
    """Largest magnitudes in a sample batch.

    Attributes:
        inputs: {weight name in the checkpoint: maximum of the layer's inputs}.
        cache: {attention name in the checkpoint: key and value maxima}.
    """

    inputs: Mapping[str, float] = field(default_factory=dict)
    cache: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@suggests_keywords
def save_quantized(
    model: nn.Module,
    folder: str | Path,
    quantization: str,
    sample: Tensor | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model as a quantized Hugging Face checkpoint, which vLLM, SGLang and transformers load.

    Args:
        model: A `Decoder` from `load_model`, or a transformers model whose linear layers are
            `torch.nn.Linear` or `Linear`.
        folder: Folder to create.
        quantization: "fp8" (a scale per tensor), "fp8_channel" (per output feature), "fp8_block" (per 128 x 128
            block, DeepSeek's layout), "mxfp8", "nvfp4" (compressed-tensors) or "nvfp4_modelopt".
        sample: Tokens [b, s] of a typical batch for a `Decoder`. Static scales for the layers' inputs ("fp8",
            "nvfp4" and "nvfp4_modelopt", which requires them) and for keys and values in an FP8 cache are written.
        shard_bytes: Maximum file size.

    Raises:
        ValueError: `quantization` is unknown, `folder` exists, the model has no transformers
            checkpoint, or `sample` is missing or has no finite maxima.
    """
    form = serving_format(quantization, sample is not None)
    whole("shard_bytes", shard_bytes)
    if isinstance(model, Decoder):
        correspondence, settings = _decoder_source(model)
        linear = linear_weights(correspondence)
        maxima = (
            SampledMaxima() if sample is None else _sample_maxima(model, correspondence, sample)
        )
        parameters = dict(model.named_parameters())
        shapes = {
            name: Described(parameters[match.ours].dtype, shape)
            for match in correspondence.matches
            for name, shape in match.their_shapes().items()
        }
        tensors = _their_tensors(correspondence, parameters)
    else:
        if sample is not None:
            raise ValueError(
                "sample= is for a Decoder of load_model; save this model without sample, and load it again with "
                "load_model to write static scales"
            )
        settings, states, linear = _transformers_source(model)
        maxima = SampledMaxima()
        shapes = {
            name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in states.items()
        }
        tensors = ((name, high_precision(tensor)) for name, tensor in states.items())
    with new_folder(Path(folder)) as created:
        write_quantized(created, settings, form, shapes, tensors, linear, maxima, shard_bytes)


def serving_format(quantization: str, sampled: bool) -> ServingFormat:
    """Find a format by name; raise ValueError if it is unknown or requires a sample that is missing."""
    if quantization not in FORMATS:
        raise ValueError(
            f"quantization={described(quantization)} is unknown; choose {', '.join(FORMATS)}"
        )
    form = FORMATS[quantization]
    if form.calibrated and not sampled:
        raise ValueError(
            f"{quantization} needs static scales of the layers' inputs; pass sample=, the tokens [b, s] of a typical "
            "batch, or choose nvfp4"
        )
    return form


def write_quantized(
    folder: Path,
    settings: Mapping[str, Any],
    form: ServingFormat,
    shapes: Mapping[str, Described],
    tensors: Iterable[tuple[str, Tensor]],
    linear: Iterable[str],
    maxima: SampledMaxima,
    shard_bytes: int,
) -> None:
    """Write config.json and the tensors of a checkpoint in `form`, one concatenated layer group at a time.

    Args:
        folder: Existing folder.
        settings: config.json of the unquantized checkpoint.
        form: The format.
        shapes: {name: dtype and shape} for the unquantized tensors.
        tensors: The unquantized tensors, ordered like `shapes`.
        linear: Names of linear layer weights in the transformer layers. A weight whose column count
            is not a multiple of `form.block` stays unquantized.
        maxima: Maxima of a sample.
        shard_bytes: Maximum file size.
    """
    quantized = {name for name in linear if shapes[name].shape[1] % form.block == 0}
    if not quantized:
        raise ValueError(
            f"no linear layer has a multiple of {form.block} input features, which {form.name} needs; choose fp8"
        )
    heads = {name for name in shapes if name.endswith("lm_head.weight")}
    unquantized = sorted(name.removesuffix(".weight") for name in {*linear, *heads} - quantized)
    unquantized = unquantized or ["lm_head"]
    steps = _steps(list(shapes), quantized, form.joint)
    plan: dict[str, Described] = {}
    for step in steps:
        for name in step:
            plan |= (
                _layout(form, name, shapes[name], maxima)
                if name in quantized
                else {name: shapes[name]}
            )
    plan |= {name: Described(torch.float32, (1,)) for name in _cache_scales(maxima)}
    sampled = bool(maxima.inputs)
    config = dict(settings) | {SETTINGS: form.settings(unquantized, sampled)}
    for file, content in ({CONFIG_FILE: config} | form.files(unquantized, sampled)).items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_shards(folder, plan, _encode_shards(form, steps, tensors, quantized, maxima), shard_bytes)


def linear_weights(correspondence: Correspondence) -> set[str]:
    """The checkpoint's weight names that transformer layer products multiply by.

    Raises:
        ValueError: The family stores them transposed, which no server reads in quantized form.
    """
    matches = [match for match in correspondence.matches if match.ours.endswith(QUANTIZED)]
    if any(isinstance(match.layout, (Transposed, GroupedInOne)) for match in matches):
        raise ValueError(
            f"{correspondence.family.model_type} stores weights transposed, which has no quantized layout; "
            "convert it without quantization"
        )
    return {name for match in matches for name in match.theirs}


def _steps(names: list[str], quantized: set[str], joint: bool) -> list[Step]:
    """Write order: each tensor by itself, and layers that share a scale together, after the last one."""
    unit: dict[str, Step] = {}
    for name in names if joint else ():
        parent, _, layer = name.removesuffix(".weight").rpartition(".")
        for layers in CONCATENATED:
            members = tuple(f"{parent}.{member}.weight" for member in layers)
            if layer == layers[0] and all(member in quantized for member in members):
                unit |= dict.fromkeys(members, members)
    steps, waiting = [], {step: set(step) for step in unit.values()}
    for name in names:
        step = unit.get(name, (name,))
        waiting.get(step, set()).discard(name)
        if not waiting.get(step):
            steps.append(step)
    return steps


def _layout(
    form: ServingFormat, name: str, weight: Described, maxima: SampledMaxima
) -> dict[str, Described]:
    base = name.removesuffix("weight")
    scale = form.input_scale(maxima.inputs[name]) if name in maxima.inputs else {}
    inputs = {suffix: Described(value.dtype, tuple(value.shape)) for suffix, value in scale.items()}
    return {base + suffix: entry for suffix, entry in (form.layout(weight.shape) | inputs).items()}


def _encode_shards(
    form: ServingFormat,
    steps: list[Step],
    tensors: Iterable[tuple[str, Tensor]],
    quantized: set[str],
    maxima: SampledMaxima,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of the quantized checkpoint, in plan order."""
    unread, read = iter(tensors), {}
    for step in steps:
        while not all(name in read for name in step):
            name, tensor = next(unread)
            read[name] = tensor
        weights = {name: read.pop(name) for name in step}
        if step[0] in quantized:
            yield from _quantized(form, weights, maxima)
        else:
            yield from weights.items()
    for name, value in _cache_scales(maxima).items():
        yield name, torch.tensor([value], dtype=torch.float32, device="cpu")


def _quantized(
    form: ServingFormat, weights: Mapping[str, Tensor], maxima: SampledMaxima
) -> Iterator[tuple[str, Tensor]]:
    """Quantize weights as one matrix, and iterate over the tensors of each weight."""
    rows = [weight.shape[0] for weight in weights.values()]
    shape = (sum(rows), next(iter(weights.values())).shape[1])
    encoded = form.encode(
        torch.cat(list(weights.values())) if len(rows) > 1 else next(iter(weights.values()))
    )
    per_row = {
        suffix for suffix, entry in form.layout(shape).items() if entry.shape[:1] == (shape[0],)
    }
    for number, name in enumerate(weights):
        base, begin = name.removesuffix("weight"), sum(rows[:number])
        for suffix, tensor in encoded.items():
            part = (
                tensor[begin : begin + rows[number]]
                if suffix in per_row and len(rows) > 1
                else tensor
            )
            yield base + suffix, part
        if name in maxima.inputs:
            for suffix, value in form.input_scale(maxima.inputs[name]).items():
                yield base + suffix, value


def _cache_scales(maxima: SampledMaxima) -> dict[str, float]:
    """{name: scale} for keys and values in an E4M3 cache, maximum / 448."""
    return {
        f"{attention}.{letter}_scale": maximum / E4M3_MAXIMUM or 1.0
        for attention, pair in maxima.cache.items()
        for letter, maximum in zip("kv", pair, strict=True)
    }


def _decoder_source(model: Decoder) -> tuple[Correspondence, dict[str, Any]]:
    if model.source is None:
        raise ValueError(
            f"model={described(model)} was not loaded by load_model, so the settings of its checkpoint are unknown"
        )
    return Correspondence.of(family_named(model.source["family"]), model.config), model.source[
        "config"
    ]


def _their_tensors(
    correspondence: Correspondence, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over their tensors for our parameters; each parameter is decoded when the iterator reaches it."""
    for match in correspondence.matches:
        parts = match.layout.split(high_precision(parameters[match.ours]))
        yield from zip(match.theirs, parts, strict=True)


def high_precision(tensor: Tensor) -> Tensor:
    """The values of a parameter, decoded if it is quantized, without gradients."""
    values = tensor.decode(tensor.dtype) if isinstance(tensor, QuantizedTensorStorage) else tensor
    return values.detach()


def _transformers_source(model: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor], set[str]]:
    """Settings, tensors and linear weight names for a transformers model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise ValueError(
            f"model={described(model)} has no config of transformers; give a model of transformers, or a Decoder of "
            "load_model"
        )
    assert config is not None
    settings = json.loads(config.to_json_string(use_diff=False))
    settings.pop(SETTINGS, None)
    tied: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(EXTRA_STATE) or tensor.data_ptr() in tied:
            continue
        if tensor.numel():
            tied.add(tensor.data_ptr())
        tensors[name] = tensor
    outputs = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Linear))
        and module not in outputs
        and f"{name}.weight" in tensors
    }
    return settings, tensors, linear


def _sample_maxima(model: Decoder, correspondence: Correspondence, sample: Tensor) -> SampledMaxima:
    """Run a batch under Float8CurrentScaling, and record input, key and value maxima."""
    cache: dict[str, list[Tensor]] = {}

    def record(name: str):
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            cache[name] = [values.detach().abs().amax() for values in args[1:3]]

        return hook

    handles = [
        module.register_forward_pre_hook(record(name))
        for name, module in model.named_modules()
        if isinstance(module, DotProductAttention)
    ]
    was_training = model.training
    try:
        model.eval()
        with (
            observe(model, every=1) as observation,
            torch.no_grad(),
            autocast(recipe=Float8CurrentScaling()),
        ):
            model(sample)
            observation.step()
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    inputs: dict[str, float] = {}
    for report in observation.reports[-1].tensors:
        inputs |= (
            {report.name: report.maximum} if not report.nonfinite else {report.name: float("nan")}
        )
    return _name_maxima(
        correspondence, inputs, {name: [v.item() for v in pair] for name, pair in cache.items()}
    )


def _name_maxima(
    correspondence: Correspondence, inputs: Mapping[str, float], cache: Mapping[str, list[float]]
) -> SampledMaxima:
    """Name maxima of our layers as their checkpoint names its weights and attentions."""
    theirs: dict[str, float] = {}
    attentions: dict[str, tuple[float, float]] = {}
    for match in correspondence.matches:
        module, _, parameter = match.ours.rpartition(".")
        if not match.ours.endswith(QUANTIZED):
            continue
        product = {"fc1_weight": ".1", "fc2_weight": ".2"}.get(parameter, "")
        theirs |= dict.fromkeys(match.theirs, inputs[f"{module}{product}.input"])
        attention = module.removesuffix("layernorm_qkv") + "core_attention"
        if attention in cache:
            keys, values = cache[attention]
            attentions[match.theirs[0].rsplit(".", 2)[0]] = (keys, values)
    largest = [*theirs.values(), *(value for pair in attentions.values() for value in pair)]
    if not all(math.isfinite(value) for value in largest):
        raise ValueError(
            "sample= produces NaN or infinite inputs of a layer; give tokens on which the loss is finite"
        )
    return SampledMaxima(theirs, attentions)
