"""Memory: what is chosen for it, what it really takes, and that running out of it is nobody's business."""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax import adapters, memory, packing, passes, training
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.chunks import Chunks
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.memory import (
    MOST_MODELS,
    RANK,
    UNKNOWN_MEMORY_TOKENS,
    Costs,
    MemoryPlan,
    SampleRoom,
    bytes_kept,
    choose,
    costs_of,
    model_room,
    plan_for,
    sample_room,
)
from skyrl_tx.contract.backend import ALL_PARTS, StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.errors import CapacityError, UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.layers.kept import Kept
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.testing.backend_bench import drawn_examples
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf

MIB = 2**20
COSTS = Costs(fixed=100 * MIB, token=MIB, token_with_remat=MIB // 8)
MODEL = ModelId("m")
SPEC = ModelSpec(lora=LoraSpec(rank=4, seed=1))
EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")


@pytest.mark.parametrize(
    ("free_mib", "settings", "expected"),
    [
        (20_000, {}, MemoryPlan(8192, remat=False)),
        (80_000, {}, MemoryPlan(16384, remat=False)),  # more gains nothing
        (4_000, {}, MemoryPlan(8192, remat=True)),  # without remat 1,024 would fit
        (10, {}, MemoryPlan(256, remat=True)),
        (4_000, {"remat": False}, MemoryPlan(1024, remat=False)),
        (20_000, {"micro_batch_tokens": 100}, MemoryPlan(100, remat=False)),
    ],
)
def test_the_plan_follows_the_memory_and_flags_have_the_last_word(free_mib, settings, expected):
    assert plan_for(free_mib * MIB, COSTS, JaxConfig(**settings), num_shards=1) == expected


def test_each_device_with_rows_of_its_own_takes_as_many_tokens():
    assert plan_for(20_000 * MIB, COSTS, JaxConfig(), num_shards=4) == MemoryPlan(4 * 8192, remat=False)


def test_a_device_that_tells_nothing_gets_the_stated_default(tiny, caplog):
    with caplog.at_level("INFO"):
        assert choose(JaxConfig(), tiny.params, tiny.config) == MemoryPlan(UNKNOWN_MEMORY_TOKENS, remat=False)
    assert "1024 tokens, results of products kept: the device does not tell its memory" in caplog.text


def test_layers_computed_twice_keep_less(tiny):
    costs = costs_of(tiny.params, tiny.config)
    hidden = 4 * tiny.config.num_layers * tiny.config.hidden_size
    assert hidden < costs.token_with_remat < costs.token


def test_products_alone_are_well_below_all_that_a_gradient_names(tiny):
    def of_a_token(kept: Kept) -> float:
        short, long = (bytes_kept(tiny.params, tiny.config, length, kept) for length in (512, 1024))
        return (long - short) / 512

    assert of_a_token(Kept.INPUTS) < of_a_token(Kept.PRODUCTS) < 0.5 * of_a_token(Kept.ALL)


def test_room_for_samples_follows_the_memory_and_flags_have_the_last_word(tiny, monkeypatch):
    config = tiny.config
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4

    def room(free: int, **settings) -> SampleRoom:
        monkeypatch.setattr(memory, "free_bytes", lambda _: free)
        return sample_room(JaxConfig(max_context_length=1024, **settings), tiny.params, config)

    assert room(10_000 * token) == room(10_100 * token) == SampleRoom(3584, 1024, 896, 512, 1024 * token)
    assert room(10_000_000 * token) == SampleRoom(32 * 1024, 8 * 1024, 8 * 1024, 512, 8 * 1024 * token)
    assert room(0).tokens == 1
    assert room(10_000 * token, max_sample_tokens=9999).tokens == 9999
    assert room(10_000 * token, prefix_cache_tokens=0) == SampleRoom(3584, 1024, 0, 512, 1024 * token)


@pytest.mark.parametrize("free_gib", [1, 7, 60, 120])
@pytest.mark.parametrize("settings", [{}, {"prefix_cache_tokens": 500}, {"prefill_chunk_tokens": 512}])
def test_samples_and_prompts_together_never_take_more_than_their_share(tiny, monkeypatch, free_gib, settings):
    large = {"num_layers": 36, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_context_length": 40_960}
    config, free = replace(tiny.config, **large), free_gib * 2**30
    monkeypatch.setattr(memory, "free_bytes", lambda _: free)
    room = sample_room(JaxConfig(**settings), tiny.params, config)
    token = 2 * 36 * 8 * 128 * 4
    longest = Chunks.of(JaxConfig(**settings), room.max_length).longest
    assert room.max_length == min(room.tokens, 40_960) > 256
    assert room.prompt_tokens >= max(room.prefix_tokens, longest + min(2048, room.max_length))
    assert room.prompt_bytes == room.prompt_tokens * token
    assert room.tokens * token + room.prompt_bytes <= 0.5 * free
    assert room.tokens * token > 0.1 * free


def test_room_for_samples_without_a_word_of_the_device(tiny, caplog):
    with caplog.at_level("INFO"):
        assert sample_room(JaxConfig(max_context_length=65536), tiny.params, tiny.config).tokens == 65536
        assert sample_room(JaxConfig(max_context_length=64), tiny.params, tiny.config).tokens == 32 * 64
    assert "samples of 65536 tokens at once" in caplog.text


def test_room_for_models_follows_the_memory_and_the_flag_has_the_last_word(tiny, monkeypatch, caplog):
    """All may be of the highest rank that is allowed, and one of them is changed while its former state is there."""

    def cost(rank: int) -> int:
        return 4 * 4 * sum(leaf.size for leaf in jax.tree.leaves(models.adapter_shapes(tiny.config, rank).weights))

    def room(free: int | None, **settings) -> int:
        monkeypatch.setattr(memory, "free_bytes", lambda _: free)
        return model_room(JaxConfig(**settings), tiny.params, tiny.config)

    assert room(100 * cost(64)) == room(100 * cost(128), max_lora_rank=128) == 39
    assert room(100 * cost(48), max_lora_rank=33) == 39  # to which arrays of that rank are padded
    assert room(10_000 * cost(64)) == room(None) == MOST_MODELS
    assert room(0) == 1
    assert room(100 * cost(64), max_lora_adapters=500) == 500
    with caplog.at_level("INFO"):
        assert room(100 * cost(64), max_lora_rank=32) > 60
    assert "models in training at once" in caplog.text and "one of rank 32" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_what_is_told_is_what_the_compiled_program_takes(tmp_path, remat):
    directory = write_model(tmp_path, vocab_size=1024, hidden_size=256, num_layers=4, head_dim=64, mlp_size=768)
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    config = family.config_from_hf(content)
    params = hf.load(directory, models.describe_params(config), family.weights)
    adapter: Adapter = models.adapter_shapes(config, RANK)
    [example] = request("r", 1024)
    batch = packing.fill(packing.plan([example], 1024)[0], [example])
    lowered = training.accumulate.lower(params, adapter, adapter.weights, batch, config=config, remat=remat)
    taken = lowered.compile().memory_analysis().temp_size_in_bytes
    costs = costs_of(params, config)
    told = costs.fixed + 1024 * (costs.token_with_remat if remat else costs.token)
    assert taken <= 1.1 * told <= 2.5 * taken


def request(name: str, *lengths: int) -> tuple[PassExample, ...]:
    return drawn_examples(MODEL, *((length,) for length in lengths), seed=len(name), request=name)


BATCH = PreparedModelPassBatch(examples=request("a", 30, 30, 20) + request("bb", 31, 9, 12))


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[..., JaxBackend]:
    directory = write_model(tmp_path_factory.mktemp("model"), num_layers=1, max_context_length=128)

    def start(micro_batch_tokens: int, **settings: bool) -> JaxBackend:
        config = JaxConfig(compile_cache_dir=None, sample_slots=1, micro_batch_tokens=micro_batch_tokens, **settings)
        backend = JaxBackend(str(directory), config)
        backend.start()
        backend.create_model(MODEL, SPEC)
        backend.forward_backward(PreparedModelPassBatch(examples=request("c", 32)))  # what must stay unharmed
        return backend

    return start


def numbers(backend: JaxBackend) -> list[np.ndarray]:
    """Return what a pass gives, and the gradient that it leaves."""
    results = backend.forward_backward(BATCH)
    gradient = backend.capture(MODEL, {StatePart.GRADIENT}).gradient
    return [result.logprobs for result in results] + [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]


def assert_bit_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_pass_that_exhausts_the_device_is_done_again_in_smaller_pieces(start, monkeypatch, caplog):
    """Bit for bit as if the smaller budget had been there from the beginning; earlier sums are counted once."""
    wanted = numbers(start(64))
    backend = start(128)
    accumulate, sizes = training.accumulate, []

    def exhausted(*given, **settings):
        sizes.append(given[3].tokens_BT.size)
        if sizes[-1] > 64:
            accumulate(*given, **settings)  # the donated total is gone, as on a device
            raise EXHAUSTED
        return accumulate(*given, **settings)

    monkeypatch.setattr(training, "accumulate", exhausted)
    assert_bit_equal(numbers(backend), wanted)
    assert sizes[0] > 64 and max(sizes[1:]) <= 64
    assert "micro_batch_tokens=64" in caplog.text


def test_memory_that_ends_where_results_are_read(start, monkeypatch):
    wanted = numbers(start(64))
    backend, errors = start(128), [EXHAUSTED]
    monkeypatch.setattr(passes.jax, "block_until_ready", lambda tree: raise_next(errors) or tree)
    assert_bit_equal(numbers(backend), wanted)
    assert not errors


def raise_next(errors: list[Exception]) -> None:
    if errors:
        raise errors.pop()


@pytest.mark.parametrize("first", [0, 1])
def test_two_passes_under_way_may_both_run_out_of_memory(start, monkeypatch, first):
    """One gets by with 64 tokens at once, one with 32: each has the bits of its own, and the plan is the smaller."""
    models_, budgets = (MODEL, ModelId("other")), (64, 32)
    batches = [PreparedModelPassBatch(examples=drawn_examples(each, (30,), (30,), (20,), (31,))) for each in models_]

    def begun(backend: JaxBackend, which: int):
        return backend.begin_pass(batches[which], backward=True)

    def told(backend: JaxBackend, which: int, results) -> list[np.ndarray]:
        gradient = backend.capture(models_[which], {StatePart.GRADIENT}).gradient
        return [result.logprobs for result in results] + [np.asarray(leaf) for leaf in jax.tree.leaves(gradient)]

    def with_both(micro_batch_tokens: int) -> JaxBackend:
        backend = start(micro_batch_tokens)
        backend.create_model(models_[1], ModelSpec(lora=LoraSpec(rank=4, seed=2)))
        return backend

    wanted = []
    for which, budget in enumerate(budgets):
        backend = with_both(budget)
        wanted.append(told(backend, which, begun(backend, which).results()))

    backend, accumulate, refused = with_both(128), training.accumulate, set()
    budget_of = {id(backend._pool.take(each).adapter): budget for each, budget in zip(models_, budgets, strict=True)}

    def exhausted(params, adapter, *given, **settings):
        size, budget = given[1].tokens_BT.size, budget_of[id(adapter)]
        if size > budget:
            refused.add(size)
            raise EXHAUSTED
        return accumulate(params, adapter, *given, **settings)

    monkeypatch.setattr(training, "accumulate", exhausted)
    passes = [begun(backend, which) for which in range(2)]
    under_way = set(range(2))
    while under_way:
        under_way -= {which for which in under_way if passes[which].step()}
    results = {which: passes[which].results() for which in (first, 1 - first)}
    for which in range(2):
        assert_bit_equal(told(backend, which, results[which]), wanted[which])
    assert backend._memory.plan == MemoryPlan(32, remat=False) and {64, 128} <= refused


def test_remat_is_the_last_resort_and_then_the_pass_fails_alone(start, monkeypatch):
    """What did not help is put back: others get the bits that they would have got without the failure."""
    backend, remats = start(32), []

    def exhausted(*given, remat: bool, **settings):
        remats.append(remat)
        raise EXHAUSTED

    with monkeypatch.context() as patch:
        patch.setattr(training, "accumulate", exhausted)
        with pytest.raises(CapacityError, match="no memory left for this pass, in the smallest pieces"):
            backend.forward_backward(BATCH)
    assert remats == [False, True]
    assert_bit_equal(numbers(backend), numbers(start(32)))


def test_smaller_pieces_that_do_not_help_either_are_nobodys_but_the_pass_that_failed(start, monkeypatch):
    backend, sizes = start(128), []

    def exhausted(*given, **settings):
        sizes.append(given[3].tokens_BT.size)
        raise EXHAUSTED

    with monkeypatch.context() as patch:
        patch.setattr(training, "accumulate", exhausted)
        with pytest.raises(CapacityError, match="no memory left for this pass, in the smallest pieces"):
            backend.forward_backward(BATCH)
    assert len(set(sizes)) > 1
    assert_bit_equal(numbers(backend), numbers(start(128)))


def test_remat_that_helps_stays(start, monkeypatch):
    backend, accumulate, remats = start(32), training.accumulate, []

    def exhausted(*given, remat: bool, **settings):
        remats.append(remat)
        if not remat:
            raise EXHAUSTED
        return accumulate(*given, remat=remat, **settings)

    monkeypatch.setattr(training, "accumulate", exhausted)
    assert_bit_equal(numbers(backend), numbers(start(32, remat=True)))
    remats.clear()
    backend.forward_backward(BATCH)
    assert set(remats) == {True}


def test_other_failures_are_not_tried_again(start, monkeypatch):
    backend, calls = start(128), []

    def broken(*given, **settings):
        calls.append(given)
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(training, "accumulate", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        backend.forward_backward(BATCH)
    assert len(calls) == 1


@pytest.mark.parametrize("change", ["create", "restore", "overwrite", "step"])
def test_a_change_for_which_there_is_no_memory_is_refused_in_words_and_leaves_no_trace(start, monkeypatch, change):
    """Also where the device says so only when what it was given is waited for."""
    backend, other = start(64), ModelId("other")
    snapshot = backend.capture(MODEL, ALL_PARTS)
    run = {
        "create": lambda: backend.create_model(other, SPEC),
        "restore": lambda: backend.restore(other, SPEC, snapshot, ALL_PARTS),
        "overwrite": lambda: backend.restore(MODEL, SPEC, snapshot, {StatePart.WEIGHTS}),
        "step": lambda: backend.optim_step(MODEL, OptimizerParams()),
    }[change]
    before = backend._pool.take(MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(adapters.jax, "block_until_ready", lambda tree: raise_next([EXHAUSTED]))
        patch.setattr(adapters, "adamw", lambda *given: raise_next([EXHAUSTED]))
        with pytest.raises(CapacityError, match=r"no memory left for .*: nothing was changed.*max-lora-adapters"):
            run()
    assert backend._pool.take(MODEL) is before
    with pytest.raises(UserError, match="no such model"):
        backend._pool.take(other)
    run()
