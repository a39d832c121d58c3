"""Sampling with the real programs: samples match a full forward pass, bit-equal in any batch.

The logic of the scheduler is tested on fake programs in test_scheduler.py and test_prefill.py.
"""

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.compiler import Compiler
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.backends.jax.devices import CompilationMonitor, get_compilation_monitor
from skyrl_tx.backends.jax.sample import programs
from skyrl_tx.backends.jax.sample.model_runner import PromptChunk
from skyrl_tx.backends.jax.sample.programs import ENDED
from skyrl_tx.backends.jax.sample.row_inputs import RowInputs
from skyrl_tx.backends.jax.sample.running_sample import BASE_SLOT, BlockTableRow, RunningSample
from skyrl_tx.backends.jax.sample.scheduler import SampleScheduler
from skyrl_tx.backends.jax.sample.slice_rows import RowCounts, SliceRows
from skyrl_tx.contract.batches import SampleRequest
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions, SamplingControls
from skyrl_tx.layers import cache_state
from skyrl_tx.layers.cache_state import BlockTable, Cache
from tests.support.fast_jit import fast_jit
from tests.support.sample_requests import BLUE, RED, Results, begin, make_prompt, make_request, run
from tests.support.tiny import OUTPUT_NORMS, RANK, TINY_CONFIG, TinyModel, load_model, make_model_runner, tiny_directory

LENGTH = 160
"""Sequences are padded to this length for the full forward pass."""

SEEDS = {RED: 1, BLUE: 2}


def start(tiny: TinyModel, **changed: int) -> SampleScheduler:
    """Return a scheduler on the device with two adapters."""
    config: JaxConfig = TINY_CONFIG.model_copy(update=changed)
    device = make_model_runner(tiny.params, tiny.config, config)
    scheduler = SampleScheduler(device, config, device.memory, ())
    for name, seed in SEEDS.items():
        scheduler.load(name, tiny.adapter(seed))
    return scheduler


@pytest.fixture
def scheduler(tiny: TinyModel) -> SampleScheduler:
    return start(tiny)


@partial(fast_jit, static_argnames="config")
def compute_all_logprobs(params, config, tokens, adapter):
    hidden = models.forward(params, config, tokens[None], adapter)
    return jax.nn.log_softmax(models.logits(params, hidden, adapter)[0])


@partial(fast_jit, static_argnames="config")
def compute_target_logprobs(params, config, tokens, adapter):
    hidden = models.forward(params, config, tokens[None, :-1], adapter)
    return models.target_logprobs(params, hidden, tokens[None, 1:], adapter)[0]


def get_adapter(tiny: TinyModel, sampler: SamplerId | None):
    """Return the adapter of a sampler.

    The base model gets an adapter of zeros, so that one program serves all.
    """
    if sampler is None:
        return jax.tree.map(np.zeros_like, tiny.adapter(0))
    return tiny.adapter(SEEDS[sampler])


def compute_trainer_logprobs(tiny: TinyModel, request: SampleRequest, new_tokens: np.ndarray) -> np.ndarray:
    """Return the trainer's log-probability of every new token."""
    tokens = np.concatenate([request.prompt, new_tokens])
    padded = np.pad(tokens, (0, LENGTH + 1 - tokens.size))
    found = compute_target_logprobs(tiny.params, tiny.config, padded, get_adapter(tiny, request.sampler))
    return np.asarray(found)[request.prompt.size - 1 : tokens.size - 1]


