"""model = load_model(folder), save_model(model, folder), convert(source, folder): checkpoints of theirs and ours.

A folder of theirs has a config.json with a model_type that `families` knows; one of ours a transformer_engine.json.
Weights lie in safetensors files on both sides and pass through memory one tensor at a time. Everything is checked by
names and shapes before anything is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.checks import described, whole
from ..tensor.storage.quantized_tensor_storage import QuantizedTensorStorage
from .correspondence import EXTRA_STATE, Correspondence, check_tensors, same_values
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .families import family_named
from .families.settings import Settings
from .safetensors import Described, Shards, new_folder, read_json, write_shards

OURS, THEIRS = "transformer_engine.json", "config.json"
FORMAT = 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose names and shapes fit its settings.

    ours        is it a folder of ours?
    settings    their config.json, from which everything follows
    names       {name in the tables: name in the files} of the tensors that are read
    """

    folder: Path
    ours: bool
    settings: dict[str, Any]
    config: DecoderConfig
    correspondence: Correspondence
    shards: Shards
    names: dict[str, str]

    @staticmethod
    def open(folder: Path) -> Checkpoint:
        """The checkpoint in a folder of either kind; ValueError where it is none, or not whole."""
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give one that holds a checkpoint")
        ours = (folder / OURS).is_file()
        if not ours and not (folder / THEIRS).is_file():
            raise ValueError(f"{folder} holds neither {THEIRS} nor {OURS}; give the folder of a checkpoint")
        settings, config = _our_settings(folder / OURS) if ours else _their_settings(folder / THEIRS)
        correspondence = Correspondence.of(family_named(settings.get("model_type")), config)
        shards = Shards.open(folder)
        names = _our_names(shards) if ours else correspondence.their_names(shards.files)
        if not ours and config.tied:
            _check_tied(names, shards, correspondence)
        expected = correspondence.ours if ours else correspondence.theirs
        found = {name: shards.described(file) for name, file in names.items()}
        check_tensors(found, expected, str(folder))
        return Checkpoint(folder, ours, settings, config, correspondence, shards, names)

    def our_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of ours, each made when it is asked for."""
        for match in self.correspondence.matches:
            if self.ours:
                yield match.ours, self.read(match.ours)
            else:
                yield match.ours, match.layout.join([self.read(name) for name in match.theirs])

    def their_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of theirs, each made when it is asked for."""
        for match in self.correspondence.matches:
            parts = match.layout.split(self.read(match.ours))
            yield from zip(match.theirs, parts, strict=True)

    def read(self, name: str) -> Tensor:
        return self.shards.read(self.names[name])

    def extra_states(self) -> dict[str, Tensor]:
        """The states of quantization in a folder of ours."""
        return {name: self.shards.read(name) for name in self.shards.files if name.endswith(EXTRA_STATE)}

    @property
    def dtype(self) -> torch.dtype:
        """That of the embedding, and so of a model that is loaded without another."""
        match = next(match for match in self.correspondence.matches if match.ours == "embedding.weight")
        return self.shards.described(self.names[match.ours if self.ours else match.theirs[0]]).dtype

    def source(self) -> dict[str, Any]:
        return {"family": self.correspondence.family.model_type, "config": self.settings}


def load_model(
    folder: str | Path, device: torch.device | str | int = "cuda", dtype: torch.dtype | None = None
) -> Decoder:
    """The model in a folder of theirs or ours, in dtype or that of its embedding, ready to train and to sample from.

    Under `quantized_model_init` the weights are quantized as they are read.
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
        _load_extra_states(model, checkpoint)
    with torch.no_grad():
        for name, tensor in checkpoint.our_tensors():
            parameters[name].copy_(tensor)
    return model


def save_model(model: Decoder, folder: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model, with the states of its quantization, to a new folder of ours; `convert` leads on from there."""
    whole("shard_bytes", shard_bytes)
    if not isinstance(model, Decoder) or model.source is None:
        raise ValueError(
            f"model={described(model)} was not made by load_model; only what was read from a checkpoint can be "
            "written as one. torch.save(model.state_dict(), path) keeps any model"
        )
    states = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not (name.endswith(EXTRA_STATE) and tensor.numel() == 0)
    }
    plan = {name: Described(tensor.dtype, tuple(tensor.shape)) for name, tensor in states.items()}
    with new_folder(Path(folder)) as made:
        _write_our_settings(made, model.source)
        write_shards(made, plan, ((name, _values(tensor)) for name, tensor in states.items()), shard_bytes)


