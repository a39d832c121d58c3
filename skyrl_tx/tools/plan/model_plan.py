"""The plan of a model on devices that are not here: memory by item, what fits, the most tokens per second, warnings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.kernel_choice import pad_cached_dims
from skyrl_tx.backends.jax.memory import MIN_TOKENS
from skyrl_tx.backends.jax.start_plan import StartPlan, make_abstract_layout, plan_start
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, count_adapter_bytes
from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.command_line import format_bytes
from skyrl_tx.models.flops import count_frozen_macs
from skyrl_tx.tools.plan.meshes import (
    WEIGHT_SHARE,
    Candidate,
    LongRows,
    find_fitting_candidate,
    list_meshes,
    rank_meshes,
)
from skyrl_tx.tools.plan.roofline import (
    GPU_SHARE,
    MEASURED,
    Devices,
    RooflineBound,
    Workload,
    bound_decoding,
    bound_training,
)
from skyrl_tx.weights import hf

_SHORT_TOKENS = 4096
"""A KV cache with fewer tokens holds less than one usual sample."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of each device's memory."""

    item: str
    bytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class Rate:
    """The most tokens per second on all devices together."""

    work: str
    tokens_per_s: int
    bound_by: str
    detail: str
    expected_tokens_per_s: int | None = None
    """The same times the share of a bound that was measured on one such device with another model; None if none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The plan of a model."""

    base_model: str
    model: models.ModelConfig
    devices: Devices
    plan: StartPlan
    chosen: Candidate
    others: tuple[Candidate, ...]
    """The other meshes, the best first; none if the mesh was given."""
    items: tuple[Item, ...]
    rates: tuple[Rate, ...]
    num_active: int
    """Parameters that a token is multiplied with."""
    samples_at_context: int
    """KV cache slots when each is as long as the longest sample."""
    long_rows: LongRows | None
    """Rows of `--context` tokens if they do not fit with the given mesh, or with the fastest."""
    warnings: tuple[str, ...] = ()

    @property
    def used_bytes(self) -> int:
        """Memory of all items on each device."""
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        """Whether all items fit together."""
        return self.used_bytes <= self.devices.limit_bytes


def plan_model(base_model: str, config: JaxConfig, devices: Devices, *, is_mesh_given: bool) -> ModelPlan:
    """Return the plan. Raises UserError, naming the flag, for what cannot be planned."""
    try:
        content = hf.read_json(hf.resolve_model(base_model, with_weights=False), "config.json")
        model = replace(models.find_family(content).config_from_hf(content), expert_lora=config.expert_lora)
        model = pad_cached_dims(model, devices.kind.family)
    except (models.UnsupportedModel, hf.CheckpointError) as error:
        raise UserError(f"--base-model: {error}") from error
    dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)
    if is_mesh_given:
        _check_mesh(config.mesh, model, devices)
    meshes = [config.mesh] if is_mesh_given else list_meshes(devices.number, with_cp=False)
    found = rank_meshes(model, config, devices, dtype, meshes)  # of all meshes `dp` alone divides any model

    plans: dict[str, StartPlan] = {}  # by mesh; one takes seconds

    def plan_mesh(each: MeshConfig) -> StartPlan:
        if str(each) not in plans:
            layout, platform, limit = make_abstract_layout(each), devices.kind.family, devices.limit_bytes
            plans[str(each)] = plan_start(config, layout, model, dtype, platform=platform, limit_bytes=limit)
        return plans[str(each)]

    def get_longest_row(each: MeshConfig) -> int:
        longest = plan_mesh(each).longest_row
        assert longest is not None, "planned devices report their memory"
        return longest

    fastest = get_longest_row(found[0].mesh)
    rows = None
    wanted = min(config.max_context_length or 0, model.max_context_length)
    if fastest < wanted:
        every = rank_meshes(model, config, devices, dtype, list_meshes(devices.number, with_cp=True))
        fitting = find_fitting_candidate(every, get_longest_row, wanted)
        rows = LongRows(wanted, found[0].mesh, fastest, fitting and fitting.mesh)
        if fitting is not None and not is_mesh_given:
            found = [fitting, *(each for each in every if each is not fitting)]
    chosen, *others = found
    plan = plan_mesh(chosen.mesh)
    account = ModelPlan(
        base_model=base_model,
        model=model,
        devices=devices,
        plan=plan,
        chosen=chosen,
        others=tuple(others),
        items=tuple(_list_items(plan, config)),
        rates=tuple(_compute_rates(model, devices, chosen.mesh, plan, dtype.itemsize)),
        num_active=count_frozen_macs(model),
        samples_at_context=plan.samples.count_samples(plan.samples.max_length),
        long_rows=rows,
    )
    return replace(account, warnings=tuple(_find_warnings(account, config)))


def _check_mesh(given: MeshConfig, model: models.ModelConfig, devices: Devices) -> None:
    if given.num_devices != devices.number:
        raise UserError(f"--mesh {given} has {given.num_devices} devices, and --device {devices} {devices.number}")
    try:
        mesh.check_divisible(make_abstract_layout(given), model)
    except mesh.MeshError as error:
        raise UserError(f"--mesh: {error}") from error


