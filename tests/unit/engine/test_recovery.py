"""After a device loss at any point, the next engine continues with bit-identical results."""

import itertools
import tracemalloc

import pytest

from skyrl_tx.contract.backend import ALL_PARTS
from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.ids import CheckpointPath, SamplingSessionId
from skyrl_tx.contract.requests import LoadWeights, SaveWeights
from skyrl_tx.store import checkpoints, futures, models
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import SPEC, EngineHarness, Perishable, datum, forward_backward, optim_step, sample

NUM_TURNS = 6


class KeepingBackend(FakeBackend):
    """Records the final state of its models."""

    def close(self):
        self.last = {model_id: self.capture(model_id, ALL_PARTS).state for model_id in self._models}
        super().close()


def submit_run(harness):
    """Submit training with gradient accumulation, saves and samples for two models, and return all request ids."""
    names = []

    for model in ("a", "b"):
        model_id, created = harness.create(model)
        names.append(created)
        seq_id = 0
        for turn in range(NUM_TURNS):
            steps = [forward_backward(turn), forward_backward(turn + 50), optim_step()]
            if turn == 2:
                steps.insert(1, SaveWeights(kind="weights", name="middle"))
            if turn == NUM_TURNS - 1:
                steps.append(forward_backward(99))  # this gradient stays pending
            for request in steps:
                seq_id += 1
                names.append(harness.submit(request, model_id=model_id, seq_id=seq_id))
        names.append(harness.submit(sample(temperature=1.0, max_tokens=40)))

    return names


def strip_ids(result):
    """Return a result in a comparable form, without the session's ids."""
    if hasattr(result, "logprobs"):
        return [array.tobytes() for array in result.logprobs], result.metrics
    if hasattr(result, "sequences"):
        return [(sequence.tokens.tolist(), sequence.logprobs.tobytes()) for sequence in result.sequences]
    return getattr(result, "metrics", type(result))


def get_states(harness, backend):
    return {
        model_id.rsplit(":")[-1]: [
            array.tobytes()
            for pair in (state.weights, state.moments.first, state.moments.second, state.gradient)
            for array in (pair.a_RV, pair.b_VR)
        ]
        for model_id, state in backend.last.items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    harness = EngineHarness(tmp_path_factory.mktemp("undisturbed"), snapshot_interval_requests=10_000)
    names = submit_run(harness)
    backend = KeepingBackend("tiny", harness.config)
    harness.run(*names, backend=backend)
    yield [strip_ids(harness.result(name)) for name in names], get_states(harness, backend)
    harness.close()


@pytest.mark.parametrize(
    ("calls_left", "snapshot_interval_requests"),
    [
        pytest.param(
            *case, marks=() if case in ((1, 10_000), (2, 4), (5, 1), (11, 4), (18, 10_000)) else pytest.mark.slow
        )
        for case in itertools.product((1, 2, 5, 11, 18), (1, 4, 10_000))
    ],
)
def test_device_loss_changes_no_bit(tmp_path, undisturbed, calls_left, snapshot_interval_requests):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=snapshot_interval_requests)
    names = submit_run(harness)
    for extra in (0, 7):
        with pytest.raises(BackendLost):
            harness.run(*names, backend=Perishable(harness.config, calls_left + extra))
    backend = KeepingBackend("tiny", harness.config)
    harness.run(*names, backend=backend)
    results, weights = undisturbed
    assert [strip_ids(harness.result(name)) for name in names] == results
    # If all requests of a model had results before the loss, the model is only restored on demand.
    found = get_states(harness, backend)
    assert found == {name: weights[name] for name in found}
    harness.close()


def test_clean_stop_leaves_nothing_to_replay(harness):
    model_id, created = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    pending = harness.submit(forward_backward(1), model_id=model_id, seq_id=3)
    harness.run(created, step, pending)
    row = harness.api.read(lambda tx: models.get_snapshot(tx, model_id))
    assert row.effect_order == 4

    class NoPass(FakeBackend):
        def begin_pass(self, batch, *, backward):
            raise AssertionError("nothing should be repeated")

    last = harness.submit(optim_step(), model_id=model_id, seq_id=4)
    harness.run(last, backend=NoPass("tiny", harness.config))
    assert harness.result(last).metrics["unclipped_grad_l2:mean"] > 0


