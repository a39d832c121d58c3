"""From sampling to the gradient of stable_reinforce, with the unmodified SDK and the fake backend."""

import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from numpy.typing import NDArray
from sqlmodel import select
from tinker import types

from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import recorded_logprobs
from skyrl_tx.store.tables import StabilityRow
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.live_api import Server, live_api
from tests.support.live_engine import live_engine

BASE_MODEL = "Qwen/Qwen3-8B"
ENVIRONMENT = [9, 8]
Spans = list[types.PromptProvenanceSpan | types.SampledProvenanceSpan]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data_dir: Path = tmp_path_factory.mktemp("data")
    with (
        live_api(ApiSettings(port=0, data_dir=data_dir, base_model=BASE_MODEL)) as server,
        live_engine(EngineSettings(data_dir=data_dir, base_model=BASE_MODEL), FakeBackend(BASE_MODEL, FakeConfig())),
    ):
        yield server
    gc.collect()  # collect the SDK's unclosed objects here, where their warnings are ignored


@pytest.fixture
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url) as client:
        yield client


@dataclass(frozen=True, slots=True)
class Episode:
    """Two turns as one sequence with provenance spans, in the cookbook's layout."""

    tokens: list[int]
    q: NDArray[np.float32]
    is_sampled: NDArray[np.float32]
    spans: Spans

    def datum(self, advantage: float) -> types.Datum:
        """Return a datum for stable_reinforce. The loss ignores its `logprobs`."""
        first = self.spans[0]
        targets: Spans = [
            types.PromptProvenanceSpan(sequence_id=first.sequence_id, offset=1, length=first.length - 1),
            *self.spans[1:],
        ]

        last = self.spans[-1]
        tokens: Spans = [
            *self.spans[:-1],
            types.SampledProvenanceSpan(sequence_id=last.sequence_id, length=last.length - 1),
        ]
        inputs = {"advantages": advantage * self.is_sampled, "logprobs": np.full_like(self.q, -7.0)}
        return self._datum(inputs).with_provenance(model_input=tokens, loss_fn_inputs=targets)

    def make_weighted_datum(self, weights: NDArray[np.float32]) -> types.Datum:
        """Return a datum for cross_entropy."""
        return self._datum({"weights": weights})

    def _datum(self, inputs: dict[str, NDArray[np.float32]]) -> types.Datum:
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={"target_tokens": np.array(self.tokens[1:], np.int64), **inputs},
        )


def play(sampler: tinker.SamplingClient, seed: int) -> Episode:
    tokens: list[int] = []
    q: list[float] = []
    is_sampled: list[float] = []
    spans: Spans = []

    for observed in ([5, 6, 7], ENVIRONMENT):
        begin = len(tokens)
        tokens += observed
        params = types.SamplingParams(max_tokens=4, seed=seed, stop=[])
        (drawn,) = sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result().sequences
        assert drawn.logprobs is not None and len(drawn.tokens) == 4
        q += [0.0] * len(observed) + drawn.logprobs
        is_sampled += [0.0] * len(observed) + [1.0] * 4
        spans.append(types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, offset=begin, length=len(observed)))
        spans.append(types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, length=4))
        tokens += drawn.tokens

    return Episode(tokens, np.array(q[1:], np.float32), np.array(is_sampled[1:], np.float32), spans)


def create_trained_client(
    service: tinker.ServiceClient, episodes: list[Episode] | None = None
) -> tinker.TrainingClient:
    """Return a model trained on the episodes, so that some importance ratios exceed 2."""
    client = service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()
    for episode in episodes or []:
        client.forward_backward([episode.make_weighted_datum(episode.is_sampled)], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.2)).result()
    return client


@pytest.fixture
def episodes(service: tinker.ServiceClient) -> list[Episode]:
    sampler = create_trained_client(service).save_weights_and_get_sampling_client(record_stability_info=True).result()
    return [play(sampler, seed) for seed in (1, 2)]


def step(client: tinker.TrainingClient) -> float:
    return client.optim_step(types.AdamParams(learning_rate=0.01)).result().metrics["unclipped_grad_l2:mean"]


def get_logprobs(client: tinker.TrainingClient, episodes: list[Episode]) -> list[NDArray[np.float32]]:
    outputs = client.forward(
        [episode.make_weighted_datum(episode.is_sampled) for episode in episodes], "cross_entropy"
    ).result()
    return [np.array(output["logprobs"].tolist()) for output in outputs.loss_fn_outputs]


