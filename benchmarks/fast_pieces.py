"""Host time that each piece of `pytorch/fast` saves in warm small-layer calls, with a GPU that does nothing.

    python benchmarks/fast_pieces.py [--json FILE] [--only TEXT] [--rounds 15] [--calls 60]

Each row is a case from `host_calls.py` (forward and backward pass) with and without one piece. Both variants take
turns in one process, so that other load affects them alike:

with, without   the calling thread's CPU time in microseconds, the minimum over all calls
gain            1 - with / without

`pretended_gpu` states which parts are real. Times lack the calls into Triton's launcher and into cuBLASLt, about 2 us
each.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import host_calls
import torch
from host_calls import RECIPES, WIDTH, passes
from pretended_gpu import everywhere, pretend
from record import parser, write
from torch.testing._internal.distributed.fake_pg import FakeStore

import transformer_engine.pytorch as te
from transformer_engine.common import env
from transformer_engine.pytorch import ops

Work = Callable[[], object]


class Row(NamedTuple):
    piece: str
    case: str
    fast: Work
    plain: Work


def _chain() -> torch.nn.Module:
    norm = ops.RMSNorm(WIDTH, dtype=torch.bfloat16)
    return ops.Sequential(norm, ops.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16))


def _parallel() -> torch.nn.Module:
    """Two layers over two ranks, of which this process is one; collectives do nothing."""
    settings: dict[str, Any] = {
        "bias": False,
        "params_dtype": torch.bfloat16,
        "sequence_parallel": True,
        "tp_group": torch.distributed.group.WORLD,
        "tp_size": 2,
    }
    layers = [te.Linear(WIDTH, WIDTH, parallel_mode=mode, **settings) for mode in ("column", "row")]
    return torch.nn.Sequential(*layers)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": host_calls._linear,
    "layernorm_linear": host_calls._layernorm_linear,
    "layernorm_mlp": host_calls._mlp,
    "chain": _chain,
    "layer": host_calls._layer,
}


def rows() -> Iterator[Row]:
    for kind in ("none", "current"):
        for name, build in MODULES.items():
            yield Row("compiled passes", f"{name}/{kind}", *_compiled_or_not(build, kind))
        for name in ("linear", "layer"):
            work, _ = _compiled_or_not(MODULES[name], kind)
            yield Row("environment watcher", f"{name}/{kind}", work, _with_plain_environment(work))
    yield Row(
        "compiled collectives", "parallel_linears/current", *_compiled_or_not(_parallel, "current")
    )


def _compiled_or_not(build: Callable[[], torch.nn.Module], kind: str) -> tuple[Work, Work]:
    """Two layers: the first layer's passes are compiled when they are warm."""
    outputs: list[Work] = []
    for compiles in (True, False):
        everywhere("compiles_on", lambda device, compiles=compiles: compiles)
        work = passes(build, RECIPES[kind](), True)
        for _ in range(20):
            work()
        outputs.append(work)
    return outputs[0], outputs[1]


def _with_plain_environment(work: Work) -> Work:
    """The same call when `env.generation` reads the variables through `os.environ`."""

    fast, plain = env._readers(True), env._readers(False)
    names, none_is_set, read = plain
    texts = () if none_is_set(names) else tuple(map(read, names))

    def call() -> object:
        stored = env._texts
        env._names, env._none_is_set, env._stored_text = plain
        env._texts = texts  # the environment has not changed, and cached specs stay valid
        result = work()
        env._names, env._none_is_set, env._stored_text = fast
        env._texts = stored
        return result

    return call


def _shortest(work: Work, calls: int) -> float:
    clock, least = time.thread_time_ns, 1 << 62
    for _ in range(calls):
        begin = clock()
        work()
        least = min(least, clock() - begin)
    return least / 1e3


def _measure(row: Row, rounds: int, calls: int) -> dict[str, Any]:
    for work in (row.fast, row.plain):
        for _ in range(20):
            work()
    gc.collect()
    gc.disable()
    fast, plain = [], []
    for _ in range(rounds):
        fast.append(_shortest(row.fast, calls))
        plain.append(_shortest(row.plain, calls))
    gc.enable()
    return {
        "piece": row.piece,
        "case": row.case,
        "with": round(min(fast), 1),
        "without": round(min(plain), 1),
        "gain": round(1 - min(fast) / min(plain), 3),
    }


def main() -> None:
    options = parser(__doc__, only="measure the rows whose piece or case contains this")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--calls", type=int, default=60, help="calls per round and variant")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    te.DotProductAttention.forward = host_calls._attention  # pyright: ignore[reportAttributeAccessIssue]
    pretend()
    found = []
    for row in rows():
        if chosen.only in f"{row.piece} {row.case}":
            found.append(_measure(row, chosen.rounds, chosen.calls))
            print(
                "{piece:22} {case:26} {with:8} us {without:8} us {gain:7.1%}".format(**found[-1]),
                flush=True,
            )
    write(chosen.json, rows=found)


if __name__ == "__main__":
    main()
