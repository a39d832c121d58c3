"""Compare a custom loss on the server with the same loss in the client, or train with it.

Needs torch; prints JSON.

    python custom_loss_upload.py URL LOSS [STEPS]
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tinker
import torch
import torch.nn.functional as F
from tinker import types

LENGTHS = (9, 40, 17, 33)

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def clip_ratio(logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Result:
    ratio = torch.exp((logprobs - sampled).masked_fill(mask == 0, 0.0))
    gain = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages) * mask
    outside = ((ratio < 0.8) | (ratio > 1.2)) & mask.bool()
    count = mask.sum().clamp(min=1)
    loss = -gain.sum() / count
    return loss, {"custom/clipped:mean": outside.sum() / count, "custom/gain:sum": gain.sum()}


def preference(logprobs: torch.Tensor, reference: torch.Tensor, sign: torch.Tensor) -> Result:
    margin = sign * (logprobs - reference).sum() / logprobs.shape[0]
    return -F.logsigmoid(0.1 * margin), {"custom/margin:mean": margin}


def distillation(logprobs: torch.Tensor, teacher: torch.Tensor) -> Result:
    divergence = (teacher * (torch.log(teacher) - logprobs)).sum(dim=-1)
    smooth = (logprobs[1:] - logprobs[:-1]).square().mean()
    return divergence.sum() + 0.01 * smooth, {"custom/divergence:sum": divergence.sum()}


LOSSES: Mapping[str, tuple[Callable[..., Result], dict[str, int]]] = {
    "clipped_ratio": (clip_ratio, {"logprobs": 1, "sampled": 1, "advantages": 1, "mask": 1}),
    "preference": (preference, {"logprobs": 1, "reference": 1, "sign": 0}),
    "distillation": (distillation, {"logprobs": 2, "teacher": 2}),
}


def tensor(array: np.ndarray) -> types.TensorData:
    return types.TensorData.from_numpy(array.astype(np.float32))


def datum(length: int, generator: np.random.Generator, width: int | None) -> types.Datum:
    shape = (length,) if width is None else (length, width)
    teacher = generator.dirichlet(np.ones(3), length)
    inputs = {
        "target_tokens": types.TensorData.from_numpy(generator.integers(1, 900, shape)),
        "sampled": tensor(generator.uniform(-7.2, -6.6, length)),
        "advantages": tensor(generator.uniform(-1, 1, length)),
        "mask": types.TensorData.from_numpy((np.arange(length) > 2).astype(np.int64)),
        "reference": tensor(generator.uniform(-7, -6, length)),
        "sign": types.TensorData(data=[-1.0 if length % 2 else 1.0], dtype="float32", shape=[]),
        "teacher": tensor(teacher),
    }

    tokens = [int(token) for token in generator.integers(1, 900, length)]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def train_one_step(service: tinker.ServiceClient) -> tinker.TrainingClient:
    """Return a training client after one step, so that both LoRA matrices have a gradient."""
    client = service.create_lora_training_client("Qwen/Qwen3-8B", rank=8, seed=1).result()
    targets = np.arange(2, 30, dtype=np.int64)
    first = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(1, 29))), loss_fn_inputs={"target_tokens": targets}
    )
    client.forward_backward([first], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return client


def run_pass(client: tinker.TrainingClient, data: list[types.Datum], handle: Any) -> dict[str, Any]:
    result = client.forward_backward_custom(data, handle).result()
    logprobs = [output["logprobs"].data for output in result.loss_fn_outputs]
    return {"model_id": client.model_id, "metrics": result.metrics, "logprobs": [list(map(float, x)) for x in logprobs]}


def main(url: str, name: str) -> None:
    function, ranks = LOSSES[name]
    with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
        handle = service.create_custom_loss(function, input_ranks=ranks).result()
        generator = np.random.default_rng(3)
        data = [datum(length, generator, 3 if ranks["logprobs"] == 2 else None) for length in LENGTHS]
        found: dict[str, Any] = {
            "loss_id": handle.loss_id,
            "server": run_pass(train_one_step(service), data, handle),
            "client": run_pass(train_one_step(service), data, dataclasses.replace(handle, loss_id=None)),
        }

        def unknown(logprobs: torch.Tensor) -> Result:
            return torch.linalg.norm(logprobs), {}

        try:
            service.create_custom_loss(unknown, input_ranks={"logprobs": 1}).result()
        except tinker.BadRequestError as error:
            found["refused"] = str(error)
    print(json.dumps(found))


def train(url: str, name: str, num_steps: int) -> None:
    """Train with the loss on the server, then print the losses and the logprobs of the last step."""
    function, ranks = LOSSES[name]
    with tinker.ServiceClient(base_url=url, api_key="tml-local") as service:
        handle = service.create_custom_loss(function, input_ranks=ranks).result()
        client, generator = train_one_step(service), np.random.default_rng(5)
        found: list[float] = []
        for _ in range(num_steps):
            passed = client.forward_backward_custom([datum(length, generator, None) for length in (9, 40, 17)], handle)
            client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
            found.append(passed.result().metrics["loss:sum"])
        found += [float(value) for value in passed.result().loss_fn_outputs[0]["logprobs"].data]
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main(*sys.argv[1:])
