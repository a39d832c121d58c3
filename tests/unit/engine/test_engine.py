"""Every request type on a single engine."""

from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath, ModelId, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import LoadWeights, LoraSpec, ModelSpec, Rejected, SaveWeights, UnloadModel
from skyrl_tx.contract.results import CreateModelOutput, Failure, ForwardBackwardOutput
from skyrl_tx.store import checkpoints, engine_state, futures, models, recorded_logprobs, sampling_sessions
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import OWNER, SPEC, EngineHarness, datum, forward_backward, optim_step, sample
from tests.support.logged_error import find_logged_error

SAMPLING = SamplingSessionId("s:sample:0")


def get_losses(harness, request_ids):
    return [harness.result(request_id).metrics["loss:sum"] for request_id in request_ids]


def test_training_lowers_the_loss(harness):
    model_id, created = harness.create()
    passes = []
    for step in range(3):
        passes.append(harness.submit(forward_backward(), model_id=model_id, seq_id=2 * step + 1))
        last = harness.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2)
    harness.run(last)
    assert harness.result(created) == CreateModelOutput(model_id=model_id)
    losses = get_losses(harness, passes)
    assert losses[0] > losses[1] > losses[2]
    output = harness.result(passes[0])
    assert output.metrics["num_tokens:sum"] == 10 and output.metrics["num_datums:sum"] == 2
    assert [array.shape for array in output.logprobs] == [(6,), (4,)]
    assert harness.result(last).metrics["unclipped_grad_l2:mean"] > 0


def test_requests_run_in_seq_id_order(harness):
    model_id, _ = harness.create()
    ids = {}
    for seq_id in (2, 1, 3, 5, 4, 6):
        request = optim_step() if seq_id in (3, 6) else forward_backward(seq_id)
        ids[seq_id] = harness.submit(request, model_id=model_id, seq_id=seq_id)
    harness.run(*ids.values())
    orders = harness.api.read(lambda tx: effect_orders(tx, model_id))
    assert orders == [None, 1, 2, 3, 4, 5, 6]


def effect_orders(tx, model_id):
    return [effect.seq_id for effect in futures.read_log(tx, model_id, 0)]


def test_failing_request_does_not_fail_its_batch(harness, caplog):
    class Picky(FakeBackend):
        def begin_pass(self, batch, *, backward):
            if any(example.tokens[0] == 99 for example in batch.examples):
                raise ValueError("I do not like 99")
            return super().begin_pass(batch, backward=backward)

    model_id, _ = harness.create()
    bad = replace(datum(), tokens=np.array([99, 1, 2, 3, 4, 5], np.int32))
    first = harness.submit(forward_backward(1), model_id=model_id, seq_id=1)
    second = harness.submit(forward_backward(data=(bad,)), model_id=model_id, seq_id=2)
    third = harness.submit(forward_backward(3), model_id=model_id, seq_id=3)
    steps = [harness.submit(optim_step(), model_id=model_id, seq_id=4 + n) for n in range(2)]
    harness.run(*steps, backend=Picky("tiny", harness.config))
    assert isinstance(harness.result(first), ForwardBackwardOutput)
    assert isinstance(harness.result(third), ForwardBackwardOutput)
    assert harness.result(second).category == ErrorCategory.SERVER
    poisoned = harness.result(steps[0])
    assert poisoned.category == ErrorCategory.USER and harness.result(second).message in poisoned.message
    assert "I do not like 99" in str(find_logged_error(poisoned.message, caplog))
    assert harness.result(steps[1]).metrics["unclipped_grad_l2:mean"] == 0


def test_unexpected_error_reaches_the_log_and_not_the_client(harness, caplog):
    class Broken(FakeBackend):
        def begin_pass(self, batch, *, backward):
            raise ValueError("/home/ann/secret: no such device cuda:3")

    model_id, _ = harness.create()
    failed = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.run(failed, backend=Broken("tiny", harness.config))
    message = harness.result(failed).message
    assert message.startswith("internal error; the server's log") and "ann" not in message
    assert "no such device cuda:3" in str(find_logged_error(message, caplog))


