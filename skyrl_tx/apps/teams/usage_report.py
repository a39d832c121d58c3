"""Usage reports with one line per owner, project, key, session, run or day."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, get_args

from sqlmodel import Session

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.prices import GIGABYTE, Prices, compute_storage_cost, compute_token_cost
from skyrl_tx.apps.teams.usage import GroupColumn, Total

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


@dataclass(slots=True, kw_only=True)
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

    def add_work(self, total: Total, prices: Prices) -> None:
        """Add the work of one kind."""
        match total.kind:
            case "training" | "forward":
                self.training_tokens += total.tokens
            case "prefill":
                self.prefill_tokens += total.tokens
            case "prefill_cached":
                self.cached_tokens += total.tokens
            case "sampled":
                self.sampled_tokens += total.tokens
            case "checkpoint":
                self.checkpoints += total.requests
        self.device_s += total.device_s
        self._add_cost(compute_token_cost(prices, total.kind, total.tokens))

    def add_storage(self, gigabyte_hours: float, prices: Prices) -> None:
        """Add the storage of one hour."""
        self.gigabyte_hours += gigabyte_hours
        self._add_cost(compute_storage_cost(prices, gigabyte_hours))

    def _add_cost(self, cost: float | None) -> None:
        if cost is not None:
            self.cost_usd = (self.cost_usd or 0.0) + cost


def read_usage_lines(tx: Session, owner: str | None, by: Subject, since: float, prices: Prices) -> Sequence[UsageLine]:
    """Return a line for each subject with usage since a time.

    Subjects with the most tokens come first. Days are in order. `owner` None means all owners.
    """
    lines: dict[str, UsageLine] = {}

    def find_line(value: object) -> UsageLine:
        name = _format_name(by, value)
        return lines.setdefault(name, UsageLine(subject=name))

    for total in usage.read_totals(tx, owner, since, (_COLUMNS[by],), limit=MAX_LINES):
        find_line(total.group[0]).add_work(total, prices)
    if by not in ("key", "run"):  # storage is recorded by session only
        for hour in usage.read_storage(tx, owner, since, limit=MAX_LINES):
            values = {"owner": hour.owner, "project": hour.project_id, "session": hour.session_id, "day": hour.hour_at}
            find_line(values[by]).add_storage(hour.num_bytes / GIGABYTE, prices)

    if by == "day":
        return sorted(lines.values(), key=lambda line: line.subject)
    return sorted(lines.values(), key=lambda line: (-line.tokens, line.subject))


def _format_name(by: Subject, value: object) -> str:
    match by:
        case "day":
            assert isinstance(value, int)
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d")
        case "run":
            return str(value) or _BASE_WEIGHTS
        case _:
            return _NAMES_FOR_NONE.get(by, "none") if value is None else str(value)
