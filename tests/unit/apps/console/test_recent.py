import pytest

from skyrl_tx.apps.console.recent import Recent


def test_a_value_is_computed_once_for_a_while_and_for_each_key() -> None:
    now, calls = [0.0], []
    recent: Recent[str] = Recent(1.0, lambda: now[0])

    def value(key: str) -> str:
        return recent.get(key, lambda: calls.append(key) or f"{key} at {now[0]}")

    assert (value("ann"), value("ann"), value("bob")) == ("ann at 0.0", "ann at 0.0", "bob at 0.0")
    now[0] = 0.9
    assert value("ann") == "ann at 0.0"
    now[0] = 1.0
    assert value("ann") == "ann at 1.0" and calls == ["ann", "bob", "ann"]


def test_an_error_is_not_kept() -> None:
    recent: Recent[int] = Recent(1.0)
    with pytest.raises(ZeroDivisionError):
        recent.get("a", lambda: 1 // 0)
    assert recent.get("a", lambda: 2) == 2


def test_old_keys_are_forgotten() -> None:
    recent: Recent[int] = Recent(100.0)
    for number in range(257):
        recent.get(number, lambda: 1)
    assert recent.get(0, lambda: 2) == 2 and recent.get(256, lambda: 2) == 1
