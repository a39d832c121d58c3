"""What the operating system must grant before a server serves: an address and enough open files."""

import resource
import socket

_OPEN_FILES = 65_536
"""Enough for tens of thousands of waiting calls; more would slow the child's start, which closes what it inherits."""


class CannotServe(Exception):
    """Serving cannot begin or go on; the message is for the person who asked for it."""


def listen(host: str, port: int) -> socket.socket:
    """Bind before anything costly starts; raises CannotServe naming the address that cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        # With the protocol named: only then does asyncio turn Nagle's algorithm off for accepted connections,
        # which else hold each answer's body back for the 40 ms of a delayed acknowledgement.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    except OSError as error:
        raise CannotServe(f"--host {host}: {error.strerror or error}") from error
    try:
        # So that a restart need not wait for the last server's connections to be forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening is what makes a second server's bind fail, so it happens here and not first in uvicorn.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"cannot listen on {host}:{port}: {error.strerror}; is another server running? --port takes another port"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address that a client on this machine uses."""
    bound_host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound_host, str(bound_host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def raise_file_limit() -> None:
    """Let this process and its children hold as many connections as the system allows it, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
