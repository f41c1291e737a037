"""Backend selection: the first backend in a table that supports a request is bound to the request once.

Every operation has one `Table`. A request is a hashable record of properties, without tensor values. A backend declares
the features that it supports (`takes`), the reason why this hardware does not (`unsupported_reason`), and a callable
for equal requests (`bind`). The table alone selects, explains, caches, forces, observes and registers.

    SUMS: Table[SumsRequest] = Table("column_sums", (triton, reference), describe=SumsRequest, operator=...)
    SUMS.bound((x.shape, x.dtype, dtype, x.device))(x)
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
    """No backend supports a request; the message contains the reason of every backend.

    Attributes:
        forced: Operation whose forced backend does not support the request, or None.
    """

    def __init__(self, message: str, forced: str | None = None) -> None:
        super().__init__(message)
        self.forced = forced


class PlanFailure(NamedTuple):
    """Result of `bind` if planning, for example by a library, shows that the request is unsupported."""

    reason: str


def supports_all(request: Any) -> None:
    """Accept every request: `unsupported_reason` for backends that support all requests with their features."""
    return None


# Reasons of `Backend.batch_dependent` that several backends share.
BY_ALGORITHM = "by an algorithm that the library chooses for their number"
BY_TILE = "by a tile that is not verified to be the same for every row count"


def always_depends(reason: str) -> Callable[[Any], str]:
    """`Backend.batch_dependent` of a backend whose rows depend on the batch in every request."""
    return lambda request: reason


def depends_on_gpu(request: Any) -> str | None:
    """`Backend.batch_dependent` of a reference in torch operations, whose sums follow a row's length on a CPU only."""
    if request.device.type != "cuda":
        return None
    return "by reductions that the framework divides by their number"


@dataclass(frozen=True)
class Backend(Generic[Request]):
    """One implementation of an operation.

    Attributes:
        name: Name in `use_backend` and in explanations.
        takes: Supported features; a request with any other feature is unsupported.
        unsupported_reason: request -> reason why it is unsupported (extents, hardware, a missing library), or None.
        bind: request -> tensor function that computes equal requests, or a `PlanFailure`. None with `Table.choose`.
        opaque: Whether a tracing compiler calls the table's operator instead of tracing the bound callable.
        varies: Reason why bits vary between runs (atomic sums), or None. Unsupported if results must be repeatable.
        batch_dependent: request -> reason why a row's result depends on the other rows (tiles or split sums that are
            chosen by their number), or None. Such a request is unsupported while `is_batch_invariant()`.
    """

    name: str
    takes: frozenset[str] = frozenset()
    unsupported_reason: Callable[[Request], str | None] = supports_all
    bind: Callable[[Request], Callable[..., Any] | PlanFailure] | None = None
    opaque: bool = False
    varies: str | None = None
    batch_dependent: Callable[[Request], str | None] = supports_all

    def rejection_reason(self, request: Request) -> str | None:
        """Reason why the request is unsupported, or None. Plans nothing."""
        for feature in getattr(request, "features", ()):
            if feature not in self.takes:
                return f"it does not support {feature}"
        if self.varies is not None and _demands_repeatable():
            return f"its results differ from run to run, {self.varies}"
        if requirements.batch_invariant and (reason := self.batch_dependent(request)) is not None:
            return f"a row's result depends on the other rows, {reason}"
        return self.unsupported_reason(request)


class Operator(NamedTuple):
    """An operation as a compiler traces it.

    Attributes:
        call: Computes the operation, with the arguments of the bound callables.
        results: Allocates results with the same shapes and dtypes without computing them.
    """

    call: Callable[..., Any]
    results: Callable[..., Any]


@dataclass(frozen=True)
class Verdict:
    """One line in an explanation: a backend, the reason why it is not used, or None, and whether it is used.

    Attributes:
        backend: Name of the backend.
        reason: Reason why the backend is not used, or None.
        chosen: Whether the backend is used.
    """

    backend: str
    reason: str | None
    chosen: bool


