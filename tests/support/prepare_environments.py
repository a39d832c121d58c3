"""Build all client environments before the tests need them: `python -m tests.support.prepare_environments`.

With --fresh they are built in a temporary folder without pip's cache, and removed.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from tests.support.client_environments import ALL, UnavailableEnvironment, cache_directory, prepare


def main() -> int:
    """Return 0 if all environments exist, 1 after printing why one cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="build without caches, then remove everything")
    fresh = parser.parse_args().fresh
    if fresh:
        os.environ["PIP_NO_CACHE_DIR"] = "1"
    with tempfile.TemporaryDirectory() if fresh else nullcontext(cache_directory()) as folder:
        for environment in ALL:
            started = time.monotonic()
            try:
                python = prepare(environment, Path(folder)).python
            except UnavailableEnvironment as error:
                print(error, file=sys.stderr)
                return 1
            print(f"{environment.name}: {time.monotonic() - started:.0f} s, {python.parent.parent}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
