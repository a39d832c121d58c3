"""Recovery from bad snapshots and other base models, session timeouts, and moved data directories."""

import dataclasses
import json
import logging
import shutil
import threading
import time
from unittest.mock import Mock

import pytest
from sqlmodel import select

from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.errors import ErrorCategory, UserError
from skyrl_tx.contract.requests import LoadWeights, Rejected, SaveWeights
from skyrl_tx.engine.background_writer import BackgroundWriter
from skyrl_tx.engine.engine import Engine
from skyrl_tx.store import checkpoints, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import RequestRow
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import SPEC, EngineHarness, forward_backward, optim_step, sample

DAY_S = 86_400.0


def train(harness, num_steps=3):
    """Train a model and stop the engine, so that the snapshot includes all log records.

    Returns the model id and its logprobs.
    """
    model_id, _ = harness.create()
    names = []
    for step in range(num_steps):
        names.append(harness.submit(forward_backward(step), model_id=model_id, seq_id=2 * step + 1))
        harness.submit(optim_step(), model_id=model_id, seq_id=2 * step + 2)
    last = harness.submit(forward_backward(99, backward=False), model_id=model_id, seq_id=2 * num_steps + 1)
    harness.run(*names, last)
    return model_id, harness.result(last).logprobs[0].tobytes()


def run_forward(harness, model_id):
    return harness.answer(forward_backward(99, backward=False), model_id=model_id)


def snapshot_files(harness, model_id):
    row = harness.api.read(lambda tx: models.get_snapshot(tx, model_id))
    return sorted((harness.data_dir / "artifacts" / row.artifact_id).rglob("*.safetensors"))


def forget_bodies(harness, model_id):
    def prune(tx):
        for row in tx.exec(select(RequestRow).where(RequestRow.model_id == model_id, RequestRow.effect_order <= 2)):
            row.body = b""

    harness.api.write(prune)


