"""Rows about training: passes, steps, losses, order, and lost responses."""

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import tinker
from tinker import types

from skyrl_tx.contract.loss_reference import LossValue, evaluate
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.tools.conformance.server import (
    NUM_TOKENS,
    RANK,
    SEQUENCES,
    TTL_S,
    ConformanceTable,
    Server,
    Skip,
    expect,
    get_logprobs,
    make_data,
    make_datum,
)

ROWS = ConformanceTable()

_NORM = "unclipped_grad_l2:mean"
_OFFSETS, _SHIFTS = (1.0, -1.0, 0.1, -0.1), (0.0, 0.6, -0.6)
"""Log-ratios by token, and what is added for each sequence. No ratio is near a threshold."""
_CONFIGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.5},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0},
    "dro": {"beta": 0.2},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
"""A config of each loss that is not its default. The thresholds of gspo have no documented default."""


@ROWS.row("training")
def describe_model(server: Server) -> str:
    """A model is described by its base model and rank."""
    info = server.training.get_info()
    found = (info.model_data.model_name, info.lora_rank, info.is_lora)
    expect(found == (server.base_model, RANK, True), f"it is {found}")
    return f"the rows use learning rate {server.learning_rate:g}"


@ROWS.row("training", tokens=4 * NUM_TOKENS)
def lower_loss(server: Server) -> str:
    """Steps lower the loss."""
    client, losses = server.resume(), list[float]()
    for _ in range(3):
        losses.append(server.forward_backward(client).metrics["loss:sum"])
        server.step(client)
    losses.append(server.forward(client).metrics["loss:sum"])
    expect(losses[-1] < losses[0], f"the losses are {losses}")
    return f"{losses[0]:.4g} to {losses[-1]:.4g}"


@ROWS.row("training", tokens=6 * NUM_TOKENS)
def accumulate(server: Server) -> str:
    """Gradients add up until a step, and a forward pass adds none."""
    whole, parts = server.resume(), server.resume()
    server.forward_backward(whole)
    for datum in make_data():
        server.forward_backward(parts, [datum])
        server.forward(parts, [datum])
    return _expect_equal_steps(server, parts, whole)


@ROWS.row("training", tokens=4500)
def order_of_chunks(server: Server) -> None:
    """A call of 1,100 data, which the SDK sends in two requests, returns them in order."""
    lengths = [1 + index % 7 for index in range(1100)]
    output = server.forward_backward(server.resume(), [make_datum(range(20, 21 + length)) for length in lengths])
    found = [row["logprobs"].to_numpy().size for row in output.loss_fn_outputs]
    expect(found == lengths, "results are missing or in another order")


@ROWS.row("training", tokens=2 * NUM_TOKENS, is_optional=True)
def wide_targets(server: Server) -> None:
    """A position can have multiple targets with weights."""
    inputs = list[dict[str, Any]]()
    for tokens in SEQUENCES:
        targets = np.stack([tokens[1:], np.full(len(tokens) - 1, 30)], axis=1)
        inputs.append(
            {"target_tokens": targets, "weights": np.tile(np.array([1.0, 0.5], np.float32), (len(targets), 1))}
        )
    output = server.forward(server.training, make_data(inputs))
    logprobs = get_logprobs(output).reshape(-1, 2)
    server.expect_logprobs(logprobs[:, 0], get_logprobs(server.forward(server.training)))
    server.expect_loss(output.metrics["loss:sum"], -float((logprobs * [1.0, 0.5]).sum()))


