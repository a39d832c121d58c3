"""Kept samples: whole groups, visible to their owner, marked when trained on, limited by age and size."""

import numpy as np

from skyrl_tx.apps.history import kept_samples
from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptSample, TrainedSequence
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.store.database import Store

RUN = ModelId("run")
PROMPT = np.arange(5, dtype=np.int32)


def group(name: str, *, step: int | None = 1, owner: str = "ann", count: int = 2, model: str = RUN) -> KeptGroup:
    samples = [
        KeptSample(
            sequence_id=f"seq-{name}-{index}",
            tokens=np.arange(index + 1, dtype=np.int32),
            logprobs=np.full(index + 1, -0.5 * index, np.float32),
            stop_reason="stop",
            trainer_gap=0.125 * index or None,
        )
        for index in range(count)
    ]
    return KeptGroup(request_id=RequestId(name), model_id=model, step=step, owner=owner, prompt=PROMPT, samples=samples)


def add(store: Store, *new: KeptGroup, now: float = 10.0) -> None:
    store.write(lambda tx: [kept_samples.add(tx, group, now) for group in new])


def read_step(store: Store, step: int | None = 1, limit: int = 10, owner: str | None = "ann") -> list[KeptGroup]:
    return store.read(lambda tx: kept_samples.read_step(tx, RUN, step, limit, owner=owner))


def names(found: list[KeptGroup]) -> list[str]:
    return [group.request_id for group in found]


def test_group_is_read_as_it_was_written(store: Store) -> None:
    new = group("a", count=12)
    add(store, new)
    (found,) = read_step(store)
    assert found.prompt.tolist() == [0, 1, 2, 3, 4] and found.owner == "ann" and found.step == 1
    assert [sample.sequence_id for sample in found.samples] == [sample.sequence_id for sample in new.samples]
    assert found.samples[2].tokens.tolist() == [0, 1, 2] and found.samples[2].logprobs.tolist() == [-1.0] * 3
    assert [sample.trainer_gap for sample in found.samples[:3]] == [None, 0.125, 0.25]
    assert found.samples[0].advantage is None and found.samples[0].trained_step is None
    assert new.num_bytes == 4 * 5 + 8 * sum(range(1, 13))


def test_sequence_that_is_written_again_replaces_the_first_one(store: Store) -> None:
    add(store, group("a"))
    add(store, group("a", count=3), now=11.0)
    (found,) = read_step(store)
    assert len(found.samples) == 3
    assert store.read(lambda tx: kept_samples.list_groups_of_step(tx, RUN, 1, "ann", since=11.0)) == ["a"]


def test_groups_of_a_step_for_their_owner_only(store: Store) -> None:
    add(store, group("a"), group("b"), group("c", owner="bob"), group("d", step=2), group("e", step=None))
    assert names(read_step(store)) == ["a", "b"] and names(read_step(store, owner=None)) == ["a", "b", "c"]
    assert names(read_step(store, limit=1)) == ["a"]
    assert names(read_step(store, step=None)) == ["e"]
    assert store.read(lambda tx: kept_samples.list_steps(tx, RUN, "ann")) == [(2, 1), (1, 2), (None, 1)]
    assert store.read(lambda tx: kept_samples.list_steps(tx, RUN, None)) == [(2, 1), (1, 3), (None, 1)]
    assert store.read(lambda tx: kept_samples.list_groups_of_step(tx, RUN, 1, "bob")) == ["c"]
    assert store.read(lambda tx: kept_samples.list_groups_of_step(tx, RUN, 1, "bob", since=11.0)) == []


def test_training_is_recorded_for_kept_sequences_of_the_same_owner(store: Store) -> None:
    add(store, group("a"), group("b", owner="bob"))
    wanted = ["seq-a-1", "seq-b-0", "seq-unknown"]
    assert store.read(lambda tx: kept_samples.find_kept(tx, "ann", wanted)) == {"seq-a-1"}
    trained = [TrainedSequence(sequence_id="seq-a-1", advantage=-1.5, kl=0.25)]
    store.write(lambda tx: kept_samples.record_training(tx, ModelId("m"), 7, trained))
    first, second = read_step(store)[0].samples
    assert (second.advantage, second.kl, second.trained_model_id, second.trained_step) == (-1.5, 0.25, "m", 7)
    assert first.advantage is None
    assert all(sample.advantage is None for sample in read_step(store, owner="bob")[0].samples)
    store.write(lambda tx: kept_samples.record_training(tx, ModelId("m"), 8, []))
    assert read_step(store)[0].samples[1].trained_step == 7


def test_samples_expire(store: Store) -> None:
    add(store, group("a"), now=10.0)
    add(store, group("b"), now=20.0)
    assert store.write(lambda tx: kept_samples.expire(tx, 20.0, limit=1)) == 1
    assert store.write(lambda tx: kept_samples.expire(tx, 20.0)) == 1
    assert names(read_step(store)) == ["b"]


def test_oldest_groups_of_a_run_are_superfluous(store: Store) -> None:
    for number, name in enumerate("cab"):
        add(store, group(name), now=10.0 + number)
    add(store, group("d", owner="bob"), group("e", model="other"), now=1.0)
    size = group("a").num_bytes
    for most, expected in ((3 * size, []), (3 * size - 1, ["c"]), (size, ["a", "c"]), (0, ["b", "a", "c"])):
        assert store.read(lambda tx, most=most: kept_samples.find_superfluous(tx, RUN, "ann", most)) == expected
    store.write(lambda tx: kept_samples.remove(tx, [RequestId("a"), RequestId("c")]))
    assert names(read_step(store)) == ["b"]


def test_samples_go_with_their_runs(store: Store) -> None:
    add(store, group("a"), group("b", model="other"))
    store.write(lambda tx: kept_samples.remove_runs(tx, [RUN]))
    assert read_step(store) == []
    assert names(store.read(lambda tx: kept_samples.read_step(tx, "other", 1, 10, owner="ann"))) == ["b"]
