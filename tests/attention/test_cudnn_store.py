"""cuDNN's plans on disk: which plans are read and which are built again, with a mock of the library."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.test_cudnn import PACKED, request
from transformer_engine.common import store
from transformer_engine.pytorch.primitives.attention.backends import (
    cudnn,
    cudnn_fp8,
    cudnn_graph,
    cudnn_plan,
    cudnn_store,
)

HANDLE = 7


class NotSupported(Exception):
    """The mock's cudnnGraphNotSupportedError."""


class Node:
    """A graph tensor."""

    def __init__(self, graph: Graph, uid: int | None = None):
        self.graph = graph
        if uid is not None:
            self.set_uid(uid)

    def set_uid(self, uid: int) -> Node:
        self.graph.uids.add(uid)
        return self

    def _keep(self, *_: Any) -> Node:
        return self

    set_output = set_dim = set_stride = set_data_type = set_ragged_offset = _keep


class Graph:
    """Collects uids, counts built plans, and serializes itself to a list of numbers, as the library does."""

    workspace = 4096

    def __init__(self, library: Library, **options: Any):
        self.library, self.options, self.uids = library, options, set()

    def tensor(self, *, uid: int, **options: Any) -> Node:
        return Node(self, uid)

    def sdpa(self, **options: Any) -> list[Node]:
        return [Node(self), Node(self)]

    def sdpa_backward(self, **options: Any) -> list[Node]:
        return [Node(self), Node(self), Node(self)]

    def sdpa_fp8(self, **options: Any) -> list[Node]:
        return [Node(self) for _ in range(4)]

    def _step(self, *_: Any) -> None:
        """A planning step that always succeeds."""

    validate = build_operation_graph = create_execution_plans = check_support = _step
    _prepare_variant_pack_template = _step

    def build_plans(self) -> None:
        self.library.built += 1

    def _get_variant_pack_uids_sorted(self) -> list[int]:
        return sorted(self.uids)

    def get_workspace_size(self) -> int:
        return self.workspace

    def serialize(self) -> list[int]:
        if self.library.cannot_serialize is not None:
            raise self.library.cannot_serialize
        return list(json.dumps([sorted(self.uids), self.workspace]).encode())

    def deserialize(self, handle: int, data: list[int]) -> None:
        assert handle == self.options["handle"] == HANDLE
        self.library.stream = 99
        if isinstance(data, bytes):
            raise RuntimeError("Unable to cast Python instance of type <class 'bytes'>")
        if self.library.rejection is not None:
            raise self.library.rejection
        self.library.read += 1
        uids, self.workspace = json.loads(bytes(data))
        self.uids = set(uids)


class Library:
    """The part of the module `cudnn` that builds plans."""

    cudnnGraphNotSupportedError = NotSupported
    data_type = SimpleNamespace(FLOAT="float", INT64="int64")
    heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")
    diagonal_alignment = SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right")

    def __init__(self) -> None:
        self.version = 91900
        self.built = self.read = 0
        self.stream = 5
        self.rejection: Exception | None = None
        self.cannot_serialize: Exception | None = None

    def pygraph(self, **options: Any) -> Graph:
        return Graph(self, **options)

    def create_handle(self) -> int:
        return HANDLE

    def set_stream(self, handle: int, stream: int) -> None:
        self.stream = stream

    def backend_version(self) -> int:
        return self.version


def gpu(**changes: Any) -> SimpleNamespace:
    """Properties of an H200, with changes."""
    options = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        **changes,
    }
    return SimpleNamespace(**options)


@pytest.fixture
def library(monkeypatch, tmp_path) -> Library:
    """Replace the library by the mock on a simulated machine with an H200, with the switch on."""
    stand_in = Library()
    for module in (cudnn_graph, cudnn_plan):
        monkeypatch.setattr(module, "library", lambda: stand_in)
    monkeypatch.setattr(cudnn_graph, "data_type", str)
    monkeypatch.setattr(cudnn_graph, "handles", cudnn_graph._Handles())
    monkeypatch.setattr(cudnn_graph.importlib.metadata, "version", lambda name: "1.23.0")
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)
    monkeypatch.setenv("TE_CUDNN_PLAN_CACHE", "1")
    monkeypatch.setenv("TE_CACHE_DIR", str(tmp_path / "cache"))
    store.warn.cache_clear()
    return stand_in


STRIDED = cudnn_plan.Strided((65536, 256, 64, 1), (32768, 128, 64, 1), (32768, 128, 64, 1))


