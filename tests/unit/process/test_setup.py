"""Setup of a server process: listening socket, open file limit, garbage collection."""

import asyncio
import gc
import json
import logging
import resource
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from skyrl_tx.process.setup import (
    LOG_FIELDS,
    CannotServe,
    JsonFormatter,
    check_certificate,
    get_url,
    listen,
    raise_file_limit,
    tune_interpreter,
)
from tests.support.certificates import create_certificate
from tests.support.child_process import run_in_own_process


def test_listen_on_a_free_port_and_refusal_of_a_used_one() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert get_url(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(CannotServe, match=rf"127\.0\.0\.1:{port}.*--port"):
            listen("127.0.0.1", port)


def test_url_of_a_wildcard_address_is_loopback() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert get_url(listener).startswith("http://127.0.0.1:")


def test_error_names_an_unknown_host() -> None:
    with pytest.raises(CannotServe, match=r"--host no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def test_accepted_connections_disable_nagle() -> None:
    """Headers and body are two writes, so Nagle's algorithm would add 40 ms to each response."""

    async def nodelay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        async with await asyncio.start_server(serve, sock=listener):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            option = await accepted
            await reader.read()
            writer.close()
            await writer.wait_closed()
        return option

    assert asyncio.run(nodelay()) == 1


def test_file_limit_is_raised_and_never_lowered(tmp_path: Path) -> None:
    run_in_own_process(raise_lowered_limit, tmp_path)


def raise_lowered_limit(_: Path) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    raise_file_limit()
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raised == (min(most, 65_536) if most != resource.RLIM_INFINITY else 65_536, most)


def test_json_line_of_a_model_names_its_session() -> None:
    record = logging.makeLogRecord(
        {"msg": "restored model %s", "args": ("session-7:train:0",), "levelno": logging.INFO}
    )
    record.model_id, record.owner = "session-7:train:0", "ann"
    line = json.loads(JsonFormatter("engine").format(record))
    about = {name: line.get(name) for name in LOG_FIELDS}
    assert about == {"request_id": None, "session_id": "session-7", "model_id": "session-7:train:0", "owner": "ann"}
    assert line["message"] == "restored model session-7:train:0" and line["process"] == "engine"


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.other = self


def test_threads_take_short_turns_and_garbage_collection_skips_present_objects() -> None:
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    try:
        tune_interpreter(full_collection_after=30)
        assert sys.getswitchinterval() == pytest.approx(0.001)
        assert gc.get_threshold()[2] == 30 and gc.get_freeze_count() > 1000
        node = weakref.ref(Node())
        assert node() is not None
        gc.collect()
        assert node() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)


def test_url_of_a_tls_server() -> None:
    with listen("127.0.0.1", 0) as listener:
        assert get_url(listener, "https").startswith("https://127.0.0.1:")


def test_certificate_and_its_key_are_accepted(tmp_path: Path) -> None:
    certificate = create_certificate(tmp_path)
    check_certificate(certificate.certfile, certificate.keyfile)
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.keyfile.read_bytes() + certificate.certfile.read_bytes())
    check_certificate(both, None)
    check_certificate(None, None)


def test_unusable_certificates_are_refused_by_the_name_of_the_setting(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, other = create_certificate(tmp_path), create_certificate(tmp_path / "other")
    missing, nonsense, encrypted = (tmp_path / name for name in ("missing.pem", "nonsense.pem", "encrypted.pem"))
    nonsense.write_text("no certificate")
    command = ["openssl", "pkey", "-in", certificate.keyfile, "-aes256", "-passout", "pass:x", "-out", encrypted]
    subprocess.run(command, check=True)

    for certfile, keyfile, message in (
        (None, certificate.keyfile, "--ssl-keyfile needs .*--ssl-certfile"),
        (missing, certificate.keyfile, "--ssl-certfile .*missing.pem: No such file"),
        (certificate.certfile, missing, "--ssl-keyfile .*missing.pem: No such file"),
        (certificate.certfile, other.keyfile, "--ssl-keyfile .*not the key of the certificate"),
        (certificate.certfile, encrypted, "--ssl-keyfile .*encrypted"),
        (certificate.certfile, None, "--ssl-certfile .*no certificate with its private key"),
        (nonsense, certificate.keyfile, "--ssl-certfile .*no certificate with its private key"),
    ):
        with pytest.raises(CannotServe, match=message):
            check_certificate(certfile, keyfile)
