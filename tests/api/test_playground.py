"""The playground's routes: replies equal the SDK's samples, and only the page's visitor may call the routes."""

import json
import math
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types
from tokenizers import Tokenizer

from skyrl_tx.apps.history import kept_samples
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import futures, sessions
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.console_world import Browser, ConsoleWorld, console_world
from tests.support.live_api import live_api
from tests.support.live_stack import CONTEXT, PUBLIC_NAME
from tests.support.polling import until
from tests.support.tiny_tokenizer import PACKAGED

CHAT, RENDER, SCORE = "/console/chat", "/console/render", "/console/score"
TEMPLATE = Path(__file__).parents[1] / "unit" / "apps" / "chat" / "templates" / "qwen3.jinja"
TOKENIZER = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2? é"}]
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2? é<|im_end|>\n<|im_start|>assistant\n"
)
ASK: dict[str, Any] = {"model": PUBLIC_NAME, "messages": TALK, "max_tokens": 12, "seed": 3}
SCORED: dict[str, Any] = {"model": PUBLIC_NAME, "prompt_tokens": [1, 2], "reply_tokens": [3, 4]}
BODIES = {CHAT: ASK, RENDER: {"model": PUBLIC_NAME, "messages": TALK}, SCORE: SCORED}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("playground"), has_tokenizer=True) as world:
        yield world


@pytest.fixture(scope="module")
def ann_key(world: ConsoleWorld) -> str:
    return world.key("ann")


@pytest.fixture(scope="module")
def ann(world: ConsoleWorld, ann_key: str) -> Iterator[Browser]:
    with world.browser(ann_key) as browser:
        yield browser


