"""Every loss against plain float64 numpy, position by position, and its gradient against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.losses import LOSSES

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
    """Return the loss of one row; `frozen` stands for logp wherever no gradient may pass."""
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
            case "gspo":
                s_t = s * np.exp(logp[t] - frozen[t])
                term = min(s_t * a[t], np.clip(s_t, low, high) * a[t])
            case "stable_reinforce":
                weight = min(np.exp(frozen[t] - q[t]), high)
                term = x["sampled"][t] * (weight * a[t] * logp[t] - config["kl_coeff"] / 2 * (logp[t] - q[t]) ** 2)
        total -= w[t] * term
    return total


def batch(B=3, T=7):
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


def evaluate(name, logp, inputs, config=None, start_BT=None):
    loss = LOSSES[name]
    values = {**loss.spec.config, **(config or {})}
    config_BC = jnp.tile(jnp.array([values[column] for column in loss.columns], jnp.float32), (logp.shape[0], 1))
    given = {key: jnp.asarray(inputs[key], jnp.float32) for key in loss.spec.inputs if key != "target_tokens"}
    return loss.evaluate(logp, given, config_BC, start_BT)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient(name):
    config = CONFIGS[name]
    logp, inputs = batch()
    rows = [{key: value[b] for key, value in inputs.items()} for b in range(len(logp))]
    expected = [reference(name, logp[b], rows[b], config, frozen=logp[b]) for b in range(len(logp))]
    output = evaluate(name, jnp.asarray(logp, jnp.float32), inputs, config)
    np.testing.assert_allclose(output.loss_BT.sum(1), expected, rtol=1e-5, atol=1e-5)

    gradient = jax.grad(lambda logp: evaluate(name, logp, inputs, config).loss_BT.sum())(jnp.asarray(logp, jnp.float32))
    step = 1e-6
    for b, t in np.ndindex(*logp.shape):
        nudge = step * np.eye(logp.shape[1])[t]
        up, down = (reference(name, logp[b] + sign * nudge, rows[b], config, frozen=logp[b]) for sign in (1, -1))
        assert float(gradient[b, t]) == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-4), (b, t)


@pytest.mark.parametrize("name", LOSSES)
def test_sequences_in_a_row_equal_rows_of_their_own(name):
    logp, inputs = batch()
    B, T = logp.shape
    alone = evaluate(name, jnp.asarray(logp, jnp.float32), inputs, CONFIGS[name])
    flat = {key: value.reshape(1, B * T) for key, value in inputs.items()}
    start_BT = jnp.repeat(jnp.arange(B) * T, T)[None]
    together = evaluate(name, jnp.asarray(logp.reshape(1, B * T), jnp.float32), flat, CONFIGS[name], start_BT)
    np.testing.assert_allclose(together.loss_BT.reshape(B, T), alone.loss_BT, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_a_spoiled_sequence_leaves_its_neighbours_their_bits(name):
    logp, inputs = batch()
    B, T = logp.shape
    flat = {key: value.reshape(1, B * T) for key, value in inputs.items()}
    start_BT = jnp.repeat(jnp.arange(B) * T, T)[None]
    clean = evaluate(name, jnp.asarray(logp.reshape(1, B * T), jnp.float32), flat, CONFIGS[name], start_BT)
    for value in inputs.values():
        value[1] = 1.0
    for spoil in (np.nan, np.inf, -np.inf):
        logp[1] = spoil
        spoiled = evaluate(name, jnp.asarray(logp.reshape(1, B * T), jnp.float32), flat, CONFIGS[name], start_BT)
        for row in (0, 2):
            here = slice(row * T, (row + 1) * T)
            np.testing.assert_array_equal(spoiled.loss_BT[:, here], clean.loss_BT[:, here])


def test_sums_over_sequences_hold_no_square_of_the_length():
    loss, T = LOSSES["gspo"], 8192
    numbers = jax.ShapeDtypeStruct((1, T), jnp.float32)
    inputs = {name: numbers for name in loss.spec.inputs if name != "target_tokens"}
    config_BC = jax.ShapeDtypeStruct((1, len(loss.columns)), jnp.float32)
    lowered = jax.jit(loss.evaluate).lower(numbers, inputs, config_BC, jax.ShapeDtypeStruct((1, T), jnp.int32))
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 64 * 4 * T


def test_cross_entropy_takes_several_targets_per_position():
    g = np.random.default_rng(1)
    logp, weights = -g.uniform(0.1, 3.0, (2, 4, 3)), g.standard_normal((2, 4, 3))
    output = evaluate("cross_entropy", jnp.asarray(logp, jnp.float32), {"weights": weights})
    np.testing.assert_allclose(output.loss_BT.sum(1), -(logp * weights).sum((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("extreme", [-1e30, -np.inf])
def test_what_does_not_count_never_spoils_the_rest(name, extreme):
    """A prompt position (A = 0, w = 0, q = 0) may have any log-probability, both as value and in the gradient."""
    logp, inputs = batch(B=1)
    for key, value in inputs.items():
        value[0, 2] = 0.0
        assert key
    clean = evaluate(name, jnp.asarray(logp, jnp.float32), inputs)
    logp[0, 2] = extreme
    spoiled = jnp.asarray(logp, jnp.float32)
    output = evaluate(name, spoiled, inputs)
    np.testing.assert_array_equal(output.loss_BT.sum(1), clean.loss_BT.sum(1))
    for key, mean in output.means.items():
        assert np.isfinite(mean.total_BT).all(), key
    gradient = jax.grad(lambda logp: evaluate(name, logp, inputs).loss_BT.sum())(spoiled)
    assert np.isfinite(gradient).all() and gradient[0, 2] == 0


@pytest.mark.parametrize("zero", ["weights", "advantages"])
@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy"}))
@pytest.mark.parametrize("extreme", [-1e30, -np.inf])
def test_zero_advantage_or_weight_is_finite_at_any_logprob(name, extreme, zero):
    """Also where a penalty, or a sequence's ratio, still sees the position."""
    logp, inputs = batch(B=1)
    for value in inputs.values():
        value[0, 2] = 1.0
    inputs[zero][0, 2], logp[0, 2] = 0.0, extreme
    given = jnp.asarray(logp, jnp.float32)
    output = evaluate(name, given, inputs, CONFIGS[name])
    gradient = jax.grad(lambda logp: evaluate(name, logp, inputs, CONFIGS[name]).loss_BT.sum())(given)
    assert np.isfinite(output.loss_BT).all() and np.isfinite(gradient).all() and gradient[0, 2] == 0
    assert all(np.isfinite(mean.total_BT).all() and mean.count_BT[0, 2] == 0 for mean in output.means.values())
    assert zero == "advantages" or output.loss_BT[0, 2] == 0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("thresholds", [{}, {"clip_low_threshold": 1e10, "clip_high_threshold": 1e20}])