def damage(harness, model_id):
    path = snapshot_files(harness, model_id)[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damaged_snapshot_is_replayed_from_the_beginning(harness, caplog):
    model_id, expected = train(harness)
    damage(harness, model_id)
    with caplog.at_level(logging.ERROR):
        assert run_forward(harness, model_id).logprobs[0].tobytes() == expected
    assert "does not match the manifest; replaying all of its requests instead" in caplog.text


def test_missing_snapshot_is_replayed_from_the_beginning(harness):
    model_id, expected = train(harness)
    shutil.rmtree(snapshot_files(harness, model_id)[0].parent)
    assert run_forward(harness, model_id).logprobs[0].tobytes() == expected


def test_damaged_snapshot_without_its_log_reports_the_lost_model(harness):
    model_id, _ = train(harness)
    damage(harness, model_id)
    forget_bodies(harness, model_id)
    failure = run_forward(harness, model_id)
    assert failure.category == ErrorCategory.SERVER
    assert failure.message.startswith(f"model {model_id} is lost: its snapshot after request 7, written at ")
    assert "does not match the manifest" in failure.message
    assert failure.message.endswith("have been removed; checkpoints that were saved by name can still be loaded")


class OtherBaseBackend(FakeBackend):
    """The fake backend with a different base model hash."""

    def start(self):
        return dataclasses.replace(super().start(), base_model_hash="0123456789abcdef")


def test_models_of_another_base_model_are_refused(harness):
    model_id, _ = train(harness)
    with pytest.raises(UserError) as refusal:
        harness.run(harness.submit(optim_step(), model_id=model_id), backend=OtherBaseBackend("tiny", harness.config))
    assert refusal.value.message == (
        f"1 models in this data directory, for example {model_id}, were trained on other weights than tiny: "
        "their base model has the hash fake-128, tiny has 0123456789ab; serve the base model that they were trained "
        "on, or add --fresh to leave these models behind"
    )


@pytest.mark.parametrize(
    ("theirs", "here", "named"),
    [
        ("", "+expert_lora=shared", ("expert_lora=own", "expert_lora=shared", "--backend-config.expert-lora own")),
        ("+expert_lora=shared", "", ("expert_lora=shared", "expert_lora=own", "--backend-config.expert-lora shared")),
    ],
)
def test_models_with_adapters_of_another_form_are_refused_with_the_setting(harness, theirs, here, named):
    class WithForm(FakeBackend):
        form = theirs

        def start(self):
            started = super().start()
            return dataclasses.replace(started, base_model_hash=started.base_model_hash + self.form)

    def backend() -> FakeBackend:
        return WithForm("tiny", harness.config)

    model_id, created = harness.create()
    save = harness.submit(SaveWeights(kind="weights", name="a"), model_id=model_id)
    harness.run(created, save, backend=backend())
    saved = harness.result(save)
    WithForm.form = here
    with pytest.raises(UserError) as refusal:
        harness.run(harness.submit(optim_step(), model_id=model_id), backend=backend())
    assert refusal.value.message == (
        f"1 models in this data directory, for example {model_id}, have adapters of {named[0]}, but this server makes "
        f"adapters of {named[1]}; start it with {named[2]}, or add --fresh to leave these models behind"
    )

    artifact_id = next(iter(harness.api.read(lambda tx: checkpoints.list_by_run(tx, model_id, 0.0)))).artifact_id
    harness.api.write(models.abandon_all)
    load = LoadWeights(path=saved.path, artifact_id=artifact_id, spec=SPEC, optimizer=True, create=True)
    _, elsewhere = harness.make(load, "elsewhere")
    harness.run(elsewhere, backend=backend())
    assert harness.result(elsewhere).message == (
        f"these weights have adapters of {named[0]}, but this server has adapters of {named[1]}; "
        f"load them on a server with {named[2]}"
    )


def test_abandoned_models_are_not_restored_and_their_checkpoints_load_on_their_base_only(harness):
    model_id, _ = train(harness)
    saved = harness.answer(SaveWeights(kind="weights", name="a"), model_id=model_id)
    artifact_id = next(iter(harness.api.read(lambda tx: checkpoints.list_by_run(tx, model_id, 0.0)))).artifact_id
    assert [row.model_id for row in harness.api.write(models.abandon_all)] == [model_id]

    load = LoadWeights(path=saved.path, artifact_id=artifact_id, spec=SPEC, optimizer=True, create=True)
    _, elsewhere = harness.make(load, "elsewhere")
    harness.run(elsewhere, backend=OtherBaseBackend("tiny", harness.config))
    assert harness.result(elsewhere).message == (
        "these weights belong to another base model, with the hash fake-128: this server's has 0123456789ab; "
        "load them on a server of their base model"
    )

    copy, _ = harness.make(load, "copy")
    assert run_forward(harness, copy).metrics

    failure = run_forward(harness, model_id)
    assert failure.message == (
        f"model_id '{model_id}' was left behind by a start with --fresh; its saved weights can be loaded"
    )


def test_a_fingerprint_that_changed_while_the_engine_ran_is_a_warning_after_a_restart(harness, caplog):
    class Shrinking(FakeBackend):
        def fingerprint_changes(self):
            return {"dtype": "float32"}

    model_id, created = harness.create()
    harness.run(created, backend=Shrinking("tiny", harness.config))
    assert "bit-equal" not in caplog.text
    harness.answer(forward_backward(), model_id=model_id, seq_id=1)
    assert "was written with dtype float32, but this engine has float64: results are not bit-equal" in caplog.text


def test_a_changed_plan_is_named_at_the_start(harness, caplog):
    class Smaller(FakeBackend):
        def start(self):
            capabilities = super().start()
            return dataclasses.replace(capabilities, fingerprint={**capabilities.fingerprint, "dtype": "float16"})

    harness.run(harness.create()[1])
    harness.run(harness.create()[1])
    assert "changed since" not in caplog.text
    harness.run(harness.create()[1], backend=Smaller("tiny", harness.config))
    assert "changed since the last start: dtype from float64 to float16. Programs" in caplog.text


def test_another_fingerprint_is_a_warning(harness, caplog):
    class Newer(FakeBackend):
        def start(self):
            return dataclasses.replace(super().start(), fingerprint={"dtype": "float16"})

    model_id, _ = train(harness)
    name = harness.submit(forward_backward(1), model_id=model_id)
    with caplog.at_level(logging.WARNING):
        harness.run(name, backend=Newer("tiny", harness.config))
    assert (
        "was written with dtype float64, but this engine has float16: results are not bit-equal to earlier ones"
        in caplog.text
    )
    assert harness.result(name).metrics


def test_refused_barrier_is_a_barrier_after_a_restart(harness):
    model_id, _ = harness.create()
    refused = harness.submit(Rejected(kind="optim_step", message="learning_rate -1"), model_id=model_id, seq_id=5)
    harness.run(refused)
    late = harness.answer(forward_backward(), model_id=model_id, seq_id=4)
    assert late.message.startswith("seq_id 4 arrived too late: seq_id 5")


def test_replaced_snapshots_are_removed(tmp_path):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=1)
    train(harness, num_steps=6)
    kept = harness.api.read(checkpoints.find_referenced_artifacts) or ()
    assert [path.name for path in (tmp_path / "artifacts").glob("art-*")] == list(kept)
    assert len(kept) == 1
    harness.close()


def test_snapshot_that_the_last_one_replaces_is_removed_before_a_clean_stop_ends(harness, monkeypatch):
    queued = []
    close = BackgroundWriter.close

    def record_and_close(writer):
        queued.append(list(writer._jobs))
        close(writer)

    monkeypatch.setattr(BackgroundWriter, "close", record_and_close)
    model_id, _ = train(harness)
    first = snapshot_files(harness, model_id)
    assert harness.answer(forward_backward(), model_id=model_id).metrics
    assert snapshot_files(harness, model_id) != first
    assert not first[0].exists()
    assert queued == [[], []]


