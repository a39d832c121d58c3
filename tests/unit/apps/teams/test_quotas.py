"""Quotas and weights: rows, audit log entries, and the rules that apply to a subject."""

import pytest

from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.quotas import Account, Quota, Rules, Subject, read_quota_uses
from skyrl_tx.contract.errors import UserError
from skyrl_tx.store import audit, keys
from skyrl_tx.store.audit import Actor
from skyrl_tx.store.database import Store
from skyrl_tx.store.tables import ApiKeyRow, OverQuota, QuotaRow

ROOT = Actor("root", 1)


def put(store: Store, subject: str, name: str, value: int | None, at: float = 1.0) -> bool:
    return store.write(lambda tx: quotas.put(tx, Subject.parse(subject), name, value, ROOT, at))


def test_without_rows_there_are_no_rules(store: Store) -> None:
    assert store.read(quotas.read_rules) == Rules()
    assert not Rules().has_limit(*quotas.LIMITS)


def test_own_quotas_replace_those_of_everyone_and_all_subjects_count(store: Store) -> None:
    for subject, value in (("*", 100), ("ann", 200), ("key:7", 50), ("project:*", 70), ("project:math", 90)):
        put(store, subject, "models_in_training", value)
    rules = store.read(quotas.read_rules)

    def values(account: Account) -> list[tuple[str, int]]:
        return [(str(quota.subject), quota.value) for quota in rules.list_account_quotas("models_in_training", account)]

    assert values(Account("ann")) == [("ann", 200)]
    assert values(Account("bob", 3, "chat")) == [("bob", 100), ("project:chat", 70)]
    assert values(Account("bob", 7, "math")) == [("bob", 100), ("key:7", 50), ("project:math", 90)]
    assert rules.list_account_quotas("checkpoint_bytes", Account("ann")) == []
    assert rules.has_limit("models_in_training") and not rules.has_limit("checkpoint_bytes")


def test_a_key_that_another_key_created_has_no_quota_itself(store: Store) -> None:
    def create(parent_id: int | None) -> ApiKeyRow:
        _, row = store.write(
            lambda tx: keys.create(tx, owner="ann", scope="user", name="k", note="", now=1.0, parent_id=parent_id)
        )
        return row

    parent = create(None)
    child = create(parent.key_id)
    assert put(store, f"key:{parent.key_id}", "models_in_training", 4)
    with pytest.raises(UserError, match=f"key:{child.key_id}: .* set the quota of key:{parent.key_id}"):
        put(store, f"key:{child.key_id}", "models_in_training", 4)
    assert not put(store, f"key:{child.key_id}", "models_in_training", None)
    uses = store.read(lambda tx: read_quota_uses(tx, quotas.read_rules(tx), "ann", 2.0))
    assert [str(use.quota.subject) for use in uses] == [f"key:{parent.key_id}"]


def test_weights_are_of_owners(store: Store) -> None:
    put(store, "ann", "weight", 3)
    assert store.read(quotas.read_rules).weights == {"ann": 3}
    for subject in ("*", "key:1", "project:x"):
        with pytest.raises(UserError, match="only a single owner can have a weight"):
            put(store, subject, "weight", 2)
    put(store, "bob", "weight", 0)
    assert store.read(quotas.read_rules).weights == {"ann": 3, "bob": 0}
    for value in (-1, 1001):
        with pytest.raises(UserError, match=f"weight {value}: must be from 0 to 1000"):
            put(store, "ann", "weight", value)


