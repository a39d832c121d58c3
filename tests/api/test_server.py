"""The server on a socket that someone else made, as `serve` hands it over."""

import asyncio
import socket
from pathlib import Path

from skyrl_tx.server.app import ApiServer
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store.database import Store


def test_responses_on_an_inherited_socket_are_not_delayed(tmp_path: Path) -> None:
    """Without TCP_NODELAY each answer takes 40 ms longer: its body waits for a delayed acknowledgement of its head."""
    store = Store.open(tmp_path, role="api")
    api = ApiServer(ApiSettings(port=0, data_dir=tmp_path, base_model="Qwen/Qwen3-8B"), store)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    async def accepted_option() -> int:
        serving = asyncio.create_task(api.serve(sockets=[listener]))
        while not api.started:
            await asyncio.sleep(0.005)
        option = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        api.should_exit = True
        await serving
        return option

    try:
        assert asyncio.run(accepted_option()) != 0
    finally:
        store.close()
