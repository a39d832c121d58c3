"""A streamed response survives the death of the engine: the same text arrives, each part once."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live_server import LiveServer
from tests.support.with_constants import constants

ENGINE_STARTED = re.compile(r"engine process (\d+)")
pytestmark = pytest.mark.slow
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Natalia", "ignore_eos": True, "n": 2, "logprobs": 0, "return_token_ids": True},
    "/anthropic/api/v1/messages": {"messages": [{"role": "user", "content": "How many clips?"}]},
}


def pieces(path: str, data: dict[str, Any]) -> list[tuple[int, str]]:
    """Return the index and the text of each choice of an event."""
    if path.startswith("/v1"):
        return [(choice["index"], choice["text"]) for choice in data["choices"]]
    return [(0, data["delta"]["text"])] if data["type"] == "content_block_delta" else []


@pytest.mark.parametrize(
    "path", ["/v1/completions", pytest.param("/anthropic/api/v1/messages", marks=pytest.mark.exhaustive)]
)
def test_text_arrives_once_although_the_engine_is_killed(tmp_path: Path, path: str) -> None:
    flags = ("--base-model", "tiny", *constants("backend", decode_slice_tokens=4))
    with (
        LiveServer(tmp_path / "data", flags=flags) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        body = {"model": "tiny", "max_tokens": 240, "seed": 3, **BODIES[path]}
        whole = client.post(path, json=body).json()
        texts, num_events, is_killed = ["", ""], 0, False
        token_ids: list[list[int]] = [[], []]

        with client.stream("POST", path, json={**body, "stream": True}) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                data = json.loads(line.removeprefix("data: "))
                assert "error" not in data, data
                for index, text in pieces(path, data):
                    texts[index] += text
                    num_events += 1
                for choice in data.get("choices", []):
                    token_ids[choice["index"]] += choice["token_ids"]
                if num_events >= 10 and not is_killed:  # an event may have text of both samples
                    os.kill(server.engine_pid, signal.SIGKILL)
                    is_killed = True

        server.wait_for(ENGINE_STARTED, times=2)

    assert num_events > 20, "most of the text came after the kill"
    if path.startswith("/v1"):
        assert texts == [choice["text"] for choice in whole["choices"]]
        assert token_ids == [choice["token_ids"] for choice in whole["choices"]]
    else:
        assert texts[0] == "".join(block["text"] for block in whole["content"])
