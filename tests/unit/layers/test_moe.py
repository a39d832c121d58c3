"""Experts: each token gets what its own experts and its own adapter make of it, and nothing of anybody else's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.layers.lora import Adapter, LoraPair
from skyrl_tx.layers.moe import ExpertAdapters, ExpertWeights, Routing, mixture, pool_experts, route
from skyrl_tx.layers.tiles import arrange, sum_by_index

D, F, E, RANK, LAYERS = 8, 12, 6, 3, 2
ROUTING = Routing(num_experts=E, num_chosen=2, renormalizes=True)
SIZES = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return ExpertWeights(*(jnp.asarray(normal(i, E, *size)) for i, size in enumerate(SIZES.values())))


@pytest.fixture(scope="module")
def router() -> jax.Array:
    return jnp.asarray(normal(9, E, D))


def one_adapter(seed: int, num_experts: int = E, rank: int = RANK) -> ExpertAdapters:
    pairs = {
        name: LoraPair(
            a=jnp.asarray(normal(seed + i, num_experts, n, rank)), b=jnp.asarray(normal(seed - i, num_experts, rank, m))
        )
        for i, (name, (n, m)) in enumerate(SIZES.items())
    }
    return ExpertAdapters(pairs=pairs, scale=jnp.float32(0.5))


def pool_of(adapters: list[ExpertAdapters], layer: int) -> Adapter:
    """Return a pool with these adapters in one layer, and others in the other."""

    def place(leaf: jax.Array) -> jax.Array:
        return jnp.stack([leaf if each == layer else leaf + 1 for each in range(LAYERS)])

    each = [{f"expert_{name}": jax.tree.map(place, pair) for name, pair in a.pairs.items()} for a in adapters]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return Adapter(weights=stacked, scale=jnp.stack([a.scale for a in adapters]))


def by_loop(x_MD, router_ED, weights, adapters: ExpertAdapters | None, routing: Routing = ROUTING) -> np.ndarray:
    """Return what `mixture` shall return, token by token in float64."""
    share_MK, expert_MK = map(np.asarray, route(jnp.asarray(x_MD), router_ED, routing))
    out = np.zeros(x_MD.shape)
    for m, x in enumerate(x_MD.astype(np.float64)):
        for share, e in zip(share_MK[m], expert_MK[m], strict=True):

            def apply(name, y, e=e):
                z = y @ np.asarray(getattr(weights, name)[e], np.float64)
                if adapters is None:
                    return z
                pair = adapters.pairs[name]
                return z + float(adapters.scale) * (y @ np.asarray(pair.a[e])) @ np.asarray(pair.b[e])

            gate = apply("gate_proj", x)
            out[m] += share * apply("down_proj", gate / (1 + np.exp(-gate)) * apply("up_proj", x))
    return out


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("adapted", [False, True])
def test_each_token_goes_to_its_own_experts(weights, router, num_tokens, adapted):
    x, adapters = normal(3, num_tokens, D), one_adapter(20) if adapted else None
    y = jax.jit(mixture, static_argnames="routing")(jnp.asarray(x), router, weights, adapters, routing=ROUTING)
    np.testing.assert_allclose(y, by_loop(x, router, weights, adapters), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(1, 1), (E, E), (E, 1)])
@pytest.mark.parametrize("rank", [1, 2 * D])
def test_mixtures_that_are_none(weights, router, num_experts, num_chosen, rank):
    """One expert, all experts, one of them; the least rank, and one that is larger than the maps."""
    routing = Routing(num_experts=num_experts, num_chosen=num_chosen, renormalizes=True)
    weights, router = jax.tree.map(lambda leaf: leaf[:num_experts], (weights, router))
    x, adapters = normal(3, 33, D), one_adapter(20, num_experts, rank)
    y = mixture(jnp.asarray(x), router, weights, adapters, routing)
    np.testing.assert_allclose(y, by_loop(x, router, weights, adapters, routing), rtol=1e-4, atol=1e-3)


def test_a_router_that_cannot_decide_takes_the_first_and_no_expert_twice(weights, router):
    share, expert = route(jnp.asarray(normal(3, 9, D)), jnp.zeros_like(router), ROUTING)
    np.testing.assert_array_equal(expert, [[0, 1]] * 9)
    np.testing.assert_array_equal(share, np.full((9, 2), 0.5))


def test_one_expert_for_all_leaves_nothing_out_and_the_others_without_a_gradient(weights):
    """There is no capacity: hundreds of tokens in one place lose none, and unvisited adapters stay at exact zeros."""
    x = jnp.abs(jnp.asarray(normal(3, 300, D)))
    router = jnp.zeros((E, D)).at[4].set(9.0).at[1].set(8.0)
    adapters = one_adapter(20)
    y, pull = jax.vjp(lambda pairs: mixture(x, router, weights, adapters.replace(pairs=pairs), ROUTING), adapters.pairs)
    np.testing.assert_allclose(y, by_loop(np.asarray(x), router, weights, adapters), rtol=1e-4, atol=1e-3)
    for leaf in jax.tree.leaves(pull(jnp.ones_like(y))[0]):
        is_visited = [bool(np.any(leaf[e])) for e in range(E)]
        assert is_visited == [e in (1, 4) for e in range(E)]


def test_a_token_without_a_slope_adds_nothing_to_a_gradient(weights, router):
    """Padding and tokens of weight zero go through experts too: they might be any token."""
    adapters, x, other = one_adapter(20), normal(5, 40, D), normal(7, 40, D)
    counts = np.arange(40)[:, None] % 3 != 0

    @jax.jit
    def gradient(x):
        def loss(pairs):
            return (mixture(x, router, weights, adapters.replace(pairs=pairs), ROUTING) * counts).sum()

        return jax.grad(loss)(dict(adapters.pairs))

    mine, theirs = gradient(x), gradient(np.where(counts, x, other))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), mine, theirs)


def test_half_precision_weights_leave_results_and_gradients_in_float32(weights, router):
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    x, adapters = jnp.asarray(normal(5, 40, D)), one_adapter(20)

    def run(weights, pairs):
        return mixture(x, router, weights, adapters.replace(pairs=pairs), ROUTING)

    y, pull = jax.vjp(lambda pairs: run(rounded, pairs), dict(adapters.pairs))
    exact, exact_pull = jax.vjp(lambda pairs: run(weights, pairs), dict(adapters.pairs))
    assert y.dtype == jnp.float32
    for found, expected in zip(
        jax.tree.leaves((y, pull(jnp.ones_like(y))[0])),
        jax.tree.leaves((exact, exact_pull(jnp.ones_like(y))[0])),
        strict=True,
    ):
        assert found.dtype == jnp.float32
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)


def test_the_shares_are_renormalized_where_the_model_says_so(router):
    x = jnp.asarray(normal(3, 7, D))
    share, expert = route(x, router, Routing(num_experts=E, num_chosen=2, renormalizes=False))
    whole = np.asarray(jax.nn.softmax(x @ router.T, axis=-1))
    np.testing.assert_allclose(share, np.sort(whole, axis=-1)[:, :-3:-1], rtol=1e-5)
    again, same = route(x, router, ROUTING)
    np.testing.assert_array_equal(expert, same)
    np.testing.assert_allclose(again, share / share.sum(axis=-1, keepdims=True), rtol=1e-6)


def test_rows_read_the_adapters_of_their_own_places_and_layer(weights, router):
    first, second, x = one_adapter(20), one_adapter(50), normal(4, 6, D)
    pool = pool_of([first, second], layer=1)
    adapters = pool_experts(pool, "expert_", jnp.array([1, 0, 1]), jnp.int32(1))  # of each two rows
    y = mixture(jnp.asarray(x), router, weights, adapters, ROUTING)
    for rows, mine in ((slice(0, 2), second), (slice(2, 4), first), (slice(4, 6), second)):
        np.testing.assert_allclose(y[rows], by_loop(x[rows], router, weights, mine), rtol=1e-4, atol=1e-4)


def test_a_tenant_of_nan_reaches_nobody_through_the_router(weights, router):
    """What a row gets is bit-equal whatever the others are, even where they crowd its own experts."""
    first, second = one_adapter(20), one_adapter(50)
    broken = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), second)
    x = normal(4, 8, D)
    places = jnp.array([0, 0, 0, 0, 1, 1, 1, 1])
    apply = jax.jit(mixture, static_argnames="routing")

    def of(x: np.ndarray, other: ExpertAdapters) -> np.ndarray:
        adapters = pool_experts(pool_of([first, other], layer=0), "expert_", places, jnp.int32(0))
        return np.asarray(apply(jnp.asarray(x), router, weights, adapters, routing=ROUTING))

    alone = of(x, second)[:4]
    same_as_mine = np.concatenate([x[:4], x[:4]])
    for others in (x[4:], np.full_like(x[4:], np.nan), np.full_like(x[4:], np.inf), same_as_mine[4:]):
        company = of(np.concatenate([x[:4], others]), broken)
        np.testing.assert_array_equal(company[:4], alone)
        assert np.isnan(company[4:]).any()


def test_gradients_equal_those_of_a_plain_formula(weights, router):
    x, adapters = jnp.asarray(normal(5, 40, D)), one_adapter(20)
    slope = jnp.asarray(normal(6, 40, D))

    def plain(x, pairs):
        share_MK, expert_MK = route(x, router, ROUTING)

        def apply(name, y_MKI):
            a, b = pairs[name].a[expert_MK], pairs[name].b[expert_MK]
            update = jnp.einsum("mkr,mkro->mko", jnp.einsum("mki,mkir->mkr", y_MKI, a), b)
            return jnp.einsum("mki,mkio->mko", y_MKI, getattr(weights, name)[expert_MK]) + update * adapters.scale

        x_MKD = jnp.broadcast_to(x[:, None], (*share_MK.shape, D))
        y = apply("down_proj", jax.nn.silu(apply("gate_proj", x_MKD)) * apply("up_proj", x_MKD))
        return ((share_MK[..., None] * y).sum(1) * slope).sum()

    def ours(x, pairs):
        return (mixture(x, router, weights, adapters.replace(pairs=pairs), ROUTING) * slope).sum()

    expected = jax.grad(plain, argnums=(0, 1))(x, dict(adapters.pairs))
    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, dict(adapters.pairs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


@pytest.mark.parametrize("groups", [[0] * 100, list(range(7)) * 9, [6, 0, 3] * 40, [5]])
def test_every_visit_has_a_place_in_a_tile_of_its_group(groups):
    group_MK = jnp.array(groups)[:, None]
    tiling = arrange(group_MK, 7)
    places = tiling.visit_WP.shape[1]
    used = np.asarray(tiling.place_MK).ravel()
    assert len(set(used.tolist())) == len(groups)
    np.testing.assert_array_equal(np.asarray(tiling.visit_WP).ravel()[used], np.arange(len(groups)))
    np.testing.assert_array_equal(np.asarray(tiling.group_W)[used // places], groups)
    assert int(tiling.num_used) == sum(-(-groups.count(group) // places) for group in set(groups))
    assert np.count_nonzero(np.asarray(tiling.visit_WP) < len(groups)) == len(groups)


def test_sums_leave_out_tiles_that_are_not_used():
    x = jnp.array([[1.0], [2.0], [4.0], [jnp.nan]])
    total = sum_by_index(x, jnp.array([1, 1, 0, 2]), jnp.int32(3), 3)
    np.testing.assert_array_equal(total, [[4.0], [3.0], [0.0]])
