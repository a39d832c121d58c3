"""Free ports for tests whose processes must know them before they listen."""

import os
import random
import socket
from contextlib import ExitStack

_FIRST, _LAST = 20_000, 30_000
"""Below the ports that the system gives to clients."""


def free_ports(number: int = 2) -> int:
    """Return the first of some neighbouring ports on which nothing listens."""
    draw = random.Random(os.getpid())
    while True:
        first = draw.randrange(_FIRST, _LAST, number)
        try:
            with ExitStack() as stack:
                for port in range(first, first + number):
                    bound = stack.enter_context(socket.socket())
                    bound.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
