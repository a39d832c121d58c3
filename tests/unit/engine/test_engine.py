"""One engine on one data directory: what each kind of request comes to."""

from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ArtifactId, CheckpointPath, ModelId, SamplerId, SamplingSessionId
from skyrl_tx.contract.requests import LoadWeights, LoraSpec, ModelSpec, Rejected, SaveWeights, UnloadModel
from skyrl_tx.contract.results import CreateModelOutput, Failure, ForwardBackwardOutput
from skyrl_tx.store import checkpoints, engine_state, futures, models, samplers, stability
from skyrl_tx.testing.engine_house import OWNER, SPEC, House, datum, forward_backward, optim_step, sample

SAMPLING = SamplingSessionId("s:sample:0")


def losses_of(house, request_ids):
    return [house.result(request_id).metrics["loss:sum"] for request_id in request_ids]


def test_a_model_is_made_trained_and_improves(house):
    model_id, created = house.create()
    passes = []
    for step in range(3):
        passes.append(house.submit(forward_backward(), model_id=model_id, seq_id=2 * step + 1))
        last = house.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2)
    house.run(last)
    assert house.result(created) == CreateModelOutput(model_id=model_id)
    losses = losses_of(house, passes)
    assert losses[0] > losses[1] > losses[2]
    output = house.result(passes[0])
    assert output.metrics["num_tokens:sum"] == 10 and output.metrics["num_datums:sum"] == 2
    assert [array.shape for array in output.logprobs] == [(6,), (4,)]
    assert house.result(last).metrics["unclipped_grad_l2:mean"] > 0


def test_requests_run_in_the_order_of_their_numbers(house):
    model_id, _ = house.create()
    ids = {}
    for seq_id in (2, 1, 3, 5, 4, 6):
        request = optim_step() if seq_id in (3, 6) else forward_backward(seq_id)
        ids[seq_id] = house.submit(request, model_id=model_id, seq_id=seq_id)
    house.run(*ids.values())
    orders = house.api.read(lambda tx: effect_orders(tx, model_id))
    assert orders == [None, 1, 2, 3, 4, 5, 6]


def effect_orders(tx, model_id):
    return [effect.seq_id for effect in futures.effects_since(tx, model_id, 0)]


def test_one_culprit_does_not_fail_its_batch(house):
    class Picky(FakeBackend):
        def begin_pass(self, batch, *, backward):
            if any(example.tokens[0] == 99 for example in batch.examples):
                raise ValueError("I do not like 99")
            return super().begin_pass(batch, backward=backward)

    model_id, _ = house.create()
    bad = replace(datum(), tokens=np.array([99, 1, 2, 3, 4, 5], np.int32))
    first = house.submit(forward_backward(1), model_id=model_id, seq_id=1)
    second = house.submit(forward_backward(data=(bad,)), model_id=model_id, seq_id=2)
    third = house.submit(forward_backward(3), model_id=model_id, seq_id=3)
    steps = [house.submit(optim_step(), model_id=model_id, seq_id=4 + n) for n in range(2)]
    house.run(*steps, backend=Picky("tiny", house.config))
    assert isinstance(house.result(first), ForwardBackwardOutput)
    assert isinstance(house.result(third), ForwardBackwardOutput)
    assert house.result(second).category == ErrorCategory.SERVER
    poisoned = house.result(steps[0])
    assert poisoned.category == ErrorCategory.USER and "I do not like 99" in poisoned.message
    assert house.result(steps[1]).metrics["unclipped_grad_l2:mean"] == 0


def test_a_rejected_pass_poisons_too_and_survives_a_restart(house):
    model_id, _ = house.create()
    house.submit(forward_backward(), model_id=model_id, seq_id=1)
    rejected = house.submit(
        Rejected(kind="model_pass", message="data[0]: no images", backward=True), model_id=model_id, seq_id=2
    )
    house.run(rejected)
    failure = house.result(rejected)
    assert failure == Failure(message="data[0]: no images", category=ErrorCategory.USER)
    assert "no images" in house.answer(optim_step(), model_id=model_id, seq_id=3).message
    assert house.answer(optim_step(), model_id=model_id, seq_id=4).metrics["unclipped_grad_l2:mean"] == 0


