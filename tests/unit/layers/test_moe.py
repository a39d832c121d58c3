"""Experts: each token gets the outputs of its experts and its adapter, and nothing else."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.experts import (
    BIAS_AXES,
    Clamp,
    ExpertAdapters,
    ExpertWeights,
    Routing,
    get_pooled_expert_adapters,
    route,
    sort_into_tiles,
    sum_by_index,
)
from skyrl_tx.layers.lora import Adapter, LoraPair, RowSlots
from skyrl_tx.layers.moe import apply_mixture
from tests.support.fast_jit import fast_jit

D, F, E, RANK, LAYERS = 8, 12, 6, 3, 2
ROUTING = Routing(num_experts=E, num_chosen=2, renormalizes=True)
SIZES = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return ExpertWeights(*(normal(i, E, *size) for i, size in enumerate(SIZES.values())))


@pytest.fixture(scope="module")
def biased(weights: ExpertWeights) -> ExpertWeights:
    """Return experts like those in gpt-oss, with a clamp that acts on many tokens."""
    sizes = {name: size[1] for name, size in zip(BIAS_AXES, SIZES.values(), strict=True)}
    biases = {name: normal(30 + i, E, size) for i, (name, size) in enumerate(sizes.items())}
    return weights.replace(**biases, clamp=Clamp(limit=1.5, slope=1.702))


@pytest.fixture(scope="module")
def router() -> np.ndarray:
    return normal(9, E, D)


BOTH_FORMS = pytest.mark.parametrize("shares", [False, True], ids=["own", "shared"])
"""Whether all experts share the factors next to the hidden size."""


def one_adapter(seed: int, num_experts: int = E, rank: int = RANK, *, shares: bool = False) -> ExpertAdapters:
    def num(size: int) -> int:
        return 1 if shares and size == D else num_experts

    pairs = {
        name: LoraPair(a=normal(seed + i, num(n), n, rank), b=normal(seed - i, num(m), rank, m))
        for i, (name, (n, m)) in enumerate(SIZES.items())
    }
    return ExpertAdapters(pairs=pairs, scale=np.float32(0.5))


def expand_factors(adapters: ExpertAdapters) -> ExpertAdapters:
    """Return the same adapters with separate factors for each expert."""
    pairs = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (E, *leaf.shape[1:])), dict(adapters.pairs))
    return adapters.replace(pairs=pairs)


def make_pool(adapters: list[ExpertAdapters], layer: int) -> Adapter:
    """Return a pool with these adapters in one layer, and different values in the other layer."""

    def place(leaf: np.ndarray) -> np.ndarray:
        return np.stack([leaf if index == layer else leaf + 1 for index in range(LAYERS)])

    trees = [{f"expert_{name}": jax.tree.map(place, pair) for name, pair in a.pairs.items()} for a in adapters]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    return Adapter(weights=stacked, scale=np.stack([a.scale for a in adapters]))


apply = fast_jit(lambda *args, **options: apply_mixture(*args, **options)[0], static_argnames="routing")
choose = fast_jit(route, static_argnames="routing")


@fast_jit
def apply_pool(
    x: jax.Array, router: jax.Array, weights: ExpertWeights, pool: Adapter, slots: RowSlots, layer: jax.Array
) -> jax.Array:
    return apply_mixture(x, router, weights, get_pooled_expert_adapters(pool, "expert_", slots, layer), ROUTING)[0]


@fast_jit
def value_and_gradient(
    x: jax.Array,
    router: jax.Array,
    weights: ExpertWeights,
    adapters: ExpertAdapters,
    slope: jax.Array,
    router_bias: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, dict[str, LoraPair]]]:
    """Return the mixture and its gradient by tokens and by the adapters' factors."""

    def compute(x: jax.Array, pairs: dict[str, LoraPair]) -> jax.Array:
        return apply_mixture(x, router, weights, adapters.replace(pairs=pairs), ROUTING, router_bias_E=router_bias)[0]

    y, pull = jax.vjp(compute, x, dict(adapters.pairs))
    return y, pull(slope)


