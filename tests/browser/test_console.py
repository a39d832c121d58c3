"""The console in a browser, from log-in to log-out, while the SDK trains."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.apps.teams import quotas
from skyrl_tx.apps.teams.quotas import Subject
from skyrl_tx.store import projects
from skyrl_tx.store.audit import OPERATOR
from tests.support.console_world import ConsoleWorld, console_world
from tests.support.live_stack import PUBLIC_NAME
from tests.support.watched_page import WITHIN_MS, WatchedPage

HOSTILE = "<script>alert(1)</script>{{7*7}}\u202etxt\x1b[31m<img src=x onerror=alert(2)>"
pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as world:
        yield world


def datum(length: int = 5) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(length))),
        loss_fn_inputs={
            "target_tokens": np.arange(1, length + 1, dtype=np.int64),
            "weights": np.ones(length, dtype=np.float32),
        },
    )


def train(client: tinker.TrainingClient, steps: int) -> None:
    for _ in range(steps):
        client.forward_backward([datum(), datum(3)], "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()


def wait_for_number(element: Any, name: str, least: int) -> int:
    """Wait until an attribute is at least a number.

    The page forbids `wait_for_function`, which evaluates code.
    """
    end = time.monotonic() + WITHIN_MS / 1000
    while (found := int(element.get_attribute(name) or 0)) < least:
        assert time.monotonic() < end, f"{name} is {found}, not {least}"
        time.sleep(0.1)
    return found


def wait_for_points(page: Any, number: int) -> None:
    """Wait until the first chart has a number of points."""
    wait_for_number(page.locator("section.chart").first, "data-points", number)


def test_a_person_follows_a_run(world: ConsoleWorld, chromium: Any, screenshots: Path) -> None:
    base, key = world.server.url, world.key("ann")
    context = chromium.new_context(base_url=base, viewport={"width": 1440, "height": 900}, accept_downloads=True)
    watched = WatchedPage(context, base)
    page = watched.page
    page.goto("/")
    page.get_by_label("API key").fill("tml-wrong")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").wait_for()
    (refusal,) = watched.problems
    assert "status of 401" in refusal

    watched.problems.clear()
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/overview")
    assert "ready" in page.locator(".hero").inner_text()

    page.goto("/training_runs")
    page.get_by_text("No runs yet").wait_for()

    with tinker.ServiceClient(base_url=base, api_key=key, project_id="maths") as service:
        first = service.create_lora_training_client(PUBLIC_NAME, rank=8, seed=1).result()
        page.locator("table a").first.wait_for()  # the page polls, so it needs no reload
        page.locator("table a").first.click()
        page.get_by_text("No training steps yet").wait_for()
        train(first, 3)

        wait_for_points(page, 3)
        train(first, 4)
        wait_for_points(page, 7)
        path = first.save_state("end").result().path
        second = service.create_training_client_from_state(path).result()
        train(second, 2)
        params = types.SamplingParams(max_tokens=6, seed=1)
        sampler = first.save_weights_and_get_sampling_client().result()
        sampler.sample(types.ModelInput.from_ints([1, 2]), num_samples=2, sampling_params=params).result()

    page.screenshot(path=screenshots / "curves.png")
    page.get_by_label("smooth").fill("0.9")
    page.get_by_label("log y").check()
    page.locator("select[name=x]").select_option("time")
    page.get_by_role("link", name="Samples").click()
    assert page.locator("article.sample").count() == 2

    page.goto(f"/sessions/{first.model_id.partition(':')[0]}")
    assert wait_for_number(page.locator("[data-timeline]"), "data-spans", 20) < 60
    page.get_by_label("Requests of the session").focus()
    for key in ("ArrowUp", "+", "ArrowLeft", "-", "0"):
        page.keyboard.press(key)
    assert re.search(r"sample · sampler sample:0 · .* · queued \d+ ms · ran", page.locator(".said").inner_text())
    page.get_by_role("button", name="Zoom in").click()
    page.screenshot(path=screenshots / "session.png")
    with page.expect_download() as download:
        page.get_by_role("link", name="Perfetto trace").first.click()
    assert download.value.suggested_filename.endswith(".pftrace")

    page.goto("/training_runs")
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("button", name="Compare selected").click()
    page.wait_for_url("**/compare?*")
    wait_for_points(page, 2)
    assert page.locator(".legend li").count() == 2
    page.screenshot(path=screenshots / "compare.png")

    page.goto("/checkpoints")
    page.get_by_role("link", name="end").click()
    page.get_by_role("button", name="Publish").click()
    page.get_by_role("button", name="Unpublish").wait_for()
    page.get_by_label(re.compile("Days to keep it")).fill("3")
    page.get_by_role("button", name="Set lifetime").click()
    page.get_by_text("in 2 d").wait_for()
    assert second.model_id.partition(":")[0].removeprefix("session-")[:8] in page.locator(".lineage").inner_text()

    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == "end.tar"
    page.get_by_role("button", name="Delete…").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("link", name="end").wait_for()

    page.goto("/keys?new_key=true&key_name=laptop")
    page.get_by_role("button", name="Create key").click()
    made = page.locator("#new-key").inner_text()
    runs = httpx.get(f"{base}/api/v1/training_runs", headers={"X-API-Key": made}).json()["training_runs"]
    assert len(runs) == 2, "the new key works in the API"

    page.get_by_role("link", name="Go to keys").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("tr", has_text="laptop").get_by_role("button", name="Revoke").click()
    page.locator("tr", has_text="laptop").get_by_text("revoked").wait_for()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto("/overview")
    assert "/login" in page.url
    assert watched.problems == []
    context.close()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "dark"),
        (1440, "light"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((360, "light"), (1440, "dark"))),
    ],
)
def test_pages_are_accessible_and_fit(
    world: ConsoleWorld, chromium: Any, screenshots: Path, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    root = world.key("root", "admin")
    with world.browser(root) as browser:
        runs = re.findall(r'href="/training_runs/([^"?]+)"', browser.get("/training_runs").text)
        checkpoints = re.findall(r'href="(/checkpoints/[^"?]+)"', browser.get("/checkpoints").text)

    pages = [
        "/overview",
        "/training_runs",
        "/checkpoints",
        "/playground",
        "/sessions",
        "/usage",
        "/quotas",
        "/projects",
        "/keys",
        "/audit",
        "/health",
        "/compare",
        *checkpoints[:1],
    ]

    for run in runs[:1]:
        tabs = ("curves", "time", "samples", "steps", "checkpoints", "requests", "config")
        pages += [f"/training_runs/{run}?tab={tab}" for tab in tabs] + [f"/sessions/{run.partition(':')[0]}"]
    if len(runs) > 1:
        pages.append(f"/compare?runs={runs[0]},{runs[1]}")

    about = Subject("owner", "ann")
    for name, value in (
        ("training_tokens_per_day", 10),
        ("checkpoint_bytes", 5 * 10**9),
        ("models_in_training", 8),
    ):
        world.server.store.write(lambda tx, n=name, v=value: quotas.put(tx, about, n, v, OPERATOR, time.time()))

    everyone, now = Subject("owner", "*"), time.time()
    world.server.store.write(
        lambda tx: quotas.put(tx, everyone, "training_tokens_per_day", 1, OPERATOR, now, over="fail")
    )
    world.server.store.write(lambda tx: projects.put_member(tx, "maths", "ann", "editor", OPERATOR, now))
    base = world.server.url
    context = chromium.new_context(
        base_url=base, color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
    )

    watched = WatchedPage(context, base)
    page = watched.page
    page.goto("/login")
    assert axe.run(page).response["violations"] == []
    page.get_by_label("API key").fill(root)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/overview")

    for number, address in enumerate(pages):
        page.goto(address)
        if "tab=curves" in address:
            wait_for_points(page, 1)
        found = axe.run(page).response["violations"]
        assert [(violation["id"], [node["html"] for node in violation["nodes"]]) for violation in found] == [], address
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), address
        broken = page.locator(".list button, .list .pill, .list .whole > strong, .list code.whole").evaluate_all(
            "found => found.filter(element => element.offsetHeight > 44).map(element => element.textContent)"
        )
        assert broken == [], (address, "words are broken into several lines")
        name = re.sub(r"\W+", "-", address.partition("?")[0].strip("/"))[:30]
        page.screenshot(path=screenshots / f"{scheme}-{width}-{number:02d}-{name}.png", full_page=True)

    assert watched.problems == []
    context.close()


def test_text_of_users_is_shown_and_never_run(world: ConsoleWorld, chromium: Any) -> None:
    """Covers markup, templates, direction marks and a line of 60,000 characters in names that a client chooses."""
    key = world.key("mallory", "admin")
    with httpx.Client(base_url=f"{world.server.url}/api/v1", headers={"X-API-Key": key}, timeout=60) as client:

        def post(path: str, **fields: object) -> dict[str, Any]:
            response = client.post(path, json=fields)
            assert response.status_code == 200, response.text[:500]
            return response.json()

        metadata = {"note": HOSTILE, "long": "y" * 60_000}  # 65,536 is the limit
        session = post("create_session", tags=[HOSTILE], user_metadata=metadata, sdk_version="0.38.0")["session_id"]
        made = post("create_model", session_id=session, model_seq_id=0, base_model=PUBLIC_NAME, lora_config={"rank": 8})
        while post_status(client, made["request_id"]) == 408:
            pass
        run = f"{session}:train:0"
        client.put(f"/sessions/{session}/project", json={"project_id": HOSTILE[:100]})
        post(f"training_runs/{run}/metrics", step=1, metrics={HOSTILE: 1.0})

    base = world.server.url
    context = chromium.new_context(base_url=base)
    watched = WatchedPage(context, base)
    page = watched.page
    page.on("dialog", lambda dialog: watched.problems.append(f"dialog: {dialog.message}"))
    page.goto("/login")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/overview")

    tabs = ("curves", "time", "samples", "steps", "checkpoints", "requests", "config")
    shown: dict[str, str] = {}
    for address in ["/training_runs", "/sessions", f"/sessions/{session}", f"/compare?runs={run}"] + [
        f"/training_runs/{run}?tab={tab}" for tab in tabs
    ]:
        page.goto(address)
        page.wait_for_load_state("networkidle")
        shown[address] = page.locator("main").inner_text()
        assert "\u202e" not in shown[address] and "\x1b" not in shown[address], address
        assert page.locator("main script, main img").count() == 0, address

    session_text = shown[f"/sessions/{session}"]
    assert "<script>alert(1)</script>{{7*7}}\\u202etxt" in session_text
    assert "60,000 characters" in session_text
    assert watched.problems == []
    context.close()


def post_status(client: httpx.Client, request_id: str) -> int:
    return client.post("retrieve_future", json={"request_id": request_id}).status_code
