"""Passes with shared prefixes have the results and gradients of plain passes, up to rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.contract.results import SHARED_TOKENS
from tests.support.tiny import (
    BY_HEAD,
    DENSE,
    HYBRID,
    HYBRID_MOE,
    LATENTS,
    MAMBA,
    MOE,
    OUTPUT_NORMS,
    SINKS,
    WINDOWS,
    tiny_backend,
)
from tests.unit.backends.jax.test_custom_losses import importance_sampling

PLAIN, SHARED = ModelId("plain"), ModelId("shared")
BUDGET = 256
TOLERANCE = 1e-5
"""The allowed difference, relative to the largest entry of a tensor."""


@contextmanager
def start_backend(architecture: str = DENSE, **changed: Any) -> Iterator[JaxBackend]:
    """Give a backend with two equal models with adapters that are trained a little. One shares prefixes."""
    with tiny_backend(architecture, std=0.05, micro_batch_tokens=BUDGET, **changed) as backend:
        for model, shares in ((PLAIN, False), (SHARED, True)):
            backend.create_model(model, ModelSpec(lora=LoraSpec(rank=4, seed=1), shares_prefixes=shares))
            state = backend._pool.get(model)
            draw = np.random.default_rng(0)
            weights = jax.tree.map(
                lambda x, draw=draw: x + 0.05 * draw.standard_normal(x.shape, np.float32), state.adapter.weights
            )
            backend._pool.put(model, replace(state, adapter=state.adapter.replace(weights=weights)))
        yield backend


@pytest.fixture(scope="module", params=[DENSE, pytest.param(HYBRID, marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> Iterator[JaxBackend]:
    with start_backend(request.param) as backend:
        yield backend


def make_group(
    model: ModelId,
    loss: str,
    prompt_length: int,
    answers: tuple[int, ...],
    *,
    seed: int = 0,
    num_targets: int | None = None,
) -> Iterator[PassExample]:
    """Yield examples with one prompt, whose positions have no advantage, mask or weight of a cross-entropy."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(1, 100, prompt_length)
    prompt_targets = draw.integers(1, 100, (prompt_length, num_targets or 1))
    spec = LOSS_SPECS[loss]

    for length in answers:
        tokens = np.concatenate([prompt, draw.integers(1, 100, length)]).astype(np.int32)
        shape = tokens.shape if num_targets is None else (tokens.size, num_targets)
        targets = np.concatenate([tokens[1:], [7]])
        if num_targets is not None:
            targets = np.concatenate([prompt_targets, draw.integers(1, 100, (length, num_targets))])

        # The other inputs
        inputs: dict[str, Any] = {"target_tokens": targets.astype(np.int32)}
        for name in spec.inputs.keys() - {"target_tokens"}:
            values = draw.uniform(-5.7, -5.3, shape) if name == "logprobs" else draw.uniform(0.5, 1, shape)
            values[: prompt_length - 1] = 1 if name == "weights" and spec.is_policy_gradient else 0
            inputs[name] = values.astype(np.float32)
        yield PassExample(
            request_id=RequestId(f"{model}-{seed}"),
            model_id=model,
            tokens=tokens,
            loss=loss,
            loss_inputs=inputs,
            loss_config=dict(spec.config),
        )


def list_few_targets(example: PassExample) -> PassExample:
    """Return the example with 0 to 3 of its 3 targets at each position, as a CSR tensor of the client may list them.

    The server fills the other cells with zeros.
    """
    targets = example.loss_inputs["target_tokens"]
    is_listed = np.arange(3) < np.arange(len(targets))[:, None] % 4
    weights = np.where(is_listed, np.array([0.2, 0.3, 0.5], np.float32), np.float32(0))
    inputs = {"target_tokens": np.where(is_listed, targets, 0).astype(np.int32), "weights": weights}
    return replace(example, loss_inputs=inputs)


