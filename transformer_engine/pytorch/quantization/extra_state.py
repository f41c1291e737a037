"""bytes in a uint8 tensor = encode_extra_state(fp8_meta): a module's recipe, scales and histories.

The bytes are a pickle, because that is the format of existing checkpoints, but a checkpoint is never trusted:
reading substitutes an inert record for every class that the pickle names, rejects names that are not on a
short list, and builds recipes and tensors from the records afterwards. No callable that the pickle names ever runs.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
import warnings
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...common import recipe as recipes
from ...common.numbers import with_article
from ...common.recipe import DelayedScaling, Format, MMParams, QParams, Recipe
from .family import all_families, family_of

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
_UNSAVED = ("fp8_checkpoint_recompute", "global_fp8_buffer_pos_fwd_recompute", BUFFER_INFO)
# The exceptions of the pickle module on malformed input, by its documentation and source.
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
)


class ExtraStateError(ValueError):
    """A module's extra state is damaged, or refers to an object that may not be loaded."""


def encode_extra_state(fp8_meta: dict[str, Any]) -> Tensor:
    """Return a uint8 CPU tensor of the module's recipe, and its scales and histories under delayed scaling.

    It is empty without a recipe, and for a custom recipe, whose factory is code: no checkpoint may hold it.
    """
    recipe = fp8_meta.get("recipe")
    if recipe is None or not family_of(recipe).checkpointed:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # Functions are replaced by the field's default: autocast's recipe decides what runs after loading.
    stored = copy.copy(recipe)
    vars(stored).pop("_description", None)  # a cache of this process
    for f in fields(recipe):  # pyright: ignore[reportArgumentType] - every recipe is a dataclass
        if callable(getattr(recipe, f.name)):
            setattr(stored, f.name, f.default)
    state: dict[str, Any] = {"recipe": stored}
    if family_of(recipe).stateful:
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

    Reads what any version of the original wrote: bytes in a uint8 tensor, or an io.BytesIO of torch.save.
    """
    if state is None:
        return None
    if isinstance(state, io.BytesIO):
        decoded = _load_archive(state.getvalue())
    elif isinstance(state, Tensor):
        if state.numel() == 0:
            return None
        if state.dtype not in (torch.uint8, torch.int8):
            raise ExtraStateError(f"extra state is {state.dtype}; give the uint8 tensor of get_extra_state()")
        data = bytes(state.detach().cpu().contiguous().view(torch.uint8).numpy())
        decoded = _load_archive(data) if data[:2] == b"PK" else _load_pickle(data)
    else:
        raise ExtraStateError(
            f"extra state is {with_article(type(state))}; it must be a uint8 tensor, io.BytesIO or None"
        )
    if decoded is None:
        return None
    if not isinstance(decoded, dict):
        raise ExtraStateError(f"extra state holds {with_article(type(decoded))}; it must hold a dict")
    # Apply the rules for states of earlier versions, which only had delayed scaling.
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
    modern["extra_fp8_variables"] = {k: v for k, v in variables.items() if k not in reserved}
    return modern


def check_extra_state(decoded: dict[str, Any], slots: dict[str, int]) -> None:
    """Raise ExtraStateError unless scales and histories fit the module. Nothing is changed.

    Args:
        decoded: Result of `decode_extra_state`.
        slots: Number of quantizers of each direction, "fwd" and "bwd".
    """
    for direction, count in slots.items():
        for name, dimensions in (("scale", 1), ("amax_history", 2)):
            tensor = decoded.get(f"{name}_{direction}")
            if tensor is None:
                continue
            found = f"{name}_{direction} of the checkpoint is {tensor.dtype} of shape {tuple(tensor.shape)}"
            if not tensor.is_floating_point():
                raise ExtraStateError(
                    f"{found}; it must be floating-point numbers: save it again from the module it is of"
                )
            if tensor.dim() != dimensions:
                shape = "[quantizers]" if dimensions == 1 else "[history length, quantizers]"
                raise ExtraStateError(f"{found}; it must be {shape}: save it again from the module it is of")
            if tensor.shape[-1] != count:
                raise ExtraStateError(
                    f"{found}; the module has {count} quantizers; load it into one with as many products"
                )
            if tensor.shape[0] == 0:
                raise ExtraStateError(f"{found}, without a row; it must have one at least")


def load_extra_state(decoded: dict[str, Any], fp8_meta: dict[str, Any]) -> None:
    """Copy decoded values into fp8_meta and into its states in place; the states must exist already.

    Histories of another length are truncated or padded with zeros. Other shapes are rejected before a change.
    """
    states = {
        direction: fp8_meta[f"scaling_{direction}"].delayed_states
        for direction in ("fwd", "bwd")
        if fp8_meta.get(f"scaling_{direction}") is not None
    }
    check_extra_state(
        decoded, {direction: held[0].scale.shape[0] for direction, held in states.items() if held}
    )
    fp8_meta.update(decoded.get("extra_fp8_variables", {}))
    fp8_meta["recipe"] = decoded["recipe"]
    for direction, held in states.items():
        scale, history = decoded.get(f"scale_{direction}"), decoded.get(f"amax_history_{direction}")
        for delayed in held:
            if scale is not None:
                delayed.scale.copy_(scale)
            if history is not None:
                delayed.load_history(history.to(delayed.amax_history.device))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list) and all(_is_plain(v) for v in value)
    return type(value) in (bool, int, float, str)


class _Record:
    """An inert record of an object of the pickle: its arguments, attributes and entries."""

    target: tuple[str, str] = ("", "")

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.__dict__.update(arguments=arguments, attributes={}, entries={})
        return record

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.__dict__["attributes"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__["entries"][key] = value


class _Unpickler(pickle.Unpickler):
    """Unpickler that creates inert records; each record class exists for one load only.

    Attributes:
        foreign: Record classes of names that a checkpoint may not load.
    """

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._classes: dict[tuple[str, str], type[_Record]] = {}
        self.foreign: set[type[_Record]] = set()

    def find_class(self, module: str, name: str) -> type[_Record]:
        target = (module, name)
        if target not in self._classes:
            self._classes[target] = type("Record", (_Record,), {"target": target})
            if module == _RECIPE_MODULE:
                known = ("Format", "_OverrideLinearPrecision", *_DATA_CLASSES)
                allowed = name in known or any(name == kind.__name__ for kind in _recipe_classes())
            else:
                allowed = target in _TORCH_FUNCTIONS or _derived_recipe(module, name) is not None
            if not allowed:
                self.foreign.add(self._classes[target])
        return self._classes[target]


def _recipe_classes() -> list[type[Recipe]]:
    return [family.recipe for family in all_families() if family.checkpointed]


def _derived_recipe(module: str, name: str) -> type[Recipe] | None:
    """Return the public recipe class from which an already imported subclass derives."""
    candidate = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if not isinstance(candidate, type):
        return None
    return next((kind for kind in _recipe_classes() if kind in candidate.__mro__), None)


def _load_pickle(data: bytes) -> Any:
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        content = unpickler.load()
        # Replace a recipe's functions by the defaults, as encode_extra_state does; they are never loaded.
        recipe = content.get("recipe") if isinstance(content, dict) else None
        fields_of: Any = recipe.__dict__["attributes"] if isinstance(recipe, _Record) else None
        for name in ("amax_compute_algo", "scaling_factor_compute_algo"):
            function = fields_of.get(name) if isinstance(fields_of, dict) else None
            if isinstance(function, type) and function in unpickler.foreign:
                unpickler.foreign.discard(function)
                del fields_of[name]
                warnings.warn(
                    f"extra state's recipe has {name}={'.'.join(function.target)}, which is not loaded; the recipe of "
                    "autocast takes its place",
                    stacklevel=2,
                )
        for record in unpickler.foreign:
            raise ExtraStateError(
                f"extra state names {'.'.join(record.target)}, which a checkpoint may not load; only recipes, plain "
                "containers and tensors are read. If you trust the file, load that part yourself"
            )
        return _built(content)
    except ExtraStateError:
        raise
    except _MALFORMED as error:
        raise ExtraStateError(
            f"extra state is not a readable pickle: {error}; load an undamaged checkpoint, or remove the entry "
            "'_extra_state' to start with new scales"
        ) from error


def _load_archive(data: bytes) -> Any:
    """Return torch.load restricted to the same classes; recipes are rebuilt, so that their validation runs."""
    allowed = [*_recipe_classes(), *_DATA_CLASSES.values(), Format]
    if len(data) == 0:
        return None
    try:
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return _revalidated(loaded)
    except (*_MALFORMED, RuntimeError) as error:
        raise ExtraStateError(
            f"extra state is not a readable, harmless torch.save archive: {error}"
        ) from error


def _revalidated(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _revalidated(item) for key, item in value.items()}
    if isinstance(value, Recipe):
        return _recipe(type(value), vars(value))
    return value


def _built(value: Any) -> Any:
    """Return the object that a record describes; containers are converted recursively, plain values are unchanged."""
    if isinstance(value, _Record):
        module, name = value.target
        arguments = value.__dict__["arguments"]
        if name == "OrderedDict" and module == "collections":
            return {_built(k): _built(v) for k, v in value.__dict__["entries"].items()}
        if module == _RECIPE_MODULE:
            if name == "Format":
                return Format(_built(arguments[0]))
            if name in _DATA_CLASSES:
                # A frozen value: pickled by positional arguments (named tuple) or by its attributes (dataclass).
                attributes = _built(value.__dict__["attributes"])
                return _DATA_CLASSES[name](*[_built(a) for a in arguments], **attributes)  # pyright: ignore
            if name == "_OverrideLinearPrecision":
                return tuple(_built(a) for a in arguments)
            return _recipe(getattr(recipes, name), _built(value.__dict__["attributes"]))
        if (module, name) in _TORCH_FUNCTIONS:
            return _torch_object(name, [_built(a) for a in arguments])
        return _recipe(_derived_recipe(module, name), _built(value.__dict__["attributes"]))
    if isinstance(value, dict):
        return {_built(key): _built(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(_built(item) for item in value)
    if isinstance(value, type):
        raise ExtraStateError("extra state holds a class where it must hold a value")
    return value


def _recipe(kind: Any, attributes: Any) -> Recipe:
    """Return a recipe from the attributes that its class has; construction validates them."""
    if not isinstance(attributes, dict):
        raise ExtraStateError(f"extra state's {kind.__name__} has no attributes")
    known = {f.name: f for f in fields(kind)}
    unknown = sorted({str(name) for name in attributes} - {*known, "_description"})
    if unknown and not torch.compiler.is_compiling():
        warnings.warn(
            f"extra state's {kind.__name__} has fields unknown here: {', '.join(unknown)}", stacklevel=2
        )
    recipe = kind(**{name: value for name, value in attributes.items() if name in known and known[name].init})
    for name, value in attributes.items():
        if name in known and not known[name].init:
            if not isinstance(value, QParams):
                raise ExtraStateError(f"extra state's {kind.__name__}.{name} is not a QParams")
            setattr(recipe, name, value)
    return recipe


def _torch_object(name: str, arguments: list[Any]) -> Any:
    if name in ("_load_from_bytes", "safe_load_from_bytes"):
        (data,) = arguments
        if not isinstance(data, bytes):
            raise ExtraStateError(f"a tensor's storage is {with_article(type(data))}; it must be bytes")
        storage = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if not isinstance(storage, torch.storage.TypedStorage):
            raise ExtraStateError(f"a tensor's storage is {with_article(type(storage))}")
        return storage
    if name == "Size":
        return torch.Size(arguments[0])
    if name == "_rebuild_parameter":
        return arguments[0]
    return _tensor(*arguments[:4])


def _tensor(storage: Any, offset: int, size: Any, stride: Any) -> Tensor:
    """Return a tensor within its storage; hooks and flags in the pickle are ignored."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise ExtraStateError(f"a tensor is made of {with_article(type(storage))}")
    whole = torch.tensor([], dtype=storage.dtype, device=storage._untyped_storage.device).set_(
        storage._untyped_storage
    )
    extent = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min((offset, *size, *stride)) < 0 or (0 not in size and extent > whole.numel()):
        raise ExtraStateError(
            f"a tensor of size {tuple(size)} exceeds its storage of {whole.numel()} elements"
        )
    return whole.as_strided(tuple(size), tuple(stride), offset).clone()
