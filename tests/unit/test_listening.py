"""Taking an address before anything costly starts."""

import asyncio
import resource
import socket

import pytest

from skyrl_tx.listening import CannotServe, listen, raise_file_limit, url_of


def test_a_free_port_is_taken_and_named() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(CannotServe, match=rf"127\.0\.0\.1:{port}.*--port"):
            listen("127.0.0.1", port)


def test_every_address_is_shown_as_one_that_can_be_called() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(CannotServe, match=r"--host no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def test_answers_are_not_held_back() -> None:
    """Headers and body are two writes; Nagle's algorithm would add 40 ms to each call."""

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


def test_the_file_limit_is_raised_and_never_lowered() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[0]), before[1]))
        raise_file_limit()
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert raised[0] == (min(before[1], 65_536) if before[1] != resource.RLIM_INFINITY else 65_536)
        assert raised[1] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