def test_a_pass_above_a_hole_waits_and_then_runs(house):
    model_id, _ = house.create()
    above = house.submit(forward_backward(), model_id=model_id, seq_id=2)
    house.run(above)
    assert isinstance(house.result(above), ForwardBackwardOutput)
    house.answer(optim_step(), model_id=model_id, seq_id=5)
    late = house.answer(forward_backward(), model_id=model_id, seq_id=4)
    assert late.category == ErrorCategory.USER and "seq_id 4 came too late: seq_id 5" in late.message
    # The gradient it would have belonged to is spent; the next one is not missing anything.
    house.answer(forward_backward(), model_id=model_id, seq_id=6)
    assert house.answer(optim_step(), model_id=model_id, seq_id=7).metrics["unclipped_grad_l2:mean"] > 0


def test_checkpoints_are_saved_and_loaded(house):
    model_id, _ = house.create()
    house.submit(forward_backward(), model_id=model_id, seq_id=1)
    house.submit(optim_step(), model_id=model_id, seq_id=2)
    save = SaveWeights(kind="weights", name="a", ttl_s=3600, user_metadata={"step": "1"})
    saved = house.answer(save, model_id=model_id, seq_id=3)
    assert saved.path == f"tinker://{model_id}/weights/a"
    row = house.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    assert row.size_bytes > 0 and row.user_metadata == {"step": "1"} and row.expires_at == row.created_at + 3600
    taken = house.answer(save, model_id=model_id, seq_id=4)
    assert taken.category == ErrorCategory.USER and "'a'" in taken.message
    again = house.answer(replace(save, overwrite=True), model_id=model_id, seq_id=5)
    assert again.path == saved.path
    row = house.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    load = LoadWeights(path=saved.path, artifact_id=row.artifact_id, spec=SPEC, optimizer=True, create=True)
    copy, loaded = house.make(load, "copy")
    answers = []
    for name in (model_id, copy):
        house.submit(forward_backward(7), model_id=name, seq_id=6 if name == model_id else 1)
        step = house.submit(optim_step(), model_id=name, seq_id=7 if name == model_id else 2)
        answers.append(house.submit(forward_backward(8, backward=False), model_id=name, seq_id=None))
        house.run(loaded, step, answers[-1])
    first, second = (house.result(answer) for answer in answers)
    assert house.result(loaded).model_id == copy
    assert first.metrics == second.metrics
    assert all(left.tobytes() == right.tobytes() for left, right in zip(first.logprobs, second.logprobs, strict=True))


def test_a_load_of_another_shape_is_refused(house):
    model_id, _ = house.create()
    other, _ = house.create("other", ModelSpec(lora=LoraSpec(rank=3, seed=1)))
    saved = house.answer(SaveWeights(kind="weights", name="a"), model_id=other, seq_id=1)
    row = house.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    spec = ModelSpec(lora=LoraSpec(rank=3, seed=1))
    load = LoadWeights(path=saved.path, artifact_id=row.artifact_id, spec=spec, optimizer=False, create=False)
    assert "lora_config.rank is 3, the model's is 2" in house.answer(load, model_id=model_id, seq_id=1).message
    gone = replace(load, artifact_id=ArtifactId("art-" + "0" * 32), spec=SPEC)
    assert house.answer(gone, model_id=model_id, seq_id=2).category == ErrorCategory.SERVER


