"""`skyrl-tx status`: show the state of a server on one screen, once or every second.

The command reads only the database, so it works even if the server is not running. With `--stacks` it instead makes
the processes of the server write the stack traces of all their threads to their logs.
"""

import argparse
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from sqlmodel import Session

from skyrl_tx.contract import codec
from skyrl_tx.contract.results import Failure
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import finish_parser, open_database, parse_count
from skyrl_tx.process.text import format_bytes, make_line
from skyrl_tx.store import StoreError, engine_state, totals
from skyrl_tx.store.engine_state import collect_pauses
from skyrl_tx.store.tables import EngineStateRow

_SILENCE_S = 10.0
"""An engine that has published no status for this long counts as not running."""
_HISTORY_S = 900.0
"""How far back the gauges are read, for the small charts."""
_MEAN_OVER_S = 300.0
"""How far back rates are averaged."""
_RATES = (
    *("training_tokens_per_s", "sampled_tokens_per_s", "prompt_tokens_per_s"),
    *("requests_completed_per_s", "requests_failed_per_s"),
)

_BARS = "▁▂▃▄▅▆▇█"
_NUM_BARS = 30
_MAX_ROWS = 12
_PERIOD_S = 1.0
"""How often `--watch` refreshes the screen, in seconds."""
_GOOD = frozenset({"ready"})

