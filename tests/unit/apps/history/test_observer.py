"""Points, usage and kept samples of completed requests are written once, even if the engine crashes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from skyrl_tx.apps.history import kept_samples, points
from skyrl_tx.apps.history.observer import sum_loss_weights
from skyrl_tx.apps.history.points import Point
from skyrl_tx.apps.teams import usage
from skyrl_tx.contract import requests
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import ModelId, RequestId, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import ModelPass, SampledSpan, SaveWeights
from skyrl_tx.contract.results import SampleDelta, TrainerGap
from skyrl_tx.store import checkpoints, completions, futures, models, sampling_sessions
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import (
    OWNER,
    SPEC,
    EngineHarness,
    Perishable,
    datum,
    forward_backward,
    optim_step,
    sample,
)


def curve(harness: EngineHarness, model_id: ModelId) -> list[Point]:
    return harness.api.read(lambda tx: points.read_points(tx, model_id))


def work(harness: EngineHarness) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the tokens and requests by model name and kind of work."""
    totals = harness.api.read(lambda tx: usage.read_totals(tx, OWNER, 0.0, ["model_id"]))
    return {(total.group[0].rpartition(":")[2], total.kind): (total.tokens, total.requests) for total in totals}


def read_kept(harness: EngineHarness, model_id: str, step: int | None) -> list[kept_samples.KeptGroup]:
    return harness.api.read(lambda tx: kept_samples.read_step(tx, model_id, step, 100, owner=OWNER))


def train(harness: EngineHarness, num_steps: int = 2) -> tuple[ModelId, RequestId]:
    """Submit optimizer steps with two passes each.

    In the first step, the second pass is forward only.
    """
    model_id, last = harness.create()
    seq_id = 0
    for step in range(num_steps):
        for request in (forward_backward(step), forward_backward(step + 50, backward=step > 0), optim_step()):
            seq_id += 1
            last = harness.submit(request, model_id=model_id, seq_id=seq_id)
    return model_id, last


def test_each_pass_and_step_is_a_point(harness: EngineHarness) -> None:
    model_id, last = train(harness)
    harness.run(last)
    found = curve(harness, model_id)
    assert [(point.kind, point.step, point.tokens, point.datums) for point in found] == [
        ("train", 0, 10, 2),
        ("forward", 0, 10, 2),
        ("step", 1, 0, 0),
        ("train", 1, 10, 2),
        ("train", 1, 10, 2),
        ("step", 2, 0, 0),
    ]

    first, step = found[0], found[2]
    assert first.created_at <= first.started_at <= first.at and first.device_s > 0
    assert first.values["num_tokens:sum"] == first.values["loss_weight:sum"] == 10 and math.isfinite(
        first.values["loss:sum"] or 0
    )
    assert found[-1].values == harness.result(last).metrics and step.device_s > 0

    row = harness.api.read(lambda tx: models.get(tx, model_id))
    assert row is not None and row.num_steps == 2
    assert work(harness) == {("m", "training"): (30, 5), ("m", "forward"): (10, 1)}


def make_pass(loss: str, *inputs: dict[str, Any]) -> ModelPass:
    data = []
    for arrays in inputs:
        loss_inputs = {"target_tokens": np.arange(4), **{name: np.array(value) for name, value in arrays.items()}}
        data.append(requests.Datum(tokens=np.arange(4, dtype=np.int32), loss_inputs=loss_inputs))
    return ModelPass(data=tuple(data), loss=loss, loss_config={}, backward=True)


@pytest.mark.parametrize(
    ("request_", "weight"),
    [
        (make_pass("cross_entropy", {"weights": [0.0, 0.0, 1.0, 1.0]}, {"weights": [0.0, 1.0, 1.0, 1.0]}), 5.0),
        (make_pass("cross_entropy", {"weights": [0.0, 0.0, 0.5, 0.5]}, {"weights": [0.25] * 4}), 2.0),
        (make_pass("cross_entropy", {}, {"weights": [0.0] * 4}), 4.0),
        (make_pass("cross_entropy", {"weights": [[0.75, 0.25]] * 4}), 4.0),
        (make_pass("cross_entropy", {"weights": [-0.5, 0.5, -1.0, 0.0]}), 2.0),
        (make_pass("ppo", {"advantages": [0.0, 0.0, -2.0, 2.0]}), 2.0),
        (make_pass("ppo", {"advantages": [0.0, 0.5, 0.5, 0.5], "weights": [1.0, 0.0, 0.5, 0.5]}), 1.0),
        (make_pass("custom", {}, {}, {}), 3.0),
    ],
)
def test_the_weight_of_a_loss_is_the_sum_of_the_weights_of_its_tokens(request_: ModelPass, weight: float) -> None:
    assert sum_loss_weights(request_) == weight


