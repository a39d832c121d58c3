"""Every page of the console for a stranger, another owner, the owner and an admin; log-in, forms and headers."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from sqlmodel import Session

from skyrl_tx.apps.console.login import CONTENT_SECURITY_POLICY
from skyrl_tx.apps.console.site import TABLES
from skyrl_tx.apps.history import kept_samples, logged_metrics, points
from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptSample
from skyrl_tx.apps.history.logged_metrics import LoggedRun, NewLoggedPoint
from skyrl_tx.apps.history.points import LOSS_WEIGHT, Point
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.results import SHARED_TOKENS
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import keys
from tests.support.console_world import Browser, ConsoleWorld, console_world
from tests.support.live_api import live_api

OWNER = "ann.q"
HOSTILE = "<script>alert(1)</script>{{7*7}}\u202etxt\x1b[31m"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as world:
        yield world


@pytest.fixture(scope="module")
def ann_key(world: ConsoleWorld) -> str:
    return world.key(OWNER)


@pytest.fixture(scope="module")
def names(world: ConsoleWorld, ann_key: str) -> dict[str, str]:
    """Create one of Ann's runs with hostile names, a checkpoint of each kind, and points."""
    server = world.server
    server.client.headers["X-API-Key"] = ann_key
    made = server.post(
        "create_session",
        tags=[HOSTILE],
        sdk_version="0.38.0",
        user_metadata={HOSTILE: "x" * 900_000},
        project_id=HOSTILE,
    )

    if made.status_code != 200:  # some of these fields have lower limits
        made = server.post("create_session", tags=[HOSTILE], sdk_version="0.38.0", user_metadata={"n": HOSTILE})
    session = made.json()["session_id"]
    run = server.model(session)
    server.result(server.post("save_weights", model_id=run, seq_id=1, path="state"))
    server.result(server.post("save_weights_for_sampler", model_id=run, seq_id=2, path="sampler"))
    del server.client.headers["X-API-Key"]
    values = {"loss:sum": 4.0, "num_tokens:sum": 5.0, SHARED_TOKENS: 1.0, LOSS_WEIGHT: 2.0}

    for number in range(3):
        point = Point(
            position=10_000 + number,
            model_id=run,  # pyright: ignore
            kind="train",
            step=number,
            created_at=1.0,
            started_at=1.0,
            at=2.0,
            device_s=0.1,
            tokens=2,
            datums=1,
            values=values,
        )

        server.store.write(lambda tx, point=point: points.add(tx, point))

    samples = [
        KeptSample(
            sequence_id=f"kept-{number}",
            tokens=np.array([1, 2], np.int32),
            logprobs=np.array([-1, -1], np.float32),
            stop_reason="stop",
            trainer_gap=gap,
        )
        for number, gap in enumerate((0.125, None))
    ]

    group = KeptGroup(
        request_id=RequestId("kept"),
        model_id=run,
        step=0,
        owner=OWNER,
        prompt=np.array([3], np.int32),
        samples=samples,
    )
    server.store.write(lambda tx: kept_samples.add(tx, group, time.time()))
    return {"run_id": run, "session_id": session, "kind": "weights", "name": "state"}


def get_pages(names: dict[str, str]) -> list[str]:
    paths = [path for table in TABLES for method, path, _ in table.routes if method == "GET"]
    filled = [re.sub(r"{(\w+)}", lambda found: names[found.group(1)], path) for path in paths]
    tabs = [
        f"/training_runs/{names['run_id']}?tab={tab}"
        for tab in ("time", "samples", "steps", "checkpoints", "requests", "config")
    ]
    return [*filled, *tabs, f"/compare?runs={names['run_id']}"]


FOR_ADMINS = {"/audit"}


def is_about_ann(path: str, names: dict[str, str]) -> bool:
    return names["run_id"] in path or names["session_id"] in path


def test_a_stranger_sees_the_log_in_form_alone(world: ConsoleWorld, names: dict[str, str]) -> None:
    with world.browser() as stranger:
        for path in get_pages(names):
            answer = stranger.get(path)
            if path.startswith("/console/data"):
                assert answer.status_code == 401
            else:
                assert answer.status_code == 303 and answer.headers["location"].startswith("/login?next=")
            assert OWNER not in answer.text
        assert stranger.client.get("/overview", headers={"HX-Request": "true"}).status_code == 401
        assert "API key" in stranger.get("/login").text
        assert stranger.post("/keys", {"name": "x"}).status_code == 401


