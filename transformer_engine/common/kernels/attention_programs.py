"""Programs with several attention kernels: decoding over ranges of a cache, and the backward pass."""

from __future__ import annotations

from .attention_decode import merging, stretches
from .attention_problem import AttentionProblem
from .launch import Launch
from .program import Program, ProgramStep, step

_TENSORS = ("q", "k", "v")
_BOUNDS = ("lengths_q", "lengths_kv", "starts_q", "starts_kv")
SOURCES = (*_TENSORS, *_BOUNDS, "masked_q", "masked_kv", "masked", "bias", "slopes")


def decoding(
    problem: AttentionProblem, processors: int, splits: int, follows: bool, packed: bool
) -> Program:
    """Program (q, k, v, the four bounds, slopes, pages, sink, and out, which the caller allocates).

    Args:
        problem: Sizes and settings.
        processors: Number of multiprocessors.
        splits: Ranges per sequence; 0: enough to fill the processors.
        follows: The second kernel may begin before the first one ends.
        packed: Tokens outside all sequences are not visited.
    """
    inputs = (*_TENSORS, *_BOUNDS, "slopes", "pages", "sink")
    first, count = stretches(problem, processors, splits)
    last = merging(problem, count, follows, packed)
    steps = (
        ProgramStep(first, inputs[:9], ("partial", "level")),
        ProgramStep(last, ("partial", "level", "sink", "lengths_q", "starts_q"), ("out",)),
    )
    return Program(inputs, steps, (), ("out",))


def gradients(delta: Launch, queries: Launch, keys: Launch, bias: Launch | None) -> Program:
    """Program (sources, random, out, dout, lse, sink, and the buffers delta, dsink, dq, dk, dv, dbias).

    dsink and dbias are present if the attention has a sink and a bias.
    """
    inputs = (*SOURCES, "random", "out", "dout", "lse", "sink")
    context = (*SOURCES, "random", "dout", "lse", "delta")
    rows = ("out", "dout", "lse", "sink", "lengths_q", "starts_q", "masked_q")
    steps = [
        step(delta, rows, ("delta", "dsink")),
        ProgramStep(queries, context, ("dq",)),
        ProgramStep(keys, context, ("dk", "dv")),
    ]
    if bias is not None:
        steps.append(ProgramStep(bias, context, ("dbias",)))
    into = tuple(name for one in steps for name in one.outputs if name is not None)
    return Program(inputs, tuple(steps), (), into)
