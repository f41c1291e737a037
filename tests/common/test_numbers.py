"""Numbers and flags are converted from every form that callers pass."""

import re
import warnings

import numpy as np
import pytest
import torch

from transformer_engine.common.checks import switch
from transformer_engine.common.numbers import (
    parse_bool,
    parse_float,
    parse_int,
    to_bool,
    to_float,
    to_int,
)
from transformer_engine.common.warning import forget_issued

TWO = [
    2,
    2.0,
    np.int64(2),
    np.float32(2),
    np.array(2),
    np.array([2]),
    torch.tensor(2),
    torch.tensor(2.0),
    torch.tensor([2]),
]
TRUE = [
    True,
    1,
    2,
    0.5,
    "yes",
    [0],
    np.bool_(True),
    np.int64(3),
    torch.tensor(True),
    torch.tensor([2.0]),
]
FALSE = [False, None, 0, 0.0, "", [], np.bool_(False), torch.tensor(False), torch.tensor(0)]
NEITHER = [torch.float32, len, int, object(), torch.nn.Identity(), torch.zeros(2), torch.zeros(0)]


@pytest.mark.parametrize("value", TWO, ids=repr)
@pytest.mark.parametrize("convert", [to_int, to_float, parse_int, parse_float])
def test_a_number_has_the_same_value_in_every_form(convert, value):
    result = convert("size", value)
    assert result == 2
    assert type(result) is (int if convert in (to_int, parse_int) else float)


def test_a_bool_counts_as_a_number():
    assert (to_int("size", True), to_int("size", np.bool_(False)), to_float("size", True)) == (
        1,
        0,
        1.0,
    )


@pytest.mark.parametrize(
    "value", [1.5, float("nan"), float("inf"), "2", None, [2], torch.zeros(2), len], ids=repr
)
def test_other_values_are_not_whole_numbers(value):
    with pytest.raises(
        TypeError, match=r"size=.* must be a whole number; give an int of at least 1"
    ):
        to_int("size", value, 1)


@pytest.mark.parametrize("value", [0, 0.0, torch.tensor(0), False], ids=repr)
def test_a_whole_number_below_the_limit_is_an_error(value):
    with pytest.raises(ValueError, match="size=0 is below 1; give a whole number of at least 1"):
        to_int("size", value, 1)


@pytest.mark.parametrize("value", TRUE, ids=repr)
def test_flags_are_true_where_their_truth_value_is(value):
    assert to_bool("enabled", value) is True
    switch("enabled", value)


@pytest.mark.parametrize("value", FALSE, ids=repr)
def test_flags_are_false_where_their_truth_value_is(value):
    assert to_bool("enabled", value) is False
    switch("enabled", value)


@pytest.mark.parametrize("value", NEITHER, ids=lambda value: type(value).__name__)
def test_objects_without_a_truth_value_are_not_flags(value):
    for check in (to_bool, switch):
        with pytest.raises(TypeError, match=r"enabled=.* is neither True nor False; give a bool"):
            check("enabled", value)


def test_text_that_spells_false_counts_as_true_and_warns_once():
    forget_issued()
    with pytest.warns(
        UserWarning, match="enabled='false' is a non-empty string and counts as True"
    ):
        assert to_bool("enabled", "false") is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_bool("enabled", "false") is True


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_int, "1024", 1024),
        (parse_int, " -3 ", -3),
        (parse_int, "1.0", 1),
        (parse_int, b"7", 7),
        (parse_float, "1e-4", 1e-4),
        (parse_float, "2", 2.0),
        (parse_bool, "true", True),
        (parse_bool, "ON", True),
        (parse_bool, "1", True),
        (parse_bool, "No", False),
        (parse_bool, b"0", False),
        (parse_bool, 1.0, True),
        (parse_bool, torch.tensor(0), False),
        (parse_bool, None, False),
    ],
)
def test_fields_of_recipes_are_read_from_text(parse, text, value):
    result = parse("margin", text)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_int, "1.5", "margin=1.5 must be a whole number"),
        (parse_int, "many", "margin='many' must be a whole number"),
        (parse_float, "", "margin='' must be a number"),
        (parse_bool, "maybe", "margin='maybe' is neither True nor False"),
        (parse_bool, 2, "margin=2 is neither True nor False"),
        (parse_bool, "", "margin='' is neither True nor False"),
    ],
)
def test_other_text_is_an_error(parse, text, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        parse("margin", text)


@pytest.mark.parametrize("convert", [to_int, to_float, to_bool])
def test_symbolic_numbers_stay_symbolic_in_a_compiled_function(convert):
    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def double(x):
        return x * convert("rows", x.shape[0])

    for rows in (3, 5):
        expected = torch.ones(rows) * convert("rows", rows)
        torch.testing.assert_close(double(torch.ones(rows)), expected)
