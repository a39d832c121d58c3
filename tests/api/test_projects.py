"""A project with members, for its owner, a viewer, an editor, another owner, a visitor without a key and an admin."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from skyrl_tx.apps.console.site import TABLES
from skyrl_tx.store import audit, projects
from skyrl_tx.store.tables import ProjectRole
from tests.support.console_world import ConsoleWorld, console_world

PROJECT = "math"
MEMBERS: dict[str, ProjectRole] = {"vera": "viewer", "ed": "editor"}


@dataclass
class ProjectScenario:
    """Ann's run in the project, her run outside it, and a key for each user."""

    world: ConsoleWorld
    run_id: str = ""
    session_id: str = ""
    private_run: str = ""
    private_session: str = ""
    keys: dict[str, str] = field(default_factory=dict[str, str])

    def call(self, who: str, method: str, address: str, /, **body: object) -> httpx.Response:
        """Call an endpoint as one of the users; `stranger` sends no key."""
        headers = {} if who == "stranger" else {"X-API-Key": self.keys[who]}
        url = f"{self.world.server.url}/api/v1/{address}"
        return httpx.request(method, url, headers=headers, json=body or None, timeout=30)

    def weights(self, name: str = "state") -> str:
        """Return the path of Ann's checkpoint in the project."""
        return f"tinker://{self.run_id}/weights/{name}"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProjectScenario]:
    with console_world(tmp_path_factory.mktemp("projects")) as world:
        scene = ProjectScenario(world)
        scene.keys = {who: world.key(who) for who in ("ann", "vera", "ed", "bob")} | {
            "root": world.key("root", "admin")
        }
        server = world.server

        server.client.headers["X-API-Key"] = scene.keys["ann"]
        made = server.post("create_session", tags=[], sdk_version="0.38.0", project_id=PROJECT)
        scene.session_id, scene.private_session = made.json()["session_id"], server.session()
        scene.run_id, scene.private_run = server.model(scene.session_id), server.model(scene.private_session)
        for run in (scene.run_id, scene.private_run):
            server.result(server.post("save_weights", model_id=run, seq_id=1, path="state"))
        server.result(server.post("save_weights", model_id=scene.run_id, seq_id=2, path="other"))
        server.result(server.post("save_weights_for_sampler", model_id=scene.run_id, seq_id=3, path="sampler"))
        del server.client.headers["X-API-Key"]

        def fill(tx) -> None:
            for owner, role in MEMBERS.items():
                projects.put_member(tx, PROJECT, owner, role, audit.OPERATOR, 1.0)

        server.store.write(fill)
        yield scene


READS = (
    "sessions/{session_id}",
    "sessions/{session_id}/trace_export",
    "training_runs/{run_id}",
    "training_runs/{run_id}/checkpoints",
    "training_runs/{run_id}/metrics",
    "training_runs/{run_id}/checkpoints/weights/state/archive",
)


@pytest.mark.parametrize("path", READS)
def test_members_read_what_is_in_the_project_and_nothing_else(scene: ProjectScenario, path: str) -> None:
    inside = path.format(run_id=scene.run_id, session_id=scene.session_id)
    outside = path.format(run_id=scene.private_run, session_id=scene.private_session)
    for who in ("ann", "vera", "ed", "root"):
        assert scene.call(who, "GET", inside).status_code in (200, 302), who
    assert scene.call("bob", "GET", inside).status_code == 404
    assert scene.call("stranger", "GET", inside).status_code == 401
    for who in ("vera", "ed", "bob"):
        assert scene.call(who, "GET", outside).status_code == 404, who


def test_lists_have_the_project_under_accessible_only(scene: ProjectScenario) -> None:
    for who, sees in (("vera", True), ("ed", True), ("bob", False)):
        assert scene.call(who, "GET", "sessions").json()["sessions"] == []
        wide = scene.call(who, "GET", "sessions?access_scope=accessible").json()["sessions"]
        assert wide == ([scene.session_id] if sees else [])
        assert scene.call(who, "GET", "training_runs").json()["training_runs"] == []

        runs = scene.call(who, "GET", "training_runs?access_scope=accessible").json()["training_runs"]
        assert [run["training_run_id"] for run in runs] == ([scene.run_id] if sees else [])
        assert all(run["model_owner"] == "ann" for run in runs)
        for owner in ({"type": "accessible"}, {"type": "user", "owner_urns": ["tml:user:ann"]}):
            found = scene.call(who, "POST", "sessions/search", owner=owner, user_metadata={}).json()["sessions"]
            assert [row["session_id"] for row in found] == ([scene.session_id] if sees else [])
        assert scene.call(who, "POST", "sessions/search", owner={"type": "own"}, user_metadata={}).json() == {
            "sessions": []
        }


