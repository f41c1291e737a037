"""The documentation matches the program: tables and defaults are those of the code."""

from __future__ import annotations

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.conversion.tiny_models import write_checkpoint
from tests.support import forked
from tests.support.programs import ROOT
from transformer_engine.common import env
from transformer_engine_tools.demo.config import CPU_SIZES, CUDA_SIZES
from transformer_engine_tools.doctor.checks import Finding

OPTIONS = {"sequence": "--seq", "learning_rate": "--lr"}
PAGES = (
    "../README.md",
    "attention.md",
    "batch_invariance.md",
    "benchmarks.md",
    "checkpoints.md",
    "debug.md",
    "index.md",
    "inference.md",
    "install.md",
    "jax_backends.md",
    "linear_attention.md",
    "megatron.md",
    "numerics.md",
    "observe.md",
    "ops.md",
    "plan.md",
    "training.md",
    "your_gpu.md",
)
# {page: test that runs its programs}: they need several ranks or a client, or their output is compared.
PAGES_ELSEWHERE = {
    "accelerate.md": "clients/test_small_clients.py",
    "context_parallel.md": "distributed/test_pages_on_two_ranks.py",
    "convert.md": "integrations/test_convert.py",
    "diverged.md": "cli/test_guides.py",
    "experts.md": "cli/test_experts_page.py",
    "export.md": "export/test_mode.py",
    "first_principles.md": "cli/test_guides.py",
    "from_the_original.md": "cli/test_guides.py",
    "graphs.md": "graphs/test_page.py",
    "huggingface.md": "clients/test_huggingface_attention.py",
    "jax.md": "jax/test_documentation.py",
    "jax_devices.md": "jax/test_documentation.py",
    "jax_examples.md": "jax/test_documentation.py",
    "lightning.md": "clients/test_small_clients.py",
    "memory.md": "offload/test_page.py",
    "other_clients.md": "clients/test_small_clients.py",
    "peft.md": "clients/test_small_clients.py",
    "quickstart.md": "cli/test_documentation.py",
    "several_devices.md": "distributed/test_several_devices_page.py",
    "troubleshooting.md": "cli/test_guides.py",
    "verify.md": "distributed/test_pages_on_two_ranks.py",
    "which_recipe.md": "cli/test_guides.py",
}


@pytest.mark.parametrize(
    "script",
    [
        "layers_table.py",
        "support_table.py",
        "hardware_table.py",
        "compositions_table.py",
        "performance_table.py",
        "plan_table.py",
        "environment_table.py",
        "jax_goals_table.py",
        "names_table.py",
    ],
)
def test_a_generated_page_is_that_of_its_source(script: str):
    if script == "names_table.py":
        pytest.importorskip("jax")
    forked.output([str(ROOT / "docs" / script), "--check"], ROOT, os.environ)


def test_the_page_of_environment_variables_names_each_once():
    page = (ROOT / "docs" / "environment.md").read_text()
    named = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(named) == sorted(env.VARIABLES)


@pytest.mark.parametrize("name", CPU_SIZES)
def test_the_documented_defaults_are_those_of_the_program(name: str):
    option = OPTIONS.get(name, f"--{name}")
    rows = (ROOT / "docs" / "cli.md").read_text().splitlines()
    row = next(line for line in rows if line.startswith(f"| `{option}` |"))
    assert [cell.strip() for cell in row.split("|")[3:5]] == [
        str(CPU_SIZES[name]),
        str(CUDA_SIZES[name]),
    ]


def test_documented_prompts_fit_into_the_model_that_te_train_trains_on_a_cpu():
    calls = re.findall(
        r'^te generate "(.*)" --count (\d+)', (ROOT / "docs" / "cli.md").read_text(), re.M
    )
    assert calls
    for prompt, count in calls:
        assert len(prompt) + int(count) <= CPU_SIZES["sequence"]


def test_the_documented_error_of_an_absent_name_is_the_error():
    page = (ROOT / "docs" / "from_the_original.md").read_text()
    (listing,) = re.findall(
        r"```\n(transformer_engine\.pytorch\.attention\.FlashAttention .*?)```", page, re.S
    )
    with pytest.raises(ImportError) as raised:
        from transformer_engine.pytorch.attention import FlashAttention  # noqa: F401
    # the page names the latest release
    present = re.sub(r"\+py[\d.]+(\.dev0)?:", "+py:", str(raised.value))
    assert present.split() == re.sub(r"\+py[\d.]+:", "+py:", listing).split()


def test_documented_keys_of_a_finding_are_those_of_the_command():
    page = (ROOT / "docs" / "cli.md").read_text()
    for finding in (field.name for field in fields(Finding)):
        assert f"`{finding}`" in page


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        *(
            f"docs/{name}.md"
            for name in (
                "quickstart",
                "install",
                "cli",
                "index",
                "jax",
                "jax_backends",
                "jax_devices",
                "jax_examples",
                "megatron",
                "checkpoints",
                "observe",
                "plan",
            )
        ),
    ],
)
def test_every_relative_link_leads_to_a_file(page: str):
    path = ROOT / page
    targets = [part.split(")")[0] for part in path.read_text().split("](")[1:]]
    missing = [
        target
        for target in targets
        if "://" not in target and not (path.parent / target.split("#")[0]).exists()
    ]
    assert missing == []


def test_the_examples_of_the_quickstart_in_torch_run(capsys):
    """The example in JAX is independent of these and runs in tests/jax."""
    names: dict[str, object] = {}
    page = (ROOT / "docs" / "quickstart.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    in_torch = [example for example in examples if "transformer_engine.jax" not in example]
    for example in in_torch:
        exec(compile(example, "quickstart.md", "exec"), names)
    assert len(in_torch) == len(examples) - 1
    if not torch.cuda.is_available():
        shapes, losses, _, backends = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
        printed = capsys.readouterr().out
        assert shapes in printed and losses in printed and backends in printed


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if page.startswith("jax"):
        pytest.importorskip("jax")
    write_checkpoint(tmp_path / "Llama-3.2-1B", "llama-3.1")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL
    ):
        exec(compile(example, page, "exec"), names)


def test_the_programs_of_every_page_are_run_by_a_test():
    pages = {"../README.md"} | {
        path.name for path in (ROOT / "docs").glob("*.md") if "```python" in path.read_text()
    }
    assert pages == {*PAGES, *PAGES_ELSEWHERE}
    for page, test in PAGES_ELSEWHERE.items():
        assert re.search(rf"\b{page[:-3]}\b", (ROOT / "tests" / test).read_text()), (
            f"{test} does not run {page}"
        )
