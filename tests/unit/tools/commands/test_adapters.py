"""`export` and `import` of adapters: names of modules and of the base model, and files of any content."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx.store import checkpoints
from skyrl_tx.store.database import Store
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.tools.cli import main
from skyrl_tx.tools.commands.adapters import choose_public_name


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


def skyrl_tx(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run a command; return its exit status, output and errors."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "base", tied_embeddings=False)


def adapter(
    folder: Path,
    *,
    module: str = "model.layers.0.self_attn.q_proj",
    size: int = 64,
    inputs: int = 32,
    dtype: Any = np.float32,
    **config: object,
) -> Path:
    """Write a PEFT adapter for one module, with the sizes of `write_model` by default."""
    folder.mkdir()
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    a, b = np.ones((2, inputs), dtype), np.ones((size, 2), dtype)
    names = [f"base_model.model.{module}.{factor}.weight" for factor in ("lora_A", "lora_B")]
    save_file(dict(zip(names, (a, b), strict=True)), folder / "adapter_model.safetensors")
    return folder


def test_import_and_export_round_trip(data_dir, model, tmp_path, capsys) -> None:
    """The weight update is the same, with a different alpha and all modules of the group."""
    extra = {"peft_version": "0.21.2", "init_lora_weights": "gaussian", "use_dora": False, "lora_dropout": 0.1}
    source = adapter(tmp_path / "adapter", **extra, megatron_core="megatron.core", of_next_year=None)
    command = ("import", source, "--name", "mine", "--base-model", model, "--data-dir", data_dir)
    status, out, err = skyrl_tx(capsys, *command)
    assert status == 0, err

    path = next(word for word in out.split() if "/weights/mine" in word)
    out_dir = tmp_path / "out"
    assert skyrl_tx(capsys, "export", path, out_dir, "--data-dir", data_dir)[0] == 0

    config = json.loads((out_dir / "adapter_config.json").read_text())
    assert config["lora_alpha"] == 32 and set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}

    tensors = load_file(out_dir / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 2

    modes = {file.stat().st_mode for file in out_dir.iterdir()}
    assert modes == {(source / "adapter_config.json").stat().st_mode}, "all files have the default mode"

    b = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    np.testing.assert_allclose(b * 32 / 2, np.full((64, 2), 4 / 2))
    assert not tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"].any()

    status, _, err = skyrl_tx(capsys, "export", path, out_dir, "--data-dir", data_dir)
    assert status == 1 and f"{out_dir} already exists" in err


def test_import_and_export_know_the_built_in_model(data_dir, tmp_path, capsys, monkeypatch) -> None:
    """The name `tiny` works without a server and without the hub, and is the name that the files record."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = json.loads((files("skyrl_tx.tools.quickstart") / "tiny_model" / "config.json").read_text())
    outputs = config["num_attention_heads"] * config["head_dim"]
    source = adapter(tmp_path / "adapter", size=outputs, inputs=config["hidden_size"])
    status, out, err = skyrl_tx(capsys, "import", source, "--base-model", "tiny", "--data-dir", data_dir)
    assert status == 0, err
    path = next(word for word in out.split() if "/weights/imported" in word)

    status, out, err = skyrl_tx(capsys, "export", path, tmp_path / "adapter-out", "--data-dir", data_dir)
    assert (status, out) == (0, f"wrote adapter for tiny: {tmp_path / 'adapter-out'}\n"), err
    written = json.loads((tmp_path / "adapter-out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "tiny"

    assert skyrl_tx(capsys, "export", path, tmp_path / "model", "--merge", "--data-dir", data_dir)[0] == 0
    merged = load_file(tmp_path / "model" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert merged.shape == (outputs, config["hidden_size"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"module": "model.layers.0.self_attn.qkv"},
            "'model.layers.0.self_attn.qkv' is not a trainable module of this base",
        ),
        ({"module": "model.layers.7.self_attn.q_proj"}, "module 'model.layers.7.self_attn.q_proj' is not a trainable"),
        ({"size": 65}, r"is (65, 2)"),
        ({"r": 3}, "not of r = 3"),
        ({"r": 0}, "r = 0 must be a positive integer"),
        ({"r": -2}, "r = -2 must be a positive integer"),
        ({"r": 2.0}, "r = 2.0 must be a positive integer"),
        ({"r": True}, "r = True must be a positive integer"),
        ({"lora_alpha": -1}, "lora_alpha = -1"),
        ({"lora_alpha": 0}, "lora_alpha = 0 must be a number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha = nan"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf"),
        ({"lora_alpha": 10**400}, "must be a number above 0"),
        ({"lora_alpha": True}, "lora_alpha = True"),
        ({"lora_alpha": 1e308}, "lora_alpha / r makes the numbers of module"),
        ({"lora_alpha": 1e-60}, "infinite or zero"),
        ({"lora_alpha": [4]}, "lora_alpha = [4]"),
        ({"use_rslora": "no"}, "use_rslora = 'no' must be true or false"),
        ({"rank_pattern": ["in_proj"]}, "rank_pattern = ['in_proj'] is not supported"),
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters = ['mlp.experts.gate_up_proj']"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights = 'pissa_niter_4' is not supported"),
        ({"use_qalora": True}, "use_qalora = True is not supported"),
        ({"kasa_config": {"svd": 1}}, "kasa_config = {'svd': 1} is not supported"),
        ({"of_next_year": 0.5}, "of_next_year = 0.5 is not supported"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
    ],
)
def test_import_refuses_an_adapter_that_does_not_fit(data_dir, model, tmp_path, capsys, changes, message: str) -> None:
    source = adapter(tmp_path / "adapter", **changes)
    status, _, err = skyrl_tx(capsys, "import", source, "--base-model", model, "--data-dir", data_dir)
    assert status == 1 and message in err
    store = Store.open(data_dir, role="api")
    assert store.read(checkpoints.find_referenced_artifacts) == set()
    store.close()


FACTORS = ("lora_A.weight", "lora_B.weight")


@pytest.mark.parametrize(
    ("text", "architecture", "imported", "exported"),
    [
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "language_model.model.", "model.language_model."),
        ("Gemma3ForCausalLM", "Gemma3ForCausalLM", "model.language_model.", "model."),
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "model.language_model.", "model.language_model."),
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "model.", "model.language_model."),
        ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "model.", "language_model.model."),
    ],
)
def test_modules_have_the_names_of_the_class(
    data_dir: Path, tmp_path: Path, capsys: Any, text: str, architecture: str, imported: str, exported: str
) -> None:
    """Names of the text model have no effect on a class with images."""
    # Write a tiny model, with the config of a model with images.
    model = write_model(tmp_path / "model", text, num_layers=4)
    config = json.loads((model / "config.json").read_text())
    whole = {"architectures": [architecture], "text_config": config, "vision_config": {}}
    (model / "config.json").write_text(json.dumps(whole))

    # Import an adapter of one module.
    inputs = config["num_attention_heads"] * config.get("v_head_dim", config["head_dim"])
    module = "layers.3.self_attn.o_proj"
    source = adapter(tmp_path / "adapter", module=f"{imported}{module}", size=32, inputs=inputs)
    status, out, err = skyrl_tx(capsys, "import", source, "--base-model", model, "--data-dir", data_dir)
    assert status == 0, err
    path = next(word for word in out.split() if "/weights/imported" in word)

    # Only PEFT's layout has the names of the class.
    for layout, prefix in (("peft", exported), ("cookbook", "model.")):
        folder = tmp_path / layout
        status, _, err = skyrl_tx(capsys, "export", path, folder, "--format", layout, "--data-dir", data_dir)
        assert (status, err) == (0, "")
        names = {name for name in load_file(folder / "adapter_model.safetensors") if "self_attn" in name}
        assert names >= {f"base_model.model.{prefix}{module}.{factor}" for factor in FACTORS}
        assert all(name.startswith(f"base_model.model.{prefix}layers.") for name in names)


