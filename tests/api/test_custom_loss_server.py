"""A custom loss on the server has the results and the gradient of the same loss in the client."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tinker

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract.ids import ModelId
from tests.support.client_environments import SDKS, ClientEnvironment, PreparedEnvironment
from tests.support.live_stack import LiveStack, live_stack


@pytest.fixture(scope="module")
def jax_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("jax", tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def gradient(stack: LiveStack, model_id: str) -> list[np.ndarray]:
    assert isinstance(stack.backend, JaxBackend)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(stack.backend._pool.get(ModelId(model_id)).gradient)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipped_ratio", "preference", "distillation"])
def test_server_and_client_agree(
    jax_stack: LiveStack, client_environment: Callable[[ClientEnvironment], PreparedEnvironment], name: str
) -> None:
    script = Path(__file__).parent / "custom_loss_upload.py"
    done = client_environment(SDKS["0.38.0"]).run(script, jax_stack.url, name)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss_id"].endswith(":loss:0")
    assert "pass the function itself to forward_backward_custom" in found["refused"]

    server, client = found["server"], found["client"]
    for one, other in zip(server["logprobs"], client["logprobs"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    names = {key for key in client["metrics"] if key.startswith("custom/")} | {"loss:sum"}
    assert len(names) > 1 and names <= server["metrics"].keys()

    for key in names:
        assert server["metrics"][key] == pytest.approx(client["metrics"][key], rel=1e-6, abs=1e-6), key
    own, expected = gradient(jax_stack, server["model_id"]), gradient(jax_stack, client["model_id"])
    largest = max(float(np.abs(array).max()) for array in expected)
    assert largest > 0
    for one, other in zip(own, expected, strict=True):
        np.testing.assert_allclose(one / largest, other / largest, atol=1e-6)


def test_only_a_backend_with_custom_losses_gets_them(stack: LiveStack, service: tinker.ServiceClient) -> None:
    is_jax = isinstance(stack.backend, JaxBackend)
    assert service.holder.get_client_config().custom_loss_server_side is is_jax
