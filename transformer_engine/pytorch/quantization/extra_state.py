"""bytes in a uint8 tensor = encode_extra_state(fp8_meta): a module's recipe, scales and histories.

The bytes are a pickle, because existing checkpoints have that format, but a checkpoint is never
trusted: `pickle_reader.py` substitutes an inert record for every class that the pickle names, in
linear time. This file rejects names that are not on a short list, and builds recipes and tensors
from the records afterwards. No callable that the pickle names ever runs.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import struct
import sys
import warnings
import zipfile
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.numbers import with_article
from ...common.recipe import DelayedScaling, Format, MMParams, QParams, Recipe
from ...common.recipe.living import has_no_effect
from .family import all_families, find_family
from .pickle_reader import (
    MAXIMUM_BYTES,
    MAXIMUM_DEPTH,
    MAXIMUM_OPCODES,
    ExtraStateError,
    Record,
    StoredTensor,
    Unpickler,
    is_legacy_file,
    read_archive,
    read_legacy_file,
)

BUFFER_INFO = "buffer_index_and_autocast_key"
_RECIPE_MODULE = recipes.__name__
_DATA_CLASSES = {"MMParams": MMParams, "QParams": QParams, "_FormatHelper": recipes._FormatHelper}
_TORCH_FUNCTIONS = (
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.storage", "_load_from_bytes"),
    # Megatron-core replaces the function above by this one, whose name pickle stores.
    ("megatron.core.safe_globals", "safe_load_from_bytes"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
)
MAXIMUM_HISTORY = 1 << 16  # history steps when it is not in the checkpoint
_UNSAVED = ("fp8_checkpoint_recompute", "global_fp8_buffer_pos_fwd_recompute", BUFFER_INFO)
# Exceptions from the pickle and zipfile modules on malformed input, by their documentation and source.
_MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
    UnicodeDecodeError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
)


def encode_extra_state(fp8_meta: dict[str, Any]) -> Tensor:
    """Encode the module's recipe, and its scales and histories under delayed scaling, as a uint8 CPU tensor.

    It is empty without a recipe, and for a custom recipe, whose factory is code: no checkpoint may hold it.
    """
    recipe = fp8_meta.get("recipe")
    if recipe is None or not find_family(recipe).checkpointed:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # Functions are replaced by the field's default: autocast's recipe decides what runs after loading.
    stored = copy.copy(recipe)
    vars(stored).pop("_description", None)  # a cache of this process
    for f in fields(recipe):  # every recipe is a dataclass
        if callable(getattr(recipe, f.name)):
            setattr(stored, f.name, f.default)
    state: dict[str, Any] = {"recipe": stored}
    if find_family(recipe).stateful:
        for direction in ("fwd", "bwd"):
            scaling = fp8_meta.get(f"scaling_{direction}")
            for delayed in () if scaling is None else scaling.delayed_states:
                state[f"scale_{direction}"] = delayed.scale.detach().cpu()
                state[f"amax_history_{direction}"] = delayed.amax_history.detach().cpu()
    state["extra_fp8_variables"] = {
        key: value
        for key, value in fp8_meta.items()
        if key not in _UNSAVED
        and isinstance(value, (bool, int, float, str, tuple, list))
        and _is_plain(value)
    }
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def decode_extra_state(state: Tensor | io.BytesIO | None) -> dict[str, Any] | None:
    """Return the encoded dict; None for an empty state. Raise ExtraStateError if it is damaged or not harmless.

    Reads what any version of NVIDIA's engine wrote: bytes in a uint8 tensor, or an io.BytesIO from torch.save.
    An absent state is None, or the placeholder of torch.distributed.checkpoint for a state that the
    checkpoint lacks.
    """
    if state is None or type(state).__qualname__ == "_EXTRA_STATE":
        return None
    if isinstance(state, io.BytesIO):
        decoded = _load(state.getvalue())
    elif isinstance(state, Tensor):
        if state.numel() == 0:
            return None
        if state.dtype not in (torch.uint8, torch.int8):
            raise ExtraStateError(
                f"extra state is {state.dtype}; give the uint8 tensor of get_extra_state()"
            )
        data = bytes(state.detach().cpu().contiguous().view(torch.uint8).numpy())
        decoded = _load(data)
    else:
        raise ExtraStateError(
            f"extra state is {with_article(type(state))}; it must be a uint8 tensor, io.BytesIO or None"
        )
    if decoded is None:
        return None
    return validate_state(decoded)


def validate_state(decoded: Any) -> dict[str, Any]:
    """Validate the types of a decoded state's entries, and apply the rules for states of earlier versions."""
    if not isinstance(decoded, dict):
        raise ExtraStateError(
            f"extra state holds {with_article(type(decoded))}; it must hold a dict"
        )
    # Earlier versions only had delayed scaling.
    modern = {key: value for key, value in decoded.items() if not str(key).startswith("scale_inv")}
    if "recipe" not in modern:
        modern["recipe"] = DelayedScaling(backward_override=None)
    if not isinstance(modern["recipe"], Recipe):
        raise ExtraStateError(
            f"extra state's recipe is {with_article(type(modern['recipe']))}; it must be a Recipe"
        )
    for name in ("scale_fwd", "scale_bwd", "amax_history_fwd", "amax_history_bwd"):
        if name in modern and not isinstance(modern[name], Tensor):
            raise ExtraStateError(
                f"extra state's {name} is {with_article(type(modern[name]))}; it must be a tensor"
            )
    variables = modern.get("extra_fp8_variables", {})
    if not isinstance(variables, dict):
        raise ExtraStateError("extra state's extra_fp8_variables is not a dict")
    reserved = ("recipe", "scaling_fwd", "scaling_bwd", "fp8_group", *_UNSAVED)
    modern["extra_fp8_variables"] = {
        key: value for key, value in variables.items() if key not in reserved and _is_plain(value)
    }
    _check_history_length(modern)
    return modern


