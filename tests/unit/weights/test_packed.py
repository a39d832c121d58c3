"""Checkpoints in FP8 blocks and INT4 groups are read in parts and in full, and merged as plain."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx import models
from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models.deepseek_v3 import DEEPSEEK_V3
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from skyrl_tx.weights.merge import merge_adapter
from skyrl_tx.weights.peft import AdapterFiles
from skyrl_tx.weights.tensor_file import Fp8Tensor, Int4Tensor, find_plain_names
from tests.support.quantized import pack_fp8, pack_int4, unpack_fp8

D, F = 160, 64
FILE = "model.safetensors"
FP8_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
INT4_CONFIG = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4},
                **{"observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"},
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
Tensors = dict[str, np.ndarray]


class FakeSlice:
    """A stand-in for a slice of safetensors."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def get_shape(self) -> list[int]:
        return list(self._array.shape)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        return self._array[part]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def check_parts(tensor: Any, numbers: np.ndarray) -> None:
    """Compare the whole tensor, and parts that begin and end in, at and after blocks."""
    outputs, inputs = numbers.shape
    assert tuple(tensor.get_shape()) == numbers.shape
    for rows in ((0, outputs), (5, 9), (127, 129), (128, outputs)):
        for columns in ((0, inputs), (31, 33), (128, 160), (40, 130)):
            part = slice(*rows), slice(*columns)
            np.testing.assert_array_equal(tensor[part], numbers[part])


def test_each_block_of_fp8_has_its_scale() -> None:
    packed = pack_fp8(normal(150, 300) * np.linspace(0.1, 9, 150, dtype=np.float32)[:, None])
    check_parts(Fp8Tensor(*map(FakeSlice, packed)), unpack_fp8(*packed))


def test_a_stack_of_maps_in_fp8_has_a_scale_for_each_block_of_each() -> None:
    numbers, scales = zip(*(pack_fp8(normal(40, 200) * size) for size in (1, 2, 3)), strict=True)
    tensor = Fp8Tensor(FakeSlice(np.stack(numbers)), FakeSlice(np.stack(scales)))
    found = tensor[slice(1, 3), slice(3, 40), slice(100, 200)]
    expected = [unpack_fp8(numbers[index], scales[index])[3:, 100:] for index in (1, 2)]
    np.testing.assert_array_equal(found, np.stack(expected))


def test_each_group_of_int4_has_its_scale() -> None:
    numbers, words, scales = pack_int4(normal(150, 320))
    assert set(numbers.flat) == set(range(-7, 8))
    expected = numbers * np.repeat(scales.astype(np.float32), 32, axis=1)
    check_parts(Int4Tensor(FakeSlice(words), FakeSlice(scales)), expected.astype(np.float32))


def test_four_bits_are_read_from_the_lowest_and_are_stored_eight_too_large() -> None:
    """These are the words that `pack_to_int32` of compressed-tensors writes for -8 to 7."""
    words = np.array([[0x76543210, 0xFEDCBA98, 0, 0]], np.uint32).view(np.int32)
    found = Int4Tensor(FakeSlice(words), FakeSlice(np.full((1, 1), 0.5, ml_dtypes.bfloat16)))[slice(0, 1), slice(0, 16)]
    np.testing.assert_array_equal(found, [np.arange(-8, 8) / 2])


def into_fp8(name: str, array: np.ndarray) -> tuple[Tensors, np.ndarray]:
    numbers, scales = pack_fp8(array)
    return {name: numbers, f"{name}_scale_inv": scales}, unpack_fp8(numbers, scales)


def into_int4(name: str, array: np.ndarray) -> tuple[Tensors, np.ndarray]:
    numbers, words, scales = pack_int4(array)
    plain = numbers * np.repeat(scales.astype(np.float32), 32, axis=1)
    shape = np.array(array.shape, np.int32)
    return {f"{name}_packed": words, f"{name}_scale": scales, f"{name}_shape": shape}, plain.astype(np.float32)


def is_in_fp8(name: str) -> bool:
    return "_proj" in name


def is_in_int4(name: str) -> bool:
    return ".experts." in name


Packer = Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]
FORMS: dict[str, tuple[Packer, Callable[[str], bool], dict[str, Any]]] = {
    "fp8": (into_fp8, is_in_fp8, FP8_CONFIG),
    "int4": (into_int4, is_in_int4, INT4_CONFIG),
}


@pytest.fixture(scope="module", params=FORMS)
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Write one model twice: packed in two files, and plain with the same numbers.

    One of the packed files has the numbers and the other has the scales.
    """
    pack, is_packed, quantization = FORMS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    experts = {"moe_intermediate_size": F, "n_routed_experts": 4, "n_group": 2, "topk_group": 2}
    plain = write_model(
        folder / "plain", DEEPSEEK_V3.architecture, hidden_size=D, tied_embeddings=False, experts=experts
    )
    tensors, stored = load_file(plain / FILE), Tensors()

    for name in [*tensors]:
        packed, array = pack(name, tensors[name]) if is_packed(name) else ({name: tensors[name]}, tensors[name])
        stored |= packed
        tensors[name] = np.ascontiguousarray(array)

    save_file(tensors, plain / FILE)
    (folder / "packed").mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    scales = {name: array for name, array in stored.items() if "_scale" in name}
    files = {"1.safetensors": {name: stored[name] for name in stored.keys() - scales.keys()}, "2.safetensors": scales}
    for name, content in files.items():
        save_file(content, folder / "packed" / name)
    index = {tensor: name for name, content in files.items() for tensor in content}
    (folder / "packed" / hf.INDEX_FILE).write_text(json.dumps({"weight_map": index}))
    return plain, folder / "packed"


def load(directory: Path, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    config = DEEPSEEK_V3.config_from_hf(hf.read_json(directory, "config.json"))
    return flatten(hf.load(directory, models.describe_params(config), DEEPSEEK_V3.weights, dtype=dtype))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_packed_checkpoint_reads_as_the_plain_one(checkpoints: tuple[Path, Path], dtype: Any) -> None:
    expected, found = (load(directory, dtype) for directory in checkpoints)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_merging_writes_plain_tensors_in_bfloat16(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    module = "model.layers.1.mlp.experts.2.up_proj"
    a, b = normal(2, D), normal(F, 2)
    adapter = AdapterFiles(config={"r": 2, "lora_alpha": 32}, factors={module: (a, b)})
    merge_adapter(checkpoints[1], DEEPSEEK_V3.weights, adapter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config

    written: Tensors = {}
    for path in tmp_path.glob("*.safetensors"):
        written |= load_file(path)
    expected = load_file(checkpoints[0] / FILE)
    expected[f"{module}.weight"] = expected[f"{module}.weight"] + 16 * (b @ a)
    located = hf.locate_tensors(checkpoints[1])
    packed = {name for name in find_plain_names(located) if name not in located or f"{name}_scale_inv" in located}

    assert f"{module}.weight" in packed and written.keys() == expected.keys()
    for name, array in written.items():
        assert array.dtype == (ml_dtypes.bfloat16 if name in packed else np.float32), name
        np.testing.assert_array_equal(array, expected[name].astype(array.dtype), err_msg=name)


def test_scales_that_are_missing_are_named(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes((checkpoints[1] / "1.safetensors").read_bytes())
    (tmp_path / "config.json").write_bytes((checkpoints[1] / "config.json").read_bytes())
    expert = r"model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"
    int4, fp8 = f"unexpected tensor '{expert}_packed'", r"is in FP8, and the checkpoint lacks its scales model\."
    with pytest.raises(hf.CheckpointError, match=f"{int4}|{fp8}"):
        load(tmp_path)
