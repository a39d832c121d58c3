"""A request that crashes engines or cannot be restored fails without affecting other requests."""

import threading

import pytest

from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.ids import CheckpointPath, SamplerId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.contract.results import Failure
from skyrl_tx.engine.request_log import DeliveryAttempts
from skyrl_tx.store import checkpoints, engine_state, futures, models
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, datum, forward_backward, optim_step, sample
from tests.support.logged_error import find_logged_error
from tests.support.polling import until


class FaultyBackend(FakeBackend):
    """Raises an error in one method for one model and its samplers."""

    def __init__(self, harness, where, model_id, error):
        super().__init__("tiny", harness.config)
        self.where, self.model_id, self.error = where, model_id, error

    def _raise_in(self, where, model_id):
        if (where, model_id) == (self.where, self.model_id):
            raise self.error

    def restore(self, model_id, spec, source, parts):
        self._raise_in("restore", model_id)
        super().restore(model_id, spec, source, parts)

    def forward_backward(self, batch):  # only replay calls this
        self._raise_in("replay", batch.examples[0].model_id)
        return super().forward_backward(batch)

    def load_sampler(self, sampler, source):
        self._raise_in("load_sampler", self.model_id)
        super().load_sampler(sampler, source)

    def capture(self, model_id, parts):
        self._raise_in("capture", model_id)
        return super().capture(model_id, parts)


def train_and_save(harness, name):
    """Train a model for one step, save a sampler, and return both ids."""
    model_id, _ = harness.create(name)
    for seq_id, request in enumerate((forward_backward(), optim_step()), 1):
        harness.submit(request, model_id=model_id, seq_id=seq_id)
    saved = harness.answer(SaveWeights(kind="sampler_weights", name="s"), model_id=model_id, seq_id=3)
    path = CheckpointPath.parse(saved.path)
    return model_id, SamplerId(harness.api.read(lambda tx: checkpoints.get(tx, path, 0.0)).artifact_id)


ERRORS = OSError(5, "Input/output error"), RuntimeError("RESOURCE_EXHAUSTED: 2 GiB"), BackendLost("unplugged")


@pytest.mark.parametrize(
    ("where", "error"),
    [
        pytest.param(where, error, marks=() if (place + kind) % 3 == 0 else pytest.mark.slow)
        for place, where in enumerate(("restore", "replay", "load_sampler"))
        for kind, error in enumerate(ERRORS)
    ],
)
def test_restore_failure_fails_only_the_request_that_needs_it(tmp_path, where, error, caplog):
    harness = EngineHarness(tmp_path)
    (bad, sampler), (good, other) = train_and_save(harness, "bad"), train_and_save(harness, "good")
    if where == "replay":
        harness.api.write(lambda tx: models.delete_snapshot(tx, bad))
    if where == "load_sampler":
        deadly = harness.submit(sample(sampler=sampler))
        others = [harness.submit(request) for request in (sample(), sample((67,)))]
    else:
        deadly = harness.submit(forward_backward(1), model_id=bad, seq_id=4)
        others = [harness.submit(sample(sampler=other))]
    others.append(harness.submit(forward_backward(1), model_id=good, seq_id=4))
    is_deadly = isinstance(error, BackendLost)

    for _ in range(
        (1 + harness.settings.max_attempts) * is_deadly
    ):  # together with the other requests the first time, then alone
        with pytest.raises(BackendLost):
            harness.run(deadly, *others, backend=FaultyBackend(harness, where, bad, error))

    harness.run(deadly, *others, backend=FaultyBackend(harness, where, bad, error))
    failure = harness.result(deadly)
    assert failure.category == ErrorCategory.SERVER

    if is_deadly:
        assert "the engine crashed or hung 3 times" in failure.message
    else:
        assert find_logged_error(failure.message, caplog) is error
    assert not any(isinstance(harness.result(request_id), Failure) for request_id in others)

    harness.close()


def test_unreadable_snapshot_is_replaced_by_replay(harness, caplog):
    model_id, _ = train_and_save(harness, "m")
    kept = harness.api.read(lambda tx: models.get_snapshot(tx, model_id)).artifact_id
    open_artifact = harness.artifacts.open

    def refuse(artifact_id):
        if artifact_id == kept:
            raise PermissionError(13, "Permission denied")
        return open_artifact(artifact_id)

    harness.artifacts.open = refuse
    result = harness.answer(forward_backward(1), model_id=model_id, seq_id=4)
    assert result.metrics["num_datums:sum"] == 2
    assert "Permission denied; replaying all of its requests" in caplog.text.replace("'", "")


