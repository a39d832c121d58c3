"""A file of `--chat-template` that is broken while the server runs."""

import logging
from http import HTTPStatus
from pathlib import Path

import pytest

from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.live_api import live_api


def test_clients_get_a_server_error_without_the_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = tmp_path / "chat.jinja"
    model = str(write_tiny_model(tmp_path / "model"))
    settings = ApiSettings(port=0, data_dir=tmp_path / "data", base_model=model, chat_template=template)
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}

    with live_api(settings) as server, caplog.at_level(logging.ERROR):
        for path, kind in (("/v1/chat/completions", "server_error"), ("/anthropic/api/v1/messages", "api_error")):
            response = server.client.post(path, json=body)
            assert response.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
            assert response.json()["error"]["type"] == kind
            assert "chat template; the server's log" in response.text and str(template) not in response.text
            assert f"{template}: No such file or directory" in caplog.text
            caplog.clear()
