"""Formats the plan of a model as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.kernel_choice import explain_kernels
from skyrl_tx.backends.jax.mesh import make_training_layout
from skyrl_tx.backends.jax.start_plan import make_abstract_layout
from skyrl_tx.launch.command_line import Record, format_table
from skyrl_tx.process.text import format_bytes
from skyrl_tx.tools.plan.model_plan import ModelPlan
from skyrl_tx.tools.plan.roofline import Candidate, LengthShortfall

_NUM_SHOWN_MESHES = 4


def make_record(model_plan: ModelPlan) -> Record:
    """Return the plan as a JSON object. Bytes are per device; tokens per second are for all devices together."""
    devices, plan, samples = model_plan.devices, model_plan.plan, model_plan.plan.samples
    return {
        # The model and the devices.
        "base_model": model_plan.base_model,
        "architecture": model_plan.model.architecture,
        "num_parameters": plan.num_parameters,
        "num_active_parameters": model_plan.num_active,
        "dtype": plan.dtype,
        # The hardware.
        "device": {
            "name": devices.kind.name,
            "topology": list(devices.topology),
            "number": devices.number,
            "memory_bytes": devices.kind.memory_bytes,
            "usable_bytes": devices.limit_bytes,
            "flops": devices.kind.flops,
            "bytes_per_s": devices.kind.bytes_per_s,
            "link_bytes_per_s": devices.kind.link_bytes_per_s,
        },
        "mesh": model_plan.chosen.mesh.model_dump(),
        "meshes": [_make_candidate_record(candidate) for candidate in (model_plan.chosen, *model_plan.others)],
        # Memory, limits and speed.
        "fits": model_plan.fits,
        "memory": [asdict(item) for item in model_plan.items],
        "free_bytes": devices.limit_bytes - model_plan.used_bytes,
        "limits": {
            "context_tokens": samples.max_length,
            "kv_tokens": samples.tokens,
            "sample_slots": samples.num_slots,
            "samples_of_longest_context": model_plan.samples_at_context,
            "models": plan.max_models,
            "row_tokens": plan.longest_row,
            "row_host_bytes": plan.offloaded_bytes,
            "micro_batch_tokens": plan.passes.micro_batch_tokens,
            "is_rematerialized": plan.passes.remat,
        },
        "long_rows": None if model_plan.shortfall is None else _make_shortfall_record(model_plan.shortfall),
        "kernels": list(explain_kernels(plan.kernels, model_plan.model)),
        "rates": [asdict(rate) for rate in model_plan.rates],
        "warnings": list(model_plan.warnings),
    }


def format_plan(model_plan: ModelPlan) -> Iterator[str]:
    """Yield the lines of the plan as text."""
    devices, plan, samples = model_plan.devices, model_plan.plan, model_plan.plan.samples
    verdict = "fits" if model_plan.fits else "does not fit"
    yield (
        f"{model_plan.base_model} ({model_plan.model.architecture}, {plan.num_parameters:,} parameters, "
        f"{model_plan.num_active:,} active) {verdict} on {devices} with mesh {model_plan.chosen.mesh}."
    )

    # Memory by item.
    limit = devices.limit_bytes
    yield from ("", f"Memory of each device (the server may use {format_bytes(limit)}):")
    rows = [_make_row(item.item, item.bytes, item.detail, limit) for item in model_plan.items]
    rows.append(_make_row("free", limit - model_plan.used_bytes, "", limit))
    yield from format_table(rows)

    # The sizes that fit, and the kernels.
    yield from ("", "What fits:")
    yield f"  context       {samples.max_length} tokens, including the prompt"
    most = f"{samples.num_slots} at {samples.equal_sample_length} tokens each"
    longest = f"{model_plan.samples_at_context} at {samples.max_length} tokens each"
    yield f"  samples       {most if longest == most else f'{most}, or {longest}'}"
    yield f"  models        {plan.max_models} in training at the same time; idle models are evicted to disk"
    yield f"  micro-batch   {plan.passes.micro_batch_tokens} tokens on all devices together"
    yield f"  training row  {plan.longest_row} tokens fit; the model allows {model_plan.model.max_context_length}"
    yield from _format_long_rows(model_plan)
    yield from ("", *explain_kernels(plan.kernels, model_plan.model))

    # Speed.
    yield from ("", "Upper bound for tokens per second on all devices together (roofline):")
    for rate in model_plan.rates:
        expected = rate.expected_tokens_per_s
        share = "not measured on this hardware" if expected is None else f"expect about {expected:,}"
        yield f"  {rate.work:<13} {rate.tokens_per_s:,}, limited by {rate.bound_by}: {rate.detail}; {share}"
    if model_plan.others:
        yield from ("", "Meshes, fastest first (time to sample a token and train on it):")
        candidates = (model_plan.chosen, *model_plan.others)[:_NUM_SHOWN_MESHES]
        yield from format_table([_make_mesh_row(candidate) for candidate in candidates])

    # Warnings, and the command that serves the model.
    for warning in model_plan.warnings:
        yield from ("", f"warning: {warning}")
    yield from ("", f"skyrl-tx serve --base-model {model_plan.base_model}{_format_flags(model_plan.chosen.mesh)}")


def _make_shortfall_record(shortfall: LengthShortfall) -> Record:
    fitting = None if shortfall.fitting is None else shortfall.fitting.model_dump()
    return {
        "tokens": shortfall.tokens,
        "mesh": shortfall.mesh.model_dump(),
        "longest": shortfall.longest,
        "fitting_mesh": fitting,
    }


def _format_long_rows(model_plan: ModelPlan) -> Iterator[str]:
    """Yield lines that say how training rows longer than a micro-batch are computed."""
    plan, devices = model_plan.plan, model_plan.devices
    shards = make_training_layout(make_abstract_layout(model_plan.chosen.mesh)).num_shards("tokens")
    passes, indent = plan.passes, " " * 16
    max_length = model_plan.model.max_context_length
    if passes.remat_above is not None and passes.remat_above * shards < max_length:
        yield f"{indent}above {passes.remat_above * shards} tokens, layers are rematerialized"
    if passes.offload_above is not None and passes.offload_above * shards < max_length:
        host_bytes = plan.offloaded_bytes * min(devices.number, devices.kind.per_host)
        yield (
            f"{indent}above {passes.offload_above * shards} tokens, the inputs of layers are kept in host memory: "
            f"{format_bytes(host_bytes)} per host for the longest row"
        )


def _make_row(item: str, size: int, detail: str, limit: int) -> Record:
    shown = f"-{format_bytes(-size)}" if size < 0 else format_bytes(size)
    return {"item": item, "bytes": shown, "share": f"{100 * size / limit:.1f} %", "what": detail}


def _make_candidate_record(candidate: Candidate) -> Record:
    return {
        "mesh": candidate.mesh.model_dump(),
        "weight_bytes": candidate.weight_bytes,
        "has_room": candidate.has_fitting_weights,
        "training_tokens_per_s": int(candidate.training.tokens_per_s),
        "sampling_tokens_per_s": int(candidate.decoding.tokens_per_s),
    }


def _make_mesh_row(candidate: Candidate) -> Record:
    return {
        "mesh": str(candidate.mesh),
        "weights": format_bytes(candidate.weight_bytes) + ("" if candidate.has_fitting_weights else ", too much"),
        "training": f"{candidate.training.tokens_per_s:,.0f} ({candidate.training.bottleneck})",
        "sampling": f"{candidate.decoding.tokens_per_s:,.0f} ({candidate.decoding.bottleneck})",
    }


def _format_flags(mesh: MeshConfig) -> str:
    return "".join(f" --backend-config.mesh.{axis} {size}" for axis, size in mesh.model_dump().items() if size > 1)
