"""The SDK's management client: publishing, copies, projects, search, scopes, and unsupported endpoints."""

import time
import warnings
from collections.abc import Callable, Iterator
from http import HTTPStatus

import httpx
import pytest
import tinker
from tinker import types

from skyrl_tx.contract.ids import CheckpointPath, ModelId, SessionId
from skyrl_tx.store import checkpoints, keys, models, sessions
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack


@pytest.fixture(scope="module")
def stack_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """A server that requires API keys."""
    with live_stack("fake", tmp_path_factory.mktemp("stack")) as stack:
        key_for(stack, "root")
        time.sleep(1.1)  # the server caches for one second that there are no keys
        yield stack


def key_for(stack: LiveStack, owner: str) -> str:
    scope = "admin" if owner == "root" else "user"
    return stack.server.store.write(lambda tx: keys.create(tx, owner=owner, scope=scope, name=owner, note="", now=1.0))[
        0
    ]


@pytest.fixture(scope="module")
def connect(stack_with_keys: LiveStack) -> Iterator[Callable[[str], tinker.ServiceClient]]:
    clients: dict[str, tinker.ServiceClient] = {}

    def client(owner: str) -> tinker.ServiceClient:
        if owner not in clients:
            clients[owner] = tinker.ServiceClient(
                base_url=stack_with_keys.url, api_key=key_for(stack_with_keys, owner), user_metadata={"whose": owner}
            )
        return clients[owner]

    yield client
    for made in clients.values():
        made.close("success")


@pytest.fixture(scope="module")
def connect_rest(stack_with_keys: LiveStack) -> Callable[[str], tinker.RestClient]:
    return lambda owner: tinker.RestClient(base_url=stack_with_keys.url, api_key=key_for(stack_with_keys, owner))


Connect = Callable[[str], tinker.ServiceClient]
ConnectRest = Callable[[str], tinker.RestClient]


def test_client_reads_its_identity(connect_rest: ConnectRest) -> None:
    assert connect_rest("ann").whoami().result().user_urn == "tml:user:ann"


def test_published_checkpoint_is_readable_by_all_until_unpublished(connect: Connect, connect_rest: ConnectRest) -> None:
    training = connect("ann").create_lora_training_client(PUBLIC_NAME, rank=4, train_mlp=False).result()
    state = training.save_state("state").result().path
    sampler = training.save_weights_for_sampler("sampler").result().path
    ann, bob = connect_rest("ann"), connect_rest("bob")
    with pytest.raises(tinker.NotFoundError):
        bob.get_weights_info_by_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError):
        connect("bob").create_sampling_client(model_path=sampler).result()
    with pytest.raises(Exception, match="no such checkpoint"):
        connect("bob").create_training_client_from_state(state).result()

    for path in (state, sampler, state):  # publishing twice is not a conflict
        ann.publish_checkpoint_from_tinker_path(path).result()
    assert bob.get_weights_info_by_tinker_path(state).result().train_mlp is False
    taken = connect("bob").create_training_client_from_state(state).result()
    assert taken.get_info().lora_rank == 4
    assert connect("bob").create_sampling_client(model_path=sampler).result() is not None

    run = bob.get_training_run_by_tinker_path(state).result()
    assert run.model_owner == "ann" and {
        found.tinker_path for found in bob.list_checkpoints(run.training_run_id).result().checkpoints
    } == {
        state,
        sampler,
    }
    listed = bob.list_training_runs(access_scope="accessible").result().training_runs
    assert run.training_run_id in {found.training_run_id for found in listed}

    for denied in (bob.delete_checkpoint_from_tinker_path(state), bob.unpublish_checkpoint_from_tinker_path(state)):
        with pytest.raises(tinker.NotFoundError):
            denied.result()
    for path in (state, sampler, state):
        ann.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        bob.get_weights_info_by_tinker_path(state).result()
    with pytest.raises(tinker.NotFoundError):
        bob.get_training_run(run.training_run_id, access_scope="accessible").result()


