"""score_mod(graph, score, tensors) -> score, which builds a graph of cuDNN: as data, and computed by an array library.

`record` returns the calls of a function as a `ScoreProgram`, which cuDNN's graphs contain. `ScoreGraph` computes the
operations at once. Each operation takes its operands by position or by the names of cuDNN's frontend (a, b; input0,
input1, mask; input, comparison; loss, input), and returns an array; `name` and `compute_data_type` have no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .dispatch import is_tracing

# Keywords of operands, in the order of the operands.
_OPERANDS = ("a", "b", "loss", "input", "input0", "input1", "comparison", "mask", "bias", "scale")
_WITHOUT_EFFECT = ("name", "compute_data_type")


def _sigmoid(xp: Any, x: Any) -> Any:
    return 1.0 / (1.0 + xp.exp(-x))


_OPERATIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    "abs": (1, lambda xp, x: xp.abs(x)),
    "ceil": (1, lambda xp, x: xp.ceil(x)),
    "cos": (1, lambda xp, x: xp.cos(x)),
    "exp": (1, lambda xp, x: xp.exp(x)),
    "floor": (1, lambda xp, x: xp.floor(x)),
    "identity": (1, lambda xp, x: x),
    "log": (1, lambda xp, x: xp.log(x)),
    "logical_not": (1, lambda xp, x: xp.logical_not(x)),
    "neg": (1, lambda xp, x: -x),
    "reciprocal": (1, lambda xp, x: 1.0 / x),
    "relu": (1, lambda xp, x: xp.where(x > 0, x, 0.0)),
    "rsqrt": (1, lambda xp, x: 1.0 / xp.sqrt(x)),
    "sigmoid": (1, _sigmoid),
    "sin": (1, lambda xp, x: xp.sin(x)),
    "softplus": (1, lambda xp, x: xp.where(x > 0, x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))),
    "sqrt": (1, lambda xp, x: xp.sqrt(x)),
    "swish": (1, lambda xp, x: x * _sigmoid(xp, x)),
    "tan": (1, lambda xp, x: xp.tan(x)),
    "tanh": (1, lambda xp, x: xp.tanh(x)),
    "add": (2, lambda xp, x, y: x + y),
    "bias": (2, lambda xp, x, y: x + y),
    "sub": (2, lambda xp, x, y: x - y),
    "mul": (2, lambda xp, x, y: x * y),
    "scale": (2, lambda xp, x, y: x * y),
    "div": (2, lambda xp, x, y: x / y),
    "mod": (2, lambda xp, x, y: xp.fmod(x, y)),
    "pow": (2, lambda xp, x, y: x**y),
    "max": (2, lambda xp, x, y: xp.where(x >= y, x, y)),
    "min": (2, lambda xp, x, y: xp.where(x <= y, x, y)),
    "add_square": (2, lambda xp, x, y: x + y * y),
    "cmp_eq": (2, lambda xp, x, y: x == y),
    "cmp_neq": (2, lambda xp, x, y: x != y),
    "cmp_gt": (2, lambda xp, x, y: x > y),
    "cmp_ge": (2, lambda xp, x, y: x >= y),
    "cmp_lt": (2, lambda xp, x, y: x < y),
    "cmp_le": (2, lambda xp, x, y: x <= y),
    "logical_and": (2, lambda xp, x, y: xp.logical_and(x, y)),
    "logical_or": (2, lambda xp, x, y: xp.logical_or(x, y)),
    "relu_backward": (2, lambda xp, dy, x: xp.where(x > 0, dy, 0.0)),
    "sigmoid_backward": (2, lambda xp, dy, x: dy * _sigmoid(xp, x) * (1.0 - _sigmoid(xp, x))),
    "tanh_backward": (2, lambda xp, dy, x: dy * (1.0 - xp.tanh(x) * xp.tanh(x))),
    "binary_select": (3, lambda xp, x, y, mask: xp.where(mask, x, y)),
}


class ScoreGraph:
    """The operations of one call of a score_mod.

    Args:
        library: Array library with NumPy's names, torch or jax.numpy.
        places: Indices of batch, head, query and key of the scores, which broadcast with them.
    """

    def __init__(self, library: Any, places: Sequence[Any]) -> None:
        self._library = library
        self._places = places

    def gen_index(self, input: Any, axis: int, **ignored: Any) -> Any:
        """Return the indices of the scores [b, h, q, k] along an axis."""
        _check_keywords("gen_index", ignored)
        return self._places[axis]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _OPERATIONS:
            raise NotImplementedError(
                f"score_mod calls graph.{name}; supported are gen_index, {', '.join(sorted(_OPERATIONS))}"
            )
        count, operation = _OPERATIONS[name]

        def compute(*operands: Any, **named: Any) -> Any:
            given = [*operands, *(named.pop(key) for key in _OPERANDS if key in named)]
            _check_keywords(name, named)
            if len(given) != count:
                raise TypeError(f"graph.{name} takes {count} tensors, not {len(given)}")
            return operation(self._library, *given)

        return compute


def _check_keywords(name: str, given: dict[str, Any]) -> None:
    unknown = [key for key in given if key not in _WITHOUT_EFFECT]
    if unknown:
        raise NotImplementedError(
            f"graph.{name} does not support {', '.join(unknown)} in a score_mod; leave it out"
        )


# By function object; a function keeps its parameters.
_REQUIRED: WeakKeyDictionary[Callable[..., Any], int | None] = WeakKeyDictionary()


def required_parameters(function: Callable[..., Any]) -> int | None:
    """Return the number of required positional parameters; None with *args or without a signature.

    The signature is inspected once per function object. A method is inspected once for all its bindings, because
    every attribute access creates another bound method.
    """
    owner = getattr(function, "__func__", function)
    try:
        if owner in _REQUIRED:
            count = _REQUIRED[owner]
        else:
            count = _REQUIRED[owner] = _inspected(owner)
    except TypeError:  # an object that cannot be hashed or weakly referenced
        return _inspected(function)
    return count if count is None or owner is function else count - 1


def _inspected(function: Callable[..., Any]) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(
        parameter.kind in positional and parameter.default is parameter.empty for parameter in parameters
    )


def builds_a_graph(score_mod: Callable[..., Any]) -> bool:
    """Return whether a score_mod takes (graph, score, tensors): three required positional parameters.

    A compiler reads the code of a function but not its signature, and of a nested function not the defaults either
    (torch 2.13). A nested function of a graph may therefore have one parameter with a default, because a function of
    indices has at least five parameters.
    """
    if is_tracing() and type(score_mod) is FunctionType:
        code = score_mod.__code__
        nested = bool(code.co_flags & inspect.CO_NESTED)
        required = code.co_argcount - (0 if nested else len(score_mod.__defaults__ or ()))
        return required in ((3, 4) if nested else (3,)) and not code.co_flags & inspect.CO_VARARGS
    return required_parameters(score_mod) == 3


# Numbers of the values of a program: the scores, the gradient of the modified scores, the tensors of both functions,
# and then the results of the operations.
SCORE, GRADIENT, FIRST_OPERAND = 0, 1, 2

# Operations of cuDNN's graphs that `ScoreGraph` does not compute.
_ONLY_IN_CUDNN = frozenset(
    (
        *(
            "elu",
            "elu_backward",
            "erf",
            "gelu",
            "gelu_approx_tanh",
            "gelu_approx_tanh_backward",
            "gelu_backward",
        ),
        *("leaky_relu", "leaky_relu_backward", "softplus_backward", "swish_backward"),
    )
)
_SETTERS = frozenset(("set_data_type", "set_dim", "set_name", "set_stride"))


class Value(NamedTuple):
    """A value of a program as an argument of an operation."""

    number: int


class Step(NamedTuple):
    """One call of a program: an operation of the graph, or a setter of a tensor.

    Attributes:
        method: Name of the method.
        receiver: Number of the tensor whose setter is called; None for the graph.
        result: Number of the result; that of the receiver for a setter.
        arguments, named: Arguments by position and by keyword: values, numbers, text and dtypes.
    """

    method: str
    receiver: int | None
    result: int
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def run(self, graph: Any, values: dict[int, Any]) -> None:
        """Call the method on a graph, and enter its result into the values."""
        target = graph if self.receiver is None else values[self.receiver]
        arguments = [_given(argument, values) for argument in self.arguments]
        named = {name: _given(argument, values) for name, argument in self.named}
        found = getattr(target, self.method)(*arguments, **named)
        if self.receiver is None:
            values[self.result] = found

    def reads(self) -> set[int]:
        """Return the numbers of the values that the call reads."""
        given = (*self.arguments, *(argument for _, argument in self.named))
        found = {argument.number for argument in given if isinstance(argument, Value)}
        return found if self.receiver is None else found | {self.receiver}


class ScoreProgram(NamedTuple):
    """The calls of a score_mod and of its score_mod_bprop, as data: equal for functions that build equal graphs.

    Attributes:
        modify: Steps from the scores to the modified scores.
        modified: Number of the modified scores.
        differentiate: Steps from the gradient of the modified scores to that of the scores, which may read values of
            `modify`; empty without a score_mod_bprop.
        gradient: Number of the gradient of the scores; None without a score_mod_bprop.
    """

    modify: tuple[Step, ...]
    modified: int
    differentiate: tuple[Step, ...] = ()
    gradient: int | None = None

    @property
    def configures(self) -> bool:
        """Whether setters are called on tensors of the graph, which tensors of an array library do not have."""
        return any(step.receiver is not None for step in (*self.modify, *self.differentiate))

    def compute(self, graph: Any, values: dict[int, Any]) -> Any:
        """Return the modified scores by the operations of a graph that computes on arrays; fill in the values."""
        return _computed(self.modify, self.modified, graph, values)

    def compute_gradient(self, graph: Any, values: dict[int, Any]) -> Any:
        """Return the gradient of the scores by such a graph, from the values of `compute` and GRADIENT."""
        assert self.gradient is not None
        return _computed(self.differentiate, self.gradient, graph, values)

    def needed(self, with_gradient: bool) -> ScoreProgram:
        """Return the program without the steps that no result depends on."""
        differentiate, modified = self.differentiate if with_gradient else (), {self.modified}
        kept: list[Step] = []
        if with_gradient and self.gradient is not None:
            kept, read = _live(differentiate, {self.gradient})
            modified |= read
        modify, _ = _live(self.modify, modified)
        return ScoreProgram(
            tuple(modify), self.modified, tuple(kept), self.gradient if with_gradient else None
        )

    def operands(self) -> frozenset[int]:
        """Return the numbers of the tensors that the steps and the results read."""
        steps = (*self.modify, *self.differentiate)
        read = {self.modified, self.gradient}.union(*(step.reads() for step in steps))
        written = {step.result for step in steps if step.receiver is None}
        return frozenset(
            number for number in read - written if number is not None and number >= FIRST_OPERAND
        )

    def adds_only(self) -> bool:
        """Return whether the function adds terms to the scores, so that its derivative is one."""
        shifted, dependent = {SCORE}, {SCORE}
        for step in self.modify:
            if step.receiver is not None or step.method == "gen_index":
                continue
            order = (*step.arguments, *(step_named for _, step_named in sorted(step.named)))
            given = [argument.number for argument in order if isinstance(argument, Value)]
            reads = [number in dependent for number in given]
            if any(reads):
                dependent.add(step.result)
                either = step.method in ("add", "bias", "identity") and sum(reads) == 1
                first = step.method == "sub" and reads == [True, False]
                if (either or first) and given[reads.index(True)] in shifted:
                    shifted.add(step.result)
        return self.modified in shifted


def _given(argument: Any, values: dict[int, Any]) -> Any:
    if isinstance(argument, Value):
        return values[argument.number]
    return list(argument) if type(argument) is tuple else argument


def _computed(steps: tuple[Step, ...], result: int, graph: Any, values: dict[int, Any]) -> Any:
    for step in steps:
        if step.receiver is None:
            step.run(graph, values)
    return values[result]


def _live(steps: tuple[Step, ...], wanted: set[int]) -> tuple[list[Step], set[int]]:
    """Return the steps that wanted values depend on, and the numbers of all values that these steps read."""
    read, kept = set(wanted), []
    for step in reversed(steps):
        if step.result in read:
            kept.append(step)
            read |= step.reads()
    return kept[::-1], read


class _RecordedTensor:
    """A tensor of a graph that is being recorded."""

    def __init__(self, recorder: _Recorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    def __getattr__(self, name: str) -> Callable[..., _RecordedTensor]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in _SETTERS:
            raise NotImplementedError(f"it uses .{name} of a tensor of the graph")

        def configure(*arguments: Any, **named: Any) -> _RecordedTensor:
            if name != "set_name":
                self._recorder._record(name, self._number, arguments, named)
            return self

        return configure


class _Recorder:
    """A graph that records the calls of its operations."""

    def __init__(self, first: int) -> None:
        self._steps: list[Step] = []
        self._next = first

    def __getattr__(self, name: str) -> Callable[..., _RecordedTensor]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name != "gen_index" and name not in _OPERATIONS and name not in _ONLY_IN_CUDNN:
            raise NotImplementedError(f"it calls graph.{name}, which is not a pointwise operation")
        return lambda *arguments, **named: self._record(name, None, arguments, named)

    def _record(
        self, method: str, receiver: int | None, arguments: Sequence[Any], named: dict[str, Any]
    ) -> _RecordedTensor:
        """Record one call, without the name of the operation."""
        result = receiver
        if result is None:
            result, self._next = self._next, self._next + 1
        positional = tuple(_recorded(argument) for argument in arguments)
        keywords = tuple((name, _recorded(value)) for name, value in named.items() if name != "name")
        self._steps.append(Step(method, receiver, result, positional, keywords))
        return _RecordedTensor(self, result)


def _recorded(argument: Any) -> Any:
    """Return an argument as hashable data."""
    if isinstance(argument, _RecordedTensor):
        return Value(argument._number)
    if isinstance(argument, (list, tuple)):
        return tuple(_recorded(item) for item in argument)
    if argument is None or type(argument) in (bool, int, float, str):
        return argument
    if type(argument).__name__ in ("data_type", "dtype"):  # of cuDNN's frontend or of an array library
        return argument
    raise NotImplementedError(f"it passes a value of type {type(argument).__name__} to the graph")


def record(
    score_mod: Callable[..., Any],
    tensors: Iterable[str],
    bprop: Callable[..., Any] | None,
    bprop_tensors: Iterable[str],
) -> ScoreProgram | str:
    """Return the program of score_mod(graph, score, tensors) and of its bprop, by calling them on a recording graph.

    Returns:
        The program, or the reason why the functions cannot be recorded, for example because they compute on tensors
        by other functions than those of the graph.
    """
    names, bprop_names = tuple(tensors), tuple(bprop_tensors)
    recorder = _Recorder(FIRST_OPERAND + len(names) + len(bprop_names))
    numbered = [_RecordedTensor(recorder, FIRST_OPERAND + i) for i in range(len(names) + len(bprop_names))]
    try:
        modified = score_mod(
            recorder, _RecordedTensor(recorder, SCORE), dict(zip(names, numbered, strict=False))
        )
        if not isinstance(modified, _RecordedTensor):
            return f"score_mod returns a value of type {type(modified).__name__} instead of a tensor of the graph"
        modify = tuple(recorder._steps)
        if bprop is None:
            return ScoreProgram(modify, modified._number)
        recorder._steps.clear()
        of_bprop = dict(zip(bprop_names, numbered[len(names) :], strict=True))
        gradient = bprop(recorder, _RecordedTensor(recorder, GRADIENT), of_bprop)
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        # The backends that compute the functions on tensors call them again, and raise errors of the functions.
        return f"score_mod cannot be recorded as a graph of cuDNN: {error}"
    if not isinstance(gradient, _RecordedTensor):
        return f"score_mod_bprop returns a value of type {type(gradient).__name__} instead of a tensor of the graph"
    return ScoreProgram(modify, modified._number, tuple(recorder._steps), gradient._number)
