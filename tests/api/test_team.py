"""Three owners with keys, weights and quotas work at once with the SDK: results, shares, and usage in each view."""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import tinker
from sqlalchemy import func
from sqlmodel import select

from skyrl_tx.apps.history.points import RunPointRow
from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.quotas import Subject
from skyrl_tx.contract.backend import Pass
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.store import audit, keys
from skyrl_tx.store.tables import KeyScope, RequestRow
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.tools.cli import main
from tests.support.console_world import Browser
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack
from tests.support.polling import until

WEIGHTS = {"ann": 3, "bob": 1, "eve": 1}
PASSES = {"ann": 24, "bob": 12, "eve": 60}
"""Eve floods the server: she always has more waiting passes than the other owners."""
SAMPLES = {"ann": 3, "bob": 3, "eve": 40}
TOKENS, PROMPT_TOKENS, SAMPLED = 16, 3, 8
ADAM = tinker.AdamParams(learning_rate=0.01)
QUOTAS = {"models_in_training": 9, "training_tokens_per_day": 10**6, "checkpoint_bytes": 10**9}
"""Eve's quotas, which are too high to refuse anything."""


@dataclass(frozen=True)
class Outcome:
    """An owner's losses by pass, and the tokens and logprobs of each sample."""

    losses: Sequence[float]
    samples: Sequence[tuple[Sequence[int], Sequence[float]]]
    model_id: str


class Gate:
    """Blocks the first pass on the device until all owners have submitted their passes."""

    def __init__(self, backend: FakeBackend, patch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        begin = backend.begin_pass

        def wait(batch: PreparedModelPassBatch, *, backward: bool) -> Pass:
            assert self._opened.wait(60)
            return begin(batch, backward=backward)

        patch.setattr(backend, "begin_pass", wait)

    def open(self) -> None:
        """Let passes begin from now on."""
        self._opened.set()


def datum(seed: int) -> tinker.Datum:
    tokens = [(seed * 31 + place * 7) % 1000 + 1 for place in range(TOKENS + 1)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * TOKENS},  # type: ignore
    )


def num_waiting(stack: LiveStack) -> int:
    """Return the number of passes that the server has accepted and that have no result yet."""
    is_waiting = (RequestRow.kind == "model_pass", RequestRow.status == "open")
    wanted = select(func.count()).select_from(RequestRow).where(*is_waiting)
    return stack.server.store.read(lambda tx: tx.exec(wanted).one())


def work(
    stack: LiveStack, owner: str, key: str, owners: Sequence[str], phase: threading.Barrier, gate: Gate
) -> Outcome:
    """Train, save and sample. Each phase sends all requests at once."""
    with tinker.ServiceClient(base_url=stack.url, api_key=key, project_id=f"of-{owner}") as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4, seed=7).result()
        phase.wait(60)  # the closed gate also stops the engine from creating models
        first = training.forward_backward([datum(0)], "cross_entropy"), training.optim_step(ADAM)

        # There is no step between these passes, so the owner has work until the last one.
        passes = [training.forward_backward([datum(number)], "cross_entropy") for number in range(1, PASSES[owner])]
        step = training.optim_step(ADAM)
        if phase.wait(60) == 0:
            until(lambda: num_waiting(stack) == sum(PASSES[name] for name in owners))
            gate.open()
        first[1].result(timeout=300)
        losses = [future.result(timeout=300).metrics["loss:sum"] for future in (first[0], *passes)]
        step.result(timeout=300)

        training.save_state("end").result()
        sampling = training.save_weights_and_get_sampling_client().result()
        prompt = tinker.ModelInput.from_ints(list(range(1, 1 + PROMPT_TOKENS)))
        drawn = [
            sampling.sample(prompt, 1, tinker.SamplingParams(max_tokens=SAMPLED, seed=number, stop=[]))
            for number in range(SAMPLES[owner])
        ]
        found = [future.result(timeout=300).sequences[0] for future in drawn]
        return Outcome(losses, [(sequence.tokens, sequence.logprobs or []) for sequence in found], training.model_id)


def make_key(stack: LiveStack, owner: str, scope: KeyScope = "user") -> str:
    made, _ = stack.server.store.write(
        lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=datetime.now(UTC).timestamp())
    )
    return made