def test_published_run_shows_others_no_personal_data(stack_with_keys: LiveStack, connect_rest: ConnectRest) -> None:
    owner, private = "ann@example.org", {"contact": "555-0100", "renderer_name": "qwen3"}
    with tinker.ServiceClient(base_url=stack_with_keys.url, api_key=key_for(stack_with_keys, owner)) as service:
        training = service.create_lora_training_client(PUBLIC_NAME, rank=4, user_metadata=private).result()
        path = training.save_state("shared", user_metadata={"note": "555-0100"}).result().path
        connect_rest(owner).publish_checkpoint_from_tinker_path(path).result()
        saved_at = connect_rest(owner).list_checkpoints(training.model_id).result().checkpoints[0].time
        training.save_state("private").result()

    own, seen = (connect_rest(name).get_training_run(training.model_id).result() for name in (owner, "bob"))
    assert own.model_owner == owner and own.user_metadata == private and own.last_request_time != saved_at
    assert seen.model_owner == "ann" and seen.user_metadata == {"renderer_name": "qwen3"}
    assert seen.last_request_time == saved_at and seen.last_checkpoint is not None
    assert seen.last_checkpoint.tinker_path == path and not seen.last_checkpoint.user_metadata

    listed = connect_rest("bob").list_training_runs(access_scope="accessible", limit=100).result().training_runs
    assert seen in listed
    (checkpoint,) = connect_rest("bob").list_checkpoints(training.model_id).result().checkpoints
    assert checkpoint == seen.last_checkpoint
    copy = connect_rest("bob").copy_weights(path, "copies").result()
    copied = connect_rest("bob").get_training_run_by_tinker_path(copy).result()
    assert copied.user_metadata == {"renderer_name": "qwen3"} and copied.last_checkpoint is not None
    assert not copied.last_checkpoint.user_metadata
    connect_rest(owner).unpublish_checkpoint_from_tinker_path(path).result()


def test_deleted_checkpoint_is_hidden_everywhere_until_restored(
    stack_with_keys: LiveStack, connect: Connect, connect_rest: ConnectRest
) -> None:
    training = connect("ann").create_lora_training_client(PUBLIC_NAME, rank=4).result()
    state, sampler = training.save_state("s").result().path, training.save_weights_for_sampler("s").result().path
    external = training.save_weights_external("s").result().path
    rest, service, store = connect_rest("ann"), connect("ann"), stack_with_keys.server.store
    url = rest.get_external_weights_urls(external).result().urls["adapter_config.json"]

    for path in (state, sampler, external):
        rest.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            rest.get_weights_info_by_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            rest.publish_checkpoint_from_tinker_path(path).result()

    assert rest.list_checkpoints(training.model_id).result().checkpoints == []
    assert httpx.get(url).status_code == HTTPStatus.FORBIDDEN
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path=sampler).result()
    with pytest.raises(tinker.RequestFailedError, match="no such checkpoint"):
        service.create_training_client_from_state(state).result()

    for path in (state, sampler, external):
        assert store.write(lambda tx, path=path: checkpoints.undelete(tx, CheckpointPath.parse(path)))
    assert len(rest.list_checkpoints(training.model_id).result().checkpoints) == 3
    assert service.create_training_client_from_state(state).result() is not None
    assert httpx.get(url).status_code == HTTPStatus.OK
    rest.delete_checkpoint_from_tinker_path(state).result()
    assert training.save_state("s").result().path == state, "the name is free"


def test_deleted_run_is_hidden_everywhere_and_trains_on_after_a_restore(
    stack_with_keys: LiveStack, connect: Connect, connect_rest: ConnectRest
) -> None:
    training = connect("ann").create_lora_training_client(PUBLIC_NAME, rank=4).result()
    path = training.save_state("s").result().path
    sampler = training.save_weights_and_get_sampling_client().result()
    rest, store, run = connect_rest("ann"), stack_with_keys.server.store, ModelId(training.model_id)
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=2, stop=[])
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert store.write(lambda tx: models.mark_deleted(tx, run, time.time()))

    for reader in (rest, connect_rest("bob")):
        with pytest.raises(tinker.NotFoundError):
            reader.get_training_run(run).result()
        with pytest.raises(tinker.NotFoundError):
            reader.get_weights_info_by_tinker_path(path).result()
        listed = reader.list_training_runs(access_scope="accessible", limit=100).result().training_runs
        assert run not in {found.training_run_id for found in listed}

    with pytest.raises(tinker.NotFoundError, match="was deleted"):
        training.save_state("t").result()
    with pytest.raises(tinker.NotFoundError, match=r"its run .* was deleted"):
        sampler.sample(prompt, 1, params).result()
    assert store.write(lambda tx: models.undelete(tx, run))
    assert rest.get_training_run(run).result().last_checkpoint is not None
    training = connect("ann").create_training_client_from_state(path).result()
    assert training.save_state("t").result().path
    assert len(sampler.sample(prompt, 1, params).result().sequences) == 1


