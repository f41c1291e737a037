"""Final code for a client program that may run in several processes."""

from __future__ import annotations

import json
from typing import Any, TextIO

import torch.distributed as dist


def said_by_the_first(said: TextIO, result: Any) -> None:
    """The first rank writes the result as JSON; no rank leaves before."""
    if dist.get_rank() == 0:
        said.write(json.dumps(result) + "\n")
        said.flush()
    dist.barrier()
    dist.destroy_process_group()