def plan(r=None, strided: cudnn_plan.Strided = STRIDED, device: int = 0) -> cudnn_graph.CudnnPlan:
    """Plan built or read as in a process without plans in memory."""
    return cudnn_graph.planned(
        cudnn_plan.describe_forward, device, request() if r is None else r, strided
    )


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "cudnn_plans").glob("*"))


def test_a_later_process_reads_the_plan_and_builds_none(library, tmp_path, caplog):
    first = plan()
    assert (library.built, library.read) == (1, 0)
    second = plan()
    assert (library.built, library.read) == (1, 1)
    assert second.graph is not first.graph
    for field in ("roles", "offsets", "steps", "workspace"):
        assert getattr(second, field) == getattr(first, field)
    assert len(files(tmp_path)) == 1
    assert not caplog.records


def test_another_gpu_of_the_same_model_reads_it_too(library):
    plan()
    plan(device=1)
    assert (library.built, library.read) == (1, 1)


def test_packed_sequences_keep_their_offsets(library):
    strided = cudnn_plan.Strided(
        (256, 64, 1), (128, 64, 1), (128, 64, 1), tokens_q=512, tokens_kv=512
    )
    r = request("padding_causal", same_lengths=True, **PACKED)
    first, second = plan(r, strided), plan(r, strided)
    assert (library.built, library.read) == (1, 1)
    assert first.offsets == second.offsets == (("q", 256), ("kv", 128), ("q", 4))


def test_backward_and_fp8_plans_are_stored_too(library, tmp_path):
    r, code = request(), torch.float8_e4m3fn
    backward = STRIDED._replace(grad_output=STRIDED.q)
    for _ in range(2):
        plan(r)
        cudnn_graph.planned(cudnn_plan.describe_backward, 0, r, backward)
        cudnn_graph.planned(cudnn_plan.describe_forward, 0, r, backward)
        cudnn_graph.planned(cudnn_fp8.describe_forward, 0, r, STRIDED, code, code)
        cudnn_graph.planned(cudnn_fp8.describe_forward, 0, r, STRIDED, code, torch.bfloat16)
    assert (library.built, library.read) == (5, 5)
    assert len(files(tmp_path)) == 5


def test_without_the_switch_nothing_is_read_or_written(library, tmp_path, monkeypatch):
    monkeypatch.setenv("TE_CUDNN_PLAN_CACHE", "0")
    library.cannot_serialize = AssertionError("not asked for")
    plan()
    plan()
    assert (library.built, library.read) == (2, 0)
    assert not (tmp_path / "cache").exists()


