"""A stub of the command `vllm`: `serve MODEL` with the flags of vLLM 0.32 that the engine passes, over a fake backend.

A flag that is missing is missing in the stub too. `--fail STATUS` ends it before it serves.
"""

import argparse
import os
import sys
import threading

from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.vllm_stub import StubOptions, VllmStub


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for name in ("--served-model-name", "--host", "--logprobs-mode", "--dtype", "--fail"):
        parser.add_argument(name)
    for name in ("--port", "--max-model-len", "--max-logprobs", "--max-lora-rank", "--max-loras"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--max-cpu-loras", "--max-num-seqs"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--enable-lora", "--enable-scale-out", "--disable-uvicorn-access-log"):
        parser.add_argument(name, action="store_true")
    flags = parser.parse_args()
    print(f"stub of vLLM {os.getpid()} serves {flags.model}", flush=True)
    if flags.fail is not None:
        print("RuntimeError: the stub was asked to fail", file=sys.stderr)
        raise SystemExit(int(flags.fail))
    config = FakeConfig()
    served = FakeBackend(flags.model, config)
    options = StubOptions(
        enable_scale_out=flags.enable_scale_out,
        lora_routes=flags.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "True",
        logprobs_mode=flags.logprobs_mode,
        max_logprobs=flags.max_logprobs,
        max_model_len=flags.max_model_len,
        api_key=os.environ["VLLM_API_KEY"],
        max_lora_rank=flags.max_lora_rank,
        num_known=min(20, config.vocab_size),
    )
    VllmStub(served, served.start(), options, port=flags.port, host=flags.host)
    threading.Event().wait()


if __name__ == "__main__":
    main()
