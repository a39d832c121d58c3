"""No callback of the event loop does work that grows with the size of a result."""

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from fastapi import Request

from skyrl_tx.apps.chat import chat_completions, completions, reply, schemas
from skyrl_tx.apps.chat.generation import Generation
from skyrl_tx.apps.chat.message import FORMATS
from skyrl_tx.apps.chat.models import Weights
from skyrl_tx.apps.chat.prompts import ChatPrompt
from skyrl_tx.apps.chat.reply import ChatReply
from skyrl_tx.apps.chat.service import ChatRequest, ChatService
from skyrl_tx.apps.chat.text import ModelText, SampleText
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import PromptResult, SampledSequence, SampleOutput, TopK
from skyrl_tx.server.settings import ApiSettings
from tests.support.tiny_tokenizer import PACKAGED, VOCAB_SIZE

TOP = 3
MAX_STEP = 2500
"""The most tokens that one callback may decode. A slice of 512 log-probabilities decodes each twice."""


class StoredGeneration(Generation):
    """A generation whose result is already stored."""

    def __init__(self, texts: list[SampleText], output: SampleOutput) -> None:
        completed = asyncio.get_running_loop().create_future()
        completed.set_result(True)
        context = Mock(results=Mock(subscribe=lambda request_id, key_id: nullcontext(completed)))
        super().__init__(context, Mock(), RequestId("stored"), streams=None)
        self.begin(texts)
        self.output = output

    async def _read_output(self) -> SampleOutput:
        self._is_over = True
        self.prompt_result = self.output.prompt
        return self.output


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    settings = ApiSettings(data_dir=tmp_path_factory.mktemp("data"), base_model=str(PACKAGED))
    return ModelText(settings)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many tokens each callback of the event loop decodes."""
    recorded, num_decoded, loop_thread = [0], 0, threading.get_ident()
    decode, run = ModelText.decode, asyncio.Handle._run

    def count(self: ModelText, tokens: Any) -> str:
        nonlocal num_decoded
        if threading.get_ident() == loop_thread:
            num_decoded += len(tokens)
        return decode(self, tokens)

    def record(self: asyncio.Handle) -> None:
        nonlocal num_decoded
        num_decoded = 0
        run(self)
        recorded.append(num_decoded)

    monkeypatch.setattr(ModelText, "decode", count)
    monkeypatch.setattr(asyncio.Handle, "_run", record)
    return recorded


def make_output(num_samples: int, num_tokens: int) -> SampleOutput:
    rng = np.random.default_rng(0)
    tokens = rng.integers(100, VOCAB_SIZE - 50, num_tokens, dtype=np.int32)
    logprobs = np.full(num_tokens, -1.0, np.float32)
    topk = TopK(
        token_ids=rng.integers(100, VOCAB_SIZE - 50, (num_tokens, TOP), dtype=np.int32),
        logprobs=np.full((num_tokens, TOP), -2.0, np.float32),
    )
    sequence = SampledSequence(tokens=tokens, logprobs=logprobs, stop_reason="length", topk=topk)
    return SampleOutput(sequences=(sequence,) * num_samples, prompt=PromptResult())


def make_chat(service: ChatService, num_samples: int) -> ChatReply:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": TOP}
    request = schemas.ChatCompletionRequest.model_validate(body)
    return chat_completions._ChatCompletion(
        service, request, ChatPrompt("x", [5], FORMATS["none"], []), make_request(num_samples)
    )


def make_completion(service: ChatService, num_samples: int) -> ChatReply:
    request = schemas.CompletionRequest.model_validate({"model": "tiny", "prompt": "x", "logprobs": TOP})
    prompts, prepared = [completions._Prompt("x", [5])], [make_request(num_samples)]
    return completions._Completion(service, request, prompts, prepared, drops_tokens=False)


def make_request(num_samples: int) -> ChatRequest:
    return ChatRequest(
        weights=Weights("tiny"),
        prompt=[5],
        params=SamplingParams(seed=1, max_tokens=1),
        options=PromptOptions(sample_topk=TOP),
        num_samples=num_samples,
    )


class Service:
    """The parts of `ChatService` that a reply uses."""

    def __init__(self, text: ModelText) -> None:
        self.text = text
        self.limits = self
        self.fingerprint = ""


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("make", [make_chat, make_completion])
@pytest.mark.parametrize(("num_samples", "num_tokens"), [(1, 40), (1, 400), (1, 4000), (10, 40), (100, 40)])
def test_result_of_any_size_is_decoded_in_small_steps(
    text: ModelText,
    steps: list[int],
    make: Callable[[ChatService, int], ChatReply],
    is_streamed: bool,
    num_samples: int,
    num_tokens: int,
) -> None:
    async def respond() -> bytes:
        made = make(cast(ChatService, Service(text)), num_samples)
        texts = [SampleText(text.decode, stops=[], stop_tokens=frozenset()) for _ in range(num_samples)]
        made.generations = [StoredGeneration(texts, make_output(num_samples, num_tokens))]
        if is_streamed:
            return b"".join([event async for event in reply._stream(cast(Request, None), made)])
        return bytes((await reply._complete(made)).body)

    body = asyncio.run(respond()).decode()
    assert max(steps) <= MAX_STEP
    if not is_streamed:
        for choice in json.loads(body)["choices"]:
            described = choice["logprobs"].get("content") or choice["logprobs"]["tokens"]
            assert len(described) == num_tokens and len(choice["logprobs"].get("text_offset", described)) == num_tokens
    assert body.count("[DONE]") == is_streamed