def test_another_owner_gets_404_and_empty_lists(world: ConsoleWorld, names: dict[str, str]) -> None:
    missing = names | {"session_id": "session-" + "0" * 32, "run_id": "session-" + "0" * 32 + ":train:0"}

    with world.browser(world.key("bob")) as bob:
        for path, unknown in zip(get_pages(names), get_pages(missing), strict=True):
            answer = bob.get(path)
            if path in FOR_ADMINS:
                assert answer.status_code == 403 and OWNER not in answer.text
            elif is_about_ann(path, names):
                assert answer.status_code == 404, path
                hidden = bob.get(unknown).text.replace(missing["session_id"], names["session_id"])
                assert answer.text == hidden, path
            else:
                assert answer.status_code == 200, path
                assert names["session_id"] not in answer.text and OWNER not in answer.text, path


def test_a_sample_that_was_compared_shows_its_gap_to_the_trainer(
    world: ConsoleWorld, names: dict[str, str], ann_key: str
) -> None:
    with world.browser(ann_key) as ann:
        page = ann.get(f"/training_runs/{names['run_id']}?tab=samples").text
    assert page.count('<article class="sample">') == 2
    assert re.findall(r">gap ([^<]*)<", page) == ["0.125"]


@pytest.mark.parametrize("who", ["ann", "root", "reader"])
def test_owner_and_admin_see_every_page(world: ConsoleWorld, names: dict[str, str], ann_key: str, who: str) -> None:
    key = {
        "ann": lambda: ann_key,
        "root": lambda: world.key("root", "admin"),
        "reader": lambda: world.key(OWNER, "read"),
    }
    with world.browser(key[who]()) as browser:
        for path in get_pages(names):
            answer = browser.get(path)
            expected = 303 if path.endswith(("/download", "/trace")) else 200
            if path in FOR_ADMINS and who != "root":
                expected = 403
            assert answer.status_code == expected, (path, answer.text[-2000:])
            assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
            assert answer.headers["cache-control"] == "no-store"
            assert len(answer.content) < 400_000

        assert names["run_id"] in browser.get("/training_runs").text
        assert ("API settings" in browser.get("/health").text) == (who == "root")
        data = browser.get(f"/console/data/training_runs/{names['run_id']}/curves?since=3").json()
        assert data["step"] == [3] and data["curves"]["loss"] == [2.0] and data["total"] == 3
        assert data["curves"]["shared_tokens"] == [1.0]
        assert "<span>Shared tokens</span>50%" in browser.get(f"/training_runs/{names['run_id']}").text
        assert browser.get(f"/training_runs/{names['run_id']}/curves.csv").text.count("\n") == 4