def test_changes_are_in_the_audit_log(store: Store) -> None:
    put(store, "ann", "checkpoint_bytes", 5, 1.0)
    put(store, "ann", "checkpoint_bytes", 9, 2.0)
    assert put(store, "ann", "checkpoint_bytes", None, 3.0)
    assert not put(store, "ann", "checkpoint_bytes", None, 4.0)
    put(store, "key:2", "models_in_training", 1, 5.0)
    put(store, "ann", "weight", 2, 6.0)
    about = {"subject": "ann", "limit": "checkpoint_bytes"}
    assert [(row.at, row.event, row.details) for row in store.read(audit.list_entries)] == [
        (1.0, "organization_quota_set", {**about, "value": 5}),
        (2.0, "organization_quota_set", {**about, "value": 9, "before": 5}),
        (3.0, "organization_quota_set", {**about, "before": 9, "removed": True}),
        (5.0, "organization_quota_set", {"subject": "key:2", "limit": "models_in_training", "value": 1}),
        (6.0, "organization_weight_set", {"subject": "ann", "value": 2}),
    ]
    assert store.read(quotas.read_rules).list_account_quotas("checkpoint_bytes", Account("ann")) == []


def test_only_quotas_of_a_day_fail(store: Store) -> None:
    ann, own = Subject("owner", "ann"), Account("ann")

    def put_over(name: str, over: OverQuota) -> None:
        store.write(lambda tx: quotas.put(tx, ann, name, 7, ROOT, 1.0, over=over))

    put_over("training_tokens_per_day", "fail")
    (quota,) = store.read(quotas.read_rules).list_account_quotas("training_tokens_per_day", own)
    assert quota == Quota(ann, "training_tokens_per_day", 7, "fail")
    put_over("training_tokens_per_day", "wait")
    assert store.read(quotas.read_rules).list_account_quotas("training_tokens_per_day", own)[0].over == "wait"
    assert [row.details.get("over") for row in store.read(audit.list_entries)] == ["fail", None]
    for name in ("models_in_training", "checkpoint_bytes", "weight"):
        with pytest.raises(
            UserError, match=f"over 'fail': not possible for {name}, only for the daily limits training_tokens_per_day"
        ):
            put_over(name, "fail")


@pytest.mark.parametrize("name", ["training_steps", "over", "Weight", ""])
def test_unknown_limits_are_refused_by_name(store: Store, name: str) -> None:
    with pytest.raises(UserError, match=f"limit '{name}': unknown.*training_tokens_per_day.*weight"):
        put(store, "ann", name, 1)
    assert store.read(quotas.list_rows) == []


@pytest.mark.parametrize("name", quotas.DROPPED_LIMITS)
def test_dropped_limits_can_be_removed_and_not_set(store: Store, name: str) -> None:
    store.write(lambda tx: tx.add(QuotaRow(subject_kind="key", subject="3", name=name, value=9)))
    with pytest.raises(UserError, match=f"limit '{name}': this limit no longer exists.*training_tokens_per_day"):
        put(store, "key:3", name, 1)
    assert store.read(quotas.list_without_effect) == [f"{name} of key:3"]
    assert store.read(quotas.read_rules) == Rules()
    assert put(store, "key:3", name, None) and store.read(quotas.list_rows) == []


@pytest.mark.parametrize(
    ("name", "value", "is_possible"),
    [
        ("training_tokens_per_day", 0, False),
        ("models_in_training", 0, True),
        ("checkpoint_bytes", 0, True),
        ("sample_tokens_per_day", 10**18, True),
        ("sample_tokens_per_day", 10**18 + 1, False),
        ("checkpoint_bytes", -1, False),
    ],
)
def test_values_have_bounds(store: Store, name: str, value: int, is_possible: bool) -> None:
    if is_possible:
        put(store, "ann", name, value)
        assert store.read(quotas.read_rules).list_account_quotas(name, Account("ann")) == [
            Quota(Subject("owner", "ann"), name, value)
        ]
    else:
        with pytest.raises(UserError, match=f"{name} {value}: must be from"):
            put(store, "ann", name, value)


@pytest.mark.parametrize("text", ["", "team:x", "key:", "key:one", "owner:", "a\nb", "key:0123456789", "x" * 300])
def test_subjects_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="subject "):
        Subject.parse(text)


def test_subjects_as_text() -> None:
    texts = ["ann", "key:3", "project:a:b", "*", "project:*"]
    assert [str(Subject.parse(text)) for text in texts] == texts
    assert Subject.parse("owner:ann") == Subject("owner", "ann")
    assert Subject.parse("project:a:b").label == "project a:b"
