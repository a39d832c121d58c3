"""Samples with batched `generate` of `transformers`, for bench_sampling; runs in the PyTorch environment.

    python generate_sampler.py MODEL_DIRECTORY '{"prompts": 16, "length": 64, "samples": 4, "tokens": 128}'

For each line on stdin it samples the whole batch and prints wall and CPU seconds as JSON.
"""

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main(directory: str, prompts: int, length: int, samples: int, tokens: int) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    prompt_ids = torch.randint(2, model.config.vocab_size, (prompts, length))

    def step() -> None:
        with torch.inference_mode():
            output = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                num_return_sequences=samples,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
        assert output.shape == (prompts * samples, length + tokens)

    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