def use_custom_loss(example: PassExample) -> PassExample:
    """Return the example with a custom loss. Its inputs depend on its length, also in the prompt."""
    draw = np.random.default_rng(example.tokens.size)
    inputs = {name: draw.uniform(-1, 1, example.tokens.size).astype(np.float32) for name in ("sampled", "advantages")}
    inputs = {"target_tokens": example.loss_inputs["target_tokens"], **inputs, "sampled": inputs["sampled"] - 5}
    return replace(example, loss="custom", loss_inputs=inputs, custom=importance_sampling())


def run(
    backend: JaxBackend, *examples: PassExample, backward: bool = True
) -> tuple[list[Any], dict[ModelId, list[np.ndarray]]]:
    """Run a pass. Returns its results and the gradients of its models, which are cleared."""
    batch, gradients = PreparedModelPassBatch(examples=examples), dict[ModelId, list[np.ndarray]]()
    if not backward:
        return backend.forward(batch), gradients
    results = backend.forward_backward(batch)
    for model in {example.model_id for example in examples}:
        gradients[model] = [np.asarray(leaf) for leaf in jax.tree.leaves(backend._pool.get(model).gradient)]
        backend.clear_gradient(model)
    return results, gradients


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * max(np.abs(expected).max(), 1e-30))


def compare(backend: JaxBackend, make: Any, *, shares: bool = True) -> None:
    """Compare passes of both models."""
    before = backend.meters().shared_tokens
    assert before is not None
    expected, expected_gradients = run(backend, *make(PLAIN))
    assert backend.meters().shared_tokens == before
    found, gradients = run(backend, *make(SHARED))
    assert (backend.meters().shared_tokens > before) == shares

    # The results
    assert np.abs(np.concatenate([leaf.ravel() for leaf in expected_gradients[PLAIN]])).max() > 0
    num_shared = 0.0
    for own, plain in zip(found, expected, strict=True):
        assert own.logprobs.shape == plain.logprobs.shape
        assert_close(own.logprobs, plain.logprobs)
        assert own.sums == pytest.approx(plain.sums, rel=TOLERANCE)
        num_shared += own.metrics[SHARED_TOKENS]
        assert SHARED_TOKENS not in plain.metrics
        assert own.metrics == pytest.approx({**plain.metrics, SHARED_TOKENS: own.metrics[SHARED_TOKENS]}, rel=TOLERANCE)
        assert own.means.keys() == plain.means.keys()
        for name, mean in plain.means.items():
            assert own.means[name].count == mean.count
            assert own.means[name].total == pytest.approx(mean.total, rel=TOLERANCE, abs=1e-4)
    assert num_shared == backend.meters().shared_tokens - before

    # The gradients
    for own, plain in zip(gradients[SHARED], expected_gradients[PLAIN], strict=True):
        assert_close(own, plain)


@pytest.mark.parametrize("loss", ["importance_sampling", "cross_entropy", "gspo"])
def test_samples_of_prompts(backend: JaxBackend, loss: str) -> None:
    """A group of two rows, a smaller group, an example that extends another one, and a single example."""

    def make(model: ModelId) -> list[PassExample]:
        groups = [(80, (20, 30, 9, 40, 25, 31, 22, 12)), (50, (30, 30)), (60, (1, 40)), (1, (30,))]
        made = [x for seed, group in enumerate(groups) for x in make_group(model, loss, *group, seed=seed)]
        return [replace(example, request_id=RequestId(model)) for example in made]

    compare(backend, make)


@pytest.mark.slow
@pytest.mark.parametrize("loss", sorted(LOSS_SPECS.keys() - {"importance_sampling", "cross_entropy", "gspo"}))
def test_samples_of_prompts_with_other_losses(backend: JaxBackend, loss: str) -> None:
    compare(backend, lambda model: list(make_group(model, loss, 80, (20, 30, 9, 40, 25))))


def test_equal_weights_of_a_prompt(backend: JaxBackend) -> None:
    """The loss of a shared prompt counts once for each example."""

    def make(model: ModelId) -> Iterator[PassExample]:
        for example in make_group(model, "cross_entropy", 80, (20, 30, 9)):
            weights = np.full(example.tokens.size, 0.3, np.float32)
            yield replace(example, loss_inputs={**example.loss_inputs, "weights": weights})

    compare(backend, lambda model: list(make(model)))


