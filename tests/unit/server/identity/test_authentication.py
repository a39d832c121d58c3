"""Credentials: how long they are cached, and limits for wrong keys from one address."""

import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.server.errors import ApiError
from skyrl_tx.server.identity import authentication
from skyrl_tx.server.identity.authentication import Authenticator, SigningKey
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from skyrl_tx.store.database import Store

NEAR, FAR = "10.0.0.1", "10.0.0.2"


class Clock:
    """`time` of the module under test; `now` is monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(authentication, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))


@pytest.fixture
def make(tmp_path: Path, store: Store) -> Callable[..., Authenticator]:
    def make(**settings: int) -> Authenticator:
        api = ApiSettings(data_dir=tmp_path, base_model="m", **settings)
        return Authenticator(api, store, SigningKey.from_data_dir(tmp_path))

    return make


def new_key(store: Store, **options: float | None) -> tuple[str, int]:
    key, row = store.write(lambda tx: keys.create(tx, owner="ann", scope="user", name="k", note="", now=1.0, **options))
    assert row.key_id is not None
    return key, row.key_id


def refusal(authenticator: Authenticator, credential: str, address: str = NEAR) -> ApiError:
    with pytest.raises(ApiError) as raised:
        authenticator.authenticate(credential, address)
    return raised.value


def test_work_of_a_key_counts_for_the_key_that_created_it(store: Store, make) -> None:
    (key, key_id), authenticator = new_key(store), make()
    child, child_id = new_key(store, parent_id=key_id)
    principals = [authenticator.authenticate(credential, NEAR) for credential in (key, child)]
    assert [(caller.key_id, caller.quota_key_id) for caller in principals] == [(key_id, key_id), (child_id, key_id)]


def test_use_of_a_remembered_key_does_not_prolong_it(store: Store, make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (key, key_id), authenticator = Clock(monkeypatch), new_key(store), make()
    token = authenticator.issue_token(authenticator.authenticate(key, NEAR))
    authenticator.authenticate(token, NEAR)
    store.write(lambda tx: keys.revoke(tx, key_id, 2.0))
    clock.now += 0.9
    assert authenticator.authenticate(key, NEAR) == authenticator.authenticate(token, NEAR)
    clock.now += 0.2
    assert authenticator.get_cached(key) is None and authenticator.get_cached(token) is None
    for credential in (key, token):
        assert refusal(authenticator, credential).status == HTTPStatus.UNAUTHORIZED


def test_expired_key_and_its_tokens_are_refused(store: Store, make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, (key, _), authenticator = Clock(monkeypatch), new_key(store, expires_at=time.time() + 60), make()
    token = authenticator.issue_token(authenticator.authenticate(key, NEAR))
    monkeypatch.setattr(authentication.time, "time", lambda: time.time() + 61)
    clock.now += 2
    for credential in (key, token):
        error = refusal(authenticator, credential)
        assert error.status == HTTPStatus.UNAUTHORIZED and "this key expired at 20" in error.detail


def test_last_use_is_recorded_without_a_commit_for_each_call(store: Store, make, monkeypatch) -> None:
    clock, (key, _), authenticator = Clock(monkeypatch), new_key(store), make()
    written: list[int] = []
    record = keys.record_use
    monkeypatch.setattr(keys, "record_use", lambda tx, key_id, now: written.append(key_id) or record(tx, key_id, now))
    for _ in range(5):
        authenticator.authenticate(key, NEAR)
        clock.now += 2
        store.write(lambda tx: None)  # everything queued earlier is now committed
    assert len(written) == 1
    row = store.read(lambda tx: keys.find(tx, key))
    assert row is not None and row.last_used_at is not None and abs(row.last_used_at - time.time()) < 60


def test_wrong_keys_from_one_address_are_refused_without_queries(store: Store, make, monkeypatch) -> None:
    clock, (key, revoked_id), authenticator = Clock(monkeypatch), new_key(store), make(failed_key_limit=3)
    store.write(lambda tx: keys.revoke(tx, revoked_id, 2.0))
    valid, _ = new_key(store)
    for number in range(3):
        assert refusal(authenticator, f"tml-{number}").status == HTTPStatus.UNAUTHORIZED
        clock.now += 0.1
    reads: list[object] = []
    read = store.read
    monkeypatch.setattr(store, "read", lambda work: reads.append(work) or read(work))

    for number in range(50):
        error = refusal(authenticator, "nonsense" if number % 2 else f"tml-{number}")
        assert error.status == HTTPStatus.TOO_MANY_REQUESTS
        assert error.headers is not None and int(error.headers["Retry-After"]) in (2, 3)

    assert len(reads) <= 1
    assert refusal(authenticator, "tml-0", FAR).status == HTTPStatus.UNAUTHORIZED, "another address"

    principal = authenticator.authenticate(valid, NEAR)
    assert principal.owner == "ann", "a valid key from the same address"
    assert authenticator.authenticate(authenticator.issue_token(principal), NEAR) == principal
    assert refusal(authenticator, key).status == HTTPStatus.UNAUTHORIZED, "a revoked key is not a guess"

    clock.now += 3
    new, _ = new_key(store)
    assert authenticator.authenticate(new, NEAR).owner == "ann"


def test_revoked_and_missing_keys_are_no_guesses(store: Store, make, monkeypatch) -> None:
    clock, (key, key_id), authenticator = Clock(monkeypatch), new_key(store), make(failed_key_limit=1)
    token = authenticator.issue_token(authenticator.authenticate(key, NEAR))
    store.write(lambda tx: keys.revoke(tx, key_id, 2.0))
    clock.now += 2
    for credential in (key, token, "") * 3:
        assert refusal(authenticator, credential).status == HTTPStatus.UNAUTHORIZED