def test_members_use_the_weights(scene: ProjectScenario) -> None:
    for who, status in (("vera", 200), ("ed", 200), ("bob", 404)):
        assert scene.call(who, "POST", "weights_info", tinker_path=scene.weights()).status_code == status
        session = scene.call(who, "POST", "create_session", tags=[], sdk_version="0.38.0").json()["session_id"]
        made = scene.call(
            who,
            "POST",
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            model_path=f"tinker://{scene.run_id}/sampler_weights/sampler",
        )
        assert (made.status_code == 200) == (status == 200), made.text
        copy = {"source_path": scene.weights(), "session_id": session, "model_seq_id": 7}
        assert scene.call(who, "POST", "copy_weights", **copy).status_code == status


def test_only_the_owner_trains(scene: ProjectScenario) -> None:
    for who in ("vera", "ed", "bob"):
        for path, body in (
            ("optim_step", {"adam_params": {"learning_rate": 0.1}}),
            ("save_weights", {"path": "mine"}),
            ("unload_model", {"type": "unload_model"}),
        ):
            answer = scene.call(who, "POST", path, model_id=scene.run_id, seq_id=9, **body)
            assert answer.status_code == 404, (who, path, answer.text)

        assert (
            scene.call(who, "POST", f"sessions/{scene.session_id}/finish", reason={"type": "success"}).status_code
            == 404
        )
        beat = scene.call(who, "POST", "session_heartbeat", session_id=scene.session_id)
        assert beat.status_code == 404
        logged = scene.call(who, "POST", f"training_runs/{scene.run_id}/metrics", step=1, metrics={"reward": 1.0})
        assert logged.status_code == 404


def test_editors_change_checkpoints_and_viewers_do_not(scene: ProjectScenario) -> None:
    one = f"training_runs/{scene.run_id}/checkpoints/weights/other"
    for method, path, body in (
        ("POST", f"{one}/publish", {}),
        ("DELETE", f"{one}/publish", {}),
        ("PUT", f"{one}/ttl", {"ttl_seconds": 3600}),
        ("DELETE", one, {}),
    ):
        refused = scene.call("vera", method, path, **body)
        assert refused.status_code == 403 and "vera is a viewer of its project" in refused.text
        assert scene.call("bob", method, path, **body).status_code == 404
        assert scene.call("ed", method, path, **body).is_success, path

    entries = [row for row in scene.world.server.store.read(audit.list_entries) if row.path == scene.weights("other")]
    changes = [(row.event, row.actor) for row in entries if row.event != "checkpoint_create"]
    assert changes == [
        ("checkpoint_publish", "ed"),
        ("checkpoint_unpublish", "ed"),
        ("checkpoint_ttl_set", "ed"),
        ("checkpoint_delete", "ed"),
    ]


def test_only_editors_assign_sessions_to_a_project_with_members(scene: ProjectScenario) -> None:
    for who, status in (("ann", 403), ("vera", 403), ("bob", 403), ("ed", 200), ("root", 200)):
        made = scene.call(who, "POST", "create_session", tags=[], sdk_version="0.38.0", project_id=PROJECT)
        assert made.status_code == status, (who, made.text)
        if status == 403:
            assert f"{who} is none of its editors" in made.text
        own = scene.call(who, "POST", "create_session", tags=[], sdk_version="0.38.0", project_id=f"of-{who}").json()
        moved = scene.call(who, "PUT", f"sessions/{own['session_id']}/project", project_id=PROJECT)
        assert moved.status_code == status, (who, moved.text)
    moved = scene.call("vera", "PUT", f"sessions/{scene.session_id}/project", project_id="of-vera")
    assert moved.status_code == 404
    assert scene.call("ed", "PUT", f"sessions/{scene.private_session}/project", project_id=PROJECT).status_code == 404


def test_a_member_that_is_removed_sees_nothing_from_then_on(scene: ProjectScenario) -> None:
    world = scene.world
    with world.browser(scene.keys["root"]) as root:
        fields = {"form_token": root.token(), "project": PROJECT, "owner": "bob"}
        assert scene.call("bob", "GET", f"sessions/{scene.session_id}").status_code == 404
        assert root.post("/projects", {**fields, "role": "viewer"}).status_code == 303
        assert scene.call("bob", "GET", f"sessions/{scene.session_id}").status_code == 200

        archive = scene.call("bob", "GET", f"training_runs/{scene.run_id}/checkpoints/weights/state/archive")
        address = archive.headers["location"]
        assert httpx.get(address).status_code == 200
        assert root.post("/projects/remove", fields).status_code == 303
        assert scene.call("bob", "GET", f"sessions/{scene.session_id}").status_code == 404
        assert httpx.get(address).status_code == 403, "a signed address ends with the right to read"
        assert root.post("/projects/remove", fields).status_code == 404
        for changes in ({"role": "owner"}, {"role": "viewer", "project": ""}, {"role": "viewer", "owner": "x" * 201}):
            assert root.post("/projects", {**fields, **changes}).status_code == 400

    entries = [row for row in world.server.store.read(audit.list_entries) if row.details.get("member") == "bob"]
    assert [(row.event, row.actor, row.details.get("role"), row.details.get("before")) for row in entries] == [
        ("project_member_set", "root", "viewer", None),
        ("project_member_removed", "root", None, "viewer"),
    ]


