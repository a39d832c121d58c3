"""Commands that work on a data directory, whether a server runs on it or not."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from skyrl_tx.artifacts import ArtifactCorrupt, ArtifactMissing
from skyrl_tx.commands import checkpoints, export, import_adapter, keys, runs
from skyrl_tx.commands.place import CommandError
from skyrl_tx.contract.errors import UserError
from skyrl_tx.store.errors import StoreError

_PARSERS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "keys": keys.add_arguments,
    "runs": runs.add_arguments,
    "checkpoints": checkpoints.add_arguments,
    "export": export.add_arguments,
    "import": import_adapter.add_arguments,
}


def run(parser: argparse.ArgumentParser, command: str, arguments: Sequence[str]) -> int:
    """Read the arguments of a command and run it; return its exit status."""
    _PARSERS[command](parser)
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except (CommandError, UserError, StoreError, ArtifactMissing, ArtifactCorrupt) as error:
        for line in str(error).splitlines():
            print(f"skyrl-tx {command}: {line}", file=sys.stderr)
        return 1
