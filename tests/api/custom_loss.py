"""Run a custom loss in a client with torch, over two chunks, then take a step.

Prints the results as JSON.
"""

import json
import sys

import numpy as np
import tinker
import torch
from tinker import types

NUM_DATA = 1088  # one chunk is 1024


def datum(length: int) -> types.Datum:
    targets = np.arange(2, length + 2, dtype=np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, length + 1))), loss_fn_inputs={"target_tokens": targets}
    )


def twice_the_loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    assert [len(row) for row in logprobs] == [row.model_input.length for row in data], "chunks come back in order"
    return -2 * torch.stack([row.sum() for row in logprobs]).sum(), {"seen": float(len(data))}


def train_one_step(service: tinker.ServiceClient, *, is_custom: bool) -> tuple[float, dict[str, float]]:
    training = service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1).result()
    data = [datum(1 + index % 7) for index in range(NUM_DATA)]
    if is_custom:
        passed = training.forward_backward_custom(data, twice_the_loss).result()
    else:
        passed = training.forward_backward(data, "cross_entropy").result()
    stepped = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return stepped.metrics["unclipped_grad_l2:mean"], passed.metrics


with tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local") as service:
    norm, metrics = train_one_step(service, is_custom=False)
    custom_norm, custom_metrics = train_one_step(service, is_custom=True)
print(json.dumps({"norm": norm, "metrics": metrics, "custom_norm": custom_norm, "custom_metrics": custom_metrics}))