def test_a_session_records_the_key_that_created_it(stack_with_keys: LiveStack) -> None:
    made = [key_for(stack_with_keys, "kim") for _ in range(2)]
    for secret in made:
        with tinker.ServiceClient(base_url=stack_with_keys.url, api_key=secret) as service:
            run_id = service.create_lora_training_client(PUBLIC_NAME, rank=4).result().model_id
        session_id = SessionId(run_id.partition(":")[0])
        session = stack_with_keys.server.store.read(lambda tx, name=session_id: sessions.get(tx, name))
        key = stack_with_keys.server.store.read(lambda tx, secret=secret: keys.find(tx, secret))
        assert session is not None and key is not None and session.key_id == key.key_id is not None


def test_copy_is_a_separate_run_and_outlives_its_source(
    stack_with_keys: LiveStack, connect: Connect, connect_rest: ConnectRest
) -> None:
    training = connect("ann").create_lora_training_client(PUBLIC_NAME, rank=4, train_attn=False).result()
    state = training.save_state("state").result().path
    rest = connect_rest("ann")
    copy = rest.copy_weights(state, "archive", ttl_seconds=7200).result()
    assert copy != state and copy.endswith("/weights/state")
    (listed,) = (found for found in rest.list_user_checkpoints().result().checkpoints if found.tinker_path == copy)
    assert listed.expires_at is not None
    row = stack_with_keys.server.store.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(copy), 0.0))
    assert row is not None and (row.copied_from, row.step) == (state, 0)

    rest.delete_checkpoint_from_tinker_path(state).result()
    info = rest.get_weights_info_by_tinker_path(copy).result()
    assert info.lora_rank == 4 and info.train_attn is False
    assert connect("ann").create_training_client_from_state_with_optimizer(copy).result().get_info().lora_rank == 4
    run_id = copy.removeprefix("tinker://").split("/")[0]
    (run,) = rest.list_training_runs(project_id="archive").result().training_runs
    assert run.training_run_id == run_id
    with pytest.raises(tinker.NotFoundError):
        connect_rest("bob").copy_weights(copy, "mine").result()


