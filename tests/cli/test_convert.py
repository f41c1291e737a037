"""`te convert` as its users see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conversion.tiny_models import write_checkpoint
from tests.support.command import te as run_te
from transformer_engine.common import optional
from transformer_engine.common.formats import SERVING_FORMATS
from transformer_engine.pytorch.conversion.serving_formats import FORMATS


def te(*arguments: object):
    return run_te("convert", *map(str, arguments))


def test_checkpoints_convert_both_ways_and_tensors_are_counted(tmp_path: Path):
    reference, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    write_checkpoint(reference, "llama", most=60_000)
    remote = te(reference, ours)
    assert remote.exit_code == 0, remote.output
    assert "21 tensors made 15" in remote.output and "a TransformerLayer stack" in remote.output
    repeated = te(ours, back, "--dtype", "bfloat16", "--shard-size", "0.00005")
    assert repeated.exit_code == 0, repeated.output
    assert "15 tensors made 21" in repeated.output and "llama of Hugging Face" in repeated.output
    assert (back / "model.safetensors.index.json").is_file()
    assert '"torch_dtype": "bfloat16"' in (back / "config.json").read_text()


def test_id_of_the_hub_is_downloaded_without_its_subfolders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = pytest.importorskip("huggingface_hub")
    write_checkpoint(tmp_path / "snapshot", "llama", most=60_000)
    queries = {}

    def snapshot_download(name, **options):
        queries.update(name=name, **options)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download, raising=False)
    result = te("owner/small-llama", tmp_path / "ours", "--revision", "v1")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "ours" / "transformer_engine.json").is_file()
    assert (queries["name"], queries["revision"]) == ("owner/small-llama", "v1")
    assert "*.safetensors" in queries["allow_patterns"] and queries["ignore_patterns"] == ["*/*"]


def test_failed_download_reports_the_hubs_reason_and_exit_code_1(monkeypatch: pytest.MonkeyPatch):
    hub = pytest.importorskip("huggingface_hub")

    def snapshot_download(name, **options):
        raise FileNotFoundError("401 Client Error\nmore lines")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download, raising=False)
    result = te("owner/absent", "ours")
    assert result.exit_code == 1
    assert (
        "there is no folder owner/absent" in result.output
        and "failed: 401 Client Error;" in result.output
    )
    assert "hf auth login" in result.output


def test_id_without_the_hubs_library_names_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optional, "installed", lambda module: module != "huggingface_hub")
    result = te("owner/absent", "ours")
    assert result.exit_code == 2 and "pip install huggingface_hub" in result.output


def test_revision_of_a_folder_is_an_error(tmp_path: Path):
    result = te(tmp_path, "ours", "--revision", "v1")
    assert result.exit_code == 2 and "--revision v1 is for ids on the hub" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("absent", "ours"), "there is no folder absent; give one that holds a checkpoint"),
        ((".", "ours", "--shard-size", "0"), "--shard-size 0 is not a positive number"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(arguments, sentence: str):
    result = te(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {sentence}")


def test_help_lists_the_formats_that_need_no_sample():
    assert list(SERVING_FORMATS) == [name for name, form in FORMATS.items() if not form.calibrated]
    assert f"--quantize {'|'.join(SERVING_FORMATS)}" in te("--help").output
