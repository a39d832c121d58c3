"""A client's first run, with whatever release of the SDK is installed: `first_run.py URL`.

It goes through the calls that the protocol lists for a first run, then through what is hard for servers. Prints what
came of it as JSON: numbers and names, for the test to judge.
"""

import importlib
import json
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

seen: dict[str, Any] = {"version": tinker.__version__}


def now(value: Any) -> Any:
    """A result; some releases return it, others a future of it."""
    return value.result() if hasattr(value, "result") else value


def datum(length: int = 5, **inputs: Any) -> types.Datum:
    arrays = {"target_tokens": np.arange(2, length + 2, dtype=np.int64), "weights": np.ones(length, np.float32)}
    tokens = types.ModelInput.from_ints(list(range(1, length + 1)))
    return types.Datum(model_input=tokens, loss_fn_inputs=arrays | inputs)


def step(training: Any, data: list[types.Datum] | None = None, loss: str = "cross_entropy") -> dict[str, float]:
    """One pass and one step, the second sent before the first is read; the metrics of both."""
    passed = training.forward_backward(data or [datum()], loss)
    stepped = training.optim_step(ADAM)
    return {**passed.result().metrics, **stepped.result().metrics}


def loss_of(training: Any) -> float:
    return training.forward([datum()], "cross_entropy").result().metrics["loss:sum"]


def failure(work: Any) -> dict[str, str]:
    """How a call fails, wherever in it that happens."""
    try:
        work()
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error), "category": str(getattr(error, "category", ""))}
    raise AssertionError("it did not fail")


def sample(sampler: Any, num_samples: int = 2) -> list[Any]:
    params = types.SamplingParams(max_tokens=4, stop=["\n"], seed=3)
    sampled = sampler.sample(PROMPT, num_samples=num_samples, sampling_params=params).result()
    return [[list(row.tokens), row.logprobs, str(row.stop_reason)] for row in sampled.sequences]


def note_fields() -> None:
    """What this release can say: the fields of its requests, and of what is in them."""
    fields: dict[str, list[str]] = {}
    for found in pkgutil.iter_modules(types.__path__):
        for name, kind in vars(importlib.import_module(f"tinker.types.{found.name}")).items():
            described = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", None)
            if isinstance(kind, type) and described:
                fields[name] = sorted(field for field in described if not field.startswith("_"))
    seen["fields"] = fields


def train(training: Any) -> None:
    info = now(training.get_info())
    seen["model"] = [info.model_data.model_name, info.lora_rank, info.is_lora]
    seen["steps"] = [step(training) for _ in range(3)]
    output = training.forward([datum(), datum(3)], "cross_entropy").result()
    seen["forward"] = [row["logprobs"].tolist() for row in output.loss_fn_outputs]


