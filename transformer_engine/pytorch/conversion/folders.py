"""model = load_model(folder), save_model(model, folder), convert(source, folder): checkpoints in both formats.

A folder in their format has a config.json with a model_type in `families`; a folder in our format
has a transformer_engine.json. Both hold weights in safetensors files, which are processed one
tensor at a time. Names and shapes are checked before anything is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described, whole
from .correspondence import EXTRA_STATE, Correspondence, check_tensors
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .families import family_named
from .quantized_folders import (
    SampledMaxima,
    high_precision,
    linear_weights,
    serving_format,
    write_quantized,
)
from .quantized_shards import MODELOPT_FILE, SETTINGS, QuantizedShards, dequantized
from .safetensors import SHARD_BYTES, Described, Shards, new_folder, read_json, write_shards
from .settings import CONFIG_FILE, Settings

OURS, THEIRS = "transformer_engine.json", CONFIG_FILE
FORMAT = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose tensor names and shapes match its settings.

    Attributes:
        folder: The folder.
        ours: Whether the folder is in our format.
        settings: Their config.json, from which all other settings follow.
        config: Model settings.
        correspondence: Our tensors and their tensors.
        shards: The files.
        names: {name in the tables: name in the files} for the tensors to read.
    """

    folder: Path
    ours: bool
    settings: dict[str, Any]
    config: DecoderConfig
    correspondence: Correspondence
    shards: Shards | QuantizedShards
    names: dict[str, str]

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """Open the checkpoint in a folder in either format; raise ValueError if it is incomplete or absent."""
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give one that holds a checkpoint")
        ours = (folder / OURS).is_file()
        if not ours and not (folder / THEIRS).is_file():
            raise ValueError(
                f"{folder} holds neither {THEIRS} nor {OURS}; give the folder of a checkpoint"
            )
        shards: Shards | QuantizedShards = Shards.open(folder)
        if ours:
            path = folder / OURS
            content = read_json(path)
            settings, decoder = content.get("config"), content.get("decoder")
            recognized = content.get("format") == FORMAT
            if not (recognized and isinstance(settings, dict) and isinstance(decoder, dict)):
                raise ValueError(
                    f"{path} is not of format {FORMAT}, with config and decoder; convert the checkpoint again"
                )
            config = _check_config(Settings(settings, str(path)), shards, ours)
            if DecoderConfig.read(decoder, str(path)) != config:
                raise ValueError(
                    f"{path}: its decoder is not the one of its config; convert the checkpoint again"
                )
        else:
            settings = read_json(folder / THEIRS)
            shards = dequantized(shards, settings)
            settings.pop(SETTINGS, None)
            config = _check_config(Settings(settings, str(folder / THEIRS)), shards, ours)
        correspondence = Correspondence.of(family_named(settings.get("model_type")), config)
        if ours:
            names = {name: name for name in shards.files if not name.endswith(EXTRA_STATE)}
        else:
            names = correspondence.their_names(shards.files)
        if not ours and config.tied:
            # Remove a stored head that equals the embedding's weight.
            head = correspondence.family.head
            (embedding,) = next(
                m.theirs for m in correspondence.matches if m.ours == "embedding.weight"
            )
            if head in names and embedding in names:
                stored, embedded = shards.read(names[head]), shards.read(names[embedding])
                if stored.dtype != embedded.dtype or not torch.equal(stored, embedded):
                    raise ValueError(
                        f"{shards.folder}: config.json ties {head} to {embedding}, but their values differ; set "
                        "tie_word_embeddings to false if the head is meant to be its own"
                    )
                del names[head]
        expected = correspondence.ours if ours else correspondence.theirs
        found = {name: shards.described(file) for name, file in names.items()}
        check_tensors(found, expected, str(folder))
        return Checkpoint(folder, ours, settings, config, correspondence, shards, names)

    def our_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over our tensors; each is built when the iterator reaches it."""
        for match in self.correspondence.matches:
            if self.ours:
                yield match.ours, self.read(match.ours)
            else:
                yield match.ours, match.layout.join([self.read(name) for name in match.theirs])

    def their_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over their tensors; each is built when the iterator reaches it."""
        for match in self.correspondence.matches:
            if self.ours:
                parts = match.layout.split(self.read(match.ours))
            else:
                parts = [self.read(name) for name in match.theirs]
            yield from zip(match.theirs, parts, strict=True)

    def read(self, name: str) -> Tensor:
        return self.shards.read(self.names[name])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding, and the default in `load_model`."""
        match = next(
            match for match in self.correspondence.matches if match.ours == "embedding.weight"
        )
        return self.shards.described(self.names[match.ours if self.ours else match.theirs[0]]).dtype

    def source(self) -> dict[str, Any]:
        return {"family": self.correspondence.family.model_type, "config": self.settings}


def _check_config(
    settings: Settings, shards: Shards | QuantizedShards, ours: bool
) -> DecoderConfig:
    """Convert settings to a config; raise ValueError for sizes that the stored tensors cannot have.

    The config's sizes determine time and memory for all further steps.
    """
    family = family_named(settings.content.get("model_type"))
    layers, stored = settings.integer(family.layers), family.count_stored_layers(shards.files, ours)
    remedy = "take the config.json that belongs to the weights"
    if layers != stored:
        raise ValueError(
            f"{settings.source}: {family.layers}={layers}, but the weights have {stored} layers; {remedy}"
        )
    config = family.settings(settings)
    longest = max(
        (max(shards.described(name).shape, default=1) for name in shards.files), default=1
    )
    for name in ("vocabulary", "hidden", "feed_forward", "heads", "groups", "head_size"):
        if getattr(config, name) > longest:
            raise ValueError(
                f"{settings.source}: {name}={getattr(config, name)}, but no dimension of the weights exceeds "
                f"{longest}; {remedy}"
            )
    return config


def load_model(
    folder: str | Path, device: torch.device | str | int = "cuda", dtype: torch.dtype | None = None
) -> Decoder:
    """Load the model in a folder of either format. Inside `quantized_model_init` the weights are quantized on reading.

    Args:
        folder: Folder to read.
        device: Parameter device.
        dtype: Parameter dtype, by default the embedding's.
    """
    checkpoint = Checkpoint.open(Path(folder))
    _check_dtype(dtype)
    model = Decoder(
        checkpoint.config,
        device,
        checkpoint.dtype if dtype is None else dtype,
        init_method=lambda weight: None,
        source=checkpoint.source(),
    )
    parameters = dict(model.named_parameters())
    if checkpoint.ours:
        modules = dict(model.named_modules())
        for name in checkpoint.shards.files:
            if not name.endswith(EXTRA_STATE):
                continue
            owner = name.rpartition(".")[0]
            if owner not in modules:
                raise ValueError(
                    f"{checkpoint.folder} holds {name}, whose module its model lacks; convert the checkpoint again"
                )
            modules[owner].set_extra_state(checkpoint.shards.read(name))
    with torch.no_grad():
        for name, tensor in checkpoint.our_tensors():
            parameters[name].copy_(tensor)
    return model


def save_model(model: Decoder, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model with its quantization states to a new folder, which `load_model` and `convert` read.

    Args:
        model: Model to write.
        folder: Folder to create.
        shard_bytes: Maximum file size.
    """
    whole("shard_bytes", shard_bytes)
    if not isinstance(model, Decoder) or model.source is None:
        raise ValueError(
            f"model={described(model)} was not made by load_model; only a model that was read from a checkpoint can "
            "be written as one. torch.save(model.state_dict(), path) keeps any model"
        )
    states = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (name.endswith(EXTRA_STATE) and tensor.numel() == 0)
    }
    plan = {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in states.items()}
    with new_folder(Path(folder)) as path:
        _write_our_settings(path, model.source)
        # Other libraries read the file, so quantized tensors are written in high precision.
        values = ((name, high_precision(tensor)) for name, tensor in states.items())
        write_shards(path, plan, values, shard_bytes)


