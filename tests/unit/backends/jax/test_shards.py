"""The scheduler on a mesh that shards rows: placement of prompts and samples."""

from dataclasses import replace

from skyrl_tx.contract.requests import PromptOptions
from tests.support.sample_requests import make_prompt, make_request
from tests.support.watched_samples import FEW, LONGEST, Watch, short


def count_running(watch: Watch) -> list[int]:
    """Return how many samples run on each shard."""
    return [len(shard.running) for shard in watch.scheduler._shards]


def test_prompts_are_spread_over_shards_and_their_samples_stay_together():
    watch = Watch(replace(FEW, num_slots=16, tokens=16 * 64, shards=4), prefill_tokens=1024)
    watch.begin(*(short(f"{number}", 30, size=5 + number, samples=2) for number in range(6)))
    watch.step()
    assert sorted(count_running(watch)) == [2, 2, 4, 4]
    watch.run()
    assert len(watch.ended_at) == 12


def test_more_samples_than_a_shard_has_rows_go_to_several():
    watch = Watch(replace(FEW, num_slots=8, tokens=8 * 64, shards=2), prefill_tokens=1024)
    request = make_request(
        "many", make_prompt(20), samples=8, max_tokens=30, options=PromptOptions(logprobs=True, sample_topk=2)
    )
    watch.begin(request)
    watch.step()
    assert count_running(watch) == [4, 4]
    watch.run()
    whole = Watch().run(request).results
    assert watch.results.bits == whole.bits and len(whole.bits) == 8
    assert watch.results.prompt("many").logprobs.size == whole.prompt("many").logprobs.size
    assert all(part.topk is not None for parts in watch.results.parts.values() for part in parts)


def test_a_prompt_goes_to_the_shard_that_has_its_beginning_unless_that_is_much_fuller():
    watch = Watch(replace(FEW, num_slots=64, tokens=64 * 64, prefix_tokens=1024, shards=2), prefill_tokens=1024)
    watch.run(short("first", 2, size=70))
    hits = [watch.run(short(f"again {n}", 2, size=70)).results.cache_hits[f"again {n}"] for n in range(3)]
    assert hits == [70, 70, 70] and len(watch.programs.extended) == 3, "chunks of one prompt"
    watch.begin(short("many", 50, size=70, samples=20))
    watch.step()
    assert count_running(watch) == [20, 0]
    watch.begin(short("late", 50, size=70))
    watch.step()
    watch.step()
    assert count_running(watch) == [20, 1]


def test_a_shard_without_pages_preempts_its_own_samples():
    watch = Watch(replace(FEW, num_slots=8, tokens=2 * LONGEST, prefix_tokens=0, shards=2))
    watch.begin(short("short", 9), *(short(f"long {number}", 110, size=6) for number in range(5)))
    preempted: set[str] = set()
    while watch.step():
        preempted |= {name for name, _ in watch.preempted}
    assert preempted and "short" not in preempted
    assert len(watch.ended_at) == 6 and watch.scheduler.meters().kv_cache_tokens_used == 0


def test_shards_compute_short_prompts_at_the_same_time():
    """Chunks of one padded size are one call. A long prompt is computed alone."""
    sizes = {"prefill_tokens": 128, "prefill_chunk_tokens": 64}
    watch = Watch(replace(FEW, num_slots=16, tokens=16 * 64, prefix_tokens=0, shards=4), **sizes)
    requests = [short(f"{size}", 5, size=size) for size in (40, 33, 20, 60, 31, 90)]
    watch.begin(*requests)
    watch.step()
    assert watch.programs.together == [3, 1, 1], "of 64 tokens each, of 32, and 31 tokens after them"
    watch.step()
    assert watch.programs.together == [3, 1, 1, 1, 1], "90 tokens"
    watch.run()
    alone = [Watch(replace(FEW, tokens=16 * LONGEST), **sizes).run(request).results.bits for request in requests]
    assert watch.results.bits == {key: bits for result_bits in alone for key, bits in result_bits.items()}


def test_a_failure_among_prompts_that_are_computed_together_ends_its_request_alone(monkeypatch):
    watch = Watch(replace(FEW, num_slots=16, tokens=16 * 64, shards=2), prefill_tokens=256)
    watch.results.may_fail, extend = True, watch.programs.prefill

    def fail(chunks, padded):
        if any(chunk.tokens.size == 7 for chunk in chunks):
            raise RuntimeError("prefill failed")
        return extend(chunks, padded)

    monkeypatch.setattr(watch.programs, "prefill", fail)
    watch.run(short("good", 5, size=8), short("bad", 5, size=7), short("late", 5, size=9))
    assert set(watch.results.errors) == {"bad"} and set(watch.ended_at) == {("good", 0), ("late", 0)}
