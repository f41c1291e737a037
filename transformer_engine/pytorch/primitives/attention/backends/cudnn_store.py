"""stored = read(locate(...)): cuDNN's plans as files, which later processes of the same user read instead of building.

A file contains the workspace size (8 bytes) and the library's own bytes. The key contains all
inputs of the plan, and the source files that describe graphs.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from pathlib import Path
from typing import NamedTuple

from .....common.store import Store

STORE = Store(
    "cudnn_plans",
    b"TECUDNN3",
    "cuDNN's plans",
    logger="DotProductAttention",
    remedy="set TE_CUDNN_PLAN_CACHE=0, or TE_CACHE_DIR",
)
_SIZE = struct.Struct("<Q")

# The sources that determine the graph of a request, and the content of a file.
SOURCES = (
    *(
        "backends/cudnn_graph.py",
        "backends/cudnn_plan.py",
        "backends/cudnn_fp8.py",
        "backends/cudnn_score_mod.py",
        "backends/cudnn_store.py",
    ),
    *("call.py", "mask.py", "../../../common/score_program.py"),
)


class StoredPlan(NamedTuple):
    """A plan on disk: its workspace bytes, and the library's serialization."""

    workspace: int
    serialized: bytes


@functools.cache
def source_digest() -> str:
    """Return SHA-256 of the source files that describe graphs; raise OSError if they cannot be read."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((Path(__file__).parents[1] / source).read_bytes())
    return digest.hexdigest()


def locate(*parts: object) -> Path | None:
    """Return the file for a plan that depends on `parts`, by their text; None if it cannot be stored."""
    try:
        digest = source_digest()
    except (OSError, RuntimeError) as error:
        STORE.warn(f"cuDNN's plans cannot be kept on disk ({error}); {STORE.remedy}")
        return None
    return STORE.path_of(*parts, digest)


def read(path: Path) -> StoredPlan | None:
    """Return the plan in a file, or None. A damaged file is deleted."""
    content = STORE.read(path)
    if content is None:
        return None
    if len(content) < _SIZE.size:
        STORE.discard(path, f"its content has {len(content)} bytes")
        return None
    (workspace,) = _SIZE.unpack_from(content)
    return StoredPlan(workspace, content[_SIZE.size :])


def write(path: Path, plan: StoredPlan) -> None:
    """Write a plan to a file."""
    STORE.write(path, _SIZE.pack(plan.workspace) + plan.serialized)
