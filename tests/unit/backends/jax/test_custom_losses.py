"""A custom loss in a pass has the gradient of the same built-in loss, and is batch-invariant."""

import threading
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.compiler import Program
from skyrl_tx.backends.jax.train import custom_losses
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.custom_loss import CustomLoss, CustomLossInput, Operation
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.contract.results import PassResult
from tests.support.tiny import tiny_backend

MODEL, OTHER = ModelId("m"), ModelId("o")
CUSTOM, PLAIN, NEIGHBOUR = RequestId("custom"), RequestId("plain"), RequestId("neighbour")


def importance_sampling(scale: float = 1.0, rank: int = 1) -> CustomLoss:
    """Return -scale * sum(exp(l - q) * A), with the mean ratio of the datum as a metric."""
    axes = tuple(range(rank))

    return CustomLoss(
        name="ratio",
        inputs=tuple(CustomLossInput(name=name, rank=rank) for name in ("logprobs", "sampled", "advantages")),
        constants=(-scale,),
        operations=(
            Operation(name="sub", values=(0, 1)),
            Operation(name="exp", values=(4,)),
            Operation(name="mul", values=(5, 2)),
            Operation(name="sum", values=(6,), options=(0, *axes)),
            Operation(name="mul", values=(7, 3)),
            Operation(name="mean", values=(5,), options=(0, *axes)),
        ),
        loss=8,
        metrics={"custom/ratio:mean": 9},
    )


def examples(request: RequestId, model: ModelId, loss: CustomLoss | None, *shapes: tuple[int, ...]) -> Any:
    generator = np.random.default_rng(sum(sum(shape) for shape in shapes))
    for shape in shapes:
        tokens = generator.integers(1, 100, shape[0]).astype(np.int32)
        targets = generator.integers(1, 100, shape).astype(np.int32)
        sampled = generator.uniform(-6, -5, shape).astype(np.float32)
        advantages = generator.uniform(-1, 1, shape).astype(np.float32)

        if loss is None:
            inputs = {"logprobs": sampled, "advantages": advantages, "weights": np.ones(shape, np.float32)}
        else:
            inputs = {"sampled": sampled, "advantages": advantages}

        yield PassExample(
            request_id=request,
            model_id=model,
            tokens=tokens,
            loss="importance_sampling" if loss is None else "custom",
            loss_inputs={"target_tokens": targets, **inputs},
            loss_config={},
            custom=loss,
        )


def compute_gradient(backend: JaxBackend, model: ModelId, *batch: PassExample) -> tuple[list[Any], list[np.ndarray]]:
    """Run a pass, return its results and the gradient of `model`, and clear all gradients."""
    results = backend.forward_backward(PreparedModelPassBatch(examples=tuple(batch)))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(backend._pool.get(model).gradient)]
    for model_id in {example.model_id for example in batch}:
        backend.clear_gradient(model_id)
    return results, leaves


@pytest.fixture(scope="module")
def backend():
    with tiny_backend(std=0.05, max_lora_adapters=2, micro_batch_tokens=64) as backend:
        for model in (MODEL, OTHER):
            backend.create_model(model, ModelSpec(lora=LoraSpec(rank=4, seed=1)))
        yield backend


def test_a_custom_loss_has_the_gradient_of_the_same_built_in_loss(backend: JaxBackend) -> None:
    shapes = [(9,), (33,), (20,), (60,)]  # multiple micro-batches with different padding
    found, gradient = compute_gradient(backend, MODEL, *examples(CUSTOM, MODEL, importance_sampling(), *shapes))
    wanted, expected = compute_gradient(backend, MODEL, *examples(PLAIN, MODEL, None, *shapes))
    for own, built_in in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(own.logprobs.shape, built_in.logprobs.shape)
        np.testing.assert_allclose(own.logprobs, built_in.logprobs, rtol=1e-6)
        assert own.sums["loss"] == pytest.approx(built_in.sums["loss"], rel=1e-6)
        ratio = built_in.means["ratio"]
        assert own.metrics == pytest.approx({"custom/ratio:mean": ratio.total / ratio.count}, rel=1e-6)
    largest = max(np.abs(leaf).max() for leaf in expected)
    assert largest > 0
    for own, built_in in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(own / largest, built_in / largest, atol=1e-6)


