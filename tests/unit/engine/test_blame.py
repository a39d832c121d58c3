"""What takes an engine down, or keeps it from bringing something back, hurts the one who asked for it alone."""

import threading

import pytest

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.ids import CheckpointPath, SamplerId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.contract.results import Failure
from skyrl_tx.engine.attempts import Attempts
from skyrl_tx.store import checkpoints, futures, snapshots
from skyrl_tx.testing.engine_house import House, datum, forward_backward, optim_step, sample
from skyrl_tx.testing.waiting import until


class Faulty(FakeBackend):
    """Raises in one place, for one model and the samplers made from it."""

    def __init__(self, house, where, model_id, error):
        super().__init__("tiny", house.config)
        self.where, self.model_id, self.error = where, model_id, error

    def _raise_in(self, where, model_id):
        if (where, model_id) == (self.where, self.model_id):
            raise self.error

    def restore(self, model_id, spec, source, parts):
        self._raise_in("restore", model_id)
        super().restore(model_id, spec, source, parts)

    def forward_backward(self, batch):  # used by replays alone
        self._raise_in("replay", batch.examples[0].model_id)
        return super().forward_backward(batch)

    def load_sampler(self, sampler, source):
        self._raise_in("load_sampler", self.model_id)
        super().load_sampler(sampler, source)

    def capture(self, model_id, parts):
        self._raise_in("capture", model_id)
        return super().capture(model_id, parts)


def trained(house, name):
    """A model that took a step, and a sampler of its weights."""
    model_id, _ = house.create(name)
    for seq_id, request in enumerate((forward_backward(), optim_step()), 1):
        house.submit(request, model_id=model_id, seq_id=seq_id)
    saved = house.answer(SaveWeights(kind="sampler_weights", name="s"), model_id=model_id, seq_id=3)
    path = CheckpointPath.parse(saved.path)
    return model_id, SamplerId(house.api.read(lambda tx: checkpoints.get(tx, path, 0.0)).artifact_id)


@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), RuntimeError("RESOURCE_EXHAUSTED: 2 GiB"), BackendLost("unplugged")],
    ids=["file", "memory", "device"],
)
@pytest.mark.parametrize("where", ["restore", "replay", "load_sampler"])
def test_what_cannot_be_brought_back_fails_who_asks_for_it(tmp_path, where, error):
    house = House(tmp_path)
    (bad, sampler), (good, other) = trained(house, "bad"), trained(house, "good")
    if where == "replay":
        house.api.write(lambda tx: snapshots.delete(tx, bad))
    if where == "load_sampler":
        deadly = house.submit(sample(sampler=sampler))
        beside = [house.submit(request) for request in (sample(), sample((67,)))]
    else:
        deadly = house.submit(forward_backward(1), model_id=bad, seq_id=4)
        beside = [house.submit(sample(sampler=other))]
    beside.append(house.submit(forward_backward(1), model_id=good, seq_id=4))
    is_deadly = isinstance(error, BackendLost)
    for _ in range(house.settings.max_attempts * is_deadly):
        with pytest.raises(BackendLost):
            house.run(deadly, *beside, backend=Faulty(house, where, bad, error))
    house.run(deadly, *beside, backend=Faulty(house, where, bad, error))
    failure = house.result(deadly)
    assert failure.category == ErrorCategory.SERVER
    assert ("the engine ended 3 times" if is_deadly else str(error)) in failure.message
    assert not any(isinstance(house.result(request_id), Failure) for request_id in beside)
    house.close()


def test_a_snapshot_that_cannot_be_read_is_made_again_from_the_log(house, caplog):
    model_id, _ = trained(house, "m")
    kept = house.api.read(lambda tx: snapshots.get(tx, model_id)).artifact_id
    open_artifact = house.artifacts.open

    def refuse(artifact_id, **options):
        if artifact_id == kept:
            raise PermissionError(13, "Permission denied")
        return open_artifact(artifact_id, **options)

    house.artifacts.open = refuse
    result = house.answer(forward_backward(1), model_id=model_id, seq_id=4)
    assert result.metrics["num_datums:sum"] == 2
    assert "Permission denied; replaying it from its beginning" in caplog.text.replace("'", "")


def test_a_state_that_cannot_be_taken_costs_a_snapshot_and_nothing_else(house, caplog):
    model_id, created = house.create()
    step = [house.submit(request, model_id=model_id, seq_id=n) for n, request in enumerate((forward_backward(),), 1)]
    house.run(created, *step, backend=Faulty(house, "capture", model_id, RuntimeError("RESOURCE_EXHAUSTED")))
    assert "RESOURCE_EXHAUSTED" in caplog.text
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)) is None
    result = house.answer(optim_step(), model_id=model_id, seq_id=2)
    assert result.metrics["unclipped_grad_l2:mean"] > 0, "the pass was repeated"


class Poisoned(FakeBackend):
    """Loses its device when a sample of one prompt, or a pass of so many tokens, is half done."""

    def __init__(self, house, prompt=None, length=None):
        super().__init__("tiny", house.config)
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

        def watched():
            if lengths and lengths.pop(0) == self.length:
                raise BackendLost("poison")
            return step()

        whole.step = watched
        return whole


