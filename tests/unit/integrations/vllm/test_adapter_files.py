"""The adapters that vLLM reads have the module names of the class that vLLM runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx.integrations.vllm.adapter_files import AdapterDirectory, read_nesting


def write_adapter(directory: Path) -> None:
    names = ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "base_model.model.lm_head.lora_A.weight")
    save_file(dict.fromkeys(names, np.ones(2, np.float32)), directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"target_modules": ["up_proj"]}))


@pytest.mark.parametrize(
    ("architecture", "modules"),
    [
        ("Qwen3ForCausalLM", ("model.", "")),
        ("Qwen3_5MoeForConditionalGeneration", ("model.language_model.", "")),
        ("KimiK25ForConditionalGeneration", ("language_model.model.", "language_model.")),
    ],
)
def test_modules_have_the_names_of_the_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, modules: tuple[str, str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": [architecture]}))
    cached: dict[str, Any] = {"org/model": str(config)}
    monkeypatch.setattr(f"{read_nesting.__module__}.try_to_load_from_cache", lambda name, _: cached.get(name))
    assert read_nesting("org/model") == read_nesting(str(tmp_path))
    assert not read_nesting("org/another").prefix

    directory = AdapterDirectory(tmp_path / "adapters", read_nesting("org/model"))
    written = directory.write("name", SimpleNamespace(write=write_adapter))  # type: ignore[arg-type]
    assert set(load_file(written / "adapter_model.safetensors")) == {
        f"base_model.model.{modules[0]}layers.0.mlp.up_proj.lora_A.weight",
        f"base_model.model.{modules[1]}lm_head.lora_A.weight",
    }
    assert {path.stat().st_mode & 0o777 for path in written.iterdir()} == {0o644}
    directory.close()
