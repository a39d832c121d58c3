"""Checks of the tokenizer and the chat template."""

import json
from pathlib import Path

import pytest

from skyrl_tx.tools.doctor.findings import Finding
from skyrl_tx.tools.doctor.machine import check_text
from skyrl_tx.tools.quickstart.model import write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def problems(findings) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def test_the_tiny_model_has_both(subject, model: Path) -> None:
    findings = list(check_text(subject("--base-model", model)))
    assert problems(findings) == [] and [finding.check for finding in findings] == ["tokenizer", "template"]


def test_a_model_without_a_tokenizer(subject, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (found,) = check_text(subject("--base-model", model))
    assert found.level == "warning" and "tokenizer.json" in found.message
    assert problems(check_text(subject("--base-model", model, "--tokenizer-id", write_tiny_model(model / "b")))) == []


def test_an_unknown_end_token(subject, model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<no such token>"}))
    (found,) = problems(check_text(subject("--base-model", model)))
    assert "eos_token" in found.message


def test_a_chat_template_that_fails(subject, model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content.no_such.attribute }}")
    (found,) = problems(check_text(subject("--base-model", model, "--chat-template", template)))
    assert found.level == "error" and "chat template" in found.message
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = model / name
        if path.exists():
            path.unlink()
    found = problems(check_text(subject("--base-model", model)))[-1]
    assert found.level == "warning" and "no chat template" in found.message


def test_tools_are_reported(subject, model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}{{ messages[0].content }}")
    found = list(check_text(subject("--base-model", model, "--chat-template", template)))[-1]
    assert found.level == "ok" and "and tools" in found.message


def test_a_model_of_the_hub_that_is_not_here_is_not_fetched(subject) -> None:
    (found,) = check_text(subject("--base-model", "no-such/model"))
    assert found.level == "ok" and "not examined" in found.message