@pytest.mark.parametrize(("advantage", "sampling"), [(-1e13, -200.0), (3e38, 200.0), (-3e38, -200.0)])
def test_what_has_no_weight_is_finite_at_any_advantage(name, thresholds, advantage, sampling):
    """Also where times a ratio, or times what bounds it, it is more than float32 holds."""
    inputs = {key: np.ones((1, 2)) for key in ("sequence_ratio_mask", "sampled")}
    inputs |= {"weights": [[0.0, 1.0]], "advantages": [[advantage, 1.0]], "logprobs": [[sampling, sampling]]}
    config = {key: value for key, value in thresholds.items() if key in LOSSES[name].columns}
    logp = jnp.array([[-1.0, -1.0]])
    output = evaluate(name, logp, inputs, config)
    gradient = jax.grad(lambda logp: evaluate(name, logp, inputs, config).loss_BT.sum())(logp)
    assert np.isfinite(output.loss_BT).all() and output.loss_BT[0, 0] == 0
    assert np.isfinite(gradient).all() and gradient[0, 0] == 0
    assert all(np.isfinite(mean.total_BT).all() and mean.count_BT[0, 0] == 0 for mean in output.means.values())


def test_the_defaults_are_those_that_are_documented():
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
def test_stable_reinforce_without_a_penalty_ignores_sampled_positions_of_no_advantage(extreme):
    logp, inputs = batch(B=1)
    inputs["sampled"][0, 2], inputs["weights"][0, 2], inputs["advantages"][0, 2] = 1.0, 1.0, 0.0
    logp[0, 2] = extreme
    given = jnp.asarray(logp, jnp.float32)
    value, gradient = jax.value_and_grad(lambda logp: evaluate("stable_reinforce", logp, inputs).loss_BT.sum())(given)
    assert np.isfinite(value) and np.isfinite(gradient).all() and gradient[0, 2] == 0


