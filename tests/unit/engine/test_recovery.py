"""An engine that loses its device anywhere is followed by one that goes on as if nothing had been."""

import pytest

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract.backend import ALL_PARTS
from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.contract.requests import LoadWeights, SaveWeights
from skyrl_tx.store import checkpoints, futures, snapshots
from skyrl_tx.testing.engine_house import SPEC, House, Perishable, datum, forward_backward, optim_step, sample

NUM_TURNS = 6


class Keeping(FakeBackend):
    """Remembers what its models came to, beyond its end."""

    def close(self):
        self.last = {model_id: self.capture(model_id, ALL_PARTS).state for model_id in self._models}
        super().close()


def submit_run(house):
    """Two models that train with accumulation and saves, and samples beside; returns all requests."""
    names = []
    for model in ("a", "b"):
        model_id, created = house.create(model)
        names.append(created)
        seq_id = 0
        for turn in range(NUM_TURNS):
            steps = [forward_backward(turn), forward_backward(turn + 50), optim_step()]
            if turn == 2:
                steps.insert(1, SaveWeights(kind="weights", name="middle"))
            if turn == NUM_TURNS - 1:
                steps.append(forward_backward(99))  # a gradient that stays pending
            for request in steps:
                seq_id += 1
                names.append(house.submit(request, model_id=model_id, seq_id=seq_id))
        names.append(house.submit(sample(temperature=1.0, max_tokens=40)))
    return names


def shape_of(result):
    """A result without what names this house's session."""
    if hasattr(result, "logprobs"):
        return [array.tobytes() for array in result.logprobs], result.metrics
    if hasattr(result, "sequences"):
        return [(sequence.tokens.tolist(), sequence.logprobs.tobytes()) for sequence in result.sequences]
    return getattr(result, "metrics", type(result))


def weights_of(house, backend):
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
    house = House(tmp_path_factory.mktemp("undisturbed"), snapshot_effects=10_000)
    names = submit_run(house)
    backend = Keeping("tiny", house.config)
    house.run(*names, backend=backend)
    yield [shape_of(house.result(name)) for name in names], weights_of(house, backend)
    house.close()


@pytest.mark.parametrize("snapshot_effects", [1, 4, 10_000])
@pytest.mark.parametrize("calls_left", [1, 2, 5, 11, 18])
def test_losing_the_device_changes_no_bit(tmp_path, undisturbed, calls_left, snapshot_effects):
    house = House(tmp_path, snapshot_effects=snapshot_effects)
    names = submit_run(house)
    for extra in (0, 7):
        with pytest.raises(BackendLost):
            house.run(*names, backend=Perishable(house.config, calls_left + extra))
    backend = Keeping("tiny", house.config)
    house.run(*names, backend=backend)
    results, weights = undisturbed
    assert [shape_of(house.result(name)) for name in names] == results
    # A model whose requests were all answered before the loss is brought back only when asked for.
    found = weights_of(house, backend)
    assert found == {name: weights[name] for name in found}
    house.close()


def test_a_good_stop_leaves_nothing_to_repeat(house):
    model_id, created = house.create()
    house.submit(forward_backward(), model_id=model_id, seq_id=1)
    step = house.submit(optim_step(), model_id=model_id, seq_id=2)
    pending = house.submit(forward_backward(1), model_id=model_id, seq_id=3)
    house.run(created, step, pending)
    row = house.api.read(lambda tx: snapshots.get(tx, model_id))
    assert row.effect_order == 4

    class NoPass(FakeBackend):
        def begin_pass(self, batch, *, backward):
            raise AssertionError("nothing should be repeated")

    last = house.submit(optim_step(), model_id=model_id, seq_id=4)
    house.run(last, backend=NoPass("tiny", house.config))
    assert house.result(last).metrics["unclipped_grad_l2:mean"] > 0


