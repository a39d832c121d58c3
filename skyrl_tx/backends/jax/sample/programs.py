"""The jitted programs of sampling: prefill a chunk, copy pages and states, decode a slice.

Legend: S rows, B shards, T tokens of a chunk, M first tokens, N steps of a slice, D embed, V vocab,
K top-k, X stop tokens, R rows of the largest slice.

Shapes depend on the configuration and on the padded size of a chunk. On a single CPU device they
also depend on the number of rows and on the KV read length. Slices that change logits have separate
programs, see `RowBatch.adjustment`. Everything else is data, so it causes no compilation.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from typing_extensions import override

from skyrl_tx import models
from skyrl_tx.backends.jax.compiler import DECODING_OPTIONS, Program
from skyrl_tx.backends.jax.devices import check_single_host, is_out_of_memory
from skyrl_tx.backends.jax.sample.draw import DrawnTokens, DrawParams, draw
from skyrl_tx.backends.jax.sample.logit_adjustment import LogitAdjustment, adjust_logits
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.layers import cache_state
from skyrl_tx.layers.cache_state import BlockTable, Cache, DecodeSliceCache, LayerCache
from skyrl_tx.layers.lora import Adapter, RowSlots
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.models import DecoderParams, ModelConfig

ENDED = -1
"""The value that replaces the last token of a sample that has ended."""

Live = tuple[LayerCache | tuple[LayerCache, ...], ...]
"""The part of the cache that decode steps change, by stack: recent tokens and states."""


@struct.dataclass
class RowBatch:
    """The inputs of a decode slice by row. Rows without a sample also run, at position 0."""

    token_S: jax.Array  # int32: drawn and not yet in the KV cache; unused where `source_S` names a row
    source_S: jax.Array  # int32: the row of the last slice that drew the token; -1: use `token_S`
    position_S: jax.Array  # int32: where its key and value are written
    num_drawn_S: jax.Array  # int32: tokens that the sample has drawn before
    num_left_S: jax.Array  # int32: steps until the sample ends, unless it draws a stop token
    given_SN: jax.Array  # int32: tokens that were drawn before a preemption; -1: draw a new token
    stop_SX: jax.Array  # int32: stop tokens, padded with -1
    slots: RowSlots  # of adapters
    draws: DrawParams
    wants_topk: jax.Array  # bool scalar
    adjustment: LogitAdjustment | None = None  # of the logits of the next step


@struct.dataclass
class SliceResult:
    """The tokens of a slice. The first `num_S` tokens of each row belong to its sample."""

    drawn: DrawnTokens
    num_S: jax.Array  # int32
    is_stopped_S: jax.Array  # bool: whether the last of them is a stop token


@contextmanager
def detect_loss(cache: Cache) -> Generator[None]:
    """Raise BackendLost if a failure destroys `cache`, which programs update in place.

    With multiple hosts, BackendLost is also raised when memory is exhausted, because the other
    hosts may not have failed.
    """
    try:
        yield
    except Exception as error:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(cache)):
            raise BackendLost(f"decoding failed and destroyed the KV cache: {error}") from error
        if is_out_of_memory(error):
            check_single_host(error)
        raise


def take_adapter(pool: Adapter | None, adapter: jax.Array) -> Adapter | None:
    """Return one adapter of the pool for all rows. Without a pool, returns None: the base model."""
    return None if pool is None else jax.tree.map(lambda leaf: leaf[adapter], pool)


by_layer = jax.jit(models.unstack_params, static_argnames="config")


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def prefill(
    params: DecoderParams,
    config: ModelConfig,
    pool: Adapter | None,
    adapter_B: jax.Array,
    token_BT: jax.Array,
    start_B: jax.Array,
    last_B: jax.Array,
    cache: Cache,
    table: BlockTable,
) -> tuple[jax.Array, tuple[jax.Array, ...], Cache]:
    """Compute one chunk per row, after the first `start_B` positions of its prompt.

    Chunks are padded on the right. A row without a prompt writes nothing. Returns the hidden states
    [B, T, D], a tuple with the hidden state [1, D] at index `last_B` of each row, and the cache
    with the chunks written.
    """
    B = token_BT.shape[0]
    if B == 1:  # one adapter for all rows takes two plain products
        own, slots, start, last = take_adapter(pool, adapter_B[0]), None, start_B[0], last_B[0]
    else:
        own, slots, start, last = pool, RowSlots(adapter_B), start_B, last_B
    hidden_BTD, cache = models.prefill(params, config, token_BT, start, cache, table, own, slots, size=last + 1)
    last_BD = jax.vmap(lambda hidden_TD, last: jax.lax.dynamic_index_in_dim(hidden_TD, last, keepdims=False))(
        hidden_BTD, last_B
    )
    last_BD = params.layout.constrain(last_BD, None, None)
    return hidden_BTD, tuple(last_BD[row : row + 1] for row in range(B)), cache


@partial(jax.jit, static_argnames="layout")
def get_row(hidden_BTD: jax.Array, row: jax.Array, layout: Layout) -> jax.Array:
    """Return the hidden states of one row [T, D], replicated on all devices."""
    return layout.constrain(jax.lax.dynamic_index_in_dim(hidden_BTD, row, keepdims=False), None, None)


copy = jax.jit(cache_state.copy_pages, static_argnames="layout", donate_argnames="cache")


@jax.jit
def compute_first_logits(
    params: DecoderParams, pool: Adapter | None, adapter: jax.Array, last_1D: jax.Array
) -> jax.Array:
    """Return the logits [1, V] for a prompt's last hidden state."""
    return models.logits(params, last_1D, take_adapter(pool, adapter))


