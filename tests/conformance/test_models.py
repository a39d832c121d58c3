"""Logits, log-probabilities, loss and LoRA gradients equal the results of transformers with peft, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.layers.lora import RowSlots
from skyrl_tx.losses import LOSSES
from tests.support.fast_jit import fast_jit

SLOW_WITH_SLOTS = ("qwen2-tied", "qwen3-moe-untied", "gpt-oss-untied", "deepseek-tied", "gemma3-tied")
EXHAUSTIVE_WITH_SLOTS = ("qwen3-tied", "qwen2-untied", "llama3-untied", "llama3-tied", "mistral-untied")
"""Dense models with the same maps as Qwen2 and Qwen3."""


def assert_close(ours, theirs, relative=1e-5):
    """Compare arrays to within `relative` of the largest value.

    Single elements may be sums that nearly cancel.
    """
    np.testing.assert_allclose(ours, theirs, rtol=relative, atol=relative * float(np.abs(theirs).max()))


def test_logits_loss_and_lora_gradients(reference):
    adapter = reference.adapter("weights0")
    targets = jnp.asarray(reference.inputs["targets"])
    cross_entropy = LOSSES["cross_entropy"]

    def evaluate(params, weights):
        mine = adapter.replace(weights=weights)
        hidden = models.forward(params, reference.config, reference.inputs["tokens"], mine)
        logprobs = models.target_logprobs(params, hidden, targets, mine)
        output = cross_entropy.evaluate(
            logprobs, {"weights": jnp.asarray(reference.inputs["weights"])}, jnp.zeros((len(targets), 0))
        )
        return output.loss_BT.sum(), (logprobs, models.logits(params, hidden, mine))

    evaluated = fast_jit(jax.value_and_grad(evaluate, argnums=1, has_aux=True))
    (loss, (logprobs, logits)), gradients = evaluated(reference.params, adapter.weights)
    assert_close(logits, reference.arrays["logits"])
    assert_close(logprobs, reference.arrays["logprobs0"])
    assert_close(loss, reference.arrays["loss0"])
    for name, expected in reference.adapter("gradients0").weights.items():
        assert np.any(expected.a) and np.any(expected.b), name
        assert_close(gradients[name].a, expected.a, 1e-4)
        assert_close(gradients[name].b, expected.b, 1e-4)


@pytest.mark.parametrize(
    "reference",
    [
        "qwen3-untied",
        "qwen3-moe-mixed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_WITH_SLOTS),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for name in EXHAUSTIVE_WITH_SLOTS),
    ],
    indirect=True,
)
def test_logits_with_adapter_slots(reference):
    """As in sampling: row 0 uses the slot of the base model, the other rows a slot with an adapter."""
    adapter = reference.adapter("weights0")
    slots = jax.tree.map(lambda leaf: np.stack([np.zeros_like(leaf), leaf]), adapter)
    rows = RowSlots(np.array([0, 1, 1]))

    @fast_jit
    def evaluate(params, slots, rows):
        hidden = models.forward(params, reference.config, reference.inputs["tokens"], slots, rows)
        return models.logits(params, hidden, slots, rows)

    logits = evaluate(reference.params, slots, rows)
    assert_close(logits[0], reference.arrays["base_logits"][0])
    assert_close(logits[1:], reference.arrays["logits"][1:])


@pytest.mark.parametrize(
    "reference",
    [
        "qwen3-moe-mixed",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-oss-untied", "deepseek-untied")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("nemotron-untied", "qwen3_5-moe-untied")),
    ],
    indirect=True,
)
def test_experts_count_the_tokens_that_transformers_sends_to_them(reference):
    tokens = reference.inputs["tokens"]
    is_token = np.arange(tokens.shape[1]) < np.array([96, 41, 0])[:, None]
    run = fast_jit(models.forward_and_count, static_argnames="config")
    _, counts = run(
        reference.params, reference.config, tokens, reference.adapter("weights0"), num_uses_BT=is_token.astype(np.int32)
    )

    # Padding changes no token before it, so transformers ran the rows without padding.
    chosen = reference.arrays["chosen"][:, is_token.reshape(-1)]
    num_experts = counts[0].shape[-1]
    expected = [np.bincount(layer.reshape(-1), minlength=num_experts) for layer in chosen]
    by_layer = [row.tolist() for stack in counts for row in np.asarray(stack)]
    assert sorted(by_layer) == sorted(row.tolist() for row in expected)  # stacks may interleave layers