def test_stable_reinforce_truncates_at_two_and_reports_how_often():
    logp = jnp.array([[-1.0, -1.0, -1.0]])
    inputs = {key: np.ones((1, 3)) for key in ("weights", "advantages")}
    inputs |= {"logprobs": np.array([[-1.0, -3.0, -9.0]]), "sampled": np.array([[1.0, 1.0, 0.0]])}
    inputs["advantages"][0, 2] = 0.0
    output = evaluate("stable_reinforce", logp, inputs)
    gradient = jax.grad(lambda logp: evaluate("stable_reinforce", logp, inputs).loss_BT.sum())(logp)
    np.testing.assert_allclose(gradient, [[-1.0, -2.0, 0.0]], rtol=1e-6)
    assert float(output.loss_BT.sum()) == pytest.approx(3.0)
    clipped = output.means["clip_fraction"]
    assert (float(clipped.total_BT.sum()), float(clipped.count_BT.sum())) == (1.0, 2.0)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy", "dro"}))
@pytest.mark.parametrize("target", [-1000.0, 1000.0])
def test_a_huge_ratio_stays_finite(name, target):
    logp = jnp.array([[target, -1.0]])
    inputs = {key: np.array([[1.0, 1.0]]) for key in ("weights", "advantages", "sequence_ratio_mask", "sampled")}
    inputs["logprobs"] = np.array([[0.0, -1.0]])
    value, gradient = jax.value_and_grad(lambda logp: evaluate(name, logp, inputs).loss_BT.sum())(logp)
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("logp", "sampling"),
    [
        ([-1.0, -100.0], [-100.0, 0.0]),  # +99 and -100: their mean is -0.5
        ([-101.0] + [-1.0] * 99, [-1.0] * 100),  # one of a hundred: -1
        ([-1.0] * 3, [-90.0, -1.0, -1.0]),
    ],
)
def test_far_tokens_count_in_full_in_the_ratio_of_their_sequence(logp, sampling):
    T = len(logp)
    row = {key: np.ones(T) for key in ("weights", "sequence_ratio_mask")}
    row |= {"logprobs": np.array(sampling), "advantages": np.linspace(-1.0, 2.0, T)}
    inputs, config = (
        {key: value[None] for key, value in row.items()},
        {"clip_low_threshold": 0.0, "clip_high_threshold": 1e20},
    )
    value, gradient = jax.value_and_grad(lambda logp: evaluate("gspo", logp, inputs, config).loss_BT.sum())(
        jnp.array([logp])
    )
    assert float(value) == pytest.approx(
        reference("gspo", np.array(logp), row, config, frozen=np.array(logp)), rel=1e-4
    )
    ratio = np.exp(np.mean(np.array(logp) - sampling))
    np.testing.assert_allclose(gradient[0], -ratio * row["advantages"], rtol=1e-4)


