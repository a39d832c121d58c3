"""The guarantees of the backend contract as a pytest suite.

To test a backend, subclass `BackendSuite` and override `make_backend`.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np

from skyrl_tx import DISTRIBUTION
from skyrl_tx.contract.backend import ALL_PARTS, AbstractBackend, StatePart
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.contract.results import SampleDelta
from skyrl_tx.testing.backend_driver import STEP, WEIGHTS_ONLY, BackendDriver, Drawn, same_bits

try:
    import pytest

    from skyrl_tx.testing.loss_checks import LossChecks
    from skyrl_tx.testing.sampling_checks import SamplingChecks
    from skyrl_tx.testing.state_checks import StateChecks
except ModuleNotFoundError as error:
    if error.name != "pytest":
        raise
    message = f"skyrl_tx.testing.backend_suite: pytest is not installed: pip install '{DISTRIBUTION}[testing]'"
    raise ModuleNotFoundError(message, name="pytest") from error


MIN_VOCAB_SIZE = 12
"""Smallest vocabulary that has all tokens that the tests use."""


class BackendSuite(LossChecks, SamplingChecks, StateChecks):
    """Tests that a backend keeps the contract, with a tiny base model (see `contract.backend`).

    The backend must support three models in training, two samplers, a context of 64 tokens, a
    vocabulary of `MIN_VOCAB_SIZE` tokens, and the loss "cross_entropy". It is started once per
    class, and again if it cannot be cleaned up after a test. Override `make_backend`, and set
    `spec`. Also override `tolerance` if the backend computes with less precision than float32, and
    `pass_tolerance` if `forward` and `forward_backward` do not give identical bits.
    """

    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        """Return a backend that has not been started. It may write files into `directory`."""
        raise NotImplementedError

    @contextlib.contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        """Simulate a lost device: inside the context, every computation of the backend must raise.

        Override it if your backend can simulate this. By default the test is skipped.
        """
        pytest.skip("the backend has no fault injection: override `lost_device`")
        yield

    @pytest.fixture(scope="class")
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackendDriver]:
        """The started backend, shared by the tests of a class."""

        def make() -> AbstractBackend:
            return cls.make_backend(tmp_path_factory.mktemp("backend"))

        backend = make()
        started = BackendDriver(backend, backend.start(), tmp_path_factory.mktemp("snapshots"), make)
        size = started.capabilities.vocab_size
        assert size >= MIN_VOCAB_SIZE, f"vocab_size is {size}, and the suite needs at least {MIN_VOCAB_SIZE}"
        yield started
        started.backend.close()

    @pytest.fixture
    def driver(self, started: BackendDriver, tmp_path: Path) -> Iterator[BackendDriver]:
        """A driver of the started backend, without models or samplers."""
        driver = BackendDriver(started.backend, started.capabilities, tmp_path)
        yield driver
        try:
            driver.clean()
        except Exception:
            if started.make_backend is not None:
                # The next test gets a new backend, so that it does not fail as well.
                started.backend.close()
                started.backend = started.make_backend()
                started.capabilities = started.backend.start()
            raise

    # Order of results

    def test_result_i_belongs_to_example_i(self, driver: BackendDriver) -> None:
        """Results are in the order of examples, for any order and mix of lengths and models."""
        one, two = driver.model(1, steps=1), driver.model(2, steps=1)
        first = driver.request(one, (9, 3, 17), seed=1)
        second = driver.request(two, (4, 16), seed=2)
        forth = driver.forward(driver.batch(first, second))
        back = driver.forward(driver.batch(second, first))
        assert [len(result.logprobs) for result in forth] == [9, 3, 17, 4, 16]
        assert all(
            same_bits(left, right) for left, right in zip(forth[:3] + forth[3:], back[2:] + back[:2], strict=True)
        )

    # Gradient accumulation

    def test_forward_changes_no_state(self, driver: BackendDriver) -> None:
        """`forward` leaves weights and the accumulated gradient unchanged."""
        model_id = driver.model(steps=1)
        driver.forward_backward(driver.batch(driver.request(model_id)))
        before = driver.state_of(model_id)
        driver.forward(driver.batch(driver.request(model_id, seed=5)))
        assert driver.state_of(model_id) == before

    def test_optim_step_and_clear_gradient_reset_the_gradient(self, driver: BackendDriver) -> None:
        """An optimizer step without a gradient uses a gradient of zero."""
        model_id = driver.model()
        batch = driver.batch(driver.request(model_id))
        still = OptimizerParams(learning_rate=0.0)
        driver.forward_backward(batch)
        assert driver.optim_step(model_id, still)["unclipped_grad_l2:mean"] > 0
        assert driver.optim_step(model_id, still)["unclipped_grad_l2:mean"] == 0
        driver.forward_backward(batch)
        driver.backend.clear_gradient(model_id)
        assert driver.optim_step(model_id, still)["unclipped_grad_l2:mean"] == 0

    def test_gradient_norm_is_that_of_the_next_step(self, driver: BackendDriver) -> None:
        """The norm equals the norm that the next optimizer step reports.

        A backend may also return None.
        """
        model_id = driver.model()
        if driver.backend.gradient_norm(model_id) is None:
            return
        assert driver.backend.gradient_norm(model_id) == 0
        driver.forward_backward(driver.batch(driver.request(model_id)))
        before = driver.state_of(model_id)
        norm = driver.backend.gradient_norm(model_id)

        assert driver.state_of(model_id) == before
        metrics = driver.optim_step(model_id, OptimizerParams(learning_rate=0.0))
        assert norm == pytest.approx(metrics["unclipped_grad_l2:mean"], rel=1e-5)

    def test_training_lowers_the_loss(self, driver: BackendDriver) -> None:
        """A few optimizer steps on one batch lower its loss."""
        model_id = driver.model()
        batch = driver.batch(driver.request(model_id, (12, 12)))
        losses: list[float] = []
        for _ in range(4):
            losses.append(sum(result.sums["loss"] for result in driver.forward_backward(batch)))
            driver.optim_step(model_id, OptimizerParams(learning_rate=0.01))
        assert losses[-1] < losses[0]

    # Isolation

    def test_a_step_on_one_model_leaves_others_bit_equal(self, driver: BackendDriver) -> None:
        """A step with decay and clipping changes no bit of another model's moments or gradient."""
        mine, other = driver.model(1, steps=1), driver.model(2, steps=1)
        driver.forward_backward(driver.batch(driver.request(other)))
        before = driver.state_of(other)
        driver.forward_backward(driver.batch(driver.request(mine)))
        driver.optim_step(mine, STEP)
        driver.backend.clear_gradient(mine)
        assert driver.state_of(other) == before

    def test_a_diverged_model_changes_no_other(self, driver: BackendDriver) -> None:
        """A model with NaN weights does not affect another model in the same batches."""
        diverged, healthy = driver.model(1, steps=1), driver.model(2, steps=1)
        for _ in range(2):
            driver.forward_backward(driver.batch(driver.request(diverged)))
            driver.optim_step(diverged, OptimizerParams(learning_rate=3e38))

        # Train the healthy model alone, then together with the diverged model.
        request = driver.request(healthy, seed=3)
        start = driver.backend.capture(healthy, ALL_PARTS)
        alone = driver.forward_backward(driver.batch(request))
        expected = driver.state_of(healthy)
        driver.backend.restore(healthy, driver.spec(2), start, ALL_PARTS)
        mixed = driver.forward_backward(driver.batch(driver.request(diverged), request))
        assert not np.isfinite(mixed[0].logprobs).all(), "the model has not diverged, so this test shows nothing"
        assert all(same_bits(left, right) for left, right in zip(alone, mixed[2:], strict=True))
        driver.optim_step(diverged, STEP)
        assert driver.state_of(healthy) == expected

        # Sample it next to a healthy and next to the diverged model.
        sampler = driver.sampler(healthy)
        drawn: list[list[Drawn]] = []
        for neighbour in (driver.model(3, steps=1), diverged):
            other = driver.sampler(neighbour)
            drawn.append(
                driver.draw(driver.sample_request(sampler, num_samples=2), driver.sample_request(other, num_samples=2))
            )
            driver.backend.drop_sampler(other)
        assert drawn[0] == drawn[1], "samples next to the diverged model differ from samples next to a healthy one"

    # Atomicity

    def test_a_failed_pass_changes_no_state(self, driver: BackendDriver) -> None:
        """A batch with an unknown model fails, and no gradient of the batch is kept."""
        model_id = driver.model(steps=1)
        before = driver.state_of(model_id)
        batch = driver.batch(driver.request(model_id), driver.request(ModelId("never-made")))
        raised = False
        try:
            driver.backend.forward_backward(batch)
        except BackendLost:
            raise
        except Exception:
            raised = True
        assert raised
        assert driver.state_of(model_id) == before

    def test_an_aborted_pass_changes_no_state(self, driver: BackendDriver) -> None:
        """`abort` discards a dispatched pass, and does nothing after `results`."""
        model_id = driver.model(steps=1)
        before = driver.state_of(model_id)
        batch = driver.batch(driver.request(model_id, (4, 9, 17)))
        aborted = driver.backend.begin_pass(batch, backward=True)
        aborted.step()
        aborted.abort()
        aborted.abort()
        assert driver.state_of(model_id) == before

        kept = driver.backend.begin_pass(batch, backward=True)
        while not kept.step():
            pass
        kept.results()
        after = driver.state_of(model_id)
        kept.abort()
        assert after != before
        assert driver.state_of(model_id) == after

    # Lost devices

    def test_check_devices_tells_a_lost_device_from_a_failed_call(self, driver: BackendDriver) -> None:
        """With a lost device computations fail, the state is kept, and `check_devices` raises."""
        model_id, backend = driver.model(steps=1), driver.backend
        batch = driver.batch(driver.request(model_id))
        driver.forward_backward(batch)
        before = driver.state_of(model_id)
        unknown = driver.batch(driver.request(ModelId("never-made")))
        calls: list[Callable[[], object]] = [
            lambda: backend.forward(batch),
            lambda: backend.forward_backward(batch),
            lambda: backend.optim_step(model_id, STEP),
        ]

        # A failed call with working devices.
        assert _catch_failure(lambda: backend.forward(unknown)) is not None
        backend.check_devices()

        # The same with a lost device.
        with self.lost_device(backend):
            assert all(_catch_failure(call) is not None for call in calls)
            request = driver.sample_request(None)
            deltas: list[SampleDelta] = []
            is_raised = _catch_failure(lambda: deltas.extend(driver.run_samples(request))) is not None
            assert is_raised or any(delta.error is not None for delta in deltas)
            backend.cancel_sample([request.request_id])
            assert isinstance(_catch_failure(backend.check_devices), BackendLost)
        backend.check_devices()
        assert driver.state_of(model_id) == before

    # Immutability of snapshots

    def test_training_changes_no_snapshot(self, driver: BackendDriver) -> None:
        """A snapshot written after more training has the same files as one written at once."""
        model_id = driver.model(steps=1)
        driver.forward_backward(driver.batch(driver.request(model_id)))
        snapshot = driver.backend.capture(model_id, ALL_PARTS)
        early = driver.files_of(snapshot)
        driver.optim_step(model_id, STEP)
        driver.forward_backward(driver.batch(driver.request(model_id)))
        assert driver.files_of(snapshot) == early
        assert driver.state_of(model_id) != early

    def test_training_changes_no_sampler(self, driver: BackendDriver) -> None:
        """Samples of a sampler stay equal after more training and after deletion of the model."""
        model_id = driver.model(steps=2)
        sampler = driver.sampler(model_id)
        before = driver.draw(driver.sample_request(sampler))
        driver.forward_backward(driver.batch(driver.request(model_id, seed=9)))
        driver.optim_step(model_id, STEP)
        driver.backend.delete_model(model_id)
        assert driver.draw(driver.sample_request(sampler)) == before

    # Batch invariance

    def test_gradients_are_batch_invariant(self, driver: BackendDriver) -> None:
        """Two requests give the same gradient in one pass, in two passes, and with other requests."""
        model_id, other = driver.model(1, steps=1), driver.model(2, steps=1)
        first, second = driver.request(model_id, (5, 9, 3), seed=1), driver.request(model_id, (12, 2), seed=2)
        foreign = driver.request(other, (7, 18), seed=3)
        start = driver.backend.capture(model_id, ALL_PARTS)
        together = driver.forward_backward(driver.batch(first, second))
        expected = driver.state_of(model_id)

        # Two passes.
        driver.backend.restore(model_id, driver.spec(1), start, ALL_PARTS)
        separate = [
            *driver.forward_backward(driver.batch(first)),
            *driver.forward_backward(driver.batch(second)),
        ]
        assert all(same_bits(left, right) for left, right in zip(together, separate, strict=True))
        assert driver.state_of(model_id) == expected

        # One pass with a request of another model.
        driver.backend.restore(model_id, driver.spec(1), start, ALL_PARTS)
        mixed = driver.forward_backward(driver.batch(first, foreign, second))
        own = mixed[:3] + mixed[5:]
        assert all(same_bits(left, right) for left, right in zip(together, own, strict=True))
        assert driver.state_of(model_id) == expected

    def test_interleaved_passes_are_batch_invariant(self, driver: BackendDriver) -> None:
        """Two passes alternate, with optimizer steps of a third model in between."""
        models = [driver.model(number, steps=1) for number in (1, 2)]
        batches = [driver.batch(driver.request(model_id, (12, 5, 9))) for model_id in models]
        starts = [driver.backend.capture(model_id, ALL_PARTS) for model_id in models]
        alone = [driver.forward_backward(batch) for batch in batches]
        expected = [driver.state_of(model_id) for model_id in models]

        # Run both passes again, alternating.
        for number, model_id in enumerate(models):
            driver.backend.restore(model_id, driver.spec(number + 1), starts[number], ALL_PARTS)
        other = driver.model(3)
        passes = [driver.backend.begin_pass(batch, backward=True) for batch in batches]
        running = list(passes)
        while running:
            running = [running_pass for running_pass in running if not running_pass.step()]
            driver.optim_step(other, STEP)
        results = [running_pass.results() for running_pass in reversed(passes)][::-1]
        for left, right in zip(alone, results, strict=True):
            assert all(same_bits(one, two) for one, two in zip(left, right, strict=True))
        assert [driver.state_of(model_id) for model_id in models] == expected

    # Snapshots

    def test_a_new_model_is_restored_from_its_files(self, driver: BackendDriver) -> None:
        """The seed decides the weights of a new model, and its files hold its whole state."""
        model_id, copy, directory = driver.model(1), driver.new_id(), driver.directory / "new"
        directory.mkdir()
        driver.backend.capture(model_id, ALL_PARTS).write(directory)
        driver.backend.restore(copy, driver.spec(1), driver.backend.open_snapshot(directory), ALL_PARTS)
        assert driver.state_of(copy) == driver.state_of(model_id)
        driver.backend.delete_model(copy)
        driver.backend.create_model(copy, driver.spec(1))
        assert driver.state_of(copy) == driver.state_of(model_id) != driver.state_of(driver.model(2))

    def test_a_restored_model_continues_bit_equal(self, driver: BackendDriver) -> None:
        """A model restored from files into another model continues with the same bits."""
        model_id, copy = driver.model(steps=2), driver.new_id()
        driver.forward_backward(driver.batch(driver.request(model_id, seed=4)))
        directory = driver.directory / "kept"
        directory.mkdir()
        driver.backend.capture(model_id, ALL_PARTS).write(directory)
        driver.backend.restore(copy, driver.spec(), driver.backend.open_snapshot(directory), ALL_PARTS)
        assert driver.state_of(copy) == driver.state_of(model_id)
        metrics = []
        for current in (model_id, copy):
            driver.forward_backward(driver.batch(driver.request(current, seed=5)))
            metrics.append(driver.optim_step(current, STEP))
        assert metrics[0] == metrics[1]
        assert (metrics[1]["step:max"], metrics[1]["learning_rate:mean"]) == (3, pytest.approx(STEP.learning_rate))
        assert driver.state_of(copy) == driver.state_of(model_id)

    def test_parts_that_are_not_restored_are_fresh(self, driver: BackendDriver) -> None:
        """A model restored from weights only has the moments and the gradient of a fresh model."""
        model_id, copy = driver.model(steps=2), driver.new_id()
        driver.forward_backward(driver.batch(driver.request(model_id, seed=4)))
        source = driver.backend.capture(model_id, ALL_PARTS)
        driver.backend.restore(copy, driver.spec(), source, WEIGHTS_ONLY)
        metrics = driver.optim_step(copy, OptimizerParams(learning_rate=0.0))
        assert (metrics["unclipped_grad_l2:mean"], metrics["step:max"], metrics["learning_rate:mean"]) == (0, 1, 0)

        weights = driver.files_of(driver.backend.capture(copy, WEIGHTS_ONLY))
        assert weights == driver.files_of(driver.backend.capture(model_id, WEIGHTS_ONLY))
        driver.backend.restore(copy, driver.spec(), source, {StatePart.WEIGHTS, StatePart.OPTIMIZER})
        driver.backend.clear_gradient(model_id)
        assert driver.state_of(copy) == driver.state_of(model_id)

    # Idempotence

    def test_freeing_and_loading_are_idempotent(self, driver: BackendDriver) -> None:
        """Deleting and dropping twice, and loading a loaded sampler, does nothing."""
        model_id = driver.model()
        sampler = driver.sampler(model_id)
        driver.backend.load_sampler(sampler, driver.backend.capture(model_id, WEIGHTS_ONLY))
        for _ in range(2):
            driver.backend.drop_sampler(sampler)
            driver.backend.delete_model(model_id)
        driver.backend.create_model(model_id, driver.spec())

    def test_meters_tell_what_runs_and_counts_never_decrease(self, driver: BackendDriver) -> None:
        """Counts never decrease and usage is plausible, for the fields that the backend fills."""
        before = driver.backend.meters()
        model_id = driver.model(steps=1)
        driver.forward_backward(driver.batch(driver.request(model_id, (9, 3))))
        after = driver.backend.meters()
        for name in ("compilations", "compile_seconds", "out_of_memory_retries", "micro_batches", "padding_tokens"):
            old, new = getattr(before, name), getattr(after, name)
            assert (old is None) == (new is None), name
            assert old is None or new >= old >= 0, name
        assert before.micro_batches is None or (after.micro_batches or 0) > before.micro_batches
        assert len(after.device_memory) in (0, len(driver.capabilities.devices))
        assert all(0 <= memory.used_bytes <= memory.limit_bytes for memory in after.device_memory)
        assert after.decode_slots is None or after.decode_slots_used == 0, "no sample runs"

    def test_close_is_idempotent(self, tmp_path: Path) -> None:
        """`close` may be called before `start`, and twice."""
        backend = self.make_backend(tmp_path)
        with contextlib.closing(backend):
            backend.close()


def _catch_failure(call: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raises, or None."""
    try:
        call()
    except Exception as error:
        return error
    return None
