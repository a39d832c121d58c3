"""Iterations of reinforcement learning through the SDK, as the training loops of tinker-cookbook run them.

An iteration saves the weights for a sampler, samples, makes datums of the samples, and trains one step with
importance sampling. Advantages are made up; they do not change the work.
"""

import time
from collections.abc import Sequence
from typing import Any

import tinker
from tinker import types

from benchmarks.gpu_rl.client import (
    FirstResult,
    Sample,
    build_datum,
    connect,
    create_adapter,
    read_metrics,
    request_samples,
    train,
)
from benchmarks.gpu_rl.progress import read_arguments, save_progress
from benchmarks.gpu_rl.shapes import Shape, count_training_tokens

COUNTED = {
    "programs_compiled": "skyrl_tx_compilations_total",
    "compile_s": "skyrl_tx_compile_seconds_total",
    "micro_batches": "skyrl_tx_micro_batches_total",
    "padding_tokens": "skyrl_tx_padding_tokens_total",
    "shared_tokens": "skyrl_tx_shared_tokens_total",
    "engine_sampling_s": 'skyrl_tx_device_seconds_total{work="sample"}',
    "engine_training_s": 'skyrl_tx_device_seconds_total{work="train"}',
    "engine_optimizer_s": 'skyrl_tx_device_seconds_total{work="optim"}',
    "engine_state_s": 'skyrl_tx_device_seconds_total{work="state"}',
    "out_of_memory_retries": "skyrl_tx_out_of_memory_retries_total",
}
"""Counters of the server by their name in a record. An iteration has the differences."""
METRICS_S = 2.0
"""The engine publishes its counters once a second."""


def main(url: str, shape: dict[str, Any], vocab_size: int, iterations: int) -> None:
    """Run one iteration to warm up, then time the remaining iterations."""
    sizes = Shape(**shape)
    results: dict[str, Any] = {"iterations": []}
    started = time.perf_counter()

    with connect(url) as service:
        training = create_adapter(service)
        results["create_adapter_s"] = round(time.perf_counter() - started, 3)
        for number in range(1 + iterations):
            record: dict[str, Any] = {"kind": "timed" if number else "warm-up"}
            results["iterations"].append(record)
            iterate(training, url, sizes, vocab_size, number, record, results)

    metrics = read_metrics(url)
    results["server"] = {
        "slots": metrics.get("skyrl_tx_decode_slots"),
        "kv_cache_tokens": metrics.get("skyrl_tx_kv_cache_tokens"),
        "device_memory_gb": _sum_gb(metrics, "skyrl_tx_device_memory_bytes"),
        "device_memory_limit_gb": _sum_gb(metrics, "skyrl_tx_device_memory_limit_bytes"),
    }
    save_progress(results)


def iterate(
    training: tinker.TrainingClient,
    url: str,
    shape: Shape,
    vocab_size: int,
    seed: int,
    record: dict[str, Any],
    results: dict[str, Any],
) -> None:
    """Run an iteration; `record` gets its figures, which are saved after each of its parts."""
    prompts, lengths = shape.draw_prompts(vocab_size, seed), shape.draw_lengths(seed)
    before, clock = read_metrics(url), time.perf_counter
    record["new_tokens"], record["training_tokens"] = sum(lengths), count_training_tokens(shape, lengths)

    started = clock()
    sampler = training.save_weights_and_get_sampling_client().result()
    saved = clock()
    record["save_s"] = round(saved - started, 3)

    first = FirstResult()
    futures = request_all(sampler, shape, prompts, lengths, first)
    answers = [future.result() for future in futures]
    sampled = clock()
    assert first.at is not None
    record["first_result_s"] = round(first.at - saved, 3)
    record["sampling_s"] = round(sampled - saved, 3)
    record["sampling_tokens_per_s"] = round(sum(lengths) / (sampled - saved), 1)
    save_progress(results)

    samples = collect(shape, prompts, answers)
    drawn = [len(sample.tokens) for sample in samples]
    if drawn != lengths:
        raise ValueError(f"samples have {sum(drawn)} tokens and not {sum(lengths)}: some stopped early")
    datums = [build_datum(sample) for sample in samples]
    built = clock()
    record["client_s"] = round(built - sampled, 3)

    output = train(training, datums)
    trained = clock()
    record["training_s"] = round(trained - built, 3)
    record["training_tokens_per_s"] = round(record["training_tokens"] / (trained - built), 1)
    record["iteration_s"] = round(trained - started, 3)
    record["sampler_to_trainer_nats"] = compare_logprobs(samples, output)
    time.sleep(METRICS_S)
    record |= {name: round(value, 3) for name, value in _subtract(before, read_metrics(url)).items()}
    save_progress(results)


def request_all(
    sampler: tinker.SamplingClient,
    shape: Shape,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    first: FirstResult,
) -> list[Any]:
    """Request all samples: one request for each prompt, or for each sample if their lengths are drawn."""
    futures: list[Any] = []
    for number, prompt in enumerate(prompts):
        of_prompt = lengths[number * shape.samples : (number + 1) * shape.samples]
        if shape.are_lengths_drawn:
            futures += [
                request_samples(sampler, prompt, 1, tokens, seed=number * shape.samples + index)
                for index, tokens in enumerate(of_prompt)
            ]
        else:
            futures.append(request_samples(sampler, prompt, shape.samples, shape.tokens, seed=number))
    for future in futures:
        first.watch(future)
    return futures


def collect(shape: Shape, prompts: list[list[int]], answers: Sequence[types.SampleResponse]) -> list[Sample]:
    """Return the samples in the order of their prompts; advantages within a group have the mean 0."""
    sequences = [sequence for answer in answers for sequence in answer.sequences]
    return [
        Sample(
            prompts[number // shape.samples],
            list(sequence.tokens),
            list(sequence.logprobs or ()),
            1.0 if number % 2 else -1.0,
        )
        for number, sequence in enumerate(sequences)
    ]


def compare_logprobs(samples: Sequence[Sample], output: types.ForwardBackwardOutput) -> dict[str, float]:
    """Return mean and maximum of the differences between log-probabilities of the sampler and of the trainer."""
    total, largest, count = 0.0, 0.0, 0
    for sample, outputs in zip(samples, output.loss_fn_outputs, strict=True):
        trained = outputs["logprobs"].data[-len(sample.tokens) :]
        differences = [abs(ours - theirs) for ours, theirs in zip(sample.logprobs, trained, strict=True)]
        total, count = total + sum(differences), count + len(differences)
        largest = max(largest, *differences)
    return {"mean": float(f"{total / count:.3g}"), "max": float(f"{largest:.3g}")}


def _subtract(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[key] - before.get(key, 0.0) for name, key in COUNTED.items() if key in after}


def _sum_gb(metrics: dict[str, float], name: str) -> float | None:
    found = [value for key, value in metrics.items() if key.startswith(f"{name}{{")]
    return round(sum(found) / 1e9, 2) if found else None


if __name__ == "__main__":
    main(**read_arguments())
