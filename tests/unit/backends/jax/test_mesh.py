"""The mesh: errors that name the flag and the size, and the sharding of arrays."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import PartitionSpec

from skyrl_tx import models
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.mesh import (
    MeshError,
    check_divisible,
    count_replicas,
    describe_unused_devices,
    make_layout,
    make_training_layout,
)
from skyrl_tx.backends.jax.start_plan import make_abstract_layout
from skyrl_tx.contract.errors import UserError
from skyrl_tx.layers.sharding import Layout
from skyrl_tx.testing.tiny_models import write_model
from skyrl_tx.weights import hf


def make_mesh_layout(**sizes: int) -> Layout:
    """Return a layout of that many abstract devices."""
    return make_abstract_layout(MeshConfig(**sizes))


def make_config(directory, architecture: str = "Qwen3ForCausalLM", **sizes: int) -> models.ModelConfig:
    content = hf.read_json(write_model(directory, architecture, **sizes), "config.json")
    return models.find_family(content).config_from_hf(content)


@pytest.mark.parametrize(
    ("mesh", "sizes", "message"),
    [
        ({"fsdp": 3}, {}, "fsdp=3 does not divide hidden_size = 32"),
        ({"tp": 4}, {"num_kv_heads": 2}, "tp=4 does not divide num_key_value_heads = 2"),
        ({"tp": 4}, {"num_heads": 6, "num_kv_heads": 2}, "tp=4 does not divide num_attention_heads = 6"),
        ({"tp": 2}, {"vocab_size": 101}, "tp=2 does not divide vocab_size = 101"),
        ({"tp": 2}, {"mlp_size": 63}, "tp=2 does not divide intermediate_size = 63"),
        ({"ep": 2}, {}, "ep=2: the model has no experts"),
        ({"cp": 3}, {"hidden_size": 96}, "cp=3 does not divide num_attention_heads = 4"),
        ({"tp": 2, "cp": 4}, {}, "tp=2 x cp=4 does not divide num_attention_heads = 4"),
    ],
)
def test_a_mesh_must_divide_the_sizes_of_the_model(tmp_path, mesh, sizes, message):
    with pytest.raises(MeshError, match=message):
        check_divisible(make_mesh_layout(**mesh), make_config(tmp_path, **sizes))


def test_a_mesh_must_divide_the_number_of_experts(tmp_path):
    config = make_config(tmp_path, "Qwen3MoeForCausalLM")
    check_divisible(make_mesh_layout(ep=4, tp=2), config)
    with pytest.raises(MeshError, match="ep=3 does not divide num_experts = 8"):
        check_divisible(make_mesh_layout(ep=3), config)


def test_a_size_is_named_as_in_the_config_of_its_family(tmp_path):
    config = make_config(tmp_path, "GptOssForCausalLM", mlp_size=30)
    check_divisible(make_mesh_layout(ep=4, tp=2), config)
    with pytest.raises(MeshError, match="ep=3 does not divide num_local_experts = 8"):
        check_divisible(make_mesh_layout(ep=3), config)
    with pytest.raises(MeshError, match="tp=4 does not divide intermediate_size = 30"):
        check_divisible(make_mesh_layout(tp=4), make_config(tmp_path, "GptOssForCausalLM", mlp_size=30, num_kv_heads=4))


def test_a_mesh_must_divide_the_width_of_a_shared_expert(tmp_path):
    experts = {"shared_expert_intermediate_size": 21}
    config = make_config(tmp_path, "Qwen3_5MoeForCausalLM", num_layers=4, experts=experts)
    check_divisible(make_mesh_layout(ep=4), config)
    with pytest.raises(MeshError, match="tp=2 does not divide shared_expert_intermediate_size = 21"):
        check_divisible(make_mesh_layout(tp=2), config)


def test_a_mesh_must_divide_the_heads_of_linear_attention(tmp_path):
    config = make_config(tmp_path, "Qwen3_5ForCausalLM", num_layers=4, num_kv_heads=4)
    check_divisible(make_mesh_layout(fsdp=2, tp=2), config)
    with pytest.raises(MeshError, match="tp=4 does not divide linear_num_key_heads = 2"):
        check_divisible(make_mesh_layout(tp=4), config)


def test_a_mesh_must_divide_the_heads_of_latent_attention_and_its_experts(tmp_path):
    config = make_config(tmp_path, "DeepseekV3ForCausalLM")
    check_divisible(make_mesh_layout(fsdp=2, tp=4), config)
    with pytest.raises(MeshError, match="tp=8 does not divide num_attention_heads = 4"):
        check_divisible(make_mesh_layout(tp=8), config)
    with pytest.raises(MeshError, match="ep=3 does not divide n_routed_experts = 8"):
        check_divisible(make_mesh_layout(ep=3), config)


def test_a_mesh_must_divide_the_groups_of_mamba_and_latents(tmp_path):
    config = make_config(tmp_path, "NemotronHForCausalLM", num_kv_heads=4, experts={"moe_latent_size": 18})
    check_divisible(make_mesh_layout(fsdp=2, tp=2, ep=2), config)
    with pytest.raises(MeshError, match="tp=4 does not divide n_groups = 2"):
        check_divisible(make_mesh_layout(tp=4), config)
    with pytest.raises(MeshError, match="fsdp=4 does not divide moe_latent_size = 18"):
        check_divisible(make_mesh_layout(fsdp=4), config)


def test_recurrent_layers_need_a_part_of_their_heads_on_each_device_that_shares_a_row(tmp_path):
    linear = make_config(tmp_path / "linear", "Qwen3_5ForCausalLM", num_layers=4)
    check_divisible(make_mesh_layout(fsdp=2, cp=2), linear)
    with pytest.raises(MeshError, match="cp=4 does not divide linear_num_key_heads = 2"):
        check_divisible(make_mesh_layout(cp=4), linear)
    mamba = make_config(tmp_path / "mamba", "NemotronHForCausalLM")
    check_divisible(make_mesh_layout(cp=2), mamba)
    with pytest.raises(MeshError, match="cp=4 does not divide n_groups = 2"):
        check_divisible(make_mesh_layout(cp=4), mamba)


def test_with_cp_training_shards_the_tokens_of_rows_and_sampling_the_rows():
    sampling = make_mesh_layout(fsdp=2, cp=2, ep=2)
    training = make_training_layout(sampling)
    assert (sampling.num_shards("batch"), sampling.num_shards("tokens"), sampling.shards_rows) == (8, 1, False)
    assert (training.num_shards("batch"), training.num_shards("tokens"), training.shards_rows) == (2, 4, True)
    assert sampling.num_shards("embed") == training.num_shards("embed") == 4
    without = make_mesh_layout(fsdp=4, ep=2)
    assert make_training_layout(without) is without and str(MeshConfig(fsdp=4, ep=2)) == "fsdp=4,tp=1,ep=2"


def test_over_dp_rows_are_sharded_and_weights_are_not():
    layout = make_mesh_layout(dp=2, fsdp=2, cp=2)
    assert (count_replicas(layout), count_replicas(make_mesh_layout(fsdp=4))) == (2, 1)
    assert layout.spec(("batch", None), (16, 16)) == PartitionSpec(("dp", "fsdp", "cp", "ep"), None)
    assert layout.spec(("embed", "mlp"), (16, 16)) == PartitionSpec(("fsdp", "cp"), ("tp",))
    assert make_training_layout(layout).spec(("batch", "tokens"), (16, 16)) == PartitionSpec(
        ("dp", "fsdp"), ("cp", "ep")
    )
    assert str(MeshConfig(dp=2, tp=2)) == "dp=2,fsdp=1,tp=2,ep=1" and MeshConfig(dp=2, tp=2).num_devices == 4


def test_a_mesh_of_too_many_devices_is_refused_before_files_are_read():
    wanted = len(jax.devices()) + 1
    backend = JaxBackend("no-such-directory/either", JaxConfig(compile_cache_dir=None, mesh=MeshConfig(tp=wanted)))
    with pytest.raises(UserError, match=rf"mesh: fsdp=1,tp={wanted},ep=1 needs {wanted} devices"):
        backend.start()


def test_accelerators_that_a_mesh_leaves_unused_are_a_warning():
    gpus = [SimpleNamespace(platform="gpu")] * 8
    warning = describe_unused_devices(gpus, MeshConfig())
    assert (
        warning is not None and "8 devices are visible, but the mesh uses only 1" in warning and "mesh.dp 8" in warning
    )
    assert (
        describe_unused_devices(gpus, MeshConfig(dp=4, tp=2)) is None
        and describe_unused_devices(gpus[:1], MeshConfig()) is None
    )
    assert describe_unused_devices([SimpleNamespace(platform="cpu")] * 8, MeshConfig()) is None


def test_the_default_mesh_has_one_device():
    layout = make_layout(MeshConfig())
    assert layout.mesh is not None and layout.mesh.size == 1 and not layout.is_sharded


def test_an_indivisible_dim_is_not_sharded():
    layout = make_mesh_layout(fsdp=2, ep=3)
    assert layout.spec(("batch", "mlp"), (12, 5)) == PartitionSpec(("fsdp", "ep"), ("tp",))
    assert layout.spec(("batch", None), (4, 5)) == PartitionSpec(("fsdp",), None)
    assert layout.spec(("batch", None), (3, 5)) == PartitionSpec(None, None)
