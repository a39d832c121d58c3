"""The limit for wrong keys from one network."""

from skyrl_tx.server.identity import authentication
from skyrl_tx.server.identity.authentication import FailedKeys


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_one_more_failure_is_allowed_every_three_seconds() -> None:
    clock = Clock()
    failed = FailedKeys(5, clock)
    for _ in range(5):
        assert failed.get_wait_s("10.0.0.1") == 0
        failed.record("10.0.0.1")
    assert failed.get_wait_s("10.0.0.1") == 3 and failed.get_wait_s("10.0.0.2") == 0
    clock.now += 3
    assert failed.get_wait_s("10.0.0.1") == 0
    failed.record("10.0.0.1")
    assert failed.get_wait_s("10.0.0.1") == 3
    clock.now += 1e6
    assert failed.get_wait_s("10.0.0.1") == 0


def test_addresses_of_an_ipv6_network_count_together() -> None:
    failed = FailedKeys(1, Clock())
    failed.record("2001:db8::1")
    assert failed.get_wait_s("2001:db8::ffff:2") > 0 and failed.get_wait_s("2001:db8:0:1::1") == 0


def test_ipv4_clients_of_a_server_on_ipv6_count_separately() -> None:
    failed = FailedKeys(1, Clock())
    failed.record("::ffff:10.0.0.1")
    assert failed.get_wait_s("10.0.0.1") > 0 and failed.get_wait_s("::ffff:10.0.0.2") == 0


def test_memory_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(authentication, "_MAX_NETWORKS", 3)
    failed = FailedKeys(1, Clock())
    for number in range(5):
        failed.record(f"10.0.0.{number}")
    assert [failed.get_wait_s(f"10.0.0.{number}") > 0 for number in range(5)] == [False, False, True, True, True]


def test_zero_is_no_limit() -> None:
    failed = FailedKeys(0, Clock())
    failed.record("10.0.0.1")
    assert failed.get_wait_s("10.0.0.1") == 0
