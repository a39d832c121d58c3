"""The costs of work and storage that usage reports estimate, by the server's setting `prices`."""

from skyrl_tx.server.settings import Prices

HOURS_PER_MONTH = 720
"""Hours of the month in which Tinker prices storage (SDK, `types/billing_usage_response.py`)."""
GIGABYTE = 10**9
_MILLION = 10**6


def price_per_million(prices: Prices, kind: str) -> float | None:
    """Return the price of a million tokens of a kind of `UsageRow`; None without one, and for other kinds."""
    match kind:
        case "training" | "forward":
            return prices.training
        case "sampled" | "prefill" | "prefill_cached":
            return getattr(prices, kind)
        case _:
            return None


def cost_tokens(prices: Prices, kind: str, tokens: int) -> float | None:
    """Return the cost of tokens of a kind, if it has a price."""
    price = price_per_million(prices, kind)
    return None if price is None else price * tokens / _MILLION


def cost_storage(prices: Prices, gigabyte_hours: float) -> float | None:
    """Return the cost of storage, if it has a price."""
    return None if prices.storage is None else prices.storage * gigabyte_hours / HOURS_PER_MONTH