def test_failed_capture_costs_only_the_snapshot(harness, caplog):
    model_id, created = harness.create()
    step = [harness.submit(request, model_id=model_id, seq_id=n) for n, request in enumerate((forward_backward(),), 1)]
    harness.run(created, *step, backend=FaultyBackend(harness, "capture", model_id, RuntimeError("RESOURCE_EXHAUSTED")))
    assert "RESOURCE_EXHAUSTED" in caplog.text
    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)) is None
    result = harness.answer(optim_step(), model_id=model_id, seq_id=2)
    assert result.metrics["unclipped_grad_l2:mean"] > 0, "the pass was replayed"


class PoisonedBackend(FakeBackend):
    """Loses its device during a sample with a given prompt or a pass with an example of a given length."""

    def __init__(self, harness, prompt=None, length=None):
        super().__init__("tiny", harness.config)
        self.prompt, self.length, self.poisoned = prompt, length, {}

    def begin_sample(self, batch):
        super().begin_sample(batch)
        if batch.requests[0].prompt.tolist() == self.prompt:
            self.poisoned[batch.requests[0].request_id] = 3

    def step_sample(self):
        deltas = super().step_sample()
        for request_id in self.poisoned:
            self.poisoned[request_id] -= 1
            if not self.poisoned[request_id]:
                raise BackendLost("poison")
        return deltas

    def begin_pass(self, batch, *, backward):
        whole = super().begin_pass(batch, backward=backward)
        step, lengths = whole.step, [len(example.tokens) for example in batch.examples]

        def step_or_fail():
            if lengths and lengths.pop(0) == self.length:
                raise BackendLost("poison")
            return step()

        whole.step = step_or_fail
        return whole


def test_crashing_sample_does_not_fail_a_running_pass(harness):
    harness.config = harness.config.model_copy(update={"slice_tokens": 1})
    model_id, created = harness.create()
    harness.run(created)
    deadly = harness.submit(sample((66, 66), max_tokens=50, eos_stops=False))
    long = harness.submit(forward_backward(data=tuple(map(datum, range(20)))), model_id=model_id, seq_id=1)
    others = harness.submit(sample(max_tokens=100, eos_stops=False))
    for _ in range(1 + harness.settings.max_attempts):  # together with the other requests the first time, then alone
        with pytest.raises(BackendLost):
            harness.run(deadly, long, others, backend=PoisonedBackend(harness, prompt=[66, 66]))
    harness.run(deadly, long, others, backend=PoisonedBackend(harness, prompt=[66, 66]))
    assert "the engine crashed or hung 3 times" in harness.result(deadly).message
    assert harness.result(long).metrics["num_datums:sum"] == 20
    assert len(harness.result(others).sequences[0].tokens) == 100


def test_crashing_pass_does_not_fail_running_samples(harness):
    harness.config = harness.config.model_copy(update={"slice_tokens": 1})
    model_id, created = harness.create()
    harness.run(created)
    data = (*map(datum, range(10)), datum(0, 13))
    deadly = harness.submit(forward_backward(data=data), model_id=model_id, seq_id=1)
    others = [harness.submit(sample((65 + n,), max_tokens=100, eos_stops=False)) for n in range(3)]
    for _ in range(1 + harness.settings.max_attempts):  # together with the other requests the first time, then alone
        with pytest.raises(BackendLost):
            harness.run(deadly, *others, backend=PoisonedBackend(harness, length=13))
    harness.run(deadly, *others, backend=PoisonedBackend(harness, length=13))
    assert "the engine crashed or hung 3 times" in harness.result(deadly).message
    assert [len(harness.result(request_id).sequences[0].tokens) for request_id in others] == [100, 100, 100]


class ProcessKilled(BaseException):
    """Simulates a signal from outside that ends the process."""


def test_kills_from_outside_fail_no_request(harness):
    model_id, created = harness.create()
    harness.run(created)
    running = [harness.submit(request, model_id=model_id, seq_id=n) for n, request in ((1, forward_backward()),)]
    running.append(harness.submit(sample()))

    class Victim(FakeBackend):
        def begin_pass(self, batch, *, backward):
            raise ProcessKilled

        def step_sample(self):
            raise ProcessKilled

    for _ in range(2 + harness.settings.max_attempts):
        with pytest.raises(ProcessKilled):
            harness.run(*running, backend=Victim("tiny", harness.config))
    harness.run(*running)
    assert harness.result(running[0]).metrics["num_datums:sum"] == 2
    assert len(harness.result(running[1]).sequences[0].tokens) == 8
    step = harness.answer(optim_step(), model_id=model_id, seq_id=2)
    assert step.metrics["unclipped_grad_l2:mean"] > 0


