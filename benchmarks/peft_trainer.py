"""Trains with `transformers` and `peft`, for bench_training; runs in the PyTorch environment.

    python peft_trainer.py MODEL_DIRECTORY '{"rows": 8, "length": 256, "micro_rows": 8, "rank": 32, "unembed": true}'

For each line on stdin it trains one step and prints wall and CPU seconds as JSON.
"""

import json
import sys
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

MAPS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main(directory: str, rows: int, length: int, micro_rows: int, rank: int, unembed: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    maps = [*MAPS, "lm_head"] if unembed else MAPS
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=32, target_modules=maps, lora_dropout=0.0))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    tokens = torch.randint(0, model.config.vocab_size, (rows, length + 1))

    def step() -> float:
        for rows_BT in tokens.split(micro_rows):
            logits = model(rows_BT[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows_BT[:, 1:].flatten(), reduction="sum")
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
