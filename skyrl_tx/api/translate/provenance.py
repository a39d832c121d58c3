"""Where the tokens of a datum came from, and filling in what was recorded when they were drawn.

Runs tile a field: every position is in exactly one, in order. Those of `loss_fn_inputs` tell which targets were
sampled; those of `model_input` have no effect, but must be true too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from skyrl_tx.api.proto import wire_pb2
from skyrl_tx.api.schemas import inputs
from skyrl_tx.api.schemas.base import shown
from skyrl_tx.api.translate.checks import require
from skyrl_tx.contract.arrays import Float32Array
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import Datum, ModelPass
from skyrl_tx.store.stability import Recorded

NEEDS_PROVENANCE = "stable_reinforce"
"""The only loss that reads provenance; with others it is accepted and has no effect."""

_Source = Literal["prompt_tokens", "sampled_tokens"]


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [offset, offset + length) of a sequence's prompt or of its sampled tokens; None: of neither."""

    source: _Source | None
    sequence_id: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.source} [{self.offset}, {self.offset + self.length}) of sequence_id {shown(self.sequence_id)}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """The spans of one datum."""

    model_input: tuple[Span, ...]
    loss_inputs: tuple[Span, ...]

    @property
    def sequence_ids(self) -> set[str]:
        """All sequences that are named."""
        return {span.sequence_id for span in (*self.model_input, *self.loss_inputs)}


def from_proto(message: wire_pb2.Datum) -> Provenance:
    """Read the spans of one datum."""
    return Provenance(
        model_input=tuple(_span_from_proto(span) for span in message.model_input_spans),
        loss_inputs=tuple(_span_from_proto(span) for span in message.loss_fn_input_spans),
    )


def from_json(datum: inputs.Datum) -> Provenance:
    """Read the spans of one datum, in JSON of the same form as in protobuf."""
    return Provenance(
        model_input=tuple(_span_from_json(span) for span in datum.model_input_spans or ()),
        loss_inputs=tuple(_span_from_json(span) for span in datum.loss_fn_input_spans or ()),
    )


def filled(request: ModelPass, provenances: Iterable[Provenance], recorded: Mapping[str, Recorded]) -> ModelPass:
    """Return a pass with recorded `logprobs` and the mask `sampled` in each datum.

    `recorded` holds what is kept of the sequences for the caller. Raises UserError naming the span that is not true.
    """
    data = tuple(
        _filled_datum(datum, provenance, recorded, f"data[{index}]")
        for index, (datum, provenance) in enumerate(zip(request.data, provenances, strict=True))
    )
    return replace(request, data=data)


def _filled_datum(datum: Datum, provenance: Provenance, recorded: Mapping[str, Recorded], where: str) -> Datum:
    length = datum.tokens.size
    require(
        len(provenance.loss_inputs) > 0,
        f"{where}.loss_fn_input_spans: missing; {NEEDS_PROVENANCE} needs to know which sequences were sampled",
    )
    require("sampled" not in datum.loss_inputs, f"{where}.loss_fn_inputs['sampled']: is told by loss_fn_input_spans")
    if provenance.model_input:
        _check_tiling(provenance.model_input, recorded, length, f"{where}.model_input_spans")
    _check_tiling(provenance.loss_inputs, recorded, length, f"{where}.loss_fn_input_spans")
    logprobs, sampled = _laid_out(provenance.loss_inputs, recorded, length)
    _check_advantages(datum, sampled, where)
    return replace(datum, loss_inputs={**datum.loss_inputs, "logprobs": logprobs, "sampled": sampled})


def _check_tiling(spans: Sequence[Span], recorded: Mapping[str, Recorded], length: int, where: str) -> None:
    covered = 0
    for index, span in enumerate(spans):
        _check_span(span, recorded.get(span.sequence_id), f"{where}[{index}]")
        covered += span.length
        require(covered <= length, f"{where}[{index}]: {span} goes beyond the {length} positions of the datum")
    require(covered == length, f"{where}: cover {covered} of the {length} positions of the datum")


def _check_span(span: Span, recorded: Recorded | None, where: str) -> None:
    require(span.source is not None, f"{where}: names neither prompt_tokens nor sampled_tokens")
    if recorded is None:
        raise UserError(
            f"{where}: nothing is recorded of sequence_id {shown(span.sequence_id)}; sample with "
            "record_stability_info, and train within a day of sampling or of the last use"
        )
    size = recorded.prompt_length if span.source == "prompt_tokens" else recorded.logprobs.size
    require(0 <= span.offset <= span.offset + span.length <= size, f"{where}: {span} is out of range, there are {size}")


def _laid_out(
    spans: Sequence[Span], recorded: Mapping[str, Recorded], length: int
) -> tuple[Float32Array, Float32Array]:
    """Return the recorded log-probabilities [T], 0 where nothing was sampled, and 1 where something was."""
    logprobs, sampled = np.zeros(length, np.float32), np.zeros(length, np.float32)
    start = 0
    for span in spans:
        if span.source == "sampled_tokens":
            drawn = recorded[span.sequence_id].logprobs
            logprobs[start : start + span.length] = drawn[span.offset : span.offset + span.length]
            sampled[start : start + span.length] = 1.0
        start += span.length
    return logprobs, sampled


def _check_advantages(datum: Datum, sampled: Float32Array, where: str) -> None:
    """Refuse advantages that the loss would leave out; other shapes are for the engine to refuse."""
    advantages = datum.loss_inputs.get("advantages")
    if advantages is None or advantages.shape != sampled.shape:
        return
    stray = np.flatnonzero((advantages != 0) & (sampled == 0))
    if stray.size:
        index = int(stray[0])
        raise UserError(
            f"{where}.loss_fn_inputs['advantages'][{index}] {float(advantages[index])}: must be 0, as "
            "loss_fn_input_spans do not have a sampled token there"
        )


def _span_from_proto(span: wire_pb2.ProvenanceSpan) -> Span:
    match span.WhichOneof("span"):
        case "prompt_tokens":
            return _span("prompt_tokens", span.prompt_tokens)
        case "sampled_tokens":
            return _span("sampled_tokens", span.sampled_tokens)
        case _:
            return Span(None, "", 0, 0)


def _span_from_json(span: inputs.ProvenanceSpan) -> Span:
    if span.prompt_tokens is not None and span.sampled_tokens is None:
        return _span("prompt_tokens", span.prompt_tokens)
    if span.sampled_tokens is not None and span.prompt_tokens is None:
        return _span("sampled_tokens", span.sampled_tokens)
    return Span(None, "", 0, 0)


def _span(source: _Source, run: wire_pb2.TokenRun | inputs.TokenRun) -> Span:
    return Span(source, run.sequence_id, run.offset, run.length)
