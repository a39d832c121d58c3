"""Rows about sampling: tokens, log-probabilities, stops, seeds and data about the prompt."""

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
from tinker import types

from skyrl_tx.tools.conformance.server import (
    NUM_TOKENS,
    SEQUENCES,
    TTL_S,
    ConformanceTable,
    Server,
    Skip,
    expect,
    get_logprobs,
)

ROWS = ConformanceTable()

PROMPT = SEQUENCES[0]
_CANCEL_WITHIN_S = 20.0


def draw(server: Server, num: int = 1, **options: Any) -> list[list[int]]:
    """Return the tokens of samples."""
    return [list(found.tokens) for found in server.sample(server.sampler, PROMPT, num, **options).sequences]


@ROWS.row("sampling", tokens=30)
def describe_samples(server: Server) -> None:
    """Samples have tokens, log-probabilities, a stop reason and an id."""
    sequences = server.sample(server.sampler, PROMPT, 3).sequences
    found = [(len(own.tokens), len(own.logprobs or ()), own.stop_reason) for own in sequences]
    expect(found == [(6, 6, "length")] * 3, f"the samples are {found}")
    expect(len({own.sequence_id for own in sequences}) == 3, "sequence ids repeat")


@ROWS.row("sampling", tokens=60)
def seeds(server: Server) -> None:
    """A seed gives the same tokens again, and another seed gives different tokens."""
    first, again, other = draw(server, 2), draw(server, 2), draw(server, 2, seed=6)
    expect(first == again, f"seed 5 gave {first}, then {again}")
    expect(first != other and first[0] != first[1], "different seeds or samples gave the same tokens")


@ROWS.row("sampling", tokens=60)
def greedy(server: Server) -> None:
    """Temperature 0 and top_k 1 take the most likely token."""
    drawn = [draw(server, temperature=0.0), draw(server, temperature=0.0, seed=9), draw(server, top_k=1)]
    expect(drawn[0] == drawn[1] == drawn[2], f"the tokens are {drawn}")


@ROWS.row("sampling", tokens=60)
def compare_sampled_logprobs(server: Server) -> str:
    """Log-probabilities of a sample equal the result of compute_logprobs."""
    (own,) = server.sample(server.sampler, PROMPT).sequences
    return server.expect_logprobs(own.logprobs, server.score(server.sampler, [*PROMPT, *own.tokens], last=6))


@ROWS.row("sampling", tokens=2 * NUM_TOKENS + 10)
def trainer_and_sampler(server: Server) -> str:
    """Log-probabilities of sampler and trainer agree."""
    scored = [server.score(server.sampler, tokens, last=len(tokens) - 1) for tokens in SEQUENCES]
    return server.expect_logprobs(np.concatenate(scored), get_logprobs(server.forward(server.training)))


@ROWS.row("sampling", tokens=200)
def temperature(server: Server) -> str:
    """Log-probabilities at temperature 2 are tempered or raw."""
    drawn = server.sample(server.sampler, PROMPT, 24, max_tokens=1, temperature=2.0).sequences
    given = dict(sorted((own.tokens[0], own.logprobs[0]) for own in drawn)[:8])
    at_one = np.array([server.score(server.sampler, [*PROMPT, token], last=1)[0] for token in given])
    found, tolerance = np.array(list(given.values())), 5 * server.precision.logprob
    if np.ptp(at_one) < 2 * tolerance:
        raise Skip("not run", "all sampled tokens have the same probability")

    # Tempered values have the differences of the raw ones, divided by the temperature.
    raw = float(np.abs(found - at_one).mean())
    tempered = float(np.abs((found - found[0]) - (at_one - at_one[0]) / 2.0).mean())
    expect(min(raw, tempered) <= tolerance, f"{raw:.2g} nats from raw and {tempered:.2g} nats from tempered ones")
    return "raw" if raw < tempered else "tempered"


@ROWS.row("sampling", tokens=30)
def stop_token(server: Server) -> None:
    """A stop token ends a sample and is its last token."""
    _expect_stop(server, lambda tokens: tokens[3], lambda tokens, stop: stop in tokens)


@ROWS.row("sampling", tokens=30)
def stop_string(server: Server) -> None:
    """A stop string ends a sample."""
    try:
        decode = server.training.get_tokenizer().decode
    except Exception as error:
        # The SDK loads the tokenizer from the Hugging Face Hub. Without it there is no text to stop at.
        raise Skip("not run", f"the SDK cannot load the tokenizer: {error}") from error

    def choose(tokens: list[int]) -> str:
        text = str(decode(tokens[2:4]))
        if not text or "\N{REPLACEMENT CHARACTER}" in text:
            raise Skip("not run", f"the sampled tokens {tokens[2:4]} have no text that a sample can stop at")
        return text

    _expect_stop(server, choose, lambda tokens, stop: stop in decode(tokens))


def _expect_stop(
    server: Server, choose: Callable[[list[int]], Any], contains: Callable[[list[int], Any], bool]
) -> None:
    """Sample until the stop that `choose` takes from a sample without stops."""
    (tokens,) = draw(server, temperature=0.0)
    stop = choose(tokens)
    end = next(end for end in range(1, 7) if contains(tokens[:end], stop))
    stops = stop if isinstance(stop, str) else [stop]
    (own,) = server.sample(server.sampler, PROMPT, temperature=0.0, stop=stops).sequences
    found = (list(own.tokens), own.stop_reason)
    expect(found == (tokens[:end], "stop"), f"{stop!r} gave {found} instead of {tokens[:end]}")


