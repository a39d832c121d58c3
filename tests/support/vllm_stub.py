"""A stub of a vLLM server, for tests: the routes and responses of vLLM 0.32 over the sampler of any backend.

It follows what a real server was seen to do, see `tests/conformance/test_vllm.py`, which compares the two. Faults are
set by tests as attributes. Everything runs in one thread with an event loop.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Generator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.batches import PreparedSampleBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.ids import RequestId, SamplerId
from skyrl_tx.contract.requests import PromptOptions, SamplingParams
from skyrl_tx.contract.results import SampleDelta

BASE = "base"
_CLAMP = -9999.0


class _Dropped(Exception):
    """The connection ends in the middle of a response."""


@dataclass(slots=True, kw_only=True)
class StubOptions:
    """The flags of `vllm serve`, and faults."""

    enable_scale_out: bool = True
    lora_routes: bool = True
    logprobs_mode: str = "processed_logprobs"
    max_logprobs: int = 21
    max_model_len: int = 64
    api_key: str | None = None
    max_lora_rank: int = 64
    num_known: int = 20
    """How many likely tokens the backend below can report."""

    drop_after: list[int] = field(default_factory=list[int])
    """The number of tokens after which the next streams end, one each."""
    fail_next: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """The next calls of `generate` get this status and message."""
    error_events: int = 0
    """The number of next streams that bring an error of the server instead of tokens."""
    other_seeds: list[int] = field(default_factory=list[int])
    """Added to the seeds of the next streams, one each."""
    ignores_adapters: bool = False
    """Samples with an adapter equal the base model's samples."""
    logprob_error: float = 0.0
    """Added to the log-probabilities of sampled tokens, not to log-probabilities of prompts."""
    is_paused: bool = False
    """Streams send nothing."""


