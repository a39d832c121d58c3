"""`skyrl-tx doctor`: exit status, output, settings."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skyrl_tx.tools.cli import main
from skyrl_tx.tools.doctor import command
from skyrl_tx.tools.doctor.findings import ExaminedServer, Finding, error, ok, warning


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main(["doctor", *map(str, arguments)])
    return status, *capsys.readouterr()


def replace_checks(monkeypatch: pytest.MonkeyPatch, *findings: Finding | Exception) -> list[ExaminedServer]:
    """Replace all checks by ones with the given findings, and return the subjects they receive."""
    seen: list[ExaminedServer] = []

    def make_check(finding: Finding | Exception):
        def check(subject: ExaminedServer) -> Iterator[Finding]:
            seen.append(subject)
            if isinstance(finding, Exception):
                raise finding
            yield finding

        return check

    checks = {f"check{index}": make_check(finding) for index, finding in enumerate(findings)}
    monkeypatch.setattr(command, "_CHECKS", checks)
    return seen


FINE, POOR, BAD = ok("disk", "fast"), warning("limits", "low", "raise them"), error("model", "unknown", "take another")


@pytest.mark.parametrize(("findings", "status"), [([FINE], 0), ([FINE, POOR, FINE], 1), ([POOR, BAD, FINE], 2)])
def test_the_worst_finding_decides_the_exit_status(
    capsys, monkeypatch, tmp_path, findings: Sequence[Finding], status: int
) -> None:
    replace_checks(monkeypatch, *findings)
    found, out, _ = doctor(capsys, "--data-dir", tmp_path)
    assert found == status
    found, out, _ = doctor(capsys, "--data-dir", tmp_path, "--json")
    content = json.loads(out)
    assert found == status and content["level"] == ("ok", "warning", "error")[status]
    assert [Finding(**finding) for finding in content["findings"]] == list(findings)


def test_text_says_what_to_do(capsys, monkeypatch, tmp_path) -> None:
    replace_checks(monkeypatch, FINE, BAD)
    _, out, _ = doctor(capsys, "--data-dir", tmp_path)
    assert out.splitlines() == [
        "ok       disk      fast",
        "error    model     unknown",
        "                   → take another",
        "",
        "1 errors, 0 warnings",
    ]


def test_a_check_that_fails_hides_no_other(capsys, monkeypatch, tmp_path) -> None:
    replace_checks(monkeypatch, ZeroDivisionError("no number"), FINE)
    status, out, _ = doctor(capsys, "--data-dir", tmp_path)
    assert status == 2 and "check0" in out and "ZeroDivisionError: no number" in out and "fast" in out


def test_flags_of_the_server_and_its_file_are_examined(capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("port: 1234\nbase_model: from-file\nbackend_config: {max_lora_rank: 7}\n")
    seen = replace_checks(monkeypatch, FINE)
    status, _, err = doctor(capsys, "--config", tmp_path / "config.yaml", "--host", "::1", "--data-dir", tmp_path)
    assert (status, err) == (0, "")
    settings = seen[-1].settings
    assert (settings.port, settings.host, settings.base_model) == (1234, "::1", "from-file")
    assert settings.backend_config.max_lora_rank == 7
    status, _, err = doctor(capsys, "--port", "many", "--data-dir", tmp_path)
    assert status == 2 and "--port 'many'" in err


def test_the_built_in_model_is_examined_without_a_change_of_the_data_directory(capsys, monkeypatch, tmp_path) -> None:
    seen = replace_checks(monkeypatch, FINE)
    for name in ("tiny", "tiny-qwen3_5"):
        assert doctor(capsys, "--base-model", name, "--data-dir", tmp_path / "new")[0] == 0
        given = seen.pop().settings
        assert given.base_model != name and given.served_model_name == name
    assert not (tmp_path / "new").exists()


def test_without_a_database_there_is_nothing_to_remove(capsys, tmp_path) -> None:
    status, _, err = doctor(capsys, "--remove-unclaimed", "--yes", "--data-dir", tmp_path / "mistyped")
    assert status == 2 and "no database" in err and not (tmp_path / "mistyped").exists()


def test_all_checks_on_the_fake_backend(capsys, tmp_path) -> None:
    """No check fails, and the directory is not changed."""
    flags = ("--base-model", "m", "--backend", "fake", "--port", "0", "--data-dir", tmp_path / "data", "--json")
    status, out, _ = doctor(capsys, *flags)
    findings = [Finding(**finding) for finding in json.loads(out)["findings"]]
    assert {finding.check for finding in findings} >= {"packages", "sdk", "limits", "disk", "database"}
    assert [finding for finding in findings if "check failed" in finding.message] == []
    assert all(finding.advice for finding in findings if finding.level != "ok") and status in (0, 1)
    assert list(tmp_path.iterdir()) == []
