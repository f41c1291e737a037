from typing import NamedTuple

import pytest

from transformer_engine.common import dispatch
from transformer_engine.common.dispatch import (
    Backend,
    Operator,
    PlanFailure,
    Table,
    Unsupported,
    use_backend,
)


@pytest.fixture
def table():
    """Doubles its request; `small` supports numbers below 10, `even` even ones, neither supports the rest."""
    small = Backend(
        "small",
        unsupported_reason=lambda n: None if n < 10 else f"n={n} >= 10",
        bind=lambda n: lambda: 2 * n,
    )
    even = Backend(
        "even",
        unsupported_reason=lambda n: f"n={n} is odd" if n % 2 else None,
        bind=lambda n: lambda: n + n,
    )
    yield Table("double", (small, even))
    del dispatch.tables["double"]


@pytest.mark.parametrize(("request_", "chosen"), [(2, "small"), (3, "small"), (12, "even")])
def test_the_first_backend_that_does_not_reject_is_selected(table, request_, chosen):
    assert table.chosen(request_) == chosen
    assert table.bind(request_)() == 2 * request_


def test_when_all_reject_the_error_carries_every_reason(table):
    with pytest.raises(Unsupported, match=r"small: n=13 >= 10; even: n=13 is odd"):
        table.bind(13)


def test_a_forced_backend_is_selected_before_the_order(table):
    with use_backend(double="even"):
        assert table.chosen(2) == "even"
    assert table.chosen(2) == "small"


def test_a_forced_backend_that_rejects_raises_its_reason_and_falls_back_to_nothing(table):
    with (
        use_backend(double="small"),
        pytest.raises(Unsupported, match=r"'small'.*n=12 >= 10.*use_backend"),
    ):
        table.bind(12)


def test_the_outermost_choice_wins(table):
    with use_backend(double="even"):
        with use_backend(double="small"):
            assert table.chosen(2) == "even"
        assert table.chosen(2) == "even"
    assert table.chosen(2) == "small"


def test_a_choice_ends_with_an_exception(table):
    with pytest.raises(KeyError), use_backend(double="even"):
        raise KeyError
    assert table.chosen(2) == "small"


@pytest.mark.parametrize("request_", [2, 3, 12, 13])
def test_explain_marks_the_backend_that_select_returns(table, request_):
    verdicts = table.explain(request_)
    assert [v.backend for v in verdicts] == ["small", "even"]
    chosen = [v.backend for v in verdicts if v.chosen]
    if chosen:
        assert chosen == [table.chosen(request_)]
        assert all((v.reason is None) == v.chosen for v in verdicts)
    else:
        assert all(v.reason for v in verdicts)
        with pytest.raises(Unsupported):
            table.bind(request_)


def test_explain_reports_a_forced_choice(table):
    with use_backend(double="even"):
        small, even = table.explain(2)
    assert not small.chosen
    assert "use_backend(double='even')" in small.reason
    assert even.chosen


def test_unknown_operations_and_backends_are_rejected_with_the_names_there_are(table):
    with (
        pytest.raises(ValueError, match=r"unknown operation 'treble'.*double"),
        use_backend(treble="small"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"no backend 'odd'.*small, even"),
        use_backend(double="odd"),
    ):
        pass
    assert table.chosen(2) == "small"


class Doubling(NamedTuple):
    """A request: the number to double, and the required features."""

    n: int
    features: frozenset[str] = frozenset()


class Doubler:
    """Counts the uses of its backends: `small` adds, `even` is slow to plan and has no plan for 40."""

    def __init__(self):
        self.planned: list[tuple[str, int]] = []
        self.described: list[int] = []
        self.table: Table[Doubling] = Table(
            "doubled",
            (
                Backend(
                    "small",
                    takes=frozenset({"negated"}),
                    unsupported_reason=lambda request: (
                        None if request.n < 10 else f"n={request.n} >= 10"
                    ),
                    bind=self._small,
                ),
                Backend(
                    "even",
                    unsupported_reason=lambda request: (
                        f"n={request.n} is odd" if request.n % 2 else None
                    ),
                    bind=self._even,
                    opaque=True,
                ),
            ),
            describe=self._describe,
            operator=lambda request: Operator(lambda x: ("operator", request.n), lambda x: None),
        )

    def _describe(self, n, features=frozenset()):
        self.described.append(n)
        return Doubling(n, features)

    def _small(self, request):
        self.planned.append(("small", request.n))
        sign = -1 if "negated" in request.features else 1
        return lambda x: sign * 2 * x

    def _even(self, request):
        self.planned.append(("even", request.n))
        return PlanFailure("40 is too much of a plan") if request.n == 40 else lambda x: x + x


@pytest.fixture
def doubler():
    yield Doubler()
    del dispatch.tables["doubled"]


def test_a_request_is_described_and_planned_once(doubler):
    assert [doubler.table.bound((12,))(12) for _ in range(3)] == [24] * 3
    assert doubler.planned == [("even", 12)]
    assert doubler.described == [12]


