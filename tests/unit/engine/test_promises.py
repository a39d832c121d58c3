"""What recovery refuses, warns of, and falls back to; what a session's time takes; what a moved directory keeps."""

import dataclasses
import json
import logging
import shutil
import threading
import time
from unittest.mock import Mock

import pytest
from sqlmodel import select

from skyrl_tx.backends.fake.backend import FakeBackend
from skyrl_tx.backends.fake.config import FakeConfig
from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.errors import ErrorCategory, UserError
from skyrl_tx.contract.requests import LoadWeights, Rejected, SaveWeights
from skyrl_tx.engine.engine import Engine
from skyrl_tx.store import checkpoints, models, sessions, snapshots
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import RequestRow
from skyrl_tx.testing.engine_house import SPEC, House, forward_backward, optim_step, sample

DAY_S = 86_400.0


def trained(house, num_steps=3):
    """A model with a snapshot that holds all of its effects, and the results of its passes."""
    model_id, _ = house.create()
    names = []
    for step in range(num_steps):
        names.append(house.submit(forward_backward(step), model_id=model_id, seq_id=2 * step + 1))
        house.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2)
    last = house.submit(forward_backward(99, backward=False), model_id=model_id, seq_id=2 * num_steps + 1)
    house.run(*names, last)
    return model_id, house.result(last).logprobs[0].tobytes()


def looked_at(house, model_id):
    return house.answer(forward_backward(99, backward=False), model_id=model_id)


def snapshot_files(house, model_id):
    row = house.api.read(lambda tx: snapshots.get(tx, model_id))
    return sorted((house.data_dir / "artifacts" / row.artifact_id).rglob("*.safetensors"))


def forget_bodies(house, model_id):
    def prune(tx):
        for row in tx.exec(select(RequestRow).where(RequestRow.model_id == model_id, RequestRow.effect_order <= 2)):
            row.body = b""

    house.api.write(prune)


def damage(house, model_id):
    path = snapshot_files(house, model_id)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_snapshot_is_replayed_from_the_beginning(house, caplog):
    model_id, expected = trained(house)
    damage(house, model_id)
    with caplog.at_level(logging.ERROR):
        assert looked_at(house, model_id).logprobs[0].tobytes() == expected
    assert "is not as it was written; replaying it from its beginning instead" in caplog.text


def test_a_lost_snapshot_is_replayed_from_the_beginning(house):
    model_id, expected = trained(house)
    shutil.rmtree(snapshot_files(house, model_id)[0].parent)
    assert looked_at(house, model_id).logprobs[0].tobytes() == expected


def test_a_damaged_snapshot_without_its_log_says_what_is_lost(house):
    model_id, _ = trained(house)
    damage(house, model_id)
    forget_bodies(house, model_id)
    failure = looked_at(house, model_id)
    assert failure.category == ErrorCategory.SERVER
    assert failure.message.startswith(f"model {model_id} is lost: its snapshot at effect 7, of ")
    assert "is not as it was written" in failure.message
    assert failure.message.endswith("are no longer kept; what was saved by name can still be loaded")


class OtherBase(FakeBackend):
    """The same backend on other base weights."""

    def start(self):
        return dataclasses.replace(super().start(), base_model_hash="0123456789abcdef")


def test_models_of_another_base_are_refused_in_these_words(house):
    model_id, _ = trained(house)
    with pytest.raises(UserError) as refusal:
        house.run(house.submit(optim_step(), model_id=model_id), backend=OtherBase("tiny", house.config))
    assert refusal.value.message == (
        f"1 models in this data directory, the first {model_id}, are trained on other weights than those of tiny: "
        "theirs have the hash fake-128, these 0123456789ab; serve the model that they are trained on, "
        "or add --fresh to leave them behind"
    )


