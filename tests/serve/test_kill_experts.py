"""A killed engine changes no bit of training with any mixer or experts, and no step is compiled again."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.testing.tiny_models import write_model
from tests.support.live_server import LiveServer
from tests.support.with_constants import constants

NUM_STEPS, KILL_AFTER = 4, 2
ENGINE_STARTED = re.compile(r"engine process (\d+)")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def datum(draw: np.random.Generator) -> types.Datum:
    tokens = draw.integers(2, 256, 24)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)},
    )


def train(model: Path, data_dir: Path, *, kill: bool) -> list[float]:
    """Train and sample. Returns the losses, the gradient norms and the sample's logprobs."""
    flags = ("--base-model", str(model), "--served-model-name", "experts")
    flags += ("--backend-config.compile-threads", "0")  # an idle server would compile programs in advance
    flags += constants("engine", snapshot_interval_requests=3)

    with LiveServer(data_dir, flags=flags) as server:
        service = tinker.ServiceClient(base_url=server.url)
        training = service.create_lora_training_client("experts", rank=4, seed=1).result()
        draw, numbers = np.random.default_rng(0), list[float]()
        for step in range(NUM_STEPS):
            passed = training.forward_backward([datum(draw), datum(draw)], "cross_entropy")
            if kill and step == KILL_AFTER:
                os.kill(server.engine_pid, signal.SIGKILL)
                server.wait_for(ENGINE_STARTED, times=2)
            stepped = training.optim_step(types.AdamParams(learning_rate=5e-3, weight_decay=0.01))
            numbers += [passed.result().metrics["loss:sum"], stepped.result().metrics["unclipped_grad_l2:mean"]]

        sampler = training.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=6, stop=[], seed=1)
        prompt = types.ModelInput.from_ints([5, 6, 7])
        (sequence,) = sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences
        return [*numbers, *(sequence.logprobs or [])]


def list_compiled_programs(cache: Path) -> set[str]:
    """Return the names of all compiled programs, except the broadcasts of a restore."""
    return {program.name for program in cache.rglob("*-cache") if not program.name.startswith("jit_broadcast_in_dim-")}


@pytest.mark.parametrize(
    "architecture",
    [
        "Qwen3_5ForCausalLM",
        pytest.param("NemotronHForCausalLM", marks=pytest.mark.exhaustive),
        *(  # the backend suite restores models of each family
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in (
                *(
                    "Qwen3MoeForCausalLM",
                    "GptOssForCausalLM",
                    "DeepseekV3ForCausalLM",
                    "Qwen3_5MoeForCausalLM",
                    "Qwen3NextForCausalLM",
                ),
                *("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Gemma3ForCausalLM"),
            )
        ),
    ],
)
def test_engine_kill_changes_no_bit_and_compiles_nothing_again(tmp_path: Path, architecture: str) -> None:
    num_layers = 4 if architecture.startswith(("Qwen3_5", "Qwen3Next")) else 2  # one cycle of its layers
    model = write_model(tmp_path / "model", architecture, std=0.2, tied_embeddings=False, num_layers=num_layers)
    undisturbed = train(model, tmp_path / "calm", kill=False)
    compiled = list_compiled_programs(tmp_path / "cache")
    assert any("accumulate" in program for program in compiled), "the cache has every compiled program"
    assert train(model, tmp_path / "disturbed", kill=True) == undisturbed
    assert list_compiled_programs(tmp_path / "cache") == compiled
    assert len(undisturbed) == 2 * NUM_STEPS + 6 and np.isfinite(undisturbed).all()
