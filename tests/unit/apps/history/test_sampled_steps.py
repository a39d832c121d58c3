"""Sums over the samples of each step, separate for each owner and deleted with the run."""

from dataclasses import replace

from skyrl_tx.apps.history import points
from skyrl_tx.apps.history.points import SampleTotals
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.store.database import Store

RUN, OTHER = ModelId("m"), ModelId("n")
FOUR = SampleTotals(step=2, samples=4, cut=1, tokens=40, scored_tokens=30, logprob_sum=-6.0)


def add(store: Store, sampled: SampleTotals, model_id: ModelId = RUN, owner: str = "ann") -> None:
    store.write(lambda tx: points.add_sampled(tx, model_id, owner, sampled))


def read_steps(store: Store, model_id: ModelId = RUN, **where: int) -> list[SampleTotals]:
    return store.read(lambda tx: points.read_sampled(tx, model_id, "ann", **where))


def test_samples_of_a_step_add_up_for_their_owner(store: Store) -> None:
    add(store, FOUR)
    add(store, FOUR)
    add(store, FOUR, owner="bob")
    add(store, replace(FOUR, step=3))
    total = SampleTotals(step=2, samples=8, cut=2, tokens=80, scored_tokens=60, logprob_sum=-12.0)
    assert read_steps(store) == [total, replace(FOUR, step=3)]
    assert read_steps(store, after_step=2) == read_steps(store, limit=1) == [replace(FOUR, step=3)]


def test_sums_go_with_their_run(store: Store) -> None:
    add(store, FOUR)
    add(store, FOUR, OTHER)
    store.write(lambda tx: points.remove_runs(tx, [RUN]))
    assert read_steps(store) == [] and read_steps(store, OTHER) == [FOUR]