def test_a_kill_between_crashes_is_not_counted_with_them(harness):
    model_id, created = harness.create()
    harness.run(created)
    deadly = harness.submit(forward_backward(data=(datum(0, 13),)), model_id=model_id, seq_id=1)

    class Victim(FakeBackend):
        def begin_pass(self, batch, *, backward):
            raise ProcessKilled

    def crashes():
        return harness.api.read(lambda tx: futures.get_max_crashes(tx, [deadly]))

    counted = []
    for number in range(6):
        is_kill = number in (2, 4)
        backend = Victim("tiny", harness.config) if is_kill else PoisonedBackend(harness, length=13)
        with pytest.raises(ProcessKilled if is_kill else BackendLost):
            harness.run(deadly, backend=backend)
        counted.append(crashes())
    assert counted == [0, 1, 1, 2, 2, 3], "the first crash came while others might have run"
    harness.run(deadly)
    assert "the engine crashed or hung 3 times" in harness.result(deadly).message


def quarantine(harness, *requests):
    """Mark requests as if an engine had crashed while it ran them."""
    harness.api.write(lambda tx: futures.count_delivery_attempt(tx, requests))


def test_quarantined_requests_run_alone_and_then_others_run_together(harness):
    harness.config = harness.config.model_copy(update={"slice_tokens": 1})
    model_id, created = harness.create()
    other_id, other = harness.create("other")
    harness.run(created, other)
    quarantined = [
        harness.submit(forward_backward(data=tuple(map(datum, range(5)))), model_id=model_id, seq_id=1),
        harness.submit(sample(max_tokens=30, eos_stops=False)),
    ]
    quarantine(harness, *quarantined)
    others = [
        harness.submit(forward_backward(data=tuple(map(datum, range(5)))), model_id=other_id, seq_id=1),
        harness.submit(sample((67,), max_tokens=30, eos_stops=False)),
    ]
    num_done: list[int] = []

    class Watched(FakeBackend):
        def step_sample(self):
            num_done.append(len(harness.api.read(lambda tx: futures.get_outcomes(tx, [*quarantined, *others]))))
            return super().step_sample()

    harness.run(*quarantined, *others, backend=Watched("tiny", harness.config))
    assert num_done[:30] == [0] * 30, "nothing else runs next to the quarantined sample"
    assert set(num_done[30:]) == {2, 3}, "then the quarantined pass runs, then the others together"


class RecordingBackend(FakeBackend):
    """Records the requests of each pass and the engine's status at that time."""

    def __init__(self, harness):
        super().__init__("tiny", harness.config)
        self.harness, self.passes, self.statuses = harness, [], []

    def begin_pass(self, batch, *, backward):
        self.passes.append(list(dict.fromkeys(example.request_id for example in batch.examples)))
        self.statuses.append(self.harness.api.read(engine_state.get).status)
        return super().begin_pass(batch, backward=backward)


def test_sequence_gap_that_was_filled_after_the_crash_runs_before_the_quarantined_pass(harness):
    model_id, created = harness.create()
    harness.run(created)
    late = [harness.submit(forward_backward(seq_id), model_id=model_id, seq_id=seq_id) for seq_id in (3, 4)]
    quarantine(harness, *late)
    after, *filled = (harness.submit(forward_backward(n), model_id=model_id, seq_id=n) for n in (5, 1, 2))
    backend = RecordingBackend(harness)
    harness.run(*late, *filled, after, backend=backend)
    assert backend.passes == [[request_id] for request_id in (*filled, *late, after)]
    assert backend.statuses == ["recovering"] * 4 + ["ready"]
    records = harness.api.read(lambda tx: futures.read_log(tx, model_id, 1))
    assert [record.request_id for record in records] == [*filled, *late, after]


def test_sequence_gap_before_a_quarantined_pass_is_not_waited_for_again(tmp_path):
    harness = EngineHarness(tmp_path, gap_timeout_s=3600.0)
    model_id, created = harness.create()
    harness.run(created)
    late = harness.submit(forward_backward(), model_id=model_id, seq_id=2)
    quarantine(harness, late)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=9)
    harness.run(late, step)
    assert harness.result(late).metrics["num_datums:sum"] == 2
    assert harness.result(step).metrics["unclipped_grad_l2:mean"] > 0
    harness.close()


def test_request_beyond_a_sequence_gap_is_left_to_the_main_loop(harness):
    model_id, created = harness.create()
    harness.run(created)
    beyond, quarantined = (harness.submit(forward_backward(n), model_id=model_id, seq_id=n) for n in (7, 1))
    quarantine(harness, quarantined)
    backend = RecordingBackend(harness)
    harness.run(beyond, quarantined, backend=backend)
    assert backend.passes == [[quarantined], [beyond]]
    assert backend.statuses == ["recovering", "ready"]