def test_step_with_a_gradient_that_is_not_finite_changes_nothing(harness):
    """The step fails, also when it is replayed. The next step starts with a new gradient."""

    class Diverging(FakeBackend):
        def gradient_norm(self, model_id):
            return float("nan") if len(refused) == 1 else super().gradient_norm(model_id)

    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.submit(optim_step(), model_id=model_id, seq_id=2)
    before = harness.answer(forward_backward(), model_id=model_id, seq_id=3).metrics
    refused = [harness.submit(optim_step(), model_id=model_id, seq_id=4)]
    harness.run(*refused, backend=Diverging("tiny", harness.config))
    failure = harness.result(refused[0])
    assert failure.category == ErrorCategory.USER and "the norm of the gradient is nan" in failure.message
    after = harness.answer(forward_backward(), model_id=model_id, seq_id=5).metrics
    assert after == before
    norm = harness.answer(optim_step(), model_id=model_id, seq_id=6).metrics["unclipped_grad_l2:mean"]
    assert 0 < norm < float("inf")
    assert harness.answer(forward_backward(), model_id=model_id, seq_id=7).metrics != before


def test_diverged_model_is_reported(harness):
    """An absurd learning rate is applied as requested.

    The next gradient overflows and is rejected.
    """
    model_id, _ = harness.create()
    for step in range(8):
        harness.submit(forward_backward(), model_id=model_id, seq_id=2 * step + 1)
        last = harness.submit(optim_step(3e37), model_id=model_id, seq_id=2 * step + 2)
    harness.run(last)
    assert "not a finite number: the model has diverged" in harness.result(last).message


def test_rejected_pass_makes_the_gradient_incomplete_across_a_restart(harness):
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    rejected = harness.submit(
        Rejected(kind="model_pass", message="data[0]: no images", backward=True), model_id=model_id, seq_id=2
    )
    harness.run(rejected)
    failure = harness.result(rejected)
    assert failure == Failure(message="data[0]: no images", category=ErrorCategory.USER)
    assert "no images" in harness.answer(optim_step(), model_id=model_id, seq_id=3).message
    assert harness.answer(optim_step(), model_id=model_id, seq_id=4).metrics["unclipped_grad_l2:mean"] == 0


def test_pass_behind_a_sequence_gap_runs_after_the_gap_timeout(harness):
    model_id, _ = harness.create()
    above = harness.submit(forward_backward(), model_id=model_id, seq_id=2)
    harness.run(above)
    assert isinstance(harness.result(above), ForwardBackwardOutput)
    harness.answer(optim_step(), model_id=model_id, seq_id=5)
    late = harness.answer(forward_backward(), model_id=model_id, seq_id=4)
    assert late.category == ErrorCategory.USER and "seq_id 4 arrived too late: seq_id 5" in late.message
    # The gradient was already applied, and the next gradient is complete.
    harness.answer(forward_backward(), model_id=model_id, seq_id=6)
    assert harness.answer(optim_step(), model_id=model_id, seq_id=7).metrics["unclipped_grad_l2:mean"] > 0


def test_checkpoint_round_trip(harness):
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.submit(optim_step(), model_id=model_id, seq_id=2)
    save = SaveWeights(kind="weights", name="a", ttl_s=3600, user_metadata={"step": "1"})
    saved = harness.answer(save, model_id=model_id, seq_id=3)
    assert saved.path == f"tinker://{model_id}/weights/a"

    row = harness.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    assert row.size_bytes > 0 and row.user_metadata == {"step": "1"} and row.expires_at == row.created_at + 3600

    taken = harness.answer(save, model_id=model_id, seq_id=4)
    assert taken.category == ErrorCategory.USER and "'a'" in taken.message

    again = harness.answer(replace(save, overwrite=True), model_id=model_id, seq_id=5)
    assert again.path == saved.path

    row = harness.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    load = LoadWeights(path=saved.path, artifact_id=row.artifact_id, spec=SPEC, optimizer=True, create=True)
    copy, loaded = harness.make(load, "copy")
    answers = []

    for name in (model_id, copy):
        harness.submit(forward_backward(7), model_id=name, seq_id=6 if name == model_id else 1)
        step = harness.submit(optim_step(), model_id=name, seq_id=7 if name == model_id else 2)
        answers.append(harness.submit(forward_backward(8, backward=False), model_id=name, seq_id=None))
        harness.run(loaded, step, answers[-1])

    first, second = (harness.result(answer) for answer in answers)
    assert harness.result(loaded).model_id == copy
    assert first.metrics == second.metrics
    assert all(left.tobytes() == right.tobytes() for left, right in zip(first.logprobs, second.logprobs, strict=True))


