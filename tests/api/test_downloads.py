"""Downloads of weights with the SDK and plain HTTP: signed URLs, byte ranges, archives and encryption."""

import io
import json
import shutil
import tarfile
import time
import urllib.request
from http import HTTPStatus
from types import SimpleNamespace

import httpx
import numpy as np
import pyrage
import pytest
import tinker
from safetensors.numpy import load

from skyrl_tx.contract.ids import CheckpointPath
from skyrl_tx.server.routes import downloads
from skyrl_tx.store import checkpoints
from tests.support.live_stack import PUBLIC_NAME, LiveStack

ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def rest(stack: LiveStack) -> tinker.RestClient:
    return tinker.RestClient(base_url=stack.url)


@pytest.fixture
def client_after_step(training: tinker.TrainingClient) -> tinker.TrainingClient:
    """Return a client after one step, so that neither LoRA matrix is zero."""
    tokens = tinker.ModelInput.from_ints([5, 6, 7, 8])
    datum = tinker.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4})
    training.forward_backward([datum], "cross_entropy")
    training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    return training


def fetch(url: str) -> bytes:
    """Download without headers of this project, as the SDK's command line does."""
    with urllib.request.urlopen(url, timeout=20) as response:
        return response.read()


def test_external_weights_are_downloaded_without_a_key(
    client_after_step: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    saved = client_after_step.save_weights_external("out", ttl_seconds=3600).result()
    assert saved.path.endswith("/external_weights/out")
    signed = rest.get_external_weights_urls(saved.path).result()
    assert set(signed.urls) == ADAPTER
    assert 3500 < signed.expires.timestamp() - time.time() < 3700
    files = {name: fetch(url) for name, url in signed.urls.items()}
    config = json.loads(files["adapter_config.json"])
    assert config["base_model_name_or_path"] == PUBLIC_NAME and config["r"] == 8 and config["lora_alpha"] == 32

    tensors = load(files["adapter_model.safetensors"])
    assert all(name.startswith("base_model.model.") for name in tensors)
    assert any(np.any(array) for name, array in tensors.items() if ".lora_B." in name)
    listed = {checkpoint.tinker_path: checkpoint for checkpoint in rest.list_user_checkpoints().result().checkpoints}
    assert listed[saved.path].checkpoint_type == "external"
    assert listed[saved.path].size_bytes == sum(map(len, files.values()))
    assert listed[saved.path].expires_at is not None
    rest.delete_checkpoint_from_tinker_path(saved.path).result()
    assert httpx.get(signed.urls["adapter_config.json"]).status_code == HTTPStatus.FORBIDDEN


def test_download_url_serves_byte_ranges(client_after_step: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = client_after_step.save_weights_external("ranges").result().path
    url = rest.get_external_weights_urls(path).result().urls["adapter_model.safetensors"]
    whole = httpx.get(url)
    size = len(whole.content)
    assert whole.status_code == HTTPStatus.OK and int(whole.headers["content-length"]) == size
    head = httpx.head(url)
    assert head.headers["content-length"] == str(size) and head.headers["accept-ranges"] == "bytes"

    for header, expected in (
        ("bytes=0-99", whole.content[:100]),
        ("bytes=100-", whole.content[100:]),
        ("bytes=-7", whole.content[-7:]),
        (f"bytes=10-{size * 2}", whole.content[10:]),
    ):
        part = httpx.get(url, headers={"range": header})
        assert part.status_code == HTTPStatus.PARTIAL_CONTENT and part.content == expected
        first = size - len(expected) if header != "bytes=0-99" else 0
        assert part.headers["content-range"] == f"bytes {first}-{first + len(expected) - 1}/{size}"

    for ignored in ("bytes=5-2", "lines=1-2", "bytes=-", "bytes=0-1,5-6"):
        assert httpx.get(url, headers={"range": ignored}).content == whole.content
    outside = httpx.get(url, headers={"range": f"bytes={size}-"})
    assert outside.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
    assert outside.headers["content-range"] == f"bytes */{size}"
    changed = httpx.get(url, headers={"range": "bytes=0-9", "if-range": '"another"'})
    assert changed.status_code == HTTPStatus.OK and changed.content == whole.content


def test_signature_is_valid_for_one_file_and_expiry(
    client_after_step: tinker.TrainingClient, rest: tinker.RestClient, stack: LiveStack
) -> None:
    path = client_after_step.save_weights_external("signed").result().path
    url = httpx.URL(rest.get_external_weights_urls(path).result().urls["adapter_config.json"])
    assert httpx.get(url).status_code == HTTPStatus.OK

    expires = int(url.params["expires"])
    forged = (
        url.copy_set_param("expires", str(expires + 1)),
        url.copy_set_param("signature", "0" * 64),
        url.copy_with(path=url.path.replace("adapter_config.json", "adapter_model.safetensors")),
        url.copy_with(path=url.path.replace("adapter_config.json", "%2e%2e/adapter_config.json")),
        url.copy_with(path=url.path.replace("/file/", "/archive/")),
        url.copy_with(path=url.path.replace("signed", "other")),
    )
    for forged_url in forged:
        assert httpx.get(forged_url).status_code == HTTPStatus.FORBIDDEN, forged_url
    assert httpx.get(url.copy_remove_param("signature")).status_code == HTTPStatus.BAD_REQUEST


def test_download_url_expires(
    client_after_step: tinker.TrainingClient, rest: tinker.RestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = client_after_step.save_weights_external("late").result().path
    url = rest.get_external_weights_urls(path).result().urls["adapter_config.json"]
    later = SimpleNamespace(time=lambda: time.time() + 3601)
    monkeypatch.setattr(downloads, "time", later)
    answer = httpx.get(url)
    assert answer.status_code == HTTPStatus.FORBIDDEN and "expired" in answer.json()["detail"]


def test_download_urls_have_the_address_of_the_request(
    client_after_step: tinker.TrainingClient, stack: LiveStack
) -> None:
    path = client_after_step.save_weights_external("host").result().path
    run, kind, name = path.removeprefix("tinker://").split("/")
    endpoint = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"
    answer = stack.server.client.get(endpoint, headers={"host": "192.0.2.7:8443"})
    assert all(url.startswith("http://192.0.2.7:8443/api/v1/downloads/") for url in answer.json()["urls"].values())


def test_encrypted_export_is_readable_by_its_recipients_only(
    client_after_step: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    first, second, other = (pyrage.x25519.Identity.generate() for _ in range(3))
    recipients = [str(first.to_public()), str(second.to_public())]
    path = client_after_step.save_weights_external("secret", age_encryption_recipients=recipients).result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert set(urls) == {f"{name}.age" for name in ADAPTER}
    sealed = fetch(urls["adapter_config.json.age"])
    assert b"lora_alpha" not in sealed
    for identity in (first, second):
        assert json.loads(pyrage.decrypt(sealed, [identity]))["r"] == 8
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(sealed, [other])


def test_invalid_recipient_is_refused(client_after_step: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients 'age1nobody'"):
        client_after_step.save_weights_external("sealed", age_encryption_recipients=["age1nobody"]).result()


def test_export_names_are_unique_and_retries_are_duplicates(
    client_after_step: tinker.TrainingClient, stack: LiveStack
) -> None:
    first = stack.server.post("save_weights_external", model_id=client_after_step.model_id, path="once", seq_id=50)
    again = stack.server.post("save_weights_external", model_id=client_after_step.model_id, path="once", seq_id=50)
    assert first.json()["request_id"] == again.json()["request_id"]
    done = stack.server.result(first)
    assert done["type"] == "save_weights_external" and isinstance(done["size_bytes"], int)
    taken = stack.server.post("save_weights_external", model_id=client_after_step.model_id, path="once", seq_id=51)
    assert "exists already; choose another name or delete it first" in str(stack.server.result(taken)["error"])


def test_checkpoint_kinds_are_not_interchangeable(
    client_after_step: tinker.TrainingClient, service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    """Training and sampler checkpoints have no URLs.

    External weights can be used neither to train nor to sample.
    """
    state, sampler = (
        client_after_step.save_state("state").result().path,
        client_after_step.save_weights_for_sampler("b").result().path,
    )
    external = client_after_step.save_weights_external("c").result().path
    for path in (state, sampler):
        with pytest.raises(ValueError, match="only accepts external"):
            rest.get_external_weights_urls(path)
    with pytest.raises(tinker.RequestFailedError, match="save_state"):
        service.create_training_client_from_state(external).result()
    with pytest.raises(tinker.BadRequestError, match="save_weights_for_sampler"):
        service.create_sampling_client(model_path=external).result()


def test_training_checkpoint_is_downloaded_through_an_export(
    client_after_step: tinker.TrainingClient, service: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    """An export contains the same bytes for the original model and for a model that was loaded from its checkpoint."""
    direct = client_after_step.save_weights_external("direct").result().path
    state = client_after_step.save_state("kept").result().path
    again = service.create_training_client_from_state(state).result().save_weights_external("download").result().path
    first, second = (
        fetch(rest.get_external_weights_urls(path).result().urls["adapter_model.safetensors"])
        for path in (direct, again)
    )
    assert load(first).keys() == load(second).keys()
    assert first == second


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_archive_is_a_tar_of_the_adapter(client_after_step: tinker.TrainingClient, stack: LiveStack, kind: str) -> None:
    save = {
        "weights": client_after_step.save_state,
        "sampler_weights": client_after_step.save_weights_for_sampler,
        "external_weights": client_after_step.save_weights_external,
    }[kind]
    save("archived").result()
    answer = stack.server.client.get(
        f"/api/v1/training_runs/{client_after_step.model_id}/checkpoints/{kind}/archived/archive"
    )
    assert answer.status_code == HTTPStatus.FOUND and "GMT" in answer.headers["expires"]

    url = answer.headers["location"]
    content = fetch(url)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        assert set(tar.getnames()) == ADAPTER | {"checkpoint_complete"}
        assert all(member.isfile() for member in tar)
        config = tar.extractfile("adapter_config.json")
        weights = tar.extractfile("adapter_model.safetensors")
        assert config is not None and json.load(config)["r"] == 8
        assert weights is not None and load(weights.read())

    part = httpx.get(url, headers={"range": "bytes=700-1800"})
    assert part.status_code == HTTPStatus.PARTIAL_CONTENT and part.content == content[700:1801]


def test_missing_checkpoint_has_no_download_url(stack: LiveStack) -> None:
    session = stack.server.session()
    for place in ("archive", "external_weights_urls"):
        for kind, status in (("external_weights", 404), ("pictures", 400)):
            answer = stack.server.client.get(f"/api/v1/training_runs/{session}:train:0/checkpoints/{kind}/x/{place}")
            assert answer.status_code == status


def test_damaged_weights_are_not_served(
    client_after_step: tinker.TrainingClient, rest: tinker.RestClient, stack: LiveStack
) -> None:
    path = client_after_step.save_weights_external("damaged").result().path
    url = rest.get_external_weights_urls(path).result().urls["adapter_model.safetensors"]
    assert httpx.get(url, headers={"range": "bytes=0-9"}).status_code == HTTPStatus.PARTIAL_CONTENT
    row = stack.server.store.read(lambda tx: checkpoints.get(tx, CheckpointPath.parse(path), time.time()))
    assert row is not None
    folder = stack.server.settings.data_dir / "artifacts" / row.artifact_id
    weights = folder / "adapter_model.safetensors"

    def flip_a_bit() -> None:
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    run, kind, name = path.removeprefix("tinker://").split("/")
    signing = f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"
    for harm, what in (
        (flip_a_bit, "file adapter_model.safetensors does not match the manifest"),
        (weights.unlink, "file adapter_model.safetensors is missing"),
        ((folder / "manifest.json").unlink, "manifest.json cannot be read"),
    ):
        harm()
        for answer in (httpx.head(url), httpx.get(url), stack.server.client.get(signing)):
            assert answer.status_code == HTTPStatus.GONE
        assert f"checkpoint {path} is damaged: artifact {folder.name}: {what}" in answer.json()["detail"]
    shutil.rmtree(folder)
    assert httpx.get(url).status_code == HTTPStatus.NOT_FOUND
