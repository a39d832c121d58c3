"""The command `skyrl-tx`: lists the commands of tools and apps, runs one, and completes their names and flags."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import get_args

from skyrl_tx import __version__
from skyrl_tx.compose import APPS
from skyrl_tx.launch.command import Command, CommandError, CommandParser, Group

_DATA = "skyrl_tx.tools.commands"
TOOLS = (
    Command(
        name="serve",
        help="serve a model: the API in this process, the engine in a child process",
        group="run",
        code="skyrl_tx.tools.serve:add_serve_arguments",
    ),
    Command(
        name="api",
        help="run only the API, on the data directory of an engine",
        group="run",
        code="skyrl_tx.tools.serve:add_api_arguments",
    ),
    Command(
        name="engine",
        help="run only the engine, on the data directory of an API",
        group="run",
        code="skyrl_tx.tools.serve:add_engine_arguments",
    ),
    Command(
        name="quickstart",
        help="train and sample a tiny model through the Tinker SDK",
        group="run",
        code="skyrl_tx.tools.serve:add_quickstart_arguments",
    ),
    Command(
        name="completion",
        help="print the script that completes commands and flags in a shell",
        group="run",
        code="skyrl_tx.tools.cli:add_completion_arguments",
    ),
    Command(
        name="runs",
        help="list, delete and restore training runs",
        group="weights",
        code=f"{_DATA}.runs:add_run_arguments",
    ),
    Command(
        name="checkpoints",
        help="list, delete and restore checkpoints, and set their expiry",
        group="weights",
        code=f"{_DATA}.runs:add_checkpoint_arguments",
    ),
    Command(
        name="export",
        help="write a checkpoint as a PEFT adapter, or merged into its base model",
        group="weights",
        code=f"{_DATA}.adapters:add_export_arguments",
    ),
    Command(
        name="import",
        help="create a checkpoint from a PEFT adapter",
        group="weights",
        code=f"{_DATA}.adapters:add_import_arguments",
    ),
    Command(
        name="recover",
        help="restore checkpoints that the database lost, or that are in the trash",
        group="weights",
        code=f"{_DATA}.recover:add_arguments",
    ),
    Command(
        name="keys",
        help="create, list, rotate and revoke API keys",
        group="administration",
        code=f"{_DATA}.keys:add_arguments",
    ),
    Command(
        name="backup",
        help="copy the database and the weights, also while a server runs",
        group="administration",
        code=f"{_DATA}.backup:add_backup_arguments",
    ),
    Command(
        name="restore",
        help="create a data directory from a backup",
        group="administration",
        code=f"{_DATA}.backup:add_restore_arguments",
    ),
    Command(
        name="status",
        help="show what a server does, also one that is dead",
        group="diagnosis",
        code=f"{_DATA}.status:add_arguments",
    ),
    Command(
        name="doctor",
        help="examine machine, settings, model and data, and say what to do",
        group="diagnosis",
        code="skyrl_tx.tools.doctor.command:add_arguments",
    ),
    Command(
        name="plan",
        help="say whether a model fits devices that are not here, and how fast it can be",
        group="diagnosis",
        code="skyrl_tx.tools.plan.report:add_arguments",
    ),
)
COMMANDS = {command.name: command for command in (*TOOLS, *(command for app in APPS for command in app.commands))}

_ARGCOMPLETE = "_ARGCOMPLETE"
"""The environment variable with which a shell asks this program to complete a line."""
_RENAMED = {"top": ("status", "--watch"), "stacks": ("status", "--stacks")}
"""Commands of release 0.2 that are flags now. Their names work until release 0.4."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 2 for a wrong command line, 1 for other failures."""
    if _ARGCOMPLETE in os.environ:
        _complete(os.environ.get("COMP_LINE", "").split()[1:])
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_format_help(), end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"skyrl-tx {__version__}")
        return 0

    name, rest = arguments[0], arguments[1:]
    if name in _RENAMED:
        new = _RENAMED[name]
        print(f"skyrl-tx: `{name}` is called `{' '.join(new)}` now; the old name goes away in 0.4", file=sys.stderr)
        name, rest = new[0], [*new[1:], *rest]
    if name not in COMMANDS:
        print(f"skyrl-tx: there is no command {name!r}; commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return _run(COMMANDS[name], rest)


def _run(command: Command, given: Sequence[str]) -> int:
    try:
        arguments = command.make_parser(given).parse_args(given)
        status: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except CommandError as error:
        for line in str(error).splitlines():
            print(f"skyrl-tx {command.name}: {line}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at the exit would fail too
        return 128 + signal.SIGPIPE
    return status or 0


def _format_help() -> str:
    lines = ["usage: skyrl-tx COMMAND [flags]", "", "Train and sample models with the Tinker API on hardware you own."]
    for group in get_args(Group):
        lines += ["", f"{group}:"]
        lines += [f"  {command.name:<13}{command.help}" for command in COMMANDS.values() if command.group == group]
    lines += [
        "",
        "`skyrl-tx COMMAND --help` lists the flags of a command; `--version` prints the version.",
        "",
        "Run the quickstart, then a server:",
        "  skyrl-tx quickstart",
        "  skyrl-tx serve --base-model Qwen/Qwen3-0.6B",
    ]
    return "\n".join(lines) + "\n"


def add_completion_arguments(parser: CommandParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.set_defaults(run=_print_completion_script)


def _print_completion_script(arguments: argparse.Namespace) -> None:
    from argcomplete.shell_integration import shellcode  # late, because nothing but completion needs it

    print(shellcode(["skyrl-tx"], shell=arguments.shell), end="")


def _complete(words: Sequence[str]) -> None:
    """Answer a shell that asks what may follow these words, and exit. Return if no shell asks."""
    import argcomplete  # late, because nothing but completion needs it

    parser = CommandParser(prog="skyrl-tx")
    parsers = parser.add_subparsers()
    for command in COMMANDS.values():
        own = parsers.add_parser(command.name, help=command.help)
        if words and words[0] == command.name:  # the code of the others need not be imported
            own.given = words[1:]
            with suppress(CommandError):  # a setting on the line is invalid
                command.add_arguments(own)
    argcomplete.autocomplete(parser)
