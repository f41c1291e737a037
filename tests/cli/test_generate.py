"""`te generate`: text from a checkpoint of `te train`, the same with and without the cache and its pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.command import te as run_te
from transformer_engine_tools.demo.config import RunConfig, resolve
from transformer_engine_tools.demo.data import load_corpus
from transformer_engine_tools.demo.model import ByteGPT
from transformer_engine_tools.demo.sample import CachedStep, create_cache
from transformer_engine_tools.demo.trainer import Trainer
from transformer_engine_tools.generate import load

PROMPT = "line 3"


def te(*arguments: str):
    return run_te("generate", *arguments)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of one run, "tiny", whose two models make some bytes stand out."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text\n" for i in range(500)))
    sizes = {
        "steps": 2,
        "batch": 2,
        "sequence": 64,
        "layers": 2,
        "hidden": 64,
        "heads": 2,
        "data": str(text),
    }
    config = resolve("cpu", {"recipe": "current", **sizes})
    trainer = Trainer(config, load_corpus(config.data, config.sequence), folder / "tiny")
    trainer.folder.mkdir()
    with torch.no_grad():
        for factor, run in zip((8, 9), trainer.runs.values(), strict=True):
            for parameter in run.model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(factor)
    trainer.save()
    return folder


def draw(runs: Path, *options: str) -> str:
    """The generated text after the prompt, without the last line."""
    result = te(PROMPT, "--name", "tiny", "--out", str(runs), "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    text, _, last = result.output.rstrip("\n").rpartition("\n")
    assert "bytes on cpu" in last
    assert text.startswith(PROMPT)
    return text


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_the_cache_and_its_pages_change_no_byte(temperature: str, runs: Path):
    options = ["--temperature", temperature, "--count", "40"]
    full = draw(runs, *options, "--no-cache")
    for cached in (["--page-size", "16"], ["--page-size", "1"], ["--page-size", "0"], []):
        assert draw(runs, *options, *cached) == full
    assert len(set(full[len(PROMPT) :])) > 1


def test_the_seed_and_the_model_decide_the_text(runs: Path):
    options = ["--temperature", "2", "--count", "30"]
    first = draw(runs, *options, "--seed", "1")
    assert first == draw(runs, *options, "--seed", "1")
    assert first != draw(runs, *options, "--seed", "2")
    assert first != draw(runs, *options, "--seed", "1", "--high-precision")


def test_speed_and_cache_are_shown(runs: Path):
    arguments = [PROMPT, "--name", "tiny", "--out", str(runs), "--device", "cpu"]
    last = te(*arguments).output.splitlines()[-1]
    assert last.startswith("58 bytes on cpu, KV cache in pages of 16, ") and last.endswith(
        " tokens/s"
    )
    assert (
        te(*arguments, "--count", "1", "--page-size", "0").output.splitlines()[-1]
        == "1 bytes on cpu, KV cache"
    )
    assert "no cache, " in te(*arguments, "--no-cache").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "absent"], "write one with te train, or fix --name and --out"),
        (["--count", "60"], "6 + 60 bytes exceed the 64 positions"),
        (["--count", "0"], "count=0 is below 1"),
        (["--temperature", "-1"], "temperature=-1.0 is below 0"),
        (["--page-size", "-1"], "--page-size -1 is below 0"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, runs: Path
):
    result = te(PROMPT, "--name", "tiny", "--out", str(runs), "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith("error: ") and message in result.output
    assert "Traceback" not in result.output


def stepwise(
    model: ByteGPT, config: RunConfig, text: torch.Tensor, page_size: int | None
) -> torch.Tensor:
    """Logits after bytes 5, 6, ... of text [1, n], each from a cached step."""
    step = CachedStep(model, create_cache(config, page_size))
    fresh = [text[:, :5], *text[:, 5:].split(1, dim=1)]
    return torch.cat([step(part).clone() for part in fresh])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("page_size", [None, 16])
@torch.no_grad()
def test_cached_steps_have_the_logits_of_the_whole_text(
    page_size: int | None, device: str, runs: Path
):
    """On CUDA the checkpoint of the CPU continues in bfloat16, and the steps are replays of one graph."""
    model, config = load(runs / "tiny" / "checkpoint", device, False)
    model.eval()
    assert next(model.parameters()).dtype == (torch.float32 if device == "cpu" else torch.bfloat16)
    text = torch.tensor([list(b"line 3 of a text, and line 4 of it")], device=device)
    close = {"atol": 1e-4, "rtol": 1e-4} if device == "cpu" else {"atol": 0.15, "rtol": 0.05}
    torch.testing.assert_close(
        stepwise(model, config, text, page_size), model(text)[0, 4:], **close
    )


def test_loading_gives_the_trained_model(runs: Path):
    model, config = load(runs / "tiny" / "checkpoint", "cpu", True)
    assert isinstance(model, ByteGPT) and isinstance(config, RunConfig)
    saved = torch.load(runs / "tiny" / "checkpoint", weights_only=True)["runs"]["high_precision"][
        "model"
    ]
    assert torch.equal(model.head.weight, saved["head.weight"])
