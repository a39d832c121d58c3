"""Three training steps from a peft adapter equal the steps of transformers, peft and torch.optim.AdamW."""

import json
import re
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.train.optimizer import adamw_step, compute_coefficients, init_state
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import LoraSpec, ModelSpec, OptimizerParams
from skyrl_tx.weights.peft import read_adapter
from tests.support.client_environments import TORCH
from tests.support.tiny import TINY_CONFIG

PARAMS = OptimizerParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.1)
MODEL = ModelId("m")
RANK, ALPHA, STEPS = 4, 32, 3  # as in reference/transformers_reference.py


def make_batch(inputs: dict[str, np.ndarray]) -> PreparedModelPassBatch:
    examples = tuple(
        PassExample(
            request_id=RequestId("r"),
            model_id=MODEL,
            tokens=inputs["tokens"][row].astype(np.int32),
            loss="cross_entropy",
            loss_inputs={"target_tokens": inputs["targets"][row].astype(np.int32), "weights": inputs["weights"][row]},
            loss_config={},
        )
        for row in range(len(inputs["tokens"]))
    )

    return PreparedModelPassBatch(examples=examples)


def start(directory: Path, expert_lora: Literal["shared", "own"] = "shared") -> JaxBackend:
    backend = JaxBackend(str(directory), TINY_CONFIG.model_copy(update={"expert_lora": expert_lora}))
    backend.start()
    return backend


@pytest.mark.parametrize(
    "reference",
    ["qwen3-untied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2-tied", "qwen3-moe-mixed"))],
    indirect=True,
)
def test_adamw_equals_torch(reference):
    weights = reference.adapter("weights0").weights
    state = init_state(weights)
    for step in range(STEPS):
        gradient = reference.adapter(f"gradients{step}").weights
        weights, state, _ = adamw_step(weights, state, gradient, compute_coefficients(PARAMS, step + 1))
        expected = jax.tree.leaves(reference.adapter(f"weights{step + 1}").weights)
        for ours, theirs in zip(jax.tree.leaves(weights), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


SLOW_VARIANTS = ("qwen3-moe-mixed", "gpt-oss-untied", "deepseek-untied")
EXHAUSTIVE_VARIANTS = (
    *("mistral-untied", "qwen3-moe-untied", "glm-untied", "glm-lite-untied"),  # adapters are named as in other variants
    *("llama3-tied", "nemotron-untied", "gemma3-tied", "qwen3_5-moe-untied", "qwen3-next-untied"),
)


@pytest.mark.parametrize(
    "variant",
    [
        "qwen3-untied",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_VARIANTS),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for name in EXHAUSTIVE_VARIANTS),
    ],
)
def test_training_from_a_peft_adapter_equals_torch(variant, directories, tmp_path):
    directory, model_id = directories[variant], MODEL
    with np.load(directory / "inputs.npz") as file:
        inputs = dict(file)
    with np.load(directory / "reference.npz") as file:
        arrays = dict(file)

    tensors = {
        f"base_model.model.{name.removeprefix('weights0/')}.weight": array
        for name, array in arrays.items()
        if name.startswith("weights0/")
    }
    if inputs["shares_factors"]:  # the reference stores shared factors once, with the first expert
        for module in {name.rpartition("lora_")[0] for name in tensors if ".experts." in name}:
            first = re.sub(r"\.experts\.\d+\.", ".experts.0.", module)
            for factor in ("lora_A.weight", "lora_B.weight"):
                tensors.setdefault(module + factor, tensors[first + factor])

    modules = sorted({name.split(".")[-3] for name in tensors})
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": modules}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    read_adapter(tmp_path).to_layout("cookbook").write(tmp_path)  # the layout of checkpoints, with stacked experts

    backend = start(directory, "shared" if inputs["shares_factors"] else "own")
    lora = LoraSpec(rank=RANK, seed=0)
    source = backend.open_snapshot(tmp_path)
    backend.restore(model_id, ModelSpec(lora=lora), source, {StatePart.WEIGHTS})

    for step in range(STEPS):
        results = backend.forward_backward(make_batch(inputs))
        assert sum(result.sums["loss"] for result in results) == pytest.approx(float(arrays[f"loss{step}"]), rel=1e-4)
        for result, expected in zip(results, arrays[f"logprobs{step}"], strict=True):
            np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
        norm = backend.optim_step(model_id, PARAMS)["unclipped_grad_l2:mean"]
        gradients = [array for name, array in arrays.items() if name.startswith(f"gradients{step}/")]
        assert norm == pytest.approx(float(np.sqrt(sum((g**2).sum() for g in gradients))), rel=1e-4)
    backend.close()


def test_peft_reads_our_adapters(directories, client_environment, tmp_path):
    """Uses a padded rank and all trainable modules, including the unembedding."""
    directory = directories["qwen3-untied"]
    with np.load(directory / "inputs.npz") as file:
        batch = make_batch(dict(file))
    backend = start(directory)
    backend.create_model(MODEL, ModelSpec(lora=LoraSpec(rank=3, seed=1)))
    base = backend.forward(batch)
    for _ in range(2):
        backend.forward_backward(batch)
        backend.optim_step(MODEL, OptimizerParams(learning_rate=1e-2))

    ours = np.stack([result.logprobs for result in backend.forward(batch)])
    assert np.abs(ours - np.stack([result.logprobs for result in base])).max() > 0.1
    backend.capture(MODEL, {StatePart.WEIGHTS}).write(tmp_path)
    backend.close()
    client_environment(TORCH).run(Path(__file__).parent / "reference" / "peft_adapter.py", directory, tmp_path)
    with np.load(tmp_path / "peft.npz") as theirs:
        np.testing.assert_allclose(ours, theirs["logprobs"], atol=1e-4)
