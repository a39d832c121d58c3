"""Writes a checkpoint with random weights in bfloat16, and a tokenizer of bytes, in the layout of Hugging Face.

transformers initializes the weights as for training: norms are neutral, matrices have a deviation of 0.02.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu_rl.progress import read_arguments, save_progress


def main(directory: str, config: dict[str, Any], max_shard_size: str) -> None:
    path, started = Path(directory), time.perf_counter()
    shutil.rmtree(path, ignore_errors=True)
    model_type = config.pop("model_type")

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.bfloat16)
    made = time.perf_counter()

    model.save_pretrained(path, max_shard_size=max_shard_size)
    make_tokenizer().save_pretrained(path)

    num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    save_progress(
        {
            "parameters": model.num_parameters(),
            "gb": round(num_bytes / 1e9, 3),
            "shards": len(list(path.glob("*.safetensors"))),
            "make_s": round(made - started, 2),
            "write_s": round(time.perf_counter() - made, 2),
        }
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte. The benchmark sends only token ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


if __name__ == "__main__":
    main(**read_arguments())