def test_a_module_with_two_names_is_refused(data_dir, model, tmp_path, capsys) -> None:
    source = adapter(tmp_path / "adapter")
    path = source / "adapter_model.safetensors"
    tensors = load_file(path)
    nested = {name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in tensors.items()}
    save_file(tensors | nested, path)
    status, _, err = skyrl_tx(capsys, "import", source, "--base-model", model, "--data-dir", data_dir)
    assert status == 1 and "modules both with and without 'model.language_model.' in their names" in err


def test_without_its_base_model_an_adapter_has_the_names_of_a_text_model(data_dir, model, tmp_path, capsys) -> None:
    source = adapter(tmp_path / "adapter")
    status, out, err = skyrl_tx(capsys, "import", source, "--base-model", model, "--data-dir", data_dir)
    path = next(word for word in out.split() if "/weights/imported" in word)
    gone = ("--base-model", tmp_path / "gone")
    status, _, err = skyrl_tx(capsys, "export", path, tmp_path / "out", *gone, "--data-dir", data_dir)
    assert status == 0 and "note: the base model cannot be read" in err and "no such directory" in err
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in load_file(
        tmp_path / "out" / "adapter_model.safetensors"
    )


def test_the_base_model_has_a_name_that_others_can_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123"
    local = tmp_path / "models" / "mine"
    for folder in (cached, local):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    for base, served, name in (
        ("org/name", [], "org/name"),
        ("tiny", ["tiny"], "tiny"),
        (None, [], None),
        (str(cached), [], "org/name"),
        ("models/mine", [], str(local)),
        ("models/mine", ["models/mine"], str(local)),
        ("models/mine", ["org/name", "org/alias", "models/mine"], "org/name"),
        ("models/mine", ["mine", "models/mine"], str(local)),
        ("models/mine", ["org/name", "models/other"], str(local)),
    ):
        assert choose_public_name(base, served) == name


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.int32, np.complex64])
def test_factors_must_be_floats(data_dir, model, tmp_path, capsys, dtype) -> None:
    source = adapter(tmp_path / "adapter", dtype=dtype)
    status, _, err = skyrl_tx(capsys, "import", source, "--base-model", model, "--data-dir", data_dir)
    assert status == 1 and "supported: F16, BF16, F32, F64" in err


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "directory", "absent", "empty", "truncated", "nested"])
def test_files_that_cannot_be_read_are_named(data_dir, model, tmp_path, capsys, name, kind) -> None:
    path = adapter(tmp_path / "adapter") / name
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind != "absent":
        nested = b'{"a":' * 100_000
        size = len(nested).to_bytes(8, "little") if name.endswith("safetensors") else b""
        path.write_bytes({"empty": b"", "truncated": content[:-7], "nested": size + nested}[kind])

    for base in (("--base-model", model), ()):
        status, _, err = skyrl_tx(capsys, "import", path.parent, *base, "--data-dir", data_dir)
        assert status == 1 and (f"adapter: {name}: " in err or not base)
