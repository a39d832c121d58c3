"""Build all client environments before the tests need them: `python -m tests.support.prepare_environments`.

With --fresh they are built in a temporary folder without pip's cache, and removed. With --link NAME, this virtual
environment also finds the packages of one of them, after its own ones: tests of the torch backend need torch.
"""

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from tests.support.client_environments import (
    ALL,
    ClientEnvironment,
    UnavailableEnvironment,
    cache_directory,
    link,
    prepare,
)

CONCURRENT = 2


def build(environment: ClientEnvironment, cache: Path) -> str:
    """Build an environment and return a line of the report."""
    started = time.monotonic()
    python = prepare(environment, cache).python
    return f"{environment.name}: {time.monotonic() - started:.0f} s, {python.parent.parent}"


def main() -> int:
    """Return 0 if all environments exist, 1 after printing why one cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="build without caches, then remove everything")
    parser.add_argument(
        "--link",
        choices=[environment.name for environment in ALL],
        metavar="NAME",
        help="find the packages of one of them from here",
    )
    arguments = parser.parse_args()
    fresh = arguments.fresh
    if fresh and arguments.link:
        parser.error("--fresh removes what --link would find")
    if fresh:
        os.environ["PIP_NO_CACHE_DIR"] = "1"

    with (
        tempfile.TemporaryDirectory() if fresh else nullcontext(cache_directory()) as folder,
        ThreadPoolExecutor(CONCURRENT) as pool,
    ):
        try:
            for line in pool.map(partial(build, cache=Path(folder)), ALL):
                print(line, flush=True)
        except UnavailableEnvironment as error:
            pool.shutdown(cancel_futures=True)
            print(error, file=sys.stderr)
            return 1

    if arguments.link:
        print(link({environment.name: environment for environment in ALL}[arguments.link]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
