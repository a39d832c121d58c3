"""Connection limits on real sockets, which apply before any API key is checked."""

import logging
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from skyrl_tx.server.http.connections import compute_max_connections, normalize_address
from skyrl_tx.server.settings import ApiSettings
from tests.support.child_process import run_in_own_process
from tests.support.live_api import Server, live_api
from tests.support.polling import until

TIMEOUT_S = 1.0
MAX_PER_ADDRESS = 12
HEAD = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def settings(data_dir: Path, **values: object) -> ApiSettings:
    limits = {
        "max_connections_per_address": MAX_PER_ADDRESS,
        "header_timeout_s": TIMEOUT_S,
        "body_timeout_s": TIMEOUT_S,
    }
    return ApiSettings.model_validate(
        {"port": 0, "data_dir": data_dir, "base_model": "fake", "retrieve_hold_s": 2.5, **limits, **values}
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with live_api(settings(tmp_path_factory.mktemp("data"))) as server:
        yield server


@pytest.fixture(autouse=True)
def _no_connections_left(server: Server) -> Iterator[None]:
    yield
    server.client.close()
    server.client = httpx.Client(base_url=server.url, timeout=10)
    until(lambda: server.api.connections.num_open == 0)


def connect(server: Server, sent: bytes = b"") -> socket.socket:
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), timeout=10)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """Wait for the server to close the connection, and return whether it did."""
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def read_status(connection: socket.socket) -> int:
    return int(connection.recv(1000)[9:12])


def num_accepted_bytes(server: Server, first: bytes, piece: bytes, num_pieces: int) -> int:
    """Send pieces until the server closes the connection, and return the number of bytes sent."""
    sent = 0
    with connect(server, first) as connection:
        try:
            for _ in range(num_pieces):
                connection.sendall(piece)
                sent += len(piece)
        except ConnectionError:
            return sent
        raise AssertionError(f"the server took {sent} bytes")


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        pytest.param(HEAD, b"a:b\r\n" * 13_000, id="many headers"),
        pytest.param(HEAD + b"a: ", b"x" * 65_000, id="one long header"),
        pytest.param(b"GET /", b"x" * 65_000, id="long path"),
        pytest.param(CHUNKED + b"1\r\n{\r\n0\r\n", b"a:b\r\n" * 13_000, id="many trailers"),
        pytest.param(CHUNKED + b"1\r\n{\r\n0\r\na: ", b"x" * 65_000, id="one long trailer"),
        pytest.param(CHUNKED + b"1;", b"x" * 65_000, id="long chunk extension"),
        pytest.param(b"", b"\r\n" * 30_000, id="empty lines"),
    ],
)
def test_endless_head_or_trailer_ends_the_connection(server: Server, first: bytes, piece: bytes) -> None:
    """Bytes beyond the limit were only accepted into socket buffers."""
    assert num_accepted_bytes(server, first, piece, 1000) < 16 * 2**20


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"a: " + b"x" * 30_000 + b"\r\n\r\n", 200),
        (HEAD + b"a: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (HEAD + b"a: b\r\n" * 100 + b"\r\n", 200),
        (HEAD + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"nonsense\r\n\r\n", 400),
    ],
)
def test_head_up_to_the_limit_is_served(
    server: Server, sent: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server, sent) as connection:
        found = read_status(connection)
    assert found == status or (status == 200 and found == 503), "there is no engine"
    assert "Invalid HTTP request" not in caplog.text, "strangers cannot fill the log"


def test_trailers_do_not_become_headers(server: Server) -> None:
    with connect(server, CHUNKED + b"2\r\n{}\r\n0\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n") as connection:
        assert read_status(connection) == 200


def test_pipelined_requests_are_bounded(server: Server) -> None:
    """The first request waits for its result, and every request behind it would take memory."""
    model_id = server.model()
    request_id = server.post("optim_step", model_id=model_id, seq_id=1, adam_params={"learning_rate": 0.1}).json()
    body = b'{"request_id": "%s"}' % request_id["request_id"].encode()
    poll = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with connect(server, poll + (HEAD + b"\r\n") * 5000) as connection:
        assert read_status(connection) == 431


