"""Provenance spans: values filled from recorded samples, and errors that name the span."""

from typing import Any

import numpy as np
import pytest
from msgspec import UNSET

from skyrl_tx.contract import codec
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.requests import Datum, ModelPass, SampledSpan
from skyrl_tx.server.routes import training
from skyrl_tx.server.schemas import training as schemas
from skyrl_tx.server.submission.provenance import Provenance, Span, fill_recorded, find_sampled_spans, read_provenance
from skyrl_tx.server.submission.submission import Submission
from skyrl_tx.store.recorded_logprobs import SampledLogprobs

RECORDED = {
    "first": SampledLogprobs(2, np.array([-0.1, -0.2, -0.3], np.float32)),
    "second": SampledLogprobs(7, np.array([-0.4, -0.5], np.float32)),
}


def prompt(sequence_id: str, offset: int, length: int) -> Span:
    return Span("prompt_tokens", sequence_id, offset, length)


def make_sampled_span(sequence_id: str, offset: int, length: int) -> Span:
    return Span("sampled_tokens", sequence_id, offset, length)


# Two turns: 2 prompt tokens, 3 sampled, 2 from the environment, 2 sampled. Targets are shifted by one.
INPUT = (
    prompt("first", 0, 2),
    make_sampled_span("first", 0, 3),
    prompt("second", 5, 2),
    make_sampled_span("second", 0, 1),
)
TARGETS = (
    prompt("first", 1, 1),
    make_sampled_span("first", 0, 3),
    prompt("second", 5, 2),
    make_sampled_span("second", 0, 2),
)


def one_pass(length: int = 8, **loss_inputs: Any) -> ModelPass:
    arrays = {name: np.array(values, np.float32) for name, values in loss_inputs.items()}
    datum = Datum(tokens=np.arange(length, dtype=np.int32), loss_inputs=arrays)
    return ModelPass(data=(datum,), loss="stable_reinforce", loss_config={}, backward=True)


def test_spans_of_several_sequences_fill_a_datum_in_order() -> None:
    sent = one_pass(logprobs=[9.0] * 8, advantages=[0, 1, 1, 1, 0, 0, 2, 2])
    (datum,) = fill_recorded(sent, [Provenance(INPUT, TARGETS)], RECORDED).data
    assert datum.loss_inputs["sampled"].tolist() == [0, 1, 1, 1, 0, 0, 1, 1]
    expected = np.array([0, -0.1, -0.2, -0.3, 0, 0, -0.4, -0.5], np.float32)
    np.testing.assert_array_equal(datum.loss_inputs["logprobs"], expected)
    assert sent.data[0].loss_inputs["logprobs"][0] == 9.0


def test_empty_spans_have_no_effect() -> None:
    targets = (prompt("first", 1, 0), make_sampled_span("first", 1, 2), make_sampled_span("second", 2, 0))
    (datum,) = fill_recorded(one_pass(2), [Provenance((), targets)], RECORDED).data
    assert datum.loss_inputs["logprobs"].tolist() == RECORDED["first"].logprobs[1:].tolist()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({"loss_inputs": ()}, r"data\[0\].loss_fn_input_spans: missing"),
        (
            {"loss_inputs": (*TARGETS[:3], make_sampled_span("third", 0, 2))},
            r"data\[0\].loss_fn_input_spans\[3\]: no logprobs are recorded for sequence_id 'third'",
        ),
        (
            {"model_input": (prompt("x", 0, 8),)},
            r"data\[0\].model_input_spans\[0\]: no logprobs are recorded for .*'x'",
        ),
        (
            {"loss_inputs": (*TARGETS[:3], make_sampled_span("second", 1, 2))},
            r"input_spans\[3\]: sampled_tokens \[1, 3\) of sequence_id 'second' is out of range, there are 2",
        ),
        (
            {"loss_inputs": (prompt("first", 2, 1), *TARGETS[1:])},
            r"input_spans\[0\]: prompt_tokens \[2, 3\) of sequence_id 'first' is out of range, there are 2",
        ),
        ({"loss_inputs": (make_sampled_span("first", -1, 1), *TARGETS[1:])}, r"input_spans\[0\]: .* out of range"),
        ({"loss_inputs": (make_sampled_span("first", 2, -1), *TARGETS[1:])}, r"input_spans\[0\]: .* out of range"),
        ({"loss_inputs": TARGETS[:3]}, r"data\[0\].loss_fn_input_spans: cover 6 of the 8 positions"),
        (
            {"loss_inputs": (*TARGETS, make_sampled_span("first", 0, 1))},
            r"input_spans\[4\]: .* goes beyond the 8 positions",
        ),
        ({"model_input": INPUT[:2]}, r"data\[0\].model_input_spans: cover 5 of the 8 positions"),
        ({"loss_inputs": (Span(None, "", 0, 0),)}, r"input_spans\[0\]: names neither prompt_tokens nor sampled_tokens"),
    ],
)
def test_wrong_span_is_named(spans: dict[str, Any], message: str) -> None:
    provenance = Provenance(**{"model_input": INPUT, "loss_inputs": TARGETS} | spans)
    with pytest.raises(UserError, match=message):
        fill_recorded(one_pass(), [provenance], RECORDED)


