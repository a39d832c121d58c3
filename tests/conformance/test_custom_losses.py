"""Every operation of custom losses has torch's value and gradient, also in padded arrays."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx.contract import custom_loss as contract
from skyrl_tx.contract.custom_loss import CustomLoss
from skyrl_tx.losses import custom
from skyrl_tx.server.schemas.training import CreateCustomLossRequest
from skyrl_tx.server.submission.loss_graph.compile import compile_loss
from tests.support.client_environments import SDKS, ClientEnvironment, PreparedEnvironment
from tests.support.fast_jit import fast_jit

PADDED_SIZES = 16, 8
"""Positions and targets after padding."""
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(scope="module")
def reference(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> dict[str, Any]:
    script = Path(__file__).parent / "reference" / "custom_loss_reference.py"
    return json.loads(client_environment(SDKS["0.38.0"]).run(script).stdout)


def compile_upload(described: dict[str, Any]) -> CustomLoss:
    return compile_loss(CreateCustomLossRequest.model_validate(described["upload"]))


def pad(array: np.ndarray) -> np.ndarray:
    if array.ndim == 0:
        return array
    return np.pad(array, [(0, padded - size) for padded, size in zip(PADDED_SIZES, array.shape, strict=False)], "edge")


def count_targets(inputs: list[np.ndarray]) -> int:
    return max(array.shape[1] if array.ndim == 2 else 1 for array in inputs)


def test_losses_have_torchs_values_and_gradients(reference: dict[str, Any]) -> None:
    assert len(reference) > 50

    for name, described in reference.items():
        loss = compile_upload(described)
        function = fast_jit(partial(custom.value_and_gradient, loss))
        constants = jnp.asarray(loss.constants, jnp.float32)

        for datum in described["data"]:
            inputs = [np.array(values, np.float32) for values in datum["inputs"]]
            datum_sizes = {"T": jnp.int32(len(inputs[0])), "K": jnp.int32(count_targets(inputs))}
            value, metrics, gradient = function([pad(array) for array in inputs], constants, datum_sizes)
            region = tuple(map(slice, inputs[0].shape))
            np.testing.assert_allclose(value, datum["loss"], **TOLERANCE, err_msg=name)
            scale = max(1.0, float(np.abs(datum["gradient"]).max()))
            np.testing.assert_allclose(
                np.asarray(gradient)[region] / scale, np.array(datum["gradient"]) / scale, **TOLERANCE, err_msg=name
            )
            assert np.count_nonzero(gradient) == np.count_nonzero(gradient[region]), f"{name}: padding has a gradient"
            assert metrics.keys() == datum["metrics"].keys()
            for key, metric in metrics.items():
                np.testing.assert_allclose(metric, datum["metrics"][key], **TOLERANCE, err_msg=name)


def make_node(op: str, name: str, target: str, *args: object) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": {}}


def test_an_index_out_of_range_gives_nan_for_its_position_only() -> None:
    nodes = [
        *(make_node("placeholder", name, name) for name in ("logprobs", "index")),
        make_node("call_function", "column", "torch.unsqueeze", {"ref": "index"}, 1),
        make_node("call_function", "picked", "torch.gather", {"ref": "logprobs"}, 1, {"ref": "column"}),
        make_node("call_function", "unknown", "torch.isnan", {"ref": "picked"}),
        make_node("call_function", "kept", "torch.where", {"ref": "unknown"}, 100.0, {"ref": "picked"}),
        make_node("call_function", "total", "torch.sum", {"ref": "kept"}),
        make_node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}),
    ]
    inputs = [{"name": "logprobs", "rank": 2}, {"name": "index", "rank": 1}]
    upload = {"session_id": "s", "custom_loss_seq_id": 0, "name": "loss", "inputs": inputs}
    loss = compile_upload({"upload": upload | {"graph": {"format": 1, "nodes": nodes}}})

    logprobs, index = jnp.array([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]]), jnp.array([1.0, 2.0, -1.0])
    sizes = {"T": jnp.int32(3), "K": jnp.int32(2)}
    value, _, gradient = custom.value_and_gradient(loss, [logprobs, index], jnp.array(loss.constants), sizes)
    assert value == 198.0 and gradient.tolist() == [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


def test_a_datum_with_fewer_elements_than_a_loss_reads_is_counted() -> None:
    """The sizes that the engine checks before the loss runs."""
    nodes = [
        make_node("placeholder", "logprobs", "logprobs"),
        make_node("call_method", "largest", "topk", {"ref": "logprobs"}, 3, 0),
        make_node("call_function", "indices", "getattr", {"ref": "largest"}, "indices"),
        make_node("call_method", "picked", "gather", {"ref": "logprobs"}, 0, {"ref": "indices"}),
        make_node("call_method", "total", "sum", {"ref": "picked"}),
        make_node("output", "output", "output", {"tuple": [{"ref": "total"}, {"dict": {}}]}),
    ]
    upload = {"session_id": "s", "custom_loss_seq_id": 0, "name": "loss", "inputs": [{"name": "logprobs", "rank": 2}]}
    needs = compile_upload({"upload": upload | {"graph": {"format": 1, "nodes": nodes}}}).needs()
    assert (needs.positions, needs.targets) == (3, 1)
    # The multiples of 1, T, K and T K: six arrays [T, K] and three [T, K, 3], six [3, K], and three scalars
    assert needs.elements == (3, 0, 18, 15)


def test_the_reference_uses_every_operation(reference: dict[str, Any]) -> None:
    operations = {
        operation.name for described in reference.values() for operation in compile_upload(described).operations
    }
    assert operations == contract.OPERATIONS
