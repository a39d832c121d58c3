"""Samples with the continuous batching of transformers: bfloat16, paged attention, CUDA graphs on a GPU.

Models that it refuses, such as Qwen3.5, are sampled with batched `generate`.

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
FIRST_TOKENS = 64
"""New tokens of a first measurement, whose figures remain if the whole one is cut."""


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

    # Halve the samples until they fit in memory.
    count = len(prompts)
    for most in sorted({min(FIRST_TOKENS, max(lengths)), max(lengths)}):
        while True:
            try:
                results |= sample(sampler, prompts[:count], [min(length, most) for length in lengths[:count]], is_gpu)
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
    try:
        return {"method": "continuous batching", **sample_continuously(model, prompts, lengths, is_gpu)}
    except ValueError as error:  # it does not have all kinds of layers
        return {"method": f"generate, as continuous batching says: {error}", **generate(model, prompts, lengths)}


def sample_continuously(model: Any, prompts: list[list[int]], lengths: list[int], is_gpu: bool) -> dict[str, Any]:
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths), eos_token_id=NO_TOKEN
    )
    # On a CPU it would take all memory for the cache, and minutes to warm up.
    sizes = ContinuousBatchingConfig() if is_gpu else ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes, warmup=is_gpu
    ) as manager:
        run(manager, prompts[:2], [2, 2])
        started = time.perf_counter()
        drawn = run(manager, prompts, lengths)
        seconds = time.perf_counter() - started
    if drawn != sum(lengths):
        raise RuntimeError(f"{drawn} tokens were drawn and not {sum(lengths)}")
    return {"attention": model.config._attn_implementation, **describe(lengths, seconds)}


def generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Sample with `generate`, where all samples of a batch get as many tokens as the longest one."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts, device=model.device)

    def draw(tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        output.cpu()
        return time.perf_counter() - started

    draw(2)
    return describe(lengths, draw(max(lengths)))


def describe(lengths: list[int], seconds: float) -> dict[str, Any]:
    tokens = sum(lengths)
    return {
        "samples": len(lengths),
        "new_tokens": tokens,
        "sampling_s": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
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
