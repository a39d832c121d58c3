"""Training programs compiled in the background: which are likely, and that bits stay the same."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.compiler import CompiledProgram, Compiler, Program
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.devices import CompilationMonitor
from skyrl_tx.backends.jax.sample.model_runner import ModelRunner
from skyrl_tx.backends.jax.train.training_programs import MicroBatchShape, MicroBatchShapes, TrainingPrograms
from skyrl_tx.contract.batches import PreparedModelPassBatch
from skyrl_tx.contract.ids import ModelId
from skyrl_tx.contract.losses import LOSS_SPECS
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.layers.remat import RematPolicy
from skyrl_tx.testing.backend_driver import scoring
from tests.support.tiny import TinyModel, tiny_backend

MODEL = ModelId("m")


UNUSED = ["2 160 1 8 1", "1 64 1 8 1", "2 64 0 8 1", "2 0 1 8 1"]
"""Program names that no micro-batch has with `budget=100, num_rows=2`."""


def remat(num_tokens: int) -> RematPolicy:
    return RematPolicy.FULL if num_tokens > 128 else RematPolicy.SAVE_MATMULS


def test_popular_programs_are_first_then_full_micro_batches_then_shorter_ones() -> None:
    shapes = MicroBatchShapes(budget=100, num_rows=2, multiple=8, rank=32, remat=remat)
    popular = iter(["2 512 4 8 1", "2 64 1 8 0", "no shape", "2 64 1 x 1", *UNUSED])
    found = list(dict.fromkeys((*shapes.iter_usual(popular), *shapes.iter_lengths())))
    assert found[0] == MicroBatchShape(2, 512, 4, 8, RematPolicy.FULL)
    assert found[1] == MicroBatchShape(2, 64, 1, 8, RematPolicy.SAVE_MATMULS, is_local=False)
    assert [shape.length for shape in found[2:]] == [104, 64]
    one_row = MicroBatchShapes(budget=512, num_rows=1, multiple=1, rank=32, remat=remat)
    assert [shape.length for shape in one_row.iter_usual(iter(()))] == [512, 512, 384, 256, 128]
    assert [shape.length for shape in one_row.iter_lengths()] == [64, 128, 256, 384, 512]
    with_states = replace(one_row, shares_prefixes=True).iter_usual(iter(["1 480 1 8 1", "1 480 1 8 1 1"]))
    assert [(shape.length, shape.has_prefixes) for shape in with_states][:2] == [(480, True), (512, False)]
    assert found[2:4] == [
        MicroBatchShape(2, 104, 1, 32, RematPolicy.FULL),
        MicroBatchShape(2, 64, 1, 32, RematPolicy.SAVE_MATMULS),
    ]


def use_sequence_loss(batch: PreparedModelPassBatch) -> PreparedModelPassBatch:
    """Return a batch of the same tokens with a loss that is not local."""
    ones = np.ones(batch.examples[0].tokens.size, np.float32)
    inputs = {"logprobs": -ones, "advantages": ones, "sequence_ratio_mask": ones, "weights": ones}
    changed = {"loss": "gspo", "loss_config": LOSS_SPECS["gspo"].config}
    return PreparedModelPassBatch(
        examples=tuple(
            replace(example, **changed, loss_inputs={**example.loss_inputs, **inputs}) for example in batch.examples
        )
    )


def train(backend: JaxBackend) -> list[np.ndarray]:
    """Return the results of three passes and the gradient."""
    backend.create_model(MODEL, ModelSpec(lora=LoraSpec(rank=4, seed=1)))
    short, long = (scoring(MODEL, [np.arange(length, dtype=np.int32)]) for length in (12, 30))
    results = [
        result.logprobs
        for batch in (short, long, use_sequence_loss(short))
        for result in (*backend.forward_backward(batch), *backend.forward(batch))
    ]
    return [*results, *map(np.asarray, jax.tree.leaves(backend._pool.get(MODEL).gradient))]


def test_a_program_that_is_compiled_in_the_background_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "queue_first_samples", lambda runner, rank: None)
    with tiny_backend(micro_batch_tokens=32, compile_threads=1) as backend:
        programs = backend._training_programs
        assert programs is not None
        found = train(backend)
        assert backend.meters().progress is None and not backend.is_compiling()
        calls = {(shape.remat, shape.is_local): program.num_calls for shape, program in programs.ready.items()}
        save = RematPolicy.SAVE_MATMULS
        assert calls == {(save, True): 2, (save, False): 1, (None, True): 2, (None, False): 1}
    with tiny_backend(micro_batch_tokens=32) as backend:
        assert backend._training_programs is None
        for one, other in zip(train(backend), found, strict=True):
            np.testing.assert_array_equal(one, other)


class RecordingCompiler(Compiler[MicroBatchShape]):
    """A compiler that records the expected programs and compiles nothing."""

    def __init__(self) -> None:
        super().__init__(0, CompilationMonitor())
        self.expected: list[MicroBatchShape] = []

    def queue_likely(self, programs: Iterable[tuple[MicroBatchShape, Program]]) -> None:
        self.expected += [shape for shape, _ in programs]


def test_programs_that_were_called_are_the_first_of_the_next_start(tmp_path: Path, tiny: TinyModel) -> None:
    shapes = MicroBatchShapes(budget=256, num_rows=1, multiple=1, rank=8, remat=remat)
    layout = mesh.make_layout(MeshConfig())
    params = tiny.params.replace(layout=layout)  # type: ignore[attr-defined]
    orders: list[list[int]] = []

    for _ in range(2):
        compiler = RecordingCompiler()
        programs = TrainingPrograms(params, tiny.config, compiler)
        programs.start(shapes, tmp_path)
        orders.append([shape.length for shape in compiler.expected])
        for shape in compiler.expected:
            compiler.ready[shape] = CompiledProgram(print, num_calls=3 if shape.length == 128 else 0)
        programs.close()
        programs.close()  # the second call counts nothing

    assert orders == [[256, 128, 64], [128, 256, 64]]
    (popular,) = (tmp_path / "popular").iterdir()
    assert json.loads(popular.read_text()) == {"1 128 1 8 1": 6}
