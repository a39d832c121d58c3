"""One command of the command line, declared by a tool or an app."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Group = Literal["run", "weights", "administration", "diagnosis"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: `skyrl-tx NAME`."""

    name: str
    help: str
    """One line for the list of commands."""
    group: Group
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    """Returns the exit status; None means 0."""
