"""Named points in the code where tests kill the process.

A failpoint does nothing unless the environment variable `SKYRL_TX_KILL_AT` is set. Flags and
requests cannot set it.
"""

import os
import signal
from typing import Literal

VARIABLE = "SKYRL_TX_KILL_AT"
"""`POINT:N` kills the process with SIGKILL when it reaches the point for the Nth time."""

Point = Literal[
    "store.commit",  # a transaction has run, but is not committed
    "store.committed",  # it is committed, but no caller has been notified
    "engine.attempt",  # a delivery attempt is counted, the device has not started
    "engine.dispatched",  # micro-batches are on the device
    "engine.result",  # the device has finished, the result is not queued for its commit
    "engine.answer",  # the result is queued for its commit
    "sample.slice",  # a decode slice has ended
    "snapshot.capture",  # a model's state is captured, nothing is written
    "snapshot.written",  # the snapshot's files are written, no row refers to them
    "artifact.files",  # files are written, the manifest is not
    "artifact.rename",  # the artifact is complete under a temporary name
    "artifact.renamed",  # the artifact exists, its directory entry may not be on disk
    "artifact.uploading",  # a file is in the object store, other files may not be
    "artifact.uploaded",  # all files are in the object store, their manifest is not
    "artifact.committed",  # the artifact exists in the object store, no copy is here
    "artifact.collect",  # an artifact is about to be moved to the trash or removed
    "replay.restored",  # a model is restored from its snapshot
    "replay.effect",  # one log record is replayed
]


def failpoint(point: Point) -> None:
    """Kill this process with SIGKILL if the environment variable names this point."""
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
