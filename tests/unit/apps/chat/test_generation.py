"""Streams of new tokens."""

import asyncio

from skyrl_tx.apps.chat.generation import PartialStreams
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.store.database import Store


def test_an_owner_has_a_quarter_of_the_streams(store: Store) -> None:
    async def test() -> None:
        streams = PartialStreams(store, max_streams=8)

        def open_stream(owner: str, number: int) -> bool:
            return streams.open(RequestId(f"{owner}-{number}"), owner, lambda _: None)

        assert [open_stream("ann", number) for number in range(4)] == [True, True, False, False]
        assert open_stream("bob", 0), "another owner has a place"

        for _ in range(2):  # closing is idempotent
            streams.close(RequestId("ann-0"), "ann")
        assert [open_stream("ann", number) for number in (4, 5)] == [True, False]

    asyncio.run(test())
