"""A trainer and a sampler as one backend: checks at the start."""

import json
import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from skyrl_tx.backends.composed import Agreement, ComposedBackend, ComposedConfig
from skyrl_tx.contract.backend import AbstractBackend, BackendSpec, Snapshot, StatePart
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.contract.state_files import CONFIG_FILE
from skyrl_tx.integrations.vllm import SAMPLER
from skyrl_tx.testing.fake import FakeConfig
from skyrl_tx.testing.fake.backend import FakeBackend
from tests.support.vllm_world import FAKE, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path, stack)


class _TiedUnembeddingTrainer(FakeBackend):
    """A trainer that names its unembedding adapters like the adapters of a tied unembedding."""

    def create_model(self, model_id: ModelId, spec: ModelSpec) -> None:
        super().create_model(model_id, spec)
        self._has_unembedding = spec.lora.train_unembed

    def capture(self, model_id: ModelId, parts: Collection[StatePart]) -> Snapshot:
        snapshot = super().capture(model_id, parts)
        return _RenamedSnapshot(snapshot) if self._has_unembedding else snapshot


class _RenamedSnapshot(Snapshot):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def write(self, directory: Path) -> None:
        self._snapshot.write(directory)
        config = json.loads((directory / CONFIG_FILE).read_text())
        config["target_modules"].append("unembed_tokens")
        (directory / CONFIG_FILE).write_text(json.dumps(config))


def start(world: World, trainer: type[AbstractBackend] = FakeBackend, config: FakeConfig = FAKE) -> Capabilities:
    """Start a composed backend, close it and return its capabilities."""
    spec = BackendSpec(config=FakeConfig, load=lambda: trainer)
    parts = {"trainer": spec, "trainer_config": config, "sampler": SAMPLER, "sampler_config": world.config()}
    backend = ComposedBackend("tiny", ComposedConfig(**parts))
    try:
        return backend.start()
    finally:
        backend.close()


def test_the_start_measures_how_far_the_sampler_is_from_the_trainer(world: World, caplog: pytest.LogCaptureFixture):
    world.stub()
    with caplog.at_level(logging.INFO):
        assert start(world).lora_targets == {"attn", "mlp", "unembed"}
    assert "log-probabilities of sampler and trainer differ by" in caplog.text


def test_another_base_model_is_refused(world: World):
    world.stub(FakeConfig(vocab_size=48))
    with pytest.raises(UserError, match=r"of the base model differ from the trainer's by 0.3.*the same base model"):
        start(world)


def test_a_sampler_that_ignores_adapters_is_refused(world: World):
    world.stub(ignores_adapters=True)
    with pytest.raises(
        UserError, match=r"does not apply adapters as the trainer does: .* nats on average with an adapter"
    ):
        start(world)


def test_layers_whose_adapters_the_sampler_lacks_cannot_be_trained(world: World, caplog: pytest.LogCaptureFixture):
    world.stub()
    assert start(world, _TiedUnembeddingTrainer).lora_targets == {"attn", "mlp"}
    assert "does not support adapters of unembed" in caplog.text and "tied to the embedding" in caplog.text


def test_a_sampler_that_takes_no_adapter_at_all_is_refused(world: World):
    world.stub(max_lora_rank=8)
    with pytest.raises(UserError, match=r"does not load adapters of this model: .*LoRA rank 64 is greater than 8"):
        start(world)


def test_differences_up_to_rounding_are_agreement():
    Agreement(base=0.02, adapted=0.03, effect=0.5).check()
    Agreement(base=0.02, adapted=0.02, effect=0.0).check()
    for base, adapted, effect in ((0.01, 0.5, 2.0), (0.01, float("nan"), 0.5), (0.01, 0.5, 0.5), (0.01, 0.2, 0.2)):
        with pytest.raises(UserError, match="differ from the trainer's"):
            Agreement(base=base, adapted=adapted, effect=effect).check()
