"""Build all client environments before the tests ask for them: `python -m skyrl_tx.testing.prepare_environments`.

With --fresh they are built in an empty folder, without pip's cache, as on a machine that never saw them, and removed.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from skyrl_tx.testing.client_environments import ALL, UnavailableEnvironment, cache_directory, prepare


def main() -> int:
    """Return 0 when all are there, 1 when one cannot be made, which is said with the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="begin with nothing, and leave nothing")
    fresh = parser.parse_args().fresh
    if fresh:
        os.environ["PIP_NO_CACHE_DIR"] = "1"
    with tempfile.TemporaryDirectory() if fresh else nullcontext(cache_directory()) as folder:
        for environment in ALL:
            began = time.monotonic()
            try:
                python = prepare(environment, Path(folder)).python
            except UnavailableEnvironment as error:
                print(error, file=sys.stderr)
                return 1
            print(f"{environment.name}: {time.monotonic() - began:.0f} s, {python.parent.parent}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
