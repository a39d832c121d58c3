"""Downloads with the cookbook, builds what it builds of an adapter, and says what that computes, as JSON.

python use_weights.py BASE_MODEL TINKER_PATH FOLDER TOKEN…
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


def main(base_model: str, tinker_path: str, folder: Path, tokens: list[int]) -> None:
    adapter = str(folder / "adapter")
    weights.download(tinker_path=tinker_path, output_dir=adapter)
    built = {"base_model": base_model, "adapter_path": adapter}
    weights.build_lora_adapter(**built, output_path=str(folder / "lora"))
    weights.build_hf_model(**built, output_path=str(folder / "merged"), dtype="float32")
    said = {
        "base": logprobs(load(Path(base_model)), tokens),
        "lora": logprobs(PeftModel.from_pretrained(load(Path(base_model)), folder / "lora"), tokens),
        "merged": logprobs(load(folder / "merged"), tokens),
    }
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [int(token) for token in sys.argv[4:]])
