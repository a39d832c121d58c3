"""The checks of vLLM servers when the engine starts. An error names the flag of `vllm serve` that is missing."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import SampledLogprobs
from skyrl_tx.integrations.vllm import VllmConfig, wire
from skyrl_tx.integrations.vllm.adapter_files import PREFIX
from skyrl_tx.integrations.vllm.server import AdapterMissing, Refused, ServerLost, VllmServer

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_LOG_EVERY_S = 15.0
_CALL_S = 30.0
_COUNTS = (20, 10, 5, 2, 1)
_TOKENS = (1, 2, 3)
LORA_FLAGS = "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, and add --enable-lora"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The capabilities that the servers and the trainer have in common, and the servers' name of the base model."""

    capabilities: Capabilities
    base_model: str


async def probe(
    servers: Sequence[VllmServer],
    config: VllmConfig,
    trainer: Capabilities,
    is_abandoned: Callable[[str], bool],
    check: Callable[[], None] = lambda: None,
) -> ProbeResult:
    """Wait for all servers and check them. Raises UserError, which names a server and what to change.

    While a server does not respond, `check` is called. It raises UserError if the server will never respond.
    """
    results = await asyncio.gather(*(_probe_one(server, config, trainer, is_abandoned, check) for server in servers))
    names = {result.base_model for result in results}
    if len(names) > 1:
        raise UserError(
            "--vllm-url: the servers have different names for the base model, set the same --served-model-name: "
            f"{', '.join(sorted(names))}"
        )

    offered = [result.capabilities for result in results]
    if len({capabilities.sampled_logprobs for capabilities in offered}) > 1:
        raise UserError("--vllm-url: some servers return raw log-probabilities, set the same --logprobs-mode")

    # The lowest limits of all servers apply.
    length = min(capabilities.max_context_length for capabilities in offered)
    capabilities = replace(
        offered[0],
        max_context_length=length,
        max_sample_tokens=length,
        max_topk_logprobs=min(capabilities.max_topk_logprobs for capabilities in offered),
    )
    return ProbeResult(capabilities=capabilities, base_model=names.pop())


async def _probe_one(
    server: VllmServer,
    config: VllmConfig,
    trainer: Capabilities,
    is_abandoned: Callable[[str], bool],
    check: Callable[[], None],
) -> ProbeResult:
    # Find the base model.
    models = await _wait_for(server, config.start_timeout_s, check)
    where = f"vLLM at {server.url}"
    bases = [model for model in models if model.get("parent") is None and model.get("max_model_len")]
    if not bases:
        raise UserError(f"{where} serves no base model")
    base_model = bases[0]["id"]

    # Check the routes and the log-probabilities.
    try:
        if not await server.has_route("/inference/v1/generate"):
            raise UserError(f"{where} has no /inference/v1/generate: start it with --enable-scale-out (vLLM 0.32)")
        if not await server.has_route("/v1/load_lora_adapter"):
            raise UserError(f"{where} cannot load adapters while it runs: {LORA_FLAGS}")

        max_logprobs = await _find_max_logprobs(server, base_model, trainer.max_topk_logprobs + 1)
        if max_logprobs < 2:
            raise UserError(f"{where} returns no top-k log-probabilities: start it with --max-logprobs 21")
        kind = await _find_kind(server, base_model, max_logprobs)
        await _unload_abandoned(server, models, is_abandoned)
    except (ServerLost, Refused, AdapterMissing) as error:
        raise UserError(f"{where} failed a check at start: {error}") from error

    if kind == "raw":
        _log.warning(
            "%s returns raw log-probabilities: samples at other temperatures than 0 and 1 need --sampled-logprobs raw",
            where,
        )

    # Warn if the limits are lower than the trainer's.
    if max_logprobs <= trainer.max_topk_logprobs:
        _log.warning(
            "%s returns only the top %d log-probabilities; start it with --max-logprobs %d for the top %d",
            where,
            max_logprobs - 1,
            trainer.max_topk_logprobs + 1,
            trainer.max_topk_logprobs,
        )
    length = min(trainer.max_context_length, bases[0]["max_model_len"])
    if length < trainer.max_context_length:
        _log.warning(
            "%s: sequences are limited to %d tokens by its --max-model-len; the trainer supports %d",
            where,
            length,
            trainer.max_context_length,
        )

    capabilities = replace(
        trainer,
        max_context_length=length,
        max_sample_tokens=length,
        sample_slots=config.max_samples,
        max_samplers=config.max_adapters,
        max_topk_logprobs=min(trainer.max_topk_logprobs, max_logprobs - 1),
        max_alt_tokens=0,
        offers_target_logprobs=False,
        sampling_controls=wire.CONTROLS,
        sampled_logprobs=frozenset({kind}),
    )
    return ProbeResult(capabilities=capabilities, base_model=base_model)


