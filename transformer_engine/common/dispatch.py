"""Choosing a backend: the first row of a table that gives no reason to refuse a request.

Every operation has one `Table`. A backend's `refuses(request)` reads the request and the hardware description
only, never a tensor's values, and answers None or a sentence. The same table serves the choice, the error when
nothing fits, and `explain`, so the reasons shown are the reasons used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .bounded import Bounded

Request = TypeVar("Request")


class Unsupported(RuntimeError):
    """No backend takes a request; the message holds every backend's reason."""


@dataclass(frozen=True)
class Backend(Generic[Request]):
    """One implementation of an operation: what it runs and which requests it refuses, with the reason."""

    name: str
    run: Callable[..., Any]
    refuses: Callable[[Request], str | None]


@dataclass(frozen=True)
class Verdict:
    """One line of an explanation: the backend, and why not (None: it would be used)."""

    backend: str
    refusal: str | None
    chosen: bool


_forced: dict[str, str] = {}
_observers: list[Callable[[str, Any], None]] = []
LATER = "an earlier backend takes the request"  # the refusal of a backend that could have taken it
_REMEMBERED = 1 << 14  # choices a table keeps


class Table(Generic[Request]):
    """The backends of one operation, in order of preference.

    order   the names of the backends in the order in which one request prefers them; default: as listed
    """

    def __init__(
        self,
        operation: str,
        backends: Sequence[Backend[Request]],
        order: Callable[[Request], Sequence[str]] | None = None,
    ):
        self.operation = operation
        self.backends = tuple(backends)
        self.order = order
        self._chosen: Bounded[Hashable, Backend[Request]] = Bounded(_REMEMBERED)
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

    def select(self, request: Request) -> Backend[Request]:
        """The first backend that takes the request; a forced backend that refuses raises its reason."""
        self.report(lambda: request)
        return self._judged(request)

    def report(self, describe: Callable[[], Request]) -> None:
        """Tell observers of describe(): select does, and whoever does the work of a backend's within another kernel."""
        for see in _observers:
            see(self.operation, describe())

    def _judged(self, request: Request) -> Backend[Request]:
        forced = _forced.get(self.operation)
        if forced is not None:
            backend = self.named(forced)
            refusal = backend.refuses(request)
            if refusal is not None:
                raise Unsupported(
                    f"{self.operation}: backend {forced!r} was asked for but refuses: {refusal}; "
                    f"drop use_backend({self.operation}={forced!r}) to let another be chosen"
                )
            return backend
        for backend in self.candidates(request):
            if backend.refuses(request) is None:
                return backend
        reasons = "; ".join(f"{b.name}: {b.refuses(request)}" for b in self.candidates(request))
        raise Unsupported(f"no backend of {self.operation} takes this request ({reasons})")

    def choice(self, key: Hashable, describe: Callable[[], Request]) -> Backend[Request]:
        """select(describe()), remembered: equal keys must describe requests that every backend answers alike.

        A warm call costs one look-up. While a backend is forced or somebody observes, each call is judged anew.
        """
        if _forced or _observers:
            return self.select(describe())
        return self.prospect(key, describe)

    def prospect(self, key: Hashable, describe: Callable[[], Request]) -> Backend[Request]:
        """choice(key, describe) that observers do not hear of: for deciding whether the request will be made at all."""
        if _forced or _observers:
            return self._judged(describe())
        backend = self._chosen.get(key)
        if backend is None:
            backend = self._chosen.keep(key, self._judged(describe()))
        return backend

    def explain(self, request: Request) -> list[Verdict]:
        """Every backend with its refusal, and which one select() would return."""
        forced = _forced.get(self.operation)
        verdicts: list[Verdict] = []
        found = False
        for backend in self.candidates(request):
            refusal = backend.refuses(request)
            if refusal is None and forced is not None and backend.name != forced:
                refusal = f"use_backend({self.operation}={forced!r}) is in force"
            chosen = refusal is None and not found
            if refusal is None and found:
                refusal = LATER
            found = found or chosen
            verdicts.append(Verdict(backend.name, refusal, chosen))
        return verdicts


tables: dict[str, Table[Any]] = {}


def undisturbed() -> bool:
    """Is nobody forcing backends or observing requests, so that an earlier choice may be used again?"""
    return not (_forced or _observers)


@contextmanager
def observing(see: Callable[[str, Any], None]) -> Iterator[None]:
    """Call see(operation, request) for every request that a table is asked to select for."""
    _observers.append(see)
    try:
        yield
    finally:
        _observers.remove(see)


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
    try:
        yield
    finally:
        for operation in added:
            del _forced[operation]
