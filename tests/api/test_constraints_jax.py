"""Constrained decoding with JAX, and sampling controls in an engine that is restarted."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.testing.fake.backend import FakeBackend
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.api.test_chat import COMPLETIONS
from tests.api.test_constraints import SCHEMA
from tests.support.live_api import live_api
from tests.support.live_engine import live_engine
from tests.support.live_stack import PUBLIC_NAME, live_stack, small_backend

PATTERN = "[ab]{12}-[0-9]{5}"
CONTROLS: dict[str, dict[str, Any]] = {
    "constraint": {"structured_outputs": {"regex": PATTERN}},
    "penalties": {
        **{"presence_penalty": 0.5, "frequency_penalty": 1.5, "repetition_penalty": 1.7},
        **{"logit_bias": {"7": 2.5}, "min_tokens": 40, "min_p": 0.001},
    },
}
BODY: dict[str, Any] = {"model": PUBLIC_NAME, "prompt": "Hello", "seed": 3, "n": 2, "max_tokens": 60}


@pytest.mark.slow
def test_jax_draws_texts_that_match_and_leaves_other_samples_alone(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "json": {"structured_outputs": {"json": SCHEMA}, "max_tokens": 90},
        "regex": {"structured_outputs": {"regex": PATTERN}, "temperature": 0.7, "top_p": 0.9},
        "greedy": {"structured_outputs": {"choice": ["yes", "no"]}, "temperature": 0},
        "free": {},
    }
    with live_stack("jax", tmp_path) as stack, ThreadPoolExecutor() as pool:

        def complete(body: dict[str, Any]) -> list[str]:
            response = stack.server.client.post(COMPLETIONS, json=BODY | body)
            assert response.status_code == 200, response.text
            return [choice["text"] for choice in response.json()["choices"]]

        alone = {name: complete(body) for name, body in bodies.items()}
        together = dict(zip(bodies, pool.map(complete, bodies.values()), strict=True))

    assert together == alone, "a sample does not depend on samples that decode beside it"
    for text in alone["json"]:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert all(re.fullmatch(PATTERN, text) for text in alone["regex"])
    assert set(alone["greedy"]) <= {"yes", "no"}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_restarted_engine_draws_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tokenizer = str(write_tiny_model(tmp_path / "tokenizer"))
    common: dict[str, Any] = {"data_dir": tmp_path / "data", "base_model": "fake", "served_model_name": PUBLIC_NAME}
    common["data_dir"].mkdir(mode=0o700)
    has_drawn = threading.Event()

    def make_backend(delay_s: float = 0.0) -> FakeBackend:
        _, backend = small_backend("fake", tmp_path, delay_s, constrains=True)
        assert isinstance(backend, FakeBackend)
        return backend

    with live_api(ApiSettings(port=0, tokenizer_id=tokenizer, **common)) as server, ThreadPoolExecutor() as pool:

        def complete(controls: dict[str, Any]) -> list[str]:
            body = BODY | controls
            response = server.client.post(COMPLETIONS, json=body, timeout=120)
            while response.status_code == 503:  # the engine is starting
                time.sleep(0.1)
                response = server.client.post(COMPLETIONS, json=body, timeout=120)
            assert response.status_code == 200, response.text
            return [choice["text"] for choice in response.json()["choices"]]

        with live_engine(EngineSettings(**common), make_backend()):
            expected = pool.submit(complete, CONTROLS[name]).result()
            assert pool.submit(complete, {}).result() != expected

        slow = make_backend(0.05)
        step, num_steps = slow.step_sample, 0

        def count_steps() -> Any:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 2:  # the first step has drawn tokens
                has_drawn.set()
            return step()

        monkeypatch.setattr(slow, "step_sample", count_steps)
        with live_engine(EngineSettings(**common), slow):
            interrupted = pool.submit(complete, CONTROLS[name])
            assert has_drawn.wait(60)
        assert not interrupted.done()
        with live_engine(EngineSettings(**common), make_backend()):
            assert interrupted.result() == expected
    # The token that ends a sample of the fake model is "!" in this tokenizer.
    assert name != "constraint" or all(re.fullmatch(PATTERN, text.removesuffix("!")) for text in expected)