def test_advantage_at_unsampled_position_is_refused() -> None:
    sent = one_pass(advantages=[0, 1, 1, 1, 0, -3, 2, 2])
    with pytest.raises(UserError, match=r"data\[0\].loss_fn_inputs\['advantages'\]\[5\] -3.0: must be 0"):
        fill_recorded(sent, [Provenance(INPUT, TARGETS)], RECORDED)


def test_client_may_not_send_the_sampled_mask() -> None:
    with pytest.raises(UserError, match=r"data\[0\].loss_fn_inputs\['sampled'\]"):
        fill_recorded(one_pass(sampled=[1] * 8), [Provenance(INPUT, TARGETS)], RECORDED)


def test_sampled_spans_of_datums_that_fit() -> None:
    data = [
        datum_with({"prompt_tokens": run("a", 1)}, {"sampled_tokens": run("a", 3)}, {"sampled_tokens": run("b", 2)}),
        datum_with({"sampled_tokens": run("c", 5)}),
        datum_with(),
        datum_with({"sampled_tokens": run("d" * 65, 1)}, {"sampled_tokens": run("e", 0)}, run("f", 1)),
    ]
    assert list(find_sampled_spans(data, [6, 4, 4, 4])) == [
        SampledSpan(datum=0, first=1, length=3, sequence_id="a"),
        SampledSpan(datum=0, first=4, length=2, sequence_id="b"),
    ], "the second datum has four positions, and the last one names no span of its sizes"


@pytest.mark.parametrize("loss", ["importance_sampling", "stable_reinforce"])
def test_pass_says_what_was_sampled_and_its_digest_is_that_of_earlier_releases(loss: str) -> None:
    spans = {"loss_fn_input_spans": [{"sampled_tokens": run("a", 3)}]}

    def make_submission(**more: Any) -> Submission:
        inputs_of_loss = {"target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}}
        sent = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}, **more}
        value = {"data": [{**sent, "loss_fn_inputs": inputs_of_loss}], "loss_fn": loss}
        return training.pass_from_json(schemas.PassInput.model_validate(value), 2**20, backward=True)

    found, plain = make_submission(**spans), make_submission()
    assert isinstance(found.request, ModelPass) and isinstance(plain.request, ModelPass)
    assert found.request.sampled == (SampledSpan(datum=0, first=0, length=3, sequence_id="a"),)
    decoded = codec.decode(found.body)
    assert isinstance(decoded, ModelPass) and decoded.sampled == found.request.sampled
    assert plain.request.sampled is UNSET and b"sampled" not in plain.body
    assert (found.digest == plain.digest) == (loss == "importance_sampling"), "spans are part of stable_reinforce"


def run(sequence_id: str, length: int) -> dict[str, Any]:
    return {"sequence_id": sequence_id, "offset": 0, "length": length}


def datum_with(*spans: dict[str, Any]) -> schemas.WireDatum:
    return schemas.WireDatum.model_validate({"model_input": {"chunks": []}, "loss_fn_input_spans": list(spans)})


def test_json_spans_have_the_form_of_protobuf() -> None:
    run = {"sequence_id": "first", "offset": 1, "length": 2}
    datum = schemas.WireDatum.model_validate(
        {
            "model_input": {"chunks": []},
            "loss_fn_input_spans": [{"prompt_tokens": run}, {"sampled_tokens": run}, run],
        }
    )
    assert read_provenance(datum) == Provenance(
        (), (prompt("first", 1, 2), make_sampled_span("first", 1, 2), Span(None, "", 0, 0))
    )
