"""Properties of a backend that the engine stores and sends."""

import msgspec
import numpy as np
import pytest

from skyrl_tx.contract.capabilities import plain_text
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend


class VersionText(str):
    """A string subclass that msgspec does not know, for example `torch.__version__`."""


def test_a_fingerprint_may_hold_subclasses_of_str():
    with pytest.raises(TypeError):
        msgspec.json.encode({"torch": VersionText("2.9")})
    plain = plain_text({"torch": VersionText("2.9")})
    assert msgspec.json.decode(msgspec.json.encode(plain)) == {"torch": "2.9"}


def test_a_fingerprint_of_other_types_is_refused_at_the_start():
    with pytest.raises(AssertionError, match="steps"):
        plain_text({"steps": 3})  # type: ignore[dict-item]


def test_capabilities_hold_plain_text(monkeypatch):
    monkeypatch.setattr(np, "__version__", VersionText("2.3"))
    fingerprint = FakeBackend("tiny", FakeConfig()).start().fingerprint
    assert {type(value) for value in fingerprint.values()} == {str}
