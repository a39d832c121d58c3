"""Progress of long work is logged, and visible while it lasts."""

import logging
import re

import pytest

from skyrl_tx.process import progress


def test_a_description_is_visible_until_its_context_ends() -> None:
    with progress.report_progress(lambda: "compiled 7 of 9 programs"):
        assert progress.get_progress() == "compiled 7 of 9 programs"
    assert progress.get_progress() is None


def test_bytes_and_rate_are_visible_until_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PERIOD_S", 0.0)
    with caplog.at_level(logging.INFO):
        task = progress.ByteProgress("loading weights", 3_000_000_000)
        task.add(1_500_000_000)
        assert re.fullmatch(r"loading weights: 1\.5 of 3\.0 GB, [\d.]+ GB/s", progress.get_progress() or "")
        task.close()
    assert progress.get_progress() is None
    assert caplog.records[0].message.split(",")[0] == "loading weights: 1.5 of 3.0 GB"
    assert caplog.records[-1].message.startswith("loading weights: 1.50 GB in ")
