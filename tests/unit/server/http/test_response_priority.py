"""Completed results are written before new requests are accepted."""

import asyncio

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from skyrl_tx.server.http.long_poll import LongPollMiddleware, ResponsePriority


def test_requests_wait_for_all_results() -> None:
    async def main() -> list[str]:
        priority, events = ResponsePriority(max_wait_s=60.0), list[str]()

        async def send_request() -> None:
            await priority.wait_for_results("ann")
            events.append("request")

        await send_request()
        with priority.mark_writing("ann"):
            with priority.mark_writing("ann"):
                sending = asyncio.create_task(send_request())
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            events.append("result")
        await sending
        await send_request()
        return events

    assert asyncio.run(main()) == ["request", "result", "request", "request"]


def test_failed_or_slow_result_delays_no_request() -> None:
    async def main() -> None:
        priority = ResponsePriority(max_wait_s=0.01)
        with priority.mark_writing("ann"):
            await priority.wait_for_results("ann")
        try:
            with priority.mark_writing("ann"):
                raise ZeroDivisionError
        except ZeroDivisionError:
            await asyncio.wait_for(priority.wait_for_results("ann"), 5)

    asyncio.run(main())


def test_results_of_another_owner_delay_no_request() -> None:
    async def main() -> None:
        priority = ResponsePriority(max_wait_s=60.0)
        with priority.mark_writing("ann"):
            await asyncio.wait_for(priority.wait_for_results("bob"), 5)
            assert not priority.is_idle
        assert priority.is_idle

    asyncio.run(main())


def test_long_polls_do_not_wait_for_results() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(f"app {scope['path']}")

    async def poll(request: Request) -> Response:
        seen.append("poll")
        return PlainTextResponse("")

    async def fail(request: Request, error: Exception) -> Response:
        raise error

    async def wait_for_results(_: Scope) -> None:
        seen.append("waited")

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    async def main() -> None:
        middleware = LongPollMiddleware(
            app, path="/poll", endpoint=poll, handle_error=fail, wait_for_results=wait_for_results
        )
        for path in ("/poll", "/other"):
            await middleware({"type": "http", "method": "POST", "path": path, "headers": []}, nothing, nothing)
        await middleware({"type": "lifespan", "path": ""}, nothing, nothing)

    asyncio.run(main())
    assert seen == ["poll", "waited", "app /other", "app "]
