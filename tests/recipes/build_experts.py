"""Build an adapter and a merged model with the cookbook: `python build_experts.py BASE_MODEL ADAPTER FOLDER`."""

import sys
from pathlib import Path

from tinker_cookbook import weights

if __name__ == "__main__":
    source = {"base_model": sys.argv[1], "adapter_path": sys.argv[2]}
    weights.build_lora_adapter(**source, output_path=str(Path(sys.argv[3]) / "lora"))
    weights.build_hf_model(**source, output_path=str(Path(sys.argv[3]) / "merged"), dtype="float32")
