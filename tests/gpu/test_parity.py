"""A GPU computes the same numbers as the CPU in float32: training with every loss, AdamW and sampling."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from skyrl_tx.testing.tiny_models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

PROGRAM = Path(__file__).parents[1] / "conformance" / "on_a_mesh.py"
ONE = "fsdp=1"
TOLERANCE = 1e-5  # relative to the largest value of an array, as between CPU meshes
PLATFORM = os.environ.get("SKYRL_TX_GPU_PLATFORM", "cuda")
"""JAX's name of the platform. With `cpu`, the tests run without a GPU."""

DENSE = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 8, "std": 0.1, "max_context_length": 128}
# Norms divide by outputs near 0, and AdamW by gradients near 0. A large epsilon limits how rounding
# errors grow: a change of all weights by half a unit in the last place changes no array by more
# than 6e-6.
NORMS = {"keys": {"rms_norm_eps": 0.1}}
LINEAR = {**DENSE, "num_layers": 4, "hidden_size": 64, "head_dim": 16, **NORMS}
FAMILIES = {
    "Qwen3ForCausalLM": {**DENSE, **NORMS},
    "Qwen3MoeForCausalLM": {**DENSE, "tied_embeddings": False},
    "GptOssForCausalLM": {**DENSE, "tied_embeddings": False},
    "DeepseekV3ForCausalLM": {**DENSE, "tied_embeddings": False},
    "Gemma3ForCausalLM": {**DENSE, **NORMS},
    "Qwen3_5ForCausalLM": LINEAR,
    "NemotronHForCausalLM": {
        **LINEAR,
        "std": 0.05,
        "keys": {"layer_norm_epsilon": 0.1, "hybrid_override_pattern": "ME*-", "num_hidden_layers": 4},
    },
}


def compute_numbers(directory: Path, platform: str) -> dict[str, np.ndarray]:
    """Train and sample on the first device of a platform, in a separate process."""
    output = directory / platform
    output.mkdir(exist_ok=True)
    # A process allocates only the GPU memory that it needs, instead of three quarters.
    variables = os.environ | {"JAX_PLATFORMS": platform, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, str(PROGRAM), str(directory), str(output), "sample", "shared", ONE]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(output / f"{ONE}.npz") as file:
        return dict(file)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_training_and_sampling_give_the_numbers_of_the_cpu(tmp_path: Path, architecture: str) -> None:
    directory = write_model(tmp_path / "model", architecture, **FAMILIES[architecture])
    wanted, found = (compute_numbers(directory, platform) for platform in ("cpu", PLATFORM))
    assert found.keys() == wanted.keys()
    exact = {name for name in wanted if name.startswith("new") or name.endswith(".tokens")}
    assert {"sample.0.tokens", "sample.2.tokens"} < exact
    different = [name for name in sorted(exact) if not np.array_equal(found[name], wanted[name])]
    distances = {name: compute_distance(found[name], wanted[name]) for name in wanted.keys() - exact - {"bytes"}}
    far = {name: value for name, value in sorted(distances.items()) if not value <= TOLERANCE}
    assert not different and not far


def compute_distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value."""
    difference = np.abs(found.astype(np.float64) - wanted)
    return float(difference.max(initial=0.0) / np.abs(wanted.astype(np.float64)).max(initial=1e-30))
