"""The entry point of the sampler on vLLM servers. Importing it does not import httpx."""

from skyrl_tx import DISTRIBUTION
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.sampler import Sampler, SamplerSpec
from skyrl_tx.integrations.vllm.config import VllmFlags


def _load() -> type[Sampler]:
    try:
        from skyrl_tx.integrations.vllm.sampler import VllmSampler
    except ModuleNotFoundError as error:
        if error.name != "httpx":
            raise
        raise UserError(f"--sampler vllm: httpx is not installed: pip install '{DISTRIBUTION}[vllm]'") from error
    return VllmSampler


SAMPLER = SamplerSpec(config=VllmFlags, load=_load)
