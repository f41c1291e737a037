"""A launch's 32-bit sums and products that can exceed 2^31 - 1 and reach an address, by interval arithmetic.

The intervals come from the launch itself: its grid, its scalars and its loop bounds. Loaded numbers are
row, page or token positions, or tile counts, for which the caller gives an upper bound.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kernels.written_pointers import triton_code
from transformer_engine.common.kernels.launch import LARGEST_EXTENT, Launch

ROWS = LARGEST_EXTENT
TILES = LARGEST_EXTENT // 128 + 128
# These kernels multiply loaded tile counts by 128 in 32 bits; they extend loaded rows to 64 bits first.
_READ_TILES = (
    "grouped cast",
    "grouped measured cast",
    "grouped blocks",
    "grouped gradient scaling",
)
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_AXES = {"x": 0, "y": 1, "z": 2}


class Range(NamedTuple):
    """Integer bounds; wraps: the line where a 32-bit operation on the way to this integer can overflow."""

    low: float
    high: float
    wraps: str = ""


UNKNOWN = Range(-math.inf, math.inf)


def wrapping_offsets(launch: Launch, inputs: Sequence[str | None], loaded: int = ROWS) -> list[str]:
    """32-bit operations that can overflow in an address offset.

    Args:
        loaded: Upper bound for the magnitude of loaded integers.
    """
    names = launch.kernel.arg_names
    first = len(names) - len(launch.constants) - len(launch.scalars)
    scalars = dict(zip(names[first:], launch.scalars, strict=False))
    reader = _Reader(launch.grid, scalars, loaded)
    for line in triton_code(launch, inputs).splitlines():
        reader.read(re.sub(r" loc\((?:[^()]|\([^()]*\))*\)$", "", line.strip()))
    return sorted(reader.found)


class _Reader:
    """Integer ranges in Triton IR, line by line."""

    def __init__(self, grid: tuple[int, int, int], scalars: dict[str, int | float], loaded: int):
        self.found: set[str] = set()
        self._grid, self._scalars, self._loaded = grid, scalars, loaded
        # For every region that encloses a line: the ranges that it defines, and the names that its yields define.
        self._scopes: list[tuple[dict[str, Range], list[str]]] = [({}, [])]

    def read(self, line: str) -> None:
        if line.startswith("tt.func"):
            for name in re.findall(r"%(\w+): i\d+", line):
                value = self._scalars[name]
                self._define(f"%{name}", Range(value, value))
            return
        head, _, body = (
            line.partition(" = ") if re.match(r"%[\w:$.-]+ = ", line) else ("", "", line)
        )
        operation = re.split(r"[\s(]", body)[0].strip('"')
        if operation == "scf.for":
            self._enter_loop(head, body)
        elif line.startswith("}"):
            if len(self._scopes) > 1:
                self._scopes.pop()
            if line.endswith("{"):
                self._scopes.append(({}, []))
        elif line.endswith("{"):
            for name in _results(head):
                self._define(name, UNKNOWN)
            self._scopes.append(({}, _results(head)))
        elif operation == "tt.addptr":
            self._check(body)
        elif head:
            for name in _results(head):
                self._define(name, self._result(operation, body, line))

    def _enter_loop(self, head: str, body: str) -> None:
        pairs = re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", body)
        bounds = re.search(r"= (%[\w$.#-]+) to (%[\w$.#-]+) step", body)
        assert bounds is not None, body
        first, stop = (self._range(name) for name in bounds.groups())
        for name in _results(head):
            self._define(name, UNKNOWN)
        self._scopes.append(({}, []))
        self._define(
            pairs[0][0], Range(first.low, max(first.low, stop.high - 1), first.wraps or stop.wraps)
        )
        for name, _ in pairs[1:]:
            self._define(name, UNKNOWN)

    def _check(self, body: str) -> None:
        offset = self._range(_VALUE.findall(body)[1])
        if offset.wraps:
            self.found.add(offset.wraps)

    def _define(self, name: str, value: Range) -> None:
        self._scopes[-1][0][name] = value

    def _range(self, name: str) -> Range:
        for scope, _ in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return UNKNOWN

    def _result(self, operation: str, body: str, line: str) -> Range:
        if operation == "arith.constant":
            number = re.search(r"(?:dense<)?(-?\d+|true|false)>? :", body)
            if number is None or not re.search(r"[ x]i\d+>?$", body):
                return UNKNOWN
            value = (
                {"true": 1, "false": 0}.get(number[1]) if number[1].isalpha() else int(number[1])
            )
            return Range(value, value)
        if operation == "tt.get_program_id":
            return Range(0, self._grid[_AXES[body.split()[1]]] - 1)
        if operation == "tt.get_num_programs":
            count = self._grid[_AXES[body.split()[1]]]
            return Range(count, count)
        if operation == "tt.make_range":
            end, start = (int(re.search(rf"{key} = (\d+)", body)[1]) for key in ("end", "start"))  # pyright: ignore[reportOptionalSubscript]
            return Range(start, end - 1)
        if operation == "tt.load":
            return Range(-self._loaded, self._loaded)
        parts = [self._range(name) for name in _VALUE.findall(body)]
        if operation == "arith.cmpi" or not parts:
            return Range(0, 1) if operation == "arith.cmpi" else UNKNOWN
        if operation == "arith.select":
            parts = parts[1:3]
        result = _result_range(operation, parts)
        wraps = next((part.wraps for part in parts if part.wraps), "")
        narrow = bool(re.search(r"(?:[ x])i32>?$", body))
        if (
            narrow
            and operation in _ARITHMETIC
            and not (result.low >= -(1 << 31) and result.high < 1 << 31)
        ):
            recognized = all(part != UNKNOWN for part in parts)
            wraps = wraps or (
                f"{line} {[part[:2] for part in parts]}"
                if recognized or operation == "arith.muli"
                else ""
            )
        return result._replace(wraps=wraps)


_ARITHMETIC = ("arith.muli", "arith.addi", "arith.subi", "arith.shli")
_SAME = (
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.reshape",
    "tt.trans",
    "tt.split",
    "arith.extsi",
    "arith.extui",
    "arith.index_cast",
    "tt.unsplat",
    "arith.trunci",
)


def _result_range(operation: str, parts: list[Range]) -> Range:
    """Range of an operation's result, without its type's limits."""
    one, two = parts[0], parts[-1]
    if operation in _SAME:
        return one
    if operation in ("arith.select", "tt.join"):
        return Range(min(one.low, two.low), max(one.high, two.high))
    if operation == "arith.addi":
        return Range(one.low + two.low, one.high + two.high)
    if operation == "arith.subi":
        return Range(one.low - two.high, one.high - two.low)
    if operation == "arith.muli":
        corners = [_product(a, b) for a in one[:2] for b in two[:2]]
        return Range(min(corners), max(corners))
    if operation in ("arith.minsi", "arith.minui"):
        return Range(min(one.low, two.low), min(one.high, two.high))
    if operation in ("arith.maxsi", "arith.maxui"):
        return Range(max(one.low, two.low), max(one.high, two.high))
    if operation in ("arith.divsi", "arith.divui") and one.low > -math.inf and two.high < math.inf:
        divisors = [max(two.low, 1), max(two.high, 1)]
        corners = [math.trunc(a / b) if abs(a) < math.inf else a for a in one[:2] for b in divisors]
        return Range(min(corners), max(corners))
    if operation in ("arith.remsi", "arith.remui"):
        most = max(abs(two.low), abs(two.high)) - 1
        return Range(0 if one.low >= 0 else -most, min(most, max(one.high, 0)))
    if operation == "arith.andi" and one.low >= 0 and two.low >= 0:
        return Range(0, min(one.high, two.high))
    if operation == "arith.shli" and two.low == two.high < math.inf:
        return Range(one.low * 2**two.low, one.high * 2**two.high)
    if (
        operation in ("arith.shrsi", "arith.shrui")
        and one.low >= 0
        and two.low == two.high < math.inf
    ):
        return Range(one.low // 2**two.low, one.high // 2**two.high)
    return UNKNOWN


def _product(a: float, b: float) -> float:
    return 0 if 0 in (a, b) else a * b


def _results(head: str) -> list[str]:
    name, _, count = head.partition(":")
    return [f"{name}#{i}" for i in range(int(count))] if count else [name] if name else []


def main() -> None:
    """Print the overflows in every `written_cases` case for matrices with the given shape, as JSON."""
    from tests.kernels import written_cases

    written_cases.SHAPE = (int(sys.argv[1]), int(sys.argv[2]))
    results = {}
    for group in written_cases.GROUPS:
        for name, launch, inputs in group():
            if launch.kernel.is_gluon():  # it passes coordinates to the copy engine
                continue
            if lines := wrapping_offsets(
                launch, inputs, TILES if name.startswith(_READ_TILES) else ROWS
            ):
                results[name] = lines
    print(json.dumps(results))


if __name__ == "__main__":
    main()
