from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_tx.apps.console.lineage import Line, Node, lines
from skyrl_tx.apps.console.overview_pages import EngineView, engine_view
from skyrl_tx.apps.console.queries import OpenGroup
from skyrl_tx.apps.console.views.checkpoints import checkpoint_lineage, freed_bytes
from skyrl_tx.apps.console.views.overview import flat_meters, gauge_tiles, rate_tiles, user_lines
from skyrl_tx.apps.console.views.runs import reward_of, run_state
from skyrl_tx.apps.console.views.samples import groups
from skyrl_tx.apps.console.views.usage import day_bars, total_of
from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptSample
from skyrl_tx.apps.teams.usage import Total
from skyrl_tx.apps.teams.usage_report import UsageLine
from skyrl_tx.contract.ids import ArtifactId, ModelId, RequestId, SessionId
from skyrl_tx.server.monitoring.engine_status import EngineReport
from skyrl_tx.store.tables import CheckpointRow


def checkpoint(artifact: str, size: int, name: str = "a") -> CheckpointRow:
    return CheckpointRow(
        model_id=ModelId("m"),
        kind="weights",  # pyright: ignore
        name=name,
        artifact_id=ArtifactId(artifact),
        created_at=1.0,
        size_bytes=size,
    )


@given(st.lists(st.sampled_from("abcd"), max_size=12), st.sets(st.sampled_from("abcd")))
def test_a_deletion_frees_what_nothing_else_uses(artifacts: list[str], used_elsewhere: set[str]) -> None:
    selected = [checkpoint(name, 10 ** "abcd".index(name)) for name in artifacts]
    references = Counter(artifacts) + Counter(used_elsewhere)
    expected = sum(10 ** "abcd".index(name) for name in set(artifacts) - used_elsewhere)
    assert freed_bytes(selected, references) == expected


def test_lineage_is_a_tree() -> None:
    base, run, child = Node("base", "", "Qwen"), Node("run", "r", "r"), Node("run", "s", "s")
    assert lines([base], run, [child]) == [Line(0, base), Line(1, run), Line(2, child)]
    tree = checkpoint_lineage("Qwen", [run], checkpoint("a", 1), ["session-12345678:train:1"], [])
    assert [line.depth for line in tree] == [0, 1, 2, 3] and tree[2].node.is_current


def test_rates_are_tokens_a_second_of_the_last_buckets() -> None:
    buckets = [(900, "training", 30_000), (1200, "training", 15_000), (1200, "sampled", 450), (0, "prefill", 7)]
    training, sampling, prefill = rate_tiles(buckets, [], 1350.0)
    assert training.value == "100 tok/s" and sampling.value == "1 tok/s" and prefill.value == "0 tok/s"
    assert rate_tiles([], [], 1e9)[0].spark


def test_rates_of_the_server_come_before_those_of_usage() -> None:
    history = [(at, {"training_tokens_per_s": float(at)}) for at in range(0, 1300, 10)]
    training, sampling, _ = rate_tiles([(1200, "sampled", 450)], history, 1300.0)
    assert training.value == "1.3k tok/s" and training.detail == "last 21 min 30 s" and training.spark.count(",") == 60
    assert sampling.value == "1.1 tok/s"


def test_gauges_are_read_from_any_nesting_and_may_be_missing() -> None:
    assert gauge_tiles(None, []) == []
    meters = {
        "backend": {"kv_cache_tokens": 100, "kv_cache_tokens_used": 61, "compilations": None},
        "device_memory": [{"used_bytes": 2**30, "limit_bytes": 2**31}] * 2,
    }
    assert flat_meters(meters)["device_memory_bytes"] == 2**31
    memory, cache = gauge_tiles(meters, [(1, {"kv_cache_tokens_used": 3.0}), (2, {"kv_cache_tokens_used": 9.0})])
    assert (memory.value, memory.detail, memory.share) == ("2.0 GiB", "of 4.0 GiB", 0.5)
    assert cache.share == 0.61 and cache.spark
    compared = {"compared_tokens": 2000, "trainer_gap_nats": 0.5, "trainer_gap_max_nats": 0.01}
    (gap,) = gauge_tiles({"backend": compared}, [])
    assert (gap.value, gap.detail) == ("2.5e-04 nats", "1.0e-02 at most, 2.0k tokens")


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (EngineReport(), EngineView("ok", "ready", "sampling")),
        (EngineReport(progress="2 of 3"), EngineView("ok", "ready", "sampling; 2 of 3")),
        (EngineReport(activity="busy for 40 s"), EngineView("busy", "busy", "busy for 40 s")),
        (EngineReport(outage="vLLM is lost"), EngineView("busy", "partly down", "vLLM is lost")),
        (EngineReport(problem="no word"), EngineView("problem", "not ready", "no word")),
    ],
)
def test_the_engine_in_a_few_words(report: EngineReport, expected: EngineView) -> None:
    visit: Any = SimpleNamespace(context=SimpleNamespace(engine=SimpleNamespace(report=lambda: report)))
    state: Any = SimpleNamespace(status="ready", activity="sampling")
    assert engine_view(visit, state) == expected