@pytest.mark.slow
def test_a_custom_loss_is_batch_invariant_next_to_other_requests(backend: JaxBackend) -> None:
    own = [*examples(CUSTOM, MODEL, importance_sampling(), (9,), (40,), (33,))]
    others = [
        *examples(PLAIN, MODEL, None, (20,), (7,)),
        *examples(NEIGHBOUR, OTHER, importance_sampling(2.0), (9,), (50,)),
    ]
    alone, gradient = compute_gradient(backend, MODEL, *own)
    _, plain_gradient = compute_gradient(backend, MODEL, *others[:2])
    together, _ = compute_gradient(backend, MODEL, *own, *others)

    for one, other in zip(alone, together, strict=False):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert (one.sums, one.metrics) == (other.sums, other.metrics)

    _, summed = compute_gradient(backend, MODEL, *own, *others[:2])
    for one, other, both in zip(gradient, plain_gradient, summed, strict=True):
        assert (one + other).tobytes() == both.tobytes()


def test_forward_gives_the_same_results_and_no_gradient(backend: JaxBackend) -> None:
    batch = [*examples(CUSTOM, MODEL, importance_sampling(), (9,), (40,))]
    with_gradient, _ = compute_gradient(backend, MODEL, *batch)
    without = backend.forward(PreparedModelPassBatch(examples=tuple(batch)))
    for one, other in zip(with_gradient, without, strict=True):
        assert (one.sums, one.metrics) == (other.sums, other.metrics)
    assert backend._pool.get(MODEL).gradient is None


@pytest.mark.slow
def test_several_targets_per_position_and_a_scalar(backend: JaxBackend) -> None:
    loss = importance_sampling(rank=2)
    loss = replace(
        loss,
        inputs=(*loss.inputs[:2], CustomLossInput(name="advantages", rank=0)),
    )
    batch = []
    for example in examples(CUSTOM, MODEL, loss, (9, 3), (12, 4), (11, 3)):
        inputs = {**example.loss_inputs, "advantages": np.float32(0.5).reshape(())}
        batch.append(replace(example, loss_inputs=inputs))
    results, gradient = compute_gradient(backend, MODEL, *batch)

    for example, result in zip(batch, results, strict=True):
        ratio = np.exp(result.logprobs.astype(np.float64) - example.loss_inputs["sampled"])
        assert result.sums["loss"] == pytest.approx(-0.5 * ratio.sum(), rel=1e-5)

    assert any(leaf.any() for leaf in gradient)


def test_other_constants_and_other_lengths_of_an_octave_compile_nothing(backend: JaxBackend) -> None:
    compute_gradient(backend, MODEL, *examples(CUSTOM, MODEL, importance_sampling(), (40,)))
    before = backend.meters().compilations
    for scale, length in ((0.5, 40), (0.25, 41)):
        changed = replace(importance_sampling(scale), name=f"ratio {scale}")
        compute_gradient(backend, MODEL, *examples(CUSTOM, MODEL, changed, (length,)))
    assert backend.meters().compilations == before


def evaluate(loss: CustomLoss, *shapes: tuple[int, ...]) -> list[tuple[PassResult, np.ndarray]]:
    """Evaluate a loss of random log-probabilities. Returns results and gradients."""
    batch = list(examples(CUSTOM, MODEL, loss, *shapes))
    programs, padded = custom_losses.CustomLossPrograms(), custom_losses.list_shapes(batch)
    programs.acquire(set(padded), "a pass")
    return programs.evaluate(padded, batch, [example.loss_inputs["sampled"] - 0.5 for example in batch])