def test_load_of_another_lora_spec_is_refused(harness):
    model_id, _ = harness.create()
    other, _ = harness.create("other", ModelSpec(lora=LoraSpec(rank=3, seed=1)))
    saved = harness.answer(SaveWeights(kind="weights", name="a"), model_id=other, seq_id=1)
    row = harness.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    spec = ModelSpec(lora=LoraSpec(rank=3, seed=1))
    load = LoadWeights(path=saved.path, artifact_id=row.artifact_id, spec=spec, optimizer=False, create=False)
    assert (
        "the checkpoint has lora_config.rank 3, but the model has 2"
        in harness.answer(load, model_id=model_id, seq_id=1).message
    )
    gone = replace(load, artifact_id=ArtifactId("art-" + "0" * 32), spec=SPEC)
    assert harness.answer(gone, model_id=model_id, seq_id=2).category == ErrorCategory.SERVER


def test_ephemeral_save_creates_a_sampling_session_of_frozen_weights(harness):
    model_id, _ = harness.create()
    for step in range(3):
        harness.submit(forward_backward(data=(counting_down(),)), model_id=model_id, seq_id=2 * step + 1)
        harness.submit(optim_step(0.5), model_id=model_id, seq_id=2 * step + 2)
    save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=SAMPLING)
    saved = harness.answer(save, model_id=model_id, seq_id=7)
    assert (saved.path, saved.sampling_session_id) == (None, SAMPLING)
    row = harness.api.read(lambda tx: sampling_sessions.get(tx, SAMPLING))
    trained = harness.answer(sample((9,), row.sampler_id), sampling_session_id=SAMPLING)
    assert trained.sequences[0].tokens.tolist()[:2] == [8, 7]
    base = harness.answer(sample((9,)))
    assert base.sequences[0].tokens.tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert harness.api.read(lambda tx: sampling_sessions.get(tx, SAMPLING)).last_used_at > row.last_used_at


def counting_down():
    return replace(datum(), tokens=np.arange(20, 0, -1, np.int32), loss_inputs={"target_tokens": np.arange(19, -1, -1)})


def test_stop_strings_end_samples(harness):
    output = harness.answer(sample((65,), stop_strings=("DE",)))
    assert output.sequences[0].tokens.tolist() == [66, 67, 68, 69]
    assert output.sequences[0].stop_reason == "stop" and len(output.sequences[0].logprobs) == 4


def test_sampled_logprobs_are_recorded_on_request(harness):
    drawn = replace(sample((65,), stop_strings=("DE",)), num_samples=2, sequence_ids=("seq-0", "seq-1"))
    harness.answer(drawn)
    assert harness.api.read(lambda tx: recorded_logprobs.find(tx, OWNER, drawn.sequence_ids, 0.0)) == {}
    output = harness.answer(replace(drawn, is_recorded=True))
    found = harness.api.read(lambda tx: recorded_logprobs.find(tx, OWNER, drawn.sequence_ids, 0.0))
    assert [found[name].prompt_length for name in drawn.sequence_ids] == [1, 1]
    for name, sequence in zip(drawn.sequence_ids, output.sequences, strict=True):
        np.testing.assert_array_equal(found[name].logprobs, sequence.logprobs)
        assert len(sequence.logprobs) == 4


def test_models_and_samplers_are_evicted_and_restored_bit_equal(harness):
    harness.config = harness.config.model_copy(update={"max_models": 2, "max_samplers": 1})
    names = [harness.create(f"m{n}")[0] for n in range(4)]
    passes, steps, saves = [], [], []

    for turn in range(2):
        for n, name in enumerate(names):
            passes.append(harness.submit(forward_backward(n), model_id=name, seq_id=2 * turn + 1))
            steps.append(harness.submit(optim_step(), model_id=name, seq_id=2 * turn + 2))

    for name in names:
        save = SaveWeights(kind="sampler_weights", name="final")
        saves.append(harness.submit(save, model_id=name, seq_id=5))
    harness.run(*steps, *saves)
    losses = get_losses(harness, passes)
    assert len(set(losses[4:])) == 4 and all(
        later < earlier for earlier, later in zip(losses[:4], losses[4:], strict=True)
    )

    rows = [
        harness.api.read(lambda tx, path=path: checkpoints.get(tx, CheckpointPath.parse(path), 0.0))
        for path in (harness.result(save).path for save in saves)
    ]
    samples = [harness.submit(sample(sampler=SamplerId(row.artifact_id))) for row in rows * 2]
    harness.run(*samples)
    assert all(len(harness.result(name).sequences[0].tokens) == 8 for name in samples)


