"""The checks of the start: each names what is missing, as the flag of `vllm serve` that brings it."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.integrations.vllm.adapter_files import PREFIX
from skyrl_tx.integrations.vllm.config import VllmConfig
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
    """The capabilities of servers and trainer together, and the servers' name of the base model."""

    capabilities: Capabilities
    base_model: str


async def probe(
    servers: Sequence[VllmServer],
    config: VllmConfig,
    trainer: Capabilities,
    is_abandoned: Callable[[str], bool],
    check: Callable[[], None] = lambda: None,
) -> ProbeResult:
    """Wait for all servers and check them. Raises UserError that names a server and what to change.

    `check` raises UserError if waiting is in vain.
    """
    found = await asyncio.gather(*(_probe_one(server, config, trainer, is_abandoned, check) for server in servers))
    names = {each.base_model for each in found}
    if len(names) > 1:
        raise UserError(f"--vllm-url: the servers name the base model differently: {', '.join(sorted(names))}")
    both = [each.capabilities for each in found]
    length = min(each.max_context_length for each in both)
    capabilities = replace(
        both[0],
        max_context_length=length,
        max_sample_tokens=length,
        max_topk_logprobs=min(each.max_topk_logprobs for each in both),
    )
    return ProbeResult(capabilities=capabilities, base_model=names.pop())


async def _probe_one(
    server: VllmServer,
    config: VllmConfig,
    trainer: Capabilities,
    is_abandoned: Callable[[str], bool],
    check: Callable[[], None],
) -> ProbeResult:
    cards = await _wait_for(server, config.start_timeout_s, check)
    where = f"vLLM at {server.url}"
    bases = [card for card in cards if card.get("parent") is None and card.get("max_model_len")]
    if not bases:
        raise UserError(f"{where} serves no base model")
    base_model = bases[0]["id"]
    try:
        if not await server.has_route("/inference/v1/generate"):
            raise UserError(f"{where} has no /inference/v1/generate: start it with --enable-scale-out (vLLM 0.32)")
        if not await server.has_route("/v1/load_lora_adapter"):
            raise UserError(f"{where} cannot load adapters while it runs: {LORA_FLAGS}")
        most = await _find_max_logprobs(server, base_model, trainer.max_topk_logprobs + 1)
        if most < 2:
            raise UserError(f"{where} returns no log-probabilities of likely tokens: start it with --max-logprobs 21")
        await _check_mode(server, base_model, most)
        await _unload_abandoned(server, cards, is_abandoned)
    except (ServerLost, Refused, AdapterMissing) as error:
        raise UserError(f"{where} does not pass the checks of the start: {error}") from error
    if most <= trainer.max_topk_logprobs:
        wanted = trainer.max_topk_logprobs + 1
        _log.warning("%s: top-k log-probabilities end at %d; --max-logprobs %d offers more", where, most - 1, wanted)
    length = min(trainer.max_context_length, bases[0]["max_model_len"])
    if length < trainer.max_context_length:
        _log.warning(
            "%s: sequences have %d tokens at most, by its --max-model-len; the trainer would take %d",
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
        max_topk_logprobs=min(trainer.max_topk_logprobs, most - 1),
        max_alt_tokens=0,
        offers_target_logprobs=False,
    )
    return ProbeResult(capabilities=capabilities, base_model=base_model)


async def _wait_for(server: VllmServer, timeout_s: float, check: Callable[[], None]) -> list[dict[str, Any]]:
    """Return what a server serves, once it responds."""
    began = logged_at = time.monotonic()
    while True:
        check()
        try:
            content = await server.get("/v1/models", _CALL_S)
            if isinstance(cards := content.get("data"), list):
                return cards
            raise UserError(f"vLLM at {server.url}: /v1/models has no list; is this a vLLM server, and the key right?")
        except ServerLost as error:
            now = time.monotonic()
            if now > began + timeout_s:
                raise UserError(f"--vllm-url: {error}; waited {timeout_s:.0f} s") from error
            if logged_at == began or now > logged_at + _LOG_EVERY_S:
                _log.info("waiting for vLLM, %.0f s until now: %s", now - began, error)
                logged_at = now
        await asyncio.sleep(_RETRY_S)


async def _find_max_logprobs(server: VllmServer, model: str, wanted: int) -> int:
    """Return how many likely tokens a server reports, `wanted` at most."""
    for number in (wanted, *(each for each in _COUNTS if each < wanted)):
        try:
            await _request_first_token(server, model, temperature=1.0, logprobs=number)
        except Refused as error:
            if "logprobs" not in str(error):
                raise
        else:
            return number
    return 0


async def _check_mode(server: VllmServer, model: str, count: int) -> None:
    """Raise UserError unless log-probabilities are those at the temperature.

    The distance of the likeliest tokens must halve at twice the temperature.
    """
    once = await _request_first_token(server, model, temperature=1.0, logprobs=count)
    twice = await _request_first_token(server, model, temperature=2.0, logprobs=count)
    one, half = (np.ptp(values) for values in (once, twice))
    if max(once) > 0 or max(twice) > 0 or abs(half - one / 2) > abs(half - one):
        raise UserError(
            f"vLLM at {server.url} returns log-probabilities that ignore the temperature: "
            "start it with --logprobs-mode processed_logprobs"
        )


async def _request_first_token(server: VllmServer, model: str, *, temperature: float, logprobs: int) -> list[float]:
    """Return the log-probabilities of the likeliest tokens after a short prompt, at most `logprobs` of them."""
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
        ranked = [each for each in entry["top_logprobs"] if (each["rank"] or logprobs + 1) <= logprobs]
        return [each["logprob"] for each in ranked]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise Refused(f"a response has an unexpected form ({type(error).__name__}: {error})") from error


async def _unload_abandoned(
    server: VllmServer, cards: Sequence[dict[str, Any]], is_abandoned: Callable[[str], bool]
) -> None:
    """Unload the adapters of engines that have ended."""
    for card in cards:
        if card.get("parent") is not None and card["id"].startswith(PREFIX) and is_abandoned(str(card.get("root"))):
            await server.unload_adapter(card["id"])