def _check_history_length(state: dict[str, Any]) -> None:
    """Raise ExtraStateError if the recipe would allocate histories far longer than the stored ones."""
    length = getattr(state["recipe"], "amax_history_len", 0)  # only delayed scaling has one
    histories = [state[name] for name in ("amax_history_fwd", "amax_history_bwd") if name in state]
    longest = max([MAXIMUM_HISTORY, *(history.shape[0] for history in histories if history.dim())])
    if length > longest:
        raise ExtraStateError(
            f"extra state's recipe has amax_history_len={length}, but its histories have at most {longest} steps; "
            "load an undamaged checkpoint"
        )


def check_extra_state(decoded: dict[str, Any], slots: dict[str, int]) -> None:
    """Raise ExtraStateError unless scales and histories fit the module. Nothing is changed.

    Args:
        decoded: Result from `decode_extra_state`.
        slots: Quantizer count per direction, "fwd" and "bwd".
    """
    for direction, count in slots.items():
        for name, dimensions in (("scale", 1), ("amax_history", 2)):
            tensor = decoded.get(f"{name}_{direction}")
            if tensor is None:
                continue
            loaded = f"{name}_{direction} of the checkpoint is {tensor.dtype} of shape {tuple(tensor.shape)}"
            if not tensor.is_floating_point():
                raise ExtraStateError(
                    f"{loaded}; it must be floating-point numbers: save it again from the module it is of"
                )
            if tensor.dim() != dimensions:
                shape = "[quantizers]" if dimensions == 1 else "[history length, quantizers]"
                raise ExtraStateError(
                    f"{loaded}; it must be {shape}: save it again from the module it is of"
                )
            if tensor.shape[-1] != count:
                raise ExtraStateError(
                    f"{loaded}; the module has {count} quantizers; load it into one with as many products"
                )
            if tensor.shape[0] == 0:
                raise ExtraStateError(f"{loaded}, without a row; it must have one at least")


def load_extra_state(decoded: dict[str, Any], fp8_meta: dict[str, Any]) -> None:
    """Copy decoded values into fp8_meta and into its states in place; the states must exist already.

    Histories with another length are truncated or padded with zeros. Other shapes are rejected before a change.
    """
    states = {
        direction: fp8_meta[f"scaling_{direction}"].delayed_states
        for direction in ("fwd", "bwd")
        if fp8_meta.get(f"scaling_{direction}") is not None
    }
    slots = {
        direction: delayed[0].scale.shape[0] for direction, delayed in states.items() if delayed
    }
    check_extra_state(decoded, slots)
    fp8_meta.update(decoded.get("extra_fp8_variables", {}))
    fp8_meta["recipe"] = decoded["recipe"]
    for direction, delayed_states in states.items():
        scale, history = decoded.get(f"scale_{direction}"), decoded.get(f"amax_history_{direction}")
        for delayed in delayed_states:
            if scale is not None:
                delayed.scale.copy_(scale)
            if history is not None:
                delayed.load_history(history.to(delayed.amax_history.device))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list) and all(_is_plain(v) for v in value)
    return type(value) in (bool, int, float, str)