def together(stack: LiveStack, owners: Sequence[str]) -> dict[str, Outcome]:
    """Let the owners work at the same time and return their outcomes."""
    outcomes: dict[str, Outcome] = {}
    phase, made = threading.Barrier(len(owners)), {owner: make_key(stack, owner) for owner in owners}

    with pytest.MonkeyPatch.context() as patch:
        assert isinstance(stack.backend, FakeBackend)
        gate = Gate(stack.backend, patch)
        threads = [
            threading.Thread(
                target=lambda who=owner: outcomes.update({who: work(stack, who, made[who], owners, phase, gate)})
            )
            for owner in owners
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert outcomes.keys() == set(owners)
    return outcomes


@dataclass(frozen=True)
class Team:
    """A server after three owners have worked at once, their outcomes, and the outcomes of Ann and Bob alone."""

    stack: LiveStack
    folder: Path
    admin: str
    at_once: dict[str, Outcome]
    alone: dict[str, Outcome]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    alone: dict[str, Outcome] = {}
    for owner in ("ann", "bob"):
        with live_stack("fake", tmp_path_factory.mktemp(owner)) as stack:
            alone |= together(stack, [owner])
    folder = tmp_path_factory.mktemp("team")
    with live_stack("fake", folder, token_delay_s=0.001) as stack:
        admin = make_key(stack, "root", "admin")

        def fill(tx) -> None:
            now = datetime.now(UTC).timestamp()
            for owner, weight in WEIGHTS.items():
                quotas.put(tx, Subject("owner", owner), quotas.WEIGHT, weight, audit.OPERATOR, now)
            for limit, value in QUOTAS.items():
                quotas.put(tx, Subject("owner", "eve"), limit, value, audit.OPERATOR, now)

        stack.server.store.write(fill)
        yield Team(stack, folder, admin, together(stack, list(WEIGHTS)), alone)


EXPECTED = {
    owner: {
        "training": PASSES[owner] * TOKENS,
        "sampling_prefill": SAMPLES[owner] * PROMPT_TOKENS,
        "sampling_sample": SAMPLES[owner] * SAMPLED,
        "checkpoint": 1,
    }
    for owner in WEIGHTS
}


def test_a_flood_changes_no_bit_of_the_results_of_others(team: Team) -> None:
    for owner, alone in team.alone.items():
        at_once = team.at_once[owner]
        assert (at_once.losses, at_once.samples) == (alone.losses, alone.samples)
        assert len(set(at_once.losses)) > 3, "it was trained"


def test_a_flood_takes_no_more_than_its_share_of_training(team: Team) -> None:
    """Ann has weight 3 of 5: after her 24 passes the other owners have 8 each, plus or minus the running passes."""

    def read(tx) -> list[tuple[float, str]]:
        rows = tx.exec(select(RunPointRow).where(RunPointRow.kind == "train")).all()
        return sorted((row.at, row.model_id) for row in rows)

    owners = {outcome.model_id: owner for owner, outcome in team.at_once.items()}
    order = [owners[model_id] for _, model_id in team.stack.server.store.read(read)]
    assert Counter(order) == PASSES
    end = max(place for place, owner in enumerate(order) if owner == "ann")
    others = Counter(order[:end])
    assert others["eve"] <= PASSES["ann"] / 3 + 4, others
    end = max(place for place, owner in enumerate(order) if owner == "bob")
    assert Counter(order[:end])["eve"] <= PASSES["bob"] + 4, "equal weights"


def window() -> tuple[datetime, datetime]:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=12), hour + timedelta(hours=12)


def test_usage_of_the_sdk_is_the_work_to_the_token(team: Team) -> None:
    reported = tinker.AdminClient(base_url=team.stack.url, api_key=team.admin).get_billing_usage(*window()).result()
    assert count_usage([event.model_dump(mode="json") for event in reported.data]) == EXPECTED


def test_usage_of_the_tinker_command_agrees(team: Team) -> None:
    start, end = (f"{moment:%Y-%m-%dT%H:%M:%SZ}" for moment in window())
    command = [sys.executable, "-m", "tinker.cli", "--format", "json", "billing", "usage", start, end]
    environment = {**os.environ, "TINKER_BASE_URL": team.stack.url, "TINKER_API_KEY": team.admin}
    # A separate process, because the command keeps the client of the first server that it calls.
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert count_usage(json.loads(shown.stdout)["data"]) == EXPECTED


def count_usage(events: Sequence[dict]) -> dict[str, dict[str, int]]:
    """Return the numbers of tokens and checkpoints by owner and kind."""
    found: dict[str, dict[str, int]] = {}
    for event in events:
        info = event["event_info"]
        if info["type"] != "storage":
            amounts = found.setdefault(event["user_name"], {})
            amounts[info["type"]] = amounts.get(info["type"], 0) + info.get("token_count", info.get("count", 0))
    return found


def test_usage_of_the_command_and_the_console_agree(team: Team, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--by", "owner", "--json", "--data-dir", str(team.folder / "data")]) == 0
    rows = {row["owner"]: row for row in json.loads(capsys.readouterr().out)}
    with httpx.Client(base_url=team.stack.url, timeout=30) as client:
        page = Browser(client).log_in(team.admin).get("/usage?by=owner").text

    for owner, amounts in EXPECTED.items():
        row = rows[owner]
        assert (row["training_tokens"], row["prefill_tokens"], row["sampled_tokens"]) == (
            amounts["training"],
            amounts["sampling_prefill"],
            amounts["sampling_sample"],
        ), row
        shown = [f">{amounts[kind]}</td>" for kind in ("training", "sampling_prefill", "sampling_sample")]
        line = next(line for line in page.splitlines() if f">{owner}<" in line)
        assert all(text in page[page.index(line) :][:900] for text in shown), line


def test_each_save_is_in_the_audit_log_once(team: Team) -> None:
    entries = team.stack.server.store.read(audit.list_entries)
    made = Counter((row.actor, row.path) for row in entries if row.event == "checkpoint_create" and row.path)
    assert made == {(owner, f"tinker://{outcome.model_id}/weights/end"): 1 for owner, outcome in team.at_once.items()}
