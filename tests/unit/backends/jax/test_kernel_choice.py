"""Kernel selection by platform, dtype and setting, and the log lines that explain it."""

import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skyrl_tx import models
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.kernel_choice import choose_kernels, explain_kernels, pad_cached_dims
from skyrl_tx.backends.jax.mesh import get_parameter_sharding, make_layout
from skyrl_tx.backends.jax.train.training_state import make_training_state
from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.kernels.registry import (
    MOSAIC_EXPERTS,
    MOSAIC_PAGES,
    NO_KERNELS,
    SPLASH,
    TRITON,
    TRITON_EXPERTS,
    TRITON_PAGES,
    Kernels,
)
from skyrl_tx.layers.lora import Adapter
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf
from tests.support.child_process import run_in_own_process
from tests.support.fast_jit import fast_jit
from tests.support.model_configs import QWEN3_8B

HUB_CONFIGS = Path(__file__).parents[2] / "models" / "hub_configs"
BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def hub_model(name: str) -> models.ModelConfig:
    content = json.loads((HUB_CONFIGS / f"{name}.json").read_text())
    return models.find_family(content).config_from_hf(content)


@pytest.mark.parametrize(
    ("platform", "dtype", "setting", "kernels"),
    [
        ("tpu", BFLOAT16, "auto", Kernels(SPLASH, MOSAIC_PAGES, MOSAIC_EXPERTS)),
        ("tpu", FLOAT32, "auto", Kernels(SPLASH, MOSAIC_PAGES, MOSAIC_EXPERTS)),
        ("gpu", BFLOAT16, "auto", Kernels(TRITON, TRITON_PAGES, TRITON_EXPERTS)),
        ("gpu", FLOAT32, "auto", NO_KERNELS),
        ("cpu", FLOAT32, "auto", NO_KERNELS),
        ("cpu", BFLOAT16, "auto", NO_KERNELS),
        ("tpu", FLOAT32, "loops", NO_KERNELS),
        ("gpu", BFLOAT16, "loops", NO_KERNELS),
        ("cpu", FLOAT32, "loops", NO_KERNELS),
    ],
)
def test_platform_and_type_choose_the_kernels(platform, dtype, setting, kernels):
    assert choose_kernels(JaxConfig(kernels=setting), platform, dtype) == replace(
        kernels, chunks_together=platform != "cpu"
    )


def test_what_a_kernel_lacks_is_named():
    gpu, tpu = Kernels(TRITON, TRITON_PAGES, TRITON_EXPERTS), Kernels(SPLASH, MOSAIC_PAGES)
    mixed = hub_model("gpt-oss-20b")
    assert list(explain_kernels(gpu, mixed)) == [
        "attention of 24 layers in training: triton",
        "attention of 24 layers in sampling: triton",
        "experts of 24 layers: triton",
    ]
    assert list(explain_kernels(tpu, mixed)) == [
        "attention of 24 layers in training: splash",
        "attention of 24 layers in sampling: loops, as mosaic has no heads of 64 dims",
        "experts of 24 layers: loops",
    ]
    assert "attention of 24 layers in sampling: mosaic" in list(explain_kernels(tpu, pad_cached_dims(mixed, "tpu")))

    linear = hub_model("Qwen3.5-9B")
    assert list(explain_kernels(gpu, linear)) == [
        "attention of 8 layers in training: triton",
        "attention of 8 layers in sampling: triton",
    ]

    latent = hub_model("DeepSeek-V3.1")
    assert list(explain_kernels(gpu, latent)) == [
        "attention of 61 layers in training: triton",
        "attention of 61 layers in sampling: loops, as triton has no latents",
        "experts of 58 layers: triton",
    ]

    dense = models.find_family(QWEN3_8B).config_from_hf(QWEN3_8B)
    assert list(explain_kernels(NO_KERNELS, dense)) == [
        "attention of 36 layers in training: loops",
        "attention of 36 layers in sampling: loops",
    ]


def test_the_backend_logs_its_kernels_and_publishes_them(tmp_path, caplog):
    config = JaxConfig(load_format="dummy", compile_cache_dir=None)
    with caplog.at_level(logging.INFO, "skyrl_tx.backends.jax.backend"):
        backend = JaxBackend(str(write_model(tmp_path)), config)
        capabilities = backend.start()
    backend.close()
    assert "attention of 2 layers in training: loops" in caplog.messages
    assert "attention of 2 layers in sampling: loops" in caplog.messages
    assert capabilities.fingerprint["attention_kernel"] == capabilities.fingerprint["pages_kernel"] == "loops"


def _model_on_a_mesh(folder: Path) -> None:
    """Compare gradients of attention kernels on eight devices with the loops on one device."""
    meshes = MeshConfig(fsdp=4, tp=2), MeshConfig(dp=2, fsdp=2, tp=2)
    _compare_on_meshes(folder, "Qwen3ForCausalLM", zip((Kernels(SPLASH), Kernels(TRITON)), meshes, strict=True))


def _experts_on_a_mesh(folder: Path) -> None:
    """Compare gradients of expert kernels on eight devices, with and without sharded experts."""
    meshes = MeshConfig(fsdp=2, tp=2, ep=2), MeshConfig(dp=4, tp=2)
    kernels = Kernels(experts=MOSAIC_EXPERTS), Kernels(experts=TRITON_EXPERTS)
    _compare_on_meshes(folder, "Qwen3MoeForCausalLM", zip(kernels, meshes, strict=True))


def _compare_on_meshes(folder: Path, architecture: str, cases: Iterable[tuple[Kernels, MeshConfig]]) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    directory = write_model(folder, architecture, num_heads=4, num_kv_heads=2, head_dim=32, num_layers=2, std=0.2)
    content = hf.read_json(directory, "config.json")
    family = models.find_family(content)
    model = family.config_from_hf(content)
    adapter = make_training_state(model, LoraSpec(rank=4, seed=3)).adapter
    draw = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: np.float32(0.1 * draw.standard_normal(leaf.shape)), adapter.weights)
    tokens = draw.integers(0, 256, (4, 150))
    start = np.stack([np.repeat([0, cut], [cut, 150 - cut]) for cut in (1, 70, 100, 149)])
    target = draw.standard_normal((4, 150, model.hidden_size)).astype(np.float32)

    def gradient(sizes: MeshConfig, kernels: Kernels):
        layout = make_layout(sizes)
        described = models.describe_params(model)
        params = hf.load(
            directory, described, family.weights, placement=lambda parameter: get_parameter_sharding(layout, parameter)
        )
        params = replace(params, layout=layout, kernels=kernels)

        def loss(weights, params):
            hidden = models.forward(params, model, tokens, Adapter(weights, adapter.scale), start_BT=start)
            return (hidden * target).sum(), hidden

        gradients, hidden = fast_jit(jax.grad(loss, has_aux=True))(weights, params)
        return hidden, gradients

    wanted = gradient(MeshConfig(), NO_KERNELS)
    for kernels, sizes in cases:
        found = gradient(sizes, replace(kernels, interpret=True))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(np.abs(other).max(), 1e-30))


@pytest.mark.slow  # conformance/test_mesh.py trains on eight devices
def test_kernels_on_a_mesh_of_eight_devices_give_the_gradient_of_one(tmp_path):
    run_in_own_process(_model_on_a_mesh, tmp_path)


@pytest.mark.slow  # layers/test_experts.py covers kernels on one device, and the test above covers meshes
def test_experts_by_kernels_on_a_mesh_give_the_gradient_of_one_device(tmp_path):
    run_in_own_process(_experts_on_a_mesh, tmp_path)