def compute_distributions(tiny: TinyModel, request: SampleRequest, new_tokens: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of all tokens at the position of every new token [T, V]."""
    tokens = np.concatenate([request.prompt, new_tokens])
    padded = np.pad(tokens, (0, LENGTH - tokens.size))
    found = compute_all_logprobs(tiny.params, tiny.config, padded, get_adapter(tiny, request.sampler))
    return np.asarray(found)[request.prompt.size - 1 : tokens.size - 1]


def decode_greedily(tiny: TinyModel, request: SampleRequest, num: int) -> list[int]:
    """Decode greedily with a full forward pass for each token."""
    new = np.zeros(0, np.int32)
    for _ in range(num):
        best = int(np.argmax(compute_distributions(tiny, request, np.append(new, 0).astype(np.int32))[-1]))
        new = np.append(new, best).astype(np.int32)
    return new.tolist()


def test_greedy_decoding_equals_full_forward_passes_with_several_adapters(tiny, scheduler):
    requests = [
        make_request("base", make_prompt(5), temperature=0.0),
        make_request("red", make_prompt(40, seed=1), sampler=RED, temperature=0.0),
        make_request("blue", make_prompt(17, seed=2), sampler=BLUE, temperature=0.0, max_tokens=23),
    ]
    results = run(scheduler, *requests)
    for request in requests:
        sequence = results.sequence(request.request_id)
        assert sequence.tokens.tolist() == decode_greedily(tiny, request, request.params.max_tokens)
        assert sequence.stop_reason == "length"
        np.testing.assert_allclose(
            sequence.logprobs, compute_trainer_logprobs(tiny, request, sequence.tokens), atol=1e-5
        )


def test_trainer_and_sampler_agree_to_the_end_of_a_slot(tiny, scheduler):
    request = make_request("red", make_prompt(40), sampler=RED, samples=3, max_tokens=128 - 40)
    results = run(scheduler, request)
    for index in range(3):
        sequence = results.sequence("red", index)
        assert sequence.tokens.size == 128 - 40
        np.testing.assert_allclose(
            sequence.logprobs, compute_trainer_logprobs(tiny, request, sequence.tokens), atol=1e-5
        )
    assert len({tuple(tokens) for tokens in results.tokens.values()}) == 3


def test_trainer_and_sampler_agree_across_pages_with_filters_and_topk(tiny, scheduler):
    """Samples grow into their second page."""
    topk = PromptOptions(sample_topk=2)
    requests = [
        make_request("red", make_prompt(40), sampler=RED, samples=5, max_tokens=60, top_p=0.7, options=topk),
        make_request("blue", make_prompt(33), sampler=BLUE, samples=5, max_tokens=60, top_k=3),
    ]
    results = run(scheduler, *requests)

    for request in requests:
        for index in range(5):
            sequence = results.sequence(request.request_id, index)
            expected = compute_trainer_logprobs(tiny, request, sequence.tokens)
            np.testing.assert_allclose(sequence.logprobs, expected, rtol=1e-5, atol=1e-5)

            best = -np.sort(-compute_distributions(tiny, request, sequence.tokens))[:, :3]
            if request.sampler == BLUE:
                assert (sequence.logprobs >= best[:, 2] * (1 + 1e-5) - 1e-5).all()
            else:
                reported = np.concatenate([part.topk.logprobs for part in results.parts["red", index] if part.topk])
                np.testing.assert_allclose(reported, best[:, :2], rtol=1e-5, atol=1e-5)


def test_preempted_samples_are_recomputed_with_the_same_bits(tiny, scheduler):
    """Twelve samples need two pages each, but the cache has only 14 pages."""
    request = make_request("many", make_prompt(5), sampler=RED, samples=12, max_tokens=70)
    config = TINY_CONFIG.model_copy(update={"prefix_cache_tokens": 0})
    device = make_model_runner(tiny.params, tiny.config, config)
    few = SampleScheduler(device, config, replace(device.memory, num_slots=12, tokens=7 * 64, prefix_tokens=0), ())
    few.load(RED, tiny.adapter(SEEDS[RED]))
    assert device.memory.num_pages == 1 + 14
    results, ample = run(few, request), run(scheduler, request)
    assert results.bits == ample.bits and len(ample.bits) == 12


@pytest.mark.parametrize("adapter", [pytest.param(None, marks=[pytest.mark.slow, pytest.mark.exhaustive]), RED])
def test_batch_invariance(scheduler, adapter):
    request = make_request("mine", make_prompt(9), sampler=adapter, samples=3, temperature=0.9, max_tokens=20)
    alone, results = run(scheduler, request), Results()
    begin(
        scheduler,
        make_request("base", make_prompt(33, seed=1), temperature=0.0, max_tokens=30),
        make_request("red", make_prompt(6, seed=2), sampler=RED, samples=4, top_k=3),
        make_request(
            "blue", make_prompt(50, seed=3), sampler=BLUE, samples=2, top_p=0.5, options=PromptOptions(sample_topk=2)
        ),
    )
    results.add(scheduler.step())
    run(scheduler, request, into=results)
    assert {key: results.bits[key] for key in alone.bits} == alone.bits


@pytest.mark.slow
def test_a_request_in_parts_draws_the_same_bits(tiny):
    """Parts of 1, 2, 9, 6, 1 and 1 samples draw their first tokens at different program rows."""
    scheduler = start(tiny, prefill_chunk_tokens=256, max_sample_tokens=16 * 160)
    request = make_request("a", make_prompt(40), sampler=RED, samples=20, max_tokens=9)
    whole, parts = run(scheduler, request), Results()
    for first, end in ((0, 1), (1, 3), (3, 12), (12, 18), (18, 19), (19, 20)):
        begin(scheduler, replace(request, first_index=first, num_samples=end - first))
        if first < 18:
            parts.add(scheduler.step())
    run(scheduler, into=parts)
    assert parts.bits == whole.bits and len(whole.bits) == 20


def test_first_tokens_have_the_same_bits_for_any_number_of_samples(tiny):
    generator = np.random.default_rng(0)
    embed = jnp.asarray(0.3 * generator.standard_normal((300, tiny.config.hidden_size)), jnp.float32)
    params, config = replace(tiny.params, embed=embed, unembed=embed), replace(tiny.config, vocab_size=300)
    device = make_model_runner(params, config, TINY_CONFIG)
    request = make_request("a", make_prompt(9), samples=64, temperature=0.9)
    samples = [RunningSample(request=request, index=index, adapter=BASE_SLOT, stops=frozenset()) for index in range(64)]

    for _ in range(10):
        hidden = jnp.asarray(generator.standard_normal((1, tiny.config.hidden_size)), jnp.float32)
        whole = device.draw_first(hidden, samples)
        assert np.unique(whole.tokens).size > 1
        for first, end in ((0, 1), (1, 6), (6, 64), (63, 64)):
            part = device.draw_first(hidden, samples[first:end])
            np.testing.assert_array_equal(part.tokens[:, : end - first], whole.tokens[:, first:end])
            np.testing.assert_array_equal(part.logprobs[:, : end - first], whole.logprobs[:, first:end])


@pytest.mark.slow
def test_the_programs_that_are_compared_are_those_of_slices(tiny):
    """The first slice of a sample runs the programs with the fewest and the most rows.

    Each is compiled once.
    """
    scheduler = start(tiny, decode_slice_tokens=7)  # no other test has programs of this shape
    before = programs.run_rows._cache_size()
    begin(scheduler, make_request("a", make_prompt(9), sampler=RED, max_tokens=20))
    run(scheduler)
    assert programs.run_rows._cache_size() == before + 2


@pytest.mark.parametrize("adapter", [pytest.param(None, marks=[pytest.mark.slow, pytest.mark.exhaustive]), RED])
def test_prefix_cache_hits_change_no_bit(tiny, adapter):
    prefix = make_prompt(96)
    prompts = {
        "first": np.concatenate([prefix, make_prompt(20, seed=1)]),
        "equal": np.concatenate([prefix, make_prompt(20, seed=1)]),
        "alike": np.concatenate([prefix, make_prompt(50, seed=2)]),
        "part": prefix[:70],
    }
    warm, cold = start(tiny, prefix_cache_tokens=512), start(tiny, prefix_cache_tokens=0)
    hits = {}

    for name, prompt in prompts.items():
        request = make_request(name, prompt, sampler=adapter, max_tokens=6)
        results = run(warm, request)
        assert results.bits == run(cold, request).bits, name
        hits |= results.cache_hits

    assert hits == {"equal": 116, "alike": 96, "part": 64}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_hits_and_other_requests_change_no_bit_of_a_model_with_output_norms():
    model = load_model(tiny_directory(OUTPUT_NORMS))
    test_prefix_cache_hits_change_no_bit(model, RED)
    for adapter in (None, RED):
        test_batch_invariance(start(model), adapter)


@pytest.mark.slow
def test_prefill_between_slices_changes_no_bit(tiny):
    running, long = (
        make_request("running", make_prompt(9), sampler=RED, max_tokens=30),
        make_request("long", make_prompt(240, seed=1), sampler=RED, max_tokens=2),
    )
    results = run(start(tiny), running, long)
    assert results.bits == run(start(tiny), running).bits | run(start(tiny), long).bits


def test_a_longer_sample_in_the_batch_changes_no_bit(scheduler):
    """The longer sample changes the KV read length."""
    request = make_request("mine", make_prompt(9), sampler=RED, samples=3)
    alone = run(scheduler, request)
    results = run(scheduler, make_request("long", make_prompt(130, seed=1), sampler=RED, max_tokens=20), request)
    assert {key: results.bits[key] for key in alone.bits} == alone.bits


def test_loading_copies_the_adapter(tiny, scheduler):
    request = make_request("red", make_prompt(9), sampler=RED, temperature=0.0)
    before = run(scheduler, request)
    scheduler.drop(RED)
    red = jax.tree.map(jnp.array, tiny.adapter(SEEDS[RED]))
    scheduler.load(RED, red)
    jax.tree.map(lambda leaf: leaf.delete(), red)
    assert run(scheduler, request).bits == before.bits


def test_nan_of_one_adapter_does_not_spread(tiny, scheduler):
    scheduler.drop(BLUE)
    scheduler.load(BLUE, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tiny.adapter(2)))
    request = make_request("mine", make_prompt(9), sampler=RED)
    alone = run(scheduler, request).sequence("mine")
    results = run(scheduler, make_request("nan", make_prompt(9), sampler=BLUE, samples=15), request).sequence("mine")
    assert results.tokens.tolist() == alone.tokens.tolist()
    np.testing.assert_allclose(results.logprobs, alone.logprobs, atol=1e-5)  # one tile has both adapters
    after = run(scheduler, make_request("mine", make_prompt(9), sampler=RED, samples=16))  # also in slots that held NaN
    assert all(np.isfinite(after.sequence("mine", index).logprobs).all() for index in range(16))


def test_sample_topk_begins_with_the_greedy_token(scheduler):
    results = run(
        scheduler, make_request("topk", make_prompt(9), temperature=0.0, options=PromptOptions(sample_topk=2))
    )
    parts, sequence = results.parts["topk", 0], results.sequence("topk")
    assert np.concatenate([part.topk.token_ids[:, 0] for part in parts]).tolist() == sequence.tokens.tolist()
    np.testing.assert_array_equal(np.concatenate([part.topk.logprobs[:, 0] for part in parts]), sequence.logprobs)
    assert parts[-1].topk.token_ids.shape[1] == 2


def get_cache_shapes(tiny: TinyModel, num_pages: int) -> Cache:
    return models.describe_cache(tiny.params, tiny.config, num_pages, 4)


def count_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_copying_pages_allocates_no_second_cache(tiny):
    cache, number = get_cache_shapes(tiny, 500), jax.ShapeDtypeStruct((1,), jnp.int32)
    pairs = jax.ShapeDtypeStruct((1, 64, 2), jnp.int32)
    taken = programs.copy.lower(cache, pairs, number, pairs, number).compile().memory_analysis()
    assert taken.alias_size_in_bytes == count_bytes(cache)
    assert taken.temp_size_in_bytes < 0.02 * count_bytes(cache)


def test_a_chunk_and_a_slice_allocate_no_second_cache(tiny):
    """Each program is compiled for two cache sizes and needs the same temporary memory for both."""

    def measure_temporary_bytes(num_pages: int) -> list[int]:
        cache, number = get_cache_shapes(tiny, num_pages), jax.ShapeDtypeStruct((), jnp.int32)
        tokens, row = jax.ShapeDtypeStruct((1, 32), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        one, two = (
            BlockTable(jax.ShapeDtypeStruct((rows, 4), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32))
            for rows in (1, 2)
        )

        batch = RowInputs(4).make_batch(SliceRows((None, None), (BASE_SLOT, BASE_SLOT)))
        chunk = programs.prefill.lower(tiny.params, tiny.config, None, row, tokens, row, row, cache, one)

        decoding = programs.decode_slice.lower(
            tiny.params,
            tiny.config,
            None,
            cache,
            two,
            batch,
            np.full(2, ENDED, np.int32),
            number,
            max_steps=4,
            max_topk=0,
        )
        live = jax.eval_shape(partial(cache_state.open_decode_slice, max_tokens=4), cache, two, batch.position_S).live
        closing = programs.close_rows.lower(cache, live, batch.position_S, number, two)

        found = [lowered.compile().memory_analysis() for lowered in (chunk, decoding, closing)]
        assert all(analysis.alias_size_in_bytes == count_bytes(cache) for analysis in found)
        return [analysis.temp_size_in_bytes for analysis in found]

    assert measure_temporary_bytes(1000) == measure_temporary_bytes(100)


@pytest.mark.parametrize("runs_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_greedy_decoding_as_on_accelerators_in_bfloat16(tiny, monkeypatch, runs_ahead):
    """Rows of one or more adapters are multiplied together, and few samples use few rows."""
    scheduler, counts = start(tiny, sample_slots=32), set[int]()
    device = scheduler._programs
    device._is_single_cpu, device._merges, device.runs_ahead = False, True, runs_ahead
    device._counts, run_rows = device._make_row_counts(), device._dispatch_rows

    def record_rows(rows, num_steps):
        counts.add(len(rows.samples))
        return run_rows(rows, num_steps)

    monkeypatch.setattr(device, "_dispatch_rows", record_rows)
    red = [make_request(f"red{n}", make_prompt(5 + n), sampler=RED, temperature=0.0, max_tokens=12) for n in range(3)]
    blue = make_request("blue", make_prompt(6), sampler=BLUE, temperature=0.0, max_tokens=12)
    for requests in (red, [blue, replace(red[0], request_id=RequestId("red"))]):
        results = run(scheduler, *requests)
        for request in requests:
            sequence = results.sequence(request.request_id)
            assert sequence.tokens.tolist() == decode_greedily(tiny, request, request.params.max_tokens)
            np.testing.assert_allclose(
                sequence.logprobs, compute_trainer_logprobs(tiny, request, sequence.tokens), atol=1e-5
            )

    assert counts == {16}

    wanted = decode_greedily(tiny, red[1], red[1].params.max_tokens)
    many = run(scheduler, replace(red[1], request_id=RequestId("many"), num_samples=17))
    assert counts == {16, 32}
    assert all(many.sequence(RequestId("many"), index).tokens.tolist() == wanted for index in range(17))


def test_running_ahead_changes_no_sample_and_compiles_nothing(tiny):
    """Samples end by stop token or by length while other samples run.

    One is preempted and resumes.
    """
    prompt, requests = make_prompt(9), list[SampleRequest]()
    waits = start(tiny, sample_slots=8)
    free = run(waits, make_request("free", prompt, max_tokens=60)).tokens["free", 0]
    stops = [token for token in dict.fromkeys(free[8:]) if token not in free[:8]]
    for n, stop in enumerate(stops[:3]):
        requests.append(make_request(f"stops{n}", prompt, max_tokens=60, stop_token_ids=(stop,)))
    requests.append(
        make_request("many stops", prompt, max_tokens=60, stop_token_ids=tuple({*stops[:1], *range(280, 290)}))
    )
    requests.append(make_request("lengths", make_prompt(30), samples=6, max_tokens=37))
    ahead = start(tiny, sample_slots=8)
    device = ahead._programs
    device._is_single_cpu, device.runs_ahead, device._counts = False, True, RowCounts([8])
    num_programs = programs.decode_slice._cache_size()
    found, wanted = run(ahead, *requests), run(waits, *requests)

    assert found.tokens == wanted.tokens
    assert any(len(tokens) < 37 for tokens in found.tokens.values())
    assert programs.decode_slice._cache_size() == num_programs + 1


def test_programs_of_requests_are_compiled_at_the_same_time_before_they_are_called(tiny: TinyModel) -> None:
    config = TINY_CONFIG.model_copy(update={"max_topk_logprobs": 3})  # no other test compiles these programs
    compiler, compilation = Compiler[Hashable](2, CompilationMonitor()), get_compilation_monitor()
    device = make_model_runner(tiny.params, tiny.config, config, compiler)
    device._is_single_cpu = False
    SampleScheduler(device, config, device.memory, ())
    requests = [
        make_request("base", make_prompt(40), max_tokens=2),
        make_request("scored", make_prompt(20), max_tokens=1),
    ]

    device.precompile(requests)
    rows = SliceRows.iter_shapes(device._counts.all[0], BASE_SLOT, merges=False)
    slices = {("decode", len(shape.samples), len(shape.adapters), False, False): shape for shape in rows}
    first = next(iter(slices))  # tiles that share an adapter
    expected = {("prefill", 32, 1, False), first}
    for key in expected:
        device._wait_for_program(*key)
    assert set(compiler.ready) == expected

    # The programs are there now, so the same requests compile nothing.
    compiled = compilation.num_compiled
    device.precompile(requests)
    device.prefill([PromptChunk(BlockTableRow([]), np.zeros(30, np.int32), 0, BASE_SLOT)], 32)
    inputs = RowInputs(config.decode_slice_tokens)
    table, batch = (
        inputs.make_table(slices[first], device.memory.table_pages),
        inputs.make_batch(slices[first], from_last=True),
    )
    device._decode_slice(table, batch, slices[first], 1)
    assert compilation.num_compiled == compiled, "JAX found them compiled"
    compiler.close()


def test_a_cpu_finds_the_programs_that_it_compiled_in_the_background(tiny: TinyModel) -> None:
    """Samples have the same bits as without a compiler, in whichever programs they run."""
    config = TINY_CONFIG.model_copy(update={"max_topk_logprobs": 2, "sample_slots": 16})  # unlike in other tests
    compiler, compilation = Compiler[Hashable](2, CompilationMonitor()), get_compilation_monitor()
    device = make_model_runner(tiny.params, tiny.config, config, compiler)
    device._divider._compilation_cost = 500  # of about 30 steps
    schedulers = [SampleScheduler(device, config, device.memory, ()), start(tiny, **config.model_dump())]
    schedulers[0].load(RED, tiny.adapter(SEEDS[RED]))
    requests = [
        make_request("base", make_prompt(20), max_tokens=60),
        make_request("red", make_prompt(9), sampler=RED, max_tokens=40),
        make_request("adjusted", make_prompt(7), max_tokens=40, controls=SamplingControls(presence_penalty=1.0)),
    ]

    # The largest row count runs first. After a few slices, two rows are queued.
    for request in requests:
        results = [run(scheduler, request) for scheduler in schedulers]
        assert results[0].bits == results[1].bits
    kinds = {(0, False), (RANK, False), (0, True)}  # the padded rank of adapters, and whether logits change
    expected = {
        ("adjusted rows" if is_adjusted else "rows", count, max(count // 4, 2), rank, 128)
        for count in (2, 16)
        for rank, is_adjusted in kinds
    }
    for key in expected:
        device._wait_for_program(*key)
    assert set(compiler.ready) == expected

    # They run now, and the comparison with the largest row count compiles nothing either.
    compiled = compilation.num_compiled
    for request in requests:
        [first] = run(schedulers[1], request).bits.values()
        assert run(schedulers[0], request).bits == {(request.request_id, 0): first}
    assert compilation.num_compiled == compiled
    assert all(device._counts.is_compared(2, *kind) and device._counts.is_used(2, *kind) for kind in kinds)
    compiler.close()