def check_custom_loss(is_uploaded: bool, server: Server) -> str:
    """Compare a loss that the client defines with cross_entropy."""
    if importlib.util.find_spec("torch") is None:
        raise Skip("not run", "the SDK needs the package torch for this")

    def one(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/own:sum": loss}

    def whole(data: Any, logprobs: Any) -> Any:
        return -sum(row.sum() for row in logprobs), {}

    loss: Any = server.service.create_custom_loss(one, {"logprobs": 1, "weights": 1}).result() if is_uploaded else whole
    tested, reference = server.resume(), server.resume()
    server.spend(2 * NUM_TOKENS)
    data = make_data([{} if is_uploaded else {"weights": None}] * len(SEQUENCES))
    found = tested.forward_backward_custom(data, loss).result().metrics["loss:sum"]
    server.expect_loss(found, server.forward_backward(reference).metrics["loss:sum"])
    place = "on the server" if is_uploaded and loss.loss_id else "in the client"
    return f"evaluated {place}, {_expect_equal_steps(server, tested, reference)}"


def check_value(name: str, server: Server) -> None:
    """Compare `loss:sum` with the formula, with the default config and another one."""
    inputs = _make_inputs(name, server)
    for config in (_CONFIGS[name], _get_default(name)):
        output = server.forward(server.training, make_data(inputs), name, config)
        total = sum(float(value.loss.sum()) for value in _evaluate(name, output, inputs, config))
        server.expect_loss(output.metrics["loss:sum"], total)


def check_gradient(name: str, server: Server) -> str:
    """Compare a step with the step of cross_entropy whose weights are the derivatives of the formula."""
    inputs, config = _make_inputs(name, server), _get_default(name)
    tested, reference = server.resume(), server.resume()
    output = server.forward_backward(tested, make_data(inputs), name, config)
    weights = [{"weights": np.float32(-value.slope)} for value in _evaluate(name, output, inputs, config)]
    server.forward_backward(reference, make_data(weights))
    return _expect_equal_steps(server, tested, reference)


def run_steps(server: Server, client: tinker.TrainingClient, *, is_waiting: bool = True) -> list[float]:
    """Train two steps and return the losses. Without `is_waiting` all requests are sent before the first result."""
    server.spend(2 * NUM_TOKENS)
    passes, steps = list[Any](), list[Any]()
    for _ in range(2):
        passes.append(client.forward_backward(make_data(), "cross_entropy"))
        steps.append(client.optim_step(types.AdamParams(learning_rate=server.learning_rate)))
        if is_waiting:
            steps[-1].result()
    steps[-1].result()
    return [passed.result().metrics["loss:sum"] for passed in reversed(passes)]


@ROWS.row("order", tokens=4 * NUM_TOKENS)
def send_without_waiting(server: Server) -> None:
    """Requests that were sent without waiting run in their order."""
    _expect_baseline(server, run_steps(server, server.resume(), is_waiting=False))


@ROWS.row("order", tokens=4 * NUM_TOKENS)
def concurrent(server: Server) -> None:
    """Clients that train at the same time do not affect each other."""
    clients = [server.resume() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for losses in pool.map(partial(run_steps, server), clients):
            _expect_baseline(server, losses)


def check_lost_response(path: str, server: Server) -> None:
    """Lose one response. The SDK sends the request again, and the server must not run it twice."""
    client = server.resume()
    server.traffic.losses[:] = [path]
    _expect_baseline(server, run_steps(server, client))
    saved = client.save_state("kept", ttl_seconds=TTL_S).result().path
    expect(saved.endswith("/weights/kept"), f"the path is {saved}")
    expect(not server.traffic.losses, f"the SDK did not call {path}")


_BY_NAME: list[tuple[str, str, Callable[..., object], object, int]] = [
    ("training", "A custom loss that the SDK evaluates", check_custom_loss, False, 7 * NUM_TOKENS),
    ("training", "A custom loss that is uploaded", check_custom_loss, True, 7 * NUM_TOKENS),
    *(("losses", f"{name}: value", check_value, name, 3 * NUM_TOKENS) for name in _CONFIGS),
    *(("losses", f"{name}: gradient", check_gradient, name, 6 * NUM_TOKENS) for name in _CONFIGS),
    *(
        ("retries", f"A lost response of {path} changes no result", check_lost_response, path, 4 * NUM_TOKENS)
        for path in ("/forward_backward", "/optim_step", "/save_weights", "/retrieve_future")
    ),
]
for _group, _title, _check, _argument, _tokens in _BY_NAME:
    _is_optional = _argument in (True, "cispo", "dro", "gspo")
    ROWS.row(_group, _title, tokens=_tokens, is_optional=_is_optional)(partial(_check, _argument))


def _expect_baseline(server: Server, losses: list[float]) -> None:
    """Compare the losses of two steps with the losses of a client that ran alone and waited for each result."""
    for found, expected in zip(
        losses, server.once("baseline", lambda: run_steps(server, server.resume())), strict=True
    ):
        server.expect_loss(found, expected)


def _expect_equal_steps(server: Server, tested: tinker.TrainingClient, reference: tinker.TrainingClient) -> str:
    """Take a step with two models that have equal weights, and compare how it changes the log-probabilities."""
    before = get_logprobs(server.forward(server.training))
    norms = [server.step(client).get(_NORM) for client in (tested, reference)]
    if norms[0] is not None and norms[1] is not None:  # a server may return other metrics
        server.expect_loss(norms[0], norms[1])
    found, expected = (get_logprobs(server.forward(client)) - before for client in (tested, reference))
    size = float(np.linalg.norm(expected))
    expect(size > 0, "the step has changed no log-probability")
    difference = float(np.linalg.norm(found - expected)) / size
    expect(difference <= server.precision.step, f"the step differs by {difference:.1%} from the expected one")
    return f"difference of the step {difference:.2%}"


def _make_inputs(name: str, server: Server) -> list[dict[str, Any]]:
    """Return the inputs of a loss for each sequence. The ratios are inside and outside the thresholds."""
    logprobs = get_logprobs(server.forward(server.training))
    inputs = list[dict[str, Any]]()
    for number, own in enumerate(np.split(logprobs, np.cumsum([len(tokens) - 1 for tokens in SEQUENCES])[:-1])):
        places = np.arange(len(own))
        arrays = {
            "weights": 0.5 * (places % 3) if name == "cross_entropy" else np.ones(len(own)),
            "logprobs": own - np.take(_OFFSETS, (places + number) % 4) - _SHIFTS[number],
            "advantages": np.where(places == 0, 0.0, (-1.0) ** (places // 2) * (1 + number / 2)),
            "sequence_ratio_mask": np.ones(len(own)),
        }
        inputs.append({key: np.float32(array) for key, array in arrays.items() if key in LOSS_SPECS[name].inputs})
    return inputs


def _get_default(name: str) -> dict[str, float] | None:
    return _CONFIGS[name] if name == "gspo" else None


def _evaluate(
    name: str, output: types.ForwardBackwardOutput, inputs: list[dict[str, Any]], config: dict[str, float] | None
) -> list[LossValue]:
    """Evaluate the formula of a loss with the log-probabilities that the server has returned."""
    whole = {**LOSS_SPECS[name].config, **(config or {})}
    rows = [np.asarray(row["logprobs"].to_numpy(), float) for row in output.loss_fn_outputs]
    return [evaluate(name, logprobs, arrays, whole) for logprobs, arrays in zip(rows, inputs, strict=True)]
