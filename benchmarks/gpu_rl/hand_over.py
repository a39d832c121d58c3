"""The time from `save_weights_for_sampler` to the first token of a sampler with these weights.

Each tenant trains an adapter. In a round all tenants save and sample at the same time.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tinker

from benchmarks.common import quantile
from benchmarks.gpu_rl.client import connect, create_adapter, request_samples
from benchmarks.gpu_rl.probe import probe
from benchmarks.gpu_rl.progress import read_arguments, save_progress
from benchmarks.gpu_rl.shapes import Shape

PROMPT_TOKENS = 16


def main(url: str, shape: dict[str, Any], vocab_size: int, rounds: dict[str, int]) -> None:
    """Measure rounds with each number of tenants.

    The probe before it compiles what the probe of a restarted server needs, and notes the greedy samples.
    """
    sizes = Shape(**shape)
    results: dict[str, Any] = {"hand_over": {}}
    prompt = sizes.draw_prompts(vocab_size, seed=2000)[0][:PROMPT_TOKENS]

    with connect(url) as service:
        before: dict[str, Any] = {}
        probe(service, sizes, vocab_size, before)
        results["greedy"] = before["greedy"]

        clients: list[tinker.TrainingClient] = []
        for tenants, count in rounds.items():
            clients += [create_adapter(service) for _ in range(int(tenants) - len(clients))]
            hand_over_all(service, clients, prompt)  # may compile
            seconds: list[float] = []
            for _ in range(count):
                seconds += hand_over_all(service, clients, prompt)
                results["hand_over"][tenants] = {
                    "runs": len(seconds),
                    "p50_s": round(quantile(seconds, 0.5), 4),
                    "p95_s": round(quantile(seconds, 0.95), 4),
                }
                save_progress(results)


def hand_over_all(
    service: tinker.ServiceClient, clients: list[tinker.TrainingClient], prompt: list[int]
) -> list[float]:
    """Let all clients hand over at the same time, and return the seconds that each took."""
    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(lambda client: hand_over(service, client, prompt), clients))


def hand_over(service: tinker.ServiceClient, client: tinker.TrainingClient, prompt: list[int]) -> float:
    """Return the seconds from the save of a client's weights to the first token sampled with them."""
    started = time.perf_counter()
    path = client.save_weights_for_sampler(name=f"{time.monotonic_ns()}").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    request_samples(sampler, prompt, 1, 1, seed=0).result()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(**read_arguments())
