"""Passes completed with what the store has, for their owner, and told of once."""

import logging
import time

import numpy as np
import pytest

from skyrl_tx.api.principal import Principal
from skyrl_tx.api.recall import Recall
from skyrl_tx.api.submission import Encoded
from skyrl_tx.api.translate.provenance import Provenance, Span
from skyrl_tx.api.translate.translated import Translated
from skyrl_tx.contract.requests import Datum, ModelPass, Rejected
from skyrl_tx.store import sessions, stability
from skyrl_tx.store.database import Store

ANN, BOB = Principal(owner="ann"), Principal(owner="bob")
SENT = ModelPass(
    data=(Datum(tokens=np.arange(2, dtype=np.int32), loss_inputs={}),),
    loss="stable_reinforce",
    loss_config={},
    backward=True,
)


def sent(length: int = 2) -> Translated:
    return Translated(SENT, SENT, (Provenance((), (Span("sampled_tokens", "seq", 0, length),)),))


@pytest.fixture
def store(store: Store) -> Store:
    session_id = store.write(
        lambda tx: sessions.create(
            tx,
            owner="ann",
            tags=[],
            user_metadata=None,
            sdk_version=None,
            project_id=None,
            display_name=None,
            now=1.0,
        )
    )
    drawn = {"seq": np.array([-0.5, -1.5], np.float32)}
    store.write(lambda tx: stability.record(tx, session_id, 3, drawn, time.time()))
    return store


def test_the_owner_gets_what_was_recorded(store: Store) -> None:
    recalled = Recall().complete(store, ANN, sent())
    assert set(recalled.sequence_ids) == {"seq"}
    made = recalled.request.request
    assert isinstance(made, ModelPass) and made.data[0].loss_inputs["logprobs"].tolist() == [-0.5, -1.5]


def test_someone_elses_sequence_is_as_unknown_as_none(store: Store) -> None:
    recalled = Recall().complete(store, BOB, sent())
    assert recalled.sequence_ids == ()
    made = recalled.request.request
    assert isinstance(made, Rejected) and made.backward
    assert made.message.startswith("data[0].loss_fn_input_spans[0]: nothing is recorded of sequence_id 'seq'")


def test_a_repetition_is_one_whatever_is_recorded_by_then(store: Store) -> None:
    first = Encoded.of(Recall().complete(store, ANN, sent()).request)
    store.write(lambda tx: stability.expire(tx, time.time() + 1e6))
    late = Encoded.of(Recall().complete(store, ANN, sent()).request)
    assert late.body != first.body and late.identity == first.identity
    other = Encoded.of(Recall().complete(store, ANN, sent(length=1)).request)
    assert other.identity != first.identity, "other spans are another request"


def test_that_the_loss_is_our_own_is_said_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    recall = Recall()
    with caplog.at_level(logging.INFO, logger="skyrl_tx.api.recall"):
        recall.complete(store, ANN, Translated.exactly(SENT))
        assert caplog.text == ""
        for _ in range(3):
            recall.complete(store, ANN, sent())
    assert len(caplog.records) == 1 and "our own definition" in caplog.text