def _recipe_classes() -> list[type[Recipe]]:
    return [family.recipe for family in all_families() if family.checkpointed]


def _base_recipe(module: str, name: str) -> type[Recipe] | None:
    """Return the public recipe class from which an already imported subclass derives."""
    candidate = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(candidate, type):
        return None
    return next((kind for kind in _recipe_classes() if kind in candidate.__mro__), None)


def _load(data: bytes) -> Any:
    """Read a pickle or a torch.save file; raise ExtraStateError unless its content is allowed."""
    if len(data) == 0:
        return None
    if len(data) > MAXIMUM_BYTES:
        raise ExtraStateError(f"extra state has {len(data)} bytes; the limit is {MAXIMUM_BYTES}")
    archive = data[:2] == b"PK"
    try:
        if archive:
            content, unpickler = read_archive(data, _is_allowed)
        elif is_legacy_file(data):
            content, unpickler = read_legacy_file(data, _is_allowed)
        else:
            unpickler = Unpickler(io.BytesIO(data), _is_allowed)
            content = unpickler.load()
        _drop_functions(content, unpickler.foreign)
        for record in unpickler.foreign:
            raise ExtraStateError(
                f"extra state names {'.'.join(record.target)}, which a checkpoint may not load; only recipes, plain "
                "containers and tensors are read. If you trust the file, load that part yourself"
            )
        return _Builder().built(content)
    except ExtraStateError:
        raise
    except _MALFORMED as error:
        raise ExtraStateError(
            f"extra state is not a readable {'torch.save archive' if archive else 'pickle'}: {error}; load an "
            "undamaged checkpoint, or remove the entry '_extra_state' to start with new scales"
        ) from error


def _is_allowed(module: str, name: str) -> bool:
    """Return whether a checkpoint may contain an object with this module and name."""
    if module == _RECIPE_MODULE:
        allowed = ("Format", "_OverrideLinearPrecision", *_DATA_CLASSES)
        return name in allowed or any(name == kind.__name__ for kind in _recipe_classes())
    return (module, name) in _TORCH_FUNCTIONS or _base_recipe(module, name) is not None


def _drop_functions(content: Any, foreign: set[type[Record]]) -> None:
    """Drop the functions of a delayed-scaling recipe, as encode_extra_state does; they are never loaded."""
    recipe = content.get("recipe") if isinstance(content, dict) else None
    attributes: Any = recipe.__dict__["attributes"] if isinstance(recipe, Record) else None
    for name in ("amax_compute_algo", "scaling_factor_compute_algo"):
        function = attributes.get(name) if isinstance(attributes, dict) else None
        if isinstance(function, type) and function in foreign:
            foreign.discard(function)
            del attributes[name]
            warnings.warn(
                f"extra state's recipe has {name}={'.'.join(function.target)}, which is not loaded; the recipe of "
                "autocast takes its place",
                stacklevel=2,
            )


