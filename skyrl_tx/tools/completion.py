"""Scripts that complete the commands and flags of `skyrl-tx` in bash, zsh and fish, written from the parsers."""

import argparse
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

SHELLS = ("bash", "zsh", "fish")
PROGRAM = "skyrl-tx"
_FUNCTION = "_skyrl_tx"
_HELP_WIDTH = 80
_PATHS = (
    "path",
    "base_model",
    "_dir",
    "_file",
    "directory",
    "certfile",
    "keyfile",
    "config",
    "chat_template",
    "output",
    "data",
)
"""Ends of the names of arguments whose values are paths."""
_NO_PATHS = frozenset({"backend_config", "sampler_config", "config_path"})


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command."""

    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...] = ()
    takes_value: bool = False
    is_path: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """A command or subcommand, by its words, with the flags and arguments that may follow."""

    words: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...] = ()
    arguments: tuple[Flag, ...] = ()
    """Arguments without a flag, in order."""


def commands_of(parsers: Mapping[str, tuple[str, argparse.ArgumentParser]]) -> list[Command]:
    """Return all commands and subcommands; `parsers` has the help and the parser of each command."""
    found: list[Command] = []
    for name, (text, parser) in parsers.items():
        found += _walk((name,), text, parser)
    return found


def _walk(words: tuple[str, ...], text: str, parser: argparse.ArgumentParser) -> Iterator[Command]:
    flags: list[Flag] = []
    arguments: list[Flag] = []
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]  # argparse has no public list
        if isinstance(action, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            helps = {each.dest: each.help or "" for each in action._choices_actions}  # pyright: ignore[reportPrivateUsage]
            for name, below in action.choices.items():
                yield from _walk((*words, name), helps.get(name, ""), below)
        elif action.help != argparse.SUPPRESS:
            (flags if action.option_strings else arguments).append(_flag(action))
    yield Command(words, _line(text), tuple(flags), tuple(arguments))


def _flag(action: argparse.Action) -> Flag:
    name = action.dest.rpartition(".")[2]
    return Flag(
        names=tuple(action.option_strings),
        help=_line(action.help or ""),
        choices=tuple(map(str, action.choices or ())) or _choices_of(action.metavar),
        takes_value=action.nargs != 0,
        is_path=name not in _NO_PATHS and name.endswith(_PATHS),
    )


def _choices_of(metavar: object) -> tuple[str, ...]:
    """Return the choices that a metavar such as `{auto,dummy}` names."""
    text = metavar if isinstance(metavar, str) else ""
    inner = text.removeprefix("{").removesuffix("}")
    return tuple(inner.split(",")) if text == f"{{{inner}}}" else ()


def _line(text: str) -> str:
    """Return a help text in one short line, without a default value."""
    line = " ".join(text.split()).partition(" (default")[0]
    return line if len(line) <= _HELP_WIDTH else line[: _HELP_WIDTH - 1].rstrip() + "…"


def script(shell: str, commands: Iterable[Command]) -> str:
    """Return the script for a shell."""
    write = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]
    return "\n".join(write(list(commands))) + "\n"


def _children(commands: Iterable[Command], words: tuple[str, ...]) -> list[Command]:
    """Return the commands one word longer than `words`."""
    return [each for each in commands if each.words[:-1] == words]


def _quoted(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


# bash

_BASH = f"""\
# Completion of {PROGRAM} for bash; load it with: source <({PROGRAM} completion bash)
{_FUNCTION}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command="" word words="" index
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${{COMP_WORDS[index]}}
        if [[ " ${{{_FUNCTION}_commands}} " == *" ${{command:+$command/}}$word "* ]]; then
            command=${{command:+$command/}}$word
        fi
    done
    COMPREPLY=()
    case "$command $previous" in"""
_BASH_END = f"""\
    esac
    if [[ $words == "<path>" ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
    elif [[ $words != "<value>" ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    fi
}}
complete -F {_FUNCTION} {PROGRAM}"""


def _bash(commands: list[Command]) -> Iterator[str]:
    paths = ["/".join(each.words) for each in commands]
    yield f"{_FUNCTION}_commands={_quoted(paths)}"
    yield _BASH
    for kind, patterns in _bash_values(commands).items():
        yield f"        {'|'.join(patterns)}) words={shlex.quote(kind)} ;;"
    yield '        *) case "$command" in'
    yield f'            "") words={_quoted(each.words[0] for each in _children(commands, ()))} ;;'
    for path, each in zip(paths, commands, strict=True):
        below = [child.words[-1] for child in _children(commands, each.words)]
        choices = [choice for argument in each.arguments for choice in argument.choices]
        words = _quoted([*below, *choices, *(name for flag in each.flags for name in flag.names)])
        if not below and any(argument.is_path for argument in each.arguments):
            yield f'            "{path}") [[ $current == -* ]] && words={words} || words="<path>" ;;'
        else:
            yield f'            "{path}") words={words} ;;'
    yield "        esac ;;"
    yield _BASH_END


def _bash_values(commands: list[Command]) -> dict[str, list[str]]:
    """Return the patterns of "COMMAND FLAG" by the values that follow: words, or `<path>`, or `<value>`."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for each in commands:
        for flag in each.flags:
            kind = "" if not flag.takes_value else "<path>" if flag.is_path else " ".join(flag.choices) or "<value>"
            for name in flag.names:
                kinds.setdefault(name, {}).setdefault(kind, []).append("/".join(each.words))
    found: dict[str, list[str]] = {}
    for name, paths_of in kinds.items():
        for kind, paths in paths_of.items():
            if kind:  # a flag that means the same everywhere is matched after any command
                patterns = [f'*" {name}"'] if len(paths_of) == 1 else [f'"{path} {name}"' for path in paths]
                found.setdefault(kind, []).extend(patterns)
    return found


# zsh

_ZSH = f"""\
#compdef {PROGRAM}
# Completion of {PROGRAM} for zsh; save it as _{PROGRAM} in a directory of fpath, or: source <({PROGRAM} completion zsh)
{_FUNCTION}() {{
    local command=""
    local -i index depth=1
    for ((index = 2; index < CURRENT; index++)); do
        case "$command/$words[index]" in"""
_ZSH_MIDDLE = """\
        esac
    done
    words=("$words[1]" "${(@)words[depth + 1,-1]}") # the command counts as the program
    ((CURRENT -= depth - 1))
    local -a _commands
    case "$command" in"""
_ZSH_END = f"""\
    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    {_FUNCTION} "$@"
else
    compdef {_FUNCTION} {PROGRAM}
fi"""


def _zsh(commands: list[Command]) -> Iterator[str]:
    yield _ZSH
    for each in commands:
        *parents, name = each.words
        before = "/".join(("", *parents)) if parents else ""
        after = "/".join(("", *each.words))
        yield f"            {shlex.quote(f'{before}/{name}')}) command={shlex.quote(after)} depth=index ;;"
    yield _ZSH_MIDDLE
    root = Command((), "")
    for each in (root, *commands):
        yield f"        {shlex.quote('/'.join(('', *each.words)) if each.words else '')})"
        if below := _children(commands, each.words):
            described = " ".join(shlex.quote(f"{child.words[-1]}:{child.help}") for child in below)
            yield f"            _commands=({described}); _describe command _commands"
        if each is not root:
            specs = [_zsh_spec(flag, name) for flag in each.flags for name in flag.names]
            if not below:
                specs += (
                    [f"*:{each.arguments[0].help or 'argument'}:{_zsh_values(each.arguments[0])}"]
                    if each.arguments
                    else []
                )
            yield "            _arguments -S : \\"
            yield from (f"                {shlex.quote(spec)} \\" for spec in specs)
            yield "                && return 0"
        yield "            ;;"
    yield _ZSH_END


def _zsh_spec(flag: Flag, name: str) -> str:
    text = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in flag.help)
    value = f":value:{_zsh_values(flag)}" if flag.takes_value else ""
    return f"*{name}[{text}]{value}"


def _zsh_values(flag: Flag) -> str:
    if flag.choices:
        return f"({' '.join(flag.choices)})"
    return "_files" if flag.is_path else " "


# fish

_FISH = f"""\
# Completion of {PROGRAM} for fish; save it as ~/.config/fish/completions/{PROGRAM}.fish
function __skyrl_tx_at
    set -l command
    for word in (commandline -opc)[2..]
        if contains -- (string join / $command $word) $__skyrl_tx_commands
            set -a command $word
        end
    end
    set -l path (string join / -- $command)
    test "$path" = "$argv[1]"
end
complete -c {PROGRAM} -f"""


def _fish(commands: list[Command]) -> Iterator[str]:
    yield f"set -g __skyrl_tx_commands {' '.join('/'.join(each.words) for each in commands)}"
    yield _FISH
    for each in commands:
        yield _fish_line("/".join(each.words[:-1]), f"-a {each.words[-1]}", each.help)
    for each in commands:
        at = "/".join(each.words)
        for flag in each.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            yield _fish_line(at, f"{names}{_fish_value(flag)}", flag.help)
        for argument in each.arguments:
            if argument.choices:
                yield _fish_line(at, f"-a {_quoted(argument.choices)}", argument.help)
            elif argument.is_path:
                yield _fish_line(at, "-F", "")


def _fish_value(flag: Flag) -> str:
    if not flag.takes_value:
        return ""
    if flag.choices:
        return f" -x -a {_quoted(flag.choices)}"
    return " -r -F" if flag.is_path else " -x"


def _fish_line(at: str, what: str, text: str) -> str:
    description = f" -d {shlex.quote(text)}" if text else ""
    return f"complete -c {PROGRAM} -n '__skyrl_tx_at \"{at}\"' {what}{description}"
