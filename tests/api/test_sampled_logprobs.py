"""Tempered or raw log-probabilities of samples: the setting, sessions, and importance sampling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tinker
from sqlmodel import col, select
from tinker import types

from skyrl_tx.contract import codec
from skyrl_tx.contract.requests import Sample, SamplingParams
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store.tables import RequestRow
from tests.support.live_api import Server, live_api
from tests.support.live_stack import PUBLIC_NAME, LiveStack, both_backends

Kind = Literal["tempered", "raw"]
KEY = "skyrl_tx.sampled_logprobs"
PROMPT = [5, 6, 7, 300]
NUM_TOKENS = 12


@both_backends
@pytest.mark.parametrize("kind", ["tempered", "raw"])
def test_ratios_of_importance_sampling_at_the_first_step(stack: LiveStack, kind: Kind) -> None:
    """With raw log-probabilities the ratios are 1, because the weights have not changed."""
    with tinker.ServiceClient(base_url=stack.url, user_metadata={KEY: kind}) as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4, seed=1).result()
        sampler = training.save_weights_and_get_sampling_client().result()
        own, warm = (_sample(sampler, temperature) for temperature in (1.0, 0.7))

        # Compare the model's own log-probabilities with the sample's.
        prompt = types.ModelInput.from_ints([*PROMPT, *warm.tokens])
        model = np.array(sampler.compute_logprobs(prompt).result()[len(PROMPT) :], np.float64)
        given = np.array(warm.logprobs, np.float64)
        if kind == "raw":
            np.testing.assert_allclose(given, model, rtol=0, atol=1e-5)
        else:
            assert np.abs(given - model).max() > 0.05
        at_one = types.ModelInput.from_ints([*PROMPT, *own.tokens])
        own_model = sampler.compute_logprobs(at_one).result()[len(PROMPT) :]
        np.testing.assert_allclose(own.logprobs, own_model, rtol=0, atol=1e-5)

        # The loss is the sum of ratio * advantage, with its sign changed.
        advantages = np.linspace(-1, 2, NUM_TOKENS)
        passed = training.forward([_make_datum(warm, advantages)], "importance_sampling").result()
        ratio = np.exp(model - given)
        assert passed.metrics["loss:sum"] == pytest.approx(-(ratio * advantages).sum(), abs=1e-4)
        if kind == "raw":
            np.testing.assert_allclose(ratio, 1, rtol=0, atol=1e-5)
            assert passed.metrics["loss:sum"] == pytest.approx(-advantages.sum(), abs=1e-4)


def _sample(sampler: tinker.SamplingClient, temperature: float) -> types.SampledSequence:
    params = types.SamplingParams(max_tokens=NUM_TOKENS, stop=[], seed=11, temperature=temperature)
    (sequence,) = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences
    return sequence


def _make_datum(sequence: types.SampledSequence, advantages: np.ndarray) -> types.Datum:
    tokens, before = [*PROMPT, *sequence.tokens], np.zeros(len(PROMPT) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], np.int64),
            "logprobs": np.concatenate([before, sequence.logprobs]).astype(np.float32),
            "advantages": np.concatenate([before, advantages]).astype(np.float32),
        },
    )


@pytest.mark.parametrize(
    ("setting", "metadata", "expected"),
    [
        ("tempered", {}, "tempered"),
        ("raw", {}, "raw"),
        ("raw", {KEY: "tempered"}, "tempered"),
        ("tempered", {KEY: "raw"}, "raw"),
    ],
)
def test_the_session_or_else_the_setting_decides(
    tmp_path: Path, setting: Kind, metadata: Mapping[str, str], expected: Kind
) -> None:
    with live_api(_make_settings(tmp_path, setting)) as server:
        _ask(server, _open_session(server, metadata), 0)
        assert [params.logprobs_kind for params in _read_params(server)] == [expected]


def test_a_stored_sample_keeps_its_kind_when_the_setting_changes(tmp_path: Path) -> None:
    """A retry is recognized, and a replay reports the same numbers."""
    with live_api(_make_settings(tmp_path, "raw")) as server:
        session = _open_session(server, {})
        first = _ask(server, session, 0)
    with live_api(_make_settings(tmp_path, "tempered")) as server:
        assert _ask(server, session, 0) == first
        assert _ask(server, session, 1) != first
        assert [params.logprobs_kind for params in _read_params(server)] == ["raw", "tempered"]


@pytest.mark.parametrize("value", ["no", "", "Raw", "true"])
def test_another_value_in_the_metadata_is_refused(tmp_path: Path, value: str) -> None:
    with live_api(_make_settings(tmp_path, "tempered")) as server:
        answer = server.post("create_session", tags=[], user_metadata={KEY: value})
        assert answer.status_code == 400
        assert f"{KEY} must be 'tempered' or 'raw'" in answer.json()["detail"]


def test_a_sample_of_an_earlier_release_is_tempered_and_keeps_its_bytes() -> None:
    params = SamplingParams(seed=1, temperature=0.5)
    sample = Sample(prompt=np.array([1], np.int32), num_samples=1, sampler=None, params=params)
    assert b"raw_logprobs" not in codec.encode(sample)
    restored = codec.decode(codec.encode(sample))
    assert isinstance(restored, Sample) and restored.params.logprobs_kind == "tempered"


def _make_settings(directory: Path, kind: Kind) -> ApiSettings:
    return ApiSettings(port=0, data_dir=directory, base_model="a", sampled_logprobs=kind)


def _open_session(server: Server, metadata: Mapping[str, str]) -> str:
    """Create a sampling session on the base model, and return its id."""
    session_id = server.post("create_session", tags=[], user_metadata=dict(metadata)).json()["session_id"]
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "a"}
    return str(server.post("create_sampling_session", **body).json()["sampling_session_id"])


def _ask(server: Server, sampling_session_id: str, seq_id: int, temperature: float = 0.7) -> str:
    """Send a sample and return the id of its request."""
    body: dict[str, Any] = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 4, "temperature": temperature},
    }
    answer = server.post("asample", sampling_session_id=sampling_session_id, seq_id=seq_id, num_samples=1, **body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


def _read_params(server: Server) -> list[SamplingParams]:
    """Return the parameters of all stored samples, oldest first."""
    rows = server.store.read(lambda tx: list(tx.exec(select(RequestRow).order_by(col(RequestRow.position)))))
    requests = [codec.decode(row.body) for row in rows]
    return [request.params for request in requests if isinstance(request, Sample)]
