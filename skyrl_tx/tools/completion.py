"""Completion of commands, flags and their choices in a shell, by argcomplete."""

import argparse
import os
from collections.abc import Iterable
from contextlib import suppress

import argcomplete

from skyrl_tx.launch.command import Command, CommandError, CommandParser

_SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
    parser.set_defaults(run=_print_script)


def _print_script(arguments: argparse.Namespace) -> None:
    print(argcomplete.shellcode(["skyrl-tx"], shell=arguments.shell), end="")


def answer_shell(commands: Iterable[Command]) -> None:
    """Answer a shell that asks what may follow on its line, and exit. Return if no shell asks."""
    words = os.environ.get("COMP_LINE", "").split()[1:]
    parser = CommandParser(prog="skyrl-tx")
    parsers = parser.add_subparsers()
    for command in commands:
        own = parsers.add_parser(command.name, help=command.help)
        if words and words[0] == command.name:  # of the others the code need not be imported
            own.given = words[1:]
            with suppress(CommandError):  # a setting on the line is invalid
                command.add_arguments(own)
    argcomplete.autocomplete(parser)
