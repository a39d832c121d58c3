"""Every request type in a model's queue can be executed and replayed."""

from typing import get_args

import pytest

from skyrl_tx.contract import codec, requests
from skyrl_tx.engine.handlers import KINDS

NOT_IN_A_QUEUE = {requests.Sample, requests.CreateCustomLoss}
"""Samples share one queue for all models, and the API process creates custom losses."""


def test_every_request_to_a_model_has_an_entry() -> None:
    assert KINDS.keys() == set(get_args(requests.Request)) - NOT_IN_A_QUEUE


@pytest.mark.parametrize("request_class", KINDS, ids=lambda request_class: request_class.__name__)
def test_a_request_has_a_handler_and_a_replay(request_class: type) -> None:
    kind = KINDS[request_class]
    assert kind.execute is not None or request_class is requests.ModelPass
    assert kind.replay is not None or request_class is requests.UnloadModel


def test_barriers_are_the_requests_that_follow_acknowledged_ones() -> None:
    assert {"optim_step", "save_weights", "load_weights", "unload_model"} == codec.BARRIER_KINDS
