"""Griffe extension that completes the API reference's entries.

Static analysis alone misreads this package in several ways, and each hook below corrects one of them:

- A public name may share its name with a submodule (`autocast`) or be assigned at import (`gelu`). Public names that
  static analysis resolves to a module, to the attribute of a callable, or not at all, become aliases of their
  definition, or functions with the signature and docstring of the runtime object.
- A class without an `__init__` in its source (a Flax module, a tensor with `__new__`) gets its runtime
  signature. An enumeration has no signature, and its entry lists the members.
- Signatures show neither private parameters nor private constants' names.
- "The other arguments are as in `Linear`." copies the missing entries into the argument table, also in a
  method ("as in `Linear.forward`"). If the table is then complete, the sentence is dropped.
- The low-level functions have the original's signatures, whose arguments are alike in function families.
  `api_arguments.json` describes them once per family; a description in a docstring has priority.
- Shapes such as [*batch, f] would turn italic in Markdown, so they become code spans.
- `Example:` is a house-style section; Griffe calls it `Examples:`.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

PYTORCH = "transformer_engine.pytorch"
JAX = "transformer_engine.jax"

# The packages whose public names have an entry each.
PACKAGES = (
    PYTORCH,
    *(
        f"{PYTORCH}.{name}"
        for name in (
            "ops",
            "optimizers",
            "router",
            "distributed",
            "cpu_offload",
            "conversion",
            "graph",
            "quantized_tensor",
            "custom_recipes.quantizer_factories",
            "custom_recipes.quantizer_factory_zoo",
            "custom_recipes.reference_current_scaling",
            "custom_recipes.reference_nvfp4",
            "integrations.huggingface",
            "integrations.megatron",
            "jit",
            "triton.cross_entropy",
            "triton.grouped_dbias_dscales",
            "triton.mhc",
            "triton.pad",
            "triton.permutation",
        )
    ),
    "transformer_engine.common.recipe",
    JAX,
    *(
        f"{JAX}.{name}"
        for name in (
            "flax",
            "attention",
            "router",
            "permutation",
            "moe",
            "ep",
            "activation",
            "softmax",
            "dense",
            "layernorm",
            "layernorm_dense",
            "layernorm_mlp",
            "checkpoint_policies",
            "cpp_extensions",
            "nnx",
            "collective",
            "debug.experimental",
            "quantize",
            "sharding",
        )
    ),
    "transformer_engine_torch",
    "transformer_engine_jax",
)

# {family: {"names": pattern of `package.name`, "arguments": {argument: description}}}
FAMILIES: dict[str, Any] = json.loads((Path(__file__).parent / "api_arguments.json").read_text())

_SHAPE = re.compile(r"(?<![\w`\])\[])\[[\w ,.*+/()-]+\](?![(\[:`])")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_AS_IN = r"(?:[Oo]ther\s+)?arguments\s+are\s+(?:as\s+in|those\s+of)\s+((?:`[\w.]+`(?:,?\s+and\s+|,\s+)?)+)"
_OTHERS = re.compile(_AS_IN)
# A blank line after the sentence stays: it separates the next section.
_OTHERS_SENTENCE = re.compile(rf" ?The\s+{_AS_IN}\.(?: (?=\S)|\n(?!\s*\n))?")


def public_names(package: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for names in `__all__`, otherwise for a package's definitions; no modules."""
    module = importlib.import_module(package)
    defined = [name for name, value in vars(module).items() if _is_defined_below(value, package)]
    for name in getattr(module, "__all__", defined):
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            yield name, value


def _is_defined_below(value: Any, package: str) -> bool:
    """Whether a class or function without a leading underscore comes from the package."""
    name, module = getattr(value, "__name__", "_"), getattr(value, "__module__", None) or ""
    return callable(value) and not name.startswith("_") and module.startswith(package)


def with_code_spans(text: str) -> str:
    """Turn every shape outside code into a code span; doctests and indented blocks stay."""
    lines = []
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        is_code = fenced or line.lstrip().startswith((">>>", "..."))
        lines.append(line if is_code else _outside_code(line))
    return "\n".join(lines)


