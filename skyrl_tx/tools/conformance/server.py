"""The server under test, and the rows of the table.

A row is one promise, and a function that checks it on the server. The server has the clients and the data that rows
use, and what they have spent and created.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from skyrl_tx.tools.conformance.traffic import SdkEndpoint, Traffic

T = TypeVar("T")
Floats = NDArray[np.float64]
Status = Literal["pass", "fail", "not offered", "not run"]
Check = Callable[["Server"], object]
"""Checks one promise on a server, and raises an exception if the server fails. A returned text is a detail."""

_REFUSALS = (tinker.NotFoundError, tinker.PermissionDeniedError, tinker.AuthenticationError, tinker.BadRequestError)
_ABSENT = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED}
RANK = 8
TTL_S = 3600
"""Lifetime of each checkpoint, for the case that the command is killed before it deletes them."""
_FEWEST_NATS = 0.3
"""How much one optimizer step should change a log-probability, so that rounding does not matter."""
_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)
_RANDOM = np.random.default_rng(7)
SEQUENCES: Sequence[list[int]] = [_RANDOM.integers(10, 200, size).tolist() for size in (7, 10, 13)]
"""The data of most rows: token ids that every vocabulary has."""
NUM_TOKENS = sum(len(sequence) - 1 for sequence in SEQUENCES)


class Mismatch(Exception):
    """The server did something else than the row expects. The message has the values."""


class Skip(Exception):
    """The SDK or the server has no such feature, or the row cannot run on this machine."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceRow:
    """One promise of the Tinker API, and the function that checks it.

    The check sends and samples at most `tokens` tokens. If a server refuses an optional feature,
    the result is `not offered`.
    """

    group: str
    title: str
    check: Check
    tokens: int = 0
    is_optional: bool = False

    @property
    def name(self) -> str:
        """The name that the table shows and that `--only` selects."""
        return f"{self.group}: {self.title}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a row."""

    name: str
    status: Status
    detail: str = ""
    seconds: float = 0.0


class ConformanceTable(list[ConformanceRow]):
    """A list of rows, with a decorator that adds them."""

    def row(
        self, group: str, title: str = "", *, tokens: int = 0, is_optional: bool = False
    ) -> Callable[[Check], Check]:
        """Return a decorator that adds a check as a row. The title is its docstring, if none is given."""

        def add(check: Check) -> Check:
            own = title or (check.__doc__ or "").rstrip(".")
            self.append(ConformanceRow(group=group, title=own, check=check, tokens=tokens, is_optional=is_optional))
            return check

        return add


def expect(condition: object, message: str) -> None:
    """Raise Mismatch with the message unless the condition holds."""
    if not condition:
        raise Mismatch(message)


def is_refusal(error: Exception) -> bool:
    """Return whether a server has refused a call because of the call, and not because the server failed."""
    if isinstance(error, tinker.RequestFailedError):
        return error.category == tinker.types.RequestErrorCategory.User
    return isinstance(error, _REFUSALS)


def run_row(row: ConformanceRow, server: Server, timeout_s: float) -> tuple[Result, bool]:
    """Run a row on its own thread, and return its result and whether its time limit passed.

    A thread cannot be ended from outside. If the limit passes, the thread remains and its result is ignored.
    """
    outcome: list[tuple[Status, str]] = []
    begin = time.monotonic()
    thread = threading.Thread(target=lambda: outcome.append(_check(row, server)), daemon=True)
    thread.start()
    thread.join(timeout_s)

    is_late = not outcome
    status, detail = ("fail", f"no result within {timeout_s:g} s") if is_late else outcome[0]
    return Result(name=row.name, status=status, detail=detail, seconds=time.monotonic() - begin), is_late


def _check(row: ConformanceRow, server: Server) -> tuple[Status, str]:
    try:
        return "pass", str(row.check(server) or "")
    except Skip as reason:
        return reason.status, str(reason)
    except Exception as error:
        # Everything that a check raises is a finding about the server, also an exception of the SDK.
        kind = "" if isinstance(error, Mismatch) else f"{type(error).__name__}: "
        return "not offered" if row.is_optional and is_refusal(error) else "fail", f"{kind}{error}"


