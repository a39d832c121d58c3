"""Compute greedy continuations with transformers' `generate` in batches of equal length, in the torch environment.

    python greedy_reference.py MODEL_DIRECTORY...

Reads `prompts.npz` in each directory, with an array [N, T] per length, and writes `greedy.npz`,
with an array [N, NEW] per length.
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
        input_ids = torch.tensor(prompts)
        output_ids = model.generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **settings)
        made[name] = output_ids[:, input_ids.shape[1] :].numpy()
    np.savez(directory / "greedy.npz", **made)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        main(Path(argument))
