"""The quickstart's server, with the fake backend."""

import urllib.request

import pytest

from skyrl_tx.tools.quickstart.run import ServerFailed, serve

FAKE = ("--base-model", "fake", "--backend", "fake")


def test_server_stops_when_the_context_is_left(tmp_path):
    log = tmp_path / "server.log"
    with pytest.raises(KeyboardInterrupt), serve(tmp_path / "data", log, *FAKE) as url:
        assert urllib.request.urlopen(f"{url}/api/v1/healthz").status == 200
        raise KeyboardInterrupt
    assert "stopping" in log.read_text()


def test_error_contains_the_log_of_a_server_that_exits(tmp_path):
    with (
        pytest.raises(ServerFailed, match=r"(?s)exited.*--no-such-flag"),
        serve(tmp_path / "data", tmp_path / "server.log", *FAKE, "--no-such-flag"),
    ):
        pass
