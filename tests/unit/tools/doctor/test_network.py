"""Port and certificate."""

import socket
import subprocess
import time
from contextlib import closing

import pytest

from skyrl_tx.tools.doctor import network
from tests.support.certificates import create_certificate


def test_port(subject) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = str(other.getsockname()[1])
        (found,) = network.check_port(subject("--port", port))
        assert found.level == "error" and port in found.message
        (found,) = network.check_port(subject("--port", port, pids={"api": 17}))
        assert found.level == "ok" and "process 17" in found.message
    (found,) = network.check_port(subject("--port", port))
    assert found.level == "ok"


@pytest.mark.parametrize(("days", "level"), [(60, "ok"), (5, "warning"), (-1, "error")])
def test_expiry_of_the_certificate(subject, tmp_path, days: int, level: str) -> None:
    made = create_certificate(tmp_path, days=days)
    (found,) = network.check_tls(subject("--ssl-certfile", made.certfile, "--ssl-keyfile", made.keyfile))
    assert found.level == level, found
    if level == "ok":
        ends = subprocess.run(["openssl", "x509", "-enddate", "-noout", "-in", made.certfile], capture_output=True)
        assert time.strftime("%Y-%m-%d", time.gmtime(time.time() + 60 * 86_400)) in found.message, ends.stdout


def test_a_key_that_does_not_fit_is_an_error(subject, tmp_path) -> None:
    made = create_certificate(tmp_path)
    (found,) = network.check_tls(
        subject("--ssl-certfile", made.certfile, "--ssl-keyfile", tmp_path / "authority-key.pem")
    )
    assert found.level == "error" and "--ssl-keyfile" in found.message


def test_plain_http_is_for_loopback_and_proxies(subject) -> None:
    assert list(network.check_tls(subject())) == []
    assert list(network.check_tls(subject("--host", "0.0.0.0", "--trusted-proxies", "10.0.0.1"))) == []
    (found,) = network.check_tls(subject("--host", "0.0.0.0"))
    assert found.level == "warning" and "--ssl-certfile" in found.advice
