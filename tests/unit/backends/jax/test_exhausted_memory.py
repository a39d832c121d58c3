"""Passes that exhaust the memory of the device are repeated in smaller parts, and cost other passes nothing."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax import devices
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.train import forward_backward as training
from skyrl_tx.backends.jax.train import passes, training_state
from skyrl_tx.contract.backend import ALL_PARTS, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.errors import CapacityError, MemoryExhausted, UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.testing.backend_driver import drawn_examples
from tests.support.tiny import TINY_CONFIG, tiny_directory

MODEL = ModelId("m")
SPEC = ModelSpec(lora=LoraSpec(rank=4, seed=1))
EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")


def request(name: str, *lengths: int) -> tuple[PassExample, ...]:
    return drawn_examples(MODEL, *((length,) for length in lengths), seed=len(name), request=name)


BATCH = PreparedModelPassBatch(examples=request("a", 30, 30, 20) + request("bb", 31, 9, 12))


@pytest.fixture(scope="module")
def start() -> Callable[..., JaxBackend]:
    def start(micro_batch_tokens: int, **settings: bool) -> JaxBackend:
        config = TINY_CONFIG.model_copy(update={"micro_batch_tokens": micro_batch_tokens, **settings})
        backend = JaxBackend(str(tiny_directory(std=0.05)), config)
        backend.start()
        backend.create_model(MODEL, SPEC)
        backend.forward_backward(PreparedModelPassBatch(examples=request("c", 32)))  # a pending gradient
        return backend

    return start


def numbers(backend: JaxBackend) -> list[np.ndarray]:
    """Return the results of a pass and the gradient after it."""
    results = backend.forward_backward(BATCH)
    gradient = backend.capture(MODEL, {StatePart.GRADIENT}).parts[StatePart.GRADIENT]
    return [result.logprobs for result in results] + [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]


def read_state(backend: JaxBackend) -> list[np.ndarray]:
    """Return the weights, the moments and the gradient of the model."""
    parts = backend.capture(MODEL, ALL_PARTS).parts
    return [np.asarray(leaf) for leaf in jax.tree.leaves(dict(parts))]


def assert_bit_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_offloaded_training_has_the_bits_of_rematerialized_training(start):
    """On CPU, host and device share the same memory."""
    offloaded = start(32, offload=True)
    assert offloaded.fingerprint_changes()["offload_above"] == "0"
    assert_bit_equal(numbers(offloaded), numbers(start(32, remat=True)))


def test_a_pass_that_exhausts_the_device_is_repeated_in_smaller_micro_batches(start, monkeypatch, caplog):
    """The bits are the same as with the smaller budget from the start. Earlier sums count once."""
    wanted = numbers(start(64))
    backend = start(128)
    accumulate, sizes = training.accumulate, []

    def raise_exhausted(*arguments, **settings):
        sizes.append(arguments[3].tokens_BT.size)
        if sizes[-1] > 64:
            accumulate(*arguments, **settings)  # the donated sum is deleted, as on a device
            raise EXHAUSTED
        return accumulate(*arguments, **settings)

    monkeypatch.setattr(training, "accumulate", raise_exhausted)
    assert backend.fingerprint_changes() == {"micro_batch_tokens": "128", "remat": "False"}
    assert_bit_equal(numbers(backend), wanted)
    assert sizes[0] > 64 and max(sizes[1:]) <= 64
    assert "micro_batch_tokens=64" in caplog.text
    assert backend.fingerprint_changes() == {"micro_batch_tokens": "64", "remat": "False"}
    assert "--backend-config.micro-batch-tokens 64 --no-backend-config.remat" in caplog.text


def test_memory_exhausted_when_results_are_read(start, monkeypatch):
    wanted = numbers(start(64))
    backend, errors = start(128), [EXHAUSTED]
    monkeypatch.setattr(passes.jax, "block_until_ready", lambda tree: raise_next(errors) or tree)
    assert_bit_equal(numbers(backend), wanted)
    assert not errors


def test_with_several_hosts_a_pass_goes_on_with_less_memory_only_when_it_is_called_again(start, monkeypatch):
    """The failed call makes the smaller plan and leaves nothing running that waits for a host."""
    wanted = numbers(start(64))
    backend, accumulate, drained = start(128), training.accumulate, []

    def raise_exhausted(*arguments, **settings):
        if arguments[3].tokens_BT.size > 64:
            raise EXHAUSTED
        return accumulate(*arguments, **settings)

    monkeypatch.setattr(training, "accumulate", raise_exhausted)
    monkeypatch.setattr(passes, "is_distributed", lambda: True)
    monkeypatch.setattr(passes, "drain_devices", lambda: drained.append(True))
    running = backend.begin_pass(BATCH, backward=True)
    with pytest.raises(MemoryExhausted, match="Out of memory") as raised:
        running.step()
    assert "micro_batch_tokens=64" in raised.value.plan and drained == [True]
    results = running.results()
    gradient = backend.capture(MODEL, {StatePart.GRADIENT}).parts[StatePart.GRADIENT]
    found = [result.logprobs for result in results] + [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]
    assert_bit_equal(found, wanted)
    assert backend.meters().out_of_memory_retries == 1 and drained == [True]


def test_waiting_for_all_devices_raises_other_errors_than_exhausted_memory(monkeypatch):
    class Array:
        def __init__(self, error: Exception | None = None) -> None:
            self.error, self.is_done = error, False

        def block_until_ready(self) -> None:
            self.is_done = True
            if self.error is not None:
                raise self.error

    arrays = [Array(), Array(EXHAUSTED), Array()]
    monkeypatch.setattr(devices.jax, "live_arrays", lambda: arrays)
    devices.drain_devices()
    assert all(array.is_done for array in arrays)
    arrays.append(Array(jax.errors.JaxRuntimeError("INTERNAL: another host is gone")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="another host is gone"):
        devices.drain_devices()


def raise_next(errors: list[Exception]) -> None:
    if errors:
        raise errors.pop()


@pytest.mark.parametrize("first", [0, 1])
def test_two_running_passes_may_both_exhaust_the_memory(start, monkeypatch, first):
    """One pass fits with 64 tokens, the other with 32. The plan becomes the smaller one."""
    models_, budgets = (MODEL, ModelId("other")), (64, 32)
    batches = [
        PreparedModelPassBatch(examples=drawn_examples(model_id, (30,), (30,), (20,), (31,))) for model_id in models_
    ]

    def start_pass(backend: JaxBackend, which: int):
        return backend.begin_pass(batches[which], backward=True)

    def read_numbers(backend: JaxBackend, which: int, results) -> list[np.ndarray]:
        gradient = backend.capture(models_[which], {StatePart.GRADIENT}).parts[StatePart.GRADIENT]
        return [result.logprobs for result in results] + [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]

    def start_with_both(micro_batch_tokens: int) -> JaxBackend:
        backend = start(micro_batch_tokens)
        backend.create_model(models_[1], ModelSpec(lora=LoraSpec(rank=4, seed=2)))
        return backend

    wanted = []
    for which, budget in enumerate(budgets):
        backend = start_with_both(budget)
        wanted.append(read_numbers(backend, which, start_pass(backend, which).results()))

    backend, accumulate, refused = start_with_both(128), training.accumulate, set()
    weights = [
        backend.capture(model_id, {StatePart.WEIGHTS}).parts[StatePart.WEIGHTS]["q_proj"].a for model_id in models_
    ]

    def raise_exhausted(params, adapter, *arguments, **settings):
        which = next(n for n, leaf in enumerate(weights) if leaf is adapter.weights["q_proj"].a)
        size, budget = arguments[1].tokens_BT.size, budgets[which]
        if size > budget:
            refused.add(size)
            raise EXHAUSTED
        return accumulate(params, adapter, *arguments, **settings)

    monkeypatch.setattr(training, "accumulate", raise_exhausted)
    passes = [start_pass(backend, which) for which in range(2)]
    running = set(range(2))
    while running:
        running -= {which for which in running if passes[which].step()}
    results = {which: passes[which].results() for which in (first, 1 - first)}
    for which in range(2):
        assert_bit_equal(read_numbers(backend, which, results[which]), wanted[which])
    assert {64, 128} <= refused
    refused.clear()
    start_pass(backend, 0).results()
    assert not refused, "the next pass began with the smaller plan"


def test_after_remat_the_pass_fails_alone(start, monkeypatch):
    """A plan that did not help is discarded.

    Other passes have the same bits as without the failure.
    """
    backend, remats = start(32), []

    def raise_exhausted(*arguments, remat: RematPolicy, **settings):
        remats.append(remat)
        raise EXHAUSTED

    with monkeypatch.context() as patch:
        patch.setattr(training, "accumulate", raise_exhausted)
        with pytest.raises(CapacityError, match="no memory left for this pass, in the smallest micro-batches"):
            backend.forward_backward(BATCH)
    assert remats == [RematPolicy.SAVE_MATMULS, RematPolicy.FULL]
    assert_bit_equal(numbers(backend), numbers(start(32)))


def test_a_plan_that_does_not_help_affects_no_other_pass(start, monkeypatch):
    backend, sizes = start(128), []

    def raise_exhausted(*arguments, **settings):
        sizes.append(arguments[3].tokens_BT.size)
        raise EXHAUSTED

    with monkeypatch.context() as patch:
        patch.setattr(training, "accumulate", raise_exhausted)
        with pytest.raises(CapacityError, match="no memory left for this pass, in the smallest micro-batches"):
            backend.forward_backward(BATCH)
    assert len(set(sizes)) > 1
    assert_bit_equal(numbers(backend), numbers(start(128)))


@pytest.mark.slow  # compares bits of two rematerializations, which little optimization does not keep
def test_remat_that_helps_becomes_the_plan(start, monkeypatch):
    backend, accumulate, remats = start(32), training.accumulate, []

    def raise_exhausted(*arguments, remat: RematPolicy, **settings):
        remats.append(remat)
        if remat is not RematPolicy.FULL:
            raise EXHAUSTED
        return accumulate(*arguments, remat=remat, **settings)

    monkeypatch.setattr(training, "accumulate", raise_exhausted)
    assert_bit_equal(numbers(backend), numbers(start(32, remat=True)))
    remats.clear()
    backend.forward_backward(BATCH)
    assert set(remats) == {RematPolicy.FULL}


def test_other_failures_are_not_repeated(start, monkeypatch):
    backend, calls = start(128), []

    def broken(*arguments, **settings):
        calls.append(arguments)
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(training, "accumulate", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        backend.forward_backward(BATCH)
    assert len(calls) == 1


@pytest.mark.parametrize("change", ["create", "restore", "overwrite", "step"])
def test_a_change_that_exhausts_the_memory_raises_and_changes_nothing(start, monkeypatch, change):
    """The device may also report the error only when the result is awaited."""
    backend, other = start(64), ModelId("other")
    snapshot = backend.capture(MODEL, ALL_PARTS)
    run = {
        "create": lambda: backend.create_model(other, SPEC),
        "restore": lambda: backend.restore(other, SPEC, snapshot, ALL_PARTS),
        "overwrite": lambda: backend.restore(MODEL, SPEC, snapshot, {StatePart.WEIGHTS}),
        "step": lambda: backend.optim_step(MODEL, OptimizerParams()),
    }[change]
    before = read_state(backend)

    with monkeypatch.context() as patch:
        patch.setattr(training_state.jax, "block_until_ready", lambda tree: raise_next([EXHAUSTED]))
        patch.setattr(training_state, "adamw_step", lambda *arguments: raise_next([EXHAUSTED]))
        with pytest.raises(CapacityError, match=r"no memory left for .*\. State is unchanged.*max-lora-adapters"):
            run()

    assert_bit_equal(read_state(backend), before)
    with pytest.raises(UserError, match="no such model"):
        backend.capture(other, ALL_PARTS)
    run()
