"""The text: training and validation bytes, and the error without a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from transformer_engine_tools.demo.data import VALIDATION_SHARE, _place_evenly, load_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(6):
        (tmp_path / f"part{index}.txt").write_bytes(bytes([65 + index]) * 2000)
    return tmp_path


def test_the_split_is_the_same_every_time(folder: Path):
    first, second = load_corpus(str(folder), 32), load_corpus(str(folder), 32)
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.validation, second.validation)


def test_training_and_validation_share_no_byte_and_lose_none(folder: Path):
    corpus = load_corpus(str(folder), 32)
    assert corpus.train.size + corpus.validation.size == 12_000
    assert corpus.validation.size == int(12_000 * VALIDATION_SHARE)
    full = np.concatenate([corpus.train, corpus.validation])
    assert np.bincount(full).tolist() == [0] * 65 + [2000] * 6


def test_a_batch_depends_on_seed_and_step_only(folder: Path):
    corpus = load_corpus(str(folder), 32)
    inputs, targets = corpus.batch(3, 7, 4, 32)
    np.random.seed(99)
    repeated, _ = corpus.batch(3, 7, 4, 32)
    other, _ = corpus.batch(3, 8, 4, 32)
    assert np.array_equal(inputs, repeated)
    assert not np.array_equal(inputs, other)
    assert inputs.shape == targets.shape == (4, 32)
    assert np.array_equal(inputs[:, 1:], targets[:, :-1])


def test_validation_batches_cover_the_text_from_start_to_end(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i % 26) for i in range(8000)))
    corpus = load_corpus(str(text), 32)
    batches = corpus.validation_batches(3, 2, 32)
    assert np.array_equal(batches[0][0][0], corpus.validation[:32])
    assert np.array_equal(batches[-1][1][-1], corpus.validation[-32:])


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (3, 7), (-5, 1), (2**39, 799)])
def test_batches_start_at_the_positions_that_torch_draws(seed: int, step: int, folder: Path):
    corpus = load_corpus(str(folder), 32)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(0, corpus.train.size - 32, (64,), generator=generator)
    inputs, _ = corpus.batch(seed, step, 64, 32)
    assert np.array_equal(inputs[:, 0], corpus.train[starts.numpy()])


@pytest.mark.parametrize("last", [7, 3333, 654_321, 12_345_678])
@pytest.mark.parametrize("count", [32, 64, 1024])
def test_validation_positions_equal_torch_linspace(last: int, count: int):
    assert np.array_equal(_place_evenly(last, count), torch.linspace(0, last, count).long().numpy())


def test_the_default_text_is_the_standard_library():
    corpus = load_corpus(None, 128)
    assert corpus.train.size > 1_000_000
    assert b"import" in bytes(corpus.train[:100_000].tolist())


def test_files_that_are_not_text_are_left_out(folder: Path):
    before = load_corpus(str(folder), 32).fingerprint
    (folder / "picture.bin").write_bytes(b"\x00\x01" * 500)
    (folder / "latin.txt").write_bytes(b"\xe9" * 500)
    (folder / ".hidden").write_text("hidden" * 100)
    assert load_corpus(str(folder), 32).fingerprint == before


def test_a_missing_path_is_named(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"nowhere: there is no such file or folder; give one that exists"
    ):
        load_corpus(str(tmp_path / "nowhere"), 32)


def test_a_folder_without_text_is_named(tmp_path: Path):
    (tmp_path / "zeros").write_bytes(bytes(10))
    with pytest.raises(ValueError, match=r"holds no UTF-8 text; give a text file or a folder"):
        load_corpus(str(tmp_path), 32)


def test_a_text_that_is_too_short_names_the_length_needed(tmp_path: Path):
    text = tmp_path / "short.txt"
    text.write_text("a" * 500)
    with pytest.raises(
        ValueError, match=r"holds 500 bytes .* a sequence of 32 needs at least 681: give more text"
    ):
        load_corpus(str(text), 32)
