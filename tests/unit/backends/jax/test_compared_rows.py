"""Comparisons of row counts are made once for each setup, also over restarts."""

import logging
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.backends.jax.sample import slice_rows
from skyrl_tx.backends.jax.sample.slice_rows import ComparedRows, RowCounts

DIFFERENT = 8
"""A row count whose rows have other bits than rows of the largest count."""


def start(directory: Path, *setup: object) -> tuple[RowCounts, list[int]]:
    """Return the row counts of a server, and the counts that it decodes rows with."""
    decoded: list[int] = []

    def decode_rows(count: int, *_: bool) -> np.ndarray:
        decoded.append(count)
        return np.zeros(count) + (count == DIFFERENT)

    return RowCounts.for_single_cpu(16, decode_rows, ComparedRows(directory, *setup)), decoded


def test_a_restart_compares_nothing_again(tmp_path: Path) -> None:
    counts, decoded = start(tmp_path, "model", 64)
    assert counts.is_used(2, 0) and not counts.is_used(DIFFERENT, 0) and decoded == [2, 16, 8, 16]
    again, decoded = start(tmp_path, "model", 64)
    assert again.is_compared(2, 0) and again.is_used(2, 0) and not again.is_used(DIFFERENT, 0)
    assert decoded == []


def test_rows_with_adapters_or_adjusted_logits_are_compared_separately(tmp_path: Path) -> None:
    start(tmp_path)[0].is_used(2, 0)
    again, decoded = start(tmp_path)
    assert not again.is_compared(2, 8) and not again.is_compared(2, 0, True)
    assert again.is_used(2, 8) and again.is_used(2, 8, True) and decoded == [2, 16, 2, 16]
    last, decoded = start(tmp_path)
    assert all(last.is_used(2, *kind) for kind in ((0, False), (8, False), (8, True))) and decoded == []


@pytest.mark.parametrize("changed", ["setup", "flags", "code"])
def test_another_setup_is_compared_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    start(tmp_path, "model")[0].is_used(2, 0)
    if changed == "flags":
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    if changed == "code":
        monkeypatch.setattr(slice_rows, "_hash_sources", lambda: "changed")
    counts, decoded = start(tmp_path, "other model" if changed == "setup" else "model")
    assert counts.is_used(2, 0) and decoded == [2, 16]


@pytest.mark.parametrize("content", ["", "[]", '{"2/16 rows": 1}', "\0"])
def test_a_broken_file_is_replaced(tmp_path: Path, content: str) -> None:
    start(tmp_path)[0].is_used(2, 0)
    (path,) = (tmp_path / "compared_rows").iterdir()
    path.write_text(content)
    counts, decoded = start(tmp_path)
    assert counts.is_used(2, 0) and decoded == [2, 16]
    assert start(tmp_path)[0].is_compared(2, 0)


def test_a_directory_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "compared_rows").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert start(tmp_path)[0].is_used(2, 0)
    assert "cannot write which row counts were compared" in caplog.text