adjust_first_logits = jax.jit(adjust_logits)


@partial(jax.jit, static_argnames="max_topk")
def draw_first(
    logits_1V: jax.Array,
    draws: DrawParams,
    wants_topk: jax.Array,
    model_logits_1V: jax.Array | None = None,
    *,
    max_topk: int,
) -> DrawnTokens:
    """Draw the first token of M samples of one prompt from its logits.

    `model_logits_1V` are the logits before they were adjusted, see `draw`.
    """
    M, V = draws.index_S.shape[0], logits_1V.shape[1]
    logits_MV = jnp.broadcast_to(logits_1V, (M, V))
    model_logits_MV = None if model_logits_1V is None else jnp.broadcast_to(model_logits_1V, (M, V))
    return draw(logits_MV, draws, jnp.zeros(M, jnp.int32), model_logits_MV, max_topk=max_topk, wants_topk=wants_topk)


open_rows = jax.jit(cache_state.open_decode_slice_by_layer, static_argnames=("read_length", "max_tokens"))


@partial(jax.jit, donate_argnames="cache")
def close_rows(cache: Cache, live: Live, start_S: jax.Array, num_steps: jax.Array, table: BlockTable) -> Cache:
    """Write the tokens and states of a slice into the cache."""
    return cache_state.close_decode_slice(cache, DecodeSliceCache((), live, table.page_BM, start_S, num_steps), table)


@partial(jax.jit, static_argnames=("config", "max_topk"), donate_argnames="live")
def run_rows(
    params: DecoderParams,
    config: ModelConfig,
    pool: Adapter | None,
    opened: DecodeSliceCache,
    live: Live,
    batch: RowBatch,
    num_steps: jax.Array,
    *,
    max_topk: int,
) -> tuple[Live, jax.Array, SliceResult]:
    """Run decode steps on an opened slice, whose shapes do not depend on the size of the cache.

    Returns what the steps changed, the number of steps, and the result. The host must have read all
    earlier tokens.
    """
    opened = replace(opened, live=live)
    live, num_run, _, result = _run_steps(
        params, config, pool, opened, batch, batch.token_S, num_steps, max_topk=max_topk
    )
    return live, num_run, result


class FirstTokenProgram(Program):
    """The programs `compute_first_logits` and `draw_first`, compiled together.

    The arguments are the parameters, the pool, a last hidden state, and the drawing parameters. The
    static argument is `max_topk`.
    """

    @override
    def compile_in_steps(self) -> Generator[None, None, Callable[..., Any]]:
        params, pool, last_1D, draws = self.arguments
        inputs = params, pool, np.int32(0), last_1D
        scoring = yield from Program(compute_first_logits, inputs, {}).compile_in_steps()
        logits_1V = _describe_results(scoring, params)
        return (yield from Program(draw_first, (logits_1V, draws, np.bool_(False)), self.static).compile_in_steps())


class RowsProgram(Program):
    """The programs `open_rows`, `run_rows` and `close_rows` for the same rows, compiled together.

    The arguments are the parameters (stacked), config, pool, cache, block table and batch. The static
    arguments are `read_length`, `max_tokens` and `max_topk`.
    """

    @override
    def compile_in_steps(self) -> Generator[None, None, Callable[..., Any]]:
        params, config, pool, cache, table, batch = self.arguments
        static = dict(self.static)
        max_topk = static.pop("max_topk")

        params = _describe_results(by_layer.lower(params, config).compile(), params)
        opening = open_rows.lower(cache, table, batch.position_S, **static).compile()
        opened = _describe_results(opening, cache)
        arguments = params, config, pool, replace(opened, live=()), opened.live, batch, np.int32(1)
        running = yield from Program(run_rows, arguments, {"max_topk": max_topk}).compile_in_steps()
        live, num_run, _ = _describe_results(running, (params, pool, opened))
        close_rows.lower(cache, live, batch.position_S, num_run, table).compile()
        return running


def describe_arrays(tree: Any) -> Any:
    """Replace device arrays by their shapes. A program that is compiled for these serves the arrays."""

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)

    return jax.tree.map(describe, tree)


def _describe_results(compiled: Any, arguments: Any) -> Any:
    """Return the shapes of a program's results. They are committed to a device if an argument is."""
    is_committed = any(leaf.sharding is not None for leaf in jax.tree.leaves(describe_arrays(arguments)))

    def describe(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if is_committed else None)

    return jax.tree.map(describe, compiled.out_info, compiled.output_shardings)


