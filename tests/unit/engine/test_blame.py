"""What takes an engine down, or keeps it from bringing something back, hurts the one who asked for it alone."""

import pytest

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.ids import CheckpointPath, SamplerId
from skyrl_tx.contract.requests import SaveWeights
from skyrl_tx.contract.results import Failure
from skyrl_tx.store import checkpoints, snapshots
from skyrl_tx.testing.engine_house import House, forward_backward, optim_step, sample


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
