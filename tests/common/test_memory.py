"""Memory: a cached value is a function of its key only, and the number of entries is bounded."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest

from transformer_engine.common import env
from transformer_engine.common.memory import Memory

built: list[object] = []


def double(key):
    built.append(key)
    return 2 * key


def plus(offset, key):
    return offset + key


def fails(key):
    built.append(key)
    raise ValueError(key)


@pytest.fixture(autouse=True)
def nothing_built():
    built.clear()


def test_a_value_is_built_once():
    memory = Memory(double, 8)
    assert [memory[3], memory[3], memory[4]] == [6, 6, 8]
    assert built == [3, 4]


def test_it_holds_so_many_at_most():
    memory = Memory(double, 3)
    for key in range(20):
        assert memory[key] == 2 * key
        assert len(memory) <= 3


def test_fixed_arguments_come_before_the_key():
    assert Memory(plus, 8, 10)[5] == 15


def test_unhashable_arguments_cannot_be_fixed():
    with pytest.raises(TypeError, match="unhashable"):
        Memory(plus, 8, [10])


def test_an_error_is_not_cached():
    memory = Memory(fails, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="3"):
            memory[3]
    assert built == [3, 3] and not memory


def test_a_build_that_could_read_more_than_its_key_is_rejected():
    offset = 10

    class Owner:
        def build(self, key):
            return key

    def set_default(key, more=10):
        return key + more

    for build in (lambda key: key + offset, Owner().build, partial(plus, 10), Owner, set_default):
        with pytest.raises(TypeError, match="is not a plain function"):
            Memory(build, 8)


@pytest.mark.parametrize(
    "repeated", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_begins_empty(repeated):
    memory = Memory(plus, 8, 10)
    assert memory[1] == 11
    other = repeated(memory)
    assert type(other) is Memory and not other and other.most == 8
    assert other[1] == 11


def test_the_generation_follows_every_variable_that_is_read(monkeypatch):
    read = [
        variable
        for variable in env.VARIABLES.values()
        if not variable.meaning.startswith("Accepted")
        and variable.name != "TE_FAST"  # it is read once
    ]
    for variable in read:
        monkeypatch.delenv(variable.name, raising=False)
    records = {env.generation()}
    for variable in read:
        for text in ("0", "1"):
            monkeypatch.setenv(variable.name, text)
            records.add(env.generation())
            assert env.generation() in records, "the same number until the next change"
        monkeypatch.delenv(variable.name)
        records.add(env.generation())
    assert len(records) == 1 + 3 * len(read)


def test_the_generation_is_not_moved_by_other_peoples_variables(monkeypatch):
    before = env.generation()
    monkeypatch.setenv("SOMEBODY_ELSES_VARIABLE", "1")
    monkeypatch.setenv("NVTE_PRINT_RANK", "1")
    assert env.generation() == before