def route_by_definition(
    x_MD: np.ndarray, router_ED: np.ndarray, routing: Routing, bias_E: np.ndarray | float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the result of `route` in float64."""
    logits = x_MD.astype(np.float64) @ router_ED.T + bias_E
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    share_ME = weight / weight.sum(-1, keepdims=True)
    expert_MK = np.argsort(-share_ME, axis=-1, kind="stable")[:, : routing.num_chosen]
    share_MK = np.take_along_axis(share_ME, expert_MK, -1)
    return share_MK / share_MK.sum(-1, keepdims=True) if routing.renormalizes else share_MK, expert_MK


def compute_by_loop(
    x_MD, router_ED, weights, adapters: ExpertAdapters | None, routing: Routing = ROUTING, router_bias=0.0
) -> np.ndarray:
    """Compute the result of `apply_mixture` token by token, in float64."""
    share_MK, expert_MK = route_by_definition(x_MD, router_ED, routing, router_bias)
    out = np.zeros(x_MD.shape)
    for m, x in enumerate(x_MD.astype(np.float64)):
        for share, e in zip(share_MK[m], expert_MK[m], strict=True):

            def apply_map(name, y, e=e):
                z = y @ np.asarray(getattr(weights, name)[e], np.float64)
                bias = getattr(weights, name.replace("proj", "bias"))
                z = z if bias is None else z + bias[e]
                if adapters is None:
                    return z
                pair = adapters.pairs[name]
                a, b = (np.asarray(leaf)[e if len(leaf) > 1 else 0] for leaf in (pair.a, pair.b))
                return z + float(adapters.scale) * (y @ a) @ b

            out[m] += share * apply_map(
                "down_proj", activate(weights.clamp, apply_map("gate_proj", x), apply_map("up_proj", x))
            )
    return out


def activate(clamp: Clamp | None, gate, up):
    """Return the activation of an expert, as an array of the arguments' library (numpy or JAX)."""
    if clamp is None:
        return gate / (1 + np.exp(-gate)) * up
    gate, up = gate.clip(max=clamp.limit), up.clip(-clamp.limit, clamp.limit)
    return (up + 1) * gate / (1 + np.exp(-clamp.slope * gate))


@pytest.mark.parametrize(
    ("num_tokens", "form"),
    [(1, None), (1, "own"), (300, None), (300, "own"), (40, "own"), (1, "shared"), (300, "shared"), (40, "shared")],
)
def test_each_token_goes_to_its_own_experts(weights, router, num_tokens, form):
    x = normal(3, num_tokens, D)
    adapters = None if form is None else one_adapter(20, shares=form == "shared")
    if adapters is not None and num_tokens > 1:  # reuses the program of other tests
        y, _ = value_and_gradient(x, router, weights, adapters, np.ones_like(x))
    else:
        y = apply(x, router, weights, adapters, routing=ROUTING)
    np.testing.assert_allclose(y, compute_by_loop(x, router, weights, adapters), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_experts", "num_chosen", "rank"), [(1, 1, 1), (1, 1, 2 * D), (E, E, 2 * D), (E, 1, 1)])
def test_one_expert_and_all_experts(weights, router, num_experts, num_chosen, rank):
    """Covers one expert, all experts, and one of all, with rank 1 and a rank above all sizes."""
    routing = Routing(num_experts=num_experts, num_chosen=num_chosen, renormalizes=True)
    weights, router = jax.tree.map(lambda leaf: leaf[:num_experts], (weights, router))
    x, adapters = normal(3, 33, D), one_adapter(20, num_experts, rank)
    y = apply(x, router, weights, adapters, routing=routing)
    np.testing.assert_allclose(y, compute_by_loop(x, router, weights, adapters, routing), rtol=1e-4, atol=1e-3)


def test_a_router_with_equal_logits_chooses_the_first_experts_once_each(weights, router):
    share, expert = choose(normal(3, 9, D), np.zeros_like(router), routing=ROUTING)
    np.testing.assert_array_equal(expert, [[0, 1]] * 9)
    np.testing.assert_array_equal(share, np.full((9, 2), 0.5))


def test_one_expert_for_all_tokens_drops_none_and_leaves_others_without_gradient(weights):
    """There is no capacity limit: an expert with hundreds of tokens drops none.

    Adapters of experts without tokens have gradients of exactly zero.
    """
    x = np.abs(normal(3, 300, D))
    router = np.zeros((E, D), np.float32)
    router[4], router[1] = 9.0, 8.0
    adapters = one_adapter(20)
    y, (_, gradient) = value_and_gradient(x, router, weights, adapters, np.ones_like(x))
    np.testing.assert_allclose(y, compute_by_loop(x, router, weights, adapters), rtol=1e-4, atol=1e-3)
    for leaf in map(np.asarray, jax.tree.leaves(gradient)):
        is_visited = [bool(np.any(leaf[e])) for e in range(E)]
        assert is_visited == [e in (1, 4) for e in range(E)]


def test_a_token_of_zero_gradient_adds_nothing(weights, router):
    """Padding and tokens of weight zero also go through experts. Their values do not matter."""
    adapters, x, other = one_adapter(20), normal(5, 40, D), normal(7, 40, D)
    counts = np.arange(40)[:, None] % 3 != 0

    mine, theirs = (
        value_and_gradient(tokens, router, weights, adapters, np.broadcast_to(counts, x.shape).astype(np.float32))[1][1]
        for tokens in (x, np.where(counts, x, other))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), mine, theirs)


@BOTH_FORMS
def test_half_precision_weights_leave_results_and_gradients_in_float32(weights, router, shares):
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    x, adapters = normal(5, 40, D), one_adapter(20, shares=shares)
    y, (_, gradient) = value_and_gradient(x, router, rounded, adapters, np.ones_like(x))
    exact, (_, exact_gradient) = value_and_gradient(x, router, weights, adapters, np.ones_like(x))
    assert y.dtype == jnp.float32
    for found, expected in zip(jax.tree.leaves((y, gradient)), jax.tree.leaves((exact, exact_gradient)), strict=True):
        assert found.dtype == jnp.float32
        found, expected = np.asarray(found), np.asarray(expected)
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_the_shares_are_renormalized_where_the_model_says_so(router):
    x = normal(3, 9, D)
    plain = Routing(num_experts=E, num_chosen=2, renormalizes=False)
    share, expert = map(np.asarray, choose(x, router, routing=plain))
    np.testing.assert_allclose(share, route_by_definition(x, router, plain)[0], rtol=1e-5)
    again, same = choose(x, router, routing=ROUTING)
    np.testing.assert_array_equal(expert, same)
    np.testing.assert_allclose(again, share / share.sum(axis=-1, keepdims=True), rtol=1e-6)


GROUPED = Routing(
    num_experts=12,
    num_chosen=3,
    renormalizes=True,
    scores="sigmoid",
    num_groups=4,
    num_chosen_groups=2,
    factor=2.5,
)


@pytest.mark.parametrize(
    "routing",
    [GROUPED, replace(GROUPED, renormalizes=False), replace(GROUPED, num_groups=1, num_chosen_groups=1)],
)
def test_a_correction_changes_the_choice_in_the_best_groups_and_no_share(routing):
    """As in DeepSeek-V3, the score of a group is the sum of its two best experts.

    Only the best groups take part.
    """
    x, own, correction = normal(3, 40, D), normal(4, 12, D), normal(5, 12)
    share, expert = map(np.asarray, choose(x, own, routing=routing, correction_E=correction))
    for m in range(len(x)):
        scores = 1 / (1 + np.exp(-own.astype(np.float64) @ x[m]))
        by_group = (scores + correction).reshape(routing.num_groups, -1)
        best = np.argsort(-np.sort(by_group)[:, -2:].sum(-1))[: routing.num_chosen_groups]
        allowed = [e for e in range(12) if e // by_group.shape[1] in best]
        chosen = sorted(allowed, key=lambda e: -(scores + correction)[e])[:3]
        shares = scores[chosen] / (scores[chosen].sum() if routing.renormalizes else 1)
        np.testing.assert_array_equal(expert[m], chosen)
        np.testing.assert_allclose(share[m], 2.5 * shares, rtol=1e-5)
    plain = np.asarray(choose(x, own, routing=routing)[1])
    assert (plain != expert).any(), "the correction acts"


IN_GROUPS = RowSlots(np.array([1, 0]), np.array([0, 0, 1, 1, 0, 0, 0, 0]))
SLOT_FOR_TWO_ROWS = RowSlots(np.array([1, 0, 1, 1]))


@BOTH_FORMS
@pytest.mark.parametrize("slots", [SLOT_FOR_TWO_ROWS, IN_GROUPS], ids=["neighbours", "groups"])
def test_rows_use_the_adapters_of_their_slot_and_layer(weights, router, shares, slots):
    first, second, x = one_adapter(20, shares=shares), one_adapter(50, shares=shares), normal(4, 8, D)
    pool = make_pool([first, second], layer=1)
    y = apply_pool(x, router, weights, pool, slots, np.int32(1))
    for rows, mine in ((slice(0, 2), second), (slice(2, 4), first), (slice(4, 8), second)):
        np.testing.assert_allclose(y[rows], compute_by_loop(x[rows], router, weights, mine), rtol=1e-4, atol=1e-4)


@BOTH_FORMS
def test_router_isolates_rows_from_nan_in_other_adapters(weights, router, shares):
    """The output of a row is bit-equal next to any other rows, even if they fill its experts."""
    first, second = one_adapter(20, shares=shares), one_adapter(50, shares=shares)
    broken = jax.tree.map(lambda leaf: np.full(np.shape(leaf), np.nan, np.float32), second)
    x = normal(4, 8, D)
    slots = RowSlots(np.array([0, 0, 1, 1]))  # one slot for every two rows

    def compute(x: np.ndarray, other: ExpertAdapters) -> np.ndarray:
        return np.asarray(apply_pool(x, router, weights, make_pool([first, other], layer=0), slots, np.int32(0)))

    alone = compute(x, second)[:4]
    same_as_mine = np.concatenate([x[:4], x[:4]])
    for others in (x[4:], np.full_like(x[4:], np.nan), np.full_like(x[4:], np.inf), same_as_mine[4:]):
        together = compute(np.concatenate([x[:4], others]), broken)
        np.testing.assert_array_equal(together[:4], alone)
        assert np.isnan(together[4:]).any()


@BOTH_FORMS
def test_gradients_equal_those_of_a_plain_formula(weights, router, shares):
    x, slope, adapters = normal(5, 40, D), normal(6, 40, D), one_adapter(20, shares=shares)

    def plain(x, pairs):
        share_MK, expert_MK = route(x, router, ROUTING)
        pairs = expand_factors(adapters.replace(pairs=pairs)).pairs

        def apply(name, y_MKI):
            a, b = pairs[name].a[expert_MK], pairs[name].b[expert_MK]
            update = jnp.einsum("mkr,mkro->mko", jnp.einsum("mki,mkir->mkr", y_MKI, a), b)
            return (
                jnp.einsum("mki,mkio->mko", y_MKI, jnp.asarray(getattr(weights, name))[expert_MK])
                + update * adapters.scale
            )

        x_MKD = jnp.broadcast_to(x[:, None], (*share_MK.shape, D))
        y = apply("down_proj", jax.nn.silu(apply("gate_proj", x_MKD)) * apply("up_proj", x_MKD))
        return ((share_MK[..., None] * y).sum(1) * slope).sum()

    expected = fast_jit(jax.grad(plain, argnums=(0, 1)))(x, dict(adapters.pairs))
    found = value_and_gradient(x, router, weights, adapters, slope)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


@BOTH_FORMS
def test_biases_and_the_clamped_gate_act_in_values_and_gradients(biased, router, shares):
    """Gradients are compared with finite differences in float64, along random directions."""
    x, slope, router_bias = normal(5, 12, D), normal(6, 12, D), normal(8, E)
    adapters = one_adapter(20, shares=shares)
    y, (d_x, d_pairs) = value_and_gradient(x, router, biased, adapters, slope, router_bias)

    def value(x, pairs):
        return compute_by_loop(x, router, biased, adapters.replace(pairs=pairs), router_bias=router_bias)

    np.testing.assert_allclose(y, value(x, adapters.pairs), rtol=1e-4, atol=1e-4)
    assert np.abs(y - compute_by_loop(x, router, biased, adapters)).max() > 0.1, "the router's bias acts"
    assert (
        np.abs(y - compute_by_loop(x, router, biased.replace(down_bias=None), adapters, router_bias=router_bias)).max()
        > 0.1
    )

    tree, found = (x, dict(adapters.pairs)), (d_x, d_pairs)
    step = 1e-6
    for seed in range(4):
        moved = jax.tree.map(lambda leaf, seed=seed: normal(seed + leaf.size, *leaf.shape).astype(np.float64), tree)
        ends = [
            (value(*jax.tree.map(lambda leaf, by, at=at: leaf + at * by, tree, moved)) * slope).sum()
            for at in (-step, step)
        ]
        expected = (ends[1] - ends[0]) / (2 * step)
        along = sum(
            float((np.asarray(d, np.float64) * by).sum())
            for d, by in zip(*map(jax.tree.leaves, (found, moved)), strict=True)
        )

        assert along == pytest.approx(expected, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("groups", [[0] * 100, list(range(7)) * 9, [6, 0, 3] * 40, [5]])
def test_every_visit_is_in_one_tile_of_its_group(groups):
    tiling = fast_jit(sort_into_tiles, static_argnums=1)(np.array(groups)[:, None], 7)
    places = tiling.visit_WP.shape[1]
    used = np.asarray(tiling.row_MK).ravel()
    assert len(set(used.tolist())) == len(groups)
    np.testing.assert_array_equal(np.asarray(tiling.visit_WP).ravel()[used], np.arange(len(groups)))
    np.testing.assert_array_equal(np.asarray(tiling.group_W)[used // places], groups)
    assert int(tiling.num_used) == sum(-(-groups.count(group) // places) for group in set(groups))
    assert np.count_nonzero(np.asarray(tiling.visit_WP) < len(groups)) == len(groups)


def test_unused_tiles_are_not_summed():
    x = np.array([[1.0], [2.0], [4.0], [np.nan]], np.float32)
    total = fast_jit(sum_by_index, static_argnums=3)(x, np.array([1, 1, 0, 2]), np.int32(3), 3)
    np.testing.assert_array_equal(total, [[4.0], [3.0], [0.0]])
