"""Ephemeral samplers can be used before their files are written, and are recreated after a crash."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_tx.contract.errors import BackendLost, ErrorCategory
from skyrl_tx.contract.ids import SamplingSessionId
from skyrl_tx.contract.requests import SaveWeights, UnloadModel
from skyrl_tx.contract.results import Failure, SaveWeightsOutput
from skyrl_tx.engine.background_writer import make_sampler_id
from skyrl_tx.store import futures, models, sampling_sessions
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample
from tests.support.logged_error import find_logged_error
from tests.support.polling import until


class FaultyArtifacts:
    """Fails or delays the writes of artifacts."""

    def __init__(self, harness):
        self.create = harness.artifacts.create
        self.num_refused = 0
        self.before = lambda: None
        harness.artifacts.create = self.create_after

    def create_after(self, write, metadata=None, artifact_id=None):
        try:
            if artifact_id is not None:  # an ephemeral sampler
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


def get_row(harness, number):
    return harness.api.read(lambda tx: sampling_sessions.get(tx, SamplingSessionId(f"s:sample:{number}")))


def draw_sample(harness, number):
    """Draw a sample from a sampling session and return its tokens and logprobs."""
    output = harness.answer(sample(sampler=get_row(harness, number).sampler_id, temperature=1.0, max_tokens=20))
    return output.sequences[0].tokens.tolist(), output.sequences[0].logprobs.tobytes()


def train_and_save(harness, model_id, first=0, last=3):
    """Submit multiple training steps, each followed by an ephemeral save, and return the request ids."""
    ids, seq_id = [], 3 * first
    for number in range(first, last):
        for request in (forward_backward(number), optim_step(), save(number)):
            seq_id += 1
            ids.append(harness.submit(request, model_id=model_id, seq_id=seq_id))
    return ids


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    harness = EngineHarness(tmp_path_factory.mktemp("undisturbed"))
    model_id, _ = harness.create()
    harness.run(*train_and_save(harness, model_id))
    yield [draw_sample(harness, number) for number in range(3)]
    harness.close()


def test_sampler_is_usable_before_its_files_are_written(harness):
    model_id, _ = harness.create()
    saved = train_and_save(harness, model_id, last=1)[-1]
    disk, sampled = FaultyArtifacts(harness), []

    def until_sampled():
        assert until(lambda: harness.api.read(lambda tx: futures.get_outcomes(tx, [saved]))) == {saved: "done"}
        sampled.append(harness.submit(sample(sampler=get_row(harness, 0).sampler_id)))
        until(lambda: harness.api.read(lambda tx: futures.get_outcomes(tx, sampled)))

    disk.before = until_sampled
    named = harness.submit(SaveWeights(kind="weights", name="later"), model_id=model_id, seq_id=4)
    harness.run(named)  # the checkpoint's files are written after the sampler's files
    assert len(sampled) == 1 and harness.result(sampled[0]).sequences
    row = get_row(harness, 0)
    assert harness.artifacts.describe(row.sampler_id).size_bytes == row.size_bytes > 0


@pytest.mark.parametrize(
    ("snapshot_interval_requests", "num_written"),
    [(10_000, 0), (1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0), (10_000, 1)))],
)
def test_next_engine_recreates_a_lost_sampler(tmp_path, undisturbed, snapshot_interval_requests, num_written):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=snapshot_interval_requests)
    model_id, _ = harness.create()
    harness.run(*train_and_save(harness, model_id, last=1))
    disk = FaultyArtifacts(harness)
    room = [None] * num_written

    def some_room():
        if not room:
            fail()
        room.pop()

    disk.before = some_room
    ids = train_and_save(harness, model_id, first=1)

    class Dying(FakeBackend):
        def step_sample(self):
            raise BackendLost("unplugged")

    harness.run(*ids)  # when this engine ended, the files of at least one sampler could not be written
    assert disk.num_refused >= 1
    doomed = harness.submit(sample(sampler=get_row(harness, 2).sampler_id))
    with pytest.raises(BackendLost):
        harness.run(doomed, backend=Dying("tiny", harness.config))
    disk.before = lambda: None
    assert [draw_sample(harness, number) for number in range(3)] == undisturbed
    kept = harness.api.read(lambda tx: models.get_snapshot(tx, model_id))
    assert all(harness.artifacts.has(get_row(harness, number).sampler_id) for number in range(3))
    assert kept.effect_order == 10, "a creation, and three times three log records"
    harness.close()


def test_no_snapshot_is_recorded_past_an_unwritten_sampler(tmp_path):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=1, snapshot_interval_s=0)
    model_id, _ = harness.create()
    harness.run(harness.submit(forward_backward(), model_id=model_id, seq_id=1))
    before = harness.api.read(lambda tx: models.get_snapshot(tx, model_id)).effect_order
    disk = FaultyArtifacts(harness)
    disk.before = fail
    harness.submit(save(0), model_id=model_id, seq_id=2)
    harness.run(harness.submit(optim_step(), model_id=model_id, seq_id=3))
    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)).effect_order == before
    disk.before = lambda: None
    harness.run(harness.submit(optim_step(), model_id=model_id, seq_id=4))
    assert harness.artifacts.has(get_row(harness, 0).sampler_id)
    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)).effect_order > before
    harness.close()


def test_writes_are_retried_after_a_full_disk(tmp_path):
    harness = EngineHarness(tmp_path, max_pending_sampler_writes=1, housekeeping_interval_s=0.001)
    disk = FaultyArtifacts(harness)
    disk.before = fail
    model_id, created = harness.create()
    harness.run(created)
    # Unwritten samplers stay in memory, up to the limit. Further saves fail.
    results = [harness.submit(save(number), model_id=model_id, seq_id=number + 1) for number in range(4)]
    harness.settings = harness.settings.model_copy(update={"housekeeping_interval_s": 1000.0})
    harness.run(*results)
    answers = [harness.result(request_id) for request_id in results]
    assert isinstance(answers[0], SaveWeightsOutput)
    assert isinstance(answers[-1], Failure) and answers[-1].category == ErrorCategory.SERVER
    assert "no space left" in answers[-1].message
    harness.settings = harness.settings.model_copy(update={"housekeeping_interval_s": 0.001})
    refusals = [None] * 2

    def full_at_first():
        if refusals:
            refusals.pop()
            fail()

    disk.before = full_at_first
    harness.run(harness.submit(sample(max_tokens=2000, eos_stops=False)))
    assert not refusals and harness.artifacts.has(get_row(harness, 0).sampler_id)
    assert isinstance(harness.answer(save(7), model_id=model_id, seq_id=9), SaveWeightsOutput)
    harness.close()


def test_inflight_sessions_get_new_weights_and_others_do_not(harness):
    model_id, _ = harness.create()
    frozen = harness.submit(save(0), model_id=model_id, seq_id=1)
    first = harness.submit(save(1, is_inflight=True), model_id=model_id, seq_id=2)
    harness.run(frozen, first)
    before = get_row(harness, 1).sampler_id
    queued = harness.submit(sample(sampler=before, temperature=1.0, max_tokens=20))
    for seq_id, request in enumerate((forward_backward(), optim_step(), save(2, is_inflight=True)), start=3):
        last = harness.submit(request, model_id=model_id, seq_id=seq_id)
    harness.run(queued, last)
    rows = [get_row(harness, number) for number in range(3)]
    assert rows[1].sampler_id == rows[2].sampler_id not in (before, rows[0].sampler_id)
    assert rows[1].size_bytes == rows[2].size_bytes > 0
    assert draw_sample(harness, 1) == draw_sample(harness, 2) != draw_sample(harness, 0)

    kept = harness.result(queued).sequences[0]
    assert (kept.tokens.tolist(), kept.logprobs.tobytes()) == draw_sample(harness, 0), (
        "the sample started before the save"
    )


def test_sampling_session_id_is_used_once(harness):
    model_id, _ = harness.create()
    harness.run(harness.submit(save(0), model_id=model_id, seq_id=1))
    taken = harness.answer(save(0), model_id=model_id, seq_id=2)
    assert taken.category == ErrorCategory.USER and "sampling_session_seq_id" in taken.message


def test_samplers_outlive_an_unloaded_model(harness):
    model_id, _ = harness.create()
    harness.submit(save(0), model_id=model_id, seq_id=1)
    harness.run(harness.submit(UnloadModel(), model_id=model_id, seq_id=2))
    assert harness.artifacts.has(get_row(harness, 0).sampler_id)
    assert draw_sample(harness, 0)


class DeadlyBackend(FakeBackend):
    """Loses its device in every `optim_step`."""

    num_steps = 0

    def optim_step(self, model_id, params):
        self.num_steps += 1
        raise BackendLost("unplugged")


def lost_sampler(harness):
    """Create a model whose only sampler has no files, because its engine crashed."""
    model_id, _ = harness.create()
    disk = FaultyArtifacts(harness)
    disk.before = fail
    harness.run(*train_and_save(harness, model_id, last=1))
    assert disk.num_refused
    disk.before = lambda: None
    return model_id


def test_replay_that_crashes_engines_is_given_up(harness, caplog):
    model_id = lost_sampler(harness)
    wanted = harness.submit(sample(sampler=get_row(harness, 0).sampler_id))
    others = harness.submit(sample())
    for _ in range(harness.settings.max_attempts):
        with pytest.raises(BackendLost):
            harness.run(wanted, backend=DeadlyBackend("tiny", harness.config))
    last = DeadlyBackend("tiny", harness.config)
    harness.run(wanted, others, backend=last)
    assert last.num_steps == 0, "it is not replayed again"
    failure = harness.result(wanted)
    assert failure.category == ErrorCategory.SERVER
    assert "its unsaved weights are lost: the engine crashed or hung 3 times while it restored them" in failure.message
    assert f"1 ephemeral samplers of model {model_id} are lost" in caplog.text
    assert harness.result(others).sequences, "others are served"


def test_lost_sampler_is_recreated_when_its_model_is_restored(harness, undisturbed):
    model_id = lost_sampler(harness)
    for _ in range(harness.settings.max_attempts):
        with pytest.raises(BackendLost):
            harness.run(harness.submit(sample()), backend=DeadlyBackend("tiny", harness.config))
    harness.run(harness.submit(forward_backward(9), model_id=model_id, seq_id=4))
    assert draw_sample(harness, 0) == undisturbed[0]


def test_failed_replay_does_not_prevent_serving(harness, caplog):
    class Broken(FakeBackend):
        def optim_step(self, model_id, params):
            raise MemoryError("no room")

    lost_sampler(harness)
    wanted, others = harness.submit(sample(sampler=get_row(harness, 0).sampler_id)), harness.submit(sample())
    harness.run(wanted, others, backend=Broken("tiny", harness.config))
    assert repr(find_logged_error(harness.result(wanted).message, caplog)) == "MemoryError('no room')"
    assert harness.result(others).sequences


def test_successful_replays_count_no_delivery_attempts(harness, undisturbed):
    lost_sampler(harness)
    disk = FaultyArtifacts(harness)
    for _ in range(harness.settings.max_attempts + 1):
        disk.before = fail
        harness.run(harness.submit(sample()))  # the sampler is recreated, and its files are again not written
    disk.before = lambda: None
    assert draw_sample(harness, 0) == undisturbed[0]


@pytest.mark.parametrize("settings", [{}, {"max_backlog_bytes": 1}], ids=["pages", "bytes"])
def test_unreferenced_sampler_is_kept_for_unread_requests(tmp_path, settings):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001, **settings)
    model_id, _ = harness.create()
    saves = [harness.submit(save(n, is_inflight=True), model_id=model_id, seq_id=n + 1) for n in range(2)]
    first = make_sampler_id(saves[0])
    harness.run(*saves)
    others = [sample(max_tokens=1)] * 300
    with ThreadPoolExecutor(30) as at_once:
        asked = [*at_once.map(harness.submit, others), harness.submit(sample(sampler=first))]
    assert get_row(harness, 0).sampler_id == make_sampler_id(saves[1]), "the in-flight session has the newest weights"

    os.utime(harness.artifacts.open(first).path, (0, 0))
    harness.run(*asked)
    assert harness.result(asked[-1]).sequences

    later = harness.submit(sample(max_tokens=500, eos_stops=False))
    harness.run(later)
    assert not harness.artifacts.has(first), "no request refers to it any more"

    harness.close()