def test_other_weights_of_a_prompt_are_not_shared(backend: JaxBackend) -> None:
    def make(model: ModelId) -> Iterator[PassExample]:
        for index, example in enumerate(make_group(model, "cross_entropy", 80, (20, 30, 9))):
            weights = np.full(example.tokens.size, 0.3 + index, np.float32)
            yield replace(example, loss_inputs={**example.loss_inputs, "weights": weights})

    compare(backend, lambda model: list(make(model)), shares=False)


def test_multiple_targets_of_a_position(backend: JaxBackend) -> None:
    compare(backend, lambda model: list(make_group(model, "cross_entropy", 80, (20, 30, 9), num_targets=3)))


def test_sparse_targets(backend: JaxBackend) -> None:
    def make(model: ModelId) -> list[PassExample]:
        return [list_few_targets(x) for x in make_group(model, "cross_entropy", 80, (20, 30, 9), num_targets=3)]

    compare(backend, make)


def test_a_custom_loss_may_use_shared_positions(backend: JaxBackend) -> None:
    """Its gradient at a shared position is the sum over the examples."""
    compare(backend, lambda model: [use_custom_loss(x) for x in make_group(model, "cross_entropy", 80, (20, 30, 9))])


def test_forward_shares_too(backend: JaxBackend) -> None:
    examples = list(make_group(SHARED, "cross_entropy", 80, (20, 30, 9)))
    before = backend.meters().shared_tokens
    found, _ = run(backend, *examples, backward=False)
    assert before is not None and backend.meters().shared_tokens == before + 2 * 79
    expected, _ = run(backend, *(replace(example, model_id=PLAIN) for example in examples), backward=False)
    for own, plain in zip(found, expected, strict=True):
        assert_close(own.logprobs, plain.logprobs)


def test_sharing_depends_on_the_request_alone(backend: JaxBackend) -> None:
    """A request that begins like another one shares nothing with it."""
    own = list(make_group(SHARED, "cross_entropy", 80, (20, 30, 9)))
    same_prompt = [replace(example, request_id=RequestId("other"), model_id=PLAIN) for example in own]
    alone, gradients = run(backend, *own)
    for batch in ([*own, *same_prompt], [*same_prompt, *own]):
        results, joint = run(backend, *batch)
        first = batch.index(own[0])
        for one, other in zip(results[first : first + len(own)], alone, strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            assert one.sums == other.sums
        for one, other in zip(joint[SHARED], gradients[SHARED], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "architecture", [WINDOWS, *(pytest.param(name, marks=pytest.mark.slow) for name in (HYBRID, SINKS))]
)
def test_other_families_share(architecture: str) -> None:
    with start_backend(architecture) as backend:
        compare(backend, lambda model: list(make_group(model, "importance_sampling", 80, (20, 30, 9, 70))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [MOE, LATENTS, HYBRID_MOE, BY_HEAD, pytest.param(OUTPUT_NORMS, marks=pytest.mark.exhaustive)]
)
def test_more_families_share(architecture: str) -> None:
    test_other_families_share(architecture)


@pytest.mark.slow
def test_mamba_does_not_share() -> None:
    with start_backend(MAMBA) as backend:
        assert backend._plan.shares_prefixes is False
        assert backend._plan.make_fingerprint(backend._model)["shared_prefixes"] == "off"


def test_a_restored_model_shares_as_its_specification_says(backend: JaxBackend) -> None:
    spec = ModelSpec(lora=LoraSpec(rank=4, seed=1))
    assert backend._pool.get(SHARED).shares_prefixes and not backend._pool.get(PLAIN).shares_prefixes
    backend.optim_step(SHARED, OptimizerParams())
    assert backend._pool.get(SHARED).shares_prefixes
    assert spec.shares_prefixes is not True
