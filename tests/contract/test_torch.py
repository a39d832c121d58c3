"""The torch backend of `examples/torch_backend` passes the backend suite, with dense models of three families."""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.errors import UserError
from skyrl_tx.testing.backend_suite import BackendSuite
from skyrl_tx.tools.quickstart.model import write_tiny_model
from tests.support.tiny import DENSE, HYBRID, MOE, WINDOWS, tiny_directory
from tests.support.torch_example import torch_spec

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def torch_backend(architecture: str) -> AbstractBackend:
    """Return an unstarted backend on a tiny model.

    It has one thread, because torch's threads spin on shared cores.
    """
    spec = torch_spec()
    config = spec.config(device="cpu", num_threads=1, max_models=3, max_samplers=2, sample_slots=4, logits_chunk=8)
    return spec.load()(str(tiny_directory(architecture)), config)


class TestTorch(BackendSuite):
    architecture = DENSE

    @classmethod
    def make_backend(cls, directory: Path) -> AbstractBackend:
        return torch_backend(cls.architecture)

    @contextmanager
    def lost_device(self, backend: AbstractBackend) -> Generator[None]:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        with pytest.MonkeyPatch.context() as patch:
            for name in ("from_numpy", "ones", "tensor", "add", "zeros_like", "stack"):
                patch.setattr(torch, name, fail)
            yield


@pytest.mark.exhaustive
class TestTorchWithWindows(TestTorch):
    architecture = WINDOWS


@pytest.mark.exhaustive
class TestTorchWithStates(TestTorch):
    architecture = HYBRID


def test_experts_are_refused_by_name():
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.experts has its experts in one tensor"):
        torch_backend(MOE).start()


def test_samples_also_end_at_the_end_token_of_the_tokenizer(tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_directory(DENSE), tmp_path / "model")
    write_tiny_model(tmp_path / "chat")  # its tokenizer has the end token 1000
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "chat" / name, directory / name)
    (directory / "generation_config.json").write_text('{"eos_token_id": 5}')
    backend = torch_spec().load()(str(directory), torch_spec().config(device="cpu", num_threads=1))
    assert backend.start().eos_token_ids == (5, 1000)
    backend.close()