def test_text_of_users_is_shown_and_never_run(world: ConsoleWorld, names: dict[str, str], ann_key: str) -> None:
    with world.browser(ann_key) as ann:
        seen = ""
        for path in get_pages(names):
            text = ann.get(path).text
            assert "<script>alert" not in text and "\u202e" not in text and "\x1b" not in text
            seen += text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;{{7*7}}\\u202etxt\\x1b[31m" in seen

        for query in ("q", "project", "scope", "kind", "tab", "offset", "runs", "step"):
            for page in (
                "/training_runs",
                "/checkpoints",
                "/sessions",
                f"/training_runs/{names['run_id']}",
                "/compare",
            ):
                answer = ann.get(f"{page}?{query}={'%3Cscript%3Ealert(1)%00%E2%80%AE'}")
                assert answer.status_code in (200, 400, 404) and "<script>alert" not in answer.text


def test_the_cookie_is_no_credential_of_the_api_and_a_token_no_cookie(world: ConsoleWorld, ann_key: str) -> None:
    with world.browser(ann_key) as ann:
        (name,) = ann.client.cookies
        cookie = ann.client.cookies[name]
        assert name.startswith("skyrl-") and ann_key not in cookie
        assert ann.client.get("/api/v1/training_runs").status_code == 401
        assert ann.client.get("/api/v1/training_runs", headers={"X-API-Key": cookie}).status_code == 401

    token = httpx.post(f"{world.server.url}/api/v1/auth/token", headers={"X-API-Key": ann_key}, json={}).json()["jwt"]
    with world.browser() as forger:
        forger.client.cookies.set(name, token)
        assert forger.get("/overview").status_code == 303
        assert forger.post("/login", {"key": token}).status_code == 401
        assert forger.client.get("/overview", headers={"X-API-Key": ann_key}).status_code == 303
    for path in ("/console/data/training_runs/x/curves",):
        assert httpx.get(world.server.url + path, headers={"X-API-Key": ann_key}).status_code == 404


def test_a_cookie_ends_with_its_key_at_once(world: ConsoleWorld) -> None:
    key = world.key("eve")
    with world.browser(key) as eve:
        assert eve.get("/overview").status_code == 200
        row = world.server.store.read(lambda tx: keys.find(tx, key))
        assert row is not None and row.key_id is not None
        world.server.store.write(lambda tx: keys.revoke(tx, row.key_id or 0, time.time()))
        assert eve.get("/overview").status_code == 303


@pytest.mark.parametrize("scope", ["sample", "metrics"])
def test_keys_for_programs_do_not_admit(world: ConsoleWorld, scope: str) -> None:
    with world.browser() as browser:
        answer = browser.post("/login", {"key": world.key("bot", scope)})  # pyright: ignore
        assert answer.status_code == 403 and scope in answer.text and not answer.cookies


def test_a_wrong_key_is_refused_with_the_reason_and_nothing_of_it_returns(world: ConsoleWorld) -> None:
    with world.browser() as browser:
        answer = browser.post("/login", {"key": "tml-wrong", "next": "/keys"})
        assert answer.status_code == 401 and "unknown or revoked" in answer.text and "tml-wrong" not in answer.text
        assert 'value="/keys"' in answer.text


OTHER_SITES = r"https://evil.example/ //evil.example/ /\evil.example javascript:alert(1) /logout x //[ http://["


@pytest.mark.parametrize("then", ["", *OTHER_SITES.split()])
def test_a_log_in_leads_to_no_other_site(world: ConsoleWorld, ann_key: str, then: str) -> None:
    with world.browser() as browser:
        form = browser.client.get("/login", params={"next": then})
        assert form.status_code == 200 and 'value="/overview"' in form.text
        answer = browser.post("/login", {"key": ann_key, "next": then})
        assert answer.status_code == 303 and answer.headers["location"] == "/overview"


FORMS = [
    ("/logout", {}),
    ("/keys", {"name": "x", "scope": "user"}),
    ("/keys/1/revoke", {}),
    ("/quotas", {"subject": "ann", "limit": "samples_at_once", "value": "1"}),
    ("/quotas/remove", {"subject": "ann", "limit": "samples_at_once"}),
    ("/projects", {"project": "math", "owner": "ann", "role": "viewer"}),
    ("/projects/remove", {"project": "math", "owner": "ann"}),
    ("/checkpoints/delete", {"path": "{path}", "confirmed": "yes"}),
    ("/training_runs/{run_id}/logged_runs", {"logged_run_id": "1"}),
    ("/checkpoints/{run_id}/weights/state/publish", {"public": "yes"}),
    ("/checkpoints/{run_id}/weights/state/ttl", {"days": "1"}),
]
HEADERS = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "none"},
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {},
]


@pytest.mark.parametrize("headers", HEADERS, ids=str)
@pytest.mark.parametrize(("path", "fields"), FORMS, ids=[path for path, _ in FORMS])
def test_forms_of_other_sites_are_refused(
    world: ConsoleWorld, names: dict[str, str], ann_key: str, path: str, fields: dict[str, str], headers: dict[str, str]
) -> None:
    with world.browser(ann_key) as ann:
        filled = {
            name: value.replace("{path}", f"tinker://{names['run_id']}/weights/state") for name, value in fields.items()
        }
        body = filled | {"form_token": ann.token()}
        answer = ann.client.post(path.format(**names), data=body, headers=headers)
        assert answer.status_code == 403 and "page of another site" in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example"])
def test_a_server_without_keys_serves_no_page_under_a_foreign_name(tmp_path: Path, host: str) -> None:
    """An attacker's host name that resolves to this machine would let a web page act as an admin (DNS rebinding)."""
    with live_api(ApiSettings(port=0, data_dir=tmp_path, base_model="fake")) as server:
        paths = [path for table in TABLES for _, path, _ in table.routes if "{" not in path]
        assert server.client.get("/overview").status_code == 200
        for path in [*paths, "/", "/login"]:
            answer = server.client.get(path, headers={"Host": host})
            assert answer.status_code == 403, path
            assert "set-cookie" not in answer.headers and "Overview" not in answer.text
        posted = server.client.post("/keys", headers={"Host": host, "Origin": f"http://{host}"}, data={"name": "x"})
        assert posted.status_code == 403


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_server_without_keys_refuses_what_a_page_of_another_site_sends(tmp_path: Path, method: str) -> None:
    with live_api(ApiSettings(port=0, data_dir=tmp_path, base_model="fake")) as server:
        sent = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}
        for table in TABLES:
            for path in (path for kind, path, _ in table.routes if kind == method):
                answer = server.client.request(method, re.sub("{.*?}", "x", path), headers=sent)
                assert answer.status_code == 403, path
                assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("path", "fields"), FORMS, ids=[path for path, _ in FORMS])
