"""A client with torch: a loss of its own over two chunks, then a step; as a function, and as the SDK traces it.

Prints what came of it as JSON.
"""

import json
import sys
from typing import Any

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


def traced(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same for one datum, in the form that a server could run; this one has the client run it."""
    loss = -2 * logprobs.sum()
    return loss, {"custom/twice:sum": loss}


def stepped_norm(service: tinker.ServiceClient, loss: Any = None) -> tuple[float, dict[str, float]]:
    training = service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1).result()
    data = [datum(1 + index % 7) for index in range(NUM_DATA)]
    if loss is not None:
        passed = training.forward_backward_custom(data, loss).result()
    else:
        passed = training.forward_backward(data, "cross_entropy").result()
    stepped = training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return stepped.metrics["unclipped_grad_l2:mean"], passed.metrics


with tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local") as service:
    norm, metrics = stepped_norm(service)
    custom_norm, custom_metrics = stepped_norm(service, twice_the_loss)
    handle = service.create_custom_loss(traced, input_ranks={"logprobs": 1}).result()
    traced_norm, traced_metrics = stepped_norm(service, handle)
print(
    json.dumps(
        {
            "norm": norm,
            "metrics": metrics,
            "custom_norm": custom_norm,
            "custom_metrics": custom_metrics,
            "traced_norm": traced_norm,
            "traced_metrics": traced_metrics,
        }
    )
)
