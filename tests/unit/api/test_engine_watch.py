"""What those who wait are told of the engine."""

import time
from types import SimpleNamespace

import pytest

from skyrl_tx.api.engine_watch import EngineWatch

FULL = "database x: no space left for it on the disk"


@pytest.mark.parametrize(
    ("age_s", "status", "detail", "trouble", "said"),
    [
        (0, "ready", "", None, None),
        (0, "ready", "", FULL, None),
        (0, "ready", FULL, None, f"the engine waits: {FULL}"),
        (0, "starting", "", None, "the engine is starting"),
        (90, "ready", "", None, "the engine has been silent for 90 s"),
        (90, "ready", FULL, FULL, f"the engine has been silent for 90 s; {FULL}"),
    ],
)
def test_what_is_said_of_the_engine(age_s, status, detail, trouble, said) -> None:
    row = SimpleNamespace(updated_at=time.time() - age_s, status=status, detail=detail)
    watch = EngineWatch(SimpleNamespace(read=lambda _: row, trouble=trouble), silence_s=30.0)
    assert watch.trouble() == said
