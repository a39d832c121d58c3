"""Download checkpoints with the cookbook, build its models from them, and write their logprobs as JSON.

python use_weights.py BASE_MODEL TOKENS TINKER_PATH FOLDER [TINKER_PATH FOLDER…]

TOKENS are separated by commas. FOLDER receives the models and `output.json` of the path before it.
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM


def logprobs(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    row = torch.tensor([tokens])
    with torch.no_grad():
        found = torch.log_softmax(model(row).logits, -1)
    return found[0, :-1].gather(-1, row[0, 1:, None])[:, 0].tolist()


def load(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def use(base_model: str, tokens: list[int], tinker_path: str, folder: Path) -> None:
    adapter = str(folder / "adapter")
    weights.download(tinker_path=tinker_path, output_dir=adapter)
    built = {"base_model": base_model, "adapter_path": adapter}
    weights.build_lora_adapter(**built, output_path=str(folder / "lora"))
    weights.build_hf_model(**built, output_path=str(folder / "merged"), dtype="float32")
    base = load(Path(base_model))
    output = {"base": logprobs(base, tokens), "merged": logprobs(load(folder / "merged"), tokens)}
    if base.config.model_type != "nemotron_h":  # peft refuses the adapter of its `out_proj`
        output["lora"] = logprobs(PeftModel.from_pretrained(base, folder / "lora"), tokens)
    (folder / "output.json").write_text(json.dumps(output))


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokens = [int(token) for token in sys.argv[2].split(",")]
    for path, folder in zip(sys.argv[3::2], sys.argv[4::2], strict=True):
        use(sys.argv[1], tokens, path, Path(folder))
