"""Choosing a backend: the first row of a table that gives no reason to refuse a request, bound to it once.

Every operation has one `Table`. A request is a hashable record of facts (features, extents, dtypes, the device),
never of a tensor's values. A backend says what it can in three steps: `takes`, the features it knows; `refuses`, which
reads the request and the hardware and plans nothing; `bind`, which plans and answers what computes such requests. The
table serves the choice, the error when nothing fits, and `explain`, so the reasons shown are the reasons used; it alone
remembers, forces, observes, and hands a tracing compiler the operator that it does not look into.

    SUMS: Table[SumsRequest] = Table("column_sums", (triton, reference), describe=SumsRequest, operator=...)
    SUMS.bound((x.shape, x.dtype, dtype, x.device))(x)

A table of ways to go, whose rows bind nothing, is asked by `choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from . import env
from .memory import Memory

Request = TypeVar("Request")


class Unsupported(RuntimeError):
    """No backend takes a request; the message holds every backend's reason."""


class Refusal(NamedTuple):
    """What `bind` answers where planning, of a library for example, has shown that it cannot be done."""

    reason: str


def takes_all(request: Any) -> None:
    """The `refuses` of a backend that takes every request of features that it knows."""
    return None


@dataclass(frozen=True)
class Backend(Generic[Request]):
    """One implementation of an operation.

    takes     the features it knows; a request whose `features` hold another one is refused by that one's name
    refuses   why it does not take a request, None if it does: extents, alignment, the hardware, a missing library
    bind      plans for a request: a callable of tensors that computes it and all equal ones, or a Refusal;
              None in a table of ways to go, see `Table.choose`
    opaque    a tracing compiler does not look into what bind answers, but calls the table's operator
    varies    why two runs on one machine may differ in bits, for example sums in the order in which threads arrive;
              None: they do not. Where repeatable results are demanded, such a backend refuses by this sentence
    """

    name: str
    takes: frozenset[str] = frozenset()
    refuses: Callable[[Request], str | None] = takes_all
    bind: Callable[[Request], Callable[..., Any] | Refusal] | None = None
    opaque: bool = False
    varies: str | None = None

    def refusal(self, request: Request) -> str | None:
        """The first feature that the backend does not know, else what `refuses` says."""
        for feature in getattr(request, "features", ()):
            if feature not in self.takes:
                return f"it does not know {feature}"
        if self.varies is not None and _demands_repeatable():
            return f"its results differ from run to run, {self.varies}"
        return self.refuses(request)


class Operator(NamedTuple):
    """An operation on tensors as a compiler sees it.

    call      computes; takes what the callables that backends bind take
    results   makes room for what call returns, and computes nothing
    """

    call: Callable[..., Any]
    results: Callable[..., Any]


@dataclass(frozen=True)
class Verdict:
    """One line of an explanation: the backend, and why not (None: it would be used)."""

    backend: str
    refusal: str | None
    chosen: bool


_forced: dict[str, str] = {}
_observers: list[Callable[[str, Any], None]] = []
_binders: list[Callable[[Any, Any], Callable[..., Any]]] = []
# One entry for everything above that is in force, so that a warm call asks once.
disturbances: list[str] = []
LATER = "an earlier backend takes the request"  # the refusal of a backend that could have taken it
BOUND = "bound"  # the name of what answers in place of every backend
_REMEMBERED = 1 << 14  # keys, and requests, that a table keeps the answers of


def _never() -> bool:
    return False


_tracing: Callable[[], bool] = _never


def trace_when(tracing: Callable[[], bool]) -> None:
    """Ask tracing() whether a compiler is looking on; a framework with such a compiler says so once."""
    global _tracing
    _tracing = tracing


_demands_repeatable: Callable[[], bool] = _never


def repeatable_when(demanded: Callable[[], bool]) -> None:
    """Ask demanded() whether results have to have the same bits in every run; a framework says so once."""
    global _demands_repeatable
    _demands_repeatable = demanded