def test_gradient_has_truncated_importance_weights(service: tinker.ServiceClient, episodes: list[Episode]) -> None:
    advantages = (1.5, -0.5)
    model, by_hand = (create_trained_client(service, episodes[:1] * 6) for _ in range(2))
    data = [episode.datum(advantage) for episode, advantage in zip(episodes, advantages, strict=True)]
    passed = model.forward_backward(data, "stable_reinforce").result()

    logprobs = get_logprobs(by_hand, episodes)
    ratios = [np.exp(now - episode.q)[episode.is_sampled == 1] for now, episode in zip(logprobs, episodes, strict=True)]
    assert (np.concatenate(ratios) > 2).any() and (np.concatenate(ratios) < 2).any()

    weights = [
        episode.is_sampled * advantage * np.minimum(np.exp(now - episode.q), 2.0)
        for now, episode, advantage in zip(logprobs, episodes, advantages, strict=True)
    ]
    weighted = [episode.make_weighted_datum(weight) for episode, weight in zip(episodes, weights, strict=True)]
    expected = by_hand.forward_backward(weighted, "cross_entropy").result()
    assert passed.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert passed.metrics["clip_fraction:mean"] == pytest.approx((np.concatenate(ratios) > 2).mean())

    norm = step(model)
    assert norm > 0.1 and norm == pytest.approx(step(by_hand), rel=1e-5)
    for ours, theirs in zip(get_logprobs(model, episodes), get_logprobs(by_hand, episodes), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_penalty_pulls_towards_recorded_logprobs(service: tinker.ServiceClient, episodes: list[Episode]) -> None:
    model = create_trained_client(service, episodes[:1] * 6)
    data = [episode.datum(0.0) for episode in episodes]
    passed = model.forward(data, "stable_reinforce", {"kl_coeff": 0.3}).result()
    gaps = [
        (now - episode.q)[episode.is_sampled == 1]
        for now, episode in zip(get_logprobs(model, episodes), episodes, strict=True)
    ]
    assert passed.metrics["loss:sum"] == pytest.approx(0.15 * (np.concatenate(gaps) ** 2).sum(), rel=1e-5)


def test_wrong_span_fails_the_future(service: tinker.ServiceClient, episodes: list[Episode]) -> None:
    model = create_trained_client(service)
    whole = episodes[0].datum(1.0)
    unknown = [types.SampledProvenanceSpan(sequence_id="seq-unknown", length=whole.model_input.length)]
    assert whole.loss_fn_input_spans is not None

    for datum, config, message in (
        (
            whole.with_provenance(unknown, unknown),
            None,
            "model_input_spans.0.: no logprobs are recorded.*'seq-unknown'",
        ),
        (episodes[0].make_weighted_datum(episodes[0].is_sampled), None, "data.0..loss_fn_input_spans: missing"),
        (whole, {"alpha": 1.0}, "loss_fn_config.alpha: stable_reinforce takes clip_high_threshold, kl_coeff"),
        (whole, {"kl_coeff": "x"}, "loss_fn_config.kl_coeff 'x' must be a finite number"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message) as failure:
            model.forward([datum], "stable_reinforce", config).result()
        assert failure.value.category == types.RequestErrorCategory.User


def test_unrecorded_sample_has_no_provenance(service: tinker.ServiceClient) -> None:
    model = create_trained_client(service)
    episode = play(model.save_weights_and_get_sampling_client().result(), 1)
    with pytest.raises(tinker.RequestFailedError, match="sample with record_stability_info"):
        model.forward([episode.datum(1.0)], "stable_reinforce").result()


def test_other_losses_ignore_provenance(service: tinker.ServiceClient) -> None:
    model = create_trained_client(service)
    episode = play(model.save_weights_and_get_sampling_client().result(), 1)
    passed = model.forward([episode.datum(1.0)], "importance_sampling").result()
    assert math.isfinite(passed.metrics["loss:sum"])


def test_reuse_extends_expiry(server: Server, service: tinker.ServiceClient, episodes: list[Episode]) -> None:
    def last_used() -> dict[str, float]:
        rows = server.store.read(lambda tx: tx.exec(select(StabilityRow)).all())
        return {row.sequence_id: row.last_used_at for row in rows}

    model = create_trained_client(service)
    old, used = ({span.sequence_id for span in episode.spans} for episode in episodes)
    server.store.write(lambda tx: recorded_logprobs.touch(tx, old, 1.0))
    with pytest.raises(tinker.RequestFailedError, match="within a day"):
        model.forward([episodes[0].datum(1.0)], "stable_reinforce").result()
    before = last_used()
    model.forward([episodes[1].datum(1.0)], "stable_reinforce").result()
    after = last_used()
    assert {name for name, at in after.items() if at > before[name]} == used