def pages_about(scene: ProjectScenario) -> list[str]:
    names = {"run_id": scene.run_id, "session_id": scene.session_id, "kind": "weights", "name": "state"}
    paths = [path for table in TABLES for method, path, _ in table.routes if method == "GET" and "{" in path]
    tabs = [f"/training_runs/{scene.run_id}?tab={tab}" for tab in ("samples", "steps", "requests", "config")]
    return [*(re.sub(r"{(\w+)}", lambda found: names[found.group(1)], path) for path in paths), *tabs]


def test_pages_of_the_console(scene: ProjectScenario) -> None:
    for who, sees in (("vera", True), ("ed", True), ("root", True), ("bob", False)):
        with scene.world.browser(scene.keys[who]) as browser:
            for path in pages_about(scene):
                expected = 404 if not sees else 303 if path.endswith(("/download", "/trace")) else 200
                assert browser.get(path).status_code == expected, (who, path)
            for path in ("/training_runs", "/sessions", "/checkpoints"):
                assert (scene.session_id in browser.get(path).text) == sees, (who, path)
                assert (scene.private_session in browser.get(path).text) == (who == "root"), (who, path)
            assert ("Change this checkpoint" in browser.get(f"/checkpoints/{scene.run_id}/weights/state").text) == (
                who in ("ed", "root")
            )

            listed = browser.get("/projects").text
            assert (PROJECT in listed) == sees and ('action="/projects' in listed) == (who == "root")

            if who == "vera":
                fields = {"form_token": browser.token(), "project": PROJECT, "owner": "vera", "role": "editor"}
                for path in ("/projects", "/projects/remove"):
                    refused = browser.post(path, fields)
                    assert refused.status_code == 403 and "only admins can" in refused.text
                page = f"/checkpoints/{scene.run_id}/weights/state"
                assert browser.post(f"{page}/publish", {**fields, "public": "yes"}).status_code == 403
                deleting = {**fields, "path": scene.weights(), "confirmed": "yes"}
                assert browser.post("/checkpoints/delete", deleting).status_code == 403

    with scene.world.browser() as stranger:
        assert stranger.get("/projects").status_code == 303


def test_pages_of_teams(scene: ProjectScenario) -> None:
    """All users see the pages. Only the admin sees the usage of other users and the audit log."""
    for who in ("vera", "ed", "bob", "root"):
        with scene.world.browser(scene.keys[who]) as browser:
            for path in ("/usage?by=owner", "/usage?by=project", "/quotas", "/projects"):
                page = browser.get(path)
                assert page.status_code == 200, (who, path)
                assert who == "root" or re.search(r"\bann\b", page.text) is None, (who, path)
            assert (">ann<" in browser.get("/usage?by=owner").text) == (who == "root")
            assert browser.get("/audit").status_code == (200 if who == "root" else 403)
    with scene.world.browser() as stranger:
        for path in ("/usage", "/quotas", "/projects", "/audit"):
            assert stranger.get(path).status_code == 303


def test_names_of_ann_s_other_logged_runs_are_not_shown_to_members(scene: ProjectScenario) -> None:
    logged = {"project": "p", "run": "secret-name", "metrics": {"reward": 1.0}, "step": 1}
    bulk = {"kwargs": {"logs": [{**logged, "run_id": "r1", "log_id": "l1"}]}}
    sent = httpx.post(
        f"{scene.world.server.url}/trackio/api/bulk_log",
        headers={"X-Trackio-Write-Token": scene.keys["ann"], "Authorization": f"Bearer {scene.keys['ann']}"},
        json=bulk,
    )
    assert sent.status_code == 200, sent.text

    page = f"/training_runs/{scene.run_id}?tab=config"
    with scene.world.browser(scene.keys["ann"]) as ann, scene.world.browser(scene.keys["vera"]) as vera:
        assert "secret-name" in ann.get(page).text
        assert "secret-name" not in vera.get(page).text
