"""The playground in a browser: replies side by side, tokens, differences, stopping, and code that runs."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.store import futures
from tests.support.client_environments import CHAT_CLIENTS
from tests.support.console_world import ConsoleWorld, console_world
from tests.support.live_stack import PUBLIC_NAME
from tests.support.polling import until
from tests.support.watched_page import WITHIN_MS, WatchedPage

pytestmark = [pytest.mark.browser, pytest.mark.slow]
HOSTILE = '<img src=x onerror="alert(1)">{{7*7}}'
REPLY_TOKENS = 24


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console"), has_tokenizer=True, token_delay_s=0.03) as world:
        yield world


@pytest.fixture(scope="module")
def key(world: ConsoleWorld) -> str:
    return world.key("ann")


@pytest.fixture(scope="module")
def run(world: ConsoleWorld, key: str) -> str:
    """One of Ann's runs with one small optimizer step and a sampler checkpoint."""
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(60))),
        loss_fn_inputs={
            "target_tokens": np.arange(1, 61, dtype=np.int64),
            "weights": np.ones(60, dtype=np.float32),
        },
    )

    with tinker.ServiceClient(base_url=world.server.url, api_key=key) as service:
        client = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        client.forward_backward([datum], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.05)).result()
        client.save_weights_for_sampler("000001").result()
        return client.model_id


@contextmanager
def open_page(world: ConsoleWorld, chromium: Any, key: str, **options: Any) -> Iterator[Any]:
    """Log in and yield the page. Asserts at the end that nothing went wrong in it."""
    base = world.server.url
    context = chromium.new_context(base_url=base, viewport={"width": 1440, "height": 900}, **options)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    watched = WatchedPage(context, base)
    watched.page.goto("/login")
    watched.page.get_by_label("API key").fill(key)
    watched.page.get_by_role("button", name="Log in").click()
    watched.page.wait_for_url("**/overview")
    yield watched.page
    assert watched.problems == []
    context.close()


def send(page: Any, text: str, tokens: int = REPLY_TOKENS) -> None:
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Control+Enter")


def wait_until_finished(page: Any) -> None:
    page.get_by_role("button", name="Stop").wait_for(state="hidden")


def statuses(page: Any) -> list[str]:
    return page.locator(".panel .status").all_inner_texts()


def find_violations(axe: Any, page: Any) -> list[tuple[str, list[str]]]:
    """Return the accessibility checker's findings with their elements."""
    return [
        (violation["id"], [node["html"] for node in violation["nodes"]])
        for violation in axe.run(page).response["violations"]
    ]


def parse_number(text: str) -> float:
    """Return the first number of a text. Its minus may be typographic."""
    found = re.search(r"[+−]?\d+(\.\d+)?(e-?\d+)?", text)
    assert found is not None, text
    return float(found.group().replace("−", "-"))


def code(page: Any, kind: str) -> str:
    """Copy the code of the first panel's request."""
    page.get_by_role("button", name="Code").first.click()
    page.get_by_role("dialog").get_by_label(kind).check()
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    page.get_by_role("button", name="Close").click()
    return copied


