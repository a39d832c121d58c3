"""Unnamed samplers: usable before their files are written, and there again whatever happens to those."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.ids import SamplingSessionId
from skyrl_tx.contract.requests import SaveWeights, UnloadModel
from skyrl_tx.contract.results import Failure, SaveWeightsOutput
from skyrl_tx.engine.recovery import sampler_of
from skyrl_tx.store import futures, samplers, snapshots
from skyrl_tx.testing.engine_house import House, forward_backward, optim_step, sample
from skyrl_tx.testing.waiting import until


class Disk:
    """Stands between an engine and its artifacts."""

    def __init__(self, house):
        self.create = house.artifacts.create
        self.num_refused = 0
        self.before = lambda: None
        house.artifacts.create = self.create_after

    def create_after(self, write, metadata=None, artifact_id=None):
        try:
            if artifact_id is not None:  # an unnamed sampler
                self.before()
        except OSError:
            self.num_refused += 1
            raise
        return self.create(write, metadata, artifact_id)


def fail():
    raise OSError("no space left")


def save(number, **changes):
    name = SamplingSessionId(f"s:sample:{number}")
    return SaveWeights(**{"kind": "sampler_weights", "name": None, "sampling_session_id": name, **changes})


def row_of(house, number):
    return house.api.read(lambda tx: samplers.get(tx, SamplingSessionId(f"s:sample:{number}")))


def drawn(house, number):
    """What a sampling session gives, with an engine of its own."""
    output = house.answer(sample(sampler=row_of(house, number).sampler_id, temperature=1.0, max_tokens=20))
    return output.sequences[0].tokens.tolist(), output.sequences[0].logprobs.tobytes()


def train_and_save(house, model_id, first=0, last=3):
    """A step and an unnamed save, several times; the answers' ids."""
    ids, seq_id = [], 3 * first
    for number in range(first, last):
        for request in (forward_backward(number), optim_step(), save(number)):
            seq_id += 1
            ids.append(house.submit(request, model_id=model_id, seq_id=seq_id))
    return ids


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("undisturbed"))
    model_id, _ = house.create()
    house.run(*train_and_save(house, model_id))
    yield [drawn(house, number) for number in range(3)]
    house.close()


def test_a_sampler_is_used_before_anything_is_written(house):
    model_id, _ = house.create()
    saved = train_and_save(house, model_id, last=1)[-1]
    disk, sampled = Disk(house), []

    def until_sampled():
        assert until(lambda: house.api.read(lambda tx: futures.statuses(tx, [saved]))) == {saved: "done"}
        sampled.append(house.submit(sample(sampler=row_of(house, 0).sampler_id)))
        until(lambda: house.api.read(lambda tx: futures.statuses(tx, sampled)))

    disk.before = until_sampled
    named = house.submit(SaveWeights(kind="weights", name="later"), model_id=model_id, seq_id=4)
    house.run(named)  # its files come after those of the sampler
    assert len(sampled) == 1 and house.result(sampled[0]).sequences
    row = row_of(house, 0)
    assert house.artifacts.describe(row.sampler_id).size_bytes == row.size_bytes > 0


@pytest.mark.parametrize("snapshot_effects", [1, 10_000])
@pytest.mark.parametrize("num_written", [0, 1])
def test_the_next_engine_makes_a_lost_sampler_again(tmp_path, undisturbed, snapshot_effects, num_written):
    house = House(tmp_path, snapshot_effects=snapshot_effects)
    model_id, _ = house.create()
    house.run(*train_and_save(house, model_id, last=1))
    disk = Disk(house)
    room = [None] * num_written

    def some_room():
        if not room:
            fail()
        room.pop()

    disk.before = some_room
    ids = train_and_save(house, model_id, first=1)

    class Dying(FakeBackend):
        def step_sample(self):
            raise BackendLost("unplugged")

    house.run(*ids)  # the files of one sampler at least could not be written when this engine ended
    assert disk.num_refused >= 1
    doomed = house.submit(sample(sampler=row_of(house, 2).sampler_id))
    with pytest.raises(BackendLost):
        house.run(doomed, backend=Dying("tiny", house.config))
    disk.before = lambda: None
    assert [drawn(house, number) for number in range(3)] == undisturbed
    kept = house.api.read(lambda tx: snapshots.get(tx, model_id))
    assert all(house.artifacts.has(row_of(house, number).sampler_id) for number in range(3))
    assert kept.effect_order == 10, "a creation, and three times three effects"
    house.close()


