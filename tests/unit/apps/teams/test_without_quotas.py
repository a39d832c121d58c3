"""Without quotas, a request costs one admission decision and no other quota call or SQL statement."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sqlalchemy import Engine, event

from skyrl_tx.apps.teams import admission, quotas
from tests.support.live_stack import PUBLIC_NAME, live_stack

MODULES = {module.__file__ for module in (admission, quotas)}
REQUESTS = 3
TOKENS = list(range(1, 33))
DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": TOKENS[1:], "dtype": "int64", "shape": [31]},
        "weights": {"data": [1.0] * 31, "dtype": "float32", "shape": [31]},
    },
}


ONCE_A_SECOND = {admission.QuotaAdmission.refresh.__code__, admission.QuotaAdmission.list_pauses.__code__}
"""Functions that run regardless of requests: the check for changed quotas and the report of waiting owners."""


def runs_once_a_second(frame: FrameType | None) -> bool:
    """Return whether a function runs once per second rather than once per request."""
    while frame is not None:
        if frame.f_code in ONCE_A_SECOND:
            return True
        frame = frame.f_back
    return False


class Recorder:
    """Counts calls of quota functions on all threads, and SQL statements about quotas."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls: Counter[str] = Counter()
        self.statements: list[str] = []

    def __call__(self, frame: FrameType, kind: str, _: object) -> None:
        if self.is_on and kind == "call" and frame.f_code.co_filename in MODULES and not runs_once_a_second(frame):
            self.calls[frame.f_code.co_name] += 1

    def on_statement(self, _connection: Any, _cursor: Any, statement: str, *_: object) -> None:
        if self.is_on and "quotas" in statement and not runs_once_a_second(sys._getframe()):
            self.statements.append(statement)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record calls on all threads that start inside this context."""
    recorder = Recorder()
    threading.setprofile(recorder)
    event.listen(Engine, "before_cursor_execute", recorder.on_statement)
    try:
        yield recorder
    finally:
        threading.setprofile(None)
        event.remove(Engine, "before_cursor_execute", recorder.on_statement)


def test_a_forward_backward_and_a_sample_take_one_decision_each(tmp_path: Path) -> None:
    with recording() as recorder, live_stack("fake", tmp_path) as stack:
        server = stack.server
        model_id = server.model()
        body = {"session_id": server.session(), "sampling_session_seq_id": 0, "base_model": PUBLIC_NAME}
        sampler = server.post("create_sampling_session", **body).json()["sampling_session_id"]

        for seq_id in range(1, REQUESTS + 2):
            recorder.is_on = seq_id > 1  # the model exists before the first result
            answer = server.post(
                "forward_backward",
                model_id=model_id,
                seq_id=seq_id,
                forward_backward_input={"data": [DATUM], "loss_fn": "cross_entropy"},
            )
            assert "loss_fn_outputs" in server.result(answer)
            answer = server.post(
                "asample",
                sampling_session_id=sampler,
                seq_id=seq_id,
                prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
                num_samples=2,
                sampling_params={"max_tokens": 4, "seed": 1},
            )
            assert len(server.result(answer)["sequences"]) == 2

        recorder.is_on = False

    assert recorder.calls == {"may_start": 2 * REQUESTS}
    assert recorder.statements == []