async def _wait_for(server: VllmServer, timeout_s: float, check: Callable[[], None]) -> list[dict[str, Any]]:
    """Wait until a server responds, and return the models that it serves. Logs every 15 seconds."""
    began = logged_at = time.monotonic()
    while True:
        check()
        try:
            content = await server.get("/v1/models", _CALL_S)
            if isinstance(models := content.get("data"), list):
                return models

            raise UserError(
                f"vLLM at {server.url}: /v1/models returns no list of models; check that this is a vLLM server, and "
                "that the API key is right"
            )
        except ServerLost as error:
            now = time.monotonic()
            if now > began + timeout_s:
                raise UserError(f"--vllm-url: {error}; waited {timeout_s:.0f} s") from error
            if logged_at == began or now > logged_at + _LOG_EVERY_S:
                _log.info("waiting for vLLM since %.0f s: %s", now - began, error)
                logged_at = now
        await asyncio.sleep(_RETRY_S)


async def _find_max_logprobs(server: VllmServer, model: str, limit: int) -> int:
    """Return how many top log-probabilities per token a server returns, at most `limit`."""
    for number in (limit, *(count for count in _COUNTS if count < limit)):
        try:
            await _request_first_token(server, model, temperature=1.0, logprobs=number)
        except Refused as error:
            if "logprobs" not in str(error):
                raise
        else:
            return number
    return 0


async def _find_kind(server: VllmServer, model: str, count: int) -> SampledLogprobs:
    """Return the kind of log-probabilities of a server, which its --logprobs-mode chooses.

    At twice the temperature, the distance between the tempered log-probabilities of two tokens is half as large, and
    between raw ones it is the same. Raises UserError if the server returns logits.
    """
    once = await _request_first_token(server, model, temperature=1.0, logprobs=count)
    twice = await _request_first_token(server, model, temperature=2.0, logprobs=count)
    if max(once) > 0 or max(twice) > 0:
        raise UserError(
            f"vLLM at {server.url} returns logits: start it with --logprobs-mode processed_logprobs or raw_logprobs"
        )
    one, half = (np.ptp(values) for values in (once, twice))
    return "raw" if abs(half - one / 2) > abs(half - one) else "tempered"


async def _request_first_token(server: VllmServer, model: str, *, temperature: float, logprobs: int) -> list[float]:
    """Sample one token after a short prompt, and return the top log-probabilities, at most `logprobs` of them."""
    sampling = {
        "max_tokens": 1,
        "temperature": temperature,
        "seed": 1,
        "ignore_eos": True,
        "logprobs": logprobs,
        "detokenize": False,
    }
    content = await server.generate({"model": model, "token_ids": list(_TOKENS), "sampling_params": sampling})
    try:
        [entry] = content["choices"][0]["logprobs"]["content"]
        ranked = [token for token in entry["top_logprobs"] if (token["rank"] or logprobs + 1) <= logprobs]
        return [token["logprob"] for token in ranked]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Refused(f"a response has an unexpected form ({type(error).__name__}: {error})") from error


async def _unload_abandoned(
    server: VllmServer, models: Sequence[dict[str, Any]], is_abandoned: Callable[[str], bool]
) -> None:
    """Unload adapters that earlier engine processes left on a server."""
    for model in models:
        if model.get("parent") is not None and model["id"].startswith(PREFIX) and is_abandoned(str(model.get("root"))):
            await server.unload_adapter(model["id"])
