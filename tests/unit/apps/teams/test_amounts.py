"""Numbers with decimal units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.teams.quotas import format_amount, parse_amount
from skyrl_tx.contract.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("17", 17), ("200M", 200_000_000), ("1.5M", 1_500_000), ("5G", 5 * 10**9), ("2K", 2000), ("3k", 3000)],
)
def test_units_are_decimal(text: str, value: int) -> None:
    assert parse_amount(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1e9", "200 M", "5GB", "0.0001k", "9999999T", "½", "M"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"value .*: must be a whole number"):
        parse_amount(text)


@given(st.integers(0, 10**18))
def test_the_text_of_a_number_has_its_value(value: int) -> None:
    assert parse_amount(format_amount(value).replace("_", "")) == value


def test_short_texts() -> None:
    assert [format_amount(value) for value in (999, 1000, 200_000_000, 1_500_000, 200_001)] == [
        *("999", "1k", "200M", "1.5M"),
        "200.001k",
    ]