class Table(Generic[Request]):
    """The backends of one operation, in order of preference.

    describe   (*key) -> the request that a key stands for; a key is a tuple, cheap to make, of all that it depends on;
               None where requests are handed over as they are, to `bind`
    order      the names of the backends in the order in which one request prefers them; default: as listed
    operator   of a request: what a compiler sees in place of opaque backends
    """

    def __init__(
        self,
        operation: str,
        backends: Sequence[Backend[Request]],
        describe: Callable[..., Request] | None = None,
        order: Callable[[Request], Sequence[str]] | None = None,
        operator: Callable[[Request], Operator] | None = None,
    ):
        self.operation = operation
        self.backends = tuple(backends)
        self.describe = describe
        self.order = order
        self.operator = operator
        self._bound: Memory[tuple[Any, ...], Callable[..., Any]] = Memory(_bind_key, _REMEMBERED, self)
        self._plans: Memory[tuple[str, Request], Callable[..., Any] | Refusal] = Memory(
            _plan, _REMEMBERED, self
        )
        self._names: Memory[tuple[Any, ...], str] = Memory(_name, _REMEMBERED, self)
        # Of a table without such a backend no answer depends on what is demanded.
        self._may_vary = any(backend.varies is not None for backend in self.backends)
        self._remembers_repeatable = False
        tables[operation] = self

    def candidates(self, request: Request) -> tuple[Backend[Request], ...]:
        """The backends in the order in which the request prefers them."""
        if self.order is None:
            return self.backends
        return tuple(self.named(name) for name in self.order(request))

    def names(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self.backends)

    def named(self, name: str) -> Backend[Request]:
        """The backend called name; ValueError lists the names there are."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise ValueError(f"{self.operation} has no backend {name!r}; choose one of {', '.join(self.names())}")

    # What operations call.

    def bound(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        """What computes the request that key stands for, and every other one with an equal key: one look-up when warm.

        While a backend is forced or somebody observes, each call is judged anew. Raises Unsupported when every backend
        refuses, or the forced one.
        """
        if _tracing():
            return self._traced(self.described(key))
        if self._may_vary:
            self._remember_what_is_demanded()
        return self.bind(self.described(key)) if disturbances else self._bound[key]

    def bound_in_eager_mode(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        """bound(key), for a caller that has asked whether a compiler is tracing."""
        return self.bind(self.described(key)) if disturbances else self._bound[key]

    def described(self, key: tuple[Any, ...]) -> Request:
        """The request that a key stands for."""
        assert self.describe is not None
        return self.describe(*key)

    def bind(self, request: Request) -> Callable[..., Any]:
        """bound(key) for whoever holds the request itself."""
        self.report(lambda: request)
        if _binders:
            return _binders[-1](self, request)
        return self._first(self._asked(request), request)

    def name_of(self, key: tuple[Any, ...]) -> str:
        """The backend that bound(key) would ask first, which nothing is planned for and observers do not hear of.

        For an operation that does the work of this one's backend within a kernel of its own.
        """
        if self._may_vary:
            self._remember_what_is_demanded()
        return self.chosen(self.described(key)) if disturbances or _tracing() else self._names[key]

    def choose(self, key: tuple[Any, ...]) -> str:
        """The row that takes the request of a key, in a table of ways to go, whose rows bind nothing; observers hear.

        Raises Unsupported as `bound` does.
        """
        if self._may_vary:
            self._remember_what_is_demanded()
        if not disturbances and not _tracing():
            return self._names[key]
        request = self.described(key)
        self.report(lambda: request)
        return self._taker(self._asked(request), request).name

    def chosen(self, request: Request) -> str:
        """The backend that takes the request, as far as is known without planning; observers do not hear of it."""
        if _binders:
            return BOUND
        return self._taker(self._asked(request), request).name

    def first(self, request: Request, without: frozenset[str] = frozenset()) -> Callable[..., Any]:
        """Return what computes the request by the first backend that supports it; observers are not notified.

        For a platform other than this machine's, where no backend is forced.

        Args:
            request: The request.
            without: Names of backends to leave out.

        Raises:
            Unsupported: No other backend supports the request.
        """
        backends = (backend for backend in self.candidates(request) if backend.name not in without)
        return self._first(tuple(backends), request)

    def forget(self) -> None:
        """Remember nothing of earlier requests: for measurements, and tests that change what requests depend on.

        Nor do layers, whose specs hold plans and lines of earlier requests: their keys have the generation.
        """
        for memory in (self._bound, self._plans, self._names):
            memory.clear()
        env.renew()

    def report(self, describe: Callable[[], Request]) -> None:
        """Tell observers of describe(): `bind` does, and whoever does the work of a backend's within another kernel."""
        for see in _observers:
            see(self.operation, describe())

    def explain(self, request: Request) -> list[Verdict]:
        """Every backend with its refusal, and which one takes the request. Plans nothing: what planning has refused
        before is known, what it would refuse is not."""
        forced = _forced.get(self.operation)
        verdicts: list[Verdict] = []
        found = False
        for backend in self.candidates(request):
            refusal = self._refusal(backend, request)
            if refusal is None and forced is not None and backend.name != forced:
                refusal = f"use_backend({self.operation}={forced!r}) is in force"
            chosen = refusal is None and not found
            if refusal is None and found:
                refusal = LATER
            found = found or chosen
            verdicts.append(Verdict(backend.name, refusal, chosen))
        return verdicts

    def _remember_what_is_demanded(self) -> None:
        """Answers of when repeatable results were demanded are none of when they are not."""
        demanded = _demands_repeatable()
        if demanded is not self._remembers_repeatable:
            self._remembers_repeatable = demanded
            self.forget()

    # How they are answered.

    def _asked(self, request: Request) -> tuple[Backend[Request], ...]:
        """The backends that may take the request: all, or the one that is forced."""
        forced = _forced.get(self.operation)
        return self.candidates(request) if forced is None else (self.named(forced),)

    def _first(self, backends: tuple[Backend[Request], ...], request: Request) -> Callable[..., Any]:
        """The plan of the first of these backends that has one."""
        for backend in backends:
            if backend.refusal(request) is None:
                call = self._plans[backend.name, request]
                if not isinstance(call, Refusal):
                    return call
        raise self._unsupported(request)

    def _taker(self, backends: tuple[Backend[Request], ...], request: Request) -> Backend[Request]:
        """The first of these backends that takes the request, as far as is known without planning."""
        for backend in backends:
            if self._refusal(backend, request) is None:
                return backend
        raise self._unsupported(request)

    def _traced(self, request: Request) -> Callable[..., Any]:
        """Nothing is remembered, extents may be symbols; an opaque backend plans when its operator is called."""
        backend = self._taker(self._asked(request), request)
        if backend.opaque:
            assert self.operator is not None
            return self.operator(request).call
        assert backend.bind is not None
        call = backend.bind(request)
        assert not isinstance(call, Refusal), "what may refuse while it plans is opaque"
        return call

    def _refusal(self, backend: Backend[Request], request: Request) -> str | None:
        """What the backend says before it plans, else what it said when it planned."""
        reason = backend.refusal(request)
        if reason is None and not _tracing():
            known = self._plans.get((backend.name, request))
            reason = known.reason if isinstance(known, Refusal) else None
        return reason

    def _unsupported(self, request: Request) -> Unsupported:
        forced = _forced.get(self.operation)
        if forced is not None:
            return Unsupported(
                f"{self.operation}: backend {forced!r} was asked for but refuses: "
                f"{self._refusal(self.named(forced), request)}; "
                f"drop use_backend({self.operation}={forced!r}) to let another be chosen"
            )
        reasons = "; ".join(f"{b.name}: {self._refusal(b, request)}" for b in self.candidates(request))
        return Unsupported(f"no backend of {self.operation} takes this request ({reasons})")