def test_forms_need_the_token_of_their_session(
    world: ConsoleWorld, names: dict[str, str], ann_key: str, path: str, fields: dict[str, str]
) -> None:
    with world.browser(ann_key) as ann, world.browser(ann_key) as other:
        for token in ("", other.token(), "ä"):
            answer = ann.post(path.format(**names), {**fields, "form_token": token})
            assert answer.status_code == 403 and "earlier console session" in answer.text


def test_a_key_that_reads_sends_no_form(world: ConsoleWorld, names: dict[str, str]) -> None:
    with world.browser(world.key(OWNER, "read")) as reader:
        for path, fields in FORMS[1:]:
            answer = reader.post(path.format(**names), {**fields, "form_token": _token(reader)})
            assert answer.status_code == 403 and "may read, but not change" in answer.text


def _token(browser: Browser) -> str:
    found = re.search(r'name="form_token" value="([0-9a-f]+)"', browser.get("/overview").text)
    assert found is not None
    return found.group(1)


def test_a_checkpoint_is_published_given_a_lifetime_deleted_and_restored(
    world: ConsoleWorld, names: dict[str, str], ann_key: str
) -> None:
    path, page = (
        f"tinker://{names['run_id']}/sampler_weights/sampler",
        f"/checkpoints/{names['run_id']}/sampler_weights/sampler",
    )

    with world.browser(ann_key) as ann, world.browser(world.key("bob")) as bob:
        token = {"form_token": ann.token()}
        assert bob.get(page).status_code == 404
        assert ann.post(f"{page}/publish", {"public": "yes", **token}).status_code == 303
        seen = bob.get(page)
        assert (
            seen.status_code == 200
            and "Change this checkpoint" not in seen.text
            and names["run_id"] in bob.get("/checkpoints?scope=published").text
        )

        for act, fields in (("publish", {"public": "no"}), ("ttl", {"days": "1"})):
            assert bob.post(f"{page}/{act}", {**fields, "form_token": bob.token()}).status_code == 404
        assert (
            bob.post("/checkpoints/delete", {"path": path, "confirmed": "yes", "form_token": bob.token()}).status_code
            == 404
        )
        assert ann.post(f"{page}/publish", {"public": "no", **token}).status_code == 303
        assert bob.get(page).status_code == 404
        assert ann.post(f"{page}/ttl", {"days": "2", **token}).status_code == 303 and "in 1 d" in ann.get(page).text

        for wrong in ("-1", "nan", "inf", "1e9", "x"):
            assert ann.post(f"{page}/ttl", {"days": wrong, **token}).status_code == 400
        assert ann.post(f"{page}/ttl", {"days": "", **token}).status_code == 303

        asked = ann.post("/checkpoints/delete", {"path": path, **token})
        assert asked.status_code == 200 and "Delete 1 checkpoint?" in asked.text and "KiB" in asked.text + "KiB"
        assert ann.get(page).status_code == 200
        assert "Undo" in ann.post("/checkpoints/delete", {"path": path, "confirmed": "yes", **token}).text
        assert ann.get(page).status_code == 404 and path in ann.get("/checkpoints?scope=deleted").text
        assert bob.post("/checkpoints/restore", {"path": path, "form_token": bob.token()}).status_code == 404
        assert ann.post("/checkpoints/restore", {"path": path, **token}).status_code == 303
        assert ann.get(page).status_code == 200
        assert ann.post("/checkpoints/delete", token).status_code == 400

        tar = ann.client.get(f"{page}/download", follow_redirects=True)
        assert tar.status_code == 200 and tar.headers["content-type"] == "application/x-tar"


