"""The entry point of `--sampler vllm`, which samples on vLLM servers. Importing it does not import httpx."""

from collections.abc import Mapping
from typing import Any

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


def _add_launcher(launcher: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """With `--launcher ray`, start the vLLM server on a GPU of the cluster, unless `--vllm-url` names a server."""
    if launcher != "ray" or given.get("url") is not None:
        return given
    return {"ray_resources": {"GPU": 1.0}, **given}


SAMPLER = SamplerSpec(
    config=VllmFlags,
    load=_load,
    flags={"vllm_url": "url", "vllm_command": "command"},
    with_launcher=_add_launcher,
)
