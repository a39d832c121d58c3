"""Trains with transformers and peft on one device: bfloat16, `sdpa`, LoRA on all linear layers.

Sequences have the lengths of an iteration. Two layouts are timed, and the faster layout counts: all sequences packed
into one row with position ids, and a batch of padded rows. If the device runs out of memory, the number of tokens is
halved.
"""

import time
from collections.abc import Sequence
from typing import Any

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.gpu_rl.progress import read_arguments, save_progress

LEAST_TOKENS = 1024
"""Out of memory with fewer tokens is an error."""
IGNORED = -100


def main(model: str, lengths: list[int], row_tokens: int, steps: int, rank: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
        "layouts": {},
    }
    save_progress(results)

    started = time.perf_counter()
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    trained = get_peft_model(trained, LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear"))
    trained.train()
    results["load_s"] = round(time.perf_counter() - started, 2)

    parameters = [weight for weight in trained.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)

    for layout in pack, pad:
        tokens, too_much = row_tokens, []
        while True:
            batch, real = layout(choose_sequences(lengths, tokens), trained.config.vocab_size, device)
            try:
                figures = measure(trained, optimizer, batch, real, steps)
                break
            except torch.OutOfMemoryError:
                too_much.append(tokens)
                optimizer.zero_grad()
                torch.cuda.empty_cache()
                tokens //= 2
                if tokens < LEAST_TOKENS:
                    raise

        results["layouts"][layout.__name__] = {"at_most_tokens": tokens, "out_of_memory_at": too_much, **figures}
        results["tokens_per_s"] = max(found["tokens_per_s"] for found in results["layouts"].values())
        if device == "cuda":
            results["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        save_progress(results)


def choose_sequences(lengths: Sequence[int], tokens: int) -> list[int]:
    """Return the first lengths whose sum is at most `tokens`, and at least one of them."""
    chosen: list[int] = []
    for length in lengths:
        if chosen and sum(chosen) + length > tokens:
            break
        chosen.append(length)
    return chosen


def pack(lengths: Sequence[int], vocab_size: int, device: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return one row of all sequences, with positions that begin again, and the number of tokens."""
    ids = torch.randint(0, vocab_size, (1, sum(lengths)), device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    labels = ids.roll(-1, 1)
    labels[positions.roll(-1, 1) == 0] = IGNORED  # the last token of a sequence predicts none
    return {"input_ids": ids, "position_ids": positions, "labels": labels}, sum(lengths)


def pad(lengths: Sequence[int], vocab_size: int, device: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return a row for each sequence, as many as there is room for, and the number of tokens without padding."""
    rows = lengths[: max(1, sum(lengths) // max(lengths))]
    ids = torch.randint(0, vocab_size, (len(rows), max(rows)), device=device)
    mask = torch.arange(max(rows), device=device)[None] < torch.tensor(rows, device=device)[:, None]
    labels = ids.roll(-1, 1).masked_fill(~mask.roll(-1, 1), IGNORED)
    labels[:, -1] = IGNORED
    batch = {"input_ids": ids, "labels": labels}
    return (batch if bool(mask.all()) else {**batch, "attention_mask": mask}), sum(rows)


def measure(
    model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], tokens: int, steps: int
) -> dict[str, Any]:
    """Run one step to warm up, then time the given number of steps. Returns seconds and tokens per second."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    targets = batch["labels"].flatten()

    def step() -> None:
        """Train with the loss of importance sampling, where the sampler agrees with the trainer."""
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
        negative = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=IGNORED)
        ratios = torch.exp(negative.detach() - negative)
        (-ratios * (targets != IGNORED)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    step()
    seconds: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return {
        "tokens": tokens,
        "step_s": [round(value, 4) for value in seconds],
        "tokens_per_s": round(tokens * steps / sum(seconds), 1),
    }


if __name__ == "__main__":
    main(**read_arguments())
