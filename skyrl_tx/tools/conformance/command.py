"""The command `skyrl-tx conformance`: selects and runs rows, and prints their results as a table and as JSON."""

import argparse
import importlib.util
import json
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_tx import DISTRIBUTION
from skyrl_tx.launch.command import CommandError, CommandParser
from skyrl_tx.launch.command_line import parse_duration_s
from skyrl_tx.process.text import make_line

if TYPE_CHECKING:
    from skyrl_tx.tools.conformance.server import ConformanceRow, Result, Server

KEY_VARIABLE = "TINKER_API_KEY"
MAX_TOKENS = 200_000
_LOCAL_KEY = "tml-local"
"""The SDK requires a key of this form, also for a server without keys."""
_SHARED_TOKENS = 2_000
"""Tokens of the training, the sampler and the reference steps that multiple rows use."""
_CONNECT_TIMEOUT_S = 10.0
_MAX_LATE = 3
"""After so many rows without a result in time, the remaining rows do not run."""
_MAX_LINE = 400
_GROUPS = (
    *("training", "losses", "order", "sampling", "futures", "retries", "refusals", "checkpoints", "account"),
    "session",
)
"""The order of the groups. Sessions are last, because the SDK sends the first heartbeat after ten seconds."""
_LOGGERS = ("tinker", "httpx", "asyncio", "huggingface_hub")
"""Loggers whose messages would be printed between the rows."""


