"""Records the usage of requests, and once per hour the storage of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Work
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import ForwardBackwardOutput, OptimStepOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.extension import ResultObserver, RetentionRule
from skyrl_tx.engine.metrics import SampledTokenCounts
from skyrl_tx.engine.request_log import QueuedRequest, WriteRows
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store.database import Store
from skyrl_tx.store.sampling_sessions import Origin


@dataclass(frozen=True, slots=True)
class UsageObserver(ResultObserver):
    """Adds the work of each completed request to the usage of its session and model."""

    store: Store
    settings: EngineSettings

    def observe_pass(
        self, queued: QueuedRequest, model: LiveModel, output: ForwardBackwardOutput, num_tokens: int, time: DeviceTime
    ) -> WriteRows:
        """Count the tokens and the device seconds of a pass."""
        assert queued.model_pass is not None
        kind = "training" if queued.model_pass.backward else "forward"
        return _add(queued, model.model_id, [Work(kind=kind, tokens=num_tokens, device_s=time.device_s)])

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> WriteRows:
        """Count the device seconds of an optimizer step."""
        return _add(queued, model.model_id, [Work(kind="training", device_s=time.device_s)])

    def observe_drawn(
        self, queued: QueuedRequest, drawn: SampledTokenCounts, origin: Origin, device_s: float
    ) -> WriteRows:
        """Count computed prompt tokens, prompt tokens from the prefix cache, and sampled tokens."""
        work = [
            Work(kind="prefill", tokens=drawn.prompt),
            Work(kind="sampled", tokens=drawn.sampled, device_s=device_s),
        ]
        if drawn.cached:
            work.append(Work(kind="prefill_cached", tokens=drawn.cached))
        return _add(queued, origin.model_id, work)

    def observe_save(self, queued: QueuedRequest, model_id: ModelId) -> WriteRows:
        """Count a named save."""
        return _add(queued, model_id, [Work(kind="checkpoint")])


def _add(queued: QueuedRequest, model_id: str, work: Sequence[Work]) -> WriteRows:
    return lambda tx, now: usage.add(tx, queued.owner, queued.session_id, model_id, now, work)


RETENTION = (
    RetentionRule(name="usage", prune=lambda tx, clock: usage.prune(tx, clock.now)),
    RetentionRule(name="storage hours", expire=lambda tx, clock: usage.record_storage(tx, clock.now)),
)