def test_left_models_are_not_brought_back_and_their_checkpoints_load_on_their_base_alone(house):
    model_id, _ = trained(house)
    saved = house.answer(SaveWeights(kind="weights", name="a"), model_id=model_id)
    artifact_id = next(iter(house.api.read(lambda tx: checkpoints.list_of_run(tx, model_id, 0.0)))).artifact_id
    assert [row.model_id for row in house.api.write(models.leave_all)] == [model_id]
    load = LoadWeights(path=saved.path, artifact_id=artifact_id, spec=SPEC, optimizer=True, create=True)
    _, elsewhere = house.make(load, "elsewhere")
    house.run(elsewhere, backend=OtherBase("tiny", house.config))
    assert house.result(elsewhere).message == (
        "these weights belong to another base model than the one that is served: "
        "theirs has the hash fake-128, this one 0123456789ab"
    )
    copy, _ = house.make(load, "copy")
    assert looked_at(house, copy).metrics
    failure = looked_at(house, model_id)
    assert failure.message == (
        f"model_id '{model_id}' was left behind by a start with --fresh; its saved weights can be loaded"
    )


def test_other_numerics_are_a_warning(house, caplog):
    class Newer(FakeBackend):
        def start(self):
            return dataclasses.replace(super().start(), fingerprint={"dtype": "float16"})

    model_id, _ = trained(house)
    name = house.submit(forward_backward(1), model_id=model_id)
    with caplog.at_level(logging.WARNING):
        house.run(name, backend=Newer("tiny", house.config))
    assert "was made with dtype float64, now it is float16: numbers go on, but not bit-equal" in caplog.text
    assert house.result(name).metrics


def test_a_refused_barrier_is_still_one_after_a_restart(house):
    model_id, _ = house.create()
    refused = house.submit(Rejected(kind="optim_step", message="learning_rate -1"), model_id=model_id, seq_id=5)
    house.run(refused)
    late = house.answer(forward_backward(), model_id=model_id, seq_id=4)
    assert late.message.startswith("seq_id 4 came too late: seq_id 5")


def test_snapshots_do_not_pile_up(tmp_path):
    house = House(tmp_path, snapshot_effects=1)
    trained(house, num_steps=6)
    kept = house.api.read(checkpoints.referenced_artifacts) or ()
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == list(kept)
    assert len(kept) == 1
    house.close()


def test_a_replaced_snapshot_that_could_not_be_removed_is_collected(tmp_path, monkeypatch, caplog):
    house = House(tmp_path, snapshot_effects=1)
    with monkeypatch.context() as patch:
        patch.setattr(house.artifacts, "remove", Mock(side_effect=OSError("busy")))
        trained(house)
    assert "which is replaced, could not be removed: busy" in caplog.text
    kept = house.api.read(checkpoints.referenced_artifacts) or ()
    assert len(list((tmp_path / "artifacts").iterdir())) > 1
    house.artifacts.collect(kept, min_age_s=0)
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == list(kept)
    house.close()


def test_nothing_but_safetensors_and_json_is_on_disk_and_no_row_knows_a_path(house):
    model_id, _ = trained(house)
    house.answer(SaveWeights(kind="weights", name="a"), model_id=model_id)
    found = {path.suffix for path in (house.data_dir / "artifacts").rglob("*") if path.is_file()}
    assert found == {".safetensors", ".json"}
    manifests = [json.loads(path.read_text()) for path in (house.data_dir / "artifacts").rglob("manifest.json")]
    assert all(len(file["sha256"]) == 64 for manifest in manifests for file in manifest["files"].values())
    assert {manifest["metadata"]["base_model_hash"] for manifest in manifests} == {"fake-128"}


def test_a_moved_data_directory_goes_on(tmp_path):
    house = House(tmp_path / "here")
    model_id, expected = trained(house)
    session_id = house.session_id
    house.close()
    for path in (tmp_path / "here").rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path
    (tmp_path / "here").rename(tmp_path / "there")
    moved = House(tmp_path / "there")
    moved.session_id = session_id
    assert looked_at(moved, model_id).logprobs[0].tobytes() == expected
    assert moved.answer(optim_step(), model_id=model_id, seq_id=8).metrics["unclipped_grad_l2:mean"] >= 0
    moved.close()


class Clock:
    """What time everybody believes it is."""

    def __init__(self, monkeypatch):
        self.ahead_s = 0.0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead_s)


