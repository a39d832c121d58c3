"""A custom loss that runs in the client: the server sends logprobs and receives their gradients."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.client_environments import COOKBOOK, ClientEnvironment, PreparedEnvironment
from tests.support.live_stack import LiveStack


@pytest.mark.slow
def test_custom_loss_has_the_gradient_of_its_function(
    stack: LiveStack, client_environment: Callable[[ClientEnvironment], PreparedEnvironment]
) -> None:
    environment = client_environment(COOKBOOK)
    with stack.recorder.recording() as calls:
        done = environment.run(Path(__file__).parent / "custom_loss.py", stack.url)
    given = json.loads(done.stdout.splitlines()[-1])
    assert math.isclose(given["custom_norm"], 2 * given["norm"], rel_tol=1e-4)
    assert math.isclose(given["custom_metrics"]["loss:sum"], 2 * given["metrics"]["loss:sum"], rel_tol=1e-5)
    assert given["custom_metrics"]["seen"] == 1088.0
    step = [json.loads(call.body)["seq_id"] for call in calls if call.path == "optim_step"]
    assert step == [3, 5], "two chunks and a step; two forward, two backward, and a step"
