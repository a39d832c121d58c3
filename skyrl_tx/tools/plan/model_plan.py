"""Makes the plan of a model on given devices: memory by item, sizes that fit, speed, and warnings.

The backend makes the same memory plan at start, with the same function (`plan_start`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax.numpy as jnp

from skyrl_tx import models
from skyrl_tx.backends.jax import mesh
from skyrl_tx.backends.jax.config import JaxConfig, MeshConfig
from skyrl_tx.backends.jax.gpu_memory import GPU_SHARE
from skyrl_tx.backends.jax.kernel_choice import pad_cached_dims
from skyrl_tx.backends.jax.memory import MIN_TOKENS
from skyrl_tx.backends.jax.start_plan import StartPlan, make_abstract_layout, plan_start
from skyrl_tx.backends.jax.training_costs import DEFAULT_RANK, count_adapter_bytes
from skyrl_tx.contract.errors import UserError
from skyrl_tx.models.flops import count_frozen_macs
from skyrl_tx.process.text import format_bytes
from skyrl_tx.tools.plan.hardware import MEASURED, Devices
from skyrl_tx.tools.plan.roofline import (
    WEIGHT_SHARE,
    Candidate,
    LengthShortfall,
    RooflineBound,
    Workload,
    compute_decoding_bound,
    compute_training_bound,
    find_fitting_candidate,
    list_meshes,
    rank_meshes,
)
from skyrl_tx.weights import hf

_SIZE_FLAGS = {
    "max_sample_tokens": "--backend-config.max-sample-tokens",
    "micro_batch_tokens": "--backend-config.micro-batch-tokens",
    "max_lora_adapters": "--adapters",
}
"""The flags of sizes that the backend chooses itself unless they are configured."""
_LOWER_RANKS = (64, 32, 16, 8)
_SHORT_TOKENS = 4096
"""The plan warns if samples can have fewer tokens than this, because a typical sample would not fit."""


@dataclass(frozen=True, slots=True)
class Item:
    """One use of the memory of each device, for example the base weights."""

    item: str
    bytes: int
    detail: str


@dataclass(frozen=True, slots=True)
class Rate:
    """An upper bound for the tokens per second of all devices together."""

    work: str
    tokens_per_s: int
    bound_by: str
    detail: str
    expected_tokens_per_s: int | None = None
    """The bound times the fraction in `MEASURED`, which may be from another model.

    None for more than one device, and for devices without a measurement.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The plan of a model on given devices."""

    base_model: str
    model: models.ModelConfig
    devices: Devices
    plan: StartPlan
    """The memory plan that the backend makes at start with the chosen mesh."""
    chosen: Candidate
    """The mesh that the user named, or else the best mesh."""
    others: tuple[Candidate, ...]
    """The other meshes, best first. Empty if the user named the mesh."""
    items: tuple[Item, ...]
    rates: tuple[Rate, ...]
    num_active: int
    """The number of parameters that take part in the computation of one token."""
    samples_at_context: int
    """How many samples of the maximum length fit into the KV cache."""
    shortfall: LengthShortfall | None
    """Set if training rows of `--context` tokens do not fit.

    This is checked with the mesh that the user named, or else with the fastest mesh.
    """
    warnings: tuple[str, ...] = ()

    @property
    def used_bytes(self) -> int:
        """The sum of all items, in bytes per device."""
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        """Whether all items together fit on each device, with a page of KV cache or more."""
        return self.used_bytes <= self.devices.limit_bytes and self.plan.samples.tokens >= self.plan.samples.page


def plan_model(base_model: str, config: JaxConfig, devices: Devices, *, is_mesh_given: bool) -> ModelPlan:
    """Make the plan of a model. Raises UserError, which names the flag, if that is not possible."""
    # Read the model's configuration.
    try:
        _, model = models.read_model(hf.resolve_model(base_model, with_weights=False))
        model = replace(model, expert_lora=config.expert_lora)
        model = pad_cached_dims(model, devices.kind.family)
    except (models.UnsupportedModel, hf.CheckpointError) as error:
        raise UserError(f"--base-model: {error}") from error
    dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)

    # Rank the meshes. A mesh of `dp` alone divides every model, so there is at least one.
    if is_mesh_given:
        _check_mesh(config.mesh, model, devices)
    meshes = [config.mesh] if is_mesh_given else list_meshes(devices.number, with_cp=False)
    candidates = rank_meshes(model, config, devices, dtype, meshes)

    plans: dict[str, StartPlan] = {}  # by mesh, because one plan takes seconds

    def plan_mesh(mesh_config: MeshConfig) -> StartPlan:
        if str(mesh_config) not in plans:
            layout, platform, limit = make_abstract_layout(mesh_config), devices.kind.family, devices.limit_bytes
            plans[str(mesh_config)] = plan_start(config, layout, model, dtype, platform=platform, limit_bytes=limit)
        return plans[str(mesh_config)]

    def get_longest_row(mesh_config: MeshConfig) -> int:
        longest = plan_mesh(mesh_config).longest_row
        assert longest is not None, "planned devices report their memory"
        return longest

    # If training rows of `--context` tokens do not fit, look for a mesh that fits them, including `cp`.
    longest = get_longest_row(candidates[0].mesh)
    shortfall = None
    row_tokens = min(config.max_context_length or 0, model.max_context_length)
    if longest < row_tokens:
        all_candidates = rank_meshes(model, config, devices, dtype, list_meshes(devices.number, with_cp=True))
        fitting = find_fitting_candidate(all_candidates, get_longest_row, row_tokens)
        shortfall = LengthShortfall(row_tokens, candidates[0].mesh, longest, fitting and fitting.mesh)
        if fitting is not None and not is_mesh_given:
            candidates = [fitting, *(candidate for candidate in all_candidates if candidate is not fitting)]

    # Describe the plan of the chosen mesh.
    chosen, *others = candidates
    plan = plan_mesh(chosen.mesh)

    model_plan = ModelPlan(
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
        shortfall=shortfall,
    )
    return replace(model_plan, warnings=tuple(_find_warnings(model_plan, config)))


def _check_mesh(given: MeshConfig, model: models.ModelConfig, devices: Devices) -> None:
    if given.num_devices != devices.number:
        raise UserError(
            f"--mesh {given} has {given.num_devices} devices, but --device {devices} has {devices.number}; the product "
            "of the sizes must be the number of devices"
        )
    try:
        mesh.check_divisible(make_abstract_layout(given), model)
    except mesh.MeshError as error:
        raise UserError(f"--mesh: {error}") from error


def _list_items(plan: StartPlan, config: JaxConfig) -> Iterator[Item]:
    samples, models_bytes = plan.samples, plan.max_models * plan.model_bytes
    training = f"{plan.max_models} models of rank {config.max_lora_rank}"
    remat = "layers rematerialized" if plan.passes.remat else "results of matrix products kept"

    yield Item("base weights", plan.weight_bytes, f"{plan.num_parameters:,} parameters in {plan.dtype}, on all devices")
    slots = f"{plan.num_adapter_slots} slots of rank {plan.pool_rank}, at the start"
    yield Item("sampler adapters", plan.pool_bytes, slots)
    detail = f"{samples.tokens} tokens, plus {samples.prefix_tokens} of the prefix cache, on all devices"
    yield Item("KV cache", plan.kv_bytes, detail)

    yield Item("adapters in training", models_bytes // 2, f"weights and gradients of {training}")
    yield Item("optimizer", models_bytes // 2, f"two moments of {training}")
    detail = f"micro-batch of {plan.passes.micro_batch_tokens} tokens, {remat}"
    if plan.slice_bytes > plan.pass_bytes:
        detail = f"decode slice of {samples.num_rows} samples"
    yield Item("temporary", max(plan.pass_bytes, plan.slice_bytes), detail)


def _describe_shortfall(shortfall: LengthShortfall, model_plan: ModelPlan) -> str:
    problem = (
        f"a training row of {shortfall.tokens} tokens does not fit with mesh {shortfall.mesh}, which fits at most "
        f"{shortfall.longest}"
    )
    if shortfall.fitting is None:
        return f"{problem}; no mesh of {model_plan.devices} fits it"
    if shortfall.fitting == model_plan.chosen.mesh:
        return f"{problem}, so mesh {shortfall.fitting} was chosen, which fits it"
    return f"{problem}. It fits with --mesh {shortfall.fitting}"


def _compute_rates(
    model: models.ModelConfig, devices: Devices, chosen: MeshConfig, plan: StartPlan, itemsize: int
) -> Iterator[Rate]:
    # The work: the planned micro-batches, and as many samples as there are slots.
    samples, passes = plan.samples, plan.passes
    num_slots, length = samples.num_slots, samples.equal_sample_length
    work = Workload(
        micro_batch_tokens=passes.micro_batch_tokens,
        sequence_tokens=min(passes.micro_batch_tokens, samples.max_length),
        is_remat=passes.remat,
        rank=DEFAULT_RANK,
        num_slots=num_slots,
        sample_tokens=length,
        # The weights and the cache
        num_parameters=plan.num_parameters,
        itemsize=itemsize,
        adapter_bytes=count_adapter_bytes(model, DEFAULT_RANK, make_abstract_layout(chosen)),
        cache_bytes=plan.kv_bytes * num_slots * (length + samples.state_tokens) // samples.all_tokens,
    )

    # The bounds of this work.
    training = compute_training_bound(model, devices, chosen, work)
    yield _make_rate("training", training, devices, f"rank {DEFAULT_RANK}, sequences of {work.sequence_tokens} tokens")
    decoding = compute_decoding_bound(model, devices, chosen, work)
    yield _make_rate("sampling", decoding, devices, f"{num_slots} samples of {length} tokens, base model")


def _make_rate(work: str, bound: RooflineBound, devices: Devices, detail: str) -> Rate:
    share = MEASURED.get(devices.kind.name, {}).get(work) if devices.number == 1 else None
    expected = None if share is None else int(share * bound.tokens_per_s)
    return Rate(work, int(bound.tokens_per_s), bound.bottleneck, detail, expected)


def _suggest_changes(model_plan: ModelPlan, config: JaxConfig) -> str:
    """Say which settings make the model fit, as the end of a sentence. Empty if none does.

    Sizes that are not configured are already as small as one model in training needs.
    """
    if (model_plan.plan.free_bytes or 0) < 0:  # the weights alone do not fit
        return ""

    # Leave a configured size to the backend, then all of them, then also lower the rank.
    given = {name: None for name in _SIZE_FLAGS if getattr(config, name) is not None}
    ranks = [rank for rank in _LOWER_RANKS if rank < config.max_lora_rank]
    changes = [{name: None} for name in given] + [given, *({**given, "max_lora_rank": rank} for rank in ranks)]

    # Return the first change that makes the model fit.
    devices, layout = model_plan.devices, make_abstract_layout(model_plan.chosen.mesh)
    for change in filter(None, changes):
        changed, dtype = config.model_copy(update=change), jnp.dtype(model_plan.plan.dtype)
        family, limit = devices.kind.family, devices.limit_bytes
        plan = plan_start(changed, layout, model_plan.model, dtype, platform=family, limit_bytes=limit)

        if replace(model_plan, plan=plan, items=tuple(_list_items(plan, changed))).fits:
            sizes = {
                "max_lora_rank": changed.max_lora_rank,
                "max_lora_adapters": plan.max_models,
                "max_sample_tokens": plan.samples.tokens,
                "micro_batch_tokens": plan.passes.micro_batch_tokens,
            }
            flags = {**_SIZE_FLAGS, "max_lora_rank": "--rank"}
            found = (f"{flags[name]} {sizes[name]} instead of {getattr(config, name)}" for name in change)
            return f"; it fits with {' and '.join(found)}"
    return ""


def _find_warnings(model_plan: ModelPlan, config: JaxConfig) -> Iterator[str]:
    plan, devices, kind = model_plan.plan, model_plan.devices, model_plan.devices.kind

    # The devices.
    if not model_plan.fits:
        needed = -(-plan.weight_bytes * devices.number // int(WEIGHT_SHARE * devices.limit_bytes))
        suggested = _suggest_changes(model_plan, config)
        at_least = f" (the weights need at least {needed})" if needed > devices.number else ""
        yield (
            f"the model does not fit: it needs {format_bytes(model_plan.used_bytes)} on each device"
            f"{'' if model_plan.used_bytes > devices.limit_bytes else ' without a KV cache'}, and "
            f"{format_bytes(devices.limit_bytes)} are usable{suggested}. {'Or use' if suggested else 'Use'} more "
            f"devices{at_least}"
        )
    if devices.number > kind.per_host:
        yield f"{devices} needs more than one host of up to {kind.per_host} devices; set --hosts.size"

    # Lengths.
    max_length = min(
        config.max_context_length or model_plan.model.max_context_length, model_plan.model.max_context_length
    )
    if plan.samples.max_length < max_length and (config.max_context_length or plan.samples.max_length < _SHORT_TOKENS):
        yield (
            f"samples can have at most {plan.samples.max_length} tokens instead of {max_length}, because a larger KV "
            "cache does not fit"
        )
    if (config.max_context_length or 0) > max_length:
        yield f"--context {config.max_context_length} is more than the model's limit of {max_length} tokens"
    if (shortfall := model_plan.shortfall) is not None:
        yield _describe_shortfall(shortfall, model_plan)

    # Speed.
    if plan.max_models == 1 and config.max_lora_adapters is None:
        yield (
            f"only one model of rank {config.max_lora_rank} can train at a time; with a lower --rank more models fit"
        )
    if plan.passes.micro_batch_tokens <= MIN_TOKENS * devices.number // model_plan.chosen.mesh.tp:
        yield f"micro-batches of {MIN_TOKENS} tokens on each device are too small to keep it busy"
    if plan.dtype != "bfloat16":
        yield f"the rates are for products in bfloat16; in {plan.dtype} they are lower"
    if kind.family == "gpu" and devices.gpu_share < GPU_SHARE:
        yield (
            f"JAX takes {format_bytes(devices.limit_bytes)} of the {format_bytes(kind.memory_bytes)} of each GPU; set "
            f"--backend-config.gpu-memory-share {GPU_SHARE} to use more"
        )