def test_full_disk_costs_only_snapshots(tmp_path, caplog):
    harness, twin = (
        EngineHarness(tmp_path / name, snapshot_interval_requests=1, snapshot_interval_s=0)
        for name in ("full", "roomy")
    )

    def run_requests(harness, model_id, first, last):
        """Run passes and optimizer steps with the given sequence ids and return their results."""
        requests = {number: forward_backward(number) if number % 2 else optim_step() for number in range(first, last)}
        names = [harness.submit(request, model_id=model_id, seq_id=number) for number, request in requests.items()]
        harness.run(*names)
        return [strip_ids(harness.result(name)) for name in names]

    (model_id, _), (twin_id, _) = harness.create(), twin.create()
    assert run_requests(harness, model_id, 1, 4) == run_requests(twin, twin_id, 1, 4)
    kept = harness.api.read(lambda tx: models.get_snapshot(tx, model_id))
    create = harness.artifacts.create

    def refuse(*_):
        raise OSError(28, "No space left on device")

    harness.artifacts.create = refuse
    for first in (4, 8):  # the second engine repeats the work that the first engine lost
        assert run_requests(harness, model_id, first, first + 4) == run_requests(twin, twin_id, first, first + 4)
    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)) == kept
    assert "No space left" in caplog.text
    harness.artifacts.create = create
    assert run_requests(harness, model_id, 12, 14) == run_requests(twin, twin_id, 12, 14)
    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)).effect_order == kept.effect_order + 10
    harness.close()
    twin.close()


def test_load_after_the_newest_snapshot_is_replayed(harness):
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    harness.submit(optim_step(), model_id=model_id, seq_id=2)
    saved = harness.answer(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=3)
    row = harness.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    load = LoadWeights(path=saved.path, artifact_id=row.artifact_id, spec=SPEC, optimizer=True, create=True)
    copy, loaded = harness.make(load, "copy")
    trained = harness.submit(forward_backward(5), model_id=copy, seq_id=1)
    with pytest.raises(BackendLost):
        # The pass is the first device call. It has no result, but the load has one.
        harness.run(trained, backend=Perishable(harness.config, 0))
    assert harness.result(loaded).model_id == copy
    harness.run(trained)
    twin = harness.answer(forward_backward(5, backward=False), model_id=model_id, seq_id=4)
    assert strip_ids(harness.result(trained)) == strip_ids(twin)


def test_request_that_crashes_three_engines_while_it_runs_alone_fails(harness):
    class Allergic(FakeBackend):
        def begin_pass(self, batch, *, backward):
            if any(len(example.tokens) == 13 for example in batch.examples):
                raise BackendLost("13 tokens")
            return super().begin_pass(batch, backward=backward)

    model_id, _ = harness.create()
    other_id, _ = harness.create("other")
    fine = harness.submit(forward_backward(), model_id=other_id, seq_id=1)
    deadly = harness.submit(forward_backward(data=(datum(0, 13),)), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    for _ in range(1 + 3):  # the first time it ran together with another request
        with pytest.raises(BackendLost):
            harness.run(fine, deadly, step, backend=Allergic("tiny", harness.config))
    harness.run(fine, deadly, step, backend=Allergic("tiny", harness.config))
    assert harness.result(fine).metrics["num_datums:sum"] == 2
    failure = harness.result(deadly)
    assert failure.category == ErrorCategory.SERVER and "3 times" in failure.message
    assert "3 times" in harness.result(step).message


def test_samples_stopped_cleanly_count_no_delivery_attempt(harness):
    long = harness.submit(sample(max_tokens=4000, eos_stops=False))
    short = harness.submit(sample(max_tokens=1))
    harness.run(short)
    [pending] = harness.api.read(lambda tx: futures.list_pending(tx, 0, 10))
    assert (pending.request_id, pending.attempts) == (long, 0)
    harness.run(long)
    assert len(harness.result(long).sequences[0].tokens) == 4000


def test_replay_holds_one_request_in_memory(tmp_path):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=10_000)
    model_id, last = harness.create()
    size, count = 2**20, 16

    for seq_id in range(1, count + 1):
        name = SamplingSessionId(f"{harness.session_id}:sample:{seq_id}")
        save = SaveWeights(
            kind="sampler_weights", name=None, sampling_session_id=name, user_metadata={"large": "x" * size}
        )
        last = harness.submit(save, model_id=model_id, seq_id=seq_id)

    harness.run(last)
    harness.api.write(lambda tx: models.delete_snapshot(tx, model_id))
    last = harness.submit(forward_backward(), model_id=model_id, seq_id=count + 1)
    tracemalloc.start()

    try:
        harness.run(last)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert harness.result(last).metrics["num_datums:sum"] == 2
    assert peak < 8 * size, f"{peak / 2**20:.0f} MiB"

    harness.close()
