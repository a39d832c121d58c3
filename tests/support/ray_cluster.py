"""A Ray cluster of two nodes on this machine, each with one CPU for actors.

    python -m tests.support.ray_cluster

It prints its address, and ends with its standard input.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from tests.support.client_environments import PreparedEnvironment

ROOT = Path(__file__).parents[2]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def with_ray(prepared: PreparedEnvironment) -> dict[str, str]:
    """Return the environment of programs that find Ray in addition to our own packages."""
    paths = [str(ROOT), str(prepared.packages)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def running_cluster(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the address of a cluster, whose nodes have an environment."""
    command = [sys.executable, "-m", "tests.support.ray_cluster"]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # closes its input, and waits for its end
        assert process.stdout is not None
        [address] = [line.split()[1] for line in islice(process.stdout, 1)]
        yield address


def main() -> None:
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

    head: dict[str, Any] = {**NODE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**NODE)
    print(f"address {cluster.address}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
