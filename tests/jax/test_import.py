"""Each framework can be imported alone, and errors name the package to install if a dependency is missing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.programs import ROOT
from transformer_engine.common import frameworks, recipe

# `import name` fails as if it were not installed.
BLOCK = "import sys; sys.modules[{name!r}] = None\n"


def run(program: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def modules_after_import(program: str) -> set[str]:
    done = run(program + "\nimport sys; print(' '.join(sys.modules))")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_package_alone_imports_no_framework():
    assert not modules_after_import("import transformer_engine") & {"torch", "jax", "flax"}


def train(framework: str, folder: Path) -> str:
    arguments = ["te", "train", "--framework", framework, "--steps", "1", "--out", str(folder)]
    return (
        f"from transformer_engine_tools import main; import sys; sys.argv = {arguments!r}; main()\n"
    )


# As an attribute of the package, with a flax.nnx that jax is too new for.
OF_JAX = """
sys.modules["triton"] = None
import flax, transformer_engine
transformer_engine.jax
from jax._src import xla_bridge
print(list(xla_bridge._backends))
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == 'flax.nnx': raise AttributeError('hijax has no HiPrimitive')
for name in [name for name in sys.modules if name.startswith('flax.nnx')]: del sys.modules[name]
sys.meta_path.insert(0, Broken())
vars(flax).pop('nnx', None)
try:
    import transformer_engine.jax.nnx
except ImportError as error:
    print(repr(str(error)))