def test_two_models_answer_side_by_side(
    world: ConsoleWorld, chromium: Any, key: str, run: str, screenshots: Path
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    with open_page(world, chromium, key) as page:
        page.goto(f"/training_runs/{run}")
        page.get_by_role("link", name="Open in playground").click()
        page.locator("select.model").nth(1).wait_for()
        assert page.locator("select.model").nth(1).input_value() == f"tinker://{run}/sampler_weights/000001"

        send(page, HOSTILE)
        seen: list[list[str]] = []
        end = time.monotonic() + WITHIN_MS / 1000
        while page.get_by_role("button", name="Stop").is_visible() or not seen:
            assert time.monotonic() < end
            seen.append(statuses(page))
            page.wait_for_timeout(60)

        both = [now for now in seen if all(re.match(r"\d+ tok .*writing…", status) for status in now)]
        assert len({tuple(now) for now in both}) > 2, "the replies of both models grow at the same time"
        assert all(f"{REPLY_TOKENS} tok" in status and "length" in status for status in statuses(page))
        assert page.locator(".said").first.inner_text() == HOSTILE

        page.get_by_label("Tokens", exact=True).check()
        tokens = page.locator(".panel").first.locator(".toks .tok")
        assert tokens.count() == REPLY_TOKENS
        tip = page.get_by_role("tooltip")
        tokens.nth(2).hover()
        assert re.search(r"id \d+\s+this token\s+p \d.* · log p [+−]\d", tip.inner_text())
        assert tip.locator(".top").count() == 5

        page.get_by_role("heading", name="Playground").hover()
        tip.wait_for(state="hidden")
        tokens.first.focus()
        page.keyboard.press("ArrowRight")
        shown = tip.inner_text()
        page.keyboard.press("End")
        assert tip.inner_text() != shown

        page.keyboard.press("Escape")
        tip.wait_for(state="hidden")
        page.screenshot(path=screenshots / "playground-tokens.png")

        page.get_by_label("What changed").check()
        page.locator(".change", has_text="Sum").nth(1).wait_for()
        shown_sum = parse_number(page.locator(".change").first.inner_text().partition(":")[2])
        tokens.nth(3).hover()
        assert re.search(r"difference\s+[+−]\d+\.\d{3}", tip.inner_text()) and PUBLIC_NAME in tip.inner_text()

        page.screenshot(path=screenshots / "playground.png")
        reply, prompt = (
            page.evaluate(f"JSON.parse(sessionStorage.playground).panels[0].turns[0].{path}")
            for path in ("replies[0].tokens.map((token) => token.id)", "prompt.tokens")
        )
        sums = log_likelihoods(world, key, prompt, reply, [None, f"tinker://{run}/sampler_weights/000001"])
        assert shown_sum == pytest.approx(sums[0] - sums[1], abs=0.011) and shown_sum != 0
        assert page.evaluate("localStorage.length") == 0

        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            for view in ("Text", "Tokens", "What changed"):
                page.get_by_label(view, exact=True).check()
                assert find_violations(axe, page) == [], (scheme, view)

        page.reload()
        assert page.locator(".said").first.inner_text() == HOSTILE
        page.get_by_label("Samples").fill("3")
        page.get_by_role("button", name="Add model").click()
        send(page, "And 5 spiders?")
        wait_until_finished(page)
        assert page.locator(".turn:last-child .reply").count() == 9
        assert find_violations(axe, page) == []

        page.get_by_role("button", name="Prompt").first.click()
        assert find_violations(axe, page) == []
        raw = page.get_by_role("dialog").locator(".raw")
        assert raw.inner_text().count("<|im_start|>") == 4, "two turns of the user, two of the assistant"
        raw.locator(".tok").nth(1).hover()
        assert "id " in tip.inner_text()
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Clear").click()
        assert page.locator(".turn").count() == 0


def log_likelihoods(
    world: ConsoleWorld, key: str, prompt: list[int], reply: list[int], paths: list[str | None]
) -> list[float]:
    """Return the log-likelihood of a reply under each model, computed by the SDK in another process."""
    program = (
        "import sys, json, tinker\n"
        "base, prompt, reply, paths = json.loads(sys.stdin.read())\n"
        "with tinker.ServiceClient(base_url=base) as service:\n"
        "    for path in paths:\n"
        f"        named = {{'model_path': path}} if path else {{'base_model': {PUBLIC_NAME!r}}}\n"
        "        client = service.create_sampling_client(**named).result()\n"
        "        scores = client.compute_logprobs(tinker.ModelInput.from_ints(prompt + reply)).result()\n"
        "        print(sum(scores[len(prompt):]))\n"
    )

    done = run_with_key([sys.executable, "-c", program], key, json.dumps([world.server.url, prompt, reply, paths]))
    return [float(line) for line in done.split()]


def run_with_key(command: list[str], key: str, stdin: str = "") -> str:
    environment = os.environ | {"TINKER_API_KEY": key}
    done = subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_code_of_a_request_gives_the_same_reply(
    world: ConsoleWorld, chromium: Any, key: str, run: str, client_environment: Any, tmp_path: Path
) -> None:
    with open_page(world, chromium, key) as page:
        page.goto(f"/playground?mode=checkpoint&checkpoint=tinker://{run}/sampler_weights/000001")
        page.locator("select.model").first.select_option(f"tinker://{run}/sampler_weights/000001")
        page.get_by_role("button", name="Remove this model").nth(1).click()
        page.get_by_text("System prompt and beginning of the reply").click()
        page.get_by_label("System", exact=True).fill('It\'s "brief" \\ é')
        page.get_by_label("The reply begins with").fill("Well")
        send(page, "What's 2 + 2?\nSay it.")
        wait_until_finished(page)
        reply = page.evaluate("JSON.parse(sessionStorage.playground).panels[0].turns[0].replies[0]")
        printed = run_with_key([sys.executable, "-c", code(page, "tinker")], key)
        assert ast.literal_eval(printed.partition("]")[0] + "]") == [token["id"] for token in reply["tokens"]]

        shell, python = code(page, "curl"), code(page, "openai")
        if shutil.which("curl"):
            answer = json.loads(run_with_key(["bash", "-c", shell], key))
            assert answer["choices"][0]["message"]["content"] == reply["text"]
        script = tmp_path / "snippet.py"
        script.write_text(f"import os\nos.environ['TINKER_API_KEY'] = {key!r}\n{python}")
        assert client_environment(CHAT_CLIENTS).run(script).stdout.rstrip("\n") == reply["text"].rstrip("\n")

        page.get_by_label("Prompt").select_option("text")
        send(page, "Two and two are")
        wait_until_finished(page)
        raw = page.evaluate("JSON.parse(sessionStorage.playground).panels[0].turns.at(-1).replies[0]")
        if shutil.which("curl"):
            answer = json.loads(run_with_key(["bash", "-c", code(page, "curl")], key))
            assert answer["choices"][0]["text"] == raw["text"] != reply["text"]
        script.write_text(f"import os\nos.environ['TINKER_API_KEY'] = {key!r}\n{code(page, 'openai')}")
        assert client_environment(CHAT_CLIENTS).run(script).stdout.rstrip("\n") == raw["text"].rstrip("\n")


def test_stop_cancels_the_replies(world: ConsoleWorld, chromium: Any, key: str) -> None:
    def num_open() -> int:
        return len(world.server.store.read(lambda tx: futures.list_pending(tx, 0, 100)))

    with open_page(world, chromium, key) as page:
        page.goto("/playground")
        page.get_by_role("button", name="Add model").click()
        send(page, "Count.", tokens=80)
        page.locator(".status", has_text="tok").nth(1).wait_for()
        assert num_open() == 2

        page.get_by_role("button", name="Stop").click()
        wait_until_finished(page)
        assert all("stopped" in status for status in statuses(page))
        until(lambda: num_open() == 0, within_s=3.0)
        page.get_by_role("button", name="Try again").click()
        page.locator(".status", has_text="tok").nth(1).wait_for()
        page.goto("/overview")
        until(lambda: num_open() == 0, within_s=3.0)


def test_token_ids_need_no_tokenizer(tmp_path: Path, chromium: Any) -> None:
    with console_world(tmp_path) as world, open_page(world, chromium, world.key("bob")) as page:
        page.goto("/playground")
        assert page.get_by_label("Prompt").input_value() == "tokens"
        send(page, "1, 2 x", tokens=5)
        page.get_by_role("alert").wait_for()
        assert "x is not a token id" in page.get_by_role("alert").inner_text()
        send(page, "[1, 2, 3]", tokens=5)
        wait_until_finished(page)
        page.get_by_label("Tokens", exact=True).check()
        assert page.locator(".tok.part").count() == 5
        page.get_by_label("Message").fill("5, 6")
        assert "from_ints([1, 2, 3])" in code(page, "tinker"), "the code belongs to the shown reply"


def test_the_page_fits_a_narrow_screen(world: ConsoleWorld, chromium: Any, key: str) -> None:
    with open_page(world, chromium, key) as page:
        page.set_viewport_size({"width": 360, "height": 740})
        page.goto("/playground")
        page.get_by_role("button", name="Add model").click()
        send(page, "word " * 4 + "x" * 50, tokens=10)
        wait_until_finished(page)
        for view in ("Text", "Tokens", "What changed"):
            page.get_by_label(view, exact=True).check()
            page.wait_for_timeout(200)
            assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), view
        boxes = [panel.bounding_box() for panel in page.locator(".panel").all()]
        assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"], "one below the other"