def test_a_sample_that_ends_engines_costs_the_pass_beside_it_nothing(house):
    house.config = house.config.model_copy(update={"slice_tokens": 1})
    model_id, created = house.create()
    house.run(created)
    deadly = house.submit(sample((66, 66), max_tokens=50, eos_stops=False))
    long = house.submit(forward_backward(data=tuple(map(datum, range(20)))), model_id=model_id, seq_id=1)
    beside = house.submit(sample(max_tokens=100, eos_stops=False))
    for _ in range(house.settings.max_attempts):
        with pytest.raises(BackendLost):
            house.run(deadly, long, beside, backend=Poisoned(house, prompt=[66, 66]))
    house.run(deadly, long, beside, backend=Poisoned(house, prompt=[66, 66]))
    assert "the engine ended 3 times" in house.result(deadly).message
    assert house.result(long).metrics["num_datums:sum"] == 20
    assert len(house.result(beside).sequences[0].tokens) == 100


def test_a_pass_that_ends_engines_costs_the_sample_beside_it_nothing(house):
    house.config = house.config.model_copy(update={"slice_tokens": 1})
    model_id, created = house.create()
    house.run(created)
    data = (*map(datum, range(10)), datum(0, 13))
    deadly = house.submit(forward_backward(data=data), model_id=model_id, seq_id=1)
    beside = [house.submit(sample((65 + n,), max_tokens=100, eos_stops=False)) for n in range(3)]
    for _ in range(house.settings.max_attempts):
        with pytest.raises(BackendLost):
            house.run(deadly, *beside, backend=Poisoned(house, length=13))
    house.run(deadly, *beside, backend=Poisoned(house, length=13))
    assert "the engine ended 3 times" in house.result(deadly).message
    assert [len(house.result(request_id).sequences[0].tokens) for request_id in beside] == [100, 100, 100]


def test_suspects_are_first_and_then_all_run_together_again(house):
    house.config = house.config.model_copy(update={"slice_tokens": 1})
    model_id, created = house.create()
    other_id, other = house.create("other")
    house.run(created, other)
    suspects = [
        house.submit(forward_backward(data=tuple(map(datum, range(5)))), model_id=model_id, seq_id=1),
        house.submit(sample(max_tokens=30, eos_stops=False)),
    ]
    house.api.write(lambda tx: futures.mark_attempt(tx, suspects))
    others = [
        house.submit(forward_backward(data=tuple(map(datum, range(5)))), model_id=other_id, seq_id=1),
        house.submit(sample((67,), max_tokens=30, eos_stops=False)),
    ]
    under_way: list[int] = []

    class Watched(FakeBackend):
        def step_sample(self):
            under_way.append(len(house.api.read(lambda tx: futures.statuses(tx, [*suspects, *others]))))
            return super().step_sample()

    house.run(*suspects, *others, backend=Watched("tiny", house.config))
    assert under_way[:30] == [0] * 30, "nothing else runs beside the sample that is one"
    assert set(under_way[30:]) == {2, 3}, "then the pass, then the others, side by side"


def test_what_runs_when_an_engine_is_told_to_stop_is_not_to_blame_for_its_end(house):
    """Four times an engine is told to stop in the middle of a pass, and is killed before the device has finished it."""
    model_id, created = house.create()
    house.run(created)
    long = house.submit(forward_backward(), model_id=model_id, seq_id=1)
    ends: list[int] = []

    def attempts():
        return house.api.read(lambda tx: futures.attempts(tx, [long]))

    class Busy(FakeBackend):
        def begin_pass(self, batch, *, backward):
            ends.append(attempts())
            house.api.write(  # the watch tells the engine to stop
                lambda tx: futures.complete(tx, watched, b"", failed=True, effect_order=None, now=0.0)
            )
            until(lambda: attempts() == 0)
            raise BackendLost("killed")

    for _ in range(house.settings.max_attempts + 1):
        watched = house.submit(sample(max_tokens=4000, eos_stops=False))
        with pytest.raises(BackendLost):
            house.run(watched, backend=Busy("tiny", house.config))
    assert ends == [1] * 4
    house.run(long)
    assert house.result(long).metrics["num_datums:sum"] == 2


def test_marks_are_given_back_once_and_only_where_they_are(house):
    attempts = Attempts(house.api)
    first, second = (house.submit(sample()) for _ in range(2))
    for _ in range(2):
        attempts.mark([first, second])
        attempts.forget([first])

    def marks():
        return [pending.attempts for pending in house.api.read(lambda tx: futures.pending(tx, 0, 10))]

    assert marks() == [2, 2]
    attempts.give_back([first, second])
    attempts.give_back([first, second])
    assert marks() == [2, 1], "what was forgotten is left alone"
    attempts.mark([first])
    stop = threading.Event()
    stop.set()
    attempts.give_back_when(stop)
    attempts.mark([first, second])
    assert marks() == [2, 1], "and nothing is marked any more"


def test_files_that_cannot_be_removed_keep_nobody_waiting(tmp_path, caplog):
    house = House(tmp_path, housekeeping_interval_s=0.001)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    house.artifacts.collect = refuse
    output = house.answer(sample(max_tokens=200, eos_stops=False))
    assert len(output.sequences[0].tokens) == 200
    assert "files that nothing points at could not be removed" in caplog.text
    house.close()
