"""Clients: they train, save, load and sample, repeat calls that got no response, and record what they were promised."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from starlette.requests import Request

from skyrl_tx.contract import requests
from skyrl_tx.contract.requests import Datum, LoraSpec, ModelPass, ModelSpec, OptimizerParams, OptimStep
from skyrl_tx.server.routes import futures, runs, sampling, sessions, training, weights
from tests.support.simulation.device import BAD_TOKEN, CRASH_TOKEN
from tests.support.simulation.scheduler import Event, Fiber, Process
from tests.support.simulation.world import Lost

if TYPE_CHECKING:
    from tests.support.simulation.history import History

Kind = Literal["create_model", "pass", "optim_step", "save", "ephemeral_save", "load", "sample"]
BARRIERS = frozenset({"optim_step", "save", "ephemeral_save", "load"})
_RETRY_S = 0.5
_REQUEST = Request(
    {"type": "http", "scheme": "http", "server": ("server", 80), "path": "/", "root_path": "", "headers": []}
)
_HEARTBEAT_S = 10.0
_MAX_TOKEN = 22
ROW = "SELECT position, effect_order, status FROM requests WHERE request_id = ?"


class Stopped(Exception):
    """The client found a violation and ends."""


@dataclass(eq=False, kw_only=True)
class Sent:
    """One request of a client, and what it knows about it."""

    kind: Kind
    request: Any
    """The request of the contract that the engine should execute."""
    route: Callable[..., Any]
    body: dict[str, Any]
    seq_id: int = 0
    path: str = ""
    """The checkpoint of a save or load; the sampling session of a sample or ephemeral save."""
    is_acknowledged: Event
    is_done: Event
    request_id: str = ""
    result: dict[str, Any] | None = None
    row: tuple[int, int | None, str] | None = None
    """Position, log sequence number and status as stored."""
    is_cancelled: bool = False

    @property
    def has_failed(self) -> bool:
        """Whether the result is a failure."""
        return self.result is not None and "error" in self.result


@dataclass(eq=False)
class Model:
    """One model of a client: its requests, the first creates it."""

    model_id: str
    log: list[Sent] = field(default_factory=list[Sent])


class Client:
    """One client process with a session."""

    def __init__(self, history: "History", owner: str, number: int) -> None:
        self.history = history
        self.world = history.world
        self.scheduler = history.world.scheduler
        self.draw = self.scheduler.random
        self.owner = owner
        self.name = f"client{number}"
        self.key = history.world.database.keys[owner]
        self.process = Process(self.name)
        self.session_id = ""
        self.models: list[Model] = []
        self.samples: list[Sent] = []
        self.samplers: dict[str, Sent | None] = {}
        """Sampling sessions, each with the save of its weights; None for the base model."""
        self.num_sampled: dict[str, int] = {}
        self.num_models = self.num_sampling_sessions = 0
        self.is_done = False
        self._fibers: list[Fiber] = []

    def start(self, program: Callable[["Client"], None]) -> None:
        """Run a program on a fiber of this client."""

        def run() -> None:
            try:
                self.open_session()
                self.spawn(self._send_heartbeats, "heartbeats")
                program(self)
                for sent in self.all_sent():
                    sent.is_done.wait()
            except Stopped:
                pass
            self.is_done = True

        self.scheduler.spawn(run, process=self.process, name=f"{self.name}/main")

    def spawn(self, work: Callable[[], object], name: str) -> None:
        """Run work at the same time."""

        def run() -> None:
            with contextlib.suppress(Stopped):
                work()

        self.scheduler.spawn(run, process=self.process, name=f"{self.name}/{name}")

    def all_sent(self) -> list[Sent]:
        """Return all requests, in the order of their creation for each model."""
        return [*(sent for model in self.models for sent in model.log), *self.samples]

    def violate(self, message: str) -> None:
        """Record a violation and end the fiber."""
        self.history.violate(f"{self.name} of {self.owner}: {message}")
        raise Stopped

    def call(self, route: Callable[..., Any], body: Any = None, **path: Any) -> Any:
        """Call until there is a response of success."""
        while True:
            try:
                status, answer = self.world.call(self.key, route, body, **path)
            except Lost:
                self.scheduler.sleep(_RETRY_S)
                continue
            if status == 200:
                return answer
            if status not in (408, 429, 503):
                self.violate(f"{route.__name__} {body} {path} got {status} {answer}")
            self.scheduler.sleep(_RETRY_S if status != 429 else 1.0)

    def open_session(self) -> None:
        """Create this client's session."""
        body = {"tags": [], "sdk_version": "0.38.0", "idempotency_key": f"{self.name}-session"}
        self.session_id = self.call(sessions.create_session, body, request=_REQUEST)["session_id"]

    def _send_heartbeats(self) -> None:
        while not self.is_done:
            self.scheduler.sleep(_HEARTBEAT_S)
            if not self.is_done:
                self.call(sessions.record_heartbeat, {"session_id": self.session_id})

    # Requests

    def send(self, sent: Sent) -> Sent:
        """Send a request and fetch its result, concurrently with other requests."""
        self.spawn(lambda: self._exchange(sent), sent.kind)
        return sent

    def _exchange(self, sent: Sent) -> None:
        answer = self.call(sent.route, sent.body)
        sent.request_id = answer["request_id"]
        self.world.trace(f"{sent.kind} {sent.seq_id} is acknowledged")
        sent.is_acknowledged.set()
        self.history.acknowledged.append((self, sent))
        sent.result = self.call(futures.retrieve_future, {"request_id": sent.request_id})
        self.world.trace(f"{sent.kind} {sent.seq_id} has the result {str(sent.result)[:160]}")
        ((*row,),) = self.world.database.rows(ROW, sent.request_id) or [()]
        sent.row = (row[0], row[1], row[2]) if row else None
        sent.is_done.set()
        if self.draw.random() < 0.1:
            self.scheduler.sleep(self.draw.random())
            again = self.call(futures.retrieve_future, {"request_id": sent.request_id})
            if again != sent.result:
                self.violate(f"{sent.kind} {sent.seq_id} had the result {sent.result}, then {again}")

    def _new(self, kind: Kind, request: Any, route: Callable[..., Any], body: dict[str, Any], **more: Any) -> Sent:
        events = {"is_acknowledged": Event(self.scheduler), "is_done": Event(self.scheduler)}
        return Sent(kind=kind, request=request, route=route, body=body, **events, **more)

    def _add(
        self, model: Model, kind: Kind, request: Any, route: Callable[..., Any], where: str = "", **body: Any
    ) -> Sent:
        seq_id = len(model.log)
        full = {"model_id": model.model_id, "seq_id": seq_id, **body}
        sent = self._new(kind, request, route, full, seq_id=seq_id, path=where)
        model.log.append(sent)
        return sent

    def create_model(self) -> Model:
        """Create a model and wait for the acknowledgement."""
        number = self.num_models
        self.num_models += 1
        seed = self.draw.randrange(1000)
        spec = ModelSpec(lora=LoraSpec(rank=2, seed=seed))
        body = {
            **{"session_id": self.session_id, "model_seq_id": number, "base_model": "tiny"},
            "lora_config": {"rank": 2, "seed": seed},
        }
        sent = self._new(
            "create_model", requests.CreateModel(base_model="tiny", spec=spec), training.create_model, body
        )
        model = Model(f"{self.session_id}:train:{number}", [sent])
        self.models.append(model)
        self.send(sent).is_acknowledged.wait()
        return model

    def load_model(self, save: Sent, *, optimizer: bool) -> Model:
        """Create a model from a checkpoint and wait for the acknowledgement."""
        number = self.num_models
        self.num_models += 1
        body = {
            **{"session_id": self.session_id, "model_seq_id": number},
            **{"path": save.path, "optimizer": optimizer},
        }
        sent = self._new("load", optimizer, weights.load_weights, body, path=save.path)
        model = Model(f"{self.session_id}:train:{number}", [sent])
        self.models.append(model)
        self.send(sent).is_acknowledged.wait()
        return model

    def new_pass(self, model: Model, *, backward: bool = True, first_token: int | None = None) -> Sent:
        """Make a pass of one or two short sequences."""
        data: list[Datum] = []
        wire: list[dict[str, Any]] = []

        for _ in range(self.draw.choice((1, 1, 2))):
            tokens = [self.draw.randrange(1, _MAX_TOKEN) for _ in range(self.draw.randrange(2, 5))]
            targets = [self.draw.randrange(1, _MAX_TOKEN) for _ in tokens]
            tokens[0] = tokens[0] if first_token is None else first_token
            inputs = {"target_tokens": np.array(targets, np.int64)}
            data.append(Datum(tokens=np.array(tokens, np.int32), loss_inputs=inputs))
            wire.append(
                {
                    "model_input": {"chunks": [{"tokens": tokens}]},
                    "loss_fn_inputs": {"target_tokens": {"data": targets, "dtype": "int64"}},
                }
            )

        request = ModelPass(data=tuple(data), loss="cross_entropy", loss_config={}, backward=backward)
        body = {"data": wire, "loss_fn": "cross_entropy"}
        if backward:
            return self._add(model, "pass", request, training.forward_backward, forward_backward_input=body)
        return self._add(model, "pass", request, training.forward, forward_input=body)

    def new_optim_step(self, model: Model) -> Sent:
        """Make an optimizer step."""
        rate = self.draw.choice((0.01, 0.1))
        request = OptimStep(params=OptimizerParams(learning_rate=rate, weight_decay=0.01))
        params = {"learning_rate": rate, "weight_decay": 0.01}
        return self._add(model, "optim_step", request, training.optim_step, adam_params=params)

    def new_save(self, model: Model, *, for_sampler: bool) -> Sent:
        """Make a named save."""
        name = f"s{len(model.log)}"
        kind = "sampler_weights" if for_sampler else "weights"
        route = weights.save_weights_for_sampler if for_sampler else weights.save_weights
        return self._add(model, "save", kind, route, f"tinker://{model.model_id}/{kind}/{name}", **{"path": name})

    def new_ephemeral_save(self, model: Model) -> Sent:
        """Make an ephemeral save."""
        number = self.num_sampling_sessions
        self.num_sampling_sessions += 1
        name = f"{self.session_id}:sample:{number}"
        route = weights.save_weights_for_sampler
        return self._add(model, "ephemeral_save", None, route, name, sampling_session_seq_id=number)

    def sampling_session(self, save: Sent | None) -> str:
        """Create a sampling session on a named save, or on the base model."""
        number = self.num_sampling_sessions
        self.num_sampling_sessions += 1
        body: dict[str, Any] = {"session_id": self.session_id, "sampling_session_seq_id": number}
        body |= {"base_model": "tiny"} if save is None else {"model_path": save.path}
        name: str = self.call(sampling.create_sampling_session, body)["sampling_session_id"]
        self.samplers[name] = save
        return name

    def sample(self, name: str) -> Sent:
        """Send a prompt to a sampling session."""
        number = self.num_sampled.get(name, -1) + 1
        self.num_sampled[name] = number
        prompt = [self.draw.randrange(1, _MAX_TOKEN) for _ in range(self.draw.randrange(1, 4))]
        params = {
            "max_tokens": self.draw.choice((1, 3, 6)),
            "seed": self.draw.randrange(1000),
            "temperature": self.draw.choice((0.0, 1.0)),
        }
        num_samples = self.draw.choice((1, 1, 2))
        body = {
            **{"sampling_session_id": name, "seq_id": number, "num_samples": num_samples},
            **{"prompt": {"chunks": [{"tokens": prompt}]}, "sampling_params": params},
        }
        request = (np.array(prompt, np.int32), requests.SamplingParams(**params), num_samples)
        sent = self._new("sample", request, sampling.asample, body, seq_id=number, path=name)
        self.samples.append(sent)
        return self.send(sent)

    def cancel(self, sent: Sent) -> None:
        """Cancel a sample."""
        sent.is_acknowledged.wait()
        sent.is_cancelled = True
        self.call(futures.cancel_future, {"request_id": sent.request_id})


