"""Unknown fields of the Tinker API: defaults of newer SDKs are accepted and logged once, values are refused."""

import logging
from typing import Any

import pytest

from skyrl_tx.contract.errors import UserError
from skyrl_tx.server.routes.training import datum_from_json
from skyrl_tx.server.schemas.training import AsampleRequest, WireDatum
from skyrl_tx.server.submission.tensors import DenseBudget
from skyrl_tx.server.submission.validation import UnknownFields

SAMPLE: dict[str, Any] = {"prompt": {"chunks": []}, "sampling_params": {"max_tokens": 1}}


@pytest.mark.parametrize("value", [False, 0, 0.0, "", [], {}, None], ids=repr)
def test_default_of_a_newer_sdk_is_accepted_and_logged_once(value: object, caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    with caplog.at_level(logging.INFO):
        for version in ("0.38.0", "0.39.0"):
            fields.check(AsampleRequest.model_validate(SAMPLE | {"newer": value}), version)
    assert [record.getMessage() for record in caplog.records] == ["unknown field 'newer' of SDK '0.38.0' is ignored"]


@pytest.mark.parametrize("value", [True, 1, 0.5, "x", [0], {"a": None}], ids=repr)
def test_value_that_is_set_is_refused_by_name(value: object) -> None:
    params = SAMPLE["sampling_params"] | {"newer": value}
    with pytest.raises(UserError, match=r"^sampling_params\.newer "):
        UnknownFields().check(AsampleRequest.model_validate(SAMPLE | {"sampling_params": params}), "0.38.0")


@pytest.mark.parametrize("where", ["data[0].newer", "data[0].model_input.newer"])
def test_value_that_is_set_in_a_datum_is_refused_by_name(where: str) -> None:
    datum: dict[str, Any] = {"model_input": {"chunks": []}, "loss_fn_inputs": {}}
    (datum if where == "data[0].newer" else datum["model_input"])["newer"] = 2
    with pytest.raises(UserError, match="newer 2: this server does not know the field"):
        datum_from_json(WireDatum.model_validate(datum), DenseBudget(100), "data[0]")
