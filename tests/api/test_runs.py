"""Training runs and checkpoints, with the SDK's management client and with plain HTTP."""

from collections.abc import Iterator

import pytest
import tinker

from tests.support.live_api import Server
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def rest(server: Server, engine: ScriptedEngine) -> Iterator[tinker.RestClient]:
    yield tinker.RestClient(base_url=server.url)


def create_saved_run(server: Server) -> str:
    """Create a run with one checkpoint of each kind and return its id."""
    answer = server.post(
        "create_model",
        session_id=server.session(),
        model_seq_id=0,
        base_model="Qwen/Qwen3-8B",
        lora_config={"rank": 8, "train_mlp": False},
        user_metadata={"renderer_name": "qwen3", "step": 3},
    )

    model_id = answer.json()["model_id"]
    server.result(server.post("save_weights", model_id=model_id, path="a", user_metadata={"k": "v"}))
    server.result(server.post("save_weights_for_sampler", model_id=model_id, path="b", ttl_seconds=3600))
    return model_id


def test_run_is_described(server: Server, rest: tinker.RestClient) -> None:
    model_id = create_saved_run(server)
    run = rest.get_training_run(model_id).result()
    assert run.base_model == "Qwen/Qwen3-8B" and run.is_lora and run.lora_rank == 8
    assert run.user_metadata == {"renderer_name": "qwen3", "step": "3"}
    assert run.last_checkpoint is not None and run.last_checkpoint.checkpoint_id == "weights/a"
    assert run.last_sampler_checkpoint is not None and run.last_sampler_checkpoint.expires_at is not None
    assert model_id in {run.training_run_id for run in rest.list_training_runs(limit=100).result().training_runs}
    assert rest.list_training_runs(limit=1).result().cursor.total_count >= 1


def test_checkpoints_are_listed_expired_and_deleted(server: Server, rest: tinker.RestClient) -> None:
    model_id = create_saved_run(server)
    listed = {
        checkpoint.checkpoint_id: checkpoint for checkpoint in rest.list_checkpoints(model_id).result().checkpoints
    }
    assert set(listed) == {"weights/a", "sampler_weights/b"}
    assert listed["weights/a"].user_metadata == {"k": "v"}
    path = listed["weights/a"].tinker_path
    assert path in {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints().result().checkpoints}

    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    assert rest.list_checkpoints(model_id).result().checkpoints[0].expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert rest.list_checkpoints(model_id).result().checkpoints[0].expires_at is None
    rest.delete_checkpoint(model_id, "weights/a").result()
    assert [left.checkpoint_id for left in rest.list_checkpoints(model_id).result().checkpoints] == [
        "sampler_weights/b"
    ]


def test_weights_info_describes_the_adapter(server: Server, rest: tinker.RestClient) -> None:
    info = rest.get_weights_info_by_tinker_path(f"tinker://{create_saved_run(server)}/weights/a").result()
    assert info.lora_rank == 8 and info.train_attn and info.train_unembed and info.train_mlp is False


def test_capabilities_name_the_model(rest: tinker.RestClient) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert model.model_name == "Qwen/Qwen3-8B" and model.max_context_length == 4096


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "training_runs/no:train:0", 404, "model 'no:train:0' does not exist"),
        ("GET", "training_runs/no:train:0/checkpoints", 404, "does not exist"),
        ("GET", "training_runs?limit=-1", 400, "limit"),
        ("GET", "checkpoints?offset=99999999999999999999", 400, "offset"),
        ("GET", "training_runs?access_scope=all", 400, "access_scope"),
        ("DELETE", "training_runs/{run}/checkpoints/weights/no", 404, "does not exist"),
        ("DELETE", "training_runs/{run}/checkpoints/loot/a", 400, "kind 'loot'"),
        ("DELETE", "training_runs/{run}/checkpoints/weights/..%5C", 400, "checkpoint name"),
        ("POST", "training_runs/{run}/checkpoints/weights/no/publish", 404, "does not exist"),
        ("GET", "sessions/s/trace_export", 404, "session 's' does not exist"),
        ("POST", "create_custom_loss", 404, "this server does not evaluate custom losses"),
    ],
)
def test_errors_name_the_cause(
    server: Server, rest: tinker.RestClient, method: str, path: str, status: int, text: str
) -> None:
    run = create_saved_run(server) if "{run}" in path else ""
    answer = server.client.request(method, f"/api/v1/{path.format(run=run)}")
    assert answer.status_code == status and text in answer.json()["detail"]


@pytest.mark.parametrize("seconds", [1, 10**12])
def test_ttl_out_of_range_is_refused(server: Server, rest: tinker.RestClient, seconds: int) -> None:
    path = f"/api/v1/training_runs/{create_saved_run(server)}/checkpoints/weights/a/ttl"
    answer = server.client.put(path, json={"ttl_seconds": seconds})
    assert answer.status_code == 400 and f"ttl_seconds {seconds}" in answer.json()["detail"]
