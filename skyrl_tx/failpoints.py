"""Named places where a process can be made to die, so that tests can kill it exactly there.

Nothing happens unless the environment variable below is set, and no flag or request can set it: a place costs one look
at the environment, beside work that takes a thousand times longer.
"""

import os
import signal
from typing import Literal

VARIABLE = "SKYRL_TX_KILL_AT"
"""`POINT:N` kills this process with SIGKILL when it comes to the point for the Nth time."""

Point = Literal[
    "store.commit",  # work has run, its transaction is not committed
    "store.committed",  # it is on disk, nobody knows it yet
    "engine.attempt",  # a request is marked as begun, the device has not seen it
    "engine.dispatched",  # micro-batches are on the device
    "engine.result",  # the device has done it, the answer is not on its way to disk
    "engine.answer",  # the answer waits for the writer
    "sample.slice",  # some tokens of a sample are there
    "snapshot.capture",  # a model's state is taken, nothing written
    "snapshot.written",  # its files are there, no row points at them
    "artifact.files",  # files are written, the manifest is not
    "artifact.rename",  # all is on disk under a temporary name
    "artifact.renamed",  # the artifact exists, its directory's entry may not be on disk
    "artifact.collect",  # an artifact is about to be removed
    "replay.restored",  # a model has its snapshot again
    "replay.effect",  # one effect is repeated
]


def reach(point: Point) -> None:
    """Say that this is the named place; where the variable names it, die as by `kill -9`."""
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return
    name, _, left = armed.partition(":")
    if name != point:
        return
    if int(left) > 1:
        os.environ[VARIABLE] = f"{name}:{int(left) - 1}"
        return
    os.kill(os.getpid(), signal.SIGKILL)
