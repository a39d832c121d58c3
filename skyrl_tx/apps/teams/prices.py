"""Estimated costs of work and storage in usage reports, from the server's setting `prices`."""

from pydantic import BaseModel, ConfigDict, Field

HOURS_PER_MONTH = 720
"""Length of a month in Tinker's storage prices (SDK, `types/billing_usage_response.py`)."""
GIGABYTE = 10**9
_MILLION = 10**6


class Prices(BaseModel):
    """Prices in US dollars. Work without a price has no cost in reports."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    training: float | None = Field(default=None, ge=0)
    """US dollars per million tokens of forward and backward passes.

    By default no costs are shown.
    """
    sampled: float | None = Field(default=None, ge=0)
    """US dollars per million sampled tokens."""
    prefill: float | None = Field(default=None, ge=0)
    """US dollars per million prompt tokens that were computed."""
    prefill_cached: float | None = Field(default=None, ge=0)
    """US dollars per million prompt tokens that were found in the prefix cache."""
    storage: float | None = Field(default=None, ge=0)
    """US dollars per gigabyte (10^9 bytes) of checkpoints and month (720 hours)."""


class TeamsSettings(BaseModel):
    """Settings of usage reports."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    prices: Prices = Prices()
    """Prices for the costs in usage reports, for example `training: 0.5`.

    By default no costs are shown.
    """


def get_price_per_million(prices: Prices, kind: str) -> float | None:
    """Return the price per million tokens of a kind of usage, or None if the kind has no price."""
    match kind:
        case "training" | "forward":
            return prices.training
        case "sampled" | "prefill" | "prefill_cached":
            return getattr(prices, kind)
        case _:
            return None


def compute_token_cost(prices: Prices, kind: str, tokens: int) -> float | None:
    """Return the cost of tokens of a kind in US dollars, or None if the kind has no price."""
    price = get_price_per_million(prices, kind)
    return None if price is None else price * tokens / _MILLION


def compute_storage_cost(prices: Prices, gigabyte_hours: float) -> float | None:
    """Return the cost of storage in US dollars, or None if storage has no price."""
    return None if prices.storage is None else prices.storage * gigabyte_hours / HOURS_PER_MONTH
