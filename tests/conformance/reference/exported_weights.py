"""Create peft adapters and compute the logprobs of exported weights with peft and transformers.

    python exported_weights.py JOBS.json

Runs in the torch environment. Each job names a `model` directory and the `tokens` of one row. With
`make`, the job creates a random adapter with `config` and saves it in that directory. With
`adapter`, it loads that adapter. The log-probabilities of all tokens after the first are written to
`out`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def evaluate(job: dict) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, attn_implementation="eager")
    if "make" in job:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **job["config"]))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(job["make"])
    elif "adapter" in job:
        model = PeftModel.from_pretrained(model, job["adapter"])

    tokens = torch.tensor([job["tokens"]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits, -1)
    return logprobs[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        np.save(job["out"], evaluate(job))