def test_who_uses_what() -> None:
    session, model = SessionId("session-12345678"), ModelId("session-12345678:train:0")
    open_now = [OpenGroup("ann", session, "forward_backward", model, None, 2, 5)]
    recent = [
        Total(group=(who,), kind="training", tokens=5, requests=1, device_s=s)
        for who, s in (("ann", 3.0), ("bob", 1.0))
    ]
    found, hidden = user_lines(open_now, recent, [*recent, *recent])
    assert hidden == 0 and [line.owner for line in found] == ["ann", "bob"]
    assert found[0].waiting == "2 training passes" and found[0].link == f"/training_runs/{model}"
    assert (found[0].device, found[0].tokens, found[1].what) == ("75%", 10, "")


def test_states_and_rewards() -> None:
    assert [run_state("ready", at, 100.0) for at in (90.0, 10.0)] == ["training", "idle"]
    assert run_state("ready", 90.0, 100.0, has_finished=True) == "ended"
    assert run_state("unloaded", 0.0, 1.0) == "ended" and run_state("failed", 0.0, 1.0) == "failed"
    assert (
        reward_of({"a": 1.0, "env/reward_std": 3.0, "env/all/reward/total": 2.0}) == 2.0
        and reward_of({"a": 1.0}) is None
    )


def test_samples_are_shown_by_group_the_best_first() -> None:
    def sample(index: int, advantage: float | None) -> KeptSample:
        return KeptSample(
            sequence_id=f"r:{index}",
            sample_index=index,
            tokens=np.array([1, 2], np.int32),
            logprobs=np.array([-1.0, -1.0], np.float32),
            stop_reason="stop",
            trained_model_id=None,
            trained_step=None,
            advantage=advantage,
            kl=None,
            trainer_gap=None if advantage is None else 0.25,
        )

    kept = KeptGroup(
        request_id=RequestId("r"),
        model_id="m",
        step=1,
        owner="ann",
        at=1.0,
        prompt=np.array([7], np.int32),
        samples=(sample(0, -2.0), sample(1, 1.0), sample(2, None)),
    )
    (group,) = groups([kept], lambda tokens: " ".join(f"<{token}>" for token in tokens))
    assert group.prompt == "<7>" and [each.advantage for each in group.samples] == [1.0, -2.0, None]
    assert [each.bar for each in group.samples] == [0.5, -1.0, 0.0]
    assert [each.trainer_gap for each in group.samples] == [0.25, 0.25, None]
    assert abs((group.samples[0].probability or 0) - 0.3679) < 1e-3
    (ids,) = groups([kept], lambda tokens: None)
    assert ids.samples[0].text == "1 2" and not ids.samples[0].is_text


NOON = 20_000 * 86_400 + 43_200


def test_bars_of_days_fill_the_height_and_leave_out_nothing() -> None:
    lines = [
        UsageLine(subject="2024-10-03", training_tokens=30, sampled_tokens=10),
        UsageLine(subject="2024-10-04", prefill_tokens=5, cached_tokens=5, sampled_tokens=10),
    ]
    before, full, half = day_bars(lines, 3, NOON)
    assert before.boxes == () and before.title == "2024-10-02: 0 tokens"
    assert full.title == "2024-10-03: 40 tokens"
    assert [box[0] for box in full.boxes] == ["training", "sampled"]
    assert sum(box[4] for box in full.boxes) == 120.0 and full.boxes[-1][2] == 0.0
    assert sum(box[4] for box in half.boxes) == 60.0 and half.boxes[0][2] + half.boxes[0][4] == 120.0
    assert all(x >= 0 and x + width <= 800 for bar in (full, half) for _, x, _, width, _ in bar.boxes)


def test_bars_of_a_year_show_the_last_hundred_days() -> None:
    bars = day_bars([], 365, NOON)
    assert len(bars) == 100 and bars[-1].title.startswith("2024-10-04")


def test_totals_add_all_lines_and_known_costs() -> None:
    lines = [UsageLine(subject="a", training_tokens=1, cost_usd=0.5), UsageLine(subject="b", sampled_tokens=2)]
    assert total_of(lines) == UsageLine(subject="total", training_tokens=1, sampled_tokens=2, cost_usd=0.5)
    assert total_of([]) == UsageLine(subject="total")