def test_retried_copy_returns_the_same_path(stack_with_keys: LiveStack) -> None:
    headers = {"X-API-Key": key_for(stack_with_keys, "ann")}

    def post(path: str, /, **body: object) -> dict[str, str]:
        answer = stack_with_keys.server.client.post(f"/api/v1/{path}", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    session_id = post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
    made = post("create_model", session_id=session_id, model_seq_id=0, base_model=PUBLIC_NAME, lora_config={"rank": 4})
    for seq_id, name in ((1, "a"), (2, "b")):
        saved = post("save_weights", model_id=made["model_id"], seq_id=seq_id, path=name)
        while (
            stack_with_keys.server.client.post("/api/v1/retrieve_future", json=saved, headers=headers).status_code
            == 408
        ):
            pass
    first, second = (f"tinker://{made['model_id']}/weights/{name}" for name in "ab")
    headers["X-Idempotency-Key"] = "once"
    copies = {post("copy_weights", source_path=first, destination_project_id="p")["tinker_path"] for _ in range(2)}
    assert len(copies) == 1

    place = {"session_id": session_id, "model_seq_id": 5}
    copies = {post("copy_weights", source_path=first, **place)["tinker_path"] for _ in range(2)}
    assert copies == {f"tinker://{session_id}:train:5/weights/a"}
    for body in ({"source_path": second, **place}, {"source_path": first}, {"source_path": "loot", **place}):
        refused = stack_with_keys.server.client.post("/api/v1/copy_weights", json=body, headers=headers)
        assert refused.status_code == 400 and refused.json()["detail"]


def test_sessions_are_searched_and_moved(stack_with_keys: LiveStack, connect_rest: ConnectRest) -> None:
    rest = connect_rest("eve")
    names = ["Nightly One", "nightly two", "other"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            with tinker.ServiceClient(
                base_url=stack_with_keys.url,
                api_key=key_for(stack_with_keys, "eve"),
                user_metadata={"name": name},
                display_name=name,
            ) as service:
                service.create_lora_training_client(PUBLIC_NAME, rank=4).result().save_state("s").result()

        def search(**filters: object) -> list[types.SessionSummary]:
            summaries: list[types.SessionSummary] = []
            request = types.SessionSearchRequest.model_validate({"limit": 1, **filters})
            while True:
                page = rest.search_sessions(request).result()
                summaries += page.sessions
                if page.next_cursor is None:
                    return summaries
                request = request.model_copy(update={"cursor": page.next_cursor})

        assert [summary.display_name for summary in search()] == names[::-1]
        nightly = search(display_name="NIGHT ly")
        assert [summary.display_name for summary in nightly] == names[1::-1]
        assert nightly[0].checkpoints_count == 1 and nightly[0].owner == "tml:user:eve"
        assert nightly[0].status is not None and nightly[0].status.type == "client_finished"
        assert [s.display_name for s in search(user_metadata={"name": "other"})] == ["other"]
        assert search(statuses=[{"type": "active"}]) == []

        rest.assign_session_project(nightly[0].session_id, "moved").result()
        (moved,) = search(project_ids=["moved"])
        assert (moved.session_id, moved.project_id) == (nightly[0].session_id, "moved")
        assert search(owner={"type": "user", "owner_urns": ["tml:user:ann"]}) == []
        root = connect_rest("root")
        by_urn = {"type": "user", "owner_urns": ["tml:user:eve"]}
        request = types.SessionSearchRequest.model_validate({"owner": by_urn})
        assert len(root.search_sessions(request).result().sessions) == 3


def test_session_lists_its_runs_and_samplers(connect: Connect, connect_rest: ConnectRest) -> None:
    service = connect("ann")
    training = service.create_lora_training_client(PUBLIC_NAME, rank=4).result()
    session_id = training.model_id.split(":")[0]
    sampling = service.create_sampling_client(base_model=PUBLIC_NAME).result()
    rest = connect_rest("ann")
    made = rest.get_session(session_id).result()
    assert training.model_id in made.training_run_ids and made.user_metadata == {"whose": "ann"}
    assert rest.get_sampler(made.sampler_ids[-1]).result().base_model == PUBLIC_NAME
    assert sampling.get_base_model() == PUBLIC_NAME
    assert session_id in rest.list_sessions(limit=100).result().sessions

    root = connect_rest("root")
    assert session_id not in root.list_sessions(limit=100).result().sessions
    assert session_id in root.list_sessions(limit=100, access_scope="accessible").result().sessions


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda rest: rest.export_session_trace("session-x"), "session 'session-x' does not exist"),
    ],
)
def test_unsupported_and_unknown_things_return_404_with_the_reason(
    connect_rest: ConnectRest, call: Callable[[tinker.RestClient], tinker.APIFuture], text: str
) -> None:
    with pytest.raises(tinker.NotFoundError, match=text):
        call(connect_rest("ann")).result(timeout=300)


def test_unsupported_optimizer_is_named(stack_with_keys: LiveStack) -> None:
    headers = {"X-API-Key": key_for(stack_with_keys, "ann")}

    def post(path: str, **body: object) -> httpx.Response:
        return stack_with_keys.server.client.post(f"/api/v1/{path}", json=body, headers=headers)

    asked = post(
        "create_model",
        session_id=post("create_session", tags=[], sdk_version="0.38.0").json()["session_id"],
        model_seq_id=0,
        base_model=PUBLIC_NAME,
        lora_config={"rank": 4},
        optimizer_config={"type": "dimuon", "version": 1},
    )
    while (answer := post("retrieve_future", request_id=asked.json()["request_id"])).status_code == 408:
        pass
    assert "'dimuon'" in answer.json()["error"] and answer.json()["category"] == "user"