def train(client: Client) -> None:
    """Train a model: groups of passes sent at once, barriers after their acknowledgements, saves, samples, copies."""
    draw, plan = client.draw, client.world.plan
    model = client.create_model()
    saved: list[Sent] = []

    for _ in range(draw.choice((1, 1, 1, 1, 1, 2))):
        group = [client.new_pass(model, first_token=_special(client)) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        if draw.random() < 0.15:
            group.append(client.new_pass(model, backward=False))
        _send_together(client, group)
        _send_in_turn(client, client.new_optim_step(model))
        if draw.random() < 0.25:
            saved.append(_send_in_turn(client, client.new_save(model, for_sampler=draw.random() < 0.4)))
        if draw.random() < 0.2:
            save = _send_in_turn(client, client.new_ephemeral_save(model))
            save.is_done.wait()
            if not save.has_failed:
                client.samplers[save.path] = save
                client.sample(save.path)
        if draw.random() < 0.1:
            sent = client.sample(client.sampling_session(None))
            if draw.random() < 0.3:
                client.cancel(sent)
        if draw.random() < 0.4:
            model.log[-1].is_done.wait()
        if plan.has("clock_steps"):
            client.scheduler.sleep(draw.uniform(8.0, 14.0))
        if draw.random() < 0.15:
            _intrude(client)

    for save in saved:
        save.is_done.wait()
        if save.has_failed:
            continue
        if save.request == "sampler_weights":
            client.sample(client.sampling_session(save))
        elif draw.random() < 0.6:
            model = client.load_model(save, optimizer=draw.random() < 0.5)
            _send_together(client, [client.new_pass(model)])
            _send_in_turn(client, client.new_optim_step(model))

    if draw.random() < 0.3:
        _send_in_turn(client, client.new_pass(model, backward=False))


def _special(client: Client) -> int | None:
    if client.world.plan.has("bad_requests") and client.draw.random() < 0.15:
        return client.draw.choice((BAD_TOKEN, CRASH_TOKEN))
    return None


def _send_together(client: Client, group: list[Sent]) -> None:
    order = list(group)
    client.draw.shuffle(order)
    for sent in order:
        client.send(sent)
    for sent in group:
        sent.is_acknowledged.wait()


def _send_in_turn(client: Client, sent: Sent) -> Sent:
    client.send(sent).is_acknowledged.wait()
    return sent


def _intrude(client: Client) -> None:
    """Ask for rows of other owners, which must look as if they did not exist."""
    others = [(other, sent) for other, sent in client.history.acknowledged if other.owner != client.owner]
    if not others:
        return
    other, sent = client.draw.choice(others)
    asked = [
        (futures.retrieve_future, {"request_id": sent.request_id}),
        (sessions.record_heartbeat, {"session_id": other.session_id}),
    ]
    if other.models:
        asked.append((training.get_info, {"model_id": other.models[0].model_id}))
        asked.append((training.optim_step, {"model_id": other.models[0].model_id, "seq_id": 999, "adam_params": {}}))
    route, body = client.draw.choice(asked)

    try:
        status, answer = client.world.call(client.key, route, body)
        if status not in (404, 410, 408, 503) or (status == 408 and "queue_state_reason" not in answer):
            client.violate(f"{route.__name__} for {other.owner}'s {body} got {status} {answer}")
        _, page = client.world.call(client.key, runs.list_runs, None, limit=100)
        owners = {run["model_owner"] for run in page.get("training_runs", ())}
        if owners - {client.owner, f"tml:user:{client.owner}"}:
            client.violate(f"the list of runs shows those of {owners}")
    except Lost:
        pass