def convert(
    source: str | Path,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    quantization: str | None = None,
) -> Checkpoint:
    """Convert the checkpoint in one folder to a new folder in the other format, with its tokenizer files.

    A quantized checkpoint from another library is read in high precision. With `quantization`, the
    result is a quantized Hugging Face checkpoint, whichever format `source` has.

    Args:
        source: Folder to read.
        folder: Folder to create.
        dtype: Dtype for all tensors; None keeps the dtype of each. Quantization states are not converted.
        shard_bytes: Maximum file size.
        quantization: `save_quantized` format that needs no sample; None writes unquantized weights.
    """
    form = None if quantization is None else serving_format(quantization, sampled=False)
    checkpoint = Checkpoint.open(Path(source))
    _check_dtype(dtype)
    whole("shard_bytes", shard_bytes)
    writes_theirs = checkpoint.ours or form is not None
    dtypes = {
        name: checkpoint.shards.described(file).dtype for name, file in checkpoint.names.items()
    }
    plan: dict[str, Described] = {}
    for match in checkpoint.correspondence.matches:
        made_of = (match.ours,) if checkpoint.ours else match.theirs
        result = dtype or dtypes[made_of[0]]
        shapes = match.their_shapes() if writes_theirs else {match.ours: match.shape}
        plan |= {name: Described(result, shape) for name, shape in shapes.items()}
    source_tensors = checkpoint.their_tensors() if writes_theirs else checkpoint.our_tensors()
    tensors = ((name, tensor.to(plan[name].dtype)) for name, tensor in source_tensors)
    with new_folder(Path(folder)) as made:
        if writes_theirs:
            settings = checkpoint.settings
            if dtype is not None:
                name = "dtype" if "dtype" in settings else "torch_dtype"
                settings = settings | {name: str(dtype).removeprefix("torch.")}
            if form is None:
                (made / THEIRS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
                write_shards(made, plan, tensors, shard_bytes)
            else:
                linear = linear_weights(checkpoint.correspondence)
                write_quantized(
                    made, settings, form, plan, tensors, linear, SampledMaxima(), shard_bytes
                )
        else:
            _write_our_settings(made, checkpoint.source())
            write_shards(made, plan, tensors, shard_bytes)
        # tokenizers and other files without weights
        for path in sorted(checkpoint.folder.iterdir()):
            written = path.name in (OURS, THEIRS, MODELOPT_FILE) or path.name.endswith(
                ".index.json"
            )
            if (
                path.is_file()
                and path.suffix in (".json", ".txt", ".model", ".jinja")
                and not written
            ):
                shutil.copyfile(path, made / path.name)
    return checkpoint


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype} is not supported; give one of {', '.join(str(supported) for supported in DTYPES)}"
        )


def _write_our_settings(folder: Path, source: dict[str, Any]) -> None:
    family = family_named(source["family"])
    config = family.settings(Settings(source["config"], THEIRS))
    content = {"format": FORMAT, "config": source["config"], "decoder": asdict(config)}
    (folder / OURS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
