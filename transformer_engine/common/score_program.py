"""record(score_mod, ..): a score_mod(graph, score, tensors) graph as data, which cuDNN's graphs contain.

The functions run on a graph that records their calls. A `ScoreProgram` is hashable and holds no function and no tensor:
plans of a library are cached by it, whichever functions have built it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .score_graph import OPERATIONS

# Numbers for a program's values: the scores, the gradient of the modified scores, both functions' tensors, and then the
# operations' results.
SCORE, GRADIENT, FIRST_OPERAND = 0, 1, 2

# Operations in cuDNN's graphs that `ScoreGraph` does not compute.
_ONLY_IN_CUDNN = frozenset(
    (
        "elu",
        "elu_backward",
        "erf",
        "gelu",
        "gelu_approx_tanh",
        "gelu_approx_tanh_backward",
        "gelu_backward",
        "leaky_relu",
        "leaky_relu_backward",
        "softplus_backward",
        "swish_backward",
    )
)
_SETTERS = frozenset(("set_data_type", "set_dim", "set_name", "set_stride"))


class Value(NamedTuple):
    """A program value as an operation's argument."""

    number: int


class GraphCall(NamedTuple):
    """One call in a program: a graph operation, or a tensor setter.

    Attributes:
        method: Method name.
        receiver: Number of the tensor whose setter is called; None for the graph.
        result: Result number; the receiver's number for a setter.
        arguments, named: Arguments by position and by keyword: values, numbers, text and dtypes.
    """

    method: str
    receiver: int | None
    result: int
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def run(self, graph: Any, values: dict[int, Any]) -> None:
        """Call the method on a graph; store the result of an operation in values under its number."""
        target = graph if self.receiver is None else values[self.receiver]
        arguments = [_argument_value(argument, values) for argument in self.arguments]
        named = {name: _argument_value(argument, values) for name, argument in self.named}
        result = getattr(target, self.method)(*arguments, **named)
        if self.receiver is None:
            values[self.result] = result

    def reads(self) -> set[int]:
        """Numbers of the values that the call reads."""
        arguments = (*self.arguments, *(argument for _, argument in self.named))
        numbers = {argument.number for argument in arguments if isinstance(argument, Value)}
        return numbers if self.receiver is None else numbers | {self.receiver}


class ScoreProgram(NamedTuple):
    """The calls in a score_mod and its score_mod_bprop, as data: equal for functions that build equal graphs.

    Attributes:
        modify: Steps from the scores to the modified scores.
        modified: Number of the modified scores.
        differentiate: Steps from the modified scores' gradient to the scores' gradient, which may read values from
            `modify`; empty without a score_mod_bprop.
        gradient: Number of the score gradient; None without a score_mod_bprop.
    """

    modify: tuple[GraphCall, ...]
    modified: int
    differentiate: tuple[GraphCall, ...] = ()
    gradient: int | None = None

    @property
    def configures(self) -> bool:
        """Whether setters are called on graph tensors, which an array library's tensors do not have."""
        return any(step.receiver is not None for step in (*self.modify, *self.differentiate))

    def compute(self, graph: Any, values: dict[int, Any]) -> Any:
        """Compute the modified scores in a graph of arrays; the results of all calls are added to values."""
        return run_calls(self.modify, self.modified, graph, values, setters=False)

    def compute_gradient(self, graph: Any, values: dict[int, Any]) -> Any:
        """Compute the score gradient from the values in `compute` and the value numbered GRADIENT."""
        assert self.gradient is not None
        return run_calls(self.differentiate, self.gradient, graph, values, setters=False)

    def needed(self, with_gradient: bool) -> ScoreProgram:
        """Remove the steps that no result depends on."""
        differentiate, modified = self.differentiate if with_gradient else (), {self.modified}
        live: list[GraphCall] = []
        if with_gradient and self.gradient is not None:
            live, read = _live_steps(differentiate, {self.gradient})
            modified |= read
        modify, _ = _live_steps(self.modify, modified)
        return ScoreProgram(
            tuple(modify), self.modified, tuple(live), self.gradient if with_gradient else None
        )

    def operands(self) -> frozenset[int]:
        """Numbers of the tensors that the steps and the results read."""
        steps = (*self.modify, *self.differentiate)
        read = {self.modified, self.gradient}.union(*(step.reads() for step in steps))
        written = {step.result for step in steps if step.receiver is None}
        return frozenset(
            number for number in read - written if number is not None and number >= FIRST_OPERAND
        )

    def depends_on(self, source: int, result: int) -> bool:
        """Whether a result is computed from a value, other than from its shape."""
        dependent = {source}
        for step in (*self.modify, *self.differentiate):
            if (
                step.receiver is None
                and step.method != "gen_index"
                and not dependent.isdisjoint(step.reads())
            ):
                dependent.add(step.result)
        return result in dependent

    def adds_only(self) -> bool:
        """Whether the function adds terms to the scores, so that its derivative is one."""
        shifted, dependent = {SCORE}, {SCORE}
        for step in self.modify:
            if step.receiver is not None or step.method == "gen_index":
                continue
            # Keyword arguments a and b follow the positional ones.
            ordered = (*step.arguments, *(argument for _, argument in sorted(step.named)))
            numbers = [argument.number for argument in ordered if isinstance(argument, Value)]
            reads = [number in dependent for number in numbers]
            if any(reads):
                dependent.add(step.result)
                adds = step.method in ("add", "bias", "identity") and sum(reads) == 1
                subtracts = step.method == "sub" and reads == [True, False]
                if (adds or subtracts) and numbers[reads.index(True)] in shifted:
                    shifted.add(step.result)
        return self.modified in shifted


