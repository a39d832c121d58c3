"""The parts of uvicorn that the server depends on exist, and only the adapter names them.

A failure after an update of uvicorn names the attribute that `skyrl_tx/server/http/uvicorn_adapter.py` must do without.
"""

import ast
import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from skyrl_tx.server.http import uvicorn_adapter
from skyrl_tx.server.http.connections import HttpProtocol
from skyrl_tx.server.http.uvicorn_adapter import UvicornConnection

USED_NAMES: Mapping[str, tuple[str, ...]] = {
    "HttpToolsProtocol": (
        "_unset_keepalive_if_required",
        "cycle",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "timeout_keep_alive",
        "timeout_keep_alive_handler",
        "timeout_keep_alive_task",
        "transport",
    ),
    "FlowControl": ("read_paused",),
    "RequestResponseCycle": ("response_complete",),
}
"""The attributes of uvicorn's classes that the adapter uses."""
OVERRIDDEN_NAMES = (
    "connection_made",
    "data_received",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "pause_writing",
    "resume_writing",
)
"""The methods of `HttpToolsProtocol` that `HttpProtocol` extends, so uvicorn must call them."""

SERVER = Path(uvicorn_adapter.__file__).parents[1]
ADAPTER = ast.parse(Path(uvicorn_adapter.__file__).read_text())


class Transport(asyncio.Transport):
    """A transport without a connection."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Discard bytes."""

    def is_closing(self) -> bool:
        """Return False."""
        return False

    def get_extra_info(self, name: str, default: object = None) -> object:
        """Return nothing."""
        return default


async def _never_respond(_scope: object, _receive: object, _send: object) -> None:
    await asyncio.Event().wait()


@pytest.fixture(scope="module")
def objects() -> Mapping[str, object]:
    """Instances of the uvicorn classes that the adapter uses, captured while a request is handled."""

    async def start_request() -> Mapping[str, object]:
        protocol = HttpToolsProtocol(
            uvicorn.Config(_never_respond, log_config=None, interface="asgi3"), ServerState(), {}
        )
        protocol.connection_made(Transport())
        protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        found = {"HttpToolsProtocol": protocol}
        await asyncio.sleep(0)  # wait until the application starts
        return found | {"FlowControl": protocol.flow, "RequestResponseCycle": protocol.cycle}

    return asyncio.run(start_request())


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in USED_NAMES.items() for name in names])
def test_uvicorn_has_each_attribute(objects: Mapping[str, object], kind: str, name: str) -> None:
    """The object still has the expected class and the attribute."""
    assert type(objects[kind]).__name__ == kind
    assert hasattr(objects[kind], name), f"uvicorn {uvicorn.__version__}: {kind} has no attribute {name!r}"


@pytest.mark.parametrize("name", OVERRIDDEN_NAMES)
def test_uvicorn_has_each_method_that_is_extended(name: str) -> None:
    assert hasattr(HttpToolsProtocol, name), f"uvicorn {uvicorn.__version__} has no HttpToolsProtocol.{name}"


def test_a_missing_attribute_is_named() -> None:
    with pytest.raises(AssertionError, match="FlowControl has no attribute 'read_paused'"):
        kind = "FlowControl"
        test_uvicorn_has_each_attribute({kind: type(kind, (), {})()}, kind, "read_paused")


def test_every_attribute_of_uvicorn_is_listed() -> None:
    used = {node.attr for node in ast.walk(ADAPTER) if isinstance(node, ast.Attribute)}
    for node in ast.walk(ADAPTER):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attrgetter":
            used |= {
                part for path in node.args if isinstance(path, ast.Constant) for part in str(path.value).split(".")
            }
    ours = set(vars(UvicornConnection))
    # attributes of asyncio and httptools
    public = {"append", "call_later", "close", "feed_data", "get_write_buffer_size", "is_closing", "write"}
    assert used - ours - public == {name for names in USED_NAMES.values() for name in names}


def test_every_extended_method_is_listed() -> None:
    assert {name for name in vars(HttpProtocol) if name in dir(HttpToolsProtocol) and not name.startswith("__")} == set(
        OVERRIDDEN_NAMES
    )


@pytest.mark.parametrize("path", sorted(SERVER.rglob("*.py")), ids=lambda path: path.relative_to(SERVER).as_posix())
def test_no_other_module_uses_private_parts(path: Path) -> None:
    if path.name == "uvicorn_adapter.py":
        return
    tree = ast.parse(path.read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name and name.startswith("uvicorn.protocols")}
    if path.name == "connections.py":
        names = {name for names in USED_NAMES.values() for name in names}
        assert not {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & names
