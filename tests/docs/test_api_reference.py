"""The API reference has an entry for each public name, with its arguments described and an example that runs."""

from __future__ import annotations

import ast
import doctest
import enum
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("griffe", reason="the reference needs the extra docs")
pytest.importorskip("flax", reason="the reference of JAX needs the extra jax")

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted((DOCS / "api").glob("*.md"))

# Packages for contributors: their entries are classes and functions of one module each, chosen by hand.
INTERNAL = (
    "transformer_engine.common.dispatch.",
    "transformer_engine.pytorch.inspect.",
    "transformer_engine.pytorch.primitives.",
)

# {package.name: why no example on a CPU can show it}
WITHOUT_EXAMPLE: dict[str, str] = {}


def _load_api_entries() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_entries", DOCS / "api_entries.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("api_entries", module)
    spec.loader.exec_module(module)
    return module


api_entries = _load_api_entries()


def entries(page: Path) -> list[str]:
    """Return the paths of the objects that a page documents."""
    return re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)


def resolve_entry(path: str) -> Any:
    """Return the object of an entry."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def examples(page: Path) -> list[re.Match[str]]:
    """Return the blocks of examples of a page, whose first group is the code."""
    return list(re.finditer(r"```pycon\n(.*?)```", page.read_text(), re.DOTALL))


def names_used(texts: Iterable[str]) -> set[str]:
    """Return the attributes, and the names that the examples do not define, in the statements of texts."""
    examples = [one for text in texts for one in doctest.DocTestParser().get_examples(text)]
    nodes = [node for one in examples for node in ast.walk(ast.parse(one.source))]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    stores = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return attributes | (names - stores - defined)


@pytest.fixture(scope="module")
def shown() -> dict[int, set[str]]:
    """{identity of a documented object: names that the examples of its page use, docstrings included}."""
    results: dict[int, set[str]] = {}
    for page in PAGES:
        values = [resolve_entry(path) for path in entries(page)]
        docstrings = [inspect.getdoc(value) or "" for value in values]
        used = names_used([block[1] for block in examples(page)] + docstrings)
        for value in values:
            results.setdefault(id(value), set()).update(used)
    return results


@pytest.fixture(scope="module")
def documented() -> set[int]:
    """The identities of all documented objects."""
    return {id(resolve_entry(path)) for page in PAGES for path in entries(page)}


@pytest.mark.parametrize("package", api_entries.PACKAGES)
def test_each_public_name_has_an_entry(package: str, documented: set[int]):
    names = dict(api_entries.public_names(package))
    missing = [
        name for name, value in names.items() if callable(value) and id(value) not in documented
    ]
    assert names and missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_entry_is_private(page: Path):
    for path in entries(page):
        package, name = path.rsplit(".", 1)
        if not path.startswith(INTERNAL):
            assert name in dict(api_entries.public_names(package)), path
        else:
            assert not name.startswith("_"), path


@pytest.mark.parametrize("package", api_entries.PACKAGES)
def test_each_argument_is_described(package: str):
    missing = []
    for name, value in api_entries.public_names(package):
        if not callable(value) or (inspect.isclass(value) and issubclass(value, enum.Enum)):
            continue
        if package == f"{api_entries.JAX}.checkpoint_policies":  # closures that only JAX calls
            continue
        recognized = api_entries.public_arguments(package, value)
        missing += [
            f"{name}: {one}" for one in api_entries.parameter_names(value) if one not in recognized
        ]
    assert missing == []


def test_each_argument_of_a_forward_pass_is_described():
    missing = []
    for package in (api_entries.PYTORCH, f"{api_entries.PYTORCH}.ops"):
        for name, value in api_entries.public_names(package):
            forward = vars(value).get("forward") if inspect.isclass(value) else None
            if forward is not None:
                recognized = api_entries.public_arguments(package, forward)
                names = api_entries.parameter_names(forward)
                missing += [
                    f"{name}.forward: {one}" for one in names if one not in {*recognized, "self"}
                ]
    assert missing == []


@pytest.mark.parametrize("package", api_entries.PACKAGES)
def test_completed_sections_of_arguments_are_tables(package: str):
    for name, value in api_entries.public_names(package):
        recognized = api_entries.public_arguments(package, value) if callable(value) else {}
        if recognized:
            text = api_entries._with_arguments(inspect.getdoc(value) or "", recognized)
            docstring = api_entries.griffe.Docstring(api_entries._OTHERS_SENTENCE.sub("", text))
            assert set(api_entries.read_descriptions(docstring)) >= set(recognized), name


def test_each_shared_description_is_used():
    used: set[tuple[str, str]] = set()
    for package in api_entries.PACKAGES:
        for _, value in api_entries.public_names(package):
            path = f"{package}.{getattr(value, '__name__', '')}"
            for family, entries in api_entries.FAMILIES.items():
                if re.match(entries["names"], path):
                    used |= {(family, name) for name in api_entries.parameter_names(value)}
    described = {
        (family, name)
        for family, entries in api_entries.FAMILIES.items()
        for name in entries["arguments"]
    }
    assert described - used == set()


@pytest.mark.parametrize("package", api_entries.PACKAGES)
def test_each_name_has_a_docstring(package: str):
    missing = [
        name
        for name, value in api_entries.public_names(package)
        if callable(value)
        # JAX's policies have no docstrings
        and (getattr(value, "__module__", None) or "").startswith("transformer_engine")
        and not (inspect.getdoc(value) or "").strip()
    ]
    assert missing == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_reference_page_run(page: Path):
    text = page.read_text()
    names: dict[str, Any] = {}
    runner = doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    for block in examples(page):
        line = text[: block.start()].count("\n") + 1
        test = doctest.DocTestParser().get_doctest(block[1], names, page.name, str(page), line)
        runner.run(test, out=report.append, clear_globs=False)
        names = test.globs
    assert runner.tries > 0 or page.stem in ("index", "backends", "names")
    assert runner.failures == 0, "".join(report)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", api_entries.PACKAGES)
def test_the_examples_of_docstrings_run(package: str):
    finder = doctest.DocTestParser()
    runner = doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    for name, value in api_entries.public_names(package):
        test = finder.get_doctest(inspect.getdoc(value) or "", {}, f"{package}.{name}", package, 0)
        runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)


@pytest.mark.parametrize("package", api_entries.PACKAGES)
def test_each_public_name_is_used_in_an_example_of_its_page(
    package: str, shown: dict[int, set[str]]
):
    names = {
        name: value
        for name, value in api_entries.public_names(package)
        if callable(value) and not (inspect.isclass(value) and issubclass(value, enum.Enum))
    }
    missing = [name for name, value in names.items() if name not in shown[id(value)]]
    assert set(missing) == {name for name in names if f"{package}.{name}" in WITHOUT_EXAMPLE}


def test_names_of_examples_are_those_of_their_statements():
    text = ">>> gelu = tex.relu(x)  # silu\n>>> gelu(swiglu)\ntensor(glu)\n\n`geglu` is a name.\n"
    assert names_used([text]) == {"tex", "relu", "x", "swiglu"}


def test_shapes_become_code_spans():
    text = (
        "y [*batch, f] = x [.., k] @ w[k], `a [m, n]` and [links](to.md)\n\n    >>> x[0] + [1, 2]\n"
    )
    assert api_entries.with_code_spans(text).splitlines() == [
        "y `[*batch, f]` = x `[.., k]` @ w[k], `a [m, n]` and [links](to.md)",
        "",
        "    >>> x[0] + [1, 2]",
    ]
