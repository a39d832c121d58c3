"""The overview page: the current load of the server, its users, and recent failures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

from skyrl_tx.apps.console import queries
from skyrl_tx.apps.console.health import describe_engine
from skyrl_tx.apps.console.queries import OpenGroup
from skyrl_tx.apps.console.rendering import format_count, format_duration, format_size, shorten_id
from skyrl_tx.apps.console.runs import describe_request
from skyrl_tx.apps.console.visit import Page, PageTable, Visit
from skyrl_tx.apps.history.curves import draw_spark
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import BUCKET_S, Total
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store

pages = PageTable()
_HISTORY_S = 2 * 3600
_MAX_HISTORY = 1000
_FAILURES = 8
_DAY_S = 86_400
_SHOWN_BUCKETS = 24
_MAX_ROWS = 50
_CURRENT_S = 60.0
_RATE_S = 60.0
_CURVE_POINTS = 60
_TRAINING = frozenset({"training", "forward"})
_PREFILL = frozenset({"prefill", "prefill_cached"})
_REQUEST_KINDS = {
    "forward_backward": ("training pass", "training passes"),
    "forward": ("forward pass", "forward passes"),
    "model_pass": ("pass", "passes"),
    "optim_step": ("optimizer step", "optimizer steps"),
    "asample": ("sample request", "sample requests"),
    "sample": ("sample request", "sample requests"),
    "save_weights": ("save", "saves"),
    "load_weights": ("load", "loads"),
    "create_model": ("new run", "new runs"),
    "unload_model": ("unload", "unloads"),
    "create_custom_loss": ("new loss", "new losses"),
}


@pages.get("/overview", menu="Overview")
def show_overview(visit: Visit) -> Page:
    """Show the current load of the server, its users, and recent failures."""
    values = read_overview(visit.context.store, visit.caller.owner_filter, int(visit.now))
    engine = describe_engine(visit, values["state"])
    return Page("overview.jinja", {**values, "engine": engine, "model": visit.context.settings.public_model_name})


@lru_cache(maxsize=16)
def read_overview(store: Store, owner: str | None, now: int) -> Mapping[str, Any]:
    """Return the values for the page.

    They are read once per second and owner, and once for all admins, because many people keep the
    page open. The number of open requests and the token rates cover all owners. Everything else
    covers `owner`, or all owners if it is None.
    """
    # Engines and open requests
    engines = store.read(engine_state.list_engines)
    state = engine_state.choose_main_engine(engines)
    groups = store.read(lambda tx: queries.list_open_groups(tx, None))
    oldest = min((group.first_position for group in groups), default=None)
    oldest_at = None if oldest is None else store.read(lambda tx: queries.get_arrival_time(tx, oldest))

    # Usage, gauges and failures
    buckets = store.read(lambda tx: usage.read_buckets(tx, now - _HISTORY_S - BUCKET_S))
    history = store.read(lambda tx: engine_state.list_gauges(tx, now - _HISTORY_S, _MAX_HISTORY))
    recent = store.read(lambda tx: usage.read_totals(tx, owner, now - BUCKET_S, ("owner",)))
    today = store.read(lambda tx: usage.read_totals(tx, owner, now // _DAY_S * _DAY_S, ("owner",)))
    failed = store.read(lambda tx: queries.list_failed_requests(tx, owner, _FAILURES))

    visible_groups = [group for group in groups if owner in (None, group.owner)]
    lines, hidden = make_user_lines(visible_groups, recent, today)

    return {
        "state": state,
        "tiles": [
            *make_rate_tiles(buckets, history, now),
            *make_gauge_tiles(engine_state.sum_meters(engines), history),
        ],
        "waiting": sum(group.number for group in groups),
        "oldest": None if oldest_at is None else format_duration(max(now - oldest_at, 0.0)),
        "lines": lines,
        "hidden": hidden,
        "failures": [describe_request(line) for line in failed],
        "devices": [] if state is None else state.capabilities.get("devices", []),
    }


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of the overview with the value of a gauge."""

    title: str
    value: str
    detail: str = ""
    spark: str = ""
    share: float | None = None
    """The fraction of a limit that is used, from 0 to 1, or None if there is no limit."""


def make_rate_tiles(
    buckets: Sequence[tuple[int, str, int]], history: Sequence[tuple[int, Mapping[str, float]]], now: float
) -> list[Tile]:
    """Make a tile with the tokens per second of training, sampling and prefill.

    `history` has gauges of the last two hours, in order. If the server has just started, `history`
    has no recent gauges. Then the rates come from `buckets`: time, kind of work, and tokens in five
    minutes.
    """
    newest = int(now) // BUCKET_S * BUCKET_S
    starts = [newest - BUCKET_S * back for back in range(_SHOWN_BUCKETS - 1, -1, -1)]
    tiles: list[Tile] = []
    for title, gauge, kinds in (
        ("Training", "training_tokens_per_s", _TRAINING),
        ("Sampling", "sampled_tokens_per_s", frozenset({"sampled"})),
        ("Prefill", "prompt_tokens_per_s", _PREFILL),
    ):
        # From the gauges
        known = [(at, values[gauge]) for at, values in history if gauge in values]
        if known and known[-1][0] >= now - _CURRENT_S:
            curve = [value for _, value in known]
            recent = [value for at, value in known if at >= now - _RATE_S]
            rate = sum(recent) / len(recent) if recent else 0.0
            since_s = known[-1][0] - known[0][0]
            tiles.append(
                Tile(
                    title,
                    f"{format_count(rate)} tok/s",
                    f"last {format_duration(max(since_s, 10))}",
                    draw_spark(_average(curve)),
                )
            )
            continue

        # From usage
        totals = dict.fromkeys(starts, 0)
        for at, kind, tokens in buckets:
            if kind in kinds and at in totals:
                totals[at] += tokens
        # The newest bucket is incomplete, so the rate is over the last two
        recent_tokens = totals[starts[-1]] + totals[starts[-2]]
        rate = recent_tokens / (now - starts[-2])
        values = [total / BUCKET_S for total in totals.values()]
        tiles.append(Tile(title, f"{format_count(rate)} tok/s", "last 2 h", draw_spark(values)))
    return tiles


