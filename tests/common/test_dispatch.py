import pytest

from transformer_engine.common import dispatch
from transformer_engine.common.dispatch import Backend, Table, Unsupported, use_backend


@pytest.fixture
def table():
    """Doubles its request; `small` takes numbers below 10, `even` even ones, both refuse the rest."""
    small = Backend("small", lambda n: 2 * n, lambda n: None if n < 10 else f"n={n} >= 10")
    even = Backend("even", lambda n: n + n, lambda n: f"n={n} is odd" if n % 2 else None)
    yield Table("double", (small, even))
    del dispatch.tables["double"]


@pytest.mark.parametrize(("request_", "chosen"), [(2, "small"), (3, "small"), (12, "even")])
def test_the_first_backend_that_does_not_refuse_is_selected(table, request_, chosen):
    backend = table.select(request_)
    assert backend.name == chosen
    assert backend.run(request_) == 2 * request_


def test_when_all_refuse_the_error_carries_every_reason(table):
    with pytest.raises(Unsupported, match=r"small: n=13 >= 10; even: n=13 is odd"):
        table.select(13)


def test_a_forced_backend_is_selected_before_the_order(table):
    with use_backend(double="even"):
        assert table.select(2).name == "even"
    assert table.select(2).name == "small"


def test_a_forced_backend_that_refuses_raises_its_reason_and_falls_back_to_nothing(table):
    with use_backend(double="small"), pytest.raises(Unsupported, match=r"'small'.*n=12 >= 10.*use_backend"):
        table.select(12)


def test_the_outermost_choice_wins(table):
    with use_backend(double="even"):
        with use_backend(double="small"):
            assert table.select(2).name == "even"
        assert table.select(2).name == "even"
    assert table.select(2).name == "small"


def test_a_choice_ends_with_an_exception(table):
    with pytest.raises(KeyError), use_backend(double="even"):
        raise KeyError
    assert table.select(2).name == "small"


@pytest.mark.parametrize("request_", [2, 3, 12, 13])
def test_explain_marks_the_backend_that_select_returns(table, request_):
    verdicts = table.explain(request_)
    assert [v.backend for v in verdicts] == ["small", "even"]
    chosen = [v.backend for v in verdicts if v.chosen]
    if chosen:
        assert chosen == [table.select(request_).name]
        assert all((v.refusal is None) == v.chosen for v in verdicts)
    else:
        assert all(v.refusal for v in verdicts)
        with pytest.raises(Unsupported):
            table.select(request_)


def test_explain_says_that_a_choice_is_in_force(table):
    with use_backend(double="even"):
        small, even = table.explain(2)
    assert not small.chosen
    assert "use_backend(double='even')" in small.refusal
    assert even.chosen


def test_unknown_operations_and_backends_are_refused_with_the_names_there_are(table):
    with pytest.raises(ValueError, match=r"no operation 'treble'.*double"), use_backend(treble="small"):
        pass
    with pytest.raises(ValueError, match=r"no backend 'odd'.*small, even"), use_backend(double="odd"):
        pass
    assert table.select(2).name == "small"


def test_a_choice_is_described_once_for_equal_keys(table):
    described = []

    def describe(n):
        described.append(n)
        return n

    assert [table.choice("two", lambda: describe(2)).name for _ in range(3)] == ["small"] * 3
    assert table.choice("twelve", lambda: describe(12)).name == "even"
    assert described == [2, 12]


def test_a_remembered_choice_gives_way_to_a_forced_one_and_comes_back(table):
    assert table.choice("two", lambda: 2).name == "small"
    with use_backend(double="even"):
        assert table.choice("two", lambda: 2).name == "even"
    assert table.choice("two", lambda: 2).name == "small"


def test_observers_see_choices_that_were_remembered(table):
    table.choice("two", lambda: 2)
    seen = []
    with dispatch.observing(lambda operation, request: seen.append((operation, request))):
        table.choice("two", lambda: 2)
    assert seen == [("double", 2)]


def test_a_prospect_is_the_choice_and_observers_do_not_hear_of_it(table):
    seen = []
    with dispatch.observing(lambda operation, request: seen.append((operation, request))):
        assert table.prospect("two", lambda: 2).name == "small"
        assert seen == []
        table.report(lambda: 3)
    assert seen == [("double", 3)]
    assert table.prospect("two", lambda: 2) is table.choice("two", lambda: 12)
    with use_backend(double="even"):
        assert table.prospect("two", lambda: 2).name == "even"


def test_refusals_are_not_remembered(table):
    for _ in range(2):
        with pytest.raises(Unsupported):
            table.choice("thirteen", lambda: 13)
    assert not table._chosen


def test_keys_without_end_do_not_fill_the_memory(table, monkeypatch):
    monkeypatch.setattr(table._chosen, "most", 4)
    for n in range(9):
        table.choice(n, lambda: 2)
    assert len(table._chosen) <= 4
