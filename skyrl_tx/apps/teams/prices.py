"""The costs of work and storage that usage reports estimate, by the server's setting `prices`."""

from pydantic import BaseModel, ConfigDict, Field

HOURS_PER_MONTH = 720
"""Hours of the month in which Tinker prices storage (SDK, `types/billing_usage_response.py`)."""
GIGABYTE = 10**9
_MILLION = 10**6


class Prices(BaseModel):
    """Prices in US dollars. Work without a price has no cost in reports."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    training: float | None = Field(default=None, ge=0)
    """US dollars for a million tokens of forward and backward passes; default: no costs are shown."""
    sampled: float | None = Field(default=None, ge=0)
    """US dollars for a million sampled tokens."""
    prefill: float | None = Field(default=None, ge=0)
    """US dollars for a million prompt tokens that were computed."""
    prefill_cached: float | None = Field(default=None, ge=0)
    """US dollars for a million prompt tokens that the prefix cache held."""
    storage: float | None = Field(default=None, ge=0)
    """US dollars for a gigabyte (10^9 bytes) of checkpoints during a month of 720 hours."""


class TeamsSettings(BaseModel):
    """Settings of usage reports."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    prices: Prices = Prices()
    """Prices in reports of usage; without one, reports show no cost."""


def get_price_per_million(prices: Prices, kind: str) -> float | None:
    """Return the price of a million tokens of a kind of `UsageRow`; None without one, and for other kinds."""
    match kind:
        case "training" | "forward":
            return prices.training
        case "sampled" | "prefill" | "prefill_cached":
            return getattr(prices, kind)
        case _:
            return None


def compute_token_cost(prices: Prices, kind: str, tokens: int) -> float | None:
    """Return the cost of tokens of a kind, if it has a price."""
    price = get_price_per_million(prices, kind)
    return None if price is None else price * tokens / _MILLION


def compute_storage_cost(prices: Prices, gigabyte_hours: float) -> float | None:
    """Return the cost of storage, if it has a price."""
    return None if prices.storage is None else prices.storage * gigabyte_hours / HOURS_PER_MONTH
