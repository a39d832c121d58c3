"""An engine for tests of the API, with results that are easy to check."""

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from sqlmodel import Session

from skyrl_tx.contract import codec, requests, results
from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.ids import ArtifactId, CheckpointKind, ModelId, SamplerId
from skyrl_tx.store import checkpoints, engine_state, futures, models, sampling_sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.futures import PendingRequest
from skyrl_tx.store.tables import CheckpointRow, EngineStateRow, SamplingSessionRow


def _ready(tx: Session) -> None:
    engine_state.publish(
        tx,
        EngineStateRow(
            boot_id="boot",
            pid=1,
            status="ready",
            capabilities={"max_context_length": 4096},
            base_models=[],
            updated_at=time.time(),
        ),
    )


@dataclass
class ScriptedEngine:
    """Gives each request a fixed result at once. `overrides` replaces the results of a kind."""

    store: Store
    overrides: dict[str, Callable[[PendingRequest, requests.Request], results.Result]] = field(default_factory=dict)
    seen: list[tuple[PendingRequest, requests.Request]] = field(default_factory=list)
    stopped: bool = False

    def run(self) -> None:
        """Process requests until `stopped` is set."""
        self.store.write(_ready)
        while not self.stopped:
            after = self.seen[-1][0].position if self.seen else 0
            for pending in self.store.read(partial(futures.list_pending, after_position=after, limit=1000)):
                request = codec.decode(pending.body)
                assert isinstance(request, requests.Request)
                self.seen.append((pending, request))
                self.store.write(partial(self._answer, pending, request))
            self.store.wait(0.2)

    def _answer(self, pending: PendingRequest, request: requests.Request, tx: Session) -> None:
        now = time.time()
        override = self.overrides.get(pending.kind)
        result = override(pending, request) if override else self._result(tx, pending, request, now)
        failed = isinstance(result, results.Failure)
        futures.complete(tx, pending.request_id, codec.encode(result), failed=failed, effect_order=None, now=now)

    def _result(self, tx: Session, pending: PendingRequest, request: requests.Request, now: float) -> results.Result:
        model_id = pending.model_id or ModelId("")
        match request:
            case requests.Rejected():
                return results.Failure(message=request.message, category=ErrorCategory.USER)
            case requests.CreateModel():
                models.set_status(tx, model_id, "ready")
                return results.CreateModelOutput(model_id=model_id)
            case requests.ModelPass():
                logprobs = tuple(
                    np.full(datum.loss_inputs["target_tokens"].shape, -0.5, np.float32) for datum in request.data
                )
                total = sum(0.5 * array.size for array in logprobs)
                return results.ForwardBackwardOutput(logprobs=logprobs, metrics={"loss:sum": total})
            case requests.OptimStep():
                return results.OptimStepOutput(metrics={"unclipped_grad_l2:mean": 1.0})
            case requests.SaveWeights():
                return self._save(tx, model_id, request, now)
            case requests.LoadWeights():
                models.set_status(tx, model_id, "ready")
                return results.LoadWeightsOutput(path=request.path, model_id=model_id)
            case requests.UnloadModel():
                models.set_status(tx, model_id, "unloaded")
                return results.UnloadModelOutput(model_id=model_id)
            case requests.Sample():
                return _samples(request)

    def _save(self, tx: Session, model_id: ModelId, request: requests.SaveWeights, now: float) -> results.Result:
        row = models.get(tx, model_id)
        assert row is not None

        artifact = f"artifact-{len(self.seen)}"
        if request.name is None:
            assert request.sampling_session_id is not None
            sampling_sessions.create_session(
                tx,
                SamplingSessionRow(
                    sampling_session_id=request.sampling_session_id,
                    session_id=row.session_id,
                    base_model=row.base_model,
                    sampler_id=SamplerId(artifact),
                    model_id=model_id,
                    created_at=now,
                    last_used_at=now,
                ),
            )
            return results.SaveWeightsOutput(kind=request.kind, sampling_session_id=request.sampling_session_id)
        checkpoint = CheckpointRow(
            model_id=model_id,
            kind=CheckpointKind(request.kind),
            name=request.name,
            artifact_id=ArtifactId(artifact),
            created_at=now,
            expires_at=None if request.ttl_s is None else now + request.ttl_s,
            size_bytes=1,
            user_metadata=request.user_metadata,
        )
        checkpoints.put(tx, checkpoint, request.overwrite)
        return results.SaveWeightsOutput(kind=request.kind, path=str(checkpoint.path))


def _samples(request: requests.Sample) -> results.SampleOutput:
    """Return ascending tokens with logprobs of -1. Prompt logprobs are -2."""
    count = request.params.max_tokens or 4
    sequence = results.SampledSequence(
        tokens=np.arange(count, dtype=np.int32), logprobs=np.full(count, -1.0, np.float32), stop_reason="length"
    )
    length = request.prompt.size
    prompt = results.PromptResult()
    if request.options.wants_prompt:
        logprobs = np.full(length, -2.0, np.float32)
        logprobs[0] = np.nan
        k = request.options.topk
        token_ids = np.tile(np.arange(k, dtype=np.int32), (length, 1))
        topk_logprobs = np.tile(-np.arange(1, k + 1, dtype=np.float32), (length, 1))
        token_ids[0], topk_logprobs[0] = 0, -99999.0
        targets = request.options.target_tokens
        prompt = results.PromptResult(
            logprobs=logprobs if request.options.logprobs else None,
            topk=results.TopK(token_ids=token_ids, logprobs=topk_logprobs) if k else None,
            targets=None if targets is None else np.where(targets < 0, 0, -3).astype(np.float32),
        )
    return results.SampleOutput(
        sequences=(sequence,) * request.num_samples, prompt=prompt, target_cells=request.options.target_cells
    )


@contextmanager
def scripted_engine(data_dir: Path) -> Generator[ScriptedEngine]:
    """Run an engine on a thread."""
    store = Store.open(data_dir, role="engine")
    engine = ScriptedEngine(store)
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        yield engine
    finally:
        engine.stopped = True
        store.wake()
        thread.join()
        store.close()
