"""Load checkpoints and ropes with transformers, in the torch environment.

    python checkpoint_reference.py JOBS.json OUT.npz

A job is a name with a model directory, for the embeddings as transformers loads them, or with a
`config.json`, for the frequencies and the amplitude of its rope.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(jobs: Path, out: Path) -> None:
    saved: dict[str, np.ndarray] = {}
    for name, job in json.loads(jobs.read_text()).items():
        if isinstance(job, str):
            model = AutoModelForCausalLM.from_pretrained(job, dtype=torch.float32)
            saved[f"{name}/embed"] = model.get_input_embeddings().weight.detach().numpy()
            saved[f"{name}/unembed"] = model.get_output_embeddings().weight.detach().numpy()
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**job))
            rope = next(module for path, module in model.named_modules() if path.endswith("rotary_emb"))
            buffers = dict(rope.named_buffers())
            kind = "" if "inv_freq" in buffers else "full_attention_"
            saved[f"{name}/frequencies"] = buffers[f"{kind}inv_freq"].numpy()
            saved[f"{name}/amplitude"] = np.array(getattr(rope, f"{kind}attention_scaling"))
    np.savez(out, **saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