_TARGETS = types.TensorData.from_numpy(np.array(PROMPT[1:], np.int64)[:, None])
_ABOUT_PROMPT: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "include_prompt_logprobs": (True, lambda answer: answer.prompt_logprobs),
    "prompt_logprobs_last_n": (2, lambda answer: answer.prompt_logprobs),
    "target_prompt_logprobs": (_TARGETS, lambda answer: answer.target_prompt_logprobs.to_numpy().ravel()),
}
"""Each field that requests data about the prompt: a value, and where the answer has log-probabilities."""


def check_prompt(name: str, server: Server) -> None:
    """Compare the log-probabilities of the last two prompt tokens with the result of compute_logprobs."""
    value, pick = _ABOUT_PROMPT[name]
    options = {"include_prompt_logprobs": True, "max_tokens": 1, name: value}
    found = pick(server.sample(server.sampler, PROMPT, **options))
    server.expect_logprobs(found[-2:], server.score(server.sampler, PROMPT, last=2))


for _name in _ABOUT_PROMPT:
    ROWS.row("sampling", f"Prompt data of {_name}", tokens=20, is_optional=_name != "include_prompt_logprobs")(
        partial(check_prompt, _name)
    )


@ROWS.row("sampling", tokens=10, is_optional=True)
def likely_tokens(server: Server) -> None:
    """Prompt data of topk_prompt_logprobs."""
    answer = server.sample(server.sampler, PROMPT, max_tokens=1, include_prompt_logprobs=True, topk_prompt_logprobs=2)
    rows = [[logprob for _, logprob in row] for row in answer.topk_prompt_logprobs[1:]]
    expect([len(row) for row in rows] == [2] * len(PROMPT[1:]), f"topk_prompt_logprobs is {rows}")
    best = [max(*row, own) for row, own in zip(rows, answer.prompt_logprobs[1:], strict=True)]
    server.expect_logprobs([row[0] for row in rows], best)


@ROWS.row("sampling", tokens=10, is_optional=True)
def alternative_tokens(server: Server) -> None:
    """Prompt data of prompt_alt_tokens_k."""
    shape = server.sample(server.sampler, PROMPT, max_tokens=1, prompt_alt_tokens_k=3).prompt_alt_tokens.tokens.shape
    expect(shape == [len(PROMPT) - 1, 3], f"the shape of prompt_alt_tokens is {shape}")


@ROWS.row("sampling", tokens=4 * NUM_TOKENS)
def frozen_sampler(server: Server) -> None:
    """The weights of a sampler stay when training continues."""
    client = server.resume()
    path = client.save_weights_for_sampler("frozen", ttl_seconds=TTL_S).result().path
    sampler = server.service.create_sampling_client(model_path=path).result()
    before = server.score(sampler, PROMPT, last=3)
    server.forward_backward(client)
    server.step(client, 3.0)
    server.expect_logprobs(server.score(sampler, PROMPT, last=3), before)
    moved = server.score(client.save_weights_and_get_sampling_client().result(), PROMPT, last=3)
    expect(np.abs(moved - before).max() > server.precision.logprob, "a sampler of the new weights has the old ones")


@ROWS.row("sampling", tokens=30)
def copy_client(server: Server) -> None:
    """A copy of a sampling client, as for another process, gives the same samples."""
    copy = deepcopy(server.sampler)  # by the methods that pickle uses
    found = list(server.sample(copy, PROMPT).sequences[0].tokens)
    expect([found] == draw(server), f"the copy gave {found}")


@ROWS.row("sampling", tokens=15)
def base_model(server: Server) -> None:
    """The base model can be sampled, and its sampler is described."""
    sampler = server.service.create_sampling_client(base_model=server.base_model).result()
    expect(server.sample(sampler, PROMPT).sequences, "there is no sample")
    session = server.rest.get_session(server.training.model_id.partition(":")[0]).result()
    found = [server.rest.get_sampler(name).result() for name in session.sampler_ids]
    expect(any(own.base_model == server.base_model and not own.model_path for own in found), f"they are {found}")


@ROWS.row("futures", tokens=500)
def many_samples(server: Server) -> None:
    """100 samples at the same time."""
    server.spend(500)
    prompt, params = types.ModelInput.from_ints([11]), types.SamplingParams(max_tokens=4, stop=[])
    futures = [server.sampler.sample(prompt, 1, params) for _ in range(100)]
    ids = {future.result().sequences[0].sequence_id for future in futures}
    expect(len(ids) == 100, f"{len(ids)} different ids")


@ROWS.row("futures", tokens=2000)
def cancel_sample(server: Server) -> None:
    """An abandoned sample is cancelled."""
    length = min(1990, (server.context or 2000) - 10)
    server.spend(length)
    sent, before = server.traffic.count("/asample"), server.traffic.count("/cancel_future")
    params = types.SamplingParams(max_tokens=length, stop=[])
    future = server.sampler.sample(types.ModelInput.from_ints([11]), 1, params).future()
    wait_for(lambda: server.traffic.count("/asample") > sent)
    if not future.cancel():
        raise Skip("not run", "the sample was complete before it could be cancelled")
    wait_for(lambda: server.traffic.count("/cancel_future") > before)


@ROWS.row("retries", tokens=60)
def lost_sample(server: Server) -> None:
    """A lost response of /asample changes no result."""
    expected = draw(server)
    server.traffic.losses[:] = ["/asample"]
    found = draw(server)
    expect(found == expected and not server.traffic.losses, f"the tokens are {found} instead of {expected}")


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. Raises Mismatch after 20 seconds."""
    end = time.monotonic() + _CANCEL_WITHIN_S
    while not condition():
        expect(time.monotonic() < end, f"the SDK did not make a call within {_CANCEL_WITHIN_S:g} s")
        time.sleep(0.02)
