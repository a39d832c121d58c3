"""Retention rules of the core, and their execution together with the rules of optional features."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlmodel import Session

from skyrl_tx.contract.ids import ModelId
from skyrl_tx.engine.extension import EngineExtension, RetentionClock, RetentionRule
from skyrl_tx.store import (
    audit,
    checkpoints,
    completions,
    custom_losses,
    pruning,
    recorded_logprobs,
    sampling_sessions,
    sessions,
)


def _expire_checkpoints(tx: Session, clock: RetentionClock) -> None:
    for path in checkpoints.expire(tx, clock.now):
        audit.record(tx, "checkpoint_delete", audit.SERVER, clock.now, path=path, reason="expired")
    checkpoints.purge(tx, clock.now - clock.settings.deletion_undo_s, max_bytes=clock.spare_bytes)


def _release_samplers(tx: Session, clock: RetentionClock) -> None:
    settings = clock.settings
    before = clock.compute_cutoff(settings.sampler_retention_s)
    sampling_sessions.release_unused(tx, before, max_bytes=settings.max_ephemeral_sampler_bytes)


def _finish_sessions(tx: Session, clock: RetentionClock) -> None:
    retention_s = clock.extend(clock.settings.session_retention_s)
    sessions.finish_timed_out(tx, clock.now - retention_s, f"no heartbeat for {retention_s:.0f} s", clock.now)


def _prune_results(tx: Session, clock: RetentionClock) -> int:
    return pruning.prune_results(tx, clock.now, retention_s=clock.extend(clock.settings.result_retention_s))


def _prune_requests(tx: Session, clock: RetentionClock) -> int:
    settings = clock.settings
    return pruning.delete_tombstones(
        tx,
        clock.now,
        retention_s=clock.extend(settings.request_retention_s),
        session_retention_s=clock.extend(settings.session_retention_s),
    )


def _prune_sampling_sessions(tx: Session, clock: RetentionClock) -> int:
    return pruning.delete_sampling_sessions(tx, clock.compute_cutoff(clock.settings.session_retention_s))


def _prune_sessions(tx: Session, clock: RetentionClock) -> int:
    return pruning.delete_finished_sessions(tx, clock.compute_cutoff(clock.settings.run_retention_s))


_CORE_RULES = (
    RetentionRule(name="checkpoints", expire=_expire_checkpoints),
    RetentionRule(name="ephemeral samplers", expire=_release_samplers, prune=_prune_sampling_sessions),
    RetentionRule(name="recorded logprobs", expire=lambda tx, clock: recorded_logprobs.expire(tx, clock.now)),
    RetentionRule(name="custom losses", expire=lambda tx, clock: custom_losses.expire(tx, clock.now)),
    RetentionRule(name="partial results", expire=lambda tx, _: completions.prune_partials(tx)),
    RetentionRule(name="sessions", expire=_finish_sessions, prune=_prune_sessions),
    RetentionRule(name="results", prune=_prune_results),
    RetentionRule(name="requests", prune=_prune_requests),
    RetentionRule(name="audit", prune=lambda tx, clock: audit.expire(tx, clock.now - audit.RETENTION_S)),
)
"""Runs have no rule here: the engine must also discard an expired run, see `Housekeeping.expire`.
"""


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention rules of the core and of all features."""

    rules: Sequence[RetentionRule]

    @classmethod
    def collect(cls, extensions: Sequence[EngineExtension]) -> "Retention":
        """Return the rules of the core and of the given features."""
        return cls((*_CORE_RULES, *(rule for extension in extensions for rule in extension.retention)))

    def expire(self, tx: Session, clock: RetentionClock) -> None:
        """Remove all rows past their retention, for rules with `expire`."""
        for rule in self.rules:
            if rule.expire is not None:
                rule.expire(tx, clock)

    def prune(self, tx: Session, clock: RetentionClock) -> int:
        """Remove some rows past their retention.

        Returns the largest number of rows that one rule removed.
        """
        ended = pruning.delete_ended_models(tx, clock.compute_cutoff(clock.settings.run_retention_s), self.remove_runs)
        return max(ended, *(rule.prune(tx, clock) for rule in self.rules if rule.prune is not None))

    def remove_runs(self, tx: Session, model_ids: Sequence[ModelId]) -> None:
        """Remove the dependent rows of runs that are removed."""
        for rule in self.rules:
            if rule.on_removal is not None:
                rule.on_removal(tx, model_ids)

    def delete_runs(self, tx: Session, model_ids: Sequence[ModelId]) -> None:
        """Remove the dependent rows of runs that a client or the operator deleted."""
        self.remove_runs(tx, model_ids)
        for rule in self.rules:
            if rule.on_deletion_by_user is not None:
                rule.on_deletion_by_user(tx, model_ids)
