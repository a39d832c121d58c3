"""Compute the logprobs of an adapter directory with peft, in the torch environment.

    python peft_adapter.py MODEL_DIRECTORY ADAPTER_DIRECTORY

Reads `inputs.npz` in the model directory and writes `peft.npz` in the adapter directory.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main(directory: Path, adapter: Path) -> None:
    given = np.load(directory / "inputs.npz")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor(given["tokens"])).logits, -1)
    targets = torch.tensor(given["targets"])[..., None]
    np.savez(adapter / "peft.npz", logprobs=logprobs.gather(-1, targets)[..., 0].numpy())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