def convert(
    source: str | Path,
    folder: str | Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Checkpoint:
    """Write the checkpoint in source to a new folder: theirs as ours, ours as theirs. Files beside it come along.

    dtype   of all tensors; None: as they are. States of quantization are left behind on the way to theirs
    """
    checkpoint = Checkpoint.open(Path(source))
    _check_dtype(dtype)
    whole("shard_bytes", shard_bytes)
    dtypes = {name: checkpoint.shards.described(file).dtype for name, file in checkpoint.names.items()}
    plan: dict[str, Described] = {}
    for match in checkpoint.correspondence.matches:
        made_of = (match.ours,) if checkpoint.ours else match.theirs
        result = dtype or dtypes[made_of[0]]
        shapes = match.their_shapes() if checkpoint.ours else {match.ours: match.shape}
        plan |= {name: Described(result, shape) for name, shape in shapes.items()}
    tensors = checkpoint.their_tensors() if checkpoint.ours else checkpoint.our_tensors()
    with new_folder(Path(folder)) as made:
        if checkpoint.ours:
            _write_their_settings(made, checkpoint.settings, dtype)
        else:
            _write_our_settings(made, checkpoint.source())
        write_shards(
            made, plan, ((name, tensor.to(plan[name].dtype)) for name, tensor in tensors), shard_bytes
        )
        _copy_companions(checkpoint.folder, made)
    return checkpoint


def _their_settings(path: Path) -> tuple[dict[str, Any], DecoderConfig]:
    content = read_json(path)
    return content, family_named(content.get("model_type")).settings(Settings(content, str(path)))


def _our_settings(path: Path) -> tuple[dict[str, Any], DecoderConfig]:
    content = read_json(path)
    theirs, decoder = content.get("config"), content.get("decoder")
    if content.get("format") != FORMAT or not isinstance(theirs, dict) or not isinstance(decoder, dict):
        raise ValueError(
            f"{path} is not of format {FORMAT}, with config and decoder; convert the checkpoint anew"
        )
    config = family_named(theirs.get("model_type")).settings(Settings(theirs, str(path)))
    if DecoderConfig.read(decoder, str(path)) != config:
        raise ValueError(f"{path}: its decoder is not the one of its config; convert the checkpoint anew")
    return theirs, config


def _our_names(shards: Shards) -> dict[str, str]:
    return {name: name for name in shards.files if not name.endswith(EXTRA_STATE)}


def _check_tied(names: dict[str, str], shards: Shards, correspondence: Correspondence) -> None:
    """Take out a head that is the embedding's weight again; ValueError where it is another."""
    head = correspondence.family.head
    (embedding,) = next(m.theirs for m in correspondence.matches if m.ours == "embedding.weight")
    if head not in names or embedding not in names:
        return
    if not same_values(shards.read(names[head]), shards.read(names[embedding])):
        raise ValueError(
            f"{shards.folder}: config.json ties {head} to {embedding}, but their values differ; set "
            "tie_word_embeddings to false if the head is meant to be its own"
        )
    del names[head]


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(
            f"dtype={dtype} is none of {', '.join(str(known) for known in DTYPES)}; give one of these"
        )


def _load_extra_states(model: Decoder, checkpoint: Checkpoint) -> None:
    modules = dict(model.named_modules())
    for name, state in checkpoint.extra_states().items():
        owner = name.rpartition(".")[0]
        if owner not in modules:
            raise ValueError(
                f"{checkpoint.folder} holds {name}, whose module its model has not; convert it anew"
            )
        modules[owner].set_extra_state(state)


def _values(tensor: Tensor) -> Tensor:
    """In high precision: other libraries read the file."""
    return tensor.decode(tensor.dtype) if isinstance(tensor, QuantizedTensorStorage) else tensor


def _write_our_settings(folder: Path, source: dict[str, Any]) -> None:
    family = family_named(source["family"])
    config = family.settings(Settings(source["config"], THEIRS))
    content = {"format": FORMAT, "config": source["config"], "decoder": config.as_dict()}
    (folder / OURS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _write_their_settings(folder: Path, settings: dict[str, Any], dtype: torch.dtype | None) -> None:
    if dtype is not None:
        name = "dtype" if "dtype" in settings else "torch_dtype"
        settings = settings | {name: str(dtype).removeprefix("torch.")}
    (folder / THEIRS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _copy_companions(source: Path, folder: Path) -> None:
    """Tokenizers and the like: whatever holds no weights."""
    for path in sorted(source.iterdir()):
        told = path.name in (OURS, THEIRS) or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and not told:
            shutil.copyfile(path, folder / path.name)