def test_unloaded_model_does_not_exist(harness):
    model_id, _ = harness.create()
    assert harness.answer(UnloadModel(), model_id=model_id, seq_id=1).model_id == model_id
    late = harness.answer(forward_backward(), model_id=model_id, seq_id=2)
    assert late.category == ErrorCategory.USER and "was unloaded" in late.message


def test_failed_create_model_reports_why_and_leaves_no_model(harness):
    model_id, created = harness.create(spec=ModelSpec(lora=LoraSpec(rank=0, seed=1)))
    later = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.run(created, later)
    assert "lora_config.rank 0" in harness.result(created).message
    assert "could not be created" in harness.result(later).message
    assert harness.api.read(lambda tx: models.get(tx, model_id)).status == "failed"
    unknown = harness.answer(forward_backward(), model_id=ModelId("missing"), seq_id=1)
    assert unknown == Failure(message="model_id 'missing' does not exist", category=ErrorCategory.USER)


def test_invalid_samples_fail_alone(harness):
    bad = harness.submit(sample(temperature=-1.0))
    rejected = harness.submit(Rejected(kind="sample", message="prompt: no images"))
    good = harness.submit(sample())
    harness.run(bad, rejected, good)
    assert "temperature -1.0" in harness.result(bad).message
    assert harness.result(rejected).message == "prompt: no images"
    assert len(harness.result(good).sequences[0].tokens) == 8


def test_sampling_and_training_interleave(harness):
    """A model trains while a long sample runs, and neither waits for the other to finish."""
    order = []

    class Watched(FakeBackend):
        def step_sample(self):
            deltas = super().step_sample()
            order.extend(["slice"] * bool(deltas))
            return deltas

        def optim_step(self, model_id, params):
            order.append("step")
            return super().optim_step(model_id, params)

    model_id, _ = harness.create()
    long = harness.submit(sample(max_tokens=100, eos_stops=False))
    steps = [harness.submit(optim_step(), model_id=model_id, seq_id=n + 1) for n in range(4)]
    harness.run(long, *steps, backend=Watched("tiny", harness.config.model_copy(update={"slice_tokens": 10})))
    assert order.count("slice") == 10
    assert order.index("slice") < order.index("step") < len(order) - 1 - order[::-1].index("slice")


def test_engine_publishes_its_status(harness):
    harness.answer(sample())
    row = harness.api.read(engine_state.get)
    assert row.status == "stopping" and row.base_models == ["tiny"]
    assert row.capabilities["vocab_size"] == 128 and row.capabilities["devices"] == ["fake"]


@pytest.mark.parametrize("culprit", [0, 2])
def test_failed_decode_slice_fails_only_the_cause(harness, culprit):
    class Picky(FakeBackend):
        def step_sample(self):
            if 3 in self._open.by_request().values():
                raise ValueError("three is too many")
            return super().step_sample()

    requests = [replace(sample(), num_samples=3 if n == culprit else 1) for n in range(3)]
    names = [harness.submit(request) for request in requests]
    harness.run(*names, backend=Picky("tiny", harness.config))
    for n, name in enumerate(names):
        if n == culprit:
            assert harness.result(name).category == ErrorCategory.SERVER
        else:
            assert len(harness.result(name).sequences[0].tokens) == 8


def test_save_that_cannot_be_written_fails_alone(harness, monkeypatch):
    model_id, created = harness.create()
    harness.run(created)
    written = harness.artifacts.create

    def create(write, metadata=None):
        if metadata.get("kind") == "weights":
            raise OSError(28, "No space left on device")
        return written(write, metadata)

    monkeypatch.setattr(harness.artifacts, "create", create)
    save = harness.submit(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=1)
    after = harness.submit(forward_backward(), model_id=model_id, seq_id=2)
    harness.run(save, after)
    failure = harness.result(save)
    assert failure.category == ErrorCategory.SERVER and "No space left" in failure.message
    assert isinstance(harness.result(after), ForwardBackwardOutput)


def test_backlog_beyond_the_memory_limit_stays_in_the_database(tmp_path):
    harness = EngineHarness(tmp_path, max_backlog_bytes=1)
    model_id, _ = harness.create()
    samples = [harness.submit(sample(max_tokens=1)) for _ in range(300)]
    later = harness.submit(forward_backward(2), model_id=model_id, seq_id=2)
    first = harness.submit(forward_backward(1), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=3)
    harness.run(*samples, first, later, step)
    assert harness.api.read(lambda tx: effect_orders(tx, model_id)) == [None, 1, 2, 3]
    harness.close()
