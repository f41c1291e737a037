"""Values that no argument of a given type accepts; `Call` is a callable with arguments that it accepts."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch

NAN = math.nan
WORD = "nonsense"

SIZE = (0, -1, 2.5, "16", [16], NAN)
OPTIONAL_SIZE = SIZE
REQUIRED_SIZE = (*SIZE, None)
COUNT = (-1, 2.5, "16", NAN)  # zero is allowed
EPS = (-1e-5, NAN, math.inf, "1e-5", None, [1e-5])
RATE = (-0.1, 1.5, NAN, "0.1", None)
FLAG = (len, float, torch.ones(2))  # everything else has a truth value
NAME = (WORD, "", 3, b"self", ["self"])
TEXT = (3, b"name", ["name"])
FUNCTION = (3, "normal", [print])
DTYPE = ("float32", torch.int32, 32, float, torch.bool)
DEVICE = ("gpu", 2.5, ["cpu"], "cuda:x", True)
GROUP = (3, "group", [1], 0.5)
WINDOW = ((1.5, 2), 5, (1,), (1, 2, 3), "ab", (None, 0), (-3, 0))
NUMBER = ("1.0", NAN, [1.0], math.inf)
RECIPE = ("delayed", 3, dict, [None])
NOT_A_TENSOR = ([1.0, 2.0], "tensor", 3.0, numpy.zeros((4, 16), dtype=numpy.float32), (1,))


@dataclass
class Made:
    """A callable, arguments that it accepts, and the objects whose state no rejected call may change."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    watched: Sequence[Any] = ()


@dataclass
class Call:
    """A function that makes a callable, and the values that each of its arguments must reject.

    context   context manager for the calls
    stateful  the rejected calls are also made before the first accepted one
    """

    name: str
    make: Callable[[], Made]
    bad: Mapping[str, Sequence[Any]]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    stateful: bool = False

    def cases(self) -> list[tuple[str, Any]]:
        """(argument, bad value) one by one."""
        return [(name, value) for name, values in self.bad.items() for value in values]


def format_value(value: Any) -> str:
    """A bad value in a test's failure message; two cases with the same text are one."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__}({value.dtype}, {list(value.shape)}, {value.device})"
    if isinstance(value, numpy.ndarray):
        return f"ndarray({value.dtype}, {list(value.shape)})"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(format_value, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return repr(value)


def names_it(message: str, value: Any) -> bool:
    """Whether the message contains the value, its type, its shape or its dtype."""
    report = {type(value).__name__}
    if not isinstance(value, torch.Tensor):  # whose elements take long to print
        report.add(repr(value))
    if isinstance(value, torch.Tensor):
        report = {
            str(list(value.shape)),
            str(tuple(value.shape)),
            str(value.dtype),
            str(value.device),
        }
        report |= {str(value.numel()), type(value).__name__} | {str(size) for size in value.shape}
        if value.numel() <= 8 and not value.is_meta:
            # The bounds of sequences are one more than there are sequences.
            report |= {str(value.numel() - 1), str(value.tolist())} | {
                str(item) for item in value.reshape(-1).tolist()
            }
    elif isinstance(value, (list, tuple)):
        report |= {str(list(value)), str(tuple(value)), str(len(value))}
        return any(text in message for text in report) or any(
            names_it(message, item) for item in value
        )
    elif isinstance(value, type):
        report |= {value.__name__}
    elif isinstance(value, dict):
        report |= {repr(item) for pair in value.items() for item in pair}
    elif isinstance(value, enum.Enum):
        report |= {value.name}
    elif type(value).__module__.startswith("transformer_engine"):
        report |= {
            str(part) for part in vars(value).values() if isinstance(part, (int, torch.dtype))
        }
    else:
        report |= {str(value)} if str(value) else set()
    return any(text in message for text in report)