def test_requests_record_when_they_started(harness: EngineHarness) -> None:
    _, last = train(harness, 1)
    harness.run(last)
    rows = harness.api.read(
        lambda tx: tx.connection().exec_driver_sql("SELECT created_at, started_at, completed_at FROM requests").all()
    )
    assert all(created <= started <= completed for created, started, completed in rows)


def test_failed_requests_leave_no_history(harness: EngineHarness) -> None:
    model_id, _ = harness.create()
    wrong = forward_backward(loss="no_such_loss")
    harness.submit(wrong, model_id=model_id, seq_id=1)
    last = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    harness.run(last)
    assert harness.api.read(lambda tx: futures.get_outcomes(tx, [last])) == {last: "failed"}
    assert curve(harness, model_id) == [] and work(harness) == {}
    row = harness.api.read(lambda tx: models.get(tx, model_id))
    assert row is not None and row.num_steps == 0 and row.effect_order == 2


def test_device_seconds_of_a_shared_batch_are_split_by_tokens(harness: EngineHarness) -> None:
    passes = []
    for name, length in (("a", 4), ("b", 12)):
        model_id, _ = harness.create(name)
        data = (datum(length=length),)
        passes.append((model_id, harness.submit(forward_backward(data=data), model_id=model_id, seq_id=1)))
    harness.run(*(request_id for _, request_id in passes))
    (small,), (large,) = (curve(harness, model_id) for model_id, _ in passes)
    if small.started_at == large.started_at:  # both ran as one batch
        assert large.device_s == pytest.approx(3 * small.device_s)


@pytest.mark.parametrize("calls", range(8))
def test_history_is_the_same_after_the_device_was_lost(harness: EngineHarness, calls: int) -> None:
    model_id, last = train(harness)
    with pytest.raises(BackendLost):
        harness.run(last, backend=Perishable(harness.config, calls))
    harness.run(last)
    found = curve(harness, model_id)
    kinds = ["train", "forward", "step", "train", "train", "step"]
    assert [(point.kind, point.step) for point in found] == list(zip(kinds, [0, 0, 1, 1, 1, 2], strict=True))
    row = harness.api.read(lambda tx: models.get(tx, model_id))
    assert row is not None and row.num_steps == 2
    assert work(harness) == {("m", "training"): (30, 5), ("m", "forward"): (10, 1)}


def test_steps_continue_after_a_restart_and_are_noted_at_saves(harness: EngineHarness) -> None:
    model_id, last = train(harness)
    harness.run(last)
    harness.answer(optim_step(), model_id=model_id, seq_id=7)
    assert curve(harness, model_id)[-1].step == 3
    name = SamplingSessionId(f"{harness.session_id}:sample:0")
    ephemeral = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name)
    harness.answer(ephemeral, model_id=model_id, seq_id=8)
    harness.answer(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=9)
    (saved,) = harness.api.read(lambda tx: checkpoints.list_by_run(tx, model_id, 0.0))
    row = harness.api.read(lambda tx: sampling_sessions.get(tx, name))
    assert saved.step == 3 and row is not None and row.step == 3
    assert work(harness)["m", "checkpoint"] == (0, 1)


def test_loaded_run_names_its_checkpoint(harness: EngineHarness) -> None:
    model_id, _ = harness.create()
    saved = harness.answer(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=1)
    (row,) = harness.api.read(lambda tx: checkpoints.list_by_run(tx, model_id, 0.0))
    load = requests.LoadWeights(
        path=saved.path, artifact_id=row.artifact_id, spec=SPEC, optimizer=True, create=True, base_model="tiny"
    )
    other, request_id = harness.make(load, "other")
    harness.run(request_id)
    found = harness.api.read(lambda tx: models.get(tx, other))
    assert found is not None and (found.loaded_from, found.num_steps) == (saved.path, 0)