def test_replaced_snapshot_that_could_not_be_removed_is_collected(tmp_path, monkeypatch, caplog):
    harness = EngineHarness(tmp_path, snapshot_interval_requests=1)
    with monkeypatch.context() as patch:
        patch.setattr(harness.artifacts, "remove", Mock(side_effect=OSError("busy")))
        train(harness)
    assert ": busy" in caplog.text
    kept = harness.api.read(checkpoints.find_referenced_artifacts) or ()
    assert len(list((tmp_path / "artifacts").glob("art-*"))) > 1
    harness.artifacts.collect(kept, min_age_s=0)
    assert [path.name for path in (tmp_path / "artifacts").glob("art-*")] == list(kept)
    harness.close()


def test_artifacts_are_safetensors_and_json_and_rows_contain_no_path(harness):
    model_id, _ = train(harness)
    harness.answer(SaveWeights(kind="weights", name="a"), model_id=model_id)
    found = {path.suffix for path in (harness.data_dir / "artifacts").rglob("*") if path.is_file()}
    assert found == {".safetensors", ".json"}
    manifests = [json.loads(path.read_text()) for path in (harness.data_dir / "artifacts").rglob("manifest.json")]
    assert all(len(file["sha256"]) == 64 for manifest in manifests for file in manifest["files"].values())
    assert {manifest["metadata"]["base_model_hash"] for manifest in manifests} == {"fake-128"}


def test_moved_data_directory_works(tmp_path):
    harness = EngineHarness(tmp_path / "here")
    model_id, expected = train(harness)
    session_id = harness.session_id
    harness.close()
    for path in (tmp_path / "here").rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), path
    (tmp_path / "here").rename(tmp_path / "there")
    moved = EngineHarness(tmp_path / "there")
    moved.session_id = session_id
    assert run_forward(moved, model_id).logprobs[0].tobytes() == expected
    assert moved.answer(optim_step(), model_id=model_id, seq_id=8).metrics["unclipped_grad_l2:mean"] >= 0
    moved.close()


class Clock:
    """The current time as seen by the API, the engine and the store."""

    def __init__(self, monkeypatch):
        self.ahead_s = 0.0
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead_s)


class CountingBackend(FakeBackend):
    """Counts deleted models."""

    num_deleted = 0

    def delete_model(self, model_id):
        self.num_deleted += model_id in self._models
        super().delete_model(model_id)


@pytest.mark.usefixtures("api_is_there_for_long")
def test_heartbeat_timeout_evicts_and_retention_removes_the_model(tmp_path, monkeypatch):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001)
    assert harness.settings.session_timeout_s == 1800.0
    assert harness.settings.session_retention_s == 7 * DAY_S
    clock = Clock(monkeypatch)
    model_id, expected = train(harness)

    def after(ahead_s):
        clock.ahead_s = ahead_s
        backend = CountingBackend("tiny", harness.config)
        first = harness.submit(forward_backward(99, backward=False), model_id=model_id)
        harness.run(first, harness.submit(sample(max_tokens=200, eos_stops=False)), backend=backend)
        return backend.num_deleted, harness.result(first)

    for ahead_s, leaves in ((1700.0, 0), (1900.0, 1), (6.9 * DAY_S, 1)):
        num_deleted, seen = after(ahead_s)
        assert num_deleted == leaves
        assert seen.logprobs[0].tobytes() == expected, "the restored model is bit-equal"
    clock.ahead_s = 14.0 * DAY_S  # 7.1 days after the last request
    harness.run(harness.submit(sample(max_tokens=200, eos_stops=False)))
    gone = run_forward(harness, model_id)
    assert gone.message.startswith(f"model_id '{model_id}' was removed because its session sent no heartbeats")
    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)) is None
    harness.close()


@pytest.mark.usefixtures("api_is_there_for_long")
def test_heartbeat_keeps_a_model(tmp_path, monkeypatch):
    harness = EngineHarness(tmp_path, housekeeping_interval_s=0.001)
    clock = Clock(monkeypatch)
    model_id, expected = train(harness)
    clock.ahead_s = 30 * DAY_S
    harness.api.write(lambda tx: sessions.record_heartbeat(tx, harness.session_id, time.time() + 30 * DAY_S))
    harness.run(harness.submit(sample(max_tokens=200, eos_stops=False)))
    assert run_forward(harness, model_id).logprobs[0].tobytes() == expected
    harness.close()


def test_fake_models_of_two_sizes_are_two_base_models():
    hashes = {FakeBackend("tiny", FakeConfig(vocab_size=size)).start().base_model_hash for size in (64, 128)}
    assert len(hashes) == 2


def test_stop_finishes_a_long_pass_and_the_next_start_replays_nothing(harness):
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

    model_id, _ = harness.create()
    running = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    waiting = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    backend = Slow("tiny", harness.config)
    store = Store.open(harness.data_dir, role="engine", url=harness.settings.store_url)
    Engine(harness.settings, backend, store, harness.artifacts).run(backend.stop)
    store.close()
    assert harness.result(running).metrics
    assert harness.api.read(lambda tx: models.get_snapshot(tx, model_id)).effect_order == 2, "creation and the pass"

    class NoPass(FakeBackend):
        def begin_pass(self, batch, *, backward):
            raise AssertionError("nothing should be repeated")

    harness.run(waiting, backend=NoPass("tiny", harness.config))
    assert harness.result(waiting).metrics["unclipped_grad_l2:mean"] > 0
