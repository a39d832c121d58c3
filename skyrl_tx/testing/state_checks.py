"""Tests of capacity errors, invalid files, threads and capabilities. A part of `BackendSuite`."""

import threading
from pathlib import Path

import msgspec
import pytest

from skyrl_tx.contract.backend import ALL_PARTS, BackendSpec, StatePart
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import SamplerId
from skyrl_tx.testing.backend_driver import STEP, WEIGHTS_ONLY, BackendDriver

MOST_FILLED = 64
"""Maximum number of models or samplers that a test creates to fill a backend."""


class StateChecks:
    """Tests of error classes, settings, and the records that the engine stores and sends."""

    spec: BackendSpec | None = None
    """The object behind the entry point of the backend. Without it, one test is skipped."""

    def test_settings_have_defaults_and_descriptions(self) -> None:
        """Settings become flags, and an unknown setting is an error."""
        if self.spec is None:
            pytest.skip("set `spec` to the BackendSpec of the backend")
        config = self.spec.config
        assert config.model_config.get("extra") == "forbid", f"{config.__name__}: set extra='forbid' in model_config"
        lacking = [name for name, info in config.model_fields.items() if info.is_required() or not info.description]
        assert not lacking, f"{config.__name__}: these fields have no default or no description: {lacking}"

    def test_capabilities_can_be_stored_and_sent(self, driver: BackendDriver) -> None:
        """The engine publishes capabilities, and stores the fingerprint with weights."""
        converted = msgspec.convert(msgspec.to_builtins(driver.capabilities), Capabilities)
        assert converted == driver.capabilities
        changes = dict(driver.backend.fingerprint_changes())
        assert changes.keys() <= driver.capabilities.fingerprint.keys()
        assert all(isinstance(value, str) for value in changes.values())

    def test_a_model_too_many_is_a_capacity_error(self, driver: BackendDriver) -> None:
        """A full backend refuses a new model, keeps its models, and can reuse a freed slot."""
        if driver.capabilities.max_models > MOST_FILLED:
            return
        models = [driver.model() for _ in range(driver.capabilities.max_models)]
        source, before = driver.backend.capture(models[0], ALL_PARTS), driver.state_of(models[0])
        with pytest.raises(CapacityError):
            driver.model()
        with pytest.raises(CapacityError):
            driver.backend.restore(driver.new_id(), driver.spec(), source, ALL_PARTS)
        driver.backend.restore(models[0], driver.spec(), source, ALL_PARTS)
        assert driver.state_of(models[0]) == before
        driver.backend.delete_model(models[-1])
        driver.model()

    def test_a_sampler_too_many_is_a_capacity_error(self, driver: BackendDriver) -> None:
        """A full backend can reload a loaded sampler, and the base model needs no slot."""
        if driver.capabilities.max_samplers > MOST_FILLED:
            return
        model_id = driver.model()
        loaded = [driver.sampler(model_id) for _ in range(driver.capabilities.max_samplers)]
        source = driver.backend.capture(model_id, WEIGHTS_ONLY)
        with pytest.raises(CapacityError):
            driver.backend.load_sampler(SamplerId("too-many"), source)
        driver.backend.load_sampler(loaded[0], source)
        assert driver.draw(driver.sample_request(None)) == driver.draw(driver.sample_request(None))
        driver.backend.drop_sampler(loaded[0])
        driver.sampler(model_id)

    def test_a_part_or_a_rank_that_does_not_fit_is_a_user_error(self, driver: BackendDriver) -> None:
        """The failed call leaves the model unchanged."""
        model_id, copy = driver.model(steps=1), driver.new_id()
        before = driver.state_of(model_id)
        weights = driver.backend.capture(model_id, WEIGHTS_ONLY)
        for target in (model_id, copy):
            with pytest.raises(UserError):
                driver.backend.restore(target, driver.spec(), weights, {StatePart.WEIGHTS, StatePart.OPTIMIZER})
        if driver.capabilities.max_lora_rank > 1:
            with pytest.raises(UserError):
                driver.backend.restore(model_id, driver.spec(rank=1), weights, WEIGHTS_ONLY)
        assert driver.state_of(model_id) == before

    def test_files_that_are_no_snapshot_are_a_user_error(self, driver: BackendDriver, tmp_path: Path) -> None:
        """`open_snapshot` refuses an empty directory, other files, and damaged files."""
        empty, other, damaged = (tmp_path / name for name in ("empty", "other", "damaged"))
        for directory in (empty, other, damaged):
            directory.mkdir()
        (other / "notes.txt").write_text("no weights")
        driver.backend.capture(driver.model(), ALL_PARTS).write(damaged)
        for path in damaged.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:40])
        for directory in (empty, other, damaged):
            with pytest.raises(UserError):
                driver.backend.open_snapshot(directory)

    def test_a_snapshot_is_written_on_another_thread(self, driver: BackendDriver) -> None:
        """Writing works on another thread while the backend trains the same model."""
        model_id, failures = driver.model(steps=1), list[BaseException]()
        expected = driver.state_of(model_id)
        snapshot, directory = driver.backend.capture(model_id, ALL_PARTS), driver.directory / "in-background"
        directory.mkdir()

        def write() -> None:
            try:
                snapshot.write(directory)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        driver.forward_backward(driver.batch(driver.request(model_id)))
        driver.optim_step(model_id, STEP)
        thread.join()
        assert not failures, failures
        assert {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))} == expected