# What a table remembers is that of nobody forcing anything: another thread may begin to while it is found out.


def _bind_key(table: Table[Any], key: tuple[Any, ...]) -> Callable[..., Any]:
    request = table.described(key)
    return table._first(table.candidates(request), request)


def _plan(table: Table[Any], key: tuple[str, Any]) -> Callable[..., Any] | Refusal:
    name, request = key
    bind = table.named(name).bind
    assert bind is not None, "a table of ways to go binds nothing"
    return bind(request)


def _name(table: Table[Any], key: tuple[Any, ...]) -> str:
    request = table.described(key)
    return table._taker(table.candidates(request), request).name


tables: dict[str, Table[Any]] = {}


def undisturbed() -> bool:
    """Is nobody forcing backends or observing requests, so that an earlier choice may be used again?"""
    return not disturbances


def forced(operation: str) -> str | None:
    """The backend that somebody has chosen for an operation."""
    return _forced.get(operation)


@contextmanager
def observing(see: Callable[[str, Any], None]) -> Iterator[None]:
    """Call see(operation, request) for every request that a table is asked to choose for."""
    _observers.append(see)
    disturbances.append("observing")
    try:
        yield
    finally:
        _observers.remove(see)
        disturbances.remove("observing")


@contextmanager
def binding(bind: Callable[[Table[Any], Any], Callable[..., Any]]) -> Iterator[None]:
    """Let bind(table, request) answer for every backend: for runs that compute nothing. Nothing of it is remembered."""
    _binders.append(bind)
    disturbances.append("binding")
    try:
        yield
    finally:
        _binders.remove(bind)
        disturbances.remove("binding")


@contextmanager
def use_backend(**choice: str) -> Iterator[None]:
    """Force backends by operation, for example `use_backend(gemm="reference")`; the outermost choice wins.

    Raises ValueError for an operation or a backend that does not exist.
    """
    for operation, name in choice.items():
        if operation not in tables:
            raise ValueError(f"there is no operation {operation!r}; choose from {', '.join(sorted(tables))}")
        tables[operation].named(name)
    added = {operation: name for operation, name in choice.items() if operation not in _forced}
    _forced.update(added)
    disturbances.extend(added)
    try:
        yield
    finally:
        for operation in added:
            del _forced[operation]
            disturbances.remove(operation)