_forced: dict[str, str] = {}
_observers: list[Callable[[str, Any], None]] = []
_binders: list[Callable[[Any, Any], Callable[..., Any]]] = []
# One entry for each active item in the lists above, so that a cached call checks one list.
interventions: list[str] = []
# Reason for the supported backends after the chosen one.
LATER = "an earlier backend takes the request"
BOUND = "bound"  # the function that replaces all backends within `binding`, by name
_REMEMBERED = 1 << 14  # entries per table cache


def _never() -> bool:
    return False


_tracing: Callable[[], bool] = _never


def trace_when(tracing: Callable[[], bool]) -> None:
    """Set the function that returns whether a compiler is tracing; a framework calls this once."""
    global _tracing
    _tracing = tracing


def is_tracing() -> bool:
    """Whether a compiler is tracing the running function; False without a framework that has one."""
    return _tracing()


_demands_repeatable: Callable[[], bool] = _never


def repeatable_when(demanded: Callable[[], bool]) -> None:
    """Set the function that returns whether results must repeat bit for bit; a framework calls this once."""
    global _demands_repeatable
    _demands_repeatable = demanded


class Requirements:
    """Requirements of the process on results; an attribute, because every warm call reads it.

    Attributes:
        batch_invariant: A row's result must not depend on the other rows. Backward passes run in other threads.
    """

    batch_invariant = False


requirements = Requirements()


def is_batch_invariant() -> bool:
    """Whether a row's result must not depend on the number, the order or the values of other rows."""
    return requirements.batch_invariant


def require_batch_invariance(required: bool) -> None:
    """Set `is_batch_invariant()`; each state has its own cached choices, in tables and under `env.generation()`."""
    if required is requirements.batch_invariant:
        return
    requirements.batch_invariant = required
    for table in tables.values():
        table.exchange_caches()
    env.use_series(int(required))