def make_last_tokens(params: DecoderParams, num_rows: int) -> jax.Array:
    """Return the last tokens of an empty slice, in the sharding that decode programs return."""
    sharding = params.embed.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jnp.full(num_rows, ENDED, jnp.int32, device=sharding)


@partial(
    jax.jit,
    static_argnames=("config", "max_steps", "max_topk"),
    donate_argnames="cache",
    compiler_options=DECODING_OPTIONS,
)
def decode_slice(
    params: DecoderParams,
    config: ModelConfig,
    pool: Adapter | None,
    cache: Cache,
    table: BlockTable,
    batch: RowBatch,
    last_R: jax.Array,
    num_steps: jax.Array,
    *,
    max_steps: int,
    max_topk: int,
) -> tuple[Cache, jax.Array, SliceResult]:
    """Run up to `num_steps` <= `max_steps` decode steps of every row, until all samples have ended.

    A row that runs past its own end affects only itself. `last_R` holds the last tokens of the
    previous slice, which the host may not have read yet; it is ENDED for samples that have ended. A
    single CPU device uses `open_rows`, `run_rows` and `close_rows` instead, which do the same by
    layer.

    Returns:
        The cache, the last tokens of this slice, and the result with a leading axis N of `max_steps`.
    """
    source_S, token_S = batch.source_S, batch.token_S
    token_S = jnp.where(source_S >= 0, last_R[jnp.maximum(source_S, 0)], token_S)

    # Run the steps on copies of the states and of the recent tokens.
    opened = cache_state.open_decode_slice(
        cache,
        table,
        batch.position_S,
        params.layout,
        max_tokens=max_steps,
        has_separate_layers=params.has_separate_layers,
    )
    live, num_run, token_S, result = _run_steps(
        params, config, pool, opened, batch, token_S, num_steps, max_topk=max_topk
    )

    # Write the changes into the cache.
    cache = cache_state.close_decode_slice(cache, replace(opened, live=live, num_recent=num_run), table, params.layout)
    last_S = jnp.where(result.is_stopped_S, ENDED, token_S)
    last_R = params.layout.constrain(jnp.full_like(last_R, ENDED).at[: len(last_S)].set(last_S), None)
    return models.constrain_cache(params.layout, config, cache), last_R, result


def _run_steps(
    params: DecoderParams,
    config: ModelConfig,
    pool: Adapter | None,
    opened: DecodeSliceCache,
    batch: RowBatch,
    token_S: jax.Array,
    num_steps: jax.Array,
    *,
    max_topk: int,
) -> tuple[Live, jax.Array, jax.Array, SliceResult]:
    """Run up to `num_steps` steps, until the samples of all rows have ended.

    Returns what the steps changed of the cache, the number of steps, the last token of each row,
    and the result.
    """

    class DecodeState(NamedTuple):
        n: jax.Array  # steps so far
        live: Live
        token_S: jax.Array
        result: SliceResult

    def are_running(now: DecodeState) -> jax.Array:
        return ~now.result.is_stopped_S & (now.n < batch.num_left_S)

    def should_continue(now: DecodeState) -> jax.Array:
        return (now.n < num_steps) & jnp.any(are_running(now))

    def step(now: DecodeState) -> DecodeState:
        n, runs_S, result = now.n, are_running(now), now.result
        hidden_SD, after = models.decode_step(
            params, config, now.token_S, replace(opened, live=now.live, num_recent=n), pool, batch.slots
        )
        logits_SV, model_logits_SV = models.logits(params, hidden_SD, pool, batch.slots), None
        if batch.adjustment is not None:
            logits_SV, model_logits_SV = adjust_logits(logits_SV, batch.adjustment), logits_SV
        position_S, wants_topk = batch.num_drawn_S + n, batch.wants_topk
        drawn = draw(logits_SV, batch.draws, position_S, model_logits_SV, max_topk=max_topk, wants_topk=wants_topk)

        given_S = batch.given_SN[:, n]
        token_S = jnp.where(given_S >= 0, given_S, drawn.tokens)
        stops_S = jnp.any(token_S[:, None] == batch.stop_SX, axis=1)
        result = SliceResult(
            drawn=jax.tree.map(lambda into, leaf: into.at[n].set(leaf), result.drawn, drawn),
            num_S=result.num_S + runs_S,
            is_stopped_S=result.is_stopped_S | (runs_S & stops_S),
        )
        return DecodeState(n + 1, after.live, token_S, result)

    (S, max_steps), K = batch.given_SN.shape, min(max_topk, config.vocab_size)
    drawn = DrawnTokens(
        tokens=jnp.zeros((max_steps, S), jnp.int32),
        logprobs=jnp.zeros((max_steps, S), jnp.float32),
        topk_tokens=jnp.zeros((max_steps, S, K), jnp.int32),
        topk_logprobs=jnp.zeros((max_steps, S, K), jnp.float32),
    )
    nothing = SliceResult(drawn, num_S=jnp.zeros(S, jnp.int32), is_stopped_S=token_S < 0)
    first = DecodeState(jnp.int32(0), opened.live, jnp.maximum(token_S, 0), nothing)
    ended = jax.lax.while_loop(should_continue, step, first)
    return ended.live, ended.n, ended.token_S, ended.result