def test_an_unnamed_save_makes_a_sampling_session_of_frozen_weights(house):
    model_id, _ = house.create()
    for step in range(3):
        house.submit(forward_backward(data=(counting_down(),)), model_id=model_id, seq_id=2 * step + 1)
        house.submit(optim_step(0.5), model_id=model_id, seq_id=2 * step + 2)
    save = SaveWeights(kind="sampler_weights", name=None, sampling_session_id=SAMPLING)
    saved = house.answer(save, model_id=model_id, seq_id=7)
    assert (saved.path, saved.sampling_session_id) == (None, SAMPLING)
    row = house.api.read(lambda tx: samplers.get(tx, SAMPLING))
    trained = house.answer(sample((9,), row.sampler_id), sampling_session_id=SAMPLING)
    assert trained.sequences[0].tokens.tolist()[:2] == [8, 7]
    base = house.answer(sample((9,)))
    assert base.sequences[0].tokens.tolist() == [10, 11, 12, 13, 14, 15, 16, 17]
    assert house.api.read(lambda tx: samplers.get(tx, SAMPLING)).last_used_at > row.last_used_at


def counting_down():
    return replace(datum(), tokens=np.arange(20, 0, -1, np.int32), loss_inputs={"target_tokens": np.arange(19, -1, -1)})


def test_samples_stop_at_strings(house):
    output = house.answer(sample((65,), stop_strings=("DE",)))
    assert output.sequences[0].tokens.tolist() == [66, 67, 68, 69]
    assert output.sequences[0].stop_reason == "stop" and len(output.sequences[0].logprobs) == 4


def test_samples_are_recorded_as_answered_where_that_is_asked_for(house):
    drawn = replace(sample((65,), stop_strings=("DE",)), num_samples=2, sequence_ids=("seq-0", "seq-1"))
    house.answer(drawn)
    assert house.api.read(lambda tx: stability.find(tx, OWNER, drawn.sequence_ids, 0.0)) == {}
    output = house.answer(replace(drawn, is_recorded=True))
    found = house.api.read(lambda tx: stability.find(tx, OWNER, drawn.sequence_ids, 0.0))
    assert [found[name].prompt_length for name in drawn.sequence_ids] == [1, 1]
    for name, sequence in zip(drawn.sequence_ids, output.sequences, strict=True):
        np.testing.assert_array_equal(found[name].logprobs, sequence.logprobs)
        assert len(sequence.logprobs) == 4


def test_more_models_and_samplers_than_slots_take_turns(house):
    house.config = house.config.model_copy(update={"max_models": 2, "max_samplers": 1})
    names = [house.create(f"m{n}")[0] for n in range(4)]
    passes, steps, saves = [], [], []
    for turn in range(2):
        for n, name in enumerate(names):
            passes.append(house.submit(forward_backward(n), model_id=name, seq_id=2 * turn + 1))
            steps.append(house.submit(optim_step(), model_id=name, seq_id=2 * turn + 2))
    for name in names:
        save = SaveWeights(kind="sampler_weights", name="final")
        saves.append(house.submit(save, model_id=name, seq_id=5))
    house.run(*steps, *saves)
    losses = losses_of(house, passes)
    assert len(set(losses[4:])) == 4 and all(
        later < earlier for earlier, later in zip(losses[:4], losses[4:], strict=True)
    )
    rows = [
        house.api.read(lambda tx, path=path: checkpoints.get(tx, CheckpointPath.parse(path), 0.0))
        for path in (house.result(save).path for save in saves)
    ]
    samples = [house.submit(sample(sampler=SamplerId(row.artifact_id))) for row in rows * 2]
    house.run(*samples)
    assert all(len(house.result(name).sequences[0].tokens) == 8 for name in samples)


def test_an_unloaded_model_is_gone(house):
    model_id, _ = house.create()
    assert house.answer(UnloadModel(), model_id=model_id, seq_id=1).model_id == model_id
    late = house.answer(forward_backward(), model_id=model_id, seq_id=2)
    assert late.category == ErrorCategory.USER and "was unloaded" in late.message