@pytest.mark.parametrize(
    ("sent", "trickle"),
    [
        pytest.param(b"", b"", id="silent"),
        pytest.param(b"GET /api", b"", id="half a line"),
        pytest.param(HEAD, b"a: b\r\n", id="a header at a time"),
        pytest.param(b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\n\r\n"[:-2], b"", id="no end of the head"),
        pytest.param(HEAD + b"Content-Length: 100000\r\n\r\n", b"x", id="a byte of the body at a time"),
        pytest.param(CHUNKED, b"1\r\n \r\n", id="a chunk of a byte at a time"),
    ],
)
def test_slow_request_ends(server: Server, sent: bytes, trickle: bytes) -> None:
    started = time.monotonic()
    with connect(server, sent) as connection:
        connection.settimeout(0.2)
        while True:
            assert time.monotonic() - started < 10
            try:
                connection.sendall(trickle)
                if not connection.recv(1000):
                    break
            except TimeoutError:
                pass
            except ConnectionError:
                break
    assert time.monotonic() - started > TIMEOUT_S / 2


def test_body_with_short_pauses_is_received(server: Server) -> None:
    head = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8192\r\n\r\n{}"
    with connect(server, head) as connection:
        for _ in range(5):
            time.sleep(TIMEOUT_S / 2)
            connection.sendall(b" " * 1638)
        assert read_status(connection) == 200


def test_long_poll_may_take_longer_than_a_head(server: Server) -> None:
    request_id = server.post("optim_step", model_id=server.model(), seq_id=1, adam_params={"learning_rate": 0.1}).json()
    started = time.monotonic()
    assert server.post("retrieve_future", **request_id).status_code == 408
    assert time.monotonic() - started > TIMEOUT_S + 0.5


def test_half_sent_requests_keep_no_client_out(server: Server) -> None:
    with ExitStack() as stack:
        half_sent = [stack.enter_context(connect(server, b"GET /api")) for _ in range(5 * MAX_PER_ADDRESS)]
        for _ in range(3):
            with httpx.Client(base_url=server.url, timeout=5) as client:
                assert client.get("/api/v1/openapi").status_code == 404
        assert is_closed(half_sent[0]), "the longest idle connection made room"
        assert server.api.connections.num_open <= MAX_PER_ADDRESS


def test_idle_connection_makes_room_and_a_poll_does_not(server: Server) -> None:
    model_id, polls = server.model(), []

    for number in range(1, MAX_PER_ADDRESS + 1):
        fields = {"model_id": model_id, "seq_id": number, "adam_params": {"learning_rate": 0.1}}
        body = b'{"request_id": "%s"}' % server.post("optim_step", **fields).json()["request_id"].encode()
        head = b"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        polls.append(head + body)

    server.client.close()
    until(lambda: server.api.connections.num_open == 0)

    with ExitStack() as stack:
        polling = [stack.enter_context(connect(server, poll)) for poll in polls[:-1]]
        idle = stack.enter_context(connect(server, HEAD + b"\r\n"))
        assert read_status(idle) in (200, 503)
        with connect(server, polls[-1]) as last:
            assert is_closed(idle)
            until(lambda: server.api.app.state.context.results.num_waiting == MAX_PER_ADDRESS)
            with connect(server) as refused:
                assert is_closed(refused)
            assert {read_status(connection) for connection in (*polling, last)} == {408}


def test_connections_of_a_trusted_proxy_are_not_one_client(tmp_path: Path) -> None:
    with (
        live_api(settings(tmp_path, trusted_proxies=["127.0.0.0/8"], header_timeout_s=30)) as server,
        ExitStack() as stack,
    ):
        for _ in range(2 * MAX_PER_ADDRESS):
            stack.enter_context(connect(server, b"GET /api"))
        until(lambda: server.api.connections.num_open == 2 * MAX_PER_ADDRESS)


def test_without_file_descriptors_connections_are_refused_and_the_log_stays_short(tmp_path: Path) -> None:
    run_in_own_process(run_out_of_file_descriptors, tmp_path)


def run_out_of_file_descriptors(data_dir: Path) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger().addHandler(handler)

    with live_api(settings(data_dir)) as server, ExitStack() as stack:
        url = httpx.URL(server.url)
        clients = [stack.enter_context(socket.socket()) for _ in range(40)]
        before = resource.getrlimit(resource.RLIMIT_NOFILE)

        with ExitStack() as filled:
            filled.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
            resource.setrlimit(resource.RLIMIT_NOFILE, (clients[-1].fileno() + 5, before[1]))
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    filled.callback(os.close, os.dup(0))
            started = time.process_time()
            for client in clients:
                client.settimeout(5)
                client.connect((url.host, url.port))
            assert all(map(is_closed, clients))
            time.sleep(0.5)
            assert time.process_time() - started < 0.4, "the event loop does not spin"

        assert server.client.get("/api/v1/nothing").status_code == 404

    logged = [record for record in records if record.levelno >= logging.WARNING and record.name != "httpx"]
    assert len(logged) < 10


def test_limit_of_open_files_leaves_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, expected in (300, 150), (20_000, 18_976), (65_536, 64_512), (resource.RLIM_INFINITY, 2**20 - 1024):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert compute_max_connections() == expected


@pytest.mark.parametrize(
    ("address", "plain"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("testclient", "testclient"),
    ],
)
def test_plain_address(address: str, plain: str) -> None:
    assert normalize_address(address) == plain