def add_arguments(parser: CommandParser) -> None:
    """Add the arguments of `conformance`."""
    parser.description = (
        "Check a server of the Tinker API with the installed tinker SDK: all endpoints, the values and gradients of "
        "losses, sampling, checkpoints, refusals, order, retries and futures. The server can be any Tinker server. "
        f"${KEY_VARIABLE} is the API key. The command trains and samples, uses at most {MAX_TOKENS:,} tokens, and "
        "deletes its checkpoints at the end. The exit status is 1 if a row fails."
    )

    # What to check
    parser.add_argument("url", metavar="URL", help="the address of the server, for example http://127.0.0.1:8000")
    parser.add_argument("--base-model", metavar="MODEL", help="the base model (default: the first that is listed)")
    parser.add_argument("--only", metavar="TEXT", help="run only the rows whose name contains this text")
    parser.add_argument("--list", action="store_true", help="print the rows and their tokens, and run none")

    # How to check it
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to a file")
    parser.add_argument(
        "--precision",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="how the server computes, which decides how far numbers may differ",
    )
    parser.add_argument(
        "--timeout-s", type=parse_duration_s, default=300.0, metavar="TIME", help="the time limit of each row"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before tokens are used")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the rows and return the exit status."""
    if importlib.util.find_spec("tinker") is None:
        raise CommandError(f"the tinker SDK is not installed: pip install '{DISTRIBUTION}[conformance]'")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers would advise to install torch
    rows = _select(arguments.only)
    budget = sum(row.tokens for row in rows) + _SHARED_TOKENS
    if arguments.list:
        print("\n".join(f"{row.name} ({row.tokens:,} tokens)" for row in rows))
        return 0
    _check_address(arguments.url, arguments.timeout_s)

    from skyrl_tx.tools.conformance.server import PRECISIONS, Server, judge_endpoint  # imports the SDK
    from skyrl_tx.tools.conformance.traffic import SDK_ENDPOINTS, Traffic

    traffic, key = Traffic(arguments.url.rstrip("/")), os.environ.get(KEY_VARIABLE, _LOCAL_KEY)
    server = Server(api_key=key, precision=PRECISIONS[arguments.precision], traffic=traffic, budget=budget)
    with traffic.recording(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK warns about deprecated calls, which rows make on purpose
        _connect(server, arguments)
        print(f"{traffic.url}: {server.base_model}, {len(rows)} rows, at most {budget:,} tokens", flush=True)
        if not (arguments.yes or _confirm()):
            return 1
        results = [_print(result) for result in _run_rows(rows, server, arguments.timeout_s)]
    wanted = (arguments.only or "").lower()
    judged = (judge_endpoint(endpoint, traffic) for endpoint in SDK_ENDPOINTS)
    results += [_print(result) for result in judged if wanted in result.name.lower()]

    # Print the numbers of results, and write the JSON.
    counts = Counter(result.status for result in results)
    print(", ".join(f"{name}: {counts[name]}" for name in ("pass", "fail", "not offered", "not run")), end="")
    print(f"; tokens used: {server.spent:,}")
    if arguments.json:
        content = {"url": traffic.url, "base_model": server.base_model, "sdk": version("tinker")}
        content |= {"precision": arguments.precision, "tokens": server.spent, "rows": [asdict(own) for own in results]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if counts["fail"] else 0


def _select(pattern: str | None) -> "list[ConformanceRow]":
    """Return the rows whose name contains a pattern, in upper or lower case, or all rows. They are sorted by group."""
    from skyrl_tx.tools.conformance import management_rows, refusal_rows, sampling_rows, training_rows  # import the SDK

    modules = (training_rows, sampling_rows, refusal_rows, management_rows)
    rows = [row for module in modules for row in module.ROWS if (pattern or "").lower() in row.name.lower()]
    if not rows:
        raise CommandError(f"--only {pattern}: no row has this text in its name, see --list", 2)
    return sorted(rows, key=lambda row: _GROUPS.index(row.group))


def _check_address(url: str, timeout_s: float) -> None:
    """Make one HTTP request to the server. Raises CommandError unless there is a response, with any status.

    The SDK retries for minutes if nothing answers, and does not say why.
    """
    import httpx

    try:
        address = httpx.URL(url)
    except httpx.InvalidURL:
        address = httpx.URL()
    if address.scheme not in ("http", "https") or not address.host:
        raise CommandError(f"{url}: must be a URL such as http://localhost:8000", 2)

    # A server that is just starting may answer late, but it accepts connections.
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
    try:
        httpx.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=timeout)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
        raise CommandError(f"{url}: cannot connect: {reason}") from error
    except httpx.TimeoutException as error:
        raise CommandError(f"{url}: no answer within {timeout_s:g} s") from error
    except httpx.HTTPError as error:
        raise CommandError(f"{url}: no HTTP response: {error}") from error


def _connect(server: "Server", arguments: argparse.Namespace) -> None:
    """Ask the server for its models and choose one. Raises CommandError."""
    from skyrl_tx.tools.conformance.server import ConformanceRow, run_row

    choosing = ConformanceRow(group="", title="", check=lambda server: server.choose_model(arguments.base_model))
    result, _ = run_row(choosing, server, arguments.timeout_s)
    if result.status != "pass":
        raise CommandError(f"{server.traffic.url}: {make_line(result.detail)}")


def _confirm() -> bool:
    if not sys.stdin.isatty():
        raise CommandError("this needs a confirmation: add --yes", 2)
    return input("Start? [y/N] ").strip().lower() in ("y", "yes")


def _run_rows(rows: "Sequence[ConformanceRow]", server: "Server", timeout_s: float) -> "Iterator[Result]":
    """Run rows one after the other, then delete what they have created, and yield the results."""
    from skyrl_tx.tools.conformance.server import ConformanceRow, Result, run_row

    num_late = 0  # in succession
    try:
        for row in rows:
            if num_late == _MAX_LATE:
                detail = f"the server did not answer {_MAX_LATE} rows in succession"
                yield Result(name=row.name, status="not run", detail=detail)
                continue

            result, is_late = run_row(row, server, timeout_s)
            yield result
            num_late = num_late + 1 if is_late else 0
            if is_late:
                server = server.reconnect()  # the thread of the row still uses the clients
    finally:
        cleaning = ConformanceRow(
            group="session", title="All checkpoints of this run are deleted", check=lambda s: s.clean_up()
        )
        cleaned, _ = run_row(cleaning, server, timeout_s)
    yield cleaned


def _print(result: "Result") -> "Result":
    status = "FAIL" if result.status == "fail" else result.status
    seconds = f"{result.seconds:.1f} s" if result.seconds else ""
    text = f"{status:<12}{result.name:<80}{seconds:>8}  {result.detail}"
    print(make_line(" ".join(text.split("\n")))[:_MAX_LINE].rstrip(), flush=True)
    return result
