"""The first requests to a server that has just started: samples of one prompt, and a training step with them.

The greedy samples show whether a restarted server computes the same numbers.
"""

import time
from typing import Any

import tinker

from benchmarks.gpu_rl.client import (
    Sample,
    build_datum,
    connect,
    create_adapter,
    read_metrics,
    request_samples,
    sample_greedily,
    train,
)
from benchmarks.gpu_rl.progress import read_arguments, save_progress
from benchmarks.gpu_rl.shapes import Shape

GREEDY_PROMPTS, GREEDY_TOKENS = 8, 8
FIRST_TOKENS = 16
"""New tokens of the first samples."""


def main(url: str, shape: dict[str, Any], vocab_size: int) -> None:
    results: dict[str, Any] = {}
    with connect(url) as service:
        probe(service, Shape(**shape), vocab_size, results)
    results["programs_compiled"] = read_metrics(url).get("skyrl_tx_compilations_total")
    save_progress(results)


def probe(service: tinker.ServiceClient, shape: Shape, vocab_size: int, results: dict[str, Any]) -> None:
    """Time the first samples of a prompt and the first step with them; `results` gets the figures."""
    prompts = shape.draw_prompts(vocab_size, seed=1000)
    training, started = create_adapter(service), time.perf_counter()
    sampler = training.save_weights_and_get_sampling_client().result()
    answer = request_samples(sampler, prompts[0], shape.samples, FIRST_TOKENS, seed=0).result()
    sampled = time.perf_counter()
    results["first_sample_s"] = round(sampled - started, 3)
    save_progress(results)

    greedy = sample_greedily(sampler, prompts[:GREEDY_PROMPTS], GREEDY_TOKENS)
    datums = [
        build_datum(Sample(prompts[0], list(row.tokens), list(row.logprobs or ()), 1.0 if index % 2 else -1.0))
        for index, row in enumerate(answer.sequences)
    ]
    began = time.perf_counter()
    train(training, datums)
    results["first_step_s"] = round(time.perf_counter() - began, 3)
    results["greedy"] = greedy
    save_progress(results)


if __name__ == "__main__":
    main(**read_arguments())
