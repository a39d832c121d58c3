"""Abandon a long sample while it is decoded: `abandon_sample.py URL`."""

import sys

import tinker
from tinker import types

PROMPT = types.ModelInput.from_ints([5, 6, 7])

service = tinker.ServiceClient(base_url=sys.argv[1])
base = service.create_sampling_client(base_model="Qwen/Qwen3-8B")
base = base.result() if hasattr(base, "result") else base
long = base.sample(PROMPT, 1, types.SamplingParams(max_tokens=120, stop=[]))
future = long.future() if hasattr(long, "future") else long
base.sample(
    PROMPT, 1, types.SamplingParams(max_tokens=4, stop=[])
).result()  # when this sample has ended, the long sample is running
assert future.cancel()
base.sample(PROMPT, 1, types.SamplingParams(max_tokens=4, stop=[])).result()
