import copy

from transformer_engine.common.bounded import Bounded


def test_it_holds_what_was_kept_and_returns_it():
    known: Bounded[str, int] = Bounded(2)
    assert [known.keep("a", 1), known.keep("b", 2)] == [1, 2]
    assert known == {"a": 1, "b": 2}


def test_it_is_emptied_rather_than_grow_beyond_its_bound():
    known: Bounded[int, int] = Bounded(3)
    for n in range(10):
        known.keep(n, n)
        assert known[n] == n and len(known) <= 3


def test_a_copy_has_the_entries_and_the_bound():
    known: Bounded[str, int] = Bounded(2)
    known.keep("a", 1)
    twin = copy.deepcopy(known)
    twin.keep("b", 2)
    assert (twin, twin.most, known) == ({"a": 1, "b": 2}, 2, {"a": 1})
