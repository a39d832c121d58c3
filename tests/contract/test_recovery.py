"""An engine that replaces an engine with a lost JAX device continues bit-equal."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.custom_loss import CustomLoss, CustomLossInput, Operation
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.contract.results import Metrics
from tests.support.engine_harness import EngineHarness, forward_backward, optim_step, sample
from tests.support.tiny import TINY_CONFIG, tiny_directory

NUM_STEPS = 4
LOSS = CustomLoss(
    name="surprise",
    inputs=(CustomLossInput(name="logprobs", rank=1),),
    constants=(0.5,),
    operations=(
        Operation(name="mul", values=(0, 1)),
        Operation(name="exp", values=(2,)),
        Operation(name="mean", values=(3,), options=(0, 0)),
    ),
    loss=4,
    metrics={"custom/surprise:mean": 4},
)


def test_results_are_bit_equal_after_device_loss(tmp_path):
    model = str(tiny_directory())

    class FailingBackend(JaxBackend):
        calls_left = 6

        def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
            metrics = super().optim_step(model_id, params)
            self.lose_device()
            return metrics

        def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
            self.lose_device()
            return super().capture(model_id, parts)

        def lose_device(self) -> None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise BackendLost("unplugged")

    def train(name):
        harness = EngineHarness(tmp_path / name, snapshot_interval_requests=3)
        names = []
        for model_name in ("a", "b"):
            model_id, _ = harness.create(model_name)
            for step in range(NUM_STEPS):
                for n in range(2):
                    request = forward_backward(10 * step + n)
                    if n == 1:  # its loss was never stored or was deleted, so the request alone must replay it
                        request = replace(request, loss="custom", loss_config={"loss_id": "gone"}, custom=LOSS)
                    names.append(harness.submit(request, model_id=model_id, seq_id=3 * step + n + 1))
                names.append(harness.submit(optim_step(0.01), model_id=model_id, seq_id=3 * step + 3))

        names.append(harness.submit(sample(temperature=1.0)))
        return harness, names

    def collect_results(harness, names):
        harness.run(*names, backend=JaxBackend(model, TINY_CONFIG))
        results = [harness.result(name) for name in names]
        harness.close()
        return [
            (dict(result.metrics), [array.tobytes() for array in getattr(result, "logprobs", ())])
            if hasattr(result, "metrics")
            else [sequence.tokens.tolist() for sequence in result.sequences]
            for result in results
        ]

    undisturbed = collect_results(*train("undisturbed"))
    harness, names = train("disturbed")
    with pytest.raises(BackendLost):
        harness.run(*names, backend=FailingBackend(model, TINY_CONFIG))
    assert collect_results(harness, names) == undisturbed
