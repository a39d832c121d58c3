"""A server that samples from a vLLM stub, with the SDK. The stub samples with its own JAX backend."""

import re
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from skyrl_tx.backends.jax.backend import JaxBackend
from tests.support.live_server import LiveServer
from tests.support.tiny import DENSE, TINY_CONFIG, tiny_directory
from tests.support.vllm_stub import StubOptions, running_stub

pytestmark = pytest.mark.slow
NUM_TOKENS = 24
GAP = re.compile(r"log-probabilities differ from the trainer's by (\S+) nats on average, \S+ at most, in (\d+) tokens")


def test_what_jax_trained_is_sampled_elsewhere(tmp_path: Path) -> None:
    """The model learns a sequence by heart.

    Its greedy sample is that sequence, with the trainer's log-probabilities.
    """
    model = str(tiny_directory(DENSE))
    served = JaxBackend(model, TINY_CONFIG)
    capabilities = served.start()
    options = StubOptions(num_known=capabilities.max_topk_logprobs, max_logprobs=capabilities.max_topk_logprobs)

    with running_stub(served, capabilities, options) as stub:
        flags = ["--base-model", model, "--sampler", "vllm", "--vllm-url", stub.url]
        flags += ["--backend-config.max-lora-rank", "8", "--backend-config.max-context-length", "64"]
        flags += [
            "--sampler-check-share",
            "1",
            "--backend-config.max-sample-tokens",
            "512",
            "--backend-config.micro-batch-tokens",
            "64",
        ]

        # At the start, the server compiles a training step, and the stub compiles its sampling
        # programs.
        with (
            LiveServer(tmp_path / "data", flags=flags, ready_within_s=300) as server,
            tinker.ServiceClient(base_url=server.url) as service,
        ):
            training = service.create_lora_training_client(base_model=model, rank=8, seed=1).result()
            tokens = np.random.default_rng(1).integers(1, 200, NUM_TOKENS).tolist()
            datum = types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (NUM_TOKENS - 1)},
            )
            for _ in range(40):  # with some seeds, 25 steps do not learn all tokens
                training.forward_backward([datum], "cross_entropy").result()
                training.optim_step(types.AdamParams(learning_rate=2e-2)).result()

            sampling = training.save_weights_and_get_sampling_client().result()
            greedy = types.SamplingParams(max_tokens=NUM_TOKENS - 4, temperature=0.0, stop=[])
            [sequence] = sampling.sample(types.ModelInput.from_ints(tokens[:4]), 1, greedy).result().sequences
            assert list(sequence.tokens) == tokens[4:]
            result = training.forward([datum], "cross_entropy").result()
            trained = np.array(result.loss_fn_outputs[0]["logprobs"].data)[3:]
            np.testing.assert_allclose(sequence.logprobs, trained, rtol=0, atol=1e-4)

            server.wait_for(GAP)
            found = GAP.search(server.log)
            assert found is not None and float(found[1]) < 1e-4 and int(found[2]) == NUM_TOKENS - 4
            assert any(body["model"] != "base" for body in stub.bodies if body.get("stream"))
            with pytest.raises(tinker.TinkerError, match="top_k 5"):
                filtered = types.SamplingParams(max_tokens=4, top_k=5)
                sampling.sample(types.ModelInput.from_ints(tokens[:4]), 1, filtered).result()

    served.close()
