"""Submissions: passes filled with recorded samples, and idempotency digests."""

import logging
import time

import numpy as np
import pytest

from skyrl_tx.contract import codec
from skyrl_tx.contract.requests import Datum, ModelPass, Rejected
from skyrl_tx.server.identity.authentication import Principal
from skyrl_tx.server.submission import submission
from skyrl_tx.server.submission.provenance import Provenance, Span
from skyrl_tx.server.submission.submission import Submission, add_recorded_samples
from skyrl_tx.store import recorded_logprobs, sessions
from skyrl_tx.store.database import Store

ANN, BOB = Principal(owner="ann"), Principal(owner="bob")
SENT = ModelPass(
    data=(Datum(tokens=np.arange(2, dtype=np.int32), loss_inputs={}),),
    loss="stable_reinforce",
    loss_config={},
    backward=True,
)


def make_submission(length: int = 2) -> Submission:
    return Submission.from_request(SENT, provenance=(Provenance((), (Span("sampled_tokens", "seq", 0, length),)),))


@pytest.fixture
def store(store: Store) -> Store:
    session_id = store.write(lambda tx: sessions.create(tx, owner="ann", now=1.0))
    drawn = {"seq": np.array([-0.5, -1.5], np.float32)}
    store.write(lambda tx: recorded_logprobs.record(tx, session_id, 3, drawn, time.time()))
    return store


def test_owner_gets_recorded_logprobs(store: Store) -> None:
    completed = add_recorded_samples(store, ANN, make_submission())
    assert set(completed.sequence_ids) == {"seq"}
    request = completed.request
    assert isinstance(request, ModelPass) and request.data[0].loss_inputs["logprobs"].tolist() == [-0.5, -1.5]
    assert codec.encode(request) == completed.body


def test_sequence_of_another_owner_does_not_exist(store: Store) -> None:
    completed = add_recorded_samples(store, BOB, make_submission())
    assert completed.sequence_ids == () and completed.kind == "model_pass"
    request = completed.request
    assert isinstance(request, Rejected) and request.backward
    assert request.message.startswith("data[0].loss_fn_input_spans[0]: no logprobs are recorded for sequence_id 'seq'")


def test_digest_covers_the_request_as_sent(store: Store) -> None:
    first = add_recorded_samples(store, ANN, make_submission())
    store.write(lambda tx: recorded_logprobs.expire(tx, time.time() + 1e6))
    late = add_recorded_samples(store, ANN, make_submission())
    assert late.body != first.body and late.digest == first.digest
    other = add_recorded_samples(store, ANN, make_submission(length=1))
    assert other.digest != first.digest, "other spans make another request"


def test_own_definition_of_a_loss_is_logged_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    submission._log_own_definition.cache_clear()
    with caplog.at_level(logging.INFO, logger="skyrl_tx.server.submission.submission"):
        add_recorded_samples(store, ANN, Submission.from_request(SENT))
        assert caplog.text == ""
        for _ in range(3):
            add_recorded_samples(store, ANN, make_submission())
    assert len(caplog.records) == 1 and "own definition" in caplog.text
