"""A browser page that records errors, for tests that must have none."""

from typing import Any

WITHIN_MS = 20_000


class WatchedPage:
    """A browser page, and the problems that it had so far.

    Problems are messages on the browser's console, uncaught errors, and requests to other servers.
    """

    def __init__(self, context: Any, base: str) -> None:
        self.problems: list[str] = []
        self.page = context.new_page()
        self.page.set_default_timeout(WITHIN_MS)
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on(
            "request",
            lambda request: request.url.startswith((base, "data:")) or self.problems.append(f"request: {request.url}"),
        )
