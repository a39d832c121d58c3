"""Log-probabilities and greedy continuations of transformers in float32; runs in the PyTorch environment."""

from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.gpu_rl.progress import read_arguments, save_progress


def main(
    model: str,
    sequences: list[list[int]],
    prompts: list[list[int]],
    max_tokens: int,
    end_token: int,
    adapter: str | None = None,
) -> None:
    """Score token sequences and continue prompts, with an adapter of peft if one is given."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, adapter).eval()

    def score(tokens: list[int]) -> list[float]:
        logits = loaded(torch.tensor([tokens], device=device)).logits[0, :-1].double()
        targets = torch.tensor(tokens[1:], device=device)[:, None]
        return logits.log_softmax(-1).gather(-1, targets)[:, 0].tolist()

    def continue_greedily(prompt: list[int]) -> list[int]:
        inputs = torch.tensor([prompt], device=device)
        output = loaded.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=end_token,
            pad_token_id=end_token,
        )
        return output[0, len(prompt) :].tolist()

    with torch.no_grad():
        results = {"logprobs": [score(tokens) for tokens in sequences]}
        save_progress(results)
        save_progress({**results, "greedy": [continue_greedily(prompt) for prompt in prompts]})


if __name__ == "__main__":
    main(**read_arguments())