def test_quarantined_pass_of_an_evicted_model_is_bit_equal(tmp_path):
    def gradient_norm(name, *, is_quarantined):
        harness = EngineHarness(tmp_path / name)
        model_id, _ = train_and_save(harness, "m")
        requests = [
            harness.submit(request, model_id=model_id, seq_id=seq_id)
            for seq_id, request in enumerate((forward_backward(1), optim_step(), forward_backward(2), optim_step()), 4)
        ]
        if is_quarantined:
            quarantine(harness, *requests)
        harness.run(*requests)
        metrics = harness.result(requests[-1]).metrics
        harness.close()
        return metrics

    assert gradient_norm("crashed", is_quarantined=True) == gradient_norm("undisturbed", is_quarantined=False)


def test_crash_in_the_start_up_phase_counts_for_the_running_request_only(harness):
    model_id, created = harness.create()
    harness.run(created)
    first, deadly = (
        harness.submit(forward_backward(data=(datum(0, length),)), model_id=model_id, seq_id=seq_id)
        for seq_id, length in ((1, 5), (2, 13))
    )
    save = harness.submit(SaveWeights(kind="sampler_weights", name="s"), model_id=model_id, seq_id=3)
    waiting = harness.submit(sample())
    quarantine(harness, first, deadly, save)
    with pytest.raises(BackendLost):
        harness.run(deadly, backend=PoisonedBackend(harness, length=13))
    assert set(harness.api.read(lambda tx: futures.get_outcomes(tx, [first, deadly, save, waiting]))) == {first}

    attempts = {row.request_id: row.attempts for row in harness.api.read(lambda tx: futures.list_pending(tx, 0, 10))}
    assert attempts == {deadly: 2, save: 1, waiting: 0}

    harness.run(deadly, save, waiting)
    assert harness.result(save).path


def test_stop_in_the_start_up_phase_counts_no_attempt(harness):
    harness.config = harness.config.model_copy(update={"slice_tokens": 1})
    long = harness.submit(sample(max_tokens=4000, eos_stops=False))
    stop = harness.submit(sample())
    quarantine(harness, long)

    class Stopping(FakeBackend):
        def step_sample(self):
            harness.api.write(lambda tx: futures.complete(tx, stop, b"", failed=True, effect_order=None, now=0.0))
            return super().step_sample()

    harness.run(stop, backend=Stopping("tiny", harness.config))
    (row,) = harness.api.read(lambda tx: futures.list_pending(tx, 0, 10))
    assert (row.request_id, row.attempts) == (long, 1)


def test_kill_after_a_stop_counts_no_delivery_attempt(harness):
    """Four engines are stopped in the middle of a pass and killed before the device finishes it."""
    model_id, created = harness.create()
    harness.run(created)
    long = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    ends: list[int] = []

    class Busy(FakeBackend):
        def begin_pass(self, batch, *, backward):
            ends.append(harness.attempts(long))
            harness.api.write(  # after this, the harness stops the engine
                lambda tx: futures.complete(tx, watched, b"", failed=True, effect_order=None, now=0.0)
            )
            until(lambda: harness.attempts(long) == 0)
            raise BackendLost("killed")

    for _ in range(harness.settings.max_attempts + 1):
        watched = harness.submit(sample(max_tokens=4000, eos_stops=False))
        with pytest.raises(BackendLost):
            harness.run(watched, backend=Busy("tiny", harness.config))
    assert ends == [1] * 4
    harness.run(long)
    assert harness.result(long).metrics["num_datums:sum"] == 2


def test_delivery_attempts_are_undone_once(harness):
    attempts = DeliveryAttempts(harness.api)
    first, second = (harness.submit(sample()) for _ in range(2))
    for _ in range(2):
        attempts.count([first, second])
        attempts.forget([first])

    def counts():
        return [pending.attempts for pending in harness.api.read(lambda tx: futures.list_pending(tx, 0, 10))]

    assert counts() == [2, 2]
    attempts.undo([first, second])
    attempts.undo([first, second])
    assert counts() == [2, 1], "forgotten requests keep their count"
    attempts.count([first])
    stop = threading.Event()
    stop.set()
    attempts.undo_all_on_stop(stop)
    attempts.count([first, second])
    assert counts() == [2, 1], "nothing is counted after the stop"


def test_failed_garbage_collection_delays_no_request(tmp_path, caplog):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    harness.artifacts.collect = refuse
    output = harness.answer(sample(max_tokens=200, eos_stops=False))
    assert len(output.sequences[0].tokens) == 200
    assert "cannot remove unreferenced artifacts" in caplog.text
    harness.close()
