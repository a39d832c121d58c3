"""Usage and storage in the SDK's admin client: exact token counts, by session and hour, with costs."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import tinker

from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.prices import Prices, TeamsSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

PRICES = Prices(training=2.0, sampled=8.0, prefill=1.0, storage=0.1)


@pytest.fixture(scope="module")
def billing_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("fake", tmp_path_factory.mktemp("stack"), prices=PRICES) as stack:
        yield stack


def create_key(stack: LiveStack, owner: str) -> str:
    scope = "admin" if owner == "root" else "user"
    made = stack.server.store.write(
        lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=datetime.now(UTC).timestamp())
    )
    return made[0]


@pytest.fixture(scope="module")
def window() -> tuple[datetime, datetime]:
    """Return a day around the current time, because the hour may change during a test."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=12), hour + timedelta(hours=12)


@pytest.fixture(scope="module")
def work(billing_stack: LiveStack) -> str:
    """Train on 3 datums of 4 tokens, sample 2 times 5 tokens from a prompt of 3, and save.

    Returns the session.
    """
    create_key(billing_stack, "root")

    with tinker.ServiceClient(
        base_url=billing_stack.url, api_key=create_key(billing_stack, "ann"), user_metadata={"a": "b"}
    ) as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]),
            loss_fn_inputs={"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4},  # type: ignore
        )

        training.forward_backward([datum] * 2, "cross_entropy").result()
        training.forward([datum], "cross_entropy").result()
        training.optim_step(tinker.AdamParams()).result()
        sampling = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=5)
        sampling.sample(tinker.ModelInput.from_ints([1, 2, 3]), 2, params).result()
        training.save_state("kept").result()
        billing_stack.server.store.write(lambda tx: usage.record_storage(tx, datetime.now(UTC).timestamp()))
        return training.model_id.partition(":")[0]


def admin_client(stack: LiveStack, owner: str) -> tinker.AdminClient:
    return tinker.AdminClient(base_url=stack.url, api_key=create_key(stack, owner))


def test_events_have_each_kind_of_work_once(
    billing_stack: LiveStack, work: str, window: tuple[datetime, datetime]
) -> None:
    reported = admin_client(billing_stack, "ann").get_billing_usage(*window).result(timeout=300)
    amounts: dict[str, float] = {}
    for event in reported.data:
        info = event.event_info
        assert event.bucket_end - event.bucket_start == timedelta(hours=1) and event.bucket_start.minute == 0
        assert (event.user_name, event.user_id, event.session_id) == ("ann", "tml:user:ann", work)
        amount = getattr(info, "token_count", getattr(info, "count", getattr(info, "gigabyte_hours", 0)))
        amounts[info.type] = amounts.get(info.type, 0) + amount
        assert event.base_model == (None if info.type == "storage" else PUBLIC_NAME)

    stored = amounts.pop("storage")
    assert amounts == {"training": 12, "sampling_prefill": 3, "sampling_sample": 10, "checkpoint": 1}
    assert 0 < stored < 1
    assert reported.sessions[work].user_metadata == {"a": "b"} and reported.cost_data_through is None
    costs = {event.event_info.type: event.estimated_cost_usd for event in reported.data}
    assert costs["checkpoint"] is None and costs["training"] == pytest.approx(12 * 2.0 / 1e6)
    rates = {event.event_info.type: event.effective_rate_usd_per_million_tokens for event in reported.data}
    assert rates["sampling_sample"] == 8.0 and rates["storage"] is None


def test_an_admin_sees_all_owners_and_others_their_own(
    billing_stack: LiveStack, work: str, window: tuple[datetime, datetime]
) -> None:
    seen = {
        owner: {
            event.session_id for event in admin_client(billing_stack, owner).get_billing_usage(*window).result().data
        }
        for owner in ("root", "bob")
    }
    assert seen == {"root": {work}, "bob": set()}


def test_storage_has_its_price(billing_stack: LiveStack, work: str) -> None:
    reported = admin_client(billing_stack, "ann").get_current_checkpoint_storage_usage().result(timeout=300)
    (item,) = reported.data
    assert reported.effective_rate_usd_per_gigabyte_month == 0.1 and item.size_bytes > 0
    assert item.estimated_monthly_cost_usd == pytest.approx(item.size_bytes / 1e9 * 0.1)


@pytest.mark.parametrize(
    ("start", "end", "problem"),
    [
        ("2026-11-01T00:30:00Z", "2026-11-02T00:00:00Z", "starting_on: .*not the start of an hour"),
        ("2026-11-01T00:00:00Z", "2026-11-02T00:00:01Z", "ending_before: .*not the start of an hour"),
        ("2026-11-01T00:00:00Z", "2026-11-01T00:00:00Z", "ending_before: .*not after starting_on"),
        ("2026-11-01T00:00:00Z", "2026-11-15T01:00:00Z", "ending_before: .*more than 14 days after"),
        ("2999-11-01T00:00:00Z", "2999-11-01T01:00:00Z", "starting_on: .*in the future"),
        ("0001-01-01T00:00:00+14:00", "0001-01-01T01:00:00Z", "starting_on"),
        ("yesterday", "2026-11-01T00:00:00Z", "starting_on"),
    ],
)
def test_wrong_windows_are_refused_by_name(billing_stack: LiveStack, start: str, end: str, problem: str) -> None:
    answer = httpx.get(
        f"{billing_stack.url}/api/v1/billing/usage/events",
        params={"starting_on": start, "ending_before": end},
        headers={"X-API-Key": create_key(billing_stack, "ann")},
    )
    assert answer.status_code in (400, 422)
    assert re.search(problem, answer.text)


def test_a_window_without_a_zone_is_in_utc(
    billing_stack: LiveStack, work: str, window: tuple[datetime, datetime]
) -> None:
    bounds = {"starting_on": window[0], "ending_before": window[1]}
    answer = httpx.get(
        f"{billing_stack.url}/api/v1/billing/usage/events",
        params={name: at.replace(tzinfo=None).isoformat() for name, at in bounds.items()},
        headers={"X-API-Key": create_key(billing_stack, "ann")},
    )
    assert {event["session_id"] for event in answer.json()["data"]} == {work}


def test_prices_are_settings(tmp_path) -> None:
    settings = ApiSettings(data_dir=tmp_path, base_model="m", apps=(TeamsSettings(prices=PRICES),))
    assert settings.get_app_settings(TeamsSettings).prices == PRICES
