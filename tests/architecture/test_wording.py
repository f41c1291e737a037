"""Rules for source text: vocabulary, docstring sections, machine paths and install commands."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from tests.architecture.source import ROOT, modules, nodes

# Use `choose` for selection (docs/architecture.md). Names in ORIGINAL_NAMES belong to NVIDIA's API.
OTHER_WORDS_FOR_CHOOSING = re.compile(
    r"(?<![a-z])(pick(s|ed|ing|er)?|select(s|ed|ion|or)?|decid(e|es|ed|ing))(?![a-z])"
)
ORIGINAL_NAMES = {"routing_map_to_selected_experts"}
# An absolute path of the author's machine, such as a folder below the home directory.
ABSOLUTE_PATH = re.compile(r"(?<![\w.])/(work|root|home)/\w")

# An installation by the package's name, with extras or without. Names of parts, such as `transformer-engine-torch`, do
# not match.
INDEX_INSTALL = re.compile(r"pip install[^\n;,]{0,20}transformer[-_]engine\b(?!-)")


def tracked_text_files():
    output = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for line in output.splitlines():
        path = ROOT / line
        if path.suffix in {".py", ".md", ".toml", ".yml", ".json", ".txt", ""} and path.is_file():
            yield path


def test_no_file_names_a_path_of_one_machine():
    for path in tracked_text_files():
        match = ABSOLUTE_PATH.search(path.read_text(errors="ignore"))
        assert match is None, f"{path.relative_to(ROOT)}: {match}"


def test_no_message_installs_the_package_from_an_index():
    """On PyPI, the name belongs to NVIDIA's package; ours is installed from a checkout (common/optional.py)."""
    for path in tracked_text_files():
        if (ROOT / "benchmarks" / "results") in path.parents:  # run records, as they were printed
            continue
        match = INDEX_INSTALL.search(path.read_text(errors="ignore"))
        assert match is None, f"{path.relative_to(ROOT)}: {match}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_picking", True),
        ("select_backend", True),
        ("picker", True),
        ("decided", True),
        ("pickled", False),
        ("choose", False),
    ],
)
def test_words_for_choosing_are_recognized(name, expected):
    assert bool(OTHER_WORDS_FOR_CHOOSING.search(name)) == expected


def test_names_use_choose_for_selection():
    location_by_name = {
        node.name: f"{name}:{node.lineno}"
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    others = {
        name: location
        for name, location in location_by_name.items()
        if OTHER_WORDS_FOR_CHOOSING.search(name.lower())
    }
    assert others.keys() <= ORIGINAL_NAMES, others


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    names += [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return {argument.arg for argument in names}


def swaps_scale_and_multiplier(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether an encoder takes `scale` instead of `multiplier`, or a decoder takes `multiplier`."""
    name, argument = node.name.lstrip("_"), parameters(node)
    if name.startswith(("encode", "quantize", "cast")):
        return "scale" in argument and "multiplier" not in argument
    return name.startswith(("decode", "dequantize")) and "multiplier" in argument


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("def encode(x, multiplier): ...", False),
        ("def _encode(x, scale): ...", True),
        ("def cast_kernel(x, multiplier, codes, scale): ...", False),
        ("def dequantize(codes, scale): ...", False),
        ("def decode_rows(codes, *, multiplier): ...", True),
    ],
)
def test_exchanged_scale_words_are_found(function, expected):
    assert swaps_scale_and_multiplier(ast.parse(function).body[0]) == expected  # pyright: ignore[reportArgumentType]


def test_values_are_multiplied_by_a_multiplier_and_codes_by_a_scale():
    exchanged = [
        f"{name}:{node.lineno} {node.name}"
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and swaps_scale_and_multiplier(node)
    ]
    assert not exchanged


def extract_names(documentation: str | None, section: str) -> list[str]:
    """Names that a docstring section such as "Args" describes, one per entry."""
    # The section's heading, and the indented or empty lines below it.
    body = re.search(rf"^{section}:\n((?:[ ]+.*\n|\n)+)", f"{documentation}\n", re.MULTILINE)
    if body is None:
        return []
    # `    name: text`, `    *name: text` or `    name (type): text`.
    return re.findall(r"^    \*{0,2}(\w+)(?: \([^)]*\))?: ", body[1], re.MULTILINE)


def test_described_names_are_found():
    arguments = "Args:\n    x: One [n],\n        of two lines.\n    *others: More.\n"
    text = f"Sum.\n\n{arguments}\nReturns:\n    sum: Not an argument.\n"
    assert extract_names(text, "Args") == ["x", "others"] and extract_names(None, "Args") == []


def record_fields(node: ast.ClassDef) -> set[str]:
    """Names in a class body that an Attributes section may describe: fields, properties and assigned attributes."""
    names = {child.attr for child in ast.walk(node) if isinstance(child, ast.Attribute)}
    names |= {
        child.target.id
        for child in ast.walk(node)
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    names |= {
        target.id
        for child in node.body
        if isinstance(child, ast.Assign)
        for target in child.targets
        if isinstance(target, ast.Name)
    }
    return names | {child.name for child in node.body if isinstance(child, ast.FunctionDef)}


def test_docstrings_describe_the_arguments_and_fields_that_exist():
    """Record fields only (of classes without bases, or of NamedTuples): other attributes may be inherited."""
    unknown, twice = [], []
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                recognized = parameters(node)
                described = extract_names(ast.get_docstring(node), "Args")
            elif isinstance(node, ast.ClassDef) and all(
                ast.unparse(base) == "NamedTuple" for base in node.bases
            ):
                recognized = record_fields(node)
                described = extract_names(ast.get_docstring(node), "Attributes")
            else:
                continue
            location = f"{name}:{node.lineno}"
            unknown += [f"{location} {each}" for each in described if each not in recognized]
            twice += [f"{location} {each}" for each in {*described} if described.count(each) > 1]
    assert unknown == [] and twice == []


def lines_in_columns(documentation: str | None) -> list[str]:
    """Docstring lines whose words are aligned in columns, apart from code and Markdown tables."""
    prose = re.sub(r"```.*?```", "", documentation or "", flags=re.DOTALL)
    # Two or more spaces after a word, as in `name   text`; not in doctests, tables, or before a comment.
    return re.findall(r"^(?! *(?:>>>|\.\.\.|\|)).*\S {2,}[^\s#].*$", prose, re.MULTILINE)


def test_docstrings_list_arguments_in_sections():
    """Editors and the API reference render Google sections; a list `name   text` collapses into a paragraph."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    aligned = [
        f"{name}:{getattr(node, 'lineno', 1)} {line}"
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, documented)
        for line in lines_in_columns(ast.get_docstring(node))
    ]
    assert not aligned


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Sum.\n\nx   One [n].\n", True),
        ("Sum.\n\n    *others, y  More.\n", True),
        ("Sum.\n\nArgs:\n    x: One [n],\n        of two lines.\n", False),
        (
            "Sum.\n\n| a  | b |\n>>> f(1)  # 2\n...     g()\n```\nx   y\n```\nsum(x)  # of x\n",
            False,
        ),
    ],
)
def test_aligned_columns_are_found(docstring, expected):
    assert bool(lines_in_columns(docstring)) == expected