def test_no_snapshot_replaces_what_an_unwritten_sampler_is_made_from(tmp_path):
    house = House(tmp_path, snapshot_effects=1, snapshot_interval_s=0)
    model_id, _ = house.create()
    house.run(house.submit(forward_backward(), model_id=model_id, seq_id=1))
    before = house.api.read(lambda tx: snapshots.get(tx, model_id)).effect_order
    disk = Disk(house)
    disk.before = fail
    house.submit(save(0), model_id=model_id, seq_id=2)
    house.run(house.submit(optim_step(), model_id=model_id, seq_id=3))
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)).effect_order == before
    disk.before = lambda: None
    house.run(house.submit(optim_step(), model_id=model_id, seq_id=4))
    assert house.artifacts.has(row_of(house, 0).sampler_id)
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)).effect_order > before
    house.close()


def test_a_disk_that_was_full_for_a_while(tmp_path):
    house = House(tmp_path, max_unwritten_samplers=1, housekeeping_interval_s=0.001)
    disk = Disk(house)
    disk.before = fail
    model_id, created = house.create()
    house.run(created)
    # While none can be written each save is kept in memory, up to the limit; beyond it the disk is to blame.
    results = [house.submit(save(number), model_id=model_id, seq_id=number + 1) for number in range(4)]
    house.settings = house.settings.model_copy(update={"housekeeping_interval_s": 1000.0})
    house.run(*results)
    answers = [house.result(each) for each in results]
    assert isinstance(answers[0], SaveWeightsOutput)
    assert isinstance(answers[-1], Failure) and answers[-1].category == ErrorCategory.SERVER
    assert "no space left" in answers[-1].message
    house.settings = house.settings.model_copy(update={"housekeeping_interval_s": 0.001})
    refusals = [None] * 2

    def full_at_first():
        if refusals:
            refusals.pop()
            fail()

    disk.before = full_at_first
    house.run(house.submit(sample(max_tokens=2000, eos_stops=False)))
    assert not refusals and house.artifacts.has(row_of(house, 0).sampler_id)
    assert isinstance(house.answer(save(7), model_id=model_id, seq_id=9), SaveWeightsOutput)
    house.close()


def test_inflight_sessions_follow_their_model_and_others_do_not(house):
    model_id, _ = house.create()
    frozen = house.submit(save(0), model_id=model_id, seq_id=1)
    first = house.submit(save(1, is_inflight=True), model_id=model_id, seq_id=2)
    house.run(frozen, first)
    before = row_of(house, 1).sampler_id
    queued = house.submit(sample(sampler=before, temperature=1.0, max_tokens=20))
    for seq_id, request in enumerate((forward_backward(), optim_step(), save(2, is_inflight=True)), start=3):
        last = house.submit(request, model_id=model_id, seq_id=seq_id)
    house.run(queued, last)
    rows = [row_of(house, number) for number in range(3)]
    assert rows[1].sampler_id == rows[2].sampler_id not in (before, rows[0].sampler_id)
    assert rows[1].size_bytes == rows[2].size_bytes > 0
    assert drawn(house, 1) == drawn(house, 2) != drawn(house, 0)
    kept = house.result(queued).sequences[0]
    assert (kept.tokens.tolist(), kept.logprobs.tobytes()) == drawn(house, 0), "it was asked of the weights before"


def test_a_name_is_given_once(house):
    model_id, _ = house.create()
    house.run(house.submit(save(0), model_id=model_id, seq_id=1))
    taken = house.answer(save(0), model_id=model_id, seq_id=2)
    assert taken.category == ErrorCategory.USER and "sampling_session_seq_id" in taken.message