@pytest.mark.parametrize(("name", "config"), [("dro", {"beta": 0.3}), ("stable_reinforce", {"kl_coeff": 0.3})])
def test_a_penalty_pulls_from_however_far(name, config):
    _, inputs = batch(1, 1)
    inputs |= {"logprobs": [[-1.0]], "advantages": [[0.0]], "weights": [[1.0]], "sampled": [[1.0]]}
    gradient = jax.grad(lambda logp: evaluate(name, logp, inputs, config).loss_BT.sum())(jnp.array([[-101.0]]))
    np.testing.assert_allclose(gradient, [[0.3 * -100.0]], rtol=1e-6)


def test_metrics_add_up_over_counting_positions():
    logp, inputs = batch()
    output = evaluate("ppo", jnp.asarray(logp, jnp.float32), inputs, CONFIGS["ppo"])
    counts = (inputs["advantages"] != 0) & (inputs["weights"] != 0)
    ratio = np.exp(logp - inputs["logprobs"])
    mean = {key: float(value.total_BT.sum() / value.count_BT.sum()) for key, value in output.means.items()}
    assert mean["ratio"] == pytest.approx(ratio[counts].mean(), rel=1e-5)
    assert mean["kl_to_sampler"] == pytest.approx((inputs["logprobs"] - logp)[counts].mean(), rel=1e-4)
    assert mean["clip_fraction"] == pytest.approx(((ratio < 0.7) | (ratio > 1.4))[counts].mean())
    np.testing.assert_array_equal(output.means["ratio"].count_BT.sum(1), counts.sum(1))


@pytest.mark.parametrize("name", LOSSES)
def test_every_policy_gradient_reports_ratio_clipping_and_distance(name):
    logp, inputs = batch()
    means = evaluate(name, jnp.asarray(logp, jnp.float32), inputs).means
    expected = set() if name == "cross_entropy" else {"ratio", "clip_fraction", "kl_to_sampler"}
    assert means.keys() == expected
    if name in ("importance_sampling", "dro"):
        assert not means["clip_fraction"].total_BT.any(), "there is nothing that clips"


def test_the_distance_to_the_sampler_is_told_however_far():
    inputs = {key: np.ones((1, 1)) for key in ("weights", "advantages")} | {"logprobs": [[0.0]]}
    distance = evaluate("ppo", jnp.array([[-100.0]]), inputs).means["kl_to_sampler"]
    assert float(distance.total_BT[0, 0]) == 100.0


def test_gspo_counts_the_sequences_that_it_clips():
    logp = jnp.array([[-1.0, -1.0], [-1.0, -1.0]])
    inputs = {key: np.ones((2, 2)) for key in ("weights", "advantages", "sequence_ratio_mask")}
    inputs["logprobs"] = np.array([[-2.0, 0.0], [-2.0, -1.0]])  # ratios e and 1/e cancel; e and 1 do not
    clipped = evaluate("gspo", logp, inputs).means["clip_fraction"]
    np.testing.assert_array_equal(clipped.total_BT, [[0, 0], [1, 1]])


def test_rows_use_their_own_config_without_compiling_again():
    loss = LOSSES["dro"]
    logp, inputs = batch(B=2)
    given = {key: jnp.asarray(inputs[key], jnp.float32) for key in ("logprobs", "advantages", "weights")}
    evaluated = jax.jit(loss.evaluate)
    mixed = evaluated(jnp.asarray(logp, jnp.float32), given, jnp.array([[0.1], [0.9]]))
    for row, beta in ((0, 0.1), (1, 0.9)):
        alone = evaluate("dro", jnp.asarray(logp, jnp.float32), inputs, {"beta": beta})
        assert float(mixed.loss_BT[row].sum()) == pytest.approx(float(alone.loss_BT[row].sum()), rel=1e-6)
    evaluated(jnp.asarray(logp, jnp.float32), given, jnp.array([[0.3], [0.4]]))
    assert evaluated._cache_size() == 1
