"""Tests of a backend's losses and optimizer against the contract. A part of `BackendSuite`."""

from dataclasses import replace

import numpy as np
import pytest

from skyrl_tx.contract import loss_reference
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.contract.results import REDUCTIONS, PassResult
from skyrl_tx.testing.backend_driver import BackendDriver, Floats, nearly_equal, read_only

CONFIG = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.3, "kl_coeff": 0.3}
"""Config values for `_make_near_policy` that give every term of every loss an effect."""


class LossChecks:
    """Tests of losses, their gradients and means, and of AdamW."""

    tolerance = 1e-5
    """Maximum difference between the trainer's and the sampler's log-probabilities.

    Sums may differ by more.
    """
    pass_tolerance = 0.0
    """Maximum difference between the log-probabilities of `forward` and `forward_backward`.

    0 means that their bits are equal. They may differ if the compiler chooses matrix
    multiplications by measured time, as XLA does for GPUs.
    """

    def test_logprobs_of_every_loss_have_the_shape_of_its_targets(self, driver: BackendDriver) -> None:
        """Both passes agree, results have the targets' shape, and all numbers are finite."""
        model_id = driver.model(steps=1)
        for loss in driver.capabilities.losses:
            batch = driver.batch(driver.request(model_id, (6, 11), loss=loss))
            before, after = driver.forward(batch), driver.forward_backward(batch)
            for left, right in zip(before, after, strict=True):
                assert nearly_equal(left, right, self.pass_tolerance), loss
            for example, result in zip(batch.examples, after, strict=True):
                assert result.logprobs.dtype == np.float32
                assert result.logprobs.shape == example.loss_inputs["target_tokens"].shape
                assert np.isfinite(result.logprobs).all() and np.isfinite(result.sums["loss"])
                assert not any(":" in name for name in (*result.sums, *result.means)), "the engine adds the colon"

            metrics = driver.optim_step(model_id, OptimizerParams(learning_rate=0.0))
            assert metrics["unclipped_grad_l2:mean"] > 0, loss
            for name in metrics:
                _, colon, reduction = name.partition(":")
                assert colon and reduction in REDUCTIONS, f"{name}: a metric ends in a colon and {sorted(REDUCTIONS)}"

    def test_cross_entropy_is_a_plain_weighted_sum(self, driver: BackendDriver) -> None:
        """The loss is the negative sum of weights times log-probabilities, without a mean."""
        batch = driver.batch(driver.request(driver.model(steps=1), (6, 11)))
        for example, result in zip(batch.examples, driver.forward(batch), strict=True):
            expected = -float((example.loss_inputs["weights"] * result.logprobs).sum())
            assert result.sums["loss"] == pytest.approx(expected, rel=1e-5)

    def test_value_gradient_and_means_of_every_loss_equal_the_reference(self, driver: BackendDriver) -> None:
        """Values, gradients and means equal `loss_reference`.

        The gradient of a loss equals the gradient of cross_entropy with minus the slope as weights.
        This holds for any model, so the test needs no derivatives of the model.
        """
        model_id, backend = driver.model(steps=1), driver.backend
        base = driver.request(model_id, (6, 11), seed=3)
        policy = [result.logprobs.astype(np.float64) for result in driver.forward(driver.batch(base))]
        for name in driver.capabilities.losses.keys() & LOSS_SPECS.keys():
            # Run the loss.
            examples = [
                _make_near_policy(example, base[number], policy[number], number)
                for number, example in enumerate(driver.request(model_id, (6, 11), loss=name))
            ]
            results = driver.forward_backward(driver.batch(examples))
            actual = driver.arrays_of(model_id, StatePart.GRADIENT)
            backend.clear_gradient(model_id)

            # Compare values and means with the reference.
            slopes: list[Floats] = []
            for example, result in zip(examples, results, strict=True):
                expected = loss_reference.evaluate(name, result.logprobs, example.loss_inputs, example.loss_config)
                self._check_sums(name, result, expected)
                slopes.append(expected.slope)

            # Compute the expected gradient with cross_entropy.
            linear = [
                replace(
                    example, loss_inputs=dict(example.loss_inputs) | {"weights": read_only((-slope).astype(np.float32))}
                )
                for example, slope in zip(base, slopes, strict=True)
            ]
            driver.forward_backward(driver.batch(linear))
            expected_gradient = driver.arrays_of(model_id, StatePart.GRADIENT)
            backend.clear_gradient(model_id)

            # Compare the gradients.
            assert actual.keys() == expected_gradient.keys(), name
            largest = max(float(np.abs(array).max()) for array in expected_gradient.values())
            assert largest > 0, name
            for tensor, array in actual.items():
                np.testing.assert_allclose(array, expected_gradient[tensor], rtol=0, atol=20 * self.tolerance * largest)

    def _check_sums(self, name: str, result: PassResult, expected: loss_reference.LossValue) -> None:
        near = 20 * self.tolerance * max(1.0, float(np.abs(expected.loss).sum()))
        assert result.sums["loss"] == pytest.approx(float(expected.loss.sum()), abs=near), name
        assert result.means.keys() == expected.means.keys(), f"{name}: see `PassResult` for its means"
        for key, term in expected.means.items():
            assert result.means[key].count == term.count, (name, key)
            assert result.means[key].total == pytest.approx(term.total, rel=1e-4, abs=100 * self.tolerance), (name, key)

    def test_cross_entropy_takes_several_targets_of_a_position(self, driver: BackendDriver) -> None:
        """Each target has its own weight, and the probabilities of a position sum to one."""
        model_id, tokens = driver.model(steps=1), np.array([3, 1, 2, 3, 9], np.int32)
        logprobs = driver.distributions(model_id, tokens)
        np.testing.assert_allclose(np.exp(logprobs).sum(axis=1), 1.0, atol=20 * self.tolerance)
        [example] = driver.request(model_id, (5,))
        targets = np.array([[0, 1], [2, 2], [5, 0], [1, 3], [4, 7]], np.int32)
        weights = np.array([[1, 0], [0.5, 0.5], [-1, 2], [0, 0], [1, 1]], np.float32)
        inputs = {"target_tokens": read_only(targets), "weights": read_only(weights)}
        example = replace(example, tokens=read_only(tokens), loss_inputs=inputs)
        [result] = driver.forward_backward(driver.batch([example]))

        own = np.take_along_axis(logprobs, targets, axis=1)
        np.testing.assert_allclose(result.logprobs, own, rtol=0, atol=20 * self.tolerance)
        assert result.sums["loss"] == pytest.approx(-float((weights * own).sum()), abs=200 * self.tolerance)

    def test_an_optimizer_step_is_that_of_torch_adamw(self, driver: BackendDriver) -> None:
        """Two steps with moments, decay and clipping, and one below the clipping limit."""
        model_id = driver.model()
        first: dict[str, Floats] = {}
        second: dict[str, Floats] = {}
        for step, norm in ((1, 0.01), (2, 0.01), (3, 1e6)):
            params = OptimizerParams(
                learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=norm
            )

            # Take the optimizer step.
            driver.forward_backward(driver.batch(driver.request(model_id, seed=step)))
            before = driver.arrays_of(model_id, StatePart.WEIGHTS)
            gradient = driver.arrays_of(model_id, StatePart.GRADIENT)
            assert gradient.keys() == before.keys(), "a gradient has the names of the weights"
            metrics = driver.optim_step(model_id, params)
            after = driver.arrays_of(model_id, StatePart.WEIGHTS)

            # Compare its metrics and the new weights.
            size = float(np.sqrt(sum((array**2).sum() for array in gradient.values())))
            assert metrics["unclipped_grad_l2:mean"] == pytest.approx(size, rel=20 * self.tolerance)
            assert metrics["step:max"] == step
            clip = min(1.0, norm / (size + 1e-6))
            for name, weight in before.items():
                clipped = gradient[name] * clip
                first[name] = 0.8 * first.get(name, np.zeros(())) + (1 - 0.8) * clipped
                second[name] = 0.9 * second.get(name, np.zeros(())) + (1 - 0.9) * clipped**2
                scale = np.sqrt(second[name] / (1 - 0.9**step)) + 1e-6
                expected = weight * (1 - 0.01 * 0.1) - 0.01 * (first[name] / (1 - 0.8**step)) / scale
                np.testing.assert_allclose(after[name], expected, rtol=0, atol=20 * self.tolerance)


def _make_near_policy(example: PassExample, base: PassExample, policy: Floats, seed: int) -> PassExample:
    """Return the tokens of `base` with sampling log-probabilities near the model's.

    Ratios lie inside and outside the clip thresholds.
    """
    draw, shape = np.random.default_rng(seed), policy.shape
    values = {
        "target_tokens": base.loss_inputs["target_tokens"],
        "logprobs": policy + 0.5 * draw.standard_normal(shape),
        "advantages": draw.choice([0.0, 1.5, -0.7], shape),
        "weights": draw.choice([0.0, 1.0, 0.5], shape),
        "sequence_ratio_mask": draw.choice([0.0, 1.0], shape),
        "sampled": draw.choice([0.0, 1.0], shape),
    }
    for name in values.keys() - {"target_tokens", "logprobs"}:
        values[name][0] = 1.0
    given = {name: read_only(values[name].astype(array.dtype)) for name, array in example.loss_inputs.items()}
    config = dict(example.loss_config) | {key: CONFIG[key] for key in example.loss_config.keys() & CONFIG.keys()}
    return replace(example, tokens=base.tokens, loss_inputs=given, loss_config=config)