class Table(Generic[Request]):
    """One operation's backends, in order of preference.

    Args:
        operation: Operation name.
        backends: Backends, the preferred first.
        describe: (*key) -> request for a key, a tuple of all values that the request depends on. None if callers pass
            requests to `bind`.
        order: request -> backend names in order of preference; by default the list order.
        operator: request -> operator that a compiler calls instead of opaque backends.
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
        self._bound: Memory[tuple[Any, ...], Callable[..., Any]]
        self._plans: Memory[tuple[str, Request], Callable[..., Any] | PlanFailure]
        self._names: Memory[tuple[Any, ...], str]
        self._bound, self._plans, self._names = self._make_caches()
        self._other_caches = self._make_caches()  # of the other state of `is_batch_invariant()`
        # Only tables with such a backend depend on whether repeatable results are required.
        self._may_vary = any(backend.varies is not None for backend in self.backends)
        self._remembers_repeatable = False
        tables[operation] = self

    def _make_caches(self) -> tuple[Memory[Any, Any], Memory[Any, Any], Memory[Any, Any]]:
        return tuple([Memory(build, _REMEMBERED, self) for build in (_bind_key, _plan, _name)])  # pyright: ignore

    def exchange_caches(self) -> None:
        """Replace the caches by those of the other state of `is_batch_invariant()`."""
        caches = (self._bound, self._plans, self._names)
        (self._bound, self._plans, self._names), self._other_caches = self._other_caches, caches

    def candidates(self, request: Request) -> tuple[Backend[Request], ...]:
        """Backends in a request's order of preference."""
        if self.order is None:
            return self.backends
        return tuple(self.named(name) for name in self.order(request))

    def names(self) -> tuple[str, ...]:
        return tuple(backend.name for backend in self.backends)

    def named(self, name: str) -> Backend[Request]:
        """Get the backend called `name`; raise ValueError, which lists the names, if it does not exist."""
        for backend in self.backends:
            if backend.name == name:
                return backend
        raise ValueError(
            f"{self.operation} has no backend {name!r}; choose one of {', '.join(self.names())}"
        )

    def bound(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        """Get the callable that computes the request of a key; one cache look-up for a cached key.

        While a backend is forced or a callback observes, every call chooses again.

        Raises:
            Unsupported: No backend, or not the forced one, supports the request.
        """
        if _tracing():
            return self._bound_in_trace(key)
        if self._may_vary:
            self._remember_what_is_demanded()
        return self.bind(self.described(key)) if interventions else self._bound[key]

    def _bound_in_trace(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        """Select the callable that a compiler traces, or the operator of an opaque backend; nothing is cached."""
        request = self.described(key)
        backend = self._taker(self._requested(request), request)
        if backend.opaque:
            assert self.operator is not None
            return self.operator(request).call
        assert backend.bind is not None
        call = backend.bind(request)
        assert not isinstance(call, PlanFailure), "a backend whose planning may fail is opaque"
        return call

    def bound_in_eager_mode(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        """Same as bound(key), for a caller that knows that no compiler is tracing."""
        return self.bind(self.described(key)) if interventions else self._bound[key]

    def described(self, key: tuple[Any, ...]) -> Request:
        """Build the request for a key."""
        assert self.describe is not None
        return self.describe(*key)

    def bind(self, request: Request) -> Callable[..., Any]:
        """Bind a callable to a request, without the key cache; see `bound`."""
        self.report(lambda: request)
        if _binders:
            return _binders[-1](self, request)
        return self._first(self._requested(request), request)

    def name_of(self, key: tuple[Any, ...]) -> str:
        """Name of the first supported backend, for kernels that include its work; observers not notified."""
        if self._may_vary:
            self._remember_what_is_demanded()
        return self.chosen(self.described(key)) if interventions or _tracing() else self._names[key]

    def choose(self, key: tuple[Any, ...]) -> str:
        """Name the first backend that supports a key's request, and notify observers.

        For tables whose backends have no `bind`. It raises `Unsupported`, as `bound` does.
        """
        if self._may_vary:
            self._remember_what_is_demanded()
        if not interventions and not _tracing():
            return self._names[key]
        request = self.described(key)
        self.report(lambda: request)
        return self._taker(self._requested(request), request).name

    def chosen(self, request: Request) -> str:
        """Name of the backend for a request, without planning or notifying observers."""
        if _binders:
            return BOUND
        return self._taker(self._requested(request), request).name

    def first(self, request: Request, without: frozenset[str] = frozenset()) -> Callable[..., Any]:
        """Bind the first backend that supports a request, without notifying observers.

        For a platform other than this machine's, where no backend is forced. Excludes the backends named in
        `without`; raises Unsupported if no other backend supports the request.
        """
        backends = (backend for backend in self.candidates(request) if backend.name not in without)
        return self._first(tuple(backends), request)

    def forget(self) -> None:
        """Clear the caches, and layer caches by `env.renew`, after changes that keys do not contain."""
        for memory in (self._bound, self._plans, self._names, *self._other_caches):
            memory.clear()
        env.renew()

    def report(self, describe: Callable[[], Request]) -> None:
        """Notify observers of the request describe(); also for kernels that include a backend's work."""
        for see in _observers:
            see(self.operation, describe())

    def explain(self, request: Request) -> list[Verdict]:
        """List a verdict for every backend. Nothing is planned; earlier planning failures are included."""
        forced = _forced.get(self.operation)
        verdicts: list[Verdict] = []
        for backend in self.candidates(request):
            reason = self._find_reason_before_planning(backend, request)
            if reason is None and forced is not None and backend.name != forced:
                reason = f"use_backend({self.operation}={forced!r}) is in force"
            if reason is None and any(verdict.chosen for verdict in verdicts):
                reason = LATER
            verdicts.append(Verdict(backend.name, reason, chosen=reason is None))
        return verdicts

    def _remember_what_is_demanded(self) -> None:
        """Clear the caches if the requirement for repeatable results has changed."""
        demanded = _demands_repeatable()
        if demanded is not self._remembers_repeatable:
            self._remembers_repeatable = demanded
            self.forget()

    def _requested(self, request: Request) -> tuple[Backend[Request], ...]:
        """Candidates for a request: all backends, or the forced one."""
        forced = _forced.get(self.operation)
        return self.candidates(request) if forced is None else (self.named(forced),)

    def _first(
        self, backends: tuple[Backend[Request], ...], request: Request
    ) -> Callable[..., Any]:
        """Bind the first of these backends that supports the request."""
        for backend in backends:
            if backend.rejection_reason(request) is None:
                call = self._plans[backend.name, request]
                if not isinstance(call, PlanFailure):
                    return call
        raise self._unsupported(request)

    def _taker(self, backends: tuple[Backend[Request], ...], request: Request) -> Backend[Request]:
        """Find the first of these backends that supports the request, without planning."""
        for backend in backends:
            if self._find_reason_before_planning(backend, request) is None:
                return backend
        raise self._unsupported(request)

    def _find_reason_before_planning(
        self, backend: Backend[Request], request: Request
    ) -> str | None:
        """Reason before planning, or the reason of a planning failure in the cache, or None."""
        reason = backend.rejection_reason(request)
        cached = (
            None if reason is not None or _tracing() else self._plans.get((backend.name, request))
        )
        return cached.reason if isinstance(cached, PlanFailure) else reason

    def _unsupported(self, request: Request) -> Unsupported:
        forced = _forced.get(self.operation)
        if forced is not None:
            return Unsupported(
                f"{self.operation}: backend {forced!r} is forced but does not support this request: "
                f"{self._find_reason_before_planning(self.named(forced), request)}; "
                f"remove use_backend({self.operation}={forced!r}) to choose another backend",
                forced=self.operation,
            )
        reasons = "; ".join(
            f"{b.name}: {self._find_reason_before_planning(b, request)}"
            for b in self.candidates(request)
        )
        return Unsupported(f"no backend of {self.operation} takes this request ({reasons})")


# The functions below fill the caches, which ignore forced backends even if another thread forces one at the same time.


def _bind_key(table: Table[Any], key: tuple[Any, ...]) -> Callable[..., Any]:
    request = table.described(key)
    return table._first(table.candidates(request), request)


def _plan(table: Table[Any], key: tuple[str, Any]) -> Callable[..., Any] | PlanFailure:
    name, request = key
    bind = table.named(name).bind
    assert bind is not None, "a backend without bind is for Table.choose"
    return bind(request)


def _name(table: Table[Any], key: tuple[Any, ...]) -> str:
    request = table.described(key)
    return table._taker(table.candidates(request), request).name


tables: dict[str, Table[Any]] = {}


def forced_backend(operation: str) -> str | None:
    """Name of an operation's forced backend, or None."""
    return _forced.get(operation)


@contextmanager
def observing(see: Callable[[str, Any], None]) -> Iterator[None]:
    """Call see(operation, request) for every request whose backend is chosen within this block."""
    _observers.append(see)
    interventions.append("observing")
    try:
        yield
    finally:
        _observers.remove(see)
        interventions.remove("observing")


@contextmanager
def binding(bind: Callable[[Table[Any], Any], Callable[..., Any]]) -> Iterator[None]:
    """Replace all backends by bind(table, request) within this block, without caching: for dry runs."""
    _binders.append(bind)
    interventions.append("binding")
    try:
        yield
    finally:
        _binders.remove(bind)
        interventions.remove("binding")


@contextmanager
def use_backend(**choice: str) -> Iterator[None]:
    """Force backends by operation in a block; the outermost choice wins.

    Args:
        choice: For example `gemm="reference"`. An unknown operation or backend raises ValueError.
    """
    for operation, name in choice.items():
        if operation not in tables:
            raise ValueError(
                f"unknown operation {operation!r}; choose from {', '.join(sorted(tables))}"
            )
        tables[operation].named(name)
    added = {operation: name for operation, name in choice.items() if operation not in _forced}
    _forced.update(added)
    interventions.extend(added)
    try:
        yield
    finally:
        for operation in added:
            del _forced[operation]
            interventions.remove(operation)
