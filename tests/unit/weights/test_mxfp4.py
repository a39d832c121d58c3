"""An MXFP4 checkpoint is read bit for bit like its plain form, and merges into a plain one."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx import models
from skyrl_tx.models.gpt_oss import GPT_OSS
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf, tensor_file
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterError, AdapterFiles
from tests.support.mxfp4 import draw

D, F, E, LAYERS = 64, 32, 4, 2
SHAPES = {"gate_up_proj": (E, D, 2 * F), "down_proj": (E, F, D)}
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write one model twice, in bfloat16: plain, and packed.

    The packed model has two files, one with the blocks and one with the scales.
    """
    folder = tmp_path_factory.mktemp("gpt-oss")
    plain = write_model(
        folder / "plain", GPT_OSS.architecture, hidden_size=D, mlp_size=F, experts={"num_local_experts": E}
    )
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in load_file(plain / "model.safetensors").items()}
    packed, generator = dict(tensors), np.random.default_rng(0)

    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            own = f"model.layers.{layer}.mlp.experts.{name}"
            numbers, blocks, scales = draw(generator, *shape)
            tensors[own] = np.ascontiguousarray(numbers).astype(ml_dtypes.bfloat16)
            del packed[own]
            packed |= {own + "_blocks": blocks, own + "_scales": scales}

    save_file(tensors, plain / "model.safetensors")
    other = folder / "packed"
    other.mkdir()
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (other / "config.json").write_text(json.dumps(config))
    scales = {name: array for name, array in packed.items() if name.endswith("_scales")}
    rest = {name: array for name, array in packed.items() if name not in scales}
    files = {"model-1.safetensors": rest, "model-2.safetensors": scales}
    for name, content in files.items():
        save_file(content, other / name)
    index = {tensor: name for name, content in files.items() for tensor in content}
    (other / hf.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return plain, other


def load(directory: Path, dtype: type, placement: hf.Placement = lambda _: None) -> models.DecoderParams:
    config = GPT_OSS.config_from_hf(hf.read_json(directory, "config.json"))
    return hf.load(directory, models.describe_params(config), GPT_OSS.weights, dtype=dtype, placement=placement)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_packed_tensors_are_read_as_plain_ones(checkpoints: tuple[Path, Path], dtype: type) -> None:
    plain, packed = (load(directory, dtype) for directory in checkpoints)
    jax.tree.map(np.testing.assert_array_equal, plain, packed)
    experts = plain.layers[0]["expert_gate_proj"]
    tensor = load_file(checkpoints[0] / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(np.asarray(experts[0], np.float32), tensor[..., 0::2].astype(np.float32))
    assert np.abs(np.asarray(experts, np.float32)).max() > 0


def test_parts_need_not_end_where_blocks_do() -> None:
    numbers, blocks, scales = draw(np.random.default_rng(1), 3, 128, 10)

    class FakeSlice:
        """A stand-in for a slice of safetensors."""

        def __init__(self, array: np.ndarray) -> None:
            self._array = array

        def get_shape(self) -> list[int]:
            return list(self._array.shape)

        def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
            return self._array[part]

    tensor = tensor_file.Mxfp4Tensor(FakeSlice(blocks), FakeSlice(scales))
    assert tuple(tensor.get_shape()) == numbers.shape
    for part in ((0, 3, 0, 128, 0, 10), (1, 2, 40, 70, 3, 5), (0, 1, 96, 128, 9, 10), (2, 3, 31, 33, 0, 10)):
        index = tuple(slice(start, stop) for start, stop in zip(part[::2], part[1::2], strict=True))
        np.testing.assert_array_equal(tensor[index].astype(np.float32), numbers[index])


def test_every_byte_and_scale_has_its_value() -> None:
    """The low half comes first.

    Scales are powers of two with a bias of 127, and subnormal numbers are exact in bfloat16.
    """
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    for scale in (0, 1, 118, 127, 200):
        found = tensor_file.unpack_mxfp4(blocks, np.full((1, 16), scale, np.uint8))[:, 0].astype(np.float64)
        table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
        expected = [table[half] * 2.0 ** (scale - 127) for byte in range(256) for half in (byte & 15, byte >> 4)]
        np.testing.assert_array_equal(found, expected)


def update(module: str, inputs: int, outputs: int) -> AdapterFiles:
    generator = np.random.default_rng(0)
    factors = generator.normal(size=(2, inputs)), generator.normal(size=(outputs, 2))
    return AdapterFiles(config={"r": 2, "lora_alpha": 32}, factors={module: tuple(map(np.float32, factors))})


@pytest.mark.parametrize("leaf", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("form", [0, 1], ids=["plain", "packed"])
def test_an_expert_gets_its_update_and_nothing_else_changes(
    checkpoints: tuple[Path, Path], form: int, leaf: str, tmp_path: Path
) -> None:
    inputs, outputs = (F, D) if leaf == "down_proj" else (D, F)
    files = update(f"{EXPERTS}.2.{leaf}", inputs, outputs)
    merge_adapter(checkpoints[form], GPT_OSS.weights, files, tmp_path, is_tied=True)
    before, after = (load(directory, np.float32) for directory in (checkpoints[0], tmp_path))
    ((a, b),) = files.factors.values()
    changed = np.asarray(before.layers[1][f"expert_{leaf}"]).copy()
    changed[0, 2] += 16 * (b @ a).T
    expected = {**before.layers[1], f"expert_{leaf}": changed.astype(ml_dtypes.bfloat16).astype(np.float32)}
    jax.tree.map(np.testing.assert_array_equal, after, before.replace(layers=(before.layers[0], expected)))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (update(f"{EXPERTS}.{E}.up_proj", D, F), f"has no expert {E}"),
        (update(f"{EXPERTS}.0.up_proj", F, D), rf"is \({F}, {D}\) in the base model"),
        (update("model.layers.9.mlp.experts.0.up_proj", D, F), "has no tensor 'model.layers.9"),
    ],
)
def test_an_update_that_does_not_fit_is_refused(
    checkpoints: tuple[Path, Path], files: AdapterFiles, message: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=message):
        merge_adapter(checkpoints[1], GPT_OSS.weights, files, tmp_path)


def test_scales_that_are_missing_are_named(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(checkpoints[1] / "model-1.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoints[1] / "config.json").read_bytes())
    with pytest.raises(
        hf.CheckpointError, match=r"unexpected tensor 'model\.layers\.0\.mlp\.experts\.down_proj_blocks'"
    ):
        load(tmp_path, np.float32)