def draw(service: Any, training: Any) -> None:
    path = training.save_weights_for_sampler("s1").result().path
    seen["sampler_path"] = path.partition("/sampler_weights/")[2]
    sampler = now(service.create_sampling_client(model_path=path))
    seen["samples"] = sample(sampler)
    seen["logprobs"] = sampler.compute_logprobs(PROMPT).result()
    unnamed = now(training.save_weights_and_get_sampling_client())
    params = types.SamplingParams(max_tokens=1, seed=5)
    asked = {"num_samples": 1, "sampling_params": params, "include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    topk = unnamed.sample(PROMPT, **asked).result()
    seen["topk"] = [topk.prompt_logprobs, topk.topk_prompt_logprobs]
    both = now(service.create_sampling_client(base_model=BASE_MODEL, model_path=path))
    seen["again"] = sample(both)
    base = now(service.create_sampling_client(base_model=BASE_MODEL))
    seen["base_logprobs"] = base.compute_logprobs(PROMPT).result()
    seen["clone"] = sample(pickle.loads(pickle.dumps(sampler)))


def save_and_resume(service: Any, training: Any) -> str:
    path = training.save_state("st1", ttl_seconds=3600).result().path
    at_save = loss_of(training)
    step(training)
    gone_on = loss_of(training)
    loads = {"load_state": training.load_state, "load_state_with_optimizer": training.load_state_with_optimizer}
    for name, load in loads.items():
        load(path).result()
        seen[name] = loss_of(training) - at_save
    weights_only = now(service.create_training_client_from_state(path))
    seen["from_state"] = loss_of(weights_only) - at_save
    whole = now(service.create_training_client_from_state_with_optimizer(path))
    step(whole)
    seen["from_state_with_optimizer"] = loss_of(whole) - gone_on
    return path


def stretch(training: Any) -> None:
    """Two chunks, a loss of the client's own, sparse tensors."""
    many = [datum(1 + index % 7) for index in range(NUM_MANY)]
    output = training.forward_backward(many, "cross_entropy").result()
    seen["shapes"] = [list(row["logprobs"].shape or [len(row["logprobs"].data)]) for row in output.loss_fn_outputs]
    seen["norm"] = training.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"]

    def twice(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -2 * torch.stack([row.sum() for row in logprobs]).sum(), {"seen": float(len(data))}

    own = [datum()]
    del own[0].loss_fn_inputs["weights"]
    seen["custom"] = training.forward_backward_custom(own, twice).result().metrics["seen"]
    seen["custom_norm"] = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    seen["plain_norm"] = step(training)

    targets = torch.zeros(5, 8, dtype=torch.int64)
    targets[:, 3] = torch.arange(2, 7)
    weights = torch.zeros(5, 8)
    weights[:, 3] = 1.0
    wide = datum(5, target_tokens=targets, weights=weights)
    output = training.forward([wide], "cross_entropy").result()
    (row,) = output.loss_fn_outputs
    seen["wide"] = [list(row["logprobs"].shape), output.metrics["loss:sum"] - loss_of(training)]


def go_wrong(training: Any) -> None:
    """What fails says so, and what comes after it works."""
    bad = datum(weights=np.ones(3, np.float32))  # one for each token is wanted
    seen["bad_data"] = failure(lambda: training.forward_backward([bad], "cross_entropy").result())
    seen["poisoned"] = failure(lambda: training.optim_step(ADAM).result())
    many = [bad, *(datum() for _ in range(NUM_MANY))]
    seen["bad_chunk"] = failure(lambda: training.forward_backward(many, "cross_entropy").result())
    seen["poisoned_again"] = failure(lambda: training.optim_step(ADAM).result())
    image = types.ImageAssetPointerChunk(location="tinker://nowhere", format="png", expected_tokens=5)
    pointer = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs=datum().loss_fn_inputs)
    seen["image"] = failure(lambda: training.forward_backward([pointer], "cross_entropy").result())
    try:  # releases that refused the image themselves have left a gap; with others, this step is poisoned
        training.optim_step(ADAM).result()
    except tinker.RequestFailedError as error:
        seen["image_step"] = str(error)
    seen["recovered"] = step(training)["loss:sum"]


def manage(service: Any, training: Any, path: str) -> None:
    rest = service.create_rest_client()
    run = rest.get_training_run(training.model_id).result()
    seen["run"] = [run.base_model, run.lora_rank, run.last_checkpoint.checkpoint_id]
    listed = {row.training_run_id for row in rest.list_training_runs().result().training_runs}
    seen["runs"] = training.model_id in listed
    ids = [row.checkpoint_id for row in rest.list_checkpoints(training.model_id).result().checkpoints]
    seen["checkpoints"] = sorted(ids)
    mine = {row.tinker_path for row in rest.list_user_checkpoints().result().checkpoints}
    seen["user_checkpoints"] = path in mine
    info = rest.get_weights_info_by_tinker_path(path).result()
    seen["weights_info"] = [info.base_model, info.lora_rank, info.is_lora]
    session_id = training.model_id.partition(":")[0]
    seen["sessions"] = session_id in rest.list_sessions().result().sessions
    session = rest.get_session(session_id).result()
    seen["session"] = [len(session.training_run_ids), len(session.sampler_ids)]
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = [row.checkpoint_id for row in rest.list_checkpoints(training.model_id).result().checkpoints]
    seen["left"] = left


def main(url: str) -> None:
    note_fields()
    service = tinker.ServiceClient(base_url=url, user_metadata={"a": "b"})
    (served,) = service.get_server_capabilities().supported_models
    seen["served"] = served.model_name
    training = now(service.create_lora_training_client(BASE_MODEL, rank=8, seed=1))
    train(training)
    draw(service, training)
    path = save_and_resume(service, training)
    stretch(training)
    go_wrong(training)
    manage(service, training, path)
    if hasattr(service, "close"):
        now(service.close("success"))
        seen["closed"] = True


main(sys.argv[1])
print(json.dumps(seen))
