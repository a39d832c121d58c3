"""Samples with the continuous batching of transformers: bfloat16, paged attention, CUDA graphs on a GPU.

The samples are the first ones of an iteration, with the same prompts and lengths, without an adapter. Loading, the
choice of the cache's size and the capture of graphs are not timed.
"""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.gpu_rl.progress import read_arguments, save_progress

NO_TOKEN = -1
LEAST_SAMPLES = 8
"""Out of memory with fewer samples is an error."""


def main(model: str, prompts: list[list[int]], lengths: list[int]) -> None:
    """Sample `lengths[i]` tokens after `prompts[i]`."""
    is_gpu = torch.cuda.is_available()
    results: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "out_of_memory_at": [],
    }
    save_progress(results)
    started = time.perf_counter()
    sampler = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    sampler = sampler.to("cuda" if is_gpu else "cpu").eval()
    results["load_s"] = round(time.perf_counter() - started, 2)
    count = len(prompts)
    while True:
        try:
            results |= sample(sampler, prompts[:count], lengths[:count], is_gpu)
            break
        except torch.OutOfMemoryError:
            results["out_of_memory_at"].append(count)
            torch.cuda.empty_cache()
            count //= 2
            if count < LEAST_SAMPLES:
                raise
    if is_gpu:
        results["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    save_progress(results)


def sample(model: Any, prompts: list[list[int]], lengths: list[int], is_gpu: bool) -> dict[str, Any]:
    """Return the figures of all samples, drawn at once after a few that are not timed."""
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths), eos_token_id=NO_TOKEN
    )
    # On a CPU it would take all memory for the cache, and minutes to warm up.
    sizes = ContinuousBatchingConfig() if is_gpu else ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    started = time.perf_counter()
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes, warmup=is_gpu
    ) as manager:
        run(manager, prompts[:2], [2, 2])
        warm = time.perf_counter()
        drawn = run(manager, prompts, lengths)
        seconds = time.perf_counter() - warm
    if drawn != sum(lengths):
        raise ValueError(f"{drawn} tokens were drawn and not {sum(lengths)}")
    return {
        "samples": len(prompts),
        "new_tokens": drawn,
        "attention": model.config._attn_implementation,
        "warm_up_s": round(warm - started, 2),
        "sampling_s": round(seconds, 3),
        "tokens_per_s": round(drawn / seconds, 1),
    }


def run(manager: Any, prompts: list[list[int]], lengths: list[int]) -> int:
    """Return the number of tokens of all samples."""
    for prompt, length in zip(prompts, lengths, strict=True):
        manager.add_request(prompt, max_new_tokens=length, eos_token_id=NO_TOKEN)
    tokens, left = 0, len(prompts)
    while left:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation thread of transformers has ended")
        elif result.is_finished():
            tokens, left = tokens + len(result.generated_tokens), left - 1
        elif result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
    return tokens


if __name__ == "__main__":
    main(**read_arguments())
