"""Streams of new tokens."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

from skyrl_tx.apps.chat.generation import Delta, Generation, PartialStreams, merge_deltas
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


def test_other_calls_run_between_deltas_that_are_there_already() -> None:
    num_turns = 0

    class Stored:
        """A generation whose deltas are all there."""

        async def deltas(self) -> AsyncGenerator[Delta]:
            for _ in range(100):
                yield cast(Delta, None)

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def test() -> None:
        others = asyncio.create_task(count_turns())
        merged = [number async for number, _ in merge_deltas([cast(Generation, Stored())])]
        others.cancel()
        assert merged == [0] * 100

    asyncio.run(test())
    assert num_turns >= 100
