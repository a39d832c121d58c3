"""Quotas for the SDK and the OpenAI and Anthropic endpoints: refusals, their messages, and paused requests."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tinker
from sqlmodel import select

from skyrl_tx.apps.chat import generation
from skyrl_tx.apps.chat import service as chat_service
from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.quotas import Subject
from skyrl_tx.engine import engine
from skyrl_tx.store import audit, keys
from skyrl_tx.store.tables import OverQuota, RequestRow
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack
from tests.support.polling import until

PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]),
    loss_fn_inputs={"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4},  # type: ignore
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A server whose engine measures the quotas before each turn instead of every second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_MEASURE_PERIOD_S", 0.0)
        with live_stack("fake", tmp_path_factory.mktemp("stack"), has_tokenizer=True, retrieve_hold_s=0.3) as stack:
            make_key(stack, "root", "admin")
            yield stack


def make_key(stack: LiveStack, owner: str, scope: Any = "user") -> str:
    made, _ = stack.server.store.write(
        lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=time.time())
    )
    return made


def put(stack: LiveStack, subject: str, name: str, value: int | None, over: OverQuota = "wait") -> None:
    """Set a quota. The engine measures it before it reads the next request."""
    about = Subject.parse(subject)
    stack.server.store.write(lambda tx: quotas.put(tx, about, name, value, audit.OPERATOR, time.time(), over=over))


def service(stack: LiveStack, owner: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=stack.url, api_key=make_key(stack, owner))


def test_models_in_training(stack: LiveStack) -> None:
    put(stack, "mia", "models_in_training", 1)
    with service(stack, "mia") as mia:
        first = mia.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        with pytest.raises(tinker.RequestFailedError) as refused:
            mia.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        reason = f"mia has 1 models in training, and the quota is 1: unload one of {first.model_id}, or end its session"
        assert reason in str(refused.value)
        with service(stack, "noa") as noa:
            noa.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        put(stack, "mia", "models_in_training", 2)
        mia.create_lora_training_client(PUBLIC_NAME, rank=4).result()

    put(stack, "mia", "models_in_training", 1)
    with service(stack, "mia") as mia:  # models of the finished session do not count
        mia.create_lora_training_client(PUBLIC_NAME, rank=4).result()


def test_checkpoint_bytes(stack: LiveStack) -> None:
    with service(stack, "kim") as kim:
        training = kim.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        path = training.save_state("first").result().path
        put(stack, "kim", "checkpoint_bytes", 1)
        for save in (training.save_state, training.save_weights_for_sampler):
            with pytest.raises(
                tinker.RequestFailedError, match=r"the checkpoints of kim take [\d,]+ bytes, and the quota is 1"
            ):
                save("second").result()

        training.save_weights_and_get_sampling_client().result()  # an unnamed save is not a checkpoint
        training.forward_backward([DATUM], "cross_entropy").result()
        rest = tinker.RestClient(base_url=stack.url, api_key=make_key(stack, "kim"))
        refused = copy_weights(stack, "kim", path)
        assert (
            refused.status_code == 400 and "with this one, and the quota is 1: delete some" in refused.json()["detail"]
        )
        rest.delete_checkpoint_from_tinker_path(path).result()
        training.save_state("second").result()


def copy_weights(stack: LiveStack, owner: str, path: str) -> httpx.Response:
    return httpx.post(
        f"{stack.url}/api/v1/copy_weights",
        json={"source_path": path, "destination_project_id": "p"},
        headers={"X-API-Key": make_key(stack, owner), "X-Idempotency-Key": "one"},
    )


def wait_until_paused(stack: LiveStack, key: str, request_id: str) -> dict[str, Any]:
    """Poll until the server reports that a quota pauses a request."""

    def poll() -> dict[str, Any] | None:
        answer = httpx.post(
            f"{stack.url}/api/v1/retrieve_future", json={"request_id": request_id}, headers={"X-API-Key": key}
        )
        assert answer.status_code == 408, answer.text
        body = answer.json()
        return body if body["queue_state"] == "paused_rate_limit" else None

    return until(poll)


def test_training_waits_for_its_day_and_goes_on_when_the_quota_is_raised(stack: LiveStack) -> None:
    put(stack, "tom", "training_tokens_per_day", 8)

    with service(stack, "tom") as tom, stack.recorder.recording() as calls:
        training = tom.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        for _ in range(2):
            training.forward_backward([DATUM], "cross_entropy").result()
        waiting = training.forward_backward([DATUM], "cross_entropy")
        step = training.optim_step(tinker.AdamParams())
        until(lambda: sum(call.path in ("forward_backward", "optim_step") for call in calls) == 4)
        rows = stack.server.store.read(lambda tx: list(tx.exec(select(RequestRow).where(RequestRow.owner == "tom"))))
        open_ids = [row.request_id for row in rows if row.status == "open"]
        assert len(open_ids) == 2

        for request_id in open_ids:
            body = wait_until_paused(stack, make_key(stack, "tom"), request_id)
            reason = "tom has used 8 of today's 8 training tokens; requests resume at 00:00 UTC"
            assert body["queue_state_reason"] == reason and body["type"] == "try_again"
        with service(stack, "uma") as uma:  # other owners can train meanwhile
            other = uma.create_lora_training_client(PUBLIC_NAME, rank=4).result()
            other.forward_backward([DATUM], "cross_entropy").result()
        put(stack, "tom", "training_tokens_per_day", 1_000)
        assert waiting.result(timeout=300).metrics["num_tokens:sum"] == 4
        step.result(timeout=300)


def test_work_beyond_a_day_fails_if_the_quota_says_so(stack: LiveStack) -> None:
    put(stack, "ivo", "training_tokens_per_day", 4, "fail")
    put(stack, "ivo", "sample_tokens_per_day", 5, "fail")

    with service(stack, "ivo") as ivo:
        training = ivo.create_lora_training_client(PUBLIC_NAME, rank=4).result()
        training.forward_backward([DATUM], "cross_entropy").result()
        training.optim_step(tinker.AdamParams()).result()
        with pytest.raises(
            tinker.RequestFailedError, match=r"training_tokens_per_day: ivo has used 4 of today's 4 .* ask an ad"
        ):
            training.forward_backward([DATUM], "cross_entropy").result(timeout=300)
        with pytest.raises(tinker.RequestFailedError, match="the gradient is incomplete"):
            training.optim_step(tinker.AdamParams()).result(timeout=300)

        path = training.save_state("kept").result(timeout=300).path
        assert path.endswith("/weights/kept"), "the trained weights can be saved"
        sampling = ivo.create_sampling_client(base_model=PUBLIC_NAME).result()
        params = tinker.SamplingParams(max_tokens=3, seed=1, stop=[])
        sampling.sample(PROMPT, 1, params).result()
        with pytest.raises(tinker.RequestFailedError, match="sample_tokens_per_day: ivo has used 6 of today's 5"):
            sampling.sample(PROMPT, 1, params).result(timeout=300)


def test_sampling_waits_for_its_day(stack: LiveStack) -> None:
    """SDKs that poll for all samples of a client at once receive no state.

    SDKs that poll for each sample do.
    """
    put(stack, "eva", "sample_tokens_per_day", 10)
    with service(stack, "eva") as eva:
        sampling = eva.create_sampling_client(base_model=PUBLIC_NAME).result()
        params = tinker.SamplingParams(max_tokens=10, seed=1, stop=[])
        sampling.sample(PROMPT, 1, params).result()
        waiting = sampling.sample(PROMPT, 1, params)

        def open_request() -> str | None:
            is_open = RequestRow.owner == "eva", RequestRow.status == "open"
            return stack.server.store.read(lambda tx: tx.exec(select(RequestRow.request_id).where(*is_open)).first())

        body = wait_until_paused(stack, make_key(stack, "eva"), until(open_request))
        assert body["queue_state_reason"] == "eva has used 13 of today's 10 sample tokens; requests resume at 00:00 UTC"
        with httpx.Client(base_url=stack.url, headers={"X-API-Key": make_key(stack, "eva")}) as client:
            body = {"model": PUBLIC_NAME, "max_tokens": 5}
            refused = client.post("/oai/api/v1/completions", json={**body, "prompt": "x"})
            talk = {**body, "messages": [{"role": "user", "content": "x"}]}
            refused_too = client.post("/anthropic/api/v1/messages", json=talk)
        put(stack, "eva", "sample_tokens_per_day", None)
        assert len(waiting.result(timeout=300).sequences[0].tokens) == 10
    for answer in (refused, refused_too):
        assert answer.status_code == 429 and "eva has used 13 of today's 10" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "60" and answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_queued_chat_calls_get_429_when_the_quota_is_used_up(
    stack: LiveStack, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The check before a call is submitted sees an old status, so the call is queued."""
    monkeypatch.setattr(chat_service, "find_sample_pause", lambda *_: None)
    monkeypatch.setattr(generation, "_CHECK_QUOTA_EVERY_S", 0.1)
    owner = f"eve-{stream}"
    put(stack, owner, "sample_tokens_per_day", 4)
    body = {"model": PUBLIC_NAME, "max_tokens": 9, "stream": stream}
    talk = {**body, "messages": [{"role": "user", "content": "x"}]}

    with httpx.Client(base_url=stack.url, headers={"X-API-Key": make_key(stack, owner)}, timeout=60) as client:
        first = client.post("/v1/completions", json={**body, "prompt": [1, 2, 3], "ignore_eos": True})
        assert first.status_code == 200

        refused = [
            client.post("/v1/completions", json={**body, "prompt": "x"}),
            client.post("/v1/completions", json={**body, "prompt": ["x", "y"]}),
            client.post("/v1/chat/completions", json=talk),
            client.post("/anthropic/api/v1/messages", json=talk),
        ]

    reason = f"{owner} has used 12 of today's 4 sample tokens; requests resume at 00:00 UTC"
    for answer in refused:
        assert answer.status_code == 429 and answer.json()["error"]["message"] == reason
        assert answer.headers["retry-after"] == "60" and answer.headers["x-should-retry"] == "false"
    statuses = select(RequestRow.status).where(RequestRow.owner == owner).order_by(RequestRow.status)
    cancelled = ["done", *["failed"] * 5]
    until(lambda: stack.server.store.read(lambda tx: list(tx.exec(statuses))) == cancelled)