def test_a_full_disk_costs_snapshots_and_nothing_else(tmp_path, caplog):
    house, twin = (House(tmp_path / name, snapshot_effects=1, snapshot_interval_s=0) for name in ("full", "roomy"))

    def trained(house, model_id, first, last):
        """Results of passes and steps with these numbers."""
        requests = {number: forward_backward(number) if number % 2 else optim_step() for number in range(first, last)}
        names = [house.submit(request, model_id=model_id, seq_id=number) for number, request in requests.items()]
        house.run(*names)
        return [shape_of(house.result(name)) for name in names]

    (model_id, _), (twin_id, _) = house.create(), twin.create()
    assert trained(house, model_id, 1, 4) == trained(twin, twin_id, 1, 4)
    kept = house.api.read(lambda tx: snapshots.get(tx, model_id))
    create = house.artifacts.create

    def refuse(*_):
        raise OSError(28, "No space left on device")

    house.artifacts.create = refuse
    for first in (4, 8):  # the second engine repeats what the first could not keep
        assert trained(house, model_id, first, first + 4) == trained(twin, twin_id, first, first + 4)
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)) == kept
    assert "No space left" in caplog.text
    house.artifacts.create = create
    assert trained(house, model_id, 12, 14) == trained(twin, twin_id, 12, 14)
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)).effect_order == kept.effect_order + 10
    house.close()
    twin.close()


def test_a_load_that_was_not_kept_is_repeated(house):
    model_id, _ = house.create()
    house.submit(forward_backward(), model_id=model_id, seq_id=1)
    house.submit(optim_step(), model_id=model_id, seq_id=2)
    saved = house.answer(SaveWeights(kind="weights", name="a"), model_id=model_id, seq_id=3)
    row = house.api.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(saved.path), 0.0))
    load = LoadWeights(path=saved.path, artifact_id=row.artifact_id, spec=SPEC, optimizer=True, create=True)
    copy, loaded = house.make(load, "copy")
    trained = house.submit(forward_backward(5), model_id=copy, seq_id=1)
    with pytest.raises(BackendLost):
        # The pass is the first call; its answer never comes, but the load's does.
        house.run(trained, backend=Perishable(house.config, 0))
    assert house.result(loaded).model_id == copy
    house.run(trained)
    twin = house.answer(forward_backward(5, backward=False), model_id=model_id, seq_id=4)
    assert shape_of(house.result(trained)) == shape_of(twin)


def test_a_request_that_ends_three_engines_fails(house):
    class Allergic(FakeBackend):
        def begin_pass(self, batch, *, backward):
            if any(len(example.tokens) == 13 for example in batch.examples):
                raise BackendLost("13 tokens")
            return super().begin_pass(batch, backward=backward)

    model_id, _ = house.create()
    other_id, _ = house.create("other")
    fine = house.submit(forward_backward(), model_id=other_id, seq_id=1)
    deadly = house.submit(forward_backward(data=(datum(0, 13),)), model_id=model_id, seq_id=1)
    step = house.submit(optim_step(), model_id=model_id, seq_id=2)
    for _ in range(3):
        with pytest.raises(BackendLost):
            house.run(fine, deadly, step, backend=Allergic("tiny", house.config))
    house.run(fine, deadly, step, backend=Allergic("tiny", house.config))
    assert house.result(fine).metrics["num_datums:sum"] == 2
    failure = house.result(deadly)
    assert failure.category == ErrorCategory.SERVER and "3 times" in failure.message
    assert "3 times" in house.result(step).message


def test_samples_given_up_in_good_order_are_no_attempts(house):
    long = house.submit(sample(max_tokens=4000, eos_stops=False))
    short = house.submit(sample(max_tokens=1))
    house.run(short)
    [pending] = house.api.read(lambda tx: futures.pending(tx, 0, 10))
    assert (pending.request_id, pending.attempts) == (long, 0)
    house.run(long)
    assert len(house.result(long).sequences[0].tokens) == 4000
