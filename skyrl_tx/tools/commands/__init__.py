"""Commands on a data directory; they work while a server runs on it, too."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing, ArtifactsUnreachable
from skyrl_tx.contract.errors import UserError
from skyrl_tx.store.errors import StoreError
from skyrl_tx.tools.commands import (
    adapters,
    audit,
    backup,
    keys,
    projects,
    quotas,
    recover,
    runs,
    stacks,
    status,
    usage,
)
from skyrl_tx.tools.commands.common import CommandError

_PARSERS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "keys": keys.add_arguments,
    "runs": runs.add_run_arguments,
    "checkpoints": runs.add_checkpoint_arguments,
    "export": adapters.add_export_arguments,
    "import": adapters.add_import_arguments,
    "recover": recover.add_arguments,
    "backup": backup.add_backup_arguments,
    "restore": backup.add_restore_arguments,
    "status": status.add_status_arguments,
    "top": status.add_top_arguments,
    "usage": usage.add_arguments,
    "projects": projects.add_arguments,
    "quotas": quotas.add_arguments,
    "audit": audit.add_arguments,
    "stacks": stacks.add_arguments,
}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the arguments of a command."""
    _PARSERS[command](parser)


def run(parser: argparse.ArgumentParser, command: str, arguments: Sequence[str]) -> int:
    """Parse the arguments of a command and run it; return its exit status."""
    add_arguments(parser, command)
    chosen = parser.parse_args(arguments)
    try:
        status: int | None = chosen.run(chosen)
        sys.stdout.flush()
    except (CommandError, UserError, StoreError, ArtifactMissing, ArtifactCorrupt, ArtifactsUnreachable) as error:
        for line in str(error).splitlines():
            print(f"skyrl-tx {command}: {line}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at the exit would fail too
        return 128 + signal.SIGPIPE
    return status or 0