class VllmStub:
    """The server. `backend` is started, and used by this server alone."""

    def __init__(
        self,
        backend: AbstractBackend,
        capabilities: Capabilities,
        options: StubOptions | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        self.backend, self.capabilities, self.options = backend, capabilities, options or StubOptions()
        self.adapters: dict[str, str] = {}
        """Paths of loaded adapters by name."""
        self.loads: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """All bodies of `generate`."""
        self.aborted: list[str] = []
        """Streams that the client closed."""
        self._samplers: dict[str, SamplerId] = {}
        self._numbers = count()
        self._queues: dict[RequestId, asyncio.Queue[SampleDelta]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._host, self._port = host, port
        self.start()

    # Life

    def start(self) -> None:
        """Listen, on the port of before if there was one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._host, self._port))
        listener.listen(128)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="critical", timeout_graceful_shutdown=0, lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[listener]), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections, and forget the adapters, as a process that ends."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self.forget_adapters()
        self.backend.cancel_sample(list(self._queues))
        self._queues.clear()

    def forget_adapters(self) -> None:
        """Know no adapter any more."""
        for sampler in self._samplers.values():
            self.backend.drop_sampler(sampler)
        self.adapters.clear()
        self._samplers.clear()

    @property
    def failure(self) -> BaseException | None:
        """Why the stub's own work ended, which leaves all streams silent."""
        return self._stepping.exception() if self._stepping is not None and self._stepping.done() else None

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return f"http://{self._host}:{self._port}"

    # Routes

    def _app(self) -> FastAPI:
        app, options = FastAPI(), self.options

        @app.middleware("http")
        async def check_key(request: Request, call_next: Any) -> Response:
            if options.api_key and request.headers.get("authorization") != f"Bearer {options.api_key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            return await call_next(request)

        app.add_api_route("/health", self._health, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        if options.lora_routes:
            app.add_api_route("/v1/load_lora_adapter", self._load, methods=["POST"])
            app.add_api_route("/v1/unload_lora_adapter", self._unload, methods=["POST"])
        if options.enable_scale_out:
            app.add_api_route("/inference/v1/generate", self._generate, methods=["POST"], response_model=None)
        return app

    async def _health(self) -> Response:
        return Response()

    async def _models(self) -> dict[str, Any]:
        base = {"id": BASE, "root": "/models/base", "parent": None, "max_model_len": self.options.max_model_len}
        loaded = [
            {"id": name, "root": path, "parent": BASE, "max_model_len": None} for name, path in self.adapters.items()
        ]
        return {"object": "list", "data": [base, *loaded]}

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        if "lora_name" not in body:
            return _error(400, "2 validation errors: Field required")
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded. If you want to load …")
        self.loads.append(name)
        if not (Path(path) / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}")
        config = json.loads((Path(path) / "adapter_config.json").read_text())
        if config["r"] > self.options.max_lora_rank:
            rank = self.options.max_lora_rank
            return _error(500, f"Call to add_lora method failed: LoRA rank {config['r']} is greater than {rank}.")
        sampler = SamplerId(f"{name}-{next(self._numbers)}")
        self.backend.load_sampler(sampler, self.backend.open_snapshot(Path(path)))
        self.adapters[name], self._samplers[name] = path, sampler
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        del self.adapters[name]
        self.backend.drop_sampler(self._samplers.pop(name))
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _generate(self, request: Request) -> Response:
        body, options = await request.json(), self.options
        if "token_ids" not in body:
            return _error(400, "2 validation errors: Field required")
        self.bodies.append(body)
        if options.fail_next:
            return _error(*options.fail_next.pop(0))
        model, sampling = body.get("model", BASE), body["sampling_params"]
        if model != BASE and model not in self.adapters:
            return _error(404, f"The model `{model}` does not exist.")
        if not 0 <= sampling.get("temperature", 1.0) <= 2:
            return _error(400, f"temperature must be in [0, 2], got {sampling['temperature']}.")

        for kind in ("logprobs", "prompt_logprobs"):
            if (sampling.get(kind) or 0) > options.max_logprobs:
                name = "sample" if kind == "logprobs" else "prompt"
                most = options.max_logprobs
                return _error(400, f"Requested {name} logprobs of {sampling[kind]}, which is greater than max {most}")

        sampler = None if options.ignores_adapters else self._samplers.get(model)
        call = _Call(self, body, RequestId(f"stub-{next(self._numbers)}"), sampler)
        if body.get("stream"):
            return StreamingResponse(call.events(request), media_type="text/event-stream")
        return JSONResponse(await call.whole())

    # The backend, stepped while anything is open

    async def deltas(self, sample: SampleRequest) -> AsyncIterator[SampleDelta]:
        """Yield the deltas of a sample."""
        queue = self._queues[sample.request_id] = asyncio.Queue()
        self.backend.begin_sample(PreparedSampleBatch(requests=(sample,)))
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            while True:
                delta = await queue.get()
                yield delta
                if delta.stop_reason is not None:
                    return
        finally:
            self._queues.pop(sample.request_id, None)
            self.backend.cancel_sample([sample.request_id])

    async def _step(self) -> None:
        while self._queues:
            with np.errstate(all="ignore"):  # a diverged model is no reason to warn
                deltas = self.backend.step_sample()
            for delta in deltas:
                if delta.request_id in self._queues:
                    self._queues[delta.request_id].put_nowait(delta)
            await asyncio.sleep(0)


class _Call:
    """One call of `generate`."""

    def __init__(self, stub: VllmStub, body: Mapping[str, Any], request_id: RequestId, sampler: SamplerId | None):
        self._stub, self._options, self._sampling = stub, stub.options, body["sampling_params"]
        prompt = np.array(body["token_ids"], np.int32)
        room = self._options.max_model_len - prompt.size  # vLLM shortens a sample that would not fit
        sampling, seed = self._sampling, self._sampling.get("seed") or 0
        params = SamplingParams(
            seed=seed + (self._options.other_seeds.pop(0) if self._options.other_seeds else 0),
            max_tokens=min(sampling.get("max_tokens", 16), room),
            temperature=sampling.get("temperature", 1.0),
            top_k=sampling.get("top_k", -1),
            top_p=sampling.get("top_p", 1.0),
            stop_token_ids=tuple(sampling.get("stop_token_ids", ())),
            eos_stops=not sampling.get("ignore_eos", False),
            raw_logprobs=self._options.logprobs_mode == "raw_logprobs",
        )
        about = PromptOptions(sample_topk=self._options.num_known)
        if sampling.get("prompt_logprobs") is not None:
            about = PromptOptions(logprobs=True, topk=sampling["prompt_logprobs"], sample_topk=self._options.num_known)
        self._request = SampleRequest(
            request_id=request_id,
            sampler=sampler,
            prompt=prompt,
            num_samples=1,
            params=params,
            options=about,
            cache_scope=body.get("cache_salt", ""),
        )

    async def whole(self) -> dict[str, Any]:
        """Return the response that is not streamed."""
        choices, prompt_logprobs = [], None
        async for delta in self._stub.deltas(self._request):
            choices += [self._choice(delta)] if delta.tokens.size else []
            if delta.prompt is not None and delta.prompt.logprobs is not None:
                prompt_logprobs = _prompt_rows(self._request, delta)
        [choice] = choices if len(choices) == 1 else [_join_choices(choices)]
        return {"request_id": self._request.request_id, "choices": [choice], "prompt_logprobs": prompt_logprobs}

    async def events(self, http: Request) -> AsyncIterator[str]:
        """Yield the events of a stream."""
        num_sent, options = 0, self._options
        limit = options.drop_after.pop(0) if options.drop_after else None
        if options.error_events:
            options.error_events -= 1
            yield _event({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})
            return

        try:
            async for delta in self._stub.deltas(self._request):
                while options.is_paused:
                    if await http.is_disconnected():
                        self._stub.aborted.append(self._request.request_id)
                        return
                    await asyncio.sleep(0.005)
                if delta.tokens.size:
                    num_sent += delta.tokens.size
                    yield _event({"choices": [self._choice(delta)], "usage": None})
                if limit is not None and num_sent >= limit:
                    raise _Dropped
        except (asyncio.CancelledError, GeneratorExit):
            self._stub.aborted.append(self._request.request_id)
            raise

        yield "data: [DONE]\n\n"

    def _choice(self, delta: SampleDelta) -> dict[str, Any]:
        count = self._sampling.get("logprobs")
        content = None if count is None else [self._entry(delta, place, count) for place in range(delta.tokens.size)]
        return {
            "index": 0,
            "finish_reason": delta.stop_reason,
            "token_ids": delta.tokens.tolist(),
            "logprobs": None if content is None else {"content": content},
        }

    def _entry(self, delta: SampleDelta, place: int, count: int) -> dict[str, Any]:
        """Return the sampled token, then the likeliest ones, all in one list of at most `count`."""
        assert delta.topk is not None

        token, own = int(delta.tokens[place]), float(delta.logprobs[place])
        ids, values = delta.topk.token_ids[place], delta.topk.logprobs[place].astype(np.float64)
        params = self._request.params
        if self._options.logprobs_mode == "raw_logits":
            own, values = own + 30, values + 30
        elif params.raw_logprobs:
            pass
        elif params.temperature and (params.top_k > 0 or params.top_p < 1):
            before = np.cumsum(np.exp(values)) - np.exp(values)
            kept = len(values) if params.top_k <= 0 else params.top_k
            is_kept = (np.arange(len(values)) < kept) & (before < params.top_p * np.exp(values[:kept]).sum())
            total = np.log(np.exp(values[is_kept]).sum())
            own, values = own - total, np.where(is_kept, values - total, _CLAMP)
        rank = int(np.flatnonzero(ids == token)[0]) + 1 if token in ids else len(ids) + 1
        best = {token: (own, rank)}
        best |= {int(ids[i]): (float(values[i]), i + 1) for i in range(min(count, len(ids)))}
        rows = [
            {"token_id": top_token, "logprob": _clamp(logprob), "rank": place}
            for top_token, (logprob, place) in list(best.items())[: max(count, 1)]
        ]
        own += self._options.logprob_error
        return {"token_id": token, "logprob": _clamp(own), "rank": rank, "top_logprobs": rows}


def _clamp(logprob: float) -> float:
    return _CLAMP if np.isnan(logprob) else max(logprob, _CLAMP)


def _prompt_rows(request: SampleRequest, delta: SampleDelta) -> list[dict[str, Any] | None]:
    found = delta.prompt
    assert found is not None and found.logprobs is not None
    rows: list[dict[str, Any] | None] = [None]
    for place in range(1, request.prompt.size):
        row = {str(int(request.prompt[place])): float(found.logprobs[place])}
        if found.topk is not None:
            ids, values = found.topk.token_ids[place], found.topk.logprobs[place]
            row = row | {str(int(top_token)): float(value) for top_token, value in zip(ids, values, strict=True)}
        rows.append({token: {"logprob": value, "rank": 1, "decoded_token": None} for token, value in row.items()})
    return rows


def _join_choices(choices: list[dict[str, Any]]) -> dict[str, Any]:
    content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    return choices[-1] | {"token_ids": tokens, "logprobs": {"content": content}}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    content = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return JSONResponse({"error": content}, status)


@contextlib.contextmanager
def running_stub(
    backend: AbstractBackend, capabilities: Capabilities, options: StubOptions | None = None
) -> Generator[VllmStub]:
    """Run a stub inside the context."""
    stub = VllmStub(backend, capabilities, options)
    try:
        yield stub
        assert stub.failure is None
    finally:
        stub.stop()
