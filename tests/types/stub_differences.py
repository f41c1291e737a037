"""Differences between the types that checkers read and the objects at run time that stubtest may report.

Keys are regular expressions for whole lines of `stubtest --concise`, values are the reasons. Functions under
`functools.cache` are recognized by their objects instead (`is_cached`): checkers read typeshed's `_lru_cache_wrapper`,
which takes any arguments.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

ALLOWED = {
    r".* is not a Union": "mypy reads a Literal with several values as a union; at run time it is a Literal",
    r".*\.__call__ is inconsistent, stub parameter \"__arg0\" (differs from runtime parameter \"self\""
    r"|should be positional or keyword \(remove \"/\"\))": "declared from `forward`, without a name for self",
    r".* variable differs from runtime type def .*": "`name = staticmethod(function)`, a variable for checkers",
    r"transformer_engine\.common\.recipe\.(\w+|parts\.\w+)\.__new__ is inconsistent, .*": "`inspect` takes a class's "
    "signature from `__new__`, to which a decorator gives the signature of the dataclass's `__init__`",
    r".*\.__init__ is inconsistent, runtime parameter \"(parent|name)\" is not keyword-only": "Flax declares the two "
    "fields as keyword-only for checkers, and its dataclasses append them",
    r".*\.__match_args__ variable differs from runtime type tuple.*": "Flax appends its fields parent and name",
    r"transformer_engine\.debug\.features\..* is inconsistent, metaclass differs": "the base class is in "
    "nvdlfw_inspect, which has no types",
    r"transformer_engine\.pytorch\.constants\.dist_group_type.*": "torch.distributed.ProcessGroup, whose stub is "
    "torch's",
    r".*\.__all__ names exported from the stub do not correspond .*": "stubtest does not add the lists of modules, "
    "`__all__ += module.__all__`",
    r"transformer_engine\.common\.kernels\.launch\.(Pointers|Tensors) is not present at runtime": "aliases for "
    "annotations only, because torch is imported for checkers only",
    r"transformer_engine\.jax\.nnx\.error is not present at runtime": "`except .. as error` deletes the name",
    r"transformer_engine\.jax\.primitives\.kernels\.Shape\.(ndim|size) is read-only .*": "jax.ShapeDtypeStruct",
    r"transformer_engine\.pytorch\.compat\.by_name\.\w+\.watchers is not present in stub": "set by the metaclass, "
    "which declares it",
    r"transformer_engine\.pytorch\.cpp_extensions\.fused_attn\.fused_attn_(fwd|bwd) is inconsistent, runtime parameter "
    r"\"(o|do)_format\" has a default .*": "the default is a string that is recognized by identity",
    r"transformer_engine\.pytorch\.fast\.symbols\.Symbol\.__\w+__ is not present in stub": "operators that raise; "
    "checkers must reject them",
    r"transformer_engine\.pytorch\.module\.watched\.(Slots|WatchedDict)\.\w+ is inconsistent, stub does not have "
    r"(\*args parameter \"arguments\"|\*\*kwargs parameter \"options\")": "one wrapper for every method",
    r".* is a disjoint base at runtime, but isn't marked .*": "a class with __slots__; Python has the decorator from "
    "3.15 on",
    r"transformer_engine\.pytorch\.primitives\.attention\.call\.Feature\.__new__ is inconsistent, .*": "a string "
    "enumeration, whose constructor looks a member up",
}


def is_cached(name: str) -> bool:
    """Whether a dotted name is a function, or a static or class method, under `functools.cache`."""
    result = _object(name)
    return isinstance(getattr(result, "__func__", result), functools._lru_cache_wrapper)


def matching_rule(line: str) -> str | None:
    """The key of `ALLOWED` that matches a line of stubtest."""
    return next((rule for rule in ALLOWED if re.fullmatch(rule, line)), None)


def _object(name: str) -> Any:
    """The object with a dotted name; attributes of classes are read without binding them."""
    module = name
    while True:
        try:
            result: Any = importlib.import_module(module)
            break
        except ImportError:
            module = module.rpartition(".")[0]
    for attribute in name.removeprefix(module).strip(".").split("."):
        if attribute:
            result = (
                vars(result).get(attribute)
                if attribute in vars(result)
                else getattr(result, attribute, None)
            )
    return result
