"""Passes with a custom loss: rejected requests, the batch passed to the backend, and the result metrics."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.custom_loss import CustomLoss, CustomLossInput, Operation
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Datum, ModelPass
from skyrl_tx.contract.results import PassResult
from skyrl_tx.engine import prepare, request_checks
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend

OFFERED: Capabilities = replace(
    FakeBackend("fake", FakeConfig(vocab_size=64, max_context_length=512)).start(), offers_custom_losses=True
)
LOSS = CustomLoss(
    name="gain",
    inputs=tuple(CustomLossInput(name=name, rank=rank) for name, rank in (("logprobs", 1), ("a", 1), ("scale", 0))),
    constants=(),
    operations=(
        Operation(name="mul", values=(0, 1)),
        Operation(name="slice", values=(3,), options=(0, 1, 1)),
        Operation(name="sum", values=(4,), options=(0, 0)),
        Operation(name="mul", values=(5, 2)),
    ),
    loss=6,
)
WIDE = replace(LOSS, inputs=(CustomLossInput(name="logprobs", rank=2), *LOSS.inputs[1:]), operations=(), loss=2)


def datum(length: int = 4, **changes: Any) -> Datum:
    inputs = {
        "target_tokens": np.ones(length, np.int64),
        "a": np.full(length, 2, np.int64),
        "scale": np.array([0.5], np.float32),
    }
    inputs = {name: array for name, array in {**inputs, **changes}.items() if array is not None}
    return Datum(tokens=np.ones(length, np.int32), loss_inputs=inputs)


def model_pass(*data: Datum, loss: CustomLoss = LOSS) -> ModelPass:
    return ModelPass(data=data, loss="custom", loss_config={"loss_id": "s:loss:0"}, backward=True, custom=loss)


def test_the_backend_gets_the_loss_and_float32_inputs_of_its_ranks() -> None:
    request = model_pass(datum(), datum(7))
    request_checks.check_pass(request, OFFERED)
    first, second = prepare.make_pass_examples(RequestId("r"), ModelId("m"), request, OFFERED)
    assert first.custom is LOSS and first.loss == "custom" and second.tokens.size == 7
    assert {name: (array.shape, array.dtype.name) for name, array in first.loss_inputs.items()} == {
        "target_tokens": ((4,), "int32"),
        "a": ((4,), "float32"),
        "scale": ((), "float32"),
    }


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ((), "data is empty"),
        ((datum(), datum(a=None)), "data[1].loss_fn_inputs['a'] is missing: loss 'gain' reads it"),
        ((datum(target_tokens=None),), "loss_fn_inputs['target_tokens'] is missing"),
        ((datum(target_tokens=np.full(4, 64)),), "token 64 is outside the vocabulary"),
        ((datum(target_tokens=np.ones((4, 2), np.int64)),), "declares 'logprobs' with 1 dimensions; it has 2"),
        ((datum(a=np.ones(5, np.float32)),), "data[0].loss_fn_inputs['a'] has shape [5]; model_input has 4 tokens"),
        ((datum(a=np.ones((4, 2), np.float32)),), "declares 'a' with 1 dimensions; it has 2"),
        ((datum(scale=np.ones(4, np.float32)),), "declares 'scale' with 0 dimensions; it has 1"),
        ((datum(a=np.full(4, 2**24 + 1)),), "contains an integer above 16777216"),
        ((datum(a=np.full(4, -(2**63))),), "contains an integer above 16777216"),
        ((datum(a=np.full(4, np.nan, np.float32)),), "contains nan; numbers must be finite"),
        ((datum(2),), "data[0] has 2 tokens; loss 'gain' needs at least 3"),
    ],
)
def test_data_that_do_not_fit_the_loss_are_refused(data: tuple[Datum, ...], text: str) -> None:
    with pytest.raises(UserError) as raised:
        request_checks.check_pass(model_pass(*data), OFFERED)
    assert text in raised.value.message


def test_a_loss_that_takes_too_much_memory_is_refused() -> None:
    chain = tuple(Operation(name="exp", values=(index + 2,)) for index in range(1, 1024))
    large = replace(WIDE, operations=(Operation(name="exp", values=(0,)), *chain))
    wide = datum(512, target_tokens=np.ones((512, 64), np.int64), a=np.ones(512), scale=np.ones(1))
    request_checks.check_pass(model_pass(wide, loss=replace(large, operations=large.operations[:1000])), OFFERED)
    with pytest.raises(UserError, match="for its 512 tokens; must be at most"):
        request_checks.check_pass(model_pass(wide, loss=replace(large, operations=large.operations * 3)), OFFERED)


def test_a_backend_without_custom_losses_refuses_them() -> None:
    with pytest.raises(UserError, match="loss_fn 'custom' is not one of"):
        request_checks.check_pass(model_pass(datum()), replace(OFFERED, offers_custom_losses=False))


def test_metrics_of_datums_are_summed_or_averaged() -> None:
    results = [
        PassResult(
            logprobs=np.zeros(2, np.float32), sums={"loss": loss}, metrics={"custom/a:sum": a, "custom/b:mean": b}
        )
        for loss, a, b in ((1.0, 2.0, 3.0), (2.0, 5.0, 4.0))
    ]
    metrics = prepare.combine_pass_results(results, 4).metrics
    assert (metrics["loss:sum"], metrics["custom/a:sum"], metrics["custom/b:mean"]) == (3.0, 7.0, 3.5)