_ROLES = "api", "engine"
_PROCESSES = Path("/proc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Show the state of a server: the engine, open requests by owner, speed, memory and the latest failures. The "
        "command reads only the database, so it works even if the server is not running. The exit status is 0 if the "
        "engine is ready, otherwise 1."
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--watch", action="store_true", help="refresh the screen every second until Ctrl-C")
    form.add_argument(
        "--stacks", action="store_true", help="dump the stack traces of all server threads to the logs of the server"
    )
    parser.add_argument("--times", type=parse_count, metavar="N", help="stop --watch after N screens (default: never)")
    parser.add_argument(
        "--here",
        action="store_true",
        help="consider only the engines on this machine, for example in the readiness probe of a container",
    )
    finish_parser(parser, _run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.times is not None and not arguments.watch:
        raise CommandError("--times requires --watch", status=2)
    if arguments.stacks:
        write_stacks(arguments.data_dir)
        return 0
    host = socket.gethostname() if arguments.here else None
    if arguments.watch:
        _watch(arguments, host)
        return 0

    with open_database(arguments) as store:
        status = store.read(lambda tx: read_status(tx, host))
    if arguments.json:
        print(json.dumps(asdict(status), indent=2))
    else:
        Console(highlight=False).print(draw_screen(status))
    return 0 if status.engine in _GOOD else 1


def _watch(arguments: argparse.Namespace, host: str | None) -> None:
    with (
        open_database(arguments) as store,
        suppress(KeyboardInterrupt),
        Live(console=Console(highlight=False), auto_refresh=False, screen=arguments.times is None) as live,
    ):
        num_shown = 0
        while arguments.times is None or num_shown < arguments.times:
            if num_shown:
                time.sleep(_PERIOD_S)
            num_shown += 1
            try:
                shown = draw_screen(store.read(lambda tx: read_status(tx, host)))
            except StoreError as error:  # the database may be restarting; try again in a second
                shown = Text(str(error), "red")
            live.update(shown, refresh=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The state of a server at one moment. All times are ages in seconds."""

    engine: str
    """The status that the engine published, for example `ready`; else `not running` or `never started`."""
    engine_silent_s: float | None
    activity: str
    activity_s: float | None
    detail: str
    devices: tuple[str, ...]
    num_open: int
    oldest_s: float | None
    num_active_sessions: int
    work: Sequence[Mapping[str, Any]]
    failures: Sequence[Mapping[str, Any]]
    meters: Mapping[str, Any]
    """The counters and gauges that the engines published last, summed over engines; empty if there are none.

    The keys are `totals`, `queues`, `places` (models and samplers in memory) and `backend`.
    """
    sampled_s: float | None
    """Age of the newest gauges. An API process writes gauges every ten seconds."""
    rates: Mapping[str, float]
    """Mean rates of the last five minutes."""
    history: Mapping[str, Sequence[float]]
    """The rates of the last 15 minutes, oldest first."""


def read_status(tx: Session, host: str | None = None) -> ServerStatus:
    """Read the state of the server. With `host`, only the engines on that machine count."""
    now, shared_now = time.time(), engine_state.get_shared_time(tx)
    rows = [row for row in engine_state.list_engines(tx) if host in (None, row.host)]
    row = engine_state.choose_main_engine(rows)
    requests = totals.read_totals(tx, now, collect_pauses(*rows))
    points = engine_state.list_gauges(tx, now - _HISTORY_S)
    recent = [values for at, values in points if at > now - _MEAN_OVER_S]

    return ServerStatus(
        # The engine.
        engine=_describe_engine(row, shared_now),
        engine_silent_s=None if row is None else round(max(shared_now - row.updated_at, 0.0), 1),
        activity="" if row is None else row.activity,
        activity_s=None if row is None or row.activity_since is None else round(shared_now - row.activity_since, 1),
        detail="" if row is None else row.detail,
        devices=() if row is None else tuple(map(str, _to_list(row.capabilities.get("devices")))),
        # Requests.
        num_open=requests.num_open,
        oldest_s=None if requests.oldest_at is None else round(now - requests.oldest_at, 1),
        num_active_sessions=requests.num_active_sessions,
        work=[
            {
                "owner": group.owner,
                "model": group.model_id,
                "kind": group.kind,
                "waiting": group.num_waiting,
                "running": group.num_running,
                "oldest_s": round(now - group.oldest_at, 1),
            }
            for group in totals.list_open_work(tx)
        ],
        failures=[
            {
                "ago_s": round(now - failure.at),
                "owner": failure.owner,
                "kind": failure.kind,
                "message": _read_message(failure.result),
            }
            for failure in totals.list_failed(tx)
        ],
        # Gauges and rates.
        meters=engine_state.sum_meters(rows) or {},
        sampled_s=round(now - points[-1][0], 1) if points else None,
        rates={name: round(sum(v.get(name, 0.0) for v in recent) / len(recent), 1) for name in _RATES if recent},
        history={name: [values.get(name, 0.0) for _, values in points] for name in _RATES},
    )


def _describe_engine(row: EngineStateRow | None, shared_now: float) -> str:
    if row is None:
        return "never started"
    return "not running" if shared_now - row.updated_at > _SILENCE_S else row.status


def _to_list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _read_message(result: bytes) -> str:
    try:
        failure = codec.decode(result)
    except codec.CodecError:
        return "the stored result is damaged"
    return failure.message if isinstance(failure, Failure) else ""


def draw_screen(status: ServerStatus) -> RenderableType:
    """Return a status as a screen for `rich`."""
    return Group(*_draw_blocks(status))


def _draw_blocks(status: ServerStatus) -> Iterator[RenderableType]:
    # The engine and what it reports.
    yield _draw_head(status)
    backend = (status.meters or {"backend": {}})["backend"]
    if outage := backend.get("outage"):
        yield Text(outage, "bold red")
    if progress := backend.get("progress"):
        yield Text(progress)
    yield from _draw_speed(status)
    if status.meters:
        yield from map(Text, _describe_capacity(status.meters))

    # Requests.
    oldest = "" if status.oldest_s is None else f", oldest {_format_age(status.oldest_s)}"
    yield Text(f"open requests {status.num_open}{oldest} · active sessions {status.num_active_sessions}")
    if status.work:
        yield _make_table(
            ("OWNER", "MODEL", "KIND", "WAITING", "RUNNING", "OLDEST"), map(_make_work_row, status.work[:_MAX_ROWS])
        )
        if len(status.work) > _MAX_ROWS:
            yield Text(f"… and {len(status.work) - _MAX_ROWS} more")
    if status.failures:
        rows = ((_format_age(row["ago_s"]), row["owner"], row["kind"], row["message"]) for row in status.failures)
        yield _make_table(("FAILED", "OWNER", "KIND", "MESSAGE"), rows)


def _draw_head(status: ServerStatus) -> Text:
    line = Text.assemble("engine ", (status.engine, "bold green" if status.engine in _GOOD else "bold red"))
    if status.engine == "not running" and status.engine_silent_s is not None:
        line.append(f", last status {_format_age(status.engine_silent_s)} ago")
    elif status.activity:
        line.append(f": {status.activity}")
        if status.activity_s is not None and status.activity_s >= 1:
            line.append(f" for {_format_age(status.activity_s)}")
    elif status.engine in _GOOD:
        line.append(": waiting for requests")
    if status.detail:
        line.append(f" ({status.detail})")
    if status.devices:
        line.append(f" · {len(status.devices)} × {status.devices[0]}")
    if status.sampled_s is None or status.sampled_s > 3 * _SILENCE_S:
        line.append(" · no API process has written gauges for 30 s", "red")
    return line


def _draw_speed(status: ServerStatus) -> Iterator[Text]:
    names = {"training": "training_tokens_per_s", "sampling": "sampled_tokens_per_s", "prompts": "prompt_tokens_per_s"}
    for label, name in names.items():
        if name in status.rates:
            yield Text(f"{label:<9}{status.rates[name]:>10,.0f} tokens/s  {_draw_bars(status.history[name])}")
    if (failed := status.rates.get("requests_failed_per_s", 0.0)) > 0:
        yield Text(f"failures {failed * 60:.1f} per minute", "red")


def _describe_capacity(meters: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line about the use of adapter slots, KV cache and memory, and a line about the queues."""
    slots, backend, queues = meters["places"], meters["backend"], meters["queues"]
    parts = [
        f"models {slots['models_resident']}/{slots['models_places']}",
        f"samplers {slots['samplers_resident']}/{slots['samplers_places']}",
    ]
    if "decode_slots" in backend:
        parts.append(f"slots {backend['decode_slots_used']}/{backend['decode_slots']}")
    if "kv_cache_tokens" in backend:
        parts.append(f"KV cache {backend['kv_cache_tokens_used']:,}/{backend['kv_cache_tokens']:,} tokens")
    if memory := backend.get("device_memory"):
        fullest = max(memory, key=lambda device: device["used_bytes"])
        parts.append(f"memory {format_bytes(fullest['used_bytes'])}/{format_bytes(fullest['limit_bytes'])}")
    if tokens := backend.get("compared_tokens"):
        mean, largest = backend["trainer_gap_nats"] / tokens, backend["trainer_gap_max_nats"]
        parts.append(f"gap to the trainer {mean:.1e} nats (max {largest:.1e}) over {tokens:,} tokens")
    yield " · ".join(parts)
    yield " · ".join(
        f"{name}: {queue['waiting']} waiting, {queue['running']} running, "
        f"{format_bytes(queue['backlog_bytes'])} of {format_bytes(queue['backlog_limit_bytes'])}"
        for name, queue in queues.items()
    )


def _make_work_row(work: Mapping[str, Any]) -> tuple[str, ...]:
    model = work["model"] or "–"
    return work["owner"], model, work["kind"], str(work["waiting"]), str(work["running"]), _format_age(work["oldest_s"])


def _make_table(header: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in header:
        table.add_column(name, overflow="ellipsis", no_wrap=name != "MESSAGE")
    for row in rows:
        table.add_row(*(Text(make_line(cell)) for cell in row))  # owners and messages come from users
    return table


def _draw_bars(values: Sequence[float]) -> str:
    """Draw values as a line of at most 30 bars, each the mean of consecutive values. The highest bar is full."""
    if not values or max(values) <= 0:
        return ""
    width = -(-len(values) // _NUM_BARS)
    means = [sum(part) / len(part) for part in (values[i : i + width] for i in range(0, len(values), width))]
    return "".join(_BARS[min(int(mean / max(means) * len(_BARS)), len(_BARS) - 1)] for mean in means)


def _format_age(seconds: float) -> str:
    """Format a duration, for example as 12 s, 5 min, 3 h or 2 d."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def write_stacks(data_dir: Path) -> None:
    """Send SIGQUIT to the server on a data directory, so that its processes write their stack traces to their logs.

    Raises CommandError if no server is running there, or if the signal would end a process.
    """
    pids = {role: pid for role in _ROLES if (pid := find_process(data_dir / f"{role}.lock")) is not None}
    if not pids:
        raise CommandError(f"--data-dir {data_dir}: no server is running there")
    for role, pid in pids.items():
        if not _has_sigquit_handler(pid):
            raise CommandError(
                f"process {pid} ({role}) does not handle SIGQUIT and would end: it is still starting, or it is an old "
                "release; no signal was sent to it"
            )
        os.kill(pid, signal.SIGQUIT)
        print(f"process {pid} ({role}) writes its stack traces to its log")


def find_process(lock: Path) -> int | None:
    """Return the id of the running process that has the lock file of a role open, or None."""
    try:
        pid = int(lock.read_text())
    except (FileNotFoundError, ValueError):
        return None
    if not _PROCESSES.is_dir():  # Not Linux. The id may belong to another process by now.
        return pid if _is_running(pid) else None
    try:
        descriptors = list((_PROCESSES / str(pid) / "fd").iterdir())
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise CommandError(f"process {pid} belongs to another user: {error.strerror}") from error
    return pid if lock.resolve() in map(_read_target, descriptors) else None


def _read_target(descriptor: Path) -> Path | None:
    """Return the file of an open descriptor, or None if the process has closed it meanwhile."""
    try:
        return descriptor.readlink()
    except FileNotFoundError:
        return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _has_sigquit_handler(pid: int) -> bool:
    """Return whether a process handles SIGQUIT. The signal ends a process without a handler.

    Returns True if this cannot be found out.
    """
    status = _PROCESSES / str(pid) / "status"
    if not status.is_file():
        return True
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGQUIT - 1) & 1)