def _another_gpu(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    patch.setattr(torch.cuda, "get_device_properties", lambda index: gpu(**changes))


CHANGES = {
    "cuDNN": lambda patch, library: setattr(library, "version", 92000),
    "frontend": lambda patch, library: patch.setattr(
        cudnn_graph.importlib.metadata, "version", lambda name: "1.23.1"
    ),
    "CUDA": lambda patch, library: patch.setattr(torch.version, "cuda", "14.0"),
    "GPU": lambda patch, library: _another_gpu(patch, name="NVIDIA H100"),
    "capability": lambda patch, library: _another_gpu(patch, major=10),
    "part of a GPU": lambda patch, library: _another_gpu(patch, multi_processor_count=60),
    "source": lambda patch, library: patch.setattr(cudnn_store, "source_digest", lambda: "another"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_machine_or_source_looks_for_another_file(name, library, tmp_path, monkeypatch):
    plan()
    CHANGES[name](monkeypatch, library)
    plan()
    assert (library.built, library.read) == (2, 0)
    assert len(files(tmp_path)) == 2


def test_another_request_or_stride_looks_for_another_file(library, tmp_path):
    r = request()
    rest = [
        replace(r, scale=0.25),
        replace(r, batch=3),
        replace(r, dtype=torch.float16),
        request("no_mask"),
    ]
    for other in (r, *rest):
        plan(other)
    plan(r, STRIDED._replace(q=(16384, 64, 16384, 1)))
    assert (library.built, library.read) == (6, 0)
    assert len(files(tmp_path)) == 6


def test_the_source_digest_covers_every_file_that_describes_graphs(monkeypatch):
    folder = Path(cudnn_store.__file__).parents[1]
    assert all((folder / source).is_file() for source in cudnn_store.SOURCES)
    digest = cudnn_store.source_digest()
    for index in range(len(cudnn_store.SOURCES)):
        cudnn_store.source_digest.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(
                cudnn_store,
                "SOURCES",
                cudnn_store.SOURCES[:index] + cudnn_store.SOURCES[index + 1 :],
            )
            assert cudnn_store.source_digest() != digest
    cudnn_store.source_digest.cache_clear()
    assert cudnn_store.source_digest() == digest


DAMAGE = {
    "empty": (lambda content: b"", "its 0 bytes do not begin as those of cuDNN's plans do"),
    "header only": (lambda content: content[:20], "its 20 bytes do not begin"),
    "cut off": (lambda content: content[:-3], "its checksum does not fit"),
    "one bit": (
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        "its checksum does not fit",
    ),
    "workspace": (
        lambda content: content[:40] + bytes([content[40] ^ 1]) + content[41:],
        "its checksum",
    ),
    "another format": (
        lambda content: b"TECUDNN0" + content[8:],
        "do not begin as those of cuDNN's plans do",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_logged_once_and_built_again(name, library, tmp_path, caplog):
    damage, reason = DAMAGE[name]
    plan()
    (path,) = files(tmp_path)
    sound = path.read_bytes()
    path.write_bytes(damage(sound))
    plan()
    assert (library.built, library.read) == (2, 0)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("DotProductAttention", logging.WARNING)
    assert str(path) in record.getMessage() and reason in record.getMessage()
    assert path.read_bytes() == sound
    plan()
    assert (library.built, library.read) == (2, 1)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"), NotSupported("no engine"), IndexError("stoll")],
)
def test_a_plan_that_the_library_rejects_is_logged_and_built_again(
    error, library, tmp_path, caplog
):
    plan()
    library.rejection = error
    result = plan()
    assert library.built == 2
    assert result.graph.uids
    assert library.stream == 5  # and not where the failed warm-up left it
    (record,) = caplog.records
    assert f"the library rejects it ({error})" in record.getMessage()
    library.rejection = None
    plan()
    assert (library.built, library.read) == (2, 1)


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        ([[1, 2, 3], 4096], "its tensors are [1, 2, 3], where [1, 2, 3, 4, 5] are described"),
        ([[1, 2, 3, 4, 5, 6], 4096], "its tensors are [1, 2, 3, 4, 5, 6]"),
        ([[1, 2, 3, 4, 5], 64], "64 bytes of workspace, and for 4096 when it was built"),
    ],
)
def test_a_plan_with_other_tensors_or_workspace_is_built_again(
    graph, reason, library, tmp_path, caplog
):
    plan()
    (path,) = files(tmp_path)
    cudnn_store.write(path, cudnn_store.StoredPlan(4096, json.dumps(graph).encode()))
    assert plan().workspace == 4096
    assert library.built == 2
    assert [reason in record.getMessage() for record in caplog.records] == [True]


def test_files_and_their_folder_are_private_to_the_user(library, tmp_path):
    plan()
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_plan_under_another_plans_name_is_not_used(library, tmp_path, caplog):
    plan()
    (first,) = files(tmp_path)
    plan(request("no_mask"))
    (second,) = set(files(tmp_path)) - {first}
    second.write_bytes(first.read_bytes())
    plan(request("no_mask"))
    assert (library.built, library.read) == (3, 0)
    assert "its checksum does not fit its name" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_neither_read_nor_written(
    mode, library, tmp_path, caplog
):
    plan()
    (path,) = files(tmp_path)
    before = path.stat()
    path.parent.chmod(mode)
    for _ in range(2):
        plan()
        plan(request("no_mask"))
    assert (library.built, library.read) == (5, 0)
    assert files(tmp_path) == [path] and path.stat().st_mtime_ns == before.st_mtime_ns
    assert len(caplog.records) == 1 and "make it writable only by you" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in this file system")
def test_a_pipe_instead_of_a_plan_file_does_not_block(library, tmp_path, caplog):
    plan()
    (path,) = files(tmp_path)
    path.unlink()
    os.mkfifo(path)
    plan()
    assert library.built == 2 and "it is not a regular file" in caplog.text
    plan()
    assert library.read == 1


def test_a_folder_instead_of_a_plan_file_is_logged_once_and_not_opened(library, tmp_path, caplog):
    plan()
    (path,) = files(tmp_path)
    path.unlink()
    path.mkdir()
    open_before = len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0
    for _ in range(3):
        plan()
    assert library.built == 4
    assert open_before == (len(os.listdir("/dev/fd")) if os.path.isdir("/dev/fd") else 0)
    assert len({record.getMessage() for record in caplog.records}) == len(caplog.records)


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_not_read(mode, library, tmp_path, caplog):
    plan()
    (path,) = files(tmp_path)
    path.chmod(mode)
    plan()
    assert (library.built, library.read) == (2, 0)
    assert f"others may write it (mode {mode:o})" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_another_user_is_not_read(library, caplog, monkeypatch, tmp_path):
    status = os.stat_result((0o100600, 0, 0, 1, 4321, 0, 0, 0, 0, 0))
    plan()
    monkeypatch.setattr(store.os, "fstat", lambda descriptor: status)
    assert cudnn_store.read(files(tmp_path)[0]) is None
    assert "it belongs to user 4321" in caplog.text


def test_the_longest_unused_files_beyond_the_limit_are_dropped(library, tmp_path, monkeypatch):
    monkeypatch.setattr(cudnn_store, "STORE", replace(cudnn_store.STORE, limit=3))
    requests = [request(batch=batch) for batch in (1, 2, 3)]
    for age, r in enumerate(requests):
        before = set(files(tmp_path))
        plan(r)
        (path,) = set(files(tmp_path)) - before
        os.utime(path, (1000 + age, 1000 + age))
    plan(requests[0])  # being read makes it the newest
    assert (library.built, library.read) == (3, 1)
    plan(request(batch=4))
    assert len(files(tmp_path)) == 3
    plan(requests[0])
    plan(requests[2])
    assert (library.built, library.read) == (4, 3)
    plan(requests[1])
    assert library.built == 5


def test_a_file_that_vanishes_while_files_are_counted_is_the_oldest(tmp_path):
    assert store.last_use(tmp_path / "gone") == 0.0


def test_a_folder_that_cannot_be_written_is_logged_once(library, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where the folder should be")
    plan()
    plan(request(batch=3))
    assert library.built == 2
    reasons = [record.getMessage() for record in caplog.records]
    assert sum("cannot be kept in" in reason for reason in reasons) == 1


def test_a_file_that_cannot_be_read_or_deleted_is_logged(library, tmp_path, caplog):
    plan()
    (path,) = files(tmp_path)
    path.unlink()
    path.mkdir()
    plan()
    assert library.built == 2
    assert "is not used" in caplog.text and "cannot be deleted" in caplog.text
    assert files(tmp_path) == [path]  # and no temporary file


def test_an_interrupted_write_leaves_the_old_file(library, tmp_path, caplog, monkeypatch):
    path = tmp_path / "cudnn_plans" / "name"
    cudnn_store.write(path, cudnn_store.StoredPlan(1, b"old"))

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(store.os, "replace", full)
    cudnn_store.write(path, cudnn_store.StoredPlan(2, b"new"))
    assert "No space left on device" in caplog.text
    assert list(path.parent.iterdir()) == [path]
    assert cudnn_store.read(path) == cudnn_store.StoredPlan(1, b"old")


def test_a_graph_that_cannot_be_serialised_is_used_and_logged(library, tmp_path, caplog):
    library.cannot_serialize = RuntimeError("GRAPH_NOT_SUPPORTED")
    assert plan().graph.uids
    assert not files(tmp_path)
    assert "GRAPH_NOT_SUPPORTED" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError("no source"), RuntimeError("Could not determine home directory.")]
)
def test_plans_are_built_where_no_file_can_exist(error, library, caplog, monkeypatch):
    def fails() -> str:
        raise error

    monkeypatch.setattr(cudnn_store, "source_digest", fails)
    plan()
    plan()
    assert library.built == 2
    assert [str(error) in record.getMessage() for record in caplog.records] == [True]


def test_a_shape_without_an_engine_raises_the_same_error_and_leaves_no_file(
    library, tmp_path, monkeypatch
):
    def refuse(self: Graph) -> None:
        raise NotSupported("no engine")

    monkeypatch.setattr(Graph, "check_support", refuse)
    with pytest.raises(RuntimeError, match="cuDNN has no engine for this attention"):
        plan()
    assert not files(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"mask": "padding_causal", "same_lengths": True, **PACKED}]
)
def test_a_plan_from_disk_computes_the_same_bits(options, monkeypatch, tmp_path, caplog):
    pytest.importorskip("cudnn")
    from tests.attention.test_cudnn import sample_inputs

    monkeypatch.setenv("TE_CUDNN_PLAN_CACHE", "1")
    monkeypatch.setenv("TE_CACHE_DIR", str(tmp_path / "cache"))
    r = request(**{"deterministic": True, **options})
    inputs = sample_inputs(r, lengths_q=[256, 256])
    grad = torch.randn_like(inputs.q)
    results = []
    for _ in range(2):
        cudnn._PLANS.clear()
        result = cudnn.forward(r, inputs)
        results.append((result.output, *cudnn.backward(r, inputs, result, grad)[:3]))
        # the second time there is nothing to build
        monkeypatch.setattr(cudnn_graph, "_built", None)
    assert len(files(tmp_path)) == 2
    assert not [record for record in caplog.records if record.name == "DotProductAttention"]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