class Watched(FakeBackend):
    """Counts deletions of models that it had."""

    num_deleted = 0

    def delete_model(self, model_id):
        self.num_deleted += model_id in self._models
        super().delete_model(model_id)


@pytest.mark.usefixtures("api_is_there_for_long")
def test_a_silent_session_loses_the_device_then_the_model(tmp_path, monkeypatch):
    house = House(tmp_path, housekeeping_interval_s=0.001)
    assert house.settings.session_timeout_s == 1800.0
    assert house.settings.session_retention_s == 7 * DAY_S
    clock = Clock(monkeypatch)
    model_id, expected = trained(house)

    def after(ahead_s):
        clock.ahead_s = ahead_s
        backend = Watched("tiny", house.config)
        first = house.submit(forward_backward(99, backward=False), model_id=model_id)
        house.run(first, house.submit(sample(max_tokens=200, eos_stops=False)), backend=backend)
        return backend.num_deleted, house.result(first)

    for ahead_s, leaves in ((1700.0, 0), (1900.0, 1), (6.9 * DAY_S, 1)):
        num_deleted, seen = after(ahead_s)
        assert num_deleted == leaves
        assert seen.logprobs[0].tobytes() == expected, "it came back as it was"
    clock.ahead_s = 14.0 * DAY_S  # 7.1 after it was last asked
    house.run(house.submit(sample(max_tokens=200, eos_stops=False)))
    gone = looked_at(house, model_id)
    assert gone.message.startswith(f"model_id '{model_id}' is gone: its session was silent too long")
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)) is None
    house.close()


@pytest.mark.usefixtures("api_is_there_for_long")
def test_a_heartbeat_keeps_a_model(tmp_path, monkeypatch):
    house = House(tmp_path, housekeeping_interval_s=0.001)
    clock = Clock(monkeypatch)
    model_id, expected = trained(house)
    clock.ahead_s = 30 * DAY_S
    house.api.write(lambda tx: sessions.heartbeat(tx, house.session_id, time.time() + 30 * DAY_S))
    house.run(house.submit(sample(max_tokens=200, eos_stops=False)))
    assert looked_at(house, model_id).logprobs[0].tobytes() == expected
    house.close()


def test_two_sizes_of_the_fake_model_are_two_base_models():
    hashes = {FakeBackend("tiny", FakeConfig(vocab_size=size)).start().base_model_hash for size in (64, 128)}
    assert len(hashes) == 2


def test_a_stop_in_the_middle_of_a_long_pass_finishes_it_and_the_next_start_repeats_nothing(house):
    class OneStepAtATime(Pass):
        def __init__(self, whole, stop):
            self._whole, self._stop, self._steps_left = whole, stop, 20

        def step(self):
            self._stop.set()
            self._steps_left -= 1
            return self._steps_left <= 0 and self._whole.step()

        def results(self):
            return self._whole.results()

        def abort(self):
            raise AssertionError("a good stop gives up no pass")

    class Slow(FakeBackend):
        stop = threading.Event()

        def begin_pass(self, batch, *, backward):
            return OneStepAtATime(super().begin_pass(batch, backward=backward), self.stop)

    model_id, _ = house.create()
    running = house.submit(forward_backward(), model_id=model_id, seq_id=1)
    waiting = house.submit(optim_step(), model_id=model_id, seq_id=2)
    backend = Slow("tiny", house.config)
    store = Store.open(house.data_dir, role="engine", url=house.settings.store_url)
    Engine(house.settings, backend, store, house.artifacts).run(backend.stop)
    store.close()
    assert house.result(running).metrics
    assert house.api.read(lambda tx: snapshots.get(tx, model_id)).effect_order == 2, "creation and the pass"

    class NoPass(FakeBackend):
        def begin_pass(self, batch, *, backward):
            raise AssertionError("nothing should be repeated")

    house.run(waiting, backend=NoPass("tiny", house.config))
    assert house.result(waiting).metrics["unclipped_grad_l2:mean"] > 0
