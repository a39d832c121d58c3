"""Supervised training with transformers and peft on the batches of `sft`; runs in the PyTorch environment.

It begins with the adapters that the server began with, so that losses can be compared step by step.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.gpu_rl.progress import read_arguments, save_progress


def main(model: str, batches: str, adapters: dict[str, str], adam: dict[str, float], evaluate_every: int) -> None:
    """Train one adapter for each seed."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    work = json.loads(Path(batches).read_text())
    results: dict[str, Any] = {}
    for seed, directory in adapters.items():
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device)
        trained = PeftModel.from_pretrained(base, directory, is_trainable=True)
        weights = [weight for weight in trained.parameters() if weight.requires_grad]
        betas = adam["beta1"], adam["beta2"]
        optimizer = torch.optim.AdamW(weights, adam["learning_rate"], betas=betas, eps=adam["eps"], weight_decay=0.0)

        record: dict[str, Any] = {"losses": [], "step_s": [], "held_out": [evaluate(trained, work["held_out"], device)]}
        results[seed] = record
        for step, rows in enumerate(work["batches"][seed]):
            started = time.perf_counter()
            total, count = sum_loss(trained, rows, device)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            record["losses"].append(total.item() / count)
            record["step_s"].append(round(time.perf_counter() - started, 2))
            if (step + 1) % evaluate_every == 0:
                record["held_out"].append(evaluate(trained, work["held_out"], device))
            save_progress(results)


def sum_loss(model: Any, rows: list[dict[str, Any]], device: str) -> tuple[torch.Tensor, float]:
    """Return the sum of the loss over all answer tokens of a batch of padded rows, and the number of these tokens."""
    longest = max(len(row["inputs"]) for row in rows)

    def pad(values: list[Any]) -> list[Any]:
        return values + [0] * (longest - len(values))

    inputs, targets = (torch.tensor([pad(row[key]) for row in rows], device=device) for key in ("inputs", "targets"))
    mask = torch.tensor([pad([1] * len(row["inputs"])) for row in rows], device=device)
    weights = torch.tensor([pad(row["weights"]) for row in rows], device=device)
    logprobs = model(inputs, attention_mask=mask, use_cache=False).logits.log_softmax(-1)
    return -(logprobs.gather(-1, targets[..., None])[..., 0] * weights).sum(), weights.sum().item()


def evaluate(model: Any, rows: list[dict[str, Any]], device: str) -> float:
    """Return the loss per answer token of held-out rows, which are computed four at a time."""
    with torch.no_grad():
        parts = [sum_loss(model, rows[start : start + 4], device) for start in range(0, len(rows), 4)]
    return sum(total.item() for total, _ in parts) / sum(count for _, count in parts)


if __name__ == "__main__":
    main(**read_arguments())
