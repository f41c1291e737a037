"""Nothing in the tree names the machine it was written on, and nothing is unpickled without an allow-list."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from tests.architecture.source import ROOT, modules, nodes

# One word for selecting among several, `choose`; docs/architecture.md. The other names are the original's.
OTHER_WORDS_FOR_CHOOSING = re.compile(
    r"(?<![a-z])(pick(s|ed|ing)?|select(s|ed|ion)?|decides?|decided)(?![a-z])"
)
OF_THE_ORIGINAL = {"routing_map_to_selected_experts"}
MACHINE_PATHS = re.compile(r"(?<![\w.])/(work|root|home)/\w")

# With or without quotes; the name of an original part ends otherwise.
FROM_AN_INDEX = re.compile(r"pip install[^\n;,]{0,20}transformer[-_]engine\b(?!-)")


def list_tracked_text_files():
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for line in listed.splitlines():
        path = ROOT / line
        if path.suffix in {".py", ".md", ".toml", ".yml", ".json", ".txt", ""} and path.is_file():
            yield path


def test_no_file_names_a_path_of_one_machine():
    for path in list_tracked_text_files():
        match = MACHINE_PATHS.search(path.read_text(errors="ignore"))
        assert match is None, f"{path.relative_to(ROOT)}: {match}"


def test_no_message_installs_the_package_from_an_index():
    """By its name an index has the original: extras are installed from a checkout (common/optional.py)."""
    for path in list_tracked_text_files():
        if (ROOT / "benchmarks" / "results") in path.parents:  # run records, as they were printed
            continue
        match = FROM_AN_INDEX.search(path.read_text(errors="ignore"))
        assert match is None, f"{path.relative_to(ROOT)}: {match}"


def test_names_use_choose_for_selection():
    defined = {
        node.name: f"{name}:{node.lineno}"
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert OTHER_WORDS_FOR_CHOOSING.search("_picking") and not OTHER_WORDS_FOR_CHOOSING.search(
        "pickled"
    )
    rest = {n: index for n, index in defined.items() if OTHER_WORDS_FOR_CHOOSING.search(n.lower())}
    assert rest.keys() <= OF_THE_ORIGINAL, rest


def parameters(node: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}


def words_exchanged(node: ast.FunctionDef) -> bool:
    """Whether a function that makes codes is given a scale without a multiplier, or one that reads them a factor."""
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
    assert words_exchanged(ast.parse(function).body[0]) == expected  # pyright: ignore[reportArgumentType]


def test_values_are_multiplied_by_a_multiplier_and_codes_by_a_scale():
    exchanged = [
        f"{name}:{node.lineno} {node.name}"
        for name, path in modules().items()
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and words_exchanged(node)
    ]
    assert not exchanged


def unpickles_anything(node: ast.AST) -> bool:
    """Whether a node is pickle.load(s)(..), or torch.load(..) without weights_only=True."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    if (owner, node.func.attr) == ("torch", "load"):
        safe = {keyword.arg: keyword.value for keyword in node.keywords}.get("weights_only")
        return not (isinstance(safe, ast.Constant) and safe.value is True)
    return (owner, node.func.attr) in {("pickle", "load"), ("pickle", "loads")}


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch.load(f)", True),
        ("torch.load(f, weights_only=False)", True),
        ("torch.load(f, weights_only=True)", False),
        ("pickle.loads(b)", True),
        ("json.load(f)", False),
    ],
)
def test_unrestricted_loads_are_found(call, expected):
    assert unpickles_anything(ast.parse(call, mode="eval").body) == expected


def test_pickles_are_read_through_an_allow_list_only():
    reading = [
        f"{name}:{getattr(node, 'lineno', 0)}"
        for name, path in modules().items()
        for node in nodes(path)
        if unpickles_anything(node)
    ]
    assert not reading


def extract_names(documentation: str | None, section: str) -> list[str]:
    """Names that a docstring section describes, one per entry."""
    found = re.search(rf"^{section}:\n((?:[ ]+.*\n|\n)+)", f"{documentation}\n", re.MULTILINE)
    return (
        re.findall(r"^    \*{0,2}(\w+)(?: \([^)]*\))?: ", found[1], re.MULTILINE) if found else []
    )


def test_docstrings_describe_the_arguments_and_fields_that_exist():
    """Record fields only: other classes' attributes may come from a base class or from a method."""
    unknown, twice = [], []
    for name, path in modules().items():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                recognized = {
                    one.arg
                    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                }
                recognized |= {
                    one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None
                }
                names = extract_names(ast.get_docstring(node), "Args")
            elif isinstance(node, ast.ClassDef) and all(
                ast.unparse(base) == "NamedTuple" for base in node.bases
            ):
                recognized = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
                recognized |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                recognized |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                names = extract_names(ast.get_docstring(node), "Attributes")
            else:
                continue
            unknown += [f"{name}:{node.lineno} {one}" for one in names if one not in recognized]
            twice += [f"{name}:{node.lineno} {one}" for one in {*names} if names.count(one) > 1]
    assert unknown == [] and twice == []


def lines_in_columns(documentation: str | None) -> list[str]:
    """Docstring lines whose words are aligned in columns, apart from code and Markdown tables."""
    prose = re.sub(r"```.*?```", "", documentation or "", flags=re.DOTALL)
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
    ("docstring", "found"),
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
def test_aligned_columns_are_found(docstring, found):
    assert bool(lines_in_columns(docstring)) == found


def test_described_names_are_found():
    arguments = "Args:\n    x: One [n],\n        of two lines.\n    *others: More.\n"
    text = f"Sum.\n\n{arguments}\nReturns:\n    sum: Not an argument.\n"
    assert extract_names(text, "Args") == ["x", "others"] and extract_names(None, "Args") == []
