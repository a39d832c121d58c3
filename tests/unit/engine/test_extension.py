"""Engine extensions: observers and retention rules, and an engine without extensions."""

from collections.abc import Sequence

import pytest
from sqlmodel import Session

from skyrl_tx.apps.history import points
from skyrl_tx.apps.teams import usage
from skyrl_tx.compose import APPS
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.results import OptimStepOutput
from skyrl_tx.engine.activity import DeviceTime
from skyrl_tx.engine.device_cache import LiveModel
from skyrl_tx.engine.extension import EngineExtension, ResultObserver, Retention, RetentionClock, RetentionRule
from skyrl_tx.engine.request_log import QueuedRequest, WriteRows
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.launch.command import load_engine_extensions
from skyrl_tx.store.database import Store
from tests.support.engine_harness import OWNER, EngineHarness, forward_backward, optim_step, sample


class StepObserver(ResultObserver):
    """Counts the optimizer steps of each model and writes nothing else."""

    def __init__(self, _store: Store, _settings: EngineSettings) -> None:
        self.seen: list[ModelId] = []
        self.committed: list[ModelId] = []

    def observe_step(
        self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
    ) -> WriteRows:
        self.seen.append(model.model_id)
        return lambda _tx, _now: self.committed.append(model.model_id)


def train_and_sample(harness: EngineHarness) -> ModelId:
    """Run a pass, an optimizer step and a sample."""
    model_id, _ = harness.create()
    harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    sampled = harness.submit(sample())
    harness.run(step, sampled)
    assert harness.result(step).metrics and harness.result(sampled).sequences
    return model_id


def test_an_engine_without_features_works_and_records_nothing(harness: EngineHarness) -> None:
    harness.extensions = []
    model_id = train_and_sample(harness)
    assert harness.api.read(lambda tx: points.read_points(tx, model_id)) == []
    assert harness.api.read(lambda tx: usage.read_totals(tx, OWNER, 0.0)) == []


def test_a_feature_observes_only_what_it_overrides(harness: EngineHarness) -> None:
    made: list[StepObserver] = []

    def make(store: Store, settings: EngineSettings) -> StepObserver:
        made.append(StepObserver(store, settings))
        return made[-1]

    harness.extensions = [EngineExtension(observer=make), *harness.extensions]
    model_id = train_and_sample(harness)
    (observer,) = made
    assert observer.seen == observer.committed == [model_id]
    assert len(harness.api.read(lambda tx: points.read_points(tx, model_id))) == 2, "other observers record as before"


def test_rows_of_an_observer_are_committed_with_the_result_or_not_at_all(harness: EngineHarness) -> None:
    class Failing(StepObserver):
        def observe_step(
            self, queued: QueuedRequest, model: LiveModel, output: OptimStepOutput, time: DeviceTime
        ) -> WriteRows:
            def fail(tx: Session, now: float) -> None:
                raise LookupError("no such row")

            return fail

    model_id, _ = harness.create()
    step = harness.submit(optim_step(), model_id=model_id, seq_id=1)
    complete, harness.extensions = harness.extensions, [*harness.extensions, EngineExtension(observer=Failing)]
    with pytest.raises(LookupError, match="no such row"):
        harness.run(step)
    assert harness.api.read(lambda tx: points.read_points(tx, model_id)) == [], (
        "the first observer's rows are not there"
    )
    harness.extensions = complete
    harness.run(step)
    assert len(harness.api.read(lambda tx: points.read_points(tx, model_id))) == 1


def test_rules_of_all_features_have_names_of_their_own() -> None:
    names = [rule.name for rule in Retention.collect(load_engine_extensions(APPS)).rules]
    assert len(names) == len(set(names)) and {"requests", "points", "usage"} <= set(names)


def test_rules_of_a_feature_run_with_those_of_the_core(harness: EngineHarness) -> None:
    calls: list[tuple[str, object]] = []

    def note(name: str, result: int = 0):
        def run(_tx: Session, about: object) -> int:
            calls.append((name, about))
            return result

        return run

    def remove(_tx: Session, model_ids: Sequence[ModelId]) -> None:
        calls.append(("remove_runs", model_ids))

    rule = RetentionRule(
        name="notes",
        expire=note("expire"),
        prune=note("prune", 7),
        on_removal=remove,
        on_deletion_by_user=note("delete_runs"),
    )
    retention = Retention.collect([EngineExtension(retention=[rule])])
    clock = RetentionClock(now=100.0, settings=harness.settings, extend=lambda limit_s: limit_s)
    run = ModelId("run")
    harness.api.write(lambda tx: retention.expire(tx, clock))
    assert harness.api.write(lambda tx: retention.prune(tx, clock)) == 7

    harness.api.write(lambda tx: retention.delete_runs(tx, [run]))
    assert calls == [
        ("expire", clock),
        ("remove_runs", []),
        ("prune", clock),
        ("remove_runs", [run]),
        ("delete_runs", [run]),
    ]