def _list_items(plan: StartPlan, config: JaxConfig) -> Iterator[Item]:
    samples, models_bytes = plan.samples, plan.max_models * plan.model_bytes
    training = f"{plan.max_models} models of rank {config.max_lora_rank}"
    remat = "layers rematerialized" if plan.passes.remat else "results of matrix products kept"
    yield Item("base weights", plan.weight_bytes, f"{plan.num_parameters:,} parameters in {plan.dtype}, on all devices")
    yield Item("sampler adapters", plan.pool_bytes, f"{plan.num_adapter_slots} slots of the lowest rank, at the start")
    detail = f"{samples.tokens} tokens, and {samples.prefix_tokens} of the prefix cache, on all devices"
    yield Item("KV cache", plan.kv_bytes, detail)
    yield Item("adapters in training", models_bytes // 2, f"weights and gradients of {training}")
    yield Item("optimizer", models_bytes // 2, f"two moments of {training}")
    detail = f"micro-batch of {plan.passes.micro_batch_tokens} tokens, {remat}"
    if plan.slice_bytes > plan.pass_bytes:
        detail = f"decode slice of {samples.num_rows} samples"
    yield Item("temporary", max(plan.pass_bytes, plan.slice_bytes), detail)


def _describe_long_rows(rows: LongRows, account: ModelPlan) -> str:
    short = f"a row of {rows.tokens} tokens in training does not fit with mesh {rows.mesh}, which fits {rows.longest}"
    if rows.fitting is None:
        return f"{short}; no mesh of {account.devices} fits it"
    if rows.fitting == account.chosen.mesh:
        return f"{short}, so mesh {rows.fitting} was chosen, with which it fits"
    return f"{short}. It fits with --mesh {rows.fitting}"


def _compute_rates(
    model: models.ModelConfig, devices: Devices, chosen: MeshConfig, plan: StartPlan, itemsize: int
) -> Iterator[Rate]:
    samples, passes = plan.samples, plan.passes
    num_slots, length = samples.num_slots, samples.equal_sample_length
    work = Workload(
        micro_batch_tokens=passes.micro_batch_tokens,
        sequence_tokens=min(passes.micro_batch_tokens, samples.max_length),
        is_remat=passes.remat,
        rank=DEFAULT_RANK,
        num_slots=num_slots,
        sample_tokens=length,
    )
    size = {"num_parameters": plan.num_parameters, "itemsize": itemsize}
    cache_bytes = plan.kv_bytes * num_slots * (length + samples.state_tokens) // samples.all_tokens
    gradient_bytes = count_adapter_bytes(model, DEFAULT_RANK, make_abstract_layout(chosen))
    trained = bound_training(model, devices, chosen, work, **size, adapter_bytes=gradient_bytes)
    yield _make_rate("training", trained, devices, f"rank {DEFAULT_RANK}, sequences of {work.sequence_tokens} tokens")
    decoded = bound_decoding(model, devices, chosen, work, **size, cache_bytes=cache_bytes)
    yield _make_rate("sampling", decoded, devices, f"{num_slots} samples of {length} tokens, base model")


def _make_rate(work: str, bound: RooflineBound, devices: Devices, detail: str) -> Rate:
    share = MEASURED.get(devices.kind.name, {}).get(work) if devices.number == 1 else None
    expected = None if share is None else int(share * bound.tokens_per_s)
    return Rate(work, int(bound.tokens_per_s), bound.by, detail, expected)


def _find_warnings(account: ModelPlan, config: JaxConfig) -> Iterator[str]:
    plan, devices, kind = account.plan, account.devices, account.devices.kind
    if not account.fits:
        needed = -(-plan.weight_bytes * devices.number // int(WEIGHT_SHARE * devices.limit_bytes))
        yield (
            f"it does not fit: {format_bytes(account.used_bytes)} of {format_bytes(devices.limit_bytes)} on each device. Use "
            f"more devices (the weights need at least {needed}), a lower --context, --adapters or --rank"
        )
    if devices.number > kind.per_host:
        yield f"{devices} is more than one host, which has up to {kind.per_host}; several need --hosts.size"
    wanted = min(config.max_context_length or account.model.max_context_length, account.model.max_context_length)
    if plan.samples.max_length < wanted and (config.max_context_length or plan.samples.max_length < _SHORT_TOKENS):
        yield f"the longest sample has {plan.samples.max_length} tokens, not {wanted}: the KV cache has no more"
    if (config.max_context_length or 0) > wanted:
        yield f"--context {config.max_context_length} is more than the model's limit, {wanted} tokens"
    if (rows := account.long_rows) is not None:
        yield _describe_long_rows(rows, account)
    if plan.max_models == 1 and config.max_lora_adapters is None:
        yield f"only one model of rank {config.max_lora_rank} is in training at a time; lower --rank takes less memory"
    if plan.passes.micro_batch_tokens <= MIN_TOKENS * devices.number // account.chosen.mesh.tp:
        yield f"micro-batches of {MIN_TOKENS} tokens on each device cannot keep it busy"
    if plan.dtype != "bfloat16":
        yield f"rates are of products in bfloat16; in {plan.dtype} they are lower"
    if kind.family == "gpu" and devices.limit_bytes < kind.memory_bytes * (GPU_SHARE + 0.1):
        yield (
            f"JAX takes {format_bytes(devices.limit_bytes)} of the {format_bytes(kind.memory_bytes)} of a GPU unless "
            "XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
        )
