"""Runs in the torch environment: greedy continuations by transformers' `generate`, in batches of equal length.

    python greedy_reference.py MODEL_DIRECTORY...

Reads `prompts.npz` beside each model, an array [N, T] for each length, and writes `greedy.npz`, [N, NEW] for each.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

NEW = 24


def main(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    made = {}
    for name, prompts in np.load(directory / "prompts.npz").items():
        asked = torch.tensor(prompts)
        answered = model.generate(input_ids=asked, attention_mask=torch.ones_like(asked), **settings)
        made[name] = answered[:, asked.shape[1] :].numpy()
    np.savez(directory / "greedy.npz", **made)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        main(Path(argument))
