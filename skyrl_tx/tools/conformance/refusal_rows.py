"""Rows about invalid requests: the server refuses them with a user error, and the client can continue."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tinker

from skyrl_tx.tools.conformance.server import (
    NUM_TOKENS,
    SEQUENCES,
    ConformanceTable,
    Mismatch,
    Server,
    Skip,
    expect,
    is_refusal,
    make_datum,
)

ROWS = ConformanceTable()

_TOKENS = SEQUENCES[0]
_ONES = np.ones(len(_TOKENS) - 1, np.float32)
_LONGEST = 32_768
"""The longest context, in tokens, that a row exceeds."""


def _send(server: Server, loss: str = "cross_entropy", tokens: list[int] = _TOKENS, **inputs: Any) -> object:
    return server.forward_backward(_get_client(server), [make_datum(tokens, **inputs)], loss)


def _exceed_context(server: Server) -> object:
    if not 0 < server.context <= _LONGEST:
        raise Skip("not run", f"a context of {server.context} tokens would cost too much")
    return server.sample(server.sampler, [11] * server.context, max_tokens=1)


CALLS: dict[str, tuple[str, Callable[[Server], object]]] = {
    "A negative learning rate": ("learning_rate", lambda s: s.step(_get_client(s), -1.0)),
    "A token outside the vocabulary": ("model_input", lambda s: _send(s, tokens=[11, 2**31 - 1, 12])),
    "Weights of another length than the tokens": ("weights", lambda s: _send(s, weights=_ONES[:2])),
    "A weight that is not a number": ("weights", lambda s: _send(s, weights=_ONES * np.nan)),
    "An unknown loss": ("mse", lambda s: _send(s, "mse")),
    "A loss without one of its inputs": ("logprobs", lambda s: _send(s, "ppo", weights=None, advantages=_ONES)),
    "LoRA rank 0": ("rank", lambda s: s.service.create_lora_training_client(s.base_model, 0).result()),
    "An unknown base model": ("no/model", lambda s: s.service.create_lora_training_client("no/model", 8).result()),
    "An unknown model to sample": ("no/model", lambda s: s.service.create_sampling_client(None, "no/model").result()),
    "A missing checkpoint to train": (
        "weights/none",
        lambda s: s.service.create_training_client_from_state(f"tinker://{s.training.model_id}/weights/none").result(),
    ),
    "A missing checkpoint to sample": (
        "weights/none",
        lambda s: s.service.create_sampling_client(f"tinker://{s.training.model_id}/sampler_weights/none").result(),
    ),
    "An empty prompt": ("prompt", lambda s: s.sample(s.sampler, [])),
    "0 samples": ("num_samples", lambda s: s.sample(s.sampler, _TOKENS, 0)),
    "A negative temperature": ("temperature", lambda s: s.sample(s.sampler, _TOKENS, temperature=-1.0)),
    "More tokens than the context": ("context", _exceed_context),
}
"""Each invalid request with a word that a good message contains."""


def check_refusal(word: str, call: Callable[[Server], object], server: Server) -> str:
    """Make an invalid call, and expect a user error. The detail says whether the message names the reason."""
    try:
        call(server)
    except Exception as error:
        # There are many kinds of refusals, see `is_refusal`. Everything else is a finding.
        if not is_refusal(error):
            raise
        return f"the message names {word}" if word in str(error) else f"the message does not name {word}: {error}"
    raise Mismatch("the server has accepted it")


for _title, (_word, _call) in CALLS.items():
    _tokens = _LONGEST + 1 if _call is _exceed_context else 30
    ROWS.row("refusals", _title, tokens=_tokens)(partial(check_refusal, _word, _call))


@ROWS.row("refusals", tokens=3 * NUM_TOKENS)
def train_after_refusals(server: Server) -> str:
    """The client of the refused requests can train."""
    client, detail = _get_client(server), ""
    server.forward_backward(client)
    try:
        server.step(client)
    except tinker.RequestFailedError as error:
        detail = f"the first step reported the failed pass: {error}"
    before = server.forward_backward(client).metrics["loss:sum"]
    server.step(client)
    after = server.forward(client).metrics["loss:sum"]
    expect(after < before, f"a step changed the loss from {before} to {after}")
    return detail


def _get_client(server: Server) -> tinker.TrainingClient:
    """Return the model that gets the invalid requests."""
    return server.once("refused", server.resume)
