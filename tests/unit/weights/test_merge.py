import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from skyrl_tx.models.qwen3 import QWEN3
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights.hf import INDEX_FILE, locate_tensors
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterError, AdapterFiles

Q, EMBED, HEAD = "model.layers.1.self_attn.q_proj", "model.embed_tokens.weight", "lm_head.weight"


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape) * sum(shape)).normal(size=shape).astype(np.float32)


def adapter(*modules: tuple[str, int]) -> AdapterFiles:
    factors = {name: (random(2, 32), random(outputs, 2)) for name, outputs in modules}
    return AdapterFiles(config={"r": 2, "lora_alpha": 32}, factors=factors)


def all_tensors(folder: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for name, path in locate_tensors(folder).items():
        with safe_open(path, framework="np") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def shard_model(folder: Path) -> Path:
    """Split a model into three files, in bfloat16."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{index % 3 + 1:05}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        part = {name: tensors[name].astype(ml_dtypes.bfloat16) for name in names if weight_map[name] == file}
        save_file(part, folder / file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_module_gets_its_update_and_nothing_else_changes(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", tied_embeddings=False)
    (tmp_path / "out").mkdir()
    files = adapter((Q, 64))
    merge_adapter(base, QWEN3.weights, files, tmp_path / "out")
    before, after = all_tensors(base), all_tensors(tmp_path / "out")
    a, b = files.factors[Q]
    np.testing.assert_allclose(after[f"{Q}.weight"], before[f"{Q}.weight"] + 16 * b @ a, rtol=1e-6)
    assert before.keys() == after.keys()
    for name in before.keys() - {f"{Q}.weight"}:
        np.testing.assert_array_equal(before[name], after[name])
    assert (tmp_path / "out" / "generation_config.json").is_file()


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_shards_stay_shards(tmp_path: Path, dtype: str | None) -> None:
    base = shard_model(write_model(tmp_path / "base", tied_embeddings=True))
    out = tmp_path / "out"
    out.mkdir()
    merge_adapter(base, QWEN3.weights, adapter((Q, 64), ("model.unembed_tokens", 256)), out, dtype, is_tied=True)
    index = json.loads((out / INDEX_FILE).read_text())
    after = all_tensors(out)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in after.values())
    assert {path.name for path in out.glob("*.safetensors")} == {path.name for path in base.glob("*.safetensors")}
    assert {array.dtype.name for array in after.values()} == {dtype or "bfloat16"}
    assert HEAD in after and not np.array_equal(after[HEAD], after[EMBED])
    np.testing.assert_array_equal(after[EMBED].astype(np.float32), all_tensors(base)[EMBED].astype(np.float32))
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config.get("dtype") == (dtype or config.get("dtype"))


@pytest.mark.parametrize(
    ("module", "message"), [(("model.layers.9.mlp.up_proj", 64), "has no tensor"), ((Q, 63), "is \\(64, 32\\)")]
)
def test_mismatched_adapters_are_refused(tmp_path: Path, module: tuple[str, int], message: str) -> None:
    base = write_model(tmp_path / "base")
    (tmp_path / "out").mkdir()
    with pytest.raises(AdapterError, match=message):
        merge_adapter(base, QWEN3.weights, adapter(module), tmp_path / "out")
