"""Guarantees of stored results."""

from tinker.lib.chunked_fwdbwd_helpers import REDUCE_MAP

from skyrl_tx.contract.results import REDUCTIONS


def test_metrics_are_folded_in_the_ways_that_the_sdk_knows():
    assert REDUCE_MAP.keys() == REDUCTIONS
