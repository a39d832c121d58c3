"""A run shares prefixes, or does not, as when it was created, also if its requests are replayed after a restart."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET
from sqlmodel import Session, select
from typing_extensions import override

from skyrl_tx.apps.teams import usage
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import CreateModel, ModelSpec, OptimizerParams
from skyrl_tx.contract.results import SHARED_TOKENS, Metrics
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store.tables import ModelRow, RequestRow
from tests.support.live_api import Server, live_api
from tests.support.live_engine import live_engine
from tests.support.tiny import DENSE, HYBRID, TINY_CONFIG, tiny_directory

PROMPT, ANSWERS = 80, (20, 30, 9)
NUM_TOKENS, NUM_SHARED = 3 * PROMPT + sum(ANSWERS), 2 * (PROMPT - 1)
"""Tokens of a pass. The last token of the prompt is not shared, because its target is in the answer."""


class MortalBackend(JaxBackend):
    """Loses its device in an optimizer step of a given number."""

    def __init__(self, architecture: str, dies_in_step: int | None = None) -> None:
        super().__init__(
            str(tiny_directory(architecture, 0.05)), TINY_CONFIG.model_copy(update={"micro_batch_tokens": 256})
        )
        self._steps_left = dies_in_step
        self.is_dead = threading.Event()

    @override
    def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self.is_dead.set()
                raise BackendLost("unplugged")
        return super().optim_step(model_id, params)


@contextmanager
def serve_api(directory: Path, architecture: str, *, no_shared_prefixes: bool = False) -> Iterator[Server]:
    model = str(tiny_directory(architecture, 0.05))
    settings = ApiSettings(port=0, data_dir=directory, base_model=model, no_shared_prefixes=no_shared_prefixes)
    with live_api(settings) as server:
        yield server


@contextmanager
def run_engine(server: Server, backend: MortalBackend) -> Iterator[None]:
    settings = EngineSettings(
        data_dir=server.settings.data_dir, base_model=server.settings.base_model, snapshot_interval_s=600
    )
    with live_engine(settings, backend):
        end = time.monotonic() + 300
        while server.client.get("/api/v1/healthz").status_code != HTTPStatus.OK:
            assert time.monotonic() < end
            time.sleep(0.02)
        yield


def create_run(server: Server, session_id: str, number: int) -> str:
    body = {"base_model": server.settings.public_model_name, "lora_config": {"rank": 4, "seed": 7}}
    answer = server.post("create_model", session_id=session_id, model_seq_id=number, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["model_id"]


def forget_sharing(server: Server, model_id: str) -> None:
    """Remove the record of sharing from a run, as if an earlier release had created it."""

    def work(tx: Session) -> None:
        row = tx.exec(select(ModelRow).where(ModelRow.model_id == model_id)).one()
        request = tx.exec(select(RequestRow).where(RequestRow.model_id == model_id)).one()
        create = codec.decode(request.body)
        assert isinstance(create, CreateModel)
        spec = replace(create.spec, shares_prefixes=UNSET)
        row.spec, request.body = codec.encode(spec), codec.encode(replace(create, spec=spec))
        request.body_crc = None  # as in rows of early releases
        assert b"shares_prefixes" not in row.spec + request.body

    server.store.write(work)


def make_pass(seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    prompt, data = draw.integers(1, 100, PROMPT), list[dict[str, Any]]()
    for length in ANSWERS:
        tokens = np.concatenate([prompt, draw.integers(1, 100, length)])
        is_answer = np.arange(tokens.size) >= PROMPT - 1
        inputs: Mapping[str, Any] = {
            "target_tokens": np.append(tokens[1:], 7),
            "logprobs": np.where(is_answer, -5.5, 0.0),
            "advantages": np.where(is_answer, draw.normal(), 0.0),
        }

        # The request as the SDK sends it
        tensors = {
            name: {"data": array.tolist(), "dtype": "int64" if name == "target_tokens" else "float32"}
            for name, array in inputs.items()
        }
        chunks = [{"type": "encoded_text", "tokens": tokens.tolist()}]
        data.append({"model_input": {"chunks": chunks}, "loss_fn_inputs": tensors})
    return {"data": data, "loss_fn": "importance_sampling"}


def submit(server: Server, model_id: str, seq_id: int) -> Any:
    """Submit a pass, or an optimizer step after each two passes."""
    if seq_id % 3 == 0:
        return server.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params={"learning_rate": 0.05})
    return server.post("forward_backward", model_id=model_id, seq_id=seq_id, forward_backward_input=make_pass(seq_id))


def train(directory: Path, architecture: str, *, dies: bool) -> dict[str, list[Any]]:
    """Train a run that shares and a run of an earlier release. Return the results of their passes.

    If `dies`, the engine loses its device before anything is saved. The next server shares no prefixes of new runs.
    """
    results: dict[str, list[Any]] = {"shared": [], "old": []}
    directory.mkdir(mode=0o700)
    backend = MortalBackend(architecture, 3 if dies else None)

    def collect(server: Server, first: int, last: int) -> None:
        answers = {name: [submit(server, run, seq_id) for seq_id in range(first, last)] for name, run in runs.items()}
        for name, submitted in answers.items():
            results[name] += [server.result(answer) for answer in submitted]

    # The first server: two passes, an optimizer step, and two more passes
    with serve_api(directory, architecture) as server:
        session_id = server.session()
        runs = {"shared": create_run(server, session_id, 0), "old": create_run(server, session_id, 1)}
        forget_sharing(server, runs["old"])
        if not dies:
            with run_engine(server, backend):
                collect(server, 1, 9)
            return results
        with pytest.raises(BackendLost), run_engine(server, backend):
            collect(server, 1, 6)
            for run in runs.values():
                submit(server, run, 6)
            assert backend.is_dead.wait(60)

    # The second server: the optimizer steps that failed, and two more passes
    backend = MortalBackend(architecture)
    with serve_api(directory, architecture, no_shared_prefixes=True) as server, run_engine(server, backend):
        collect(server, 6, 9)
        meters = backend.meters()
        assert meters.shared_tokens == 6 * NUM_SHARED, "four replayed passes, and two new ones"

        # A new run shares nothing, and usage counts what clients sent.
        new = create_run(server, server.session(), 0)
        assert SHARED_TOKENS not in server.result(submit(server, new, 1))["metrics"]
        totals = server.store.read(lambda tx: usage.read_totals(tx, None, 0, ("model_id",)))
        counted = {total.group[0]: total.tokens for total in totals if total.kind == "training"}
        assert counted == {runs["shared"]: 6 * NUM_TOKENS, runs["old"]: 6 * NUM_TOKENS, new: NUM_TOKENS}
        specs = server.store.read(lambda tx: [codec.decode(row.spec) for row in tx.exec(select(ModelRow))])
        assert [spec.shares_prefixes for spec in specs if isinstance(spec, ModelSpec)] == [True, UNSET, False]
    return results


@pytest.mark.parametrize("architecture", [DENSE, pytest.param(HYBRID, marks=pytest.mark.slow)])
def test_a_restart_with_another_setting_replays_the_same_bits(architecture: str, tmp_path: Path) -> None:
    found = train(tmp_path / "restarted", architecture, dies=True)
    undisturbed = train(tmp_path / "undisturbed", architecture, dies=False)
    assert found == undisturbed
    shared, old = ([result for result in found[name] if "loss_fn_outputs" in result] for name in ("shared", "old"))
    assert len(shared) == len(old) == 6

    # The runs differ in sharing alone: their results are close, but not all their bits are equal.
    assert shared != old
    for own, plain in zip(shared, old, strict=True):
        assert own["metrics"].pop(SHARED_TOKENS) == NUM_SHARED
        assert own["metrics"]["num_tokens:sum"] == NUM_TOKENS
        assert own["metrics"] == pytest.approx(plain["metrics"], rel=1e-3, abs=1e-4)