@pytest.fixture(scope="module")
def run(world: ConsoleWorld, ann_key: str) -> str:
    """Create one of Ann's runs with one optimizer step and two sampler checkpoints, "first" and "second"."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},  # pyright: ignore
    )

    with tinker.ServiceClient(base_url=world.server.url, api_key=ann_key) as service:
        client = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        client.save_weights_for_sampler("first").result()
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.5)).result()
        client.save_weights_for_sampler("second").result()
        client.save_state("state").result()
        return client.model_id


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == HTTPStatus.OK, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data: ")]


def get_tokens(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [
        token for event in found if event["type"] == "delta" and event["index"] == index for token in event["tokens"]
    ]


def get_text(found: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(event["text"] for event in found if event["type"] == "delta" and event["index"] == index)


def test_a_reply_is_the_sdks_sample_with_its_log_probabilities(
    world: ConsoleWorld, ann: Browser, ann_key: str, run: str
) -> None:
    path = f"tinker://{run}/sampler_weights/second"
    for model, named in ((PUBLIC_NAME, {"base_model": PUBLIC_NAME}), (path, {"model_path": path})):
        found = events(ann.call(CHAT, ASK | {"model": model, "n": 2, "temperature": 0.8, "top_p": 0.9}))
        prompt = found[0]
        assert prompt["type"] == "prompt" and prompt["text"] == RENDERED == "".join(prompt["texts"])
        assert prompt["tokens"] == TOKENIZER.encode(RENDERED, add_special_tokens=False).ids

        with tinker.ServiceClient(base_url=world.server.url, api_key=ann_key) as service:
            client = service.create_sampling_client(**named).result()
            params = types.SamplingParams(max_tokens=12, seed=3, temperature=0.8, top_p=0.9, stop=prompt["stop"])
            drawn = client.sample(
                types.ModelInput.from_ints(prompt["tokens"]), 2, params, topk_sample_logprobs=5
            ).result()

        for index, sequence in enumerate(drawn.sequences):
            tokens = get_tokens(found, index)
            assert [token["id"] for token in tokens] == list(sequence.tokens)
            assert [token["logprob"] for token in tokens] == sequence.logprobs
            assert all(len(token["top"]) >= 5 and token["top"][0][2] >= token["top"][4][2] for token in tokens)
            (finish,) = [event for event in found if event["type"] == "finish" and event["index"] == index]
            assert finish["count"] == len(sequence.tokens) and finish["reason"] == sequence.stop_reason
            assert get_text(found, index) == TOKENIZER.decode(list(sequence.tokens))


def test_the_prompt_tells_the_path_of_its_weights(ann: Browser, run: str) -> None:
    second = f"tinker://{run}/sampler_weights/second"
    for model, path in ((PUBLIC_NAME, None), (second, second), (run, second), (f"{PUBLIC_NAME};{second}", second)):
        assert ann.call(RENDER, {"model": model, "prompt": "a"}).json()["model_path"] == path
        assert events(ann.call(CHAT, ASK | {"model": model}))[0]["model_path"] == path


def test_thinking_is_a_variable_of_the_template_and_no_key_is_needed_where_none_is(tmp_path: Path) -> None:
    tokenizer = str(write_tiny_model(tmp_path / "model"))
    (tmp_path / "data").mkdir()
    settings = ApiSettings(
        port=0, data_dir=tmp_path / "data", base_model="fake", tokenizer_id=tokenizer, chat_template=TEMPLATE
    )
    with live_api(settings) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        visitor = Browser(client)
        assert read_setup(visitor.get("/playground").text)["has_thinking"]
        texts = [
            visitor.call(RENDER, {"model": "fake", "messages": TALK} | thinking).json()["text"]
            for thinking in ({}, {"thinking": True}, {"thinking": False})
        ]
        assert texts[0] == texts[1] == RENDERED and texts[2] == RENDERED + "<think>\n\n</think>\n\n"
        assert visitor.call(CHAT, ASK | {"model": "fake"}).status_code == HTTPStatus.SERVICE_UNAVAILABLE


def test_the_texts_of_tokens_joined_are_the_text(ann: Browser) -> None:
    text = "日本 é 🙂 plain"
    prompt = ann.call(RENDER, {"model": PUBLIC_NAME, "prompt": text}).json()
    assert "".join(prompt["texts"]) == text and "" in prompt["texts"] and prompt["stop"] == []
    reply = TOKENIZER.encode(text).ids
    tokens = ann.call(SCORE, SCORED | {"reply_tokens": reply}).json()["tokens"]
    assert "".join(token["text"] for token in tokens) == text
    assert all(bytes.fromhex(token["bytes"]) for token in tokens if not token["text"])
    assert all(
        isinstance(other, int) and isinstance(shown, str) for token in tokens for other, shown, _ in token["top"]
    )


def test_a_score_equals_the_sdks_log_probabilities(world: ConsoleWorld, ann: Browser, ann_key: str, run: str) -> None:
    path = f"tinker://{run}/sampler_weights/second"
    prompt, reply = [5, 6, 7], [8, 9, 10, 11]
    scores: list[list[float]] = []

    for model, named in ((PUBLIC_NAME, {"base_model": PUBLIC_NAME}), (path, {"model_path": path})):
        tokens = ann.call(SCORE, {"model": model, "prompt_tokens": prompt, "reply_tokens": reply}).json()["tokens"]
        with tinker.ServiceClient(base_url=world.server.url, api_key=ann_key) as service:
            client = service.create_sampling_client(**named).result()
            expected = client.compute_logprobs(types.ModelInput.from_ints(prompt + reply)).result()
        assert [token["id"] for token in tokens] == reply
        scores.append([token["logprob"] for token in tokens])
        assert scores[-1] == pytest.approx(expected[len(prompt) :], abs=1e-5)
        assert all(token in [top[0] for top in scored["top"]] for token, scored in zip(reply, tokens, strict=True))
    assert scores[0] != scores[1], "training moved the model"


def test_a_reply_can_be_prefilled_and_raw_prompts_need_no_template(ann: Browser) -> None:
    started = events(ann.call(CHAT, ASK | {"messages": [*TALK, {"role": "assistant", "content": "It is"}]}))
    assert started[0]["text"] == RENDERED + "It is"
    raw = events(ann.call(CHAT, {"model": PUBLIC_NAME, "prompt": RENDERED, "max_tokens": 12, "seed": 3}))
    ids = events(ann.call(CHAT, {"model": PUBLIC_NAME, "prompt_tokens": raw[0]["tokens"], "max_tokens": 12, "seed": 3}))
    assert get_tokens(raw) == get_tokens(ids) == get_tokens(events(ann.call(CHAT, ASK)))
    long = events(ann.call(CHAT, ASK | {"max_tokens": 10_000}))
    assert long[0]["max_tokens"] == CONTEXT - len(long[0]["tokens"])


def test_samples_are_the_visitors_own_in_a_session_of_the_server(world: ConsoleWorld, ann: Browser) -> None:
    events(ann.call(CHAT, ASK))
    rows = world.server.store.read(lambda tx: [*sessions.iterate(tx, None, None, None, None)])
    assert sum(row.display_name == sessions.PLAYGROUND for row in rows) == 1


def test_replies_are_not_among_the_samples_of_the_run(
    world: ConsoleWorld, ann: Browser, ann_key: str, run: str
) -> None:
    def num_kept(model_id: str) -> int:
        steps = world.server.store.read(lambda tx: kept_samples.list_steps(tx, ModelId(model_id), "ann"))
        return sum(number for _, number in steps)

    path = f"tinker://{run}/sampler_weights/first"
    before = num_kept(run), num_kept("")
    for model in (path, PUBLIC_NAME):
        events(ann.call(CHAT, ASK | {"model": model}))
    assert (num_kept(run), num_kept("")) == before
    with tinker.ServiceClient(base_url=world.server.url, api_key=ann_key) as service:
        client = service.create_sampling_client(model_path=path).result()
        client.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=2)).result()
    assert num_kept(run) == before[0] + 1


def test_the_page_offers_base_models_and_own_sampler_checkpoints(world: ConsoleWorld, ann: Browser, run: str) -> None:
    def setup(query: str) -> dict[str, Any]:
        page = ann.get(f"/playground?{query}")
        assert page.status_code == HTTPStatus.OK, page.text
        return read_setup(page.text)

    first, second = (f"tinker://{run}/sampler_weights/{name}" for name in ("first", "second"))
    found = setup("")
    assert found["models"][0] == PUBLIC_NAME and found["named"] is None and found["has_template"]
    assert [checkpoint["path"] for checkpoint in found["checkpoints"]] == [second, first]
    assert setup(f"mode=checkpoint&checkpoint={first}")["named"] == first
    assert setup(f"run={run}")["named"] == second
    assert ann.get("/playground?checkpoint=tinker://x/weights/y").status_code == HTTPStatus.NOT_FOUND

    with world.browser(world.key("bob")) as bob:
        assert bob.get(f"/playground?checkpoint={first}").status_code == HTTPStatus.NOT_FOUND
        assert run not in bob.get("/playground").text
    assert f"/playground?run={run}" in ann.get(f"/training_runs/{run}").text
    assert "/playground?mode=checkpoint&amp;checkpoint=" + first.replace(":", "%3A") in ann.get("/checkpoints").text
    assert "Open in playground" in ann.get(f"/checkpoints/{run}/sampler_weights/first").text
    assert "Open in playground" not in ann.get(f"/checkpoints/{run}/weights/state").text


def read_setup(page: str) -> dict[str, Any]:
    """Return the data that the page passes to its script."""
    return json.loads(page.split("data-setup='")[1].split("'")[0])


REFUSED: list[tuple[str, dict[str, Any], HTTPStatus, str]] = [
    (CHAT, {"frob": 1}, HTTPStatus.BAD_REQUEST, "frob 1"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "frob": 1}]}, HTTPStatus.BAD_REQUEST, "messages[0].frob 1"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, HTTPStatus.BAD_REQUEST, "messages.0.role"),
    (CHAT, {"messages": []}, HTTPStatus.BAD_REQUEST, "messages"),
    (CHAT, {"messages": None}, HTTPStatus.BAD_REQUEST, "exactly one of them"),
    (CHAT, {"prompt": "a"}, HTTPStatus.BAD_REQUEST, "exactly one of them"),
    (CHAT, {"temperature": -1}, HTTPStatus.BAD_REQUEST, "temperature -1"),
    (CHAT, {"temperature": "hot"}, HTTPStatus.BAD_REQUEST, "temperature"),
    (CHAT, {"top_p": 0}, HTTPStatus.BAD_REQUEST, "top_p 0"),
    (CHAT, {"max_tokens": 0}, HTTPStatus.BAD_REQUEST, "max_tokens 0"),
    (CHAT, {"max_tokens": None}, HTTPStatus.BAD_REQUEST, "max_tokens"),
    (CHAT, {"n": 0}, HTTPStatus.BAD_REQUEST, "n 0"),
    (CHAT, {"n": 9}, HTTPStatus.BAD_REQUEST, "n 9"),
    (CHAT, {"seed": 2**64}, HTTPStatus.BAD_REQUEST, "seed"),
    (CHAT, {"model": "gpt-9"}, HTTPStatus.NOT_FOUND, "model 'gpt-9' does not exist"),
    (CHAT, {"messages": None, "prompt": "a " * 200}, HTTPStatus.BAD_REQUEST, "maximum context length is"),
    (CHAT, {"messages": None, "prompt_tokens": [-1]}, HTTPStatus.BAD_REQUEST, "prompt_tokens.0"),
    (CHAT, {"messages": None, "prompt_tokens": []}, HTTPStatus.BAD_REQUEST, "prompt_tokens"),
    (CHAT, {"messages": None, "prompt": "a", "thinking": True}, HTTPStatus.BAD_REQUEST, "thinking: needs `messages`"),
    (CHAT, {"prompt_tokens": [1] * 2**20}, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "bytes"),
    (RENDER, {"messages": None}, HTTPStatus.BAD_REQUEST, "exactly one of them"),
    (RENDER, {"seed": 1}, HTTPStatus.BAD_REQUEST, "seed 1"),
    (SCORE, {"frob": 1}, HTTPStatus.BAD_REQUEST, "frob 1"),
    (SCORE, {"reply_tokens": []}, HTTPStatus.BAD_REQUEST, "reply_tokens"),
    (SCORE, {"prompt_tokens": [2**31]}, HTTPStatus.BAD_REQUEST, "prompt_tokens.0"),
    (SCORE, {"reply_tokens": [1] * CONTEXT}, HTTPStatus.BAD_REQUEST, "maximum context length is"),
    (SCORE, {"model": "tinker://x/sampler_weights/y"}, HTTPStatus.NOT_FOUND, "no such checkpoint"),
]


@pytest.mark.parametrize(("path", "changes", "status", "words"), REFUSED)
def test_wrong_fields_are_named_before_anything_is_queued(
    world: ConsoleWorld, ann: Browser, path: str, changes: dict[str, Any], status: HTTPStatus, words: str
) -> None:
    made = {name: value for name, value in (BODIES[path] | changes).items() if value is not None}
    answer = ann.call(path, made)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    assert words in answer.json()["detail"]
    assert open_samples(world) == 0


@pytest.mark.parametrize("path", BODIES)
def test_bodies_that_are_no_object_are_refused(ann: Browser, path: str) -> None:
    for body in ([], "x", 1, None, {"model": {}, "messages": {}}, {"messages": [[]]}, {"reply_tokens": "x"}):
        assert ann.call(path, body).status_code == HTTPStatus.BAD_REQUEST
    headers = {"Sec-Fetch-Site": "same-origin", "X-Form-Token": ann.token()}
    for content in (b"", b"{", b"\xff", b"[" * 5000):
        answer = ann.client.post(path, content=content, headers=headers)
        assert answer.status_code in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


@pytest.mark.parametrize("path", [CHAT, SCORE])
def test_a_strangers_checkpoint_does_not_exist_unless_published(
    world: ConsoleWorld, ann: Browser, run: str, path: str
) -> None:
    with world.browser(world.key("bob")) as bob:
        for model in (
            f"tinker://{run}/sampler_weights/first",
            f"{PUBLIC_NAME};tinker://{run}/sampler_weights/first",
            run,
        ):
            hidden = bob.call(path, BODIES[path] | {"model": model})
            missing = bob.call(path, BODIES[path] | {"model": model.replace("first", "none")})
            assert hidden.status_code == missing.status_code == HTTPStatus.NOT_FOUND

        page, published = f"/checkpoints/{run}/sampler_weights/first/publish", f"tinker://{run}/sampler_weights/first"
        ann.post(page, {"public": "yes", "form_token": ann.token()})
        assert bob.call(path, BODIES[path] | {"model": published}).status_code == HTTPStatus.OK
        assert read_setup(bob.get(f"/playground?checkpoint={published}").text)["named"] == published
        ann.post(page, {"public": "no", "form_token": ann.token()})
        assert bob.call(path, BODIES[path] | {"model": published}).status_code == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("path", BODIES)
def test_only_a_page_of_this_server_may_call(world: ConsoleWorld, ann: Browser, ann_key: str, path: str) -> None:
    body = BODIES[path]
    with world.browser() as stranger:
        assert stranger.call(path, body, **{"X-Form-Token": ""}).status_code == HTTPStatus.UNAUTHORIZED
        assert stranger.client.post(path, json=body, headers={"X-API-Key": ann_key}).status_code == 401
    with world.browser(world.key("ann", "read")) as reader:
        answer = reader.call(path, body)
        assert answer.status_code == HTTPStatus.FORBIDDEN and "may not sample" in answer.text
        assert "a key of scope read" in reader.get("/playground").text

    with world.browser(world.key("root", "admin")) as root:
        assert root.call(path, body).status_code == HTTPStatus.OK
    with world.browser(ann_key) as other:
        for token in ("", other.token(), "0" * 64):
            answer = ann.call(path, body, **{"X-Form-Token": token})
            assert answer.status_code == HTTPStatus.FORBIDDEN and "earlier console session" in answer.text

    for headers in (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ):
        answer = ann.call(path, body, **headers)
        assert answer.status_code == HTTPStatus.FORBIDDEN and "page of another site" in answer.text
    assert ann.client.get(path).status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


def open_samples(world: ConsoleWorld) -> int:
    return len(world.server.store.read(lambda tx: futures.list_pending(tx, 0, 100)))


def test_a_reader_who_leaves_cancels_the_sample(tmp_path: Path) -> None:
    with (
        console_world(tmp_path, has_tokenizer=True, token_delay_s=0.4) as world,  # a whole reply would take 36 s
        world.browser(world.key("ann")) as ann,
    ):
        body = ASK | {"max_tokens": 90, "n": 2}
        headers = {"Sec-Fetch-Site": "same-origin", "X-Form-Token": ann.token()}
        with ann.client.stream("POST", CHAT, json=body, headers=headers) as response:
            kinds: list[str] = []
            for line in response.iter_lines():
                kinds += [json.loads(line.removeprefix("data: "))["type"]] if line else []
                if kinds.count("delta") > 2:
                    break
            assert kinds[0] == "prompt" and open_samples(world) == 1
        until(lambda: open_samples(world) == 0, within_s=20.0)


def test_a_model_without_text_takes_token_ids_alone(tmp_path: Path) -> None:
    with console_world(tmp_path) as world, world.browser(world.key("ann")) as ann:
        answer = ann.call(CHAT, ASK)
        assert answer.status_code == HTTPStatus.BAD_REQUEST and "tokenizer.json" in answer.json()["detail"]
        found = events(ann.call(CHAT, {"model": PUBLIC_NAME, "prompt_tokens": [1, 2], "max_tokens": 3, "seed": 1}))
        assert found[0]["texts"] == ["", ""] and found[0]["tokens"] == [1, 2]
        tokens = get_tokens(found)
        assert len(tokens) == 3 and all(token["text"] == "" and math.isfinite(token["logprob"]) for token in tokens)
        assert not read_setup(ann.get("/playground").text)["has_tokenizer"]
