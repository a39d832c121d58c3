"""Every loss equals a float64 numpy reference, and its gradient equals finite differences."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.contract import loss_reference
from skyrl_tx.losses import LOSSES
from skyrl_tx.losses.base import clip, minimum
from tests.support.fast_jit import fast_jit

CONFIGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "stable_reinforce": {"clip_high_threshold": 1.2, "kl_coeff": 0.3},
}


def reference(name, logp, x, config, frozen):
    """Return the loss of one row. `frozen` replaces logp where the gradient is stopped."""
    w, q, a = x["weights"], x["logprobs"], x["advantages"]
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    total = 0.0
    mask = x["sequence_ratio_mask"]
    s = np.exp(sum(mask * (frozen - q)) / sum(mask))

    for t in range(len(logp)):
        r = np.exp(logp[t] - q[t])

        match name:
            case "cross_entropy":
                term = logp[t]
            case "importance_sampling":
                term = r * a[t]
            case "ppo":
                term = min(r * a[t], np.clip(r, low, high) * a[t])
            case "cispo":
                term = np.clip(np.exp(frozen[t] - q[t]), low, high) * logp[t] * a[t]
            case "dro":
                term = logp[t] * a[t] - 0.5 * config["beta"] * (logp[t] - q[t]) ** 2
            # These losses use the ratio of the whole sequence, or add a penalty.
            case "gspo":
                s_t = s * np.exp(logp[t] - frozen[t])
                term = min(s_t * a[t], np.clip(s_t, low, high) * a[t])
            case "stable_reinforce":
                weight = min(np.exp(frozen[t] - q[t]), high)
                term = x["sampled"][t] * (weight * a[t] * logp[t] - config["kl_coeff"] / 2 * (logp[t] - q[t]) ** 2)

        total -= w[t] * term

    return total


ROWS, LENGTH = 3, 7
"""Smaller inputs are padded to this shape, so that each loss is compiled once."""


def batch(B=ROWS, T=LENGTH):
    g = np.random.default_rng(0)
    logp = -g.uniform(0.1, 3.0, (B, T))
    inputs = {
        "weights": g.choice([0.0, 1.0, 0.5, -2.0], (B, T)),
        "logprobs": logp + 0.5 * g.standard_normal((B, T)),
        "advantages": g.choice([0.0, 1.5, -0.7], (B, T)),
        "sequence_ratio_mask": g.choice([0.0, 1.0], (B, T)),
        "sampled": g.choice([0.0, 1.0], (B, T)),
    }
    inputs["sequence_ratio_mask"][:, 0] = 1.0
    return logp, inputs


@partial(fast_jit, static_argnames="name")
def value_and_gradient(name: str, logp, inputs, config_BC, start_BT):
    def total(logp):
        output = LOSSES[name].evaluate(logp, inputs, config_BC, start_BT)
        return output.loss_BT.sum(), output

    (_, output), gradient = jax.value_and_grad(total, has_aux=True)(logp)
    return output, gradient


def evaluate(name, logp, inputs, config=None, start_BT=None) -> tuple[Any, np.ndarray]:
    """Return the output of a loss and the gradient of its sum with respect to `logp`."""
    loss, (B, T) = LOSSES[name], np.shape(logp)[:2]
    values = {**loss.spec.config, **(config or {})}
    rows, length = (ROWS, LENGTH) if start_BT is None and B <= ROWS and T <= LENGTH else (B, T)

    def pad(values) -> np.ndarray:
        array = np.asarray(values, np.float32)
        return np.pad(array, [(0, rows - B), (0, length - T), *[(0, 0)] * (array.ndim - 2)])

    config_BC = np.tile(np.array([values[column] for column in loss.columns], np.float32), (rows, 1))
    given = {key: pad(inputs[key]) for key in loss.spec.inputs if key != "target_tokens"}
    found = value_and_gradient(name, pad(logp), given, config_BC, start_BT)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:B, :T], found)


def in_one_row(logp, inputs):
    """Put three sequences one after another into one row.

    Also returns the start of each position's sequence.
    """
    B, T = logp.shape
    flat = {key: value.reshape(1, B * T) for key, value in inputs.items()}
    return logp.reshape(1, B * T), flat, np.repeat(np.arange(B) * T, T)[None]


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_equal_the_reference(name):
    config = CONFIGS[name]
    logp, inputs = batch()
    rows = [{key: value[b] for key, value in inputs.items()} for b in range(len(logp))]
    expected = [reference(name, logp[b], rows[b], config, frozen=logp[b]) for b in range(len(logp))]
    output, gradient = evaluate(name, logp, inputs, config)
    np.testing.assert_allclose(output.loss_BT.sum(1), expected, rtol=1e-5, atol=1e-5)

    step = 1e-6
    for b, t in np.ndindex(*logp.shape):
        nudge = step * np.eye(logp.shape[1])[t]
        up, down = (reference(name, logp[b] + sign * nudge, rows[b], config, frozen=logp[b]) for sign in (1, -1))
        assert float(gradient[b, t]) == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-4), (b, t)


def check_against_the_contract(name, logp, inputs, config):
    """Compare the value, slope and means of each row with the reference that other backends use."""
    output, gradient = evaluate(name, logp, inputs, config)
    values = {**LOSSES[name].spec.config, **config}

    for b, row in enumerate(np.asarray(logp, np.float32)):
        given = {key: np.float32(inputs[key][b]) for key in LOSSES[name].spec.inputs if key != "target_tokens"}
        expected = loss_reference.evaluate(name, row, given, values)
        np.testing.assert_allclose(output.loss_BT[b], expected.loss, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradient[b], expected.slope, rtol=1e-4, atol=1e-5)
        if not LOSSES[name].spec.is_policy_gradient:
            assert expected.means == {}
            continue
        assert expected.means.keys() == output.totals.keys()
        for key, total_BT in output.totals.items():
            assert expected.means[key].count == output.count_BT[b].sum()
            assert expected.means[key].total == pytest.approx(float(total_BT[b].sum()), rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("name", LOSSES)
def test_value_slope_and_means_equal_the_reference_of_the_contract(name):
    check_against_the_contract(name, *batch(), CONFIGS[name])
    check_against_the_contract(name, *batch(), {})


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extreme", [-1e30, -np.inf, -1000.0, 1000.0])
def test_extreme_logprobs_equal_the_reference_of_the_contract(name, extreme):
    """Covers a counted position, a position without an advantage, and a position without advantage and weight."""
    for keys, is_bounded in (((), False), (("advantages",), True), (("advantages", "weights"), True)):
        if not np.isfinite(extreme) and not is_bounded:
            continue  # the loss itself is infinite
        logp, inputs = batch(B=1)
        for key, value in inputs.items():
            value[0, 2] = 0.0 if key in keys else 1.0
        logp[0, 2] = extreme
        check_against_the_contract(name, logp, inputs, CONFIGS[name])


@pytest.mark.parametrize("name", LOSSES)
def test_packed_sequences_equal_separate_rows(name):
    logp, inputs = batch()
    alone, _ = evaluate(name, logp, inputs, CONFIGS[name])
    row, flat, start_BT = in_one_row(logp, inputs)
    together, _ = evaluate(name, row, flat, CONFIGS[name], start_BT)
    np.testing.assert_allclose(together.loss_BT.reshape(logp.shape), alone.loss_BT, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_non_finite_sequence_changes_no_bit_of_its_neighbours(name):
    logp, inputs = batch()
    row, flat, start_BT = in_one_row(logp, inputs)
    clean, _ = evaluate(name, row, flat, CONFIGS[name], start_BT)
    for value in inputs.values():
        value[1] = 1.0
    for spoil in (np.nan, np.inf, -np.inf):
        logp[1] = spoil
        row, flat, _ = in_one_row(logp, inputs)
        spoiled, _ = evaluate(name, row, flat, CONFIGS[name], start_BT)
        for here in (slice(0, LENGTH), slice(2 * LENGTH, 3 * LENGTH)):
            np.testing.assert_array_equal(spoiled.loss_BT[:, here], clean.loss_BT[:, here])


def test_memory_of_sequence_sums_is_linear_in_the_length():
    loss, T = LOSSES["gspo"], 8192
    numbers = jax.ShapeDtypeStruct((1, T), jnp.float32)
    inputs = {name: numbers for name in loss.spec.inputs if name != "target_tokens"}
    config_BC = jax.ShapeDtypeStruct((1, len(loss.columns)), jnp.float32)
    lowered = jax.jit(loss.evaluate).lower(numbers, inputs, config_BC, jax.ShapeDtypeStruct((1, T), jnp.int32))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 64 * 4 * T


def test_cross_entropy_accepts_several_targets_per_position():
    g = np.random.default_rng(1)
    logp, weights = -g.uniform(0.1, 3.0, (2, 4, 3)), g.standard_normal((2, 4, 3))
    output, _ = evaluate("cross_entropy", logp, {"weights": weights})
    np.testing.assert_allclose(output.loss_BT.sum(1), -(logp * weights).sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extreme", [-1e30, -np.inf])
def test_uncounted_positions_may_have_extreme_logprobs(name, extreme):
    """A prompt position (A = 0, w = 0, q = 0) with any log-probability changes neither value nor gradient."""
    logp, inputs = batch(B=1)
    for key, value in inputs.items():
        value[0, 2] = 0.0
        assert key
    clean, _ = evaluate(name, logp, inputs)
    logp[0, 2] = extreme
    output, gradient = evaluate(name, logp, inputs)
    np.testing.assert_array_equal(output.loss_BT.sum(1), clean.loss_BT.sum(1))
    for key, total_BT in output.totals.items():
        assert np.isfinite(total_BT).all(), key
    assert np.isfinite(gradient).all() and gradient[0, 2] == 0


@pytest.mark.parametrize("zero", ["weights", "advantages"])
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy"}))
@pytest.mark.parametrize("extreme", [-1e30, -np.inf])
def test_zero_advantage_or_weight_is_finite_at_any_logprob(name, extreme, zero):
    """This also holds if a penalty or the sequence ratio includes the position."""
    logp, inputs = batch(B=1)
    for value in inputs.values():
        value[0, 2] = 1.0
    inputs[zero][0, 2], logp[0, 2] = 0.0, extreme
    output, gradient = evaluate(name, logp, inputs, CONFIGS[name])
    assert np.isfinite(output.loss_BT).all() and np.isfinite(gradient).all() and gradient[0, 2] == 0
    assert all(np.isfinite(total_BT).all() for total_BT in output.totals.values()) and output.count_BT[0, 2] == 0
    assert zero == "advantages" or output.loss_BT[0, 2] == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("thresholds", [{}, {"clip_low_threshold": 1e10, "clip_high_threshold": 1e20}])
@pytest.mark.parametrize(("advantage", "sampling"), [(-1e13, -200.0), (3e38, 200.0), (-3e38, -200.0)])
def test_zero_weight_is_finite_at_any_advantage(name, thresholds, advantage, sampling):
    """This also holds if the product with a ratio or its bound overflows float32."""
    inputs = {key: np.ones((1, 2)) for key in ("sequence_ratio_mask", "sampled")}
    inputs |= {"weights": [[0.0, 1.0]], "advantages": [[advantage, 1.0]], "logprobs": [[sampling, sampling]]}
    config = {key: value for key, value in thresholds.items() if key in LOSSES[name].columns}
    output, gradient = evaluate(name, [[-1.0, -1.0]], inputs, config)
    assert np.isfinite(output.loss_BT).all() and output.loss_BT[0, 0] == 0
    assert np.isfinite(gradient).all() and gradient[0, 0] == 0
    assert all(np.isfinite(total_BT).all() for total_BT in output.totals.values()) and output.count_BT[0, 0] == 0


def test_defaults_are_those_documented():
    assert {name: dict(loss.spec.config) for name, loss in LOSSES.items()} == {
        "cross_entropy": {},
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
        "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "stable_reinforce": {"clip_high_threshold": 2.0, "kl_coeff": 0.0},
    }


@pytest.mark.parametrize("extreme", [-1e30, -np.inf])
def test_stable_reinforce_without_penalty_ignores_positions_with_zero_advantage(extreme):
    logp, inputs = batch(B=1)
    inputs["sampled"][0, 2], inputs["weights"][0, 2], inputs["advantages"][0, 2] = 1.0, 1.0, 0.0
    logp[0, 2] = extreme
    output, gradient = evaluate("stable_reinforce", logp, inputs)
    assert np.isfinite(output.loss_BT).all() and np.isfinite(gradient).all() and gradient[0, 2] == 0


def test_stable_reinforce_truncates_at_two_and_reports_the_fraction():
    inputs = {key: np.ones((1, 3)) for key in ("weights", "advantages")}
    inputs |= {"logprobs": np.array([[-1.0, -3.0, -9.0]]), "sampled": np.array([[1.0, 1.0, 0.0]])}
    inputs["advantages"][0, 2] = 0.0
    output, gradient = evaluate("stable_reinforce", [[-1.0, -1.0, -1.0]], inputs)
    np.testing.assert_allclose(gradient, [[-1.0, -2.0, 0.0]], rtol=1e-6)
    assert float(output.loss_BT.sum()) == pytest.approx(3.0)
    assert (float(output.totals["clip_fraction"].sum()), float(output.count_BT.sum())) == (1.0, 2.0)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy", "dro"}))
@pytest.mark.parametrize("target", [-1000.0, 1000.0])
def test_huge_ratios_stay_finite(name, target):
    inputs = {key: np.array([[1.0, 1.0]]) for key in ("weights", "advantages", "sequence_ratio_mask", "sampled")}
    inputs["logprobs"] = np.array([[0.0, -1.0]])
    output, gradient = evaluate(name, [[target, -1.0]], inputs)
    assert np.isfinite(output.loss_BT).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("logp", "sampling"),
    [
        ([-1.0, -100.0], [-100.0, 0.0]),  # +99 and -100: the mean is -0.5
        ([-101.0] + [-1.0] * 99, [-1.0] * 100),  # -100 at one of a hundred tokens: the mean is -1
        ([-1.0] * 3, [-90.0, -1.0, -1.0]),
    ],
)
def test_sequence_ratio_includes_distant_tokens_without_a_bound(logp, sampling):
    T = len(logp)
    row = {key: np.ones(T) for key in ("weights", "sequence_ratio_mask")}
    row |= {"logprobs": np.array(sampling), "advantages": np.linspace(-1.0, 2.0, T)}
    inputs, config = (
        {key: value[None] for key, value in row.items()},
        {"clip_low_threshold": 0.0, "clip_high_threshold": 1e20},
    )

    output, gradient = evaluate("gspo", [logp], inputs, config)
    assert float(output.loss_BT.sum()) == pytest.approx(
        reference("gspo", np.array(logp), row, config, frozen=np.array(logp)), rel=1e-4
    )
    ratio = np.exp(np.mean(np.array(logp) - sampling))
    np.testing.assert_allclose(gradient[0], -ratio * row["advantages"], rtol=1e-4)


@pytest.mark.parametrize(("name", "config"), [("dro", {"beta": 0.3}), ("stable_reinforce", {"kl_coeff": 0.3})])
def test_penalty_gradient_is_not_bounded(name, config):
    _, inputs = batch(1, 1)
    inputs |= {"logprobs": [[-1.0]], "advantages": [[0.0]], "weights": [[1.0]], "sampled": [[1.0]]}
    _, gradient = evaluate(name, [[-101.0]], inputs, config)
    np.testing.assert_allclose(gradient, [[0.3 * -100.0]], rtol=1e-6)


def test_metrics_are_sums_over_counted_positions():
    logp, inputs = batch()
    output, _ = evaluate("ppo", logp, inputs, CONFIGS["ppo"])
    counts = (inputs["advantages"] != 0) & (inputs["weights"] != 0)
    ratio = np.exp(logp - inputs["logprobs"])
    mean = {key: float(total_BT.sum() / output.count_BT.sum()) for key, total_BT in output.totals.items()}
    assert mean["ratio"] == pytest.approx(ratio[counts].mean(), rel=1e-5)
    assert mean["kl_to_sampler"] == pytest.approx((inputs["logprobs"] - logp)[counts].mean(), rel=1e-4)
    assert mean["clip_fraction"] == pytest.approx(((ratio < 0.7) | (ratio > 1.4))[counts].mean())
    np.testing.assert_array_equal(output.count_BT.sum(1), counts.sum(1))


@pytest.mark.parametrize("name", LOSSES)
def test_policy_gradients_report_ratio_clip_fraction_and_kl(name):
    logp, inputs = batch()
    output, _ = evaluate(name, logp, inputs)
    assert output.totals.keys() == {"ratio", "clip_fraction", "kl_to_sampler"}
    assert output.count_BT.any() == output.totals["ratio"].any() == (name != "cross_entropy")
    if name in ("importance_sampling", "dro"):
        assert not output.totals["clip_fraction"].any(), "nothing is clipped"


def test_kl_to_sampler_is_not_bounded():
    inputs = {key: np.ones((1, 1)) for key in ("weights", "advantages")} | {"logprobs": [[0.0]]}
    distance = evaluate("ppo", [[-100.0]], inputs)[0].totals["kl_to_sampler"]
    assert float(distance[0, 0]) == 100.0


def test_gspo_reports_the_fraction_of_clipped_sequences():
    inputs = {key: np.ones((2, 2)) for key in ("weights", "advantages", "sequence_ratio_mask")}
    inputs["logprobs"] = np.array([[-2.0, 0.0], [-2.0, -1.0]])  # ratios e and 1/e cancel; e and 1 do not
    clipped = evaluate("gspo", [[-1.0, -1.0], [-1.0, -1.0]], inputs)[0].totals["clip_fraction"]
    np.testing.assert_array_equal(clipped, [[0, 0], [1, 1]])


def test_config_per_row_does_not_recompile():
    loss = LOSSES["dro"]
    logp, inputs = batch(B=2)
    given = {key: inputs[key].astype(np.float32) for key in ("logprobs", "advantages", "weights")}
    evaluated = jax.jit(loss.evaluate)
    mixed = evaluated(logp.astype(np.float32), given, np.array([[0.1], [0.9]], np.float32))
    for row, beta in ((0, 0.1), (1, 0.9)):
        alone, _ = evaluate("dro", logp, inputs, {"beta": beta})
        assert float(np.asarray(mixed.loss_BT)[row].sum()) == pytest.approx(float(alone.loss_BT[row].sum()), rel=1e-6)
    evaluated(logp.astype(np.float32), given, np.array([[0.3], [0.4]], np.float32))
    assert evaluated._cache_size() == 1


def test_bounds_keep_nan_and_pass_the_gradient_once() -> None:
    """At a bound, the gradient equals the gradient inside.

    For equal operands it is passed once in total, as in torch.
    """
    x, nan = jnp.array([-2.0, -1.0, 0.5, 1.0, 2.0]), jnp.float32(jnp.nan)
    np.testing.assert_array_equal(clip(x, -1.0, 1.0), [-1.0, -1.0, 0.5, 1.0, 1.0])
    np.testing.assert_array_equal(jax.grad(lambda x: clip(x, -1.0, 1.0).sum())(x), [0.0, 1.0, 1.0, 1.0, 0.0])
    np.testing.assert_array_equal(jax.grad(lambda x: minimum(x, x * 1.0).sum())(x), jnp.ones(5))
    np.testing.assert_array_equal(minimum(x, x[::-1]), [-2.0, -1.0, 0.5, -1.0, -2.0])
    assert all(jnp.isnan(value) for value in (clip(nan, -1.0, 1.0), minimum(nan, x[0]), minimum(x[0], nan)))