def _outside_code(line: str) -> str:
    """Wrap the shapes in one line that are outside its code spans."""
    parts, end = [], 0
    for code in _CODE.finditer(line):
        parts += [_SHAPE.sub(r"`\g<0>`", line[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _SHAPE.sub(r"`\g<0>`", line[end:])])


def parameter_names(value: Any) -> list[str]:
    """Parameter names that callers pass; Flax itself adds `parent` and `name` to its modules."""
    try:
        parameters = list(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # some built-in types' constructors have no signature
        return []
    from_flax = {"parent", "name"} if "parent" in parameters else set()
    return [name for name in parameters if not name.startswith("_") and name not in from_flax]


def read_descriptions(docstring: griffe.Docstring | None) -> dict[str, str]:
    """{name: description} for the arguments, or the attributes, that a docstring describes."""
    if docstring is None:
        return {}
    sections = docstring.parse("google", warnings=False)
    kinds = (griffe.DocstringSectionKind.attributes, griffe.DocstringSectionKind.parameters)
    tables = [section.value for kind in kinds for section in sections if section.kind is kind]
    return {entry.name.lstrip("*"): entry.description for table in tables for entry in table}


class ApiEntries(griffe.Extension):
    """Completes each package after it has been loaded."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Correct the docstrings of a package, then the public names that belong to it."""
        for definition in _definitions(pkg):
            if isinstance(definition, griffe.Function):
                listing = [
                    parameter
                    for parameter in definition.parameters
                    if not parameter.name.startswith("_")
                ]
                definition.parameters = griffe.Parameters(*listing)
            if definition.docstring is not None:
                text = re.sub(
                    r"^Example:$", "Examples:", definition.docstring.value, flags=re.MULTILINE
                )
                definition.docstring.value = with_code_spans(text)
        for package in PACKAGES:
            if package.split(".")[0] == pkg.name:
                for name, value in public_names(package):
                    _complete_name(loader, package, name, value)
                    _complete_constructor(loader, package, name, value)
                    _complete_arguments(loader, package, name, value)
                    _complete_methods(loader, package, name, value)


def _complete_constructor(loader: griffe.GriffeLoader, package: str, name: str, value: Any) -> None:
    """Give a class without an `__init__` in its source, which therefore shows no signature, its runtime signature."""
    entry = _find_definition(loader, f"{package}.{name}")
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        members = "Members: " + ", ".join(f"`{member}`" for member in value.__members__) + "."
        if (
            entry is not None
            and entry.docstring is not None
            and members not in entry.docstring.value
        ):
            entry.docstring.value += f"\n\n{members}\n"
        return
    if not isinstance(entry, griffe.Class):
        return
    if "__init__" in entry.all_members and "__new__" not in entry.all_members:
        return
    names = parameter_names(value)
    if names:
        parameters = _parameter_entries(inspect.signature(value), names)
        first = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
        entry.set_member(
            "__init__",
            griffe.Function(
                "__init__", parameters=griffe.Parameters(first, *parameters), parent=entry
            ),
        )


def _complete_arguments(loader: griffe.GriffeLoader, package: str, name: str, value: Any) -> None:
    """Write the arguments that a docstring attributes to other objects into its own section."""
    entry = _find_definition(loader, f"{package}.{name}")
    if entry is None or entry.docstring is None or not callable(value):
        return
    entries = {
        argument: with_code_spans(text)
        for argument, text in public_arguments(package, value).items()
    }
    if set(entries) > set(read_descriptions(entry.docstring)):
        text = _with_arguments(entry.docstring.value, entries)
        is_complete = set(parameter_names(value)) <= set(entries)
        entry.docstring.value = _OTHERS_SENTENCE.sub("", text) if is_complete else text


def _complete_methods(loader: griffe.GriffeLoader, package: str, name: str, value: Any) -> None:
    """Write the arguments that the docstrings of methods attribute to other methods into their own sections."""
    entry = _find_definition(loader, f"{package}.{name}")
    for method in entry.members.values() if isinstance(entry, griffe.Class) else ():
        if (
            isinstance(method, griffe.Function)
            and method.docstring
            and _OTHERS_SENTENCE.search(method.docstring.value)
        ):
            argument_texts = public_arguments(package, getattr(value, method.name))
            entries = {argument: with_code_spans(text) for argument, text in argument_texts.items()}
            text = _OTHERS_SENTENCE.sub("", method.docstring.value)
            method.docstring.value = _with_arguments(text, entries)


def _definitions(module: griffe.Object) -> Iterator[griffe.Object]:
    """Yield the modules, classes, functions and attributes below a module, without aliases."""
    for member in list(module.members.values()):
        if not member.is_alias:
            assert isinstance(member, griffe.Object)
            yield member
            yield from _definitions(member)


def _find_definition(loader: griffe.GriffeLoader, path: str) -> griffe.Object | None:
    """Return the definition that a path leads to, or None where static analysis finds none."""
    try:
        entry = loader.modules_collection[path]
        return entry.final_target if isinstance(entry, griffe.Alias) else entry
    except (KeyError, griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def _complete_name(loader: griffe.GriffeLoader, package: str, name: str, value: Any) -> None:
    """Correct a public name that static analysis resolves to a module, or not at all."""
    entry = _find_definition(loader, f"{package}.{name}")
    is_function = (
        inspect.isroutine(value)
        or isinstance(value, functools.partial)
        or _is_callable_object(value)
    )
    if entry is not None and not entry.is_module and not (entry.is_attribute and is_function):
        _complete_defaults(entry, value)
        return
    module = loader.modules_collection[package]
    target = f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}"
    definition = _find_definition(loader, target)
    if definition is not None and not definition.is_module and not definition.is_attribute:
        module.members[name] = griffe.Alias(name, definition, parent=module)
    elif inspect.isclass(value) and issubclass(value, enum.Enum):
        text = with_code_spans(inspect.getdoc(value) or "")
        module.members[name] = griffe.Class(name, docstring=griffe.Docstring(text), parent=module)
    elif callable(value):
        function = _function_entry(module, name, value)
        if entry is not None and entry.docstring is not None:  # the text below the assignment
            function.docstring = griffe.Docstring(entry.docstring.value, parent=function)
        module.members[name] = function


def _is_callable_object(value: Any) -> bool:
    """Whether a value is an instance whose class belongs to this package and defines `__call__`."""
    local = type(value).__module__.startswith("transformer_engine")
    return local and callable(value) and not inspect.isclass(value)


def _complete_defaults(entry: griffe.Object, value: Any) -> None:
    """Replace defaults that are private constants by their values."""
    for parameter in entry.parameters if isinstance(entry, griffe.Function) else ():
        if str(parameter.default).startswith("_"):
            parameter.default = _default_source(
                inspect.signature(value).parameters[parameter.name].default
            )


def _function_entry(module: griffe.Module, name: str, value: Any) -> griffe.Function:
    """Create the entry for a function that is defined at import."""
    signature = inspect.signature(value)
    parameters = _parameter_entries(signature, list(signature.parameters))
    returned = _annotation_source(signature.return_annotation)
    function = griffe.Function(
        name, parameters=griffe.Parameters(*parameters), returns=returned, parent=module
    )
    text = with_code_spans(inspect.getdoc(value) or "")
    function.docstring = griffe.Docstring(text, parent=function)
    return function


def _parameter_entries(signature: inspect.Signature, names: list[str]) -> list[griffe.Parameter]:
    """Entries for a signature's named parameters."""
    return [
        griffe.Parameter(
            name,
            annotation=_annotation_source(parameter.annotation),
            kind=griffe.ParameterKind[parameter.kind.name.lower()],
            default=None
            if parameter.default is parameter.empty
            else _default_source(parameter.default),
        )
        for name, parameter in signature.parameters.items()
        if name in names
    ]


def _default_source(value: Any) -> str:
    """Format a default as source code; functions and classes have no readable repr and are named.

    A field with a factory has the default "...": its description states the value.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if repr(value) == "<factory>":
        return "..."
    return value.__name__ if callable(value) and hasattr(value, "__name__") else repr(value)


def _annotation_source(annotation: Any) -> str | None:
    """Annotation source, which is a string in modules with postponed annotations."""
    if annotation is inspect.Signature.empty:
        return None
    return (
        annotation
        if isinstance(annotation, str)
        else getattr(annotation, "__name__", str(annotation))
    )


def public_arguments(package: str, value: Any) -> dict[str, str]:
    """{name: description} for a public object, with the arguments that its docstring attributes to others.

    "The other arguments are as in `Linear`." names public objects in the same package. A class also has the
    arguments that its base classes describe, and a low-level function its family's arguments.
    """
    value = value.func if isinstance(value, functools.partial) else value
    text = inspect.getdoc(value) or ""
    entries = read_descriptions(griffe.Docstring(text))
    if _is_callable_object(value):
        entries |= read_descriptions(griffe.Docstring(inspect.getdoc(type(value).__call__) or ""))
    reference = _OTHERS.search(text)
    for name in re.findall(r"`([\w.]+)`", reference[1]) if reference else ():
        other = functools.reduce(getattr, name.split("."), importlib.import_module(package))
        for argument, description in public_arguments(package, other).items():
            entries.setdefault(argument, description)
    for base in inspect.getmro(value)[1:] if inspect.isclass(value) else ():
        if base.__module__.startswith("transformer_engine"):
            for argument, description in read_descriptions(
                griffe.Docstring(base.__doc__ or "")
            ).items():
                entries.setdefault(argument, description)
    path = f"{package}.{getattr(value, '__name__', '')}"
    for family in FAMILIES.values():
        if re.match(family["names"], path):
            entries = {**family["arguments"], **entries}
    names = parameter_names(value)
    return {name: entries[name] for name in names if name in entries}


def _with_arguments(text: str, entries: dict[str, str]) -> str:
    """Return a docstring whose section Args has these entries; the section is appended if it is missing."""
    lines = ["Args:"]
    for name, description in entries.items():
        lines.append(f"    {name}: " + description.replace("\n", "\n        "))
    section = "\n".join(lines)
    pattern = re.compile(r"^(Args|Attributes):\n(?:(?:    .*)?(?:\n|\Z))+", re.MULTILINE)
    if pattern.search(text):
        return pattern.sub(lambda _: section + "\n\n", text, count=1)
    return f"{text}\n\n{section}\n"