def test_samples_are_used_and_kept_with_the_step_of_their_weights(harness: EngineHarness) -> None:
    model_id, last = train(harness)
    name = SamplingSessionId(f"{harness.session_id}:sample:0")
    save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name)
    harness.run(last, harness.submit(save, model_id=model_id, seq_id=7))
    row = harness.api.read(lambda tx: sampling_sessions.get(tx, name))
    assert row is not None and row.sampler_id is not None

    request = replace(sample((65, 66, 67), row.sampler_id), num_samples=2, sequence_ids=("seq-0", "seq-1"))
    output = harness.answer(request, sampling_session_id=name)
    (group,) = read_kept(harness, model_id, 2)
    assert group.prompt.tolist() == [65, 66, 67] and group.owner == OWNER
    assert [kept_sample.sequence_id for kept_sample in group.samples] == ["seq-0", "seq-1"]

    for found, sequence in zip(group.samples, output.sequences, strict=True):
        assert found.tokens.tolist() == sequence.tokens.tolist() and found.stop_reason == sequence.stop_reason
        assert found.logprobs.tobytes() == sequence.logprobs.tobytes()
    num_sampled = sum(sequence.tokens.size for sequence in output.sequences)
    assert work(harness)["m", "prefill"] == (3, 1) and work(harness)["m", "sampled"] == (num_sampled, 1)

    (sampled,) = [
        total for total in harness.api.read(lambda tx: usage.read_totals(tx, OWNER, 0.0)) if total.kind == "sampled"
    ]
    assert sampled.device_s > 0

    warm = harness.answer(replace(request, params=replace(request.params, temperature=1.0)), sampling_session_id=name)
    (sums,) = harness.api.read(lambda tx: points.read_sampled(tx, model_id, OWNER))
    both = [*output.sequences, *warm.sequences]
    assert (sums.step, sums.samples, sums.tokens) == (2, 4, sum(sequence.tokens.size for sequence in both))
    assert sums.cut == sum(sequence.stop_reason == "length" for sequence in both) > 0
    assert sums.scored_tokens == sum(sequence.tokens.size for sequence in warm.sequences), "greedy ones say nothing"
    assert sums.logprob_sum == pytest.approx(
        sum(float(sequence.logprobs.sum()) for sequence in warm.sequences), rel=1e-5
    )

    scored = replace(request, num_samples=1, sequence_ids=None, options=requests.PromptOptions(logprobs=True))
    harness.answer(replace(scored, params=replace(request.params, max_tokens=1)), sampling_session_id=name)
    assert harness.api.read(lambda tx: points.read_sampled(tx, model_id, OWNER)) == [sums]


def test_inflight_session_keeps_the_step_of_the_weights_that_were_sampled(harness: EngineHarness) -> None:
    model_id, _ = harness.create()
    names = [SamplingSessionId(f"{harness.session_id}:sample:{number}") for number in range(2)]
    found: list[SamplerId] = []
    for number, name in enumerate(names):
        save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=name, is_inflight=True)
        harness.answer(save, model_id=model_id, seq_id=2 * number + 1)
        row = harness.api.read(lambda tx, name=name: sampling_sessions.get(tx, name))
        assert row is not None and row.sampler_id is not None
        found.append(row.sampler_id)
        harness.answer(optim_step(), model_id=model_id, seq_id=2 * number + 2)
    newest = harness.api.read(lambda tx: sampling_sessions.find_origin(tx, names[0], found[1]))
    replaced = harness.api.read(lambda tx: sampling_sessions.find_origin(tx, names[0], found[0]))
    assert (newest.model_id, newest.step) == (model_id, 1), "the later save gave its sampler to the first session"
    assert (replaced.model_id, replaced.step) == (model_id, None)


def test_base_weights_have_no_model_and_scored_prompts_are_not_kept(harness: EngineHarness) -> None:
    scored = replace(sample(max_tokens=1), options=requests.PromptOptions(logprobs=True))
    harness.run(*(harness.submit(sample_request) for sample_request in (sample(), scored)))
    (group,) = read_kept(harness, "", None)
    assert group.samples[0].tokens.size == 8
    assert work(harness) == {("", "prefill"): (4, 2), ("", "sampled"): (9, 2)}


def test_a_kept_sample_has_its_gap_to_the_trainer_if_it_was_compared(harness: EngineHarness) -> None:
    class Comparing(FakeBackend):
        def step_sample(self) -> list[SampleDelta]:
            gap = TrainerGap(mean=0.25, largest=0.5, num_tokens=8)
            deltas = super().step_sample()
            return [
                structs.replace(delta, trainer_gap=gap) if delta.index == 0 and delta.stop_reason else delta
                for delta in deltas
            ]

    request_id = harness.submit(replace(sample(), num_samples=2))
    harness.run(request_id, backend=Comparing("tiny", harness.config))
    (group,) = read_kept(harness, "", None)
    assert [kept_sample.trainer_gap for kept_sample in group.samples] == [0.25, None]