def judge_endpoint(endpoint: SdkEndpoint, traffic: Traffic) -> Result:
    """Return the result of an endpoint of the SDK: it passes if one of its calls succeeded."""
    name = f"endpoint: {endpoint.method} {endpoint.path}"
    pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(endpoint.path)))
    calls = [call for call in traffic.calls if call.method == endpoint.method and pattern.fullmatch(call.path)]
    if not calls:
        return Result(name=name, status="not run", detail="no row calls it with this SDK")
    if any(call.status < HTTPStatus.BAD_REQUEST for call in calls):
        return Result(name=name, status="pass", detail=f"calls: {len(calls)}")
    is_absent = {call.status for call in calls} <= _ABSENT
    return Result(name=name, status="not offered" if is_absent else "fail", detail=f"status {calls[-1].status}")


class Precision(NamedTuple):
    """How far numbers of a correct server may differ.

    `loss` is the relative difference of losses and gradient norms. `logprob` is the mean difference
    of log-probabilities in nats, and the largest difference is ten times as much. `step` is the
    relative difference between the changes by two optimizer steps.
    """

    loss: float
    logprob: float
    step: float


PRECISIONS = {"bfloat16": Precision(0.02, 0.05, 0.25), "float32": Precision(1e-5, 2e-6, 0.01)}


