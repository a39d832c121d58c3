"""Usage reports with one line per owner, project, key, session, run or day."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal, get_args

from sqlmodel import Session

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.prices import GIGABYTE, Prices, compute_storage_cost, compute_token_cost
from skyrl_tx.apps.teams.usage import GroupColumn

Subject = Literal["owner", "project", "key", "session", "run", "day"]
SUBJECTS: tuple[Subject, ...] = get_args(Subject)
MAX_LINES = 100_000
_COLUMNS: Mapping[Subject, GroupColumn] = {
    "owner": "owner",
    "project": "project_id",
    "key": "key_id",
    "session": "session_id",
    "run": "model_id",
    "day": "day",
}
_NAMES_FOR_NONE: Mapping[Subject, str] = {"project": "no project", "key": "no key"}
_BASE_WEIGHTS = "base weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """The work of one subject, for example one owner."""

    subject: str
    training_tokens: int = 0
    """Tokens of forward and backward passes."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    sampled_tokens: int = 0
    checkpoints: int = 0
    """Number of named saves."""
    device_s: float = 0.0
    gigabyte_hours: float = 0.0
    """Storage of checkpoints: gigabytes (10^9 bytes) times hours.

    Always 0 in reports by key or run.
    """
    cost_usd: float | None = None
    """Sum of the costs of all work that has a price; None if no work has a price."""

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.training_tokens + self.prefill_tokens + self.cached_tokens + self.sampled_tokens


_FIELDS: Mapping[str, str] = {
    "training": "training_tokens",
    "forward": "training_tokens",
    "prefill": "prefill_tokens",
    "prefill_cached": "cached_tokens",
    "sampled": "sampled_tokens",
}


def read_usage_lines(tx: Session, owner: str | None, by: Subject, since: float, prices: Prices) -> Sequence[UsageLine]:
    """Return a line for each subject with usage since a time.

    Subjects with the most tokens come first. Days are in order. `owner` None means all owners.
    """
    lines: dict[str, UsageLine] = {}
    for total in usage.read_totals(tx, owner, since, (_COLUMNS[by],), limit=MAX_LINES):
        name = _format_name(by, total.group[0])
        line = lines.get(name, UsageLine(subject=name))
        cost = compute_token_cost(prices, total.kind, total.tokens)
        if total.kind == "checkpoint":
            line = replace(line, checkpoints=line.checkpoints + total.requests)
        else:
            field = _FIELDS[total.kind]
            line = replace(line, **{field: getattr(line, field) + total.tokens})
        lines[name] = replace(line, device_s=line.device_s + total.device_s, cost_usd=_add_costs(line.cost_usd, cost))

    _add_storage(tx, lines, owner, by, since, prices)
    if by == "day":
        return sorted(lines.values(), key=lambda line: line.subject)
    return sorted(lines.values(), key=lambda line: (-line.tokens, line.subject))


def _add_storage(
    tx: Session,
    lines: dict[str, UsageLine],
    owner: str | None,
    by: Subject,
    since: float,
    prices: Prices,
) -> None:
    if by in ("key", "run"):  # storage is recorded by session only
        return
    for hour in usage.read_storage(tx, owner, since, limit=MAX_LINES):
        values = {"owner": hour.owner, "project": hour.project_id, "session": hour.session_id, "day": hour.hour_at}
        name, stored = _format_name(by, values[by]), hour.num_bytes / GIGABYTE
        line = lines.get(name, UsageLine(subject=name))
        cost = _add_costs(line.cost_usd, compute_storage_cost(prices, stored))
        lines[name] = replace(line, gigabyte_hours=line.gigabyte_hours + stored, cost_usd=cost)


def _format_name(by: Subject, value: object) -> str:
    match by:
        case "day":
            assert isinstance(value, int)
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d")
        case "run":
            return str(value) or _BASE_WEIGHTS
        case _:
            return _NAMES_FOR_NONE.get(by, "none") if value is None else str(value)


def _add_costs(total: float | None, more: float | None) -> float | None:
    return total if more is None else (total or 0.0) + more