def test_only_the_chosen_groups_of_a_step_are_kept(tmp_path: Path) -> None:
    harness = EngineHarness(tmp_path, keep_samples=3)
    try:
        ids = [harness.submit(sample((65, number))) for number in range(1, 8)]
        harness.run(*ids)
        assert [group.request_id for group in read_kept(harness, "", None)] == sorted(ids)[:3]
        more = [harness.submit(sample((65, number))) for number in range(1, 8)]
        harness.run(*more)  # another engine makes the same choice
        assert [group.request_id for group in read_kept(harness, "", None)] == sorted(ids + more)[:3]
    finally:
        harness.close()


@pytest.mark.parametrize("settings", [{"keep_samples": 0}, {"max_kept_sample_bytes": 70}])
def test_no_samples_are_kept_if_switched_off_or_too_large(tmp_path: Path, settings: dict[str, int]) -> None:
    harness = EngineHarness(tmp_path, **settings)
    try:
        harness.answer(sample())
        assert read_kept(harness, "", None) == [] and work(harness)["", "sampled"] == (8, 1)
    finally:
        harness.close()


def test_cancelled_sample_is_no_usage(harness: EngineHarness) -> None:
    cancelled, other = harness.submit(sample()), harness.submit(sample())
    harness.api.write(lambda tx: completions.cancel(tx, cancelled, OWNER, b"x", 1.0))
    harness.run(other)
    assert work(harness)["", "sampled"] == (8, 1)


def rl_pass(*spans: SampledSpan) -> ModelPass:
    """Return a pass of one sequence of 6 targets, with the logprobs 0.5 below zero."""
    inputs: dict[str, Any] = {
        "logprobs": np.full(6, -0.5, np.float32),
        "advantages": np.array([0, 0, 1, 3, -1, -1], np.float32),
    }
    return ModelPass(
        data=(datum(length=6, **inputs),), loss="importance_sampling", loss_config={}, backward=True, sampled=spans
    )


def test_pass_records_the_advantages_of_kept_sequences(harness: EngineHarness) -> None:
    owned = replace(sample(), num_samples=3, sequence_ids=("seq-0", "seq-1", "seq-2"))
    harness.answer(owned)
    model_id, _ = harness.create()
    spans = (
        SampledSpan(datum=0, first=2, length=2, sequence_id="seq-0"),
        SampledSpan(datum=0, first=4, length=1, sequence_id="seq-1"),
        SampledSpan(datum=0, first=5, length=1, sequence_id="seq-0"),
        SampledSpan(datum=0, first=5, length=1, sequence_id="seq-unknown"),
    )
    output = harness.answer(rl_pass(*spans), model_id=model_id, seq_id=1)
    (group,) = read_kept(harness, "", None)
    first, second, third = group.samples
    (trained,) = output.logprobs

    assert first.advantage == pytest.approx(1.0) and first.kl == pytest.approx(
        float((-0.5 - trained[[2, 3, 5]]).mean())
    )
    assert second.advantage == -1.0 and (second.trained_model_id, second.trained_step) == (model_id, 0)
    assert third.advantage is None and third.kl is None


def test_pass_of_another_owner_records_nothing(harness: EngineHarness) -> None:
    harness.answer(replace(sample(), sequence_ids=("seq-0",)))
    harness.become("bob")
    model_id, _ = harness.create()
    harness.answer(rl_pass(SampledSpan(datum=0, first=2, length=2, sequence_id="seq-0")), model_id=model_id, seq_id=1)
    (group,) = read_kept(harness, "", None)
    assert group.samples[0].advantage is None


def test_forward_pass_trains_on_nothing(harness: EngineHarness) -> None:
    harness.answer(replace(sample(), sequence_ids=("seq-0",)))
    model_id, _ = harness.create()
    only_forward = replace(rl_pass(SampledSpan(datum=0, first=2, length=2, sequence_id="seq-0")), backward=False)
    harness.answer(only_forward, model_id=model_id, seq_id=1)
    assert read_kept(harness, "", None)[0].samples[0].advantage is None


def test_housekeeping_bounds_samples_and_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points.find_superfluous, "__defaults__", (8,))
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.05, max_kept_sample_bytes=200)
    harness.config = FakeConfig(vocab_size=128, step_delay_s=0.05)
    try:
        small = [harness.submit(sample((65, number))) for number in range(1, 8)]
        model_id, last = train(harness, 4)
        long = harness.submit(sample(max_tokens=400))  # too large to be kept itself
        harness.run(*small, last, long)
        assert len(read_kept(harness, "", None)) == 2, "72 bytes each"
        assert 4 <= len(curve(harness, model_id)) <= 9
    finally:
        harness.close()
