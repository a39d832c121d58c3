"""The command line `skyrl-tx`: the list of all commands, `main`, and completion in the shell.

`main` imports the code of a command only when that command runs, so `skyrl-tx --help` stays fast. Commands of an
optional app, for example `usage`, come from the app.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import get_args

from skyrl_tx import __version__
from skyrl_tx.compose import APPS
from skyrl_tx.launch.command import Command, CommandError, CommandParser, Group, suggest
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.text import make_line

_COMMANDS_PACKAGE = "skyrl_tx.tools.commands"

# `entry_point` is the import path `module:function` of the function that adds the command's arguments.
BUILT_IN_COMMANDS = (
    Command(
        name="serve",
        help="serve a model: run the HTTP API in this process and the engine in a child process",
        group="run",
        entry_point="skyrl_tx.tools.serve:add_serve_arguments",
    ),
    Command(
        name="api",
        help="run only the HTTP API; `skyrl-tx engine` runs the model",
        group="run",
        entry_point="skyrl_tx.tools.serve:add_api_arguments",
    ),
    Command(
        name="engine",
        help="run only the engine; `skyrl-tx api` serves the clients",
        group="run",
        entry_point="skyrl_tx.tools.serve:add_engine_arguments",
    ),
    Command(
        name="quickstart",
        help="train a tiny model and sample from it through the Tinker SDK (no GPU or download needed)",
        group="run",
        entry_point="skyrl_tx.tools.serve:add_quickstart_arguments",
    ),
    Command(
        name="completion",
        help="print a shell script that completes commands and flags (bash, zsh, fish)",
        group="run",
        entry_point="skyrl_tx.tools.cli:add_completion_arguments",
    ),
    Command(
        name="runs",
        help="list, show, delete and undelete training runs",
        group="weights",
        entry_point=f"{_COMMANDS_PACKAGE}.runs:add_run_arguments",
    ),
    Command(
        name="checkpoints",
        help="list, delete and undelete checkpoints, or change when they expire",
        group="weights",
        entry_point=f"{_COMMANDS_PACKAGE}.runs:add_checkpoint_arguments",
    ),
    Command(
        name="export",
        help="export a checkpoint as a PEFT adapter, or as a full model with the adapter merged in",
        group="weights",
        entry_point=f"{_COMMANDS_PACKAGE}.adapters:add_export_arguments",
    ),
    Command(
        name="import",
        help="import a PEFT adapter as a checkpoint",
        group="weights",
        entry_point=f"{_COMMANDS_PACKAGE}.adapters:add_import_arguments",
    ),
    Command(
        name="recover",
        help="restore checkpoints from the trash, or re-register checkpoints missing from the database",
        group="weights",
        entry_point=f"{_COMMANDS_PACKAGE}.recover:add_arguments",
    ),
    Command(
        name="keys",
        help="create, list, rotate and revoke API keys",
        group="administration",
        entry_point=f"{_COMMANDS_PACKAGE}.keys:add_arguments",
    ),
    Command(
        name="backup",
        help="back up the database and the weights (the server may keep running)",
        group="administration",
        entry_point=f"{_COMMANDS_PACKAGE}.backup:add_backup_arguments",
    ),
    Command(
        name="restore",
        help="create a data directory from a backup",
        group="administration",
        entry_point=f"{_COMMANDS_PACKAGE}.backup:add_restore_arguments",
    ),
    Command(
        name="status",
        help="show what a server is doing, or its last state if it is not running",
        group="diagnosis",
        entry_point=f"{_COMMANDS_PACKAGE}.status:add_arguments",
    ),
    Command(
        name="doctor",
        help="check the machine, settings, model and data, and suggest fixes",
        group="diagnosis",
        entry_point="skyrl_tx.tools.doctor.command:add_arguments",
    ),
    Command(
        name="plan",
        help="estimate memory use and speed of a model on given hardware (no GPU needed)",
        group="diagnosis",
        entry_point="skyrl_tx.tools.plan.command:add_arguments",
    ),
    Command(
        name="conformance",
        help="test with the tinker SDK whether a server behaves as the Tinker API requires",
        group="diagnosis",
        entry_point="skyrl_tx.tools.conformance.command:add_arguments",
    ),
)
COMMANDS = {
    command.name: command for command in (*BUILT_IN_COMMANDS, *(command for app in APPS for command in app.commands))
}

_ARGCOMPLETE = "_ARGCOMPLETE"
"""The environment variable that the shell sets when it asks this program to complete a command line."""
_RENAMED = {"top": ("status", "--watch"), "stacks": ("status", "--stacks")}
"""Commands of release 0.2 that became flags of `status`. The old names work until release 0.4."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 for a wrong command line, 1 for other failures."""
    if _ARGCOMPLETE in os.environ:
        _complete(os.environ.get("COMP_LINE", "").split()[1:])
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["help"]:
        print(_format_help(), end="")
        return 0 if arguments else 2
    if arguments[0] == "help" and len(arguments) > 1:
        arguments = [*arguments[1:], "--help"]
    if arguments[0] in ("-V", "--version", "version"):
        print(f"skyrl-tx {__version__}")
        return 0

    name, rest = arguments[0], arguments[1:]
    if name in _RENAMED:
        new = _RENAMED[name]
        print(f"skyrl-tx: use `{' '.join(new)}` instead of `{name}`, which release 0.4 removes", file=sys.stderr)
        name, rest = new[0], [*new[1:], *rest]
    if name not in COMMANDS:
        hint = suggest(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        print(f"skyrl-tx: unknown command {name!r}{hint}", file=sys.stderr)
        return 2
    return _run(COMMANDS[name], rest)


def _run(command: Command, argv: Sequence[str]) -> int:
    try:
        # `make_parser` needs the command line too, because the flags of `serve` depend on --backend and --sampler.
        arguments = command.make_parser(argv).parse_args(argv)
        status: int | None = arguments.run(arguments)
        sys.stdout.flush()
    except CommandError as error:
        for line in str(error).splitlines():
            print(f"skyrl-tx {command.name}: {make_line(line)}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        # The program that reads our output has ended, for example `head`. Without /dev/null as standard output,
        # Python's flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"skyrl-tx {command.name}: {make_line(explain_os_error(error))}", file=sys.stderr)
        return 1
    return status or 0


def _format_help() -> str:
    lines = ["usage: skyrl-tx COMMAND [flags]", "", "Train and sample models with the Tinker API on hardware you own."]
    for group in get_args(Group):
        lines += ["", f"{group}:"]
        lines += [f"  {command.name:<13}{command.help}" for command in COMMANDS.values() if command.group == group]
    lines += [
        "",
        "`skyrl-tx COMMAND --help` lists the flags of a command. `skyrl-tx --version` prints the version.",
        "",
        "To get started, run the quickstart, then serve a model:",
        "  skyrl-tx quickstart",
        "  skyrl-tx serve --base-model Qwen/Qwen3-0.6B",
    ]
    return "\n".join(lines) + "\n"


def add_completion_arguments(parser: CommandParser) -> None:
    """Add the arguments of `completion`."""
    parser.description = (
        'Print a script that completes commands and flags. To enable it in bash: eval "$(skyrl-tx completion bash)"'
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    parser.set_defaults(run=_print_completion_script)


def _print_completion_script(arguments: argparse.Namespace) -> None:
    from argcomplete.shell_integration import shellcode  # imported here because only completion needs it

    print(shellcode(["skyrl-tx"], shell=arguments.shell), end="")


def _complete(argv: Sequence[str]) -> None:
    """Print the completions of a command line for the shell, and exit.

    `argv` are the words after `skyrl-tx`. The flags of only one command are added, because importing the code of all
    commands would take too long.
    """
    import argcomplete  # imported here because only completion needs it

    parser = CommandParser(prog="skyrl-tx")
    parsers = parser.add_subparsers()
    for command in COMMANDS.values():
        command_parser = parsers.add_parser(command.name, help=command.help)
        if argv and argv[0] == command.name:
            command_parser.argv = argv[1:]
            # If a setting on the command line is invalid, complete only the names of the commands.
            with suppress(CommandError):
                command.add_arguments(command_parser)
    argcomplete.autocomplete(parser)