def _average(values: Sequence[float]) -> list[float]:
    """Divide values into at most 60 equal parts, and return the mean of each."""
    parts = min(len(values), _CURVE_POINTS)
    ends = [len(values) * part // parts for part in range(parts + 1)]
    return [sum(values[first:end]) / (end - first) for first, end in pairwise(ends)]


def make_gauge_tiles(
    meters: Mapping[str, object] | None, history: Sequence[tuple[int, Mapping[str, float]]]
) -> list[Tile]:
    """Make a tile for each known gauge of the engine, for example the use of the KV cache.

    `meters` are the newest values, and `history` has earlier ones for the curves.
    """
    values = {**(history[-1][1] if history else {}), **flatten_meters(meters or {})}
    tiles: list[Tile] = []

    def add_tile(
        title: str, used: str, limit: str, format_value: Callable[[float], str], *, limit_note: str = ""
    ) -> None:
        if used not in values:
            return
        maximum = values.get(limit)
        curve = [point.get(used) for _, point in history]
        value = format_value(values[used])
        detail = f"of {format_value(maximum)}{limit_note}" if maximum else ""
        share = min(values[used] / maximum, 1.0) if maximum else None
        tiles.append(Tile(title, value, detail, draw_spark(curve), share))

    add_tile(
        "Device memory", "memory_used_bytes", "memory_limit_bytes", format_size, limit_note=" on the fullest device"
    )
    exact = "{:,.0f}".format
    add_tile("KV cache", "kv_cache_tokens_used", "kv_cache_tokens", exact, limit_note=" tokens with prefixes")

    add_tile("Decode slots", "decode_slots_used", "decode_slots", format_count)
    add_tile("Models resident", "models_resident", "models_places", format_count)
    add_tile("Samplers resident", "samplers_resident", "samplers_places", format_count)
    if tokens := values.get("compared_tokens"):
        mean, largest = values["trainer_gap_nats"] / tokens, values["trainer_gap_max_nats"]
        tiles.append(
            Tile("Gap to the trainer", f"{mean:.1e} nats", f"maximum {largest:.1e}, {format_count(tokens)} tokens")
        )
    add_tile("Free disk", "disk_free_bytes", "", format_size)
    return tiles


def flatten_meters(meters: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers in the engine's meters, and the memory of the fullest device.

    The numbers have the same names as in the server's history of gauges.
    """
    values = {name: float(value) for name, value in meters.items() if isinstance(value, int | float)}
    for value in meters.values():
        if isinstance(value, Mapping):
            values |= flatten_meters(cast(Mapping[str, object], value))
    if devices := cast(list[Mapping[str, float]], meters.get("device_memory", [])):
        values["memory_used_bytes"] = max(device["used_bytes"] for device in devices)
        values["memory_limit_bytes"] = max(device["limit_bytes"] for device in devices)
    return values


@dataclass(frozen=True, slots=True)
class UserLine:
    """A line of the table of users: the open requests of an owner, and the owner's tokens today."""

    owner: str
    what: str
    link: str | None
    waiting: str
    device_share: float
    device: str
    tokens: int


def make_user_lines(
    groups: Sequence[OpenGroup], recent: Sequence[Total], today: Sequence[Total]
) -> tuple[list[UserLine], int]:
    """Make the table of users, heaviest users first. Also returns how many lines were left out.

    There is a line for each run or sampler with open requests, and for each owner who has used the
    server today.
    """
    # Tokens and device time of each owner
    tokens: dict[str, int] = {}
    for total in today:
        tokens[total.group[0]] = tokens.get(total.group[0], 0) + total.tokens
    device: dict[str, float] = {}
    for total in recent:
        device[total.group[0]] = device.get(total.group[0], 0.0) + total.device_s
    device_s = sum(device.values())

    # Open requests of each run or sampler
    work: dict[tuple[str, str], list[OpenGroup]] = {}
    for group in groups:
        name = group.model_id or group.sampling_session_id or group.session_id
        work.setdefault((group.owner, name), []).append(group)
    idle = (tokens.keys() | device.keys()) - {owner for owner, _ in work}

    def make_line(owner: str, name: str, open_groups: Sequence[OpenGroup]) -> UserLine:
        share = device.get(owner, 0.0) / device_s if device_s else 0.0
        model = next((group.model_id for group in open_groups if group.model_id), None)
        session = next((group.session_id for group in open_groups), None)
        return UserLine(
            owner=owner,
            what=shorten_id(name) if name else "",
            link=f"/training_runs/{model}" if model else f"/sessions/{session}" if session else None,
            waiting=", ".join(_format_requests(group.kind, group.number) for group in open_groups),
            device_share=share,
            device=f"{share:.0%}" if device_s else "",
            tokens=tokens.get(owner, 0),
        )

    lines = [make_line(owner, name, open_groups) for (owner, name), open_groups in work.items()]
    lines += [make_line(owner, "", ()) for owner in sorted(idle)]
    lines.sort(key=lambda line: (-line.device_share, -line.tokens, line.owner, line.what))
    return lines[:_MAX_ROWS], max(len(lines) - _MAX_ROWS, 0)


def _format_requests(kind: str, number: int) -> str:
    singular, plural = _REQUEST_KINDS.get(kind, (kind, kind))
    return f"{number} {singular if number == 1 else plural}"