class _Builder:
    """Builds recipes, containers and tensors from inert records.

    A shared object is built once per reference, so that results share no memory. Object count,
    depth and total tensor size are limited.
    """

    def __init__(self) -> None:
        self._objects = MAXIMUM_OPCODES
        self._bytes = MAXIMUM_BYTES
        self._storages: dict[
            int, StoredTensor
        ] = {}  # by the id of their bytes, which the records keep alive

    def built(self, value: Any, depth: int = 0) -> Any:
        """Return the object that a record describes; containers are converted recursively, plain values unchanged."""
        self._objects -= 1
        if depth > MAXIMUM_DEPTH or self._objects < 0:
            raise ExtraStateError(
                f"extra state nests objects deeper than {MAXIMUM_DEPTH}, or has more than {MAXIMUM_OPCODES} objects; "
                "it is not a module's state"
            )
        if isinstance(value, Record):
            return self._read_record(value, depth + 1)
        if isinstance(value, dict):
            return {
                self.built(key, depth + 1): self.built(item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple, set)):
            return type(value)([self.built(item, depth + 1) for item in value])
        if isinstance(value, type):
            raise ExtraStateError("extra state holds a class where it must hold a value")
        return value

    def _read_record(self, record: Record, depth: int) -> Any:
        module, name = record.target
        if name == "OrderedDict" and module == "collections":
            return self.built(record.__dict__["entries"], depth)
        if (module, name) in _TORCH_FUNCTIONS:
            return self._torch_object(
                name, [self.built(a, depth) for a in record.__dict__["arguments"]]
            )
        if module == _RECIPE_MODULE and name == "Format":
            return Format(self.built(record.__dict__["arguments"][0], depth))
        if module == _RECIPE_MODULE and name == "_OverrideLinearPrecision":
            return self.built(record.__dict__["arguments"], depth)
        attributes = self.built(record.__dict__["attributes"], depth)
        if module == _RECIPE_MODULE and name in _DATA_CLASSES:
            # A frozen value: pickled by positional arguments (named tuple) or by its attributes (dataclass).
            arguments = self.built(record.__dict__["arguments"], depth)
            return _DATA_CLASSES[name](*arguments, **attributes)
        kind = getattr(recipes, name) if module == _RECIPE_MODULE else _base_recipe(module, name)
        return _recipe(kind, attributes)

    def _torch_object(self, name: str, arguments: list[Any]) -> Any:
        if name in ("_load_from_bytes", "safe_load_from_bytes"):
            (data,) = arguments
            if not isinstance(data, bytes):
                raise ExtraStateError(
                    f"a tensor's storage is {with_article(type(data))}; it must be bytes"
                )
            if id(data) not in self._storages:
                storage, _ = read_legacy_file(data, _is_allowed)
                if not isinstance(storage, StoredTensor):
                    raise ExtraStateError(f"a tensor's storage is {with_article(type(storage))}")
                self._storages[id(data)] = storage
            return self._storages[id(data)]
        if name == "Size":
            return torch.Size(arguments[0])
        if name == "_rebuild_parameter":
            return arguments[0]
        return self._tensor(*arguments[:4])

    def _tensor(self, storage: Any, offset: int, size: Any, stride: Any) -> Tensor:
        """Copy a strided tensor out of its storage; hooks and flags in the pickle are ignored."""
        if not isinstance(storage, StoredTensor):
            raise ExtraStateError(f"a tensor is made of {with_article(type(storage))}")
        base = storage.tensor
        extent = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        count = math.prod(size)
        if min((offset, *size, *stride)) < 0 or (count and max(extent, count) > base.numel()):
            raise ExtraStateError(
                f"a tensor of size {tuple(size)} exceeds its storage of {base.numel()} elements"
            )
        self._bytes -= count * base.itemsize
        if self._bytes < 0:
            raise ExtraStateError(f"extra state has tensors of more than {MAXIMUM_BYTES} bytes")
        return base.as_strided(tuple(size), tuple(stride), offset).clone()


def _recipe(kind: Any, attributes: Any) -> Recipe:
    """Construct a recipe from the attributes that its class has; the constructor validates them."""
    if not isinstance(attributes, dict):
        raise ExtraStateError(f"extra state's {kind.__name__} has no attributes")
    declared = {f.name: f for f in fields(kind)}
    extra = {
        str(name): value
        for name, value in attributes.items()
        if name not in (*declared, "_description")
    }
    unknown = sorted(name for name, value in extra.items() if not has_no_effect(name, value))
    if unknown and not torch.compiler.is_compiling():
        warnings.warn(
            f"extra state's {kind.__name__} has fields unknown here: {', '.join(unknown)}",
            stacklevel=2,
        )
    recipe = kind(
        **{
            name: value
            for name, value in attributes.items()
            if name in declared and declared[name].init
        }
    )
    for name, value in attributes.items():
        if name in declared and not declared[name].init:
            if not isinstance(value, QParams):
                raise ExtraStateError(f"extra state's {kind.__name__}.{name} is not a QParams")
            setattr(recipe, name, value)
    return recipe
