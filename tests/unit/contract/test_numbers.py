"""The table of numeric fields: ranges, integers and order."""

import math
import sys
from dataclasses import fields
from typing import get_args, get_type_hints

import numpy as np
import pytest

from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.numbers import NUMBERS, check_number, check_order, make_integers


def test_table_has_every_number_that_a_client_chooses() -> None:
    names = {name for spec in LOSS_SPECS.values() for name in spec.config}
    for record in (requests.OptimizerParams, requests.SamplingParams, requests.LoraSpec):
        hints = get_type_hints(record)
        names |= {
            field.name for field in fields(record) if {int, float} & {hints[field.name], *get_args(hints[field.name])}
        }
    assert names - NUMBERS.keys() == {"stop_token_ids"}, "a tuple, whose numbers are stop_token"


@pytest.mark.parametrize("field", NUMBERS)
def test_bounds_are_accepted_and_numbers_beyond_them_refused(field: str) -> None:
    number = NUMBERS[field]
    good = {number.low, number.high, *number.also} - {number.low if number.excludes == "low" else None}
    for value in good - {number.high if number.excludes == "high" else None}:
        check_number(f"a.{field}", value)
    step = 1 if number.is_integer else sys.float_info.epsilon * number.high
    wrong = [math.nan, math.inf, -math.inf, number.high + step, number.low - 1 if number.low else -1e-9, 10**400]
    wrong += [1.5] if number.is_integer else []
    for value in wrong:
        if value not in number.also:
            with pytest.raises(UserError, match=rf"^a\.{field} .{{1,100}} must be "):
                check_number(f"a.{field}", value)


def test_backend_lowers_the_highest_number() -> None:
    check_number("rank", 8, high=8)
    with pytest.raises(UserError, match=r"^lora_config.rank 9 must be from 1 to 8$"):
        check_number("lora_config.rank", 9, high=8)
    with pytest.raises(UserError, match=r"^topk_prompt_logprobs 3 must be 0: this server does not offer it$"):
        check_number("topk_prompt_logprobs", 3, field="topk_logprobs", high=0)


def test_numbers_of_other_packages_must_be_finite() -> None:
    check_number("loss_fn_config.own", -1.0)
    with pytest.raises(UserError, match="own inf must be"):
        check_number("loss_fn_config.own", math.inf)


def test_order_of_equal_thresholds_is_right() -> None:
    check_order("", {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0})
    check_order("", {"clip_low_threshold": 1.0})


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_are_not_rounded(dtype: str) -> None:
    assert make_integers([1.0, -2.0], dtype, "a").dtype == np.dtype(dtype)
    for wrong in (1.7, math.nan, math.inf, 2.0**63, -1e300):
        with pytest.raises(UserError, match=r"^a\[1\] .* must be from"):
            make_integers([1.0, wrong], dtype, "a")
