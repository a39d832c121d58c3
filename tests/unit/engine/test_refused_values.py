"""Values that the database refuses do not end the engine."""

from skyrl_tx.contract.errors import ServerError
from skyrl_tx.contract.requests import Rejected, SampledSpan
from skyrl_tx.contract.results import Failure, ForwardBackwardOutput, OptimStepOutput
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step

ZERO = "a\0b"
"""PostgreSQL refuses it, and an older release may have stored it in the body of a request."""


class _Failing(FakeBackend):
    """Fails passes with a message that was not escaped."""

    def begin_pass(self, batch, *, backward):
        error = ServerError("")
        error.message = ZERO
        raise error


def test_refused_text_in_a_rejected_request_is_escaped(harness: EngineHarness):
    model_id, _ = harness.create()
    harness.submit(Rejected(kind="model_pass", message=ZERO * 10_000, backward=True), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    harness.run(step)
    failure = harness.result(step)
    assert isinstance(failure, Failure) and "a\\x00b" in failure.message and len(failure.message) < 3000


def test_pass_is_committed_without_rows_that_are_refused(harness: EngineHarness):
    model_id, _ = harness.create()
    span = SampledSpan(datum=0, first=0, length=2, sequence_id=ZERO)
    passed = harness.submit(forward_backward(sampled=(span,)), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    harness.run(passed, step)
    assert isinstance(harness.result(passed), ForwardBackwardOutput)
    assert isinstance(harness.result(step), OptimStepOutput)


def test_failure_whose_text_is_refused_becomes_a_plain_one(harness: EngineHarness):
    model_id, created = harness.create()
    harness.run(created)
    passed = harness.submit(forward_backward(), model_id=model_id, seq_id=1)
    step = harness.submit(optim_step(), model_id=model_id, seq_id=2)
    harness.run(passed, step, backend=_Failing("tiny", harness.config))
    expected = "the database refused to store the reason" if harness.settings.database_url else ZERO
    assert expected in harness.result(passed).message
    assert "the gradient is incomplete" in harness.result(step).message
