"""When a key expires or is revoked, its open polls and download URLs end."""

import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

import httpx
import pytest

from skyrl_tx.store import keys
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack

WITHIN_S = 3.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("fake", tmp_path_factory.mktemp("stack"), token_delay_s=0.2) as stack:
        stack.server.store.write(lambda tx: keys.create(tx, owner="eve", scope="user", name="", note="", now=1.0))
        yield stack


def new_key(stack: LiveStack) -> tuple[dict[str, str], int]:
    """Create a key for Ann and return its header and its number."""
    key, row = stack.server.store.write(
        lambda tx: keys.create(tx, owner="ann", scope="user", name="k", note="", now=1.0)
    )
    assert row.key_id is not None
    return {"X-API-Key": key}, row.key_id


def revoke(stack: LiveStack, key_id: int) -> None:
    assert stack.server.store.write(lambda tx: keys.revoke(tx, key_id, time.time()))


def expire(stack: LiveStack, key_id: int) -> None:
    stack.server.store.write(lambda tx: keys.rotate(tx, key_id, overlap_s=0.0, now=time.time()))


def post(stack: LiveStack, headers: dict[str, str], endpoint: str, /, **body: object) -> httpx.Response:
    return stack.server.client.post(f"/api/v1/{endpoint}", json=body, headers=headers)


@pytest.mark.parametrize("end", [revoke, expire])
@pytest.mark.parametrize("endpoint", ["retrieve_future", "retrieve_futures"])
def test_held_poll_ends_with_its_key(stack: LiveStack, endpoint: str, end: Callable[[LiveStack, int], None]) -> None:
    headers, key_id = new_key(stack)
    session = post(stack, headers, "create_session", tags=[], sdk_version="0.38.0").json()["session_id"]
    sampling = post(
        stack,
        headers,
        "create_sampling_session",
        session_id=session,
        sampling_session_seq_id=0,
        base_model=PUBLIC_NAME,
    ).json()["sampling_session_id"]

    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    params = {"max_tokens": 100, "stop": [], "seed": 1}

    queued = post(
        stack,
        headers,
        "asample",
        sampling_session_id=sampling,
        seq_id=0,
        num_samples=1,
        prompt=prompt,
        sampling_params=params,
    )
    assert queued.status_code == HTTPStatus.OK, queued.text
    body: dict[str, object] = {"request_id": queued.json()["request_id"]}
    if endpoint == "retrieve_futures":
        body = {"target": {"type": "sampling_session", "sampling_session_id": sampling}}
    statuses: list[int] = []

    def poll() -> None:
        with httpx.Client(base_url=stack.url, timeout=40) as client:
            while HTTPStatus.UNAUTHORIZED not in statuses:
                answer = client.post(f"/api/v1/{endpoint}", json=body, headers=headers)
                statuses.append(answer.status_code)

    polling = threading.Thread(target=poll)
    polling.start()
    time.sleep(0.5)
    assert not statuses
    ended_at = time.monotonic()
    end(stack, key_id)
    polling.join()
    assert time.monotonic() - ended_at < WITHIN_S
    assert set(statuses[:-1]) == {HTTPStatus.OK if endpoint == "retrieve_futures" else HTTPStatus.REQUEST_TIMEOUT}
    owner, _ = new_key(stack)
    post(stack, owner, "cancel_future", request_id=queued.json()["request_id"])


@pytest.mark.parametrize("end", [revoke, expire])
def test_download_url_ends_with_the_key_that_asked_for_it(
    stack: LiveStack, end: Callable[[LiveStack, int], None]
) -> None:
    headers, key_id = new_key(stack)
    stack.server.client.headers.update(headers)
    run = stack.server.model()
    stack.server.result(stack.server.post("save_weights_external", model_id=run, seq_id=1, path="a"))
    stack.server.client.headers.pop("X-API-Key")

    def url(headers: dict[str, str]) -> str:
        place = f"/api/v1/training_runs/{run}/checkpoints/external_weights/a/external_weights_urls"
        return stack.server.client.get(place, headers=headers).json()["urls"]["adapter_config.json"]

    other, _ = new_key(stack)
    ending, lasting = url(headers), url(other)
    assert httpx.get(ending).status_code == HTTPStatus.OK
    end(stack, key_id)
    answer = httpx.get(ending)
    assert answer.status_code == HTTPStatus.FORBIDDEN and "was revoked or has expired" in answer.json()["detail"]
    borrowed = ending.replace(f"key={key_id}", lasting.partition("&")[2].partition("&")[0])
    without = ending.replace(f"&key={key_id}", "")
    for forged in (borrowed, without):
        assert "not signed by this server" in httpx.get(forged).json()["detail"]
    assert httpx.get(lasting).status_code == HTTPStatus.OK


def test_download_url_of_another_owner_ends_when_the_checkpoint_is_unpublished(stack: LiveStack) -> None:
    headers, _ = new_key(stack)
    stack.server.client.headers.update(headers)
    run = stack.server.model()
    stack.server.result(stack.server.post("save_weights_external", model_id=run, seq_id=1, path="a"))

    stack.server.client.headers.pop("X-API-Key")
    place = f"/api/v1/training_runs/{run}/checkpoints/external_weights/a"
    bob, _ = stack.server.store.write(lambda tx: keys.create(tx, owner="bob", scope="user", name="", note="", now=1.0))
    stack.server.client.post(f"{place}/publish", headers=headers)
    answer = stack.server.client.get(f"{place}/external_weights_urls", headers={"X-API-Key": bob})
    url = answer.json()["urls"]["adapter_config.json"]
    assert httpx.get(url).status_code == HTTPStatus.OK
    stack.server.client.delete(f"{place}/publish", headers=headers)
    assert "no longer published" in httpx.get(url).json()["detail"]