def test_numbers_of_targets_are_padded_to_powers_of_two() -> None:
    loss = importance_sampling(rank=2)
    batch = list(examples(CUSTOM, MODEL, loss, (9, 5), (12, 8), (11, 3), (40, 5)))
    padded = custom_losses.list_shapes(batch)
    assert [(shape.length, shape.num_targets) for shape in padded] == [(32, 8), (32, 8), (32, 4), (64, 8)]

    values = evaluate(loss, (9, 5), (12, 8), (11, 3), (40, 5))
    for example, (result, found) in zip(batch, values, strict=True):
        gradient = -np.exp(np.float32(-0.5)) * example.loss_inputs["advantages"]
        np.testing.assert_allclose(found, gradient, rtol=1e-6)
        assert result.sums["loss"] == pytest.approx(gradient.sum(dtype=np.float64), abs=1e-5)
        assert result.metrics == pytest.approx({"custom/ratio:mean": np.exp(-0.5)})


def test_a_loss_with_more_elements_has_smaller_chunks() -> None:
    plain = importance_sampling()
    stacks = [Operation(name="unsqueeze", values=(0,), options=(0,))]
    stacks += [Operation(name="concat", values=(4,) * 64, options=(0,))] * 255
    large = replace(plain, operations=(*stacks,), loss=3, metrics={})
    for length in (20, 5000):
        (chunk,) = custom_losses.list_shapes(list(examples(CUSTOM, MODEL, plain, (length,))))
        assert chunk.chunk_size == max(1, 2**15 // chunk.length)
        (chunk,) = custom_losses.list_shapes(list(examples(CUSTOM, MODEL, large, (length,))))
        assert chunk.chunk_size * 255 * 64 * chunk.length <= max(2**24, 255 * 64 * chunk.length)


def test_a_request_that_needs_too_many_programs_is_refused() -> None:
    """With 1 to 1,024 targets per position at 2 lengths, it needs 22 programs."""
    sizes = [(length, 2**power) for length in (9, 40) for power in range(11)]
    batch = list(examples(CUSTOM, MODEL, importance_sampling(rank=2), *sizes))
    with pytest.raises(UserError, match="data: its lengths and numbers of targets need 22 programs of loss 'ratio'"):
        custom_losses.list_shapes(batch)
    assert len(custom_losses.list_shapes(batch[: custom_losses.MAX_SHAPES])) == custom_losses.MAX_SHAPES


def test_a_pass_keeps_its_programs_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_losses, "_MAX_PROGRAMS", 1)
    programs = custom_losses.CustomLossPrograms()
    shapes = custom_losses.list_shapes(list(examples(CUSTOM, MODEL, importance_sampling(), (9,), (40,), (70,))))
    programs.acquire(shapes, "first")
    programs.acquire(shapes[:1], "second")
    programs.release(shapes)
    assert set(programs.ready) == {shapes[0], shapes[2]}
    programs.release(shapes[:1])
    assert set(programs.ready) == {shapes[2]}


def test_a_pass_waits_for_its_loss_while_another_pass_runs(
    backend: JaxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program compiles on another thread, and `step` returns without a micro-batch."""
    allowed, compile_program = threading.Event(), Program.compile_in_steps

    def compile_when_allowed(program: Program) -> Any:
        assert allowed.wait(30)
        return compile_program(program)

    monkeypatch.setattr(Program, "compile_in_steps", compile_when_allowed)
    loss = replace(
        importance_sampling(), operations=(*importance_sampling().operations, Operation(name="abs", values=(8,)))
    )
    batch = PreparedModelPassBatch(examples=tuple(examples(CUSTOM, MODEL, loss, (40,))))
    for backward in (False, True):
        slow = backend.begin_pass(batch, backward=backward)
        assert slow.is_waiting and not slow.step() and slow.is_waiting
        slow.abort()

    slow = backend.begin_pass(batch, backward=False)
    other = backend.begin_pass(
        PreparedModelPassBatch(examples=tuple(examples(PLAIN, OTHER, None, (40,)))), backward=False
    )
    assert not other.is_waiting and other.step() and len(other.results()) == 1
    allowed.set()
    assert len(slow.results()) == 1 and not slow.is_waiting