def test_a_logged_run_is_shown_in_a_run_and_removed(world: ConsoleWorld, names: dict[str, str], ann_key: str) -> None:
    def log(tx: Session, owner: str) -> int:
        row = logged_metrics.open_run(tx, LoggedRun(owner=owner, project="p", key=HOSTILE, name=HOSTILE), time.time())
        logged_metrics.add_points(tx, row, [NewLoggedPoint(log_id="1", step=1, values={"reward": 0.5})], time.time())
        return row.logged_run_id or 0

    number, other = (world.server.store.write(lambda tx, owner=owner: log(tx, owner)) for owner in (OWNER, "bob"))
    form, data = (
        f"/training_runs/{names['run_id']}/logged_runs",
        f"/console/data/training_runs/{names['run_id']}/curves",
    )
    config = f"/training_runs/{names['run_id']}?tab=config"

    with world.browser(ann_key) as ann, world.browser(world.key("bob")) as bob:
        token = {"form_token": ann.token()}
        assert "Add to this run" in ann.get(config).text and "reward" not in ann.get(data).json()["logged"]
        assert bob.post(form, {"logged_run_id": str(other), "form_token": bob.token()}).status_code == 404

        for wrong, status in ((str(other), 404), ("999999", 404), ("x", 400), ("", 400), ("1" * 19, 400)):
            assert ann.post(form, {"logged_run_id": wrong, **token}).status_code == status
        assert ann.post(form, {"logged_run_id": str(number), "act": "x", **token}).status_code == 400
        assert ann.post(form, {"logged_run_id": str(number), "act": "separate", **token}).status_code == 404
        assert ann.post(form, {"logged_run_id": str(number), **token}).status_code == 303
        assert ann.get(data).json()["logged"]["reward"]["value"] == [0.5]
        assert "Remove from this run" in ann.get(config).text

        with world.browser(world.key("root", "admin")) as root:
            mixed = {"logged_run_id": str(other), "form_token": root.token()}
            assert "same owner" in root.post(form, mixed).text, "an admin cannot mix owners either"
        assert ann.post(form, {"logged_run_id": str(number), "act": "separate", **token}).status_code == 303
        assert "reward" not in ann.get(data).json()["logged"]


def test_keys_are_shown_once_and_revoked(world: ConsoleWorld, ann_key: str) -> None:
    with world.browser(ann_key) as ann, world.browser(world.key("bob")) as bob:
        token = {"form_token": ann.token()}
        made = ann.post(
            "/keys",
            {"name": HOSTILE.replace("\u202e", "").replace("\x1b", ""), "scope": "sample", "days": "3", **token},
        )
        (key,) = set(re.findall(r"tml-[\w-]{40,}", made.text))
        listed = ann.get("/keys").text
        assert made.status_code == 200 and key not in listed and key[:8] in listed and "<script>alert" not in listed

        row = world.server.store.read(lambda tx: keys.find(tx, key))
        parent = world.server.store.read(lambda tx: keys.find(tx, ann_key))
        assert row is not None and parent is not None
        assert (row.owner, row.scope, row.parent_id) == (OWNER, "sample", parent.key_id)
        assert row.note == f"made in the console with key {parent.key_id}"
        assert OWNER not in bob.get("/keys").text
        assert bob.post(f"/keys/{row.key_id}/revoke", {"form_token": bob.token()}).status_code == 404
        assert ann.post(f"/keys/{row.key_id}/revoke", token).status_code == 303
        assert world.server.store.read(lambda tx: keys.find(tx, key)) is None

        for fields in ({"scope": "admin"}, {"scope": "metrics"}, {"days": "0"}, {"days": "x"}, {"name": "x" * 101}):
            assert ann.post("/keys", {"scope": "user", "name": "n", **fields, **token}).status_code == 400
        assert ann.post("/keys", {"scope": "user", "owner": "bob", **token}).status_code == 200
        assert "bob" not in ann.get("/keys").text, "the form cannot name another owner"


def test_log_out_ends_the_session(world: ConsoleWorld, ann_key: str) -> None:
    with world.browser(ann_key) as ann:
        assert ann.post("/logout", {"form_token": ann.token()}).status_code == 303
        assert not ann.client.cookies and ann.get("/overview").status_code == 303


def test_large_and_broken_forms_are_refused(world: ConsoleWorld) -> None:
    with world.browser() as browser:
        assert browser.post("/login", {"key": "x" * 300_000}).status_code == 413
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-origin"}
        assert browser.client.post("/login", content=b"key=\xff", headers=headers).status_code == 400
        assert browser.client.post("/login", content=b"a=1&" * 3000, headers=headers).status_code == 400
        assert browser.client.post("/login", content=b"", headers=headers).status_code == 401


def test_scripts_are_served_with_their_types_and_no_other_file(world: ConsoleWorld) -> None:
    with world.browser() as browser:
        page = browser.get("/login").text
        for address in re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page):
            answer = browser.get(address)
            assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("%2e%2e/site.py", "vendor/VENDOR.toml", "nothing.js"):
            assert browser.get(f"/console/static/x/{path}").status_code == 404


def test_without_the_console_its_addresses_are_unknown(tmp_path: Path) -> None:
    settings = ApiSettings(port=0, data_dir=tmp_path, base_model="fake", no_console=True)
    with live_api(settings) as server:
        assert {server.client.get(path).status_code for path in ("/", "/overview", "/login")} == {404}
        assert server.client.get("/api/v1/livez").status_code == 200
