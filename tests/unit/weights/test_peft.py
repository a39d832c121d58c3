import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skyrl_tx.weights.peft import TIED_UNEMBED_NAMES, AdapterError, AdapterFiles, read_adapter

Q, EXPERTS = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 32}


def pair(seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=(2, 5)).astype(np.float32), generator.normal(size=(7, 2)).astype(np.float32)


def write(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(
        {f"base_model.model.{name}.weight": array for name, array in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def assert_equal(first: AdapterFiles, second: AdapterFiles) -> None:
    assert first.factors.keys() == second.factors.keys()
    for module, factors in first.factors.items():
        for ours, theirs in zip(factors, second.factors[module], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("layout", TIED_UNEMBED_NAMES)
def test_an_adapter_written_in_a_layout_reads_back_equal(tmp_path: Path, layout: str) -> None:
    names = [Q, *(f"{EXPERTS}.{index}.{leaf}" for index in range(3) for leaf in ("gate_proj", "up_proj", "down_proj"))]
    adapter = AdapterFiles(config=CONFIG, factors={name: pair(seed) for seed, name in enumerate(names)})
    adapter.to_layout(layout).write(tmp_path)
    assert_equal(read_adapter(tmp_path), adapter)


def test_the_hosted_name_of_attention_is_read(tmp_path: Path) -> None:
    adapter = AdapterFiles(
        config=CONFIG, factors={"model.layers.0.attn.q_proj": pair(1), f"{EXPERTS}.0.up_proj": pair(2)}
    )
    adapter.to_layout("cookbook").write(tmp_path)
    assert set(read_adapter(tmp_path).factors) == {"model.layers.0.self_attn.q_proj", f"{EXPERTS}.0.up_proj"}


def test_the_cookbook_layout_stacks_experts_and_names_the_tied_unembedding(tmp_path: Path) -> None:
    """An expert without an update gets zeros if other experts have one."""
    first, last = pair(1), pair(2)
    factors = {f"{EXPERTS}.0.up_proj": first, f"{EXPERTS}.2.up_proj": last, "model.unembed_tokens": pair(3)}
    adapter = AdapterFiles(config=CONFIG, factors=factors)
    adapter.to_layout("cookbook").write(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert set(tensors) == {
        f"base_model.model.{module}.{factor}.weight"
        for module in (f"{EXPERTS}.w3", "model.unembed_tokens")
        for factor in ("lora_A", "lora_B")
    }
    stacked = tensors[f"base_model.model.{EXPERTS}.w3.lora_A.weight"]
    np.testing.assert_array_equal(stacked, [first[0], np.zeros((2, 5)), last[0]])
    assert set(adapter.to_layout("peft").factors) == {f"{EXPERTS}.0.up_proj", f"{EXPERTS}.2.up_proj", "lm_head"}


def test_a_factor_shared_by_experts_is_given_to_each(tmp_path: Path) -> None:
    a, b = np.ones((1, 2, 5), np.float32), np.arange(42, dtype=np.float32).reshape(3, 7, 2)
    adapter = read_adapter(write(tmp_path, {f"{EXPERTS}.w1.lora_A": a, f"{EXPERTS}.w1.lora_B": b}))
    assert set(adapter.factors) == {f"{EXPERTS}.{index}.gate_proj" for index in range(3)}
    for index in range(3):
        ours = adapter.factors[f"{EXPERTS}.{index}.gate_proj"]
        np.testing.assert_array_equal(ours[0], a[0])
        np.testing.assert_array_equal(ours[1], b[index])


LEAVES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def make_expert_adapter(num_experts: int, *, shared: bool) -> AdapterFiles:
    """Return an adapter of one layer's experts.

    If `shared`, the experts share the factors that they share on the hosted service.
    """
    factors = {}
    for number, leaf in enumerate(LEAVES):
        common = [pair(10 * number + (0 if shared else index)) for index in range(num_experts)]
        others = [pair(100 + 10 * number + index) for index in range(num_experts)]
        for index in range(num_experts):
            own = (others[index][0], common[index][1]) if leaf == "down_proj" else (common[index][0], others[index][1])
            factors[f"{EXPERTS}.{index}.{leaf}"] = own
    return AdapterFiles(config=CONFIG, factors=factors)


@pytest.mark.parametrize("shared", [True, False])
def test_a_factor_that_all_experts_share_is_stacked_as_one(tmp_path: Path, shared: bool) -> None:
    adapter = make_expert_adapter(3, shared=shared)
    assert adapter.has_shared_factors(3) == adapter.has_repeated_factors == shared
    assert not adapter.has_shared_factors(4), "one expert has no factors"
    adapter.to_layout("cookbook").write(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for leaf, stack in LEAVES.items():
        sizes = [len(tensors[f"base_model.model.{EXPERTS}.{stack}.lora_{factor}.weight"]) for factor in "AB"]
        assert sizes == ([3, 3] if not shared else [3, 1] if leaf == "down_proj" else [1, 3])
    assert_equal(read_adapter(tmp_path), adapter)


def test_scale_follows_alpha_and_rank_stabilisation(tmp_path: Path) -> None:
    a, b = pair(0)
    tensors = {f"{Q}.lora_A": a, f"{Q}.lora_B": b}
    assert read_adapter(write(tmp_path, tensors)).scale == 16
    assert read_adapter(write(tmp_path, tensors, use_rslora=True)).scale == pytest.approx(32 / 2**0.5)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.lora_A": pair(0)[0]}, "has lora_A or lora_B, not both"),
        ({f"{Q}.bias": pair(0)[0]}, "is not of the form"),
        ({f"{Q}.lora_A": pair(0)[0] * np.inf, f"{Q}.lora_B": pair(0)[1]}, "not finite"),
        (
            {f"{EXPERTS}.w1.lora_A": np.ones((2, 2, 5)), f"{EXPERTS}.w1.lora_B": np.ones((3, 7, 2))},
            "of 2 and of 3 experts",
        ),
        ({f"{EXPERTS}.w1.lora_A": np.ones((2, 3, 5)), f"{EXPERTS}.w1.lora_B": np.ones((2, 7, 3))}, "not of r = 2"),
    ],
)
def test_invalid_adapter_files_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray], message: str) -> None:
    with np.errstate(all="ignore"), pytest.raises(AdapterError, match=message):
        read_adapter(write(tmp_path, tensors))
