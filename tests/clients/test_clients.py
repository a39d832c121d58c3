"""Third-party clients, each in its own environment, against the OpenAI and Anthropic endpoints on JAX."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from tests.support.client_environments import (
    CHAT_CLIENTS,
    INSPECT,
    LITELLM,
    LM_EVAL,
    ClientEnvironment,
    PreparedEnvironment,
)
from tests.support.live_stack import PUBLIC_NAME, LiveStack, live_stack
from tests.support.tiny_tokenizer import PACKAGED

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
Prepare = Callable[[ClientEnvironment], PreparedEnvironment]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack("jax", tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def get_expected_text(stack: LiveStack) -> str:
    body = {
        "model": PUBLIC_NAME,
        "messages": [{"role": "user", "content": "How many clips?"}],
        "max_tokens": 20,
        "seed": 5,
    }
    return stack.server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("environment", "script"),
    [
        (CHAT_CLIENTS, "openai_client.py"),
        (CHAT_CLIENTS, "anthropic_client.py"),
        (LITELLM, "litellm_client.py"),
        (INSPECT, "inspect_client.py"),
    ],
    ids=["openai", "anthropic", "litellm", "inspect-ai"],
)
def test_client_gets_the_same_text(
    stack: LiveStack, client_environment: Prepare, environment: ClientEnvironment, script: str
) -> None:
    done = client_environment(environment).run(HERE / script, stack.url, PUBLIC_NAME, timeout_s=240.0)
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert printed["text"] == get_expected_text(stack)


def test_replies_have_the_form_that_clients_ask_for(tmp_path: Path, client_environment: Prepare) -> None:
    with live_stack("jax", tmp_path, tool_parser="hermes") as stack:
        client_environment(CHAT_CLIENTS).run(HERE / "constraints_client.py", stack.url, PUBLIC_NAME, timeout_s=600.0)


def test_lm_eval_gets_the_log_likelihoods_of_compute_logprobs(stack: LiveStack, client_environment: Prepare) -> None:
    pairs = [["Natalia sold", " 48 clips"], ["How many clips", " did she sell?"], ["2 + 2 =", " 4"]]
    done = client_environment(LM_EVAL).run(
        HERE / "lm_eval_client.py", stack.url, PUBLIC_NAME, PACKAGED, timeout_s=240.0, stdin=json.dumps(pairs)
    )
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])

    with tinker.ServiceClient(base_url=stack.url, api_key="tml-local") as service:
        client = service.create_sampling_client(base_model=PUBLIC_NAME).result()
        for (found, is_greedy), tokens, context in zip(
            printed["scored"], printed["tokens"], printed["contexts"], strict=True
        ):
            logprobs = client.compute_logprobs(tinker.ModelInput.from_ints(tokens)).result()
            np.testing.assert_allclose(
                found, sum(value or 0.0 for value in logprobs[len(context) :]), atol=1e-5, rtol=0
            )
            assert is_greedy is False
    assert printed["generated"][0] and printed["chat"][0]
