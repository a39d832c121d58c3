"""Provenance spans: where the tokens of a datum came from.

A span says that some positions are part of the prompt or of the sampled tokens of a recorded
sequence. With it, the server looks up the logprobs that were recorded when the tokens were sampled.

The spans of a field must cover every position exactly once, in order. The spans of `loss_fn_inputs`
say which targets were sampled. The spans of `model_input` have no effect, but are checked too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from skyrl_tx.contract.arrays import Float32Array
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import Datum, ModelPass, SampledSpan
from skyrl_tx.server.schemas import training as schemas
from skyrl_tx.server.submission import wire_pb2
from skyrl_tx.server.submission.validation import check_text, quote_value, require
from skyrl_tx.store.recorded_logprobs import SampledLogprobs

_MAX_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Positions [offset, offset + length) in the prompt or in the sampled tokens of a sequence.

    `source` is None if the client named neither. Do not rename the fields: stored idempotency
    digests contain the names.
    """

    source: schemas.SpanSource | None
    sequence_id: str
    offset: int
    length: int

    def __str__(self) -> str:
        return (
            f"{self.source} [{self.offset}, {self.offset + self.length}) of sequence_id {quote_value(self.sequence_id)}"
        )


@dataclass(frozen=True, slots=True)
class Provenance:
    """The spans of one datum. Do not rename the fields, see `Span`."""

    model_input: tuple[Span, ...]
    loss_inputs: tuple[Span, ...]

    @property
    def sequence_ids(self) -> set[str]:
        """The ids of all sequences in the spans."""
        return {span.sequence_id for span in (*self.model_input, *self.loss_inputs)}


def read_provenance(datum: wire_pb2.Datum | schemas.WireDatum) -> Provenance:
    """Read the spans of one datum. Protobuf and JSON have the same fields."""
    return Provenance(
        model_input=tuple(_read_span(span) for span in datum.model_input_spans or ()),
        loss_inputs=tuple(_read_span(span) for span in datum.loss_fn_input_spans or ()),
    )


def find_sampled_spans(
    data: Iterable[wire_pb2.Datum | schemas.WireDatum], sizes: Iterable[int]
) -> Iterator[SampledSpan]:
    """Yield the sampled targets, which the console highlights.

    Losses that do not need provenance ignore the spans. So wrong spans are no error here: a datum
    whose spans exceed its size is skipped.
    """
    for index, (datum, size) in enumerate(zip(data, sizes, strict=True)):
        position, spans = 0, list[SampledSpan]()
        for span in map(_read_span, datum.loss_fn_input_spans or ()):
            if span.source == "sampled_tokens" and span.length > 0 and len(span.sequence_id) <= _MAX_ID_CHARS:
                spans.append(SampledSpan(datum=index, first=position, length=span.length, sequence_id=span.sequence_id))
            position += max(span.length, 0)
        if position <= size:
            yield from spans


def fill_recorded(
    request: ModelPass, provenances: Iterable[Provenance], recorded: Mapping[str, SampledLogprobs]
) -> ModelPass:
    """Return a pass whose datums have the recorded `logprobs` and a `sampled` mask.

    `recorded` has the sequences of the request's owner by id. Raises UserError that names a span which does not
    match its sequence.
    """
    data = tuple(
        _fill_datum(datum, provenance, recorded, request.loss, f"data[{index}]")
        for index, (datum, provenance) in enumerate(zip(request.data, provenances, strict=True))
    )
    return replace(request, data=data)


def _fill_datum(
    datum: Datum, provenance: Provenance, recorded: Mapping[str, SampledLogprobs], loss: str, where: str
) -> Datum:
    length = datum.tokens.size

    # Check the request.
    require(
        len(provenance.loss_inputs) > 0,
        f"{where}.loss_fn_input_spans: missing; {loss} needs to know which tokens were sampled",
    )
    require(
        "sampled" not in datum.loss_inputs,
        f"{where}.loss_fn_inputs['sampled']: is set by the server, from loss_fn_input_spans",
    )
    if provenance.model_input:
        _check_tiling(provenance.model_input, recorded, length, f"{where}.model_input_spans")
    _check_tiling(provenance.loss_inputs, recorded, length, f"{where}.loss_fn_input_spans")

    # Add the recorded values.
    logprobs, sampled = _make_recorded_arrays(provenance.loss_inputs, recorded, length)
    _check_advantages(datum, sampled, where)
    return replace(datum, loss_inputs={**datum.loss_inputs, "logprobs": logprobs, "sampled": sampled})


def _check_tiling(spans: Sequence[Span], recorded: Mapping[str, SampledLogprobs], length: int, where: str) -> None:
    covered = 0
    for index, span in enumerate(spans):
        _check_span(span, recorded.get(span.sequence_id), f"{where}[{index}]")
        covered += span.length
        require(covered <= length, f"{where}[{index}]: {span} goes beyond the {length} positions of the datum")
    require(covered == length, f"{where}: cover {covered} of the {length} positions of the datum")


def _check_span(span: Span, recorded: SampledLogprobs | None, where: str) -> None:
    require(span.source is not None, f"{where}: names neither prompt_tokens nor sampled_tokens")
    if recorded is None:
        raise UserError(
            f"{where}: no logprobs are recorded for sequence_id {quote_value(span.sequence_id)}; sample with "
            "record_stability_info, and train within a day: records expire a day after sampling or their last use"
        )
    size = recorded.prompt_length if span.source == "prompt_tokens" else recorded.logprobs.size
    require(0 <= span.offset <= span.offset + span.length <= size, f"{where}: {span} is out of range, there are {size}")


def _make_recorded_arrays(
    spans: Sequence[Span], recorded: Mapping[str, SampledLogprobs], length: int
) -> tuple[Float32Array, Float32Array]:
    """Return two float32 arrays [T]: the recorded logprobs, and the mask of sampled tokens.

    Both are 0 where no token was sampled.
    """
    logprobs, sampled = np.zeros(length, np.float32), np.zeros(length, np.float32)
    start = 0
    for span in spans:
        if span.source == "sampled_tokens":
            sequence_logprobs = recorded[span.sequence_id].logprobs
            logprobs[start : start + span.length] = sequence_logprobs[span.offset : span.offset + span.length]
            sampled[start : start + span.length] = 1.0
        start += span.length
    return logprobs, sampled


def _check_advantages(datum: Datum, sampled: Float32Array, where: str) -> None:
    """Raise UserError for advantages at positions that the loss ignores.

    The engine checks their shape.
    """
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


def _read_span(span: wire_pb2.ProvenanceSpan | schemas.ProvenanceSpan) -> Span:
    source = span.WhichOneof("span") if isinstance(span, wire_pb2.ProvenanceSpan) else span.source
    run: wire_pb2.TokenRun | schemas.TokenRun | None = getattr(span, source) if source else None
    if run is None:
        return Span(None, "", 0, 0)
    return Span(source, check_text(run.sequence_id, "sequence_id"), run.offset, run.length)