def test_a_feature_that_a_backend_does_not_declare_is_rejected(doubler):
    negated, squared = frozenset({"negated"}), frozenset({"squared"})
    assert doubler.table.bound((2, negated))(2) == -4
    with pytest.raises(Unsupported, match=r"small: n=12 >= 10; even: it does not support negated"):
        doubler.table.bound((12, negated))
    with pytest.raises(
        Unsupported, match=r"small: it does not support squared; even: it does not support squared"
    ):
        doubler.table.bound((2, squared))


def test_a_plan_that_fails_is_a_rejection_with_its_own_reason(doubler):
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"small: n=40 >= 10; even: 40 is too much of a plan"):
            doubler.table.bound((40,))
    assert doubler.planned == [("even", 40)]
    assert doubler.table.explain(Doubling(40))[1].reason == "40 is too much of a plan"


def test_a_forced_backend_whose_plan_fails_raises_that_reason(doubler):
    with (
        use_backend(doubled="even"),
        pytest.raises(Unsupported, match=r"'even'.*too much of a plan"),
    ):
        doubler.table.bound((40,))


def test_explain_plans_nothing(doubler):
    verdicts = doubler.table.explain(Doubling(12))
    assert [verdict.chosen for verdict in verdicts] == [False, True]
    assert doubler.table.name_of((12,)) == "even"
    assert doubler.planned == []


def test_forcing_reaches_a_bound_request_and_ends_with_its_block(doubler):
    assert doubler.table.bound((2,))(2) == 4
    with use_backend(doubled="even"):
        for _ in range(2):
            assert doubler.table.bound((2,))(2) == 4
            assert doubler.table.name_of((2,)) == "even"
    assert doubler.table.name_of((2,)) == "small"
    doubler.table.bound((2,))
    assert doubler.planned == [
        ("small", 2),
        ("even", 2),
    ]  # a plan outlives the block it was made in


def test_observers_are_called_for_every_bound_request(doubler):
    doubler.table.bound((2,))
    records = []
    with dispatch.observing(lambda operation, request: records.append((operation, request.n))):
        doubler.table.bound((2,))
        doubler.table.bound((2,))
        doubler.table.name_of((2,))
    assert records == [("doubled", 2)] * 2
    assert doubler.planned == [("small", 2)]


def test_a_binder_replaces_every_backend_until_its_block_ends(doubler):
    with dispatch.binding(lambda table, request: lambda x: (table.operation, request.n)):
        assert doubler.table.bound((2,))(2) == ("doubled", 2)
    assert doubler.table.bound((2,))(2) == 4


def test_a_tracing_compiler_sees_an_operator_in_place_of_an_opaque_backend(doubler, monkeypatch):
    monkeypatch.setattr(dispatch, "_tracing", lambda: True)
    assert doubler.table.bound((12,))(12) == ("operator", 12)
    assert doubler.planned == []
    assert doubler.table.bound((2,))(2) == 4
    assert not doubler.table._bound and not doubler.table._plans


def test_requests_without_end_do_not_fill_the_memory(doubler, monkeypatch):
    for memory in (doubler.table._bound, doubler.table._plans, doubler.table._names):
        monkeypatch.setattr(memory, "most", 4)
    for n in range(-9, 9):
        doubler.table.bound((n,))
        doubler.table.name_of((n,))
    assert all(
        len(m) <= 4 for m in (doubler.table._bound, doubler.table._plans, doubler.table._names)
    )


def test_a_table_of_ways_to_go_decides_and_is_observed():
    left = Backend(
        "left",
        takes=frozenset({"rain"}),
        unsupported_reason=lambda r: None if r.n < 0 else f"n={r.n} >= 0",
    )
    table = Table("ways", (left, Backend("right", takes=frozenset({"rain"}))), describe=Doubling)
    try:
        assert [table.choose((n, ("rain",))) for n in (-1, 1, -1)] == ["left", "right", "left"]
        records = []
        with (
            dispatch.observing(lambda operation, request: records.append(request.n)),
            use_backend(ways="right"),
        ):
            assert table.choose((-1, ())) == "right"
        assert records == [-1]
        with pytest.raises(Unsupported, match="right: it does not support snow"):
            table.choose((1, ("snow",)))
    finally:
        del dispatch.tables["ways"]


@pytest.fixture
def demanded(monkeypatch):
    """Patch the switch for deterministic results."""
    switch = {"on": False}
    monkeypatch.setattr(dispatch, "_demands_repeatable", lambda: switch["on"])
    return switch


def test_a_backend_whose_results_vary_rejects_where_they_must_not(demanded):
    fast = Backend("fast", bind=lambda n: lambda: "fast", varies="it adds in the order of arrival")
    slow = Backend("slow", bind=lambda n: lambda: "slow")
    table = Table("sum", (fast, slow), describe=lambda n: n)
    try:
        assert [table.bound((1,))(), table.name_of((1,)), table.choose((1,))] == ["fast"] * 3
        demanded["on"] = True
        assert [table.bound((1,))(), table.name_of((1,)), table.choose((1,))] == ["slow"] * 3
        assert (
            table.explain(1)[0].reason
            == "its results differ from run to run, it adds in the order of arrival"
        )
        with (
            use_backend(sum="fast"),
            pytest.raises(Unsupported, match="adds in the order of arrival"),
        ):
            table.bind(1)
        demanded["on"] = False
        assert table.bound((1,))() == "fast"
    finally:
        del dispatch.tables["sum"]