@dataclass(slots=True, kw_only=True)
class Server:
    """A server, with clients that are created when a row first uses them."""

    api_key: str
    precision: Precision
    traffic: Traffic
    budget: int
    """The most tokens that the rows may use."""
    spent: int = 0
    base_model: str = ""
    context: int = 0
    """The longest sequence that the server accepts, in tokens; 0 if the server does not say."""
    learning_rate: float = 0.0
    """A rate at which one step changes the log-probabilities enough. Set when `training` is created."""
    runs: list[str] = field(default_factory=list[str])
    copies: list[str] = field(default_factory=list[str])
    """Paths of copied checkpoints. Like the checkpoints of `runs`, they are deleted at the end."""
    _made: dict[str, Any] = field(default_factory=dict[str, Any])

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return what `make` returned for this name when it was first called."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def reconnect(self) -> Self:
        """Return the same server with new clients."""
        return replace(self, _made={})

    @property
    def service(self) -> tinker.ServiceClient:
        """The client whose session all rows use."""
        url, key, metadata = self.traffic.url, self.api_key, {"purpose": "conformance"}
        return self.once("service", lambda: tinker.ServiceClient(metadata, base_url=url, api_key=key))

    @property
    def rest(self) -> tinker.RestClient:
        """The client for management."""
        return self.once("rest", lambda: tinker.RestClient(base_url=self.traffic.url, api_key=self.api_key))

    @property
    def training(self) -> tinker.TrainingClient:
        """A model that was trained for a few steps. Rows do not change its weights."""
        return self.once("training", self._train)

    @property
    def start(self) -> str:
        """The path of a checkpoint with the state of `training`."""
        return self.once("start", lambda: self.training.save_state("start", ttl_seconds=TTL_S).result().path)

    @property
    def sampler(self) -> tinker.SamplingClient:
        """A sampler with the weights of `training`."""
        return self.once("sampler", lambda: self.training.save_weights_and_get_sampling_client().result())

    def choose_model(self, name: str | None) -> None:
        """Choose a base model, by default the first that the server lists. Raises Mismatch."""
        models = self.rest.get_server_capabilities().result().supported_models
        names = [model.model_name or "" for model in models]
        expect(names and (name is None or name in names), f"base model {name}: the server has {', '.join(names)}")
        chosen = models[0 if name is None else names.index(name)]
        self.base_model, self.context = chosen.model_name or "", chosen.max_context_length or 0

    def resume(self, path: str = "") -> tinker.TrainingClient:
        """Create a model with the weights of `start`, or with weights and optimizer state of a checkpoint."""
        create = self.service.create_training_client_from_state
        if path:
            create = self.service.create_training_client_from_state_with_optimizer
        client = create(path or self.start).result()
        self.runs.append(client.model_id)
        return client

    def _train(self) -> tinker.TrainingClient:
        """Train a model, and find the learning rate."""
        client = self.service.create_lora_training_client(self.base_model, RANK, seed=1).result()
        self.runs.append(client.model_id)
        before = get_logprobs(self.forward(client))
        for self.learning_rate in _RATES:
            self.forward_backward(client)
            self.step(client)
            after = get_logprobs(self.forward(client))
            if np.abs(after - before).max() > _FEWEST_NATS:
                return client
            before = after
        raise AssertionError(f"one step with learning rate {_RATES[-1]} changes no log-probability by {_FEWEST_NATS}")

    def spend(self, tokens: int) -> None:
        """Count tokens before they are sent. Raises Mismatch if they are more than the command has announced."""
        self.spent += tokens
        expect(self.spent <= self.budget, f"{self.spent} tokens are more than the announced {self.budget}")

    def forward(self, client: tinker.TrainingClient, *arguments: Any) -> types.ForwardBackwardOutput:
        """Run a forward pass. The arguments are the data, the loss and its config, by default of `SEQUENCES`."""
        return self._pass(client.forward, *arguments)

    def forward_backward(self, client: tinker.TrainingClient, *arguments: Any) -> types.ForwardBackwardOutput:
        """Run a forward and backward pass, with the arguments of `forward`."""
        return self._pass(client.forward_backward, *arguments)

    def _pass(self, call: Any, data: Any = None, loss: str = "cross_entropy", config: Any = None) -> Any:
        data = make_data() if data is None else data
        self.spend(sum(datum.model_input.length for datum in data))
        return call(data, loss, config).result()

    def step(self, client: tinker.TrainingClient, scale: float = 1.0) -> dict[str, float]:
        """Take an optimizer step with the learning rate times `scale`, and return its metrics."""
        return client.optim_step(types.AdamParams(learning_rate=scale * self.learning_rate)).result().metrics or {}

    def sample(self, sampler: tinker.SamplingClient, prompt: Sequence[int], num: int = 1, **options: Any) -> Any:
        """Sample, by default 6 tokens with a seed. Options are fields of `sample` and of `SamplingParams`."""
        params: dict[str, Any] = {"max_tokens": 6, "stop": [], "seed": 5}
        params |= {name: options.pop(name) for name in tuple(options) if name in types.SamplingParams.model_fields}
        self.spend(len(prompt) + max(num, 1) * params["max_tokens"])
        text = types.ModelInput.from_ints(list(prompt))
        return sampler.sample(text, num, types.SamplingParams(**params), **options).result()

    def score(self, sampler: tinker.SamplingClient, tokens: Sequence[int], last: int) -> Floats:
        """Return the log-probabilities of the last tokens at temperature 1."""
        self.spend(len(tokens) + 1)
        return np.array(sampler.compute_logprobs(types.ModelInput.from_ints(list(tokens))).result()[-last:], float)

    def expect_logprobs(self, found: Any, expected: Any) -> str:
        """Raise Mismatch if log-probabilities differ by more than the precision, and return the mean difference."""
        differences = np.abs(np.asarray(found, float) - np.asarray(expected, float))
        mean, largest = float(differences.mean()), float(differences.max())
        is_close = mean <= self.precision.logprob and largest <= 10 * self.precision.logprob
        expect(is_close, f"log-probabilities differ by {mean:.2g} nats in the mean and at most by {largest:.2g}")
        return f"mean difference {mean:.1g} nats"

    def expect_loss(self, found: float, expected: float) -> None:
        """Raise Mismatch if losses differ by more than the precision."""
        difference = abs(found - expected) / max(1.0, abs(expected))
        expect(difference <= self.precision.loss, f"the value is {found:.7g} instead of {expected:.7g}")

    def clean_up(self) -> None:
        """Delete all checkpoints of the runs, and end the session."""
        if "service" in self._made:
            listed = [found for run in self.runs for found in self.rest.list_checkpoints(run).result().checkpoints]
            try:
                for path in (*self.copies, *(found.tinker_path for found in listed)):
                    self.rest.delete_checkpoint_from_tinker_path(path).result()
            finally:
                self.service.close("success").result()


def make_datum(tokens: Sequence[int], **inputs: Any) -> types.Datum:
    """Return a datum that predicts each token from the tokens before it. Weights are 1 by default."""
    arrays: dict[str, Any] = {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)}
    given = {name: array for name, array in (arrays | inputs).items() if array is not None}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=given)


def make_data(inputs: Sequence[dict[str, Any]] = ({}, {}, {})) -> list[types.Datum]:
    """Return a datum for each of `SEQUENCES`, with inputs for each."""
    return [make_datum(tokens, **own) for tokens, own in zip(SEQUENCES, inputs, strict=True)]


def get_logprobs(output: types.ForwardBackwardOutput) -> Floats:
    """Return the log-probabilities of all data of a pass, one after the other."""
    return np.concatenate([np.asarray(row["logprobs"].to_numpy(), float).ravel() for row in output.loss_fn_outputs])
