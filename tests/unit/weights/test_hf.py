"""Checkpoints: every format is read, and every fault is named."""

import json
import re
import tracemalloc
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.state_files import hash_of_base_model
from skyrl_tx.layers.parameter import Parameter, flatten
from skyrl_tx.models import describe_params, find_family, read_model
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.weight_map import name_adapter_modules


@pytest.fixture
def directory(tmp_path):
    return write_model(tmp_path, tied_embeddings=False, num_layers=3)


def load(directory, **options):
    content = hf.read_json(directory, "config.json")
    family = find_family(content)
    config = family.config_from_hf(content)
    return hf.load(directory, describe_params(config), family.weights, **options)


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def split(directory, shards):
    """Turn the single file into shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, index = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        save_file({name: tensors[name] for name in names[shard::shards]}, directory / file)
        index |= dict.fromkeys(names[shard::shards], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def test_tensors_land_where_they_belong(directory):
    params, tensors = load(directory), load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(params.embed, tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.unembed, tensors["lm_head.weight"])
    np.testing.assert_array_equal(params.final_norm, tensors["model.norm.weight"])
    for layer in range(3):
        prefix = f"model.layers.{layer}"
        np.testing.assert_array_equal(params.layers[0]["down_proj"][layer], tensors[f"{prefix}.mlp.down_proj.weight"].T)
        np.testing.assert_array_equal(params.layers[0]["q_norm"][layer], tensors[f"{prefix}.self_attn.q_norm.weight"])
    assert "layers.0.q_norm" in flatten(params) and "layers.0.q_bias" not in flatten(params)


def put_into_cache(hub, name, directory, revision):
    """Put a model into a cache of the hub as its newest revision.

    Files are stored as blobs, with links to them by name.
    """
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "blobs").mkdir(exist_ok=True)
    snapshot.mkdir(parents=True)
    for path in directory.iterdir():
        blob = repository / "blobs" / f"{revision}-{path.name}"
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)


def test_a_model_of_the_hub_is_identified_by_its_files(tmp_path, monkeypatch):
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    local = write_model(tmp_path / "local")
    put_into_cache(hub, "someone/tiny", local, "0" * 40)
    expected = hash_of_base_model(local)

    def compute_hash(name):
        backend = JaxBackend(name, JaxConfig(compile_cache_dir=None, max_context_length=64))
        started = backend.start().base_model_hash
        backend.close()
        return started

    assert compute_hash("someone/tiny") == compute_hash(str(local)) == expected, "by whatever name it comes"
    rewrite(local, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"] + 1}))
    put_into_cache(hub, "someone/tiny", local, "1" * 40)
    assert compute_hash("someone/tiny") == hash_of_base_model(local) != expected, "a new revision is another base"
    put_into_cache(hub, "someone/copy", local, "2" * 40)
    assert compute_hash("someone/copy") == hash_of_base_model(local), "a copy under another name is the same base"


def test_shards_equal_the_single_file(directory):
    whole = load(directory)
    split(directory, 3)
    jax.tree.map(np.testing.assert_array_equal, whole, load(directory))


def test_the_host_never_holds_a_second_copy(tmp_path, monkeypatch):
    """The host holds one parameter, and the one before it until the device has let go of it.

    Reading all tensors first took 1.6 times the size of the model.
    """
    directory = write_model(tmp_path, num_layers=8, hidden_size=128, mlp_size=256)
    put = jax.device_put  # on CPU it may use the host's memory without a copy
    monkeypatch.setattr(hf.jax, "device_put", lambda host, *_: jax.block_until_ready(put(host).copy()))
    on_device = partial(load, directory, placement=lambda _: SingleDeviceSharding(jax.devices()[0]))
    on_device()  # what the first call imports and compiles is not counted
    tracemalloc.start()
    try:
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(on_device()))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.75 * num_bytes


def test_large_arrays_are_transferred_in_pieces(directory, monkeypatch):
    on_device = partial(load, directory, placement=lambda _: SingleDeviceSharding(jax.devices()[0]))
    whole, sizes = on_device(), []
    put = jax.device_put

    def put_counted(host, device):
        sizes.append(host.nbytes)
        return put(host, device)

    monkeypatch.setattr(hf.jax, "device_put", put_counted)
    monkeypatch.setattr(hf, "PIECE_BYTES", 20_000)
    jax.tree.map(np.testing.assert_array_equal, whole, on_device())
    assert max(sizes) <= 20_000 < max(leaf.nbytes for leaf in jax.tree.leaves(whole))


def test_bfloat16_files_load_into_either_type_and_norms_are_float32(directory):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)

    rewrite(directory, halve)
    low, high = load(directory, dtype=jnp.bfloat16), load(directory)
    for path, leaf in flatten(low).items():
        assert leaf.dtype == (jnp.float32 if "norm" in path else jnp.bfloat16), path
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.float32), b), low, high)


def load_as_read(directory):
    family, config = read_model(directory)
    return hf.load(directory, describe_params(config), family.weights)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_tied_embeddings_need_equal_tensors(tmp_path, caplog, num_shards, prefix):
    """As in transformers 5: embeddings that differ are not tied, although the config says so."""
    directory = write_model(tmp_path, tied_embeddings=True)
    embed = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    other = embed.copy()
    other[-1, -1] += 1
    for head, is_tied in ((embed, True), (other, False), (other[:-1], None)):
        rewrite(directory, lambda tensors, head=head: tensors.update({"lm_head.weight": head}))
        nested = write_nested(directory, tmp_path / f"{prefix}{is_tied}", prefix)
        if num_shards > 1:
            split(nested, num_shards)

        if is_tied is None:
            with pytest.raises(hf.CheckpointError, match=r"lm_head\.weight has shape \(255, 32\)"):
                load_as_read(nested)
            continue
        found = load_as_read(nested)
        assert (found.unembed is None) is is_tied
        assert ("differs from the embedding" in caplog.text) is not is_tied
        if not is_tied:
            np.testing.assert_array_equal(found.unembed, other)
            np.testing.assert_array_equal(found.embed, embed)


def write_nested(directory, target, prefix):
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def test_a_missing_unembedding_is_refused(directory):
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(hf.CheckpointError, match=r"lacks tensor 'lm_head.weight'; set tie_word_embeddings = true"):
        load_as_read(directory)


def test_tensors_of_other_parts_are_counted_in_the_log(directory, caplog):
    names = ("mtp.fc.weight", "mtp.norm.weight", "model.visual.proj.weight", "model.layers.0.rotary_emb.inv_freq")
    rewrite(directory, lambda tensors: tensors.update(dict.fromkeys(names, np.ones(2, np.float32))))
    with caplog.at_level("INFO"):
        load(directory)
    unused, total = (record.getMessage() for record in caplog.records)
    assert unused == f"{directory}: tensors that are not used: 1 in model.visual.*, 2 in mtp.*"
    assert re.fullmatch(r"loading weights: 0\.00 GB in 0\.\d s, 0\.\d\d GB/s", total)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks tensor 'model\.norm\.weight'"),
        (lambda t: t.update({"model.extra.weight": np.zeros(2)}), r"unexpected tensor 'model\.extra\.weight'"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.zeros((3, 4), np.float32)}),
            r"model\.layers\.1\.mlp\.up_proj\.weight has shape \(3, 4\), the config says \(64, 32\)",
        ),
    ],
)
def test_faulty_tensors_are_named(directory, change, message):
    rewrite(directory, change)
    with pytest.raises(hf.CheckpointError, match=message) as raised:
        load(directory)
    assert str(directory) in str(raised.value)


def test_faulty_files_are_named(directory):
    (directory / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(hf.CheckpointError, match=r"model\.safetensors"):
        load(directory)
    (directory / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(hf.CheckpointError, match=r"model\.safetensors: is a pointer of Git LFS.* run `git lfs pull`"):
        load(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(hf.CheckpointError, match="holds neither"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(hf.CheckpointError, match=r"config\.json"):
        load(directory)


@pytest.mark.parametrize("name", ["gone.safetensors", "../elsewhere.safetensors"])
def test_index_may_only_name_files_in_its_directory(directory, name):
    split(directory, 2)
    (directory.parent / "elsewhere.safetensors").touch()
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    with pytest.raises(hf.CheckpointError, match="is not there"):
        load(directory)


def test_tensors_are_read_where_they_are(directory, caplog):
    expected = load(directory)
    split(directory, 2)
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    wrong = index | {"model.norm.weight": "model-0.safetensors", "mtp.norm.weight": "model-0.safetensors"}
    assert index["model.norm.weight"] == "model-1.safetensors"
    del wrong["lm_head.weight"]
    path.write_text(json.dumps({"weight_map": wrong}))
    jax.tree.map(np.testing.assert_array_equal, load(directory), expected)
    assert f"{path}: says that tensor 'lm_head.weight' and 2 more is in no file, but" in caplog.text


def test_a_tensor_in_two_shards_is_refused(directory):
    split(directory, 2)
    norm = {"model.norm.weight": np.ones(32, np.float32)}
    save_file(load_file(directory / "model-0.safetensors") | norm, directory / "model-0.safetensors")
    with pytest.raises(hf.CheckpointError, match=r"'model\.norm\.weight' is in model-0\.safetensors and model-1\."):
        load(directory)


def test_a_whole_file_beside_an_index_is_named(directory, caplog):
    expected, whole = load(directory), (directory / "model.safetensors").read_bytes()
    split(directory, 2)
    (directory / "model.safetensors").write_bytes(whole)
    jax.tree.map(np.testing.assert_array_equal, load(directory), expected)
    assert "model.safetensors is not read, because it is not in the index; transformers reads it" in caplog.text


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": ["a"]}'])
def test_a_faulty_index_is_refused(directory, content):
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(hf.CheckpointError, match=r"index\.json: (no weight_map|names 1, which is not there)"):
        load(directory)


def test_eos_comes_from_the_generation_config_first(directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert hf.read_eos_token_ids(directory) == (5, 6)
    (directory / "generation_config.json").unlink()
    assert hf.read_eos_token_ids(directory) == (1,)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "<end>"}},
        {"tokenizer_config.json": {"eos_token": {"content": "<end>"}, "added_tokens_decoder": {}}},
        {"tokenizer_config.json": {"eos_token": "a"}, "special_tokens_map.json": {"eos_token": {"content": "<end>"}}},
        {"special_tokens_map.json": {"eos_token": "<end>"}},
    ],
    ids=["text", "object", "older file first", "older file"],
)
@pytest.mark.parametrize("is_added", [False, True])
def test_eos_of_the_tokenizer_ends_a_sample_too(directory, files, is_added):
    vocabulary = {"a": 4} | ({} if is_added else {"<end>": 7})
    added = [{"id": 7, "content": "<end>", "special": True}] if is_added else []
    tokenizer = {"added_tokens": added, "model": {"type": "BPE", "vocab": vocabulary}}
    for name, content in (files | {"tokenizer.json": tokenizer}).items():
        (directory / name).write_text(json.dumps(content))
    assert hf.read_eos_token_ids(directory) == (1, 7)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 6]}')
    assert hf.read_eos_token_ids(directory) == (7, 6)


def test_resolve_accepts_directories_and_names_a_missing_model(directory, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hf.resolve_model(str(directory)) == directory
    for wrong in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(hf.CheckpointError, match="no such directory"):
            hf.resolve_model(wrong)

    for wrong, cause in (
        ("org/nothing", "the model is not in the cache of the hub, and HF_HUB_OFFLINE is set"),
        ("no model", "this is not a hub id such as Qwen/Qwen3-8B"),
    ):
        with pytest.raises(hf.CheckpointError, match=f"^{wrong}: no such directory, and {cause}$"):
            hf.resolve_model(wrong)


def raise_from(error, cause=None):
    raise error from cause


@pytest.mark.parametrize(
    ("error", "cause", "message"),
    [
        (
            errors.LocalEntryNotFoundError("Got: x\nAn error"),
            OSError("no\nroute"),
            "the hub cannot be reached: no route",
        ),
        (errors.RepositoryNotFoundError("404", response=Mock()), None, "the hub has no such model; set HF_TOKEN if it"),
        (errors.GatedRepoError("403", response=Mock()), None, "access to this model is restricted: accept its terms"),
        (OSError(28, "No space left"), None, r"downloaded from the hub: \[Errno 28\] No space left"),
        (RuntimeError("the connection\n was lost"), None, "downloaded from the hub: the connection was lost"),
    ],
)
def test_errors_of_the_hub_are_one_sentence(monkeypatch, error, cause, message):
    monkeypatch.setattr(hf, "snapshot_download", lambda *_, **__: raise_from(error, cause))
    with pytest.raises(hf.CheckpointError, match=message) as raised:
        hf.resolve_model("org/name")
    assert str(raised.value).startswith("org/name: no such directory, and ")


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model-1.safetensors", "model-2.safetensors", "original/model.safetensors", "consolidated.safetensors"], 2),
        (["model-1.safetensors", "model-2.safetensors", "model.safetensors"], 2),
        (["model.safetensors", "model.fp16.safetensors", "onnx/model.safetensors", "pytorch_model.bin"], 0),
    ],
)
def test_only_the_weights_that_are_read_are_downloaded(tmp_path, monkeypatch, weights, wanted):
    """Repositories can hold the same weights in other formats, for example in `original`."""
    others = ["config.json", "tokenizer.json", "merges.txt", "original/params.json", "README.md"]
    others += ["additional_chat_templates/tool_use.jinja", "original/chat.jinja"]
    repository, snapshot = [*weights, *others], tmp_path / "0123"
    snapshot.mkdir()
    index = {"weight_map": {str(number): weights[number] for number in range(wanted)}}

    def download(name, *, allow_patterns, ignore_patterns, revision="main"):
        assert name == "org/name" and revision in ("main", "0123")
        for path in filter_repo_objects(repository, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (snapshot / path).parent.mkdir(exist_ok=True)
            (snapshot / path).write_text("{}")
        if wanted:
            (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
        return str(snapshot)

    monkeypatch.setattr(hf, "snapshot_download", download)
    assert hf.resolve_model("org/name", with_weights=False) == snapshot
    assert not list(snapshot.rglob("*.safetensors"))
    assert hf.resolve_model("org/name") == snapshot
    found = {path.name for path in snapshot.rglob("*") if path.is_file()} - {"model.safetensors.index.json"}
    assert found == {"config.json", "tokenizer.json", "merges.txt", "tool_use.jinja", *weights[: wanted or 1]}


def test_dummy_weights_are_deterministic_and_of_the_usual_scale():
    shape = Parameter((4, 64, 32), ("layers", "embed", "mlp"))
    tree = {"a": shape, "b": shape, "norm": replace(shape, init="ones"), "bias": replace(shape, init="zeros")}
    first, again, other = hf.make_dummy(tree), hf.make_dummy(tree), hf.make_dummy(tree, seed=1)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    for name in ("a", "b"):
        assert float(first[name].std()) == pytest.approx(0.02, rel=0.05)
        assert abs(float(first[name].mean())) < 1e-3
    assert abs(np.corrcoef(first["a"].ravel(), first["b"].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(first["a"].ravel(), other["a"].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(first["a"][:, :, 0].ravel(), first["a"][:, :, 1].ravel())[0, 1]) < 0.2
    assert np.all(first["norm"] == 1) and not np.any(first["bias"])


def test_adapter_modules_follow_the_checkpoint():
    family = find_family({"architectures": ["Qwen3ForCausalLM"]})
    modules = name_adapter_modules(family.weights, tied_embeddings=False)
    assert modules["q_proj"] == "model.layers.{layer}.self_attn.q_proj" and modules["unembed"] == "lm_head"
    assert set(modules) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "unembed"}
    assert name_adapter_modules(family.weights, tied_embeddings=True)["unembed"] == "model.unembed_tokens"
