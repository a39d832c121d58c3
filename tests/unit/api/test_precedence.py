"""Who goes first: results that are there, then what is asked anew."""

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from skyrl_tx.api.precedence import Precedence
from skyrl_tx.api.shortcut import Shortcut


def test_requests_wait_for_the_last_of_all_results() -> None:
    async def main() -> list[str]:
        precedence, happened = Precedence(longest_s=60.0), list[str]()

        async def ask() -> None:
            await precedence.give_way()
            happened.append("asked")

        await ask()
        with precedence.answering():
            with precedence.answering():
                asking = asyncio.create_task(ask())
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            happened.append("answered")
        await asking
        await ask()
        return happened

    assert asyncio.run(main()) == ["asked", "answered", "asked", "asked"]


def test_a_result_that_fails_or_takes_long_holds_nobody_up() -> None:
    async def main() -> None:
        precedence = Precedence(longest_s=0.01)
        with precedence.answering():
            await precedence.give_way()
        try:
            with precedence.answering():
                raise ZeroDivisionError
        except ZeroDivisionError:
            await asyncio.wait_for(precedence.give_way(), 5)

    asyncio.run(main())


def test_only_what_is_no_poll_gives_way() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(f"app {scope['path']}")

    async def poll(request: Request) -> Response:
        seen.append("poll")
        return PlainTextResponse("")

    async def fail(request: Request, error: Exception) -> Response:
        raise error

    async def give_way() -> None:
        seen.append("gave way")

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    async def main() -> None:
        shortcut = Shortcut(app, path="/poll", endpoint=poll, answer_error=fail, give_way=give_way)
        for path in ("/poll", "/ask"):
            await shortcut({"type": "http", "method": "POST", "path": path, "headers": []}, nothing, nothing)
        await shortcut({"type": "lifespan", "path": ""}, nothing, nothing)

    asyncio.run(main())
    assert seen == ["poll", "gave way", "app /ask", "app "]
