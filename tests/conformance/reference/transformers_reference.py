"""Runs in the torch environment: what transformers, peft and torch compute, saved for comparison.

    python transformers_reference.py MODEL_DIRECTORY...

Reads `inputs.npz` beside each model and writes `reference.npz`. Names of adapter arrays in the output are those of the
modules in the checkpoint, such as `model.layers.0.self_attn.q_proj`, with peft's orientation: A [R, in], B [out, R].
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

RANK, ALPHA = 4, 32
PROMPT, NEW = 20, 24  # tokens of greedy decoding
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.1}
STEPS = 3


def main(directory: Path) -> None:
    torch.manual_seed(0)
    given = np.load(directory / "inputs.npz")
    tokens, targets = torch.tensor(given["tokens"]), torch.tensor(given["targets"])
    weights = torch.tensor(given["weights"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    saved: dict[str, np.ndarray] = {}
    with torch.no_grad():
        saved["base_logits"] = model(tokens).logits.numpy()
    saved["base_decoded"] = decode(model, tokens)

    maps = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if not model.config.tie_word_embeddings:  # peft puts no adapter on a tied unembedding alone
        maps.append("lm_head")
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=maps, lora_dropout=0.0))
    adapter = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    for weight in adapter.values():
        weight.data = 0.1 * torch.randn_like(weight)
    saved["decoded"] = decode(model, tokens)
    optimizer = torch.optim.AdamW(adapter.values(), **ADAM)

    for step in range(STEPS):
        for name, weight in adapter.items():
            saved[f"weights{step}/{plain(name)}"] = weight.detach().numpy().copy()
        logits = model(tokens).logits
        logprobs = torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        loss = -(weights * logprobs).sum()
        optimizer.zero_grad()
        loss.backward()
        saved[f"loss{step}"] = loss.detach().numpy()
        saved[f"logprobs{step}"] = logprobs.detach().numpy()
        if step == 0:
            saved["logits"] = logits.detach().numpy()
        for name, weight in adapter.items():
            saved[f"gradients{step}/{plain(name)}"] = weight.grad.numpy().copy()
        optimizer.step()
    for name, weight in adapter.items():
        saved[f"weights{STEPS}/{plain(name)}"] = weight.detach().numpy().copy()
    np.savez(directory / "reference.npz", **saved)


def decode(model: torch.nn.Module, tokens: torch.Tensor) -> np.ndarray:
    """Continue each row's first tokens greedily, past any end of sequence."""
    prompts = tokens[:, :PROMPT]
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), **settings)[:, PROMPT:].numpy()


def plain(name: str) -> str:
    """Cut `base_model.model.X.lora_A.default.weight` down to `X.lora_A`."""
    return name.removeprefix("base_model.model.").removesuffix(".default.weight")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for argument in sys.argv[1:]:
        main(Path(argument))