class RecordedScoreMod(NamedTuple):
    """A program and the named tensors of its functions.

    Attributes:
        program: The program, or the reason why the functions cannot be recorded.
        tensors: Tensors of score_mod by name.
        bprop_tensors: Tensors of score_mod_bprop by name.
    """

    program: ScoreProgram | str
    tensors: Mapping[str, Any]
    bprop_tensors: Mapping[str, Any]

    def operands(self) -> tuple[Any, ...]:
        """Both functions' tensors in the order of the program's operands."""
        return (*self.tensors.values(), *self.bprop_tensors.values())


def _argument_value(argument: Any, values: dict[int, Any]) -> Any:
    if isinstance(argument, Value):
        return values[argument.number]
    return list(argument) if type(argument) is tuple else argument


def run_calls(
    steps: tuple[GraphCall, ...], result: int, graph: Any, values: dict[int, Any], setters: bool
) -> Any:
    """Run the calls of a program on a graph and return one value.

    Args:
        steps: The calls, in order.
        result: Number of the value to return.
        graph: A cuDNN graph, or a `ScoreGraph` of arrays.
        values: Values by number: the inputs, to which the results of the calls are added.
        setters: Whether to call setters too, which arrays do not have.
    """
    for step in steps:
        if setters or step.receiver is None:
            step.run(graph, values)
    return values[result]


def _live_steps(
    steps: tuple[GraphCall, ...], outputs: set[int]
) -> tuple[list[GraphCall], set[int]]:
    """Find the steps that the wanted values depend on, and the numbers of the wanted values and all values read."""
    read, live = set(outputs), []
    for step in reversed(steps):
        if step.result in read:
            live.append(step)
            read |= step.reads()
    return live[::-1], read


class _RecordedTensor:
    """A tensor in a graph that is being recorded."""

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
    """A graph that records its operation calls."""

    def __init__(self, first: int) -> None:
        self._steps: list[GraphCall] = []
        self._next = first

    def __getattr__(self, name: str) -> Callable[..., _RecordedTensor]:
        if name.startswith("__"):
            raise AttributeError(name)
        if name != "gen_index" and name not in OPERATIONS and name not in _ONLY_IN_CUDNN:
            raise NotImplementedError(f"it calls graph.{name}, which is not a pointwise operation")
        return lambda *arguments, **named: self._record(name, None, arguments, named)

    def _record(
        self, method: str, receiver: int | None, arguments: Sequence[Any], named: dict[str, Any]
    ) -> _RecordedTensor:
        """Record one call, without the name of the operation."""
        result = receiver
        if result is None:
            result, self._next = self._next, self._next + 1
        positional = tuple(_record_argument(argument) for argument in arguments)
        keywords = tuple(
            (name, _record_argument(value)) for name, value in named.items() if name != "name"
        )
        self._steps.append(GraphCall(method, receiver, result, positional, keywords))
        return _RecordedTensor(self, result)


def _record_argument(argument: Any) -> Any:
    """Convert an argument to hashable data."""
    if isinstance(argument, _RecordedTensor):
        return Value(argument._number)
    if isinstance(argument, (list, tuple)):
        return tuple(_record_argument(item) for item in argument)
    if argument is None or type(argument) in (bool, int, float, str):
        return argument
    if type(argument).__name__ in (
        "data_type",
        "dtype",
    ):  # from cuDNN's frontend or an array library
        return argument
    raise NotImplementedError(f"it passes a value of type {type(argument).__name__} to the graph")


def record(
    score_mod: Callable[..., Any],
    tensors: Iterable[str],
    bprop: Callable[..., Any] | None,
    bprop_tensors: Iterable[str],
) -> ScoreProgram | str:
    """Record score_mod(graph, score, tensors) and its bprop as a program, by calling them on a recording graph.

    Returns:
        The program, or the reason why the functions cannot be recorded, for example because they compute on tensors by
        functions outside the graph.
    """
    names, bprop_names = tuple(tensors), tuple(bprop_tensors)
    recorder = _Recorder(FIRST_OPERAND + len(names) + len(bprop_names))
    numbered = [
        _RecordedTensor(recorder, FIRST_OPERAND + i) for i in range(len(names) + len(bprop_names))
    ]
    try:
        modified = score_mod(
            recorder,
            _RecordedTensor(recorder, SCORE),
            dict(zip(names, numbered[: len(names)], strict=True)),
        )
        if not isinstance(modified, _RecordedTensor):
            return f"score_mod returns a value of type {type(modified).__name__} instead of a tensor of the graph"
        modify = tuple(recorder._steps)
        if bprop is None:
            return ScoreProgram(modify, modified._number)
        recorder._steps.clear()
        of_bprop = dict(zip(bprop_names, numbered[len(names) :], strict=True))
        gradient = bprop(recorder, _RecordedTensor(recorder, GRADIENT), of_bprop)
    except (
        AttributeError,
        LookupError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # The backends that compute the functions on tensors call them again, and raise errors of the functions.
        return f"score_mod cannot be recorded as a graph of cuDNN: {error}"
    if not isinstance(gradient, _RecordedTensor):
        return f"score_mod_bprop returns a value of type {type(gradient).__name__} instead of a tensor of the graph"
    return ScoreProgram(modify, modified._number, tuple(recorder._steps), gradient._number)
