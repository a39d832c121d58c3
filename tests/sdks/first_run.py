"""A typical client session with the installed release of the SDK: `first_run.py URL`.

It makes the calls of a first training run, then calls that are hard for servers. Prints the results
as JSON for the test.
"""

import importlib
import json
import logging
import pickle
import pkgutil
import sys
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

BASE_MODEL = "Qwen/Qwen3-8B"
PROMPT = types.ModelInput.from_ints([5, 6, 7])
ADAM = types.AdamParams(learning_rate=0.01)
NUM_MANY = 1100  # a chunk holds 1024

results: dict[str, Any] = {"version": tinker.__version__}


class Links(logging.Handler):
    """Records the session address that the SDK logs, as in a program that configures logging."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("live: "):
            results.setdefault("links", []).append(text)


def get_result(value: Any) -> Any:
    """Return the result of a call.

    Some releases return it directly, other releases return a future.
    """
    return value.result() if hasattr(value, "result") else value


def datum(length: int = 5, **inputs: Any) -> types.Datum:
    arrays = {"target_tokens": np.arange(2, length + 2, dtype=np.int64), "weights": np.ones(length, np.float32)}
    tokens = types.ModelInput.from_ints(list(range(1, length + 1)))
    return types.Datum(model_input=tokens, loss_fn_inputs=arrays | inputs)


def step(training: Any, data: list[types.Datum] | None = None, loss: str = "cross_entropy") -> dict[str, float]:
    """Send a pass and an optimizer step, wait for both, and return the metrics of both."""
    passed = training.forward_backward(data or [datum()], loss)
    stepped = training.optim_step(ADAM)
    return {**passed.result().metrics, **stepped.result().metrics}


def get_loss(training: Any) -> float:
    return training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


def get_failure(work: Any) -> dict[str, str]:
    """Return the error of a call that must fail."""
    try:
        work()
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), "category": str(getattr(error, "category", ""))}
    raise AssertionError("the call did not fail")


def sample(sampler: Any, num_samples: int = 2) -> list[Any]:
    params = types.SamplingParams(max_tokens=4, stop=["\n"], seed=3)
    sampled = sampler.sample(PROMPT, num_samples=num_samples, sampling_params=params).result()
    return [[list(row.tokens), row.logprobs, str(row.stop_reason)] for row in sampled.sequences]


def note_fields() -> None:
    """Record the fields of all request types of this release."""
    fields: dict[str, list[str]] = {}
    for found in pkgutil.iter_modules(types.__path__):
        for name, kind in vars(importlib.import_module(f"tinker.types.{found.name}")).items():
            described = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", None)
            if isinstance(kind, type) and described:
                fields[name] = sorted(field for field in described if not field.startswith("_"))
    results["fields"] = fields


def train(training: Any) -> None:
    info = get_result(training.get_info())
    results["model"] = [info.model_data.model_name, info.lora_rank, info.is_lora]
    results["steps"] = [step(training) for _ in range(3)]
    output = training.forward([datum(), datum(3)], "cross_entropy").result()
    results["forward"] = [row["logprobs"].tolist() for row in output.loss_fn_outputs]


def sample_all(service: Any, training: Any) -> None:
    path = training.save_weights_for_sampler("s1").result().path
    results["sampler_path"] = path.partition("/sampler_weights/")[2]
    sampler = get_result(service.create_sampling_client(model_path=path))
    results["samples"] = sample(sampler)
    results["logprobs"] = sampler.compute_logprobs(PROMPT).result()
    ephemeral = get_result(training.save_weights_and_get_sampling_client())

    params = types.SamplingParams(max_tokens=1, seed=5)
    options = {"num_samples": 1, "sampling_params": params, "include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    topk = ephemeral.sample(PROMPT, **options).result()
    results["topk"] = [topk.prompt_logprobs, topk.topk_prompt_logprobs]
    both = get_result(service.create_sampling_client(base_model=BASE_MODEL, model_path=path))
    results["again"] = sample(both)
    base = get_result(service.create_sampling_client(base_model=BASE_MODEL))
    results["base_logprobs"] = base.compute_logprobs(PROMPT).result()
    results["clone"] = sample(pickle.loads(pickle.dumps(sampler)))


def save_and_resume(service: Any, training: Any) -> str:
    path = training.save_state("st1", ttl_seconds=3600).result().path
    at_save = get_loss(training)
    step(training)
    continued = get_loss(training)
    loads = {"load_state": training.load_state, "load_state_with_optimizer": training.load_state_with_optimizer}
    for name, load in loads.items():
        load(path).result()
        results[name] = get_loss(training) - at_save

    weights_only = get_result(service.create_training_client_from_state(path))
    results["from_state"] = get_loss(weights_only) - at_save
    whole = get_result(service.create_training_client_from_state_with_optimizer(path))
    step(whole)
    results["from_state_with_optimizer"] = get_loss(whole) - continued
    return path


def send_unusual_data(training: Any) -> None:
    """Train on two chunks, on a custom loss, and on sparse tensors."""
    many = [datum(1 + index % 7) for index in range(NUM_MANY)]
    output = training.forward_backward(many, "cross_entropy").result()
    results["shapes"] = [list(row["logprobs"].shape or [len(row["logprobs"].data)]) for row in output.loss_fn_outputs]
    results["norm"] = training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"]

    def twice(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -2 * torch.stack([row.sum() for row in logprobs]).sum(), {"num_data": float(len(data))}

    own = [datum()]
    del own[0].loss_fn_inputs["weights"]
    results["custom"] = training.forward_backward_custom(own, twice).result().metrics["num_data"]
    results["custom_norm"] = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    results["plain_norm"] = step(training)

    targets = torch.zeros(5, 8, dtype=torch.int64)
    targets[:, 3] = torch.arange(2, 7)
    weights = torch.zeros(5, 8)
    weights[:, 3] = 1.0
    wide = datum(5, target_tokens=targets, weights=weights)
    output = training.forward([wide], "cross_entropy").result()
    (row,) = output.loss_fn_outputs
    results["wide"] = [list(row["logprobs"].shape), output.metrics["loss:sum"] - get_loss(training)]


def cause_errors(training: Any) -> None:
    """Send invalid requests, then a valid one."""
    bad = datum(weights=np.ones(3, np.float32))  # one weight per token is required
    results["bad_data"] = get_failure(lambda: training.forward_backward([bad], "cross_entropy").result())
    results["incomplete"] = get_failure(lambda: training.optim_step(ADAM).result())
    many = [bad, *(datum() for _ in range(NUM_MANY))]
    results["bad_chunk"] = get_failure(lambda: training.forward_backward(many, "cross_entropy").result())
    results["incomplete_again"] = get_failure(lambda: training.optim_step(ADAM).result())
    image = types.ImageAssetPointerChunk(location="tinker://nowhere", format="png", expected_tokens=5)
    pointer = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs=datum().loss_fn_inputs)
    results["image"] = get_failure(lambda: training.forward_backward([pointer], "cross_entropy").result())

    try:  # a client that refuses the image leaves a sequence gap; otherwise the gradient is incomplete
        training.optim_step(ADAM).result()
    except tinker.RequestFailedError as error:
        results["image_step"] = str(error)
    results["recovered"] = step(training)["loss:sum"]


def manage(service: Any, training: Any, path: str) -> None:
    rest = service.create_rest_client()
    run = rest.get_training_run(training.model_id).result()
    results["run"] = [run.base_model, run.lora_rank, run.last_checkpoint.checkpoint_id]
    listed = {row.training_run_id for row in rest.list_training_runs().result().training_runs}
    results["runs"] = training.model_id in listed
    ids = [row.checkpoint_id for row in rest.list_checkpoints(training.model_id).result().checkpoints]
    results["checkpoints"] = sorted(ids)
    mine = {row.tinker_path for row in rest.list_user_checkpoints().result().checkpoints}
    results["user_checkpoints"] = path in mine

    info = rest.get_weights_info_by_tinker_path(path).result()
    results["weights_info"] = [info.base_model, info.lora_rank, info.is_lora]
    session_id = training.model_id.partition(":")[0]
    results["sessions"] = session_id in rest.list_sessions().result().sessions
    session = rest.get_session(session_id).result()
    results["session"] = [len(session.training_run_ids), len(session.sampler_ids)]
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = [row.checkpoint_id for row in rest.list_checkpoints(training.model_id).result().checkpoints]
    results["left"] = left


def main(url: str) -> None:
    note_fields()
    logging.basicConfig(level=logging.INFO, handlers=[Links()])
    service = tinker.ServiceClient(base_url=url, user_metadata={"a": "b"})
    (served,) = service.get_server_capabilities().supported_models
    results["served"] = served.model_name
    training = get_result(service.create_lora_training_client(BASE_MODEL, rank=8, seed=1))
    train(training)

    sample_all(service, training)
    path = save_and_resume(service, training)
    send_unusual_data(training)
    cause_errors(training)
    manage(service, training, path)
    results["session_id"] = training.model_id.partition(":")[0]
    if hasattr(service, "close"):
        get_result(service.close("success"))
        results["closed"] = True


main(sys.argv[1])
print(json.dumps(results), flush=True)
