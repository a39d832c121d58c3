"""On the JAX backend too, an engine that loses its device is followed by one that goes on bit-equal."""

from collections.abc import Collection

import pytest

from skyrl_tx.backends.jax import BACKEND
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import Snapshot, StatePart
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import OptimizerParams
from skyrl_tx.contract.results import Metrics
from skyrl_tx.testing.engine_house import House, forward_backward, optim_step, sample
from skyrl_tx.testing.tiny_models import write_model

NUM_STEPS = 4


def test_losing_the_device_changes_no_bit(tmp_path):
    model = str(write_model(tmp_path / "model", vocab_size=128, num_layers=1, max_context_length=64))
    config = JaxConfig(
        compile_cache_dir=None,
        max_lora_adapters=2,
        max_lora_rank=2,
        max_sampler_adapters=1,
        micro_batch_tokens=64,
        sample_slots=2,
        max_sample_tokens=128,
    )

    class Perishable(BACKEND.load()):
        calls_left = 6

        def optim_step(self, model_id: ModelId, params: OptimizerParams) -> Metrics:
            metrics = super().optim_step(model_id, params)
            self.lose_sometimes()
            return metrics

        def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
            self.lose_sometimes()
            return super().capture(model_id, parts)

        def lose_sometimes(self) -> None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise BackendLost("unplugged")

    def train(name):
        house = House(tmp_path / name, snapshot_effects=3)
        names = []
        for model_name in ("a", "b"):
            model_id, _ = house.create(model_name)
            for step in range(NUM_STEPS):
                for n in range(2):
                    request = forward_backward(10 * step + n)
                    names.append(house.submit(request, model_id=model_id, seq_id=3 * step + n + 1))
                names.append(house.submit(optim_step(0.01), model_id=model_id, seq_id=3 * step + 3))
        names.append(house.submit(sample(temperature=1.0)))
        return house, names

    def shown(house, names):
        house.run(*names, backend=BACKEND.load()(model, config))
        results = [house.result(name) for name in names]
        house.close()
        return [
            (dict(result.metrics), [array.tobytes() for array in getattr(result, "logprobs", ())])
            if hasattr(result, "metrics")
            else [sequence.tokens.tolist() for sequence in result.sequences]
            for result in results
        ]

    undisturbed = shown(*train("undisturbed"))
    house, names = train("disturbed")
    with pytest.raises(BackendLost):
        house.run(*names, backend=Perishable(model, config))
    assert shown(house, names) == undisturbed