"""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str, int, Path]:
    """Run one process without torch, because importing JAX takes two seconds.

    Returns:
        Printed lines, output with errors, exit status, and folder of `te train --framework torch`.
    """
    folder = tmp_path_factory.mktemp("without_torch")
    done = run(BLOCK.format(name="torch") + OF_JAX + train("torch", folder))
    return done.stdout.splitlines(), done.stdout + done.stderr, done.returncode, folder


def test_the_jax_side_works_without_torch_and_initializes_no_device(without_torch):
    lines, output, _, _ = without_torch
    assert lines[:1] == ["[]"], output


def test_an_nnx_incompatible_with_jax_is_named(without_torch):
    lines, output, _, _ = without_torch
    assert len(lines) > 1, output
    assert "cannot be imported beside jax" in lines[1] and "pip install --upgrade flax" in lines[1]


@pytest.mark.parametrize("name", ["pytorch", "jax"])
def test_recipes_are_attributes_of_either_side(name):
    """`te.common.recipe`, as guides write it."""
    side = importlib.import_module(f"transformer_engine.{name}")
    assert side.common.recipe.Format is recipe.Format


def test_the_pytorch_side_imports_no_jax():
    program = "import transformer_engine\ntransformer_engine.pytorch\nimport sys; print(' '.join(sys.modules))"
    results = set(forked.output(["-c", program], ROOT, os.environ).split())
    assert "transformer_engine.pytorch" in results and not results & {"jax", "flax"}


@pytest.mark.parametrize(
    ("name", "missing"), [("pytorch", "torch"), ("jax", "jax"), ("jax", "flax")]
)
def test_a_missing_framework_is_named_with_its_remedy(name, missing):
    done = run(BLOCK.format(name=missing) + f"import transformer_engine\ntransformer_engine.{name}")
    last = done.stderr.strip().splitlines()[-1]
    assert f"transformer_engine.{name} needs {missing}, which is not installed" in last
    assert f'pip install ".[{name}]" in a checkout' in last


@pytest.mark.parametrize("module", ["transformer_engine.pytorch", "transformer_engine_torch"])
def test_an_import_without_torch_names_the_package_to_install(module):
    done = run(BLOCK.format(name="torch") + f"import {module}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: transformer_engine.pytorch needs torch, which is not installed"
    )
    assert 'pip install ".[pytorch]" in a checkout' in last


def test_a_command_without_its_framework_names_the_package_to_install():
    called = (
        "from transformer_engine_tools import main\n"
        "def call(*arguments):\n"
        "    sys.argv = ['te', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        print(end.code)\n"  # a sentence, with which Python exits by 1
        "call('info')\n"
        "call('bench', '--quick')\n"
    )
    done = run(BLOCK.format(name="torch") + called)
    assert done.returncode == 0, done.stderr
    remedy = 'install with pip install ".[cli]" in a checkout of this package'
    said = ("te info needs torch", "te bench needs torch")
    assert done.stdout.strip().splitlines() == [f"{sentence}; {remedy}" for sentence in said]


def assert_training_needs(
    framework: str, extra: str, status: int, output: str, folder: Path
) -> None:
    assert status == 1 and "Traceback" not in output, output
    words = " ".join(output.split())
    assert f"error: --framework {framework} needs {framework}" in words
    assert f'install with pip install ".[{extra}]" in a checkout of this package' in words
    assert not list(folder.iterdir())


def test_a_run_without_torch_names_the_package_to_install(without_torch):
    _, output, status, folder = without_torch
    assert_training_needs("torch", "cli", status, output, folder)


def test_a_run_without_jax_names_the_package_to_install(tmp_path):
    program = forked.Program(
        ["-c", BLOCK.format(name="jax") + train("jax", tmp_path)], ROOT, os.environ
    )
    status = program.finish()
    assert_training_needs("jax", "cli-jax", status, program.printed + program.errors, tmp_path)


def test_training_with_jax_alone_does_not_suggest_torch(tmp_path):
    done = run(
        "".join(BLOCK.format(name=name) for name in ("matplotlib", "torch"))
        + f"from transformer_engine_tools import main; main(['train', '--out', {str(tmp_path)!r}])"
    )
    assert done.returncode == 1
    remedy = 'install with pip install ".[cli-jax]" in a checkout of this package'
    assert (
        done.stdout.strip().splitlines()[-1] == f"error: --framework jax needs matplotlib; {remedy}"
    )


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the standard library reads TOML from Python 3.11 on"
)
def test_the_core_needs_no_framework_and_the_extras_install_them():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [
        need for need in project["dependencies"] if need.startswith(("torch", "jax", "flax"))
    ]
    extras = project["optional-dependencies"]
    torch = next(package for package in frameworks.PYTORCH.packages if package.name == "torch")
    assert extras["pytorch"] == [f"torch>={torch.least}"]
    for package, need in zip(frameworks.JAX.packages, extras["jax"], strict=True):
        assert need.startswith(f"{package.name}>={package.least},<{package.below};")
    for extra in ("cli", "cli-jax", "cuda", "flash", "test", "docs"):
        assert any("transformer-engine[" in need for need in extras[extra]), extra


def test_an_unknown_attribute_is_an_attribute_error():
    import transformer_engine

    with pytest.raises(
        AttributeError, match=r"transformer_engine\.tensorflow is not in this package"
    ):
        transformer_engine.tensorflow  # noqa: B018


@pytest.mark.parametrize(
    ("version", "fits"), [("0.10.1", False), ("0.10.2", True), ("0.12.9", True), ("0.13.0", False)]
)
def test_a_version_out_of_range_is_rejected_with_the_range(version, fits):
    jax = next(package for package in frameworks.JAX.packages if package.name == "jax")
    reason = jax.unsupported_reason(version)
    assert (reason is None) is fits
    assert fits or reason == f"jax {version} is installed, jax>=0.10.2,<0.13 is needed"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("jax", "jax 0.13.1 is installed, jax>=0.10.2,<0.13"),
        ("flax", "flax 0.13.1 is installed, flax>=0.12.8,<0.13"),
    ],
)
def test_an_import_with_a_version_out_of_range_names_the_version_and_the_remedy(name, said):
    result = f"lambda of: '0.13.1' if of == {name!r} else found(of)"
    program = (
        "import importlib.metadata\nfound = importlib.metadata.version\n"
        f"importlib.metadata.version = {result}\nimport transformer_engine.jax"
    )
    last = run(program).stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: transformer_engine.jax: {said} is needed; ")
    assert 'pip install ".[jax]" in a checkout' in last


def test_an_old_python_is_rejected_with_the_least_version(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(
        ImportError, match=r"transformer_engine.jax needs Python 3.11 or newer, this is Python 3.10"
    ):
        frameworks.demand(frameworks.JAX)