def test_samplers_outlive_an_unloaded_model(house):
    model_id, _ = house.create()
    house.submit(save(0), model_id=model_id, seq_id=1)
    house.run(house.submit(UnloadModel(), model_id=model_id, seq_id=2))
    assert house.artifacts.has(row_of(house, 0).sampler_id)
    assert drawn(house, 0)


class Deadly(FakeBackend):
    """Cannot take a step, however it is asked for."""

    num_steps = 0

    def optim_step(self, model_id, params):
        self.num_steps += 1
        raise BackendLost("unplugged")


def lost_sampler(house):
    """A model whose only sampler has no files: its engine ended before the disk took them."""
    model_id, _ = house.create()
    disk = Disk(house)
    disk.before = fail
    house.run(*train_and_save(house, model_id, last=1))
    assert disk.num_refused
    disk.before = lambda: None
    return model_id


def test_a_replay_at_start_that_ends_engines_is_given_up(house, caplog):
    model_id = lost_sampler(house)
    wanted = house.submit(sample(sampler=row_of(house, 0).sampler_id))
    beside = house.submit(sample())
    for _ in range(house.settings.max_attempts):
        with pytest.raises(BackendLost):
            house.run(wanted, backend=Deadly("tiny", house.config))
    last = Deadly("tiny", house.config)
    house.run(wanted, beside, backend=last)
    assert last.num_steps == 0, "it is not tried once more"
    failure = house.result(wanted)
    assert failure.category == ErrorCategory.SERVER
    assert "its unnamed weights are lost: the engine ended 3 times while it made them again" in failure.message
    assert f"1 unnamed samplers of model {model_id} are lost" in caplog.text
    assert house.result(beside).sequences, "others are served"


def test_what_was_given_up_is_made_again_with_its_model(house, undisturbed):
    model_id = lost_sampler(house)
    for _ in range(house.settings.max_attempts):
        with pytest.raises(BackendLost):
            house.run(house.submit(sample()), backend=Deadly("tiny", house.config))
    house.run(house.submit(forward_backward(9), model_id=model_id, seq_id=4))
    assert drawn(house, 0) == undisturbed[0]


def test_a_replay_at_start_that_fails_does_not_keep_the_engine_from_serving(house):
    class Broken(FakeBackend):
        def optim_step(self, model_id, params):
            raise MemoryError("no room")

    lost_sampler(house)
    wanted, beside = house.submit(sample(sampler=row_of(house, 0).sampler_id)), house.submit(sample())
    house.run(wanted, beside, backend=Broken("tiny", house.config))
    assert "internal error: MemoryError: no room" in house.result(wanted).message
    assert house.result(beside).sequences


def test_attempts_at_start_do_not_add_up_over_good_ones(house, undisturbed):
    lost_sampler(house)
    disk = Disk(house)
    for _ in range(house.settings.max_attempts + 1):
        disk.before = fail
        house.run(house.submit(sample()))  # made again, and again not written
    disk.before = lambda: None
    assert drawn(house, 0) == undisturbed[0]


@pytest.mark.parametrize("settings", [{}, {"max_backlog_bytes": 1}], ids=["pages", "bytes"])
def test_weights_that_lost_their_name_are_there_for_requests_that_are_not_read_yet(tmp_path, settings):
    house = House(tmp_path, housekeeping_interval_s=0.001, **settings)
    model_id, _ = house.create()
    saves = [house.submit(save(n, is_inflight=True), model_id=model_id, seq_id=n + 1) for n in range(2)]
    first = sampler_of(saves[0])
    house.run(*saves)
    others = [sample(max_tokens=1)] * 300
    with ThreadPoolExecutor(30) as at_once:
        asked = [*at_once.map(house.submit, others), house.submit(sample(sampler=first))]
    assert row_of(house, 0).sampler_id == sampler_of(saves[1]), "it follows its model"
    os.utime(house.artifacts.open(first), (0, 0))
    house.run(*asked)
    assert house.result(asked[-1]).sequences
    later = house.submit(sample(max_tokens=500, eos_stops=False))
    house.run(later)
    assert not house.artifacts.has(first), "nobody waits for it any more"
    house.close()