def test_what_cannot_be_made_says_so_and_stays_unmade(house):
    model_id, created = house.create(spec=ModelSpec(lora=LoraSpec(rank=0, seed=1)))
    later = house.submit(forward_backward(), model_id=model_id, seq_id=1)
    house.run(created, later)
    assert "lora_config.rank 0" in house.result(created).message
    assert "could not be created" in house.result(later).message
    assert house.api.read(lambda tx: models.get(tx, model_id)).status == "failed"
    unknown = house.answer(forward_backward(), model_id=ModelId("nobody"), seq_id=1)
    assert unknown == Failure(message="model_id 'nobody' does not exist", category=ErrorCategory.USER)


def test_bad_samples_fail_alone(house):
    bad = house.submit(sample(temperature=-1.0))
    rejected = house.submit(Rejected(kind="sample", message="prompt: no images"))
    good = house.submit(sample())
    house.run(bad, rejected, good)
    assert "temperature -1.0" in house.result(bad).message
    assert house.result(rejected).message == "prompt: no images"
    assert len(house.result(good).sequences[0].tokens) == 8


def test_sampling_goes_on_beside_training(house):
    """A long sample needs many slices; a model trains meanwhile, and neither waits for the other's end."""
    order = []

    class Watched(FakeBackend):
        def step_sample(self):
            deltas = super().step_sample()
            order.extend(["slice"] * bool(deltas))
            return deltas

        def optim_step(self, model_id, params):
            order.append("step")
            return super().optim_step(model_id, params)

    model_id, _ = house.create()
    long = house.submit(sample(max_tokens=100, eos_stops=False))
    steps = [house.submit(optim_step(), model_id=model_id, seq_id=n + 1) for n in range(4)]
    house.run(long, *steps, backend=Watched("tiny", house.config.model_copy(update={"slice_tokens": 10})))
    assert order.count("slice") == 10
    assert order.index("slice") < order.index("step") < len(order) - 1 - order[::-1].index("slice")


def test_the_engine_says_how_it_is(house):
    house.answer(sample())
    row = house.api.read(engine_state.get)
    assert row.status == "stopping" and row.base_models == ["tiny"]
    assert row.capabilities["vocab_size"] == 128 and row.capabilities["devices"] == ["fake"]


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_failing_slice_costs_only_the_culprit(house, culprit):
    class Picky(FakeBackend):
        def step_sample(self):
            for running in self._running.values():
                if len(running) == 3:
                    raise ValueError("three is too many")
            return super().step_sample()

    requests = [replace(sample(), num_samples=3 if n == culprit else 1) for n in range(3)]
    names = [house.submit(request) for request in requests]
    house.run(*names, backend=Picky("tiny", house.config))
    for n, name in enumerate(names):
        if n == culprit:
            assert house.result(name).category == ErrorCategory.SERVER
        else:
            assert len(house.result(name).sequences[0].tokens) == 8


def test_a_save_that_cannot_be_written_fails_alone(house, monkeypatch):
    model_id, created = house.create()
    house.run(created)
    written = house.artifacts.create

    def create(write, metadata=None):
        if metadata.get("kind") == "weights":
            raise OSError(28, "No space left on device")
        return written(write, metadata)

    monkeypatch.setattr(house.artifacts, "create", create)
    save = house.submit(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=1)
    after = house.submit(forward_backward(), model_id=model_id, seq_id=2)
    house.run(save, after)
    failure = house.result(save)
    assert failure.category == ErrorCategory.SERVER and "No space left" in failure.message
    assert isinstance(house.result(after), ForwardBackwardOutput)


def test_a_backlog_beyond_the_memory_waits_in_the_database(tmp_path):
    house = House(tmp_path, max_backlog_bytes=1)
    model_id, _ = house.create()
    samples = [house.submit(sample(max_tokens=1)) for _ in range(300)]
    later = house.submit(forward_backward(2), model_id=model_id, seq_id=2)
    first = house.submit(forward_backward(1), model_id=model_id, seq_id=1)
    step = house.submit(optim_step(), model_id=model_id, seq_id=3)
    house.run(*samples, first, later, step)
    assert house.api.read(lambda tx: effect_orders(tx, model_id)) == [None, 1, 2, 3]
    house.close()
