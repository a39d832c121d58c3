"""An account as text and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict

from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.backends.jax.kernel_choice import explain_kernels
from skyrl_tx.backends.jax.mesh import make_training_layout
from skyrl_tx.backends.jax.start_plan import make_abstract_layout
from skyrl_tx.launch.command_line import Record, format_bytes, format_table
from skyrl_tx.tools.plan.meshes import Candidate, LongRows
from skyrl_tx.tools.plan.model_plan import ModelPlan

_SHOWN_MESHES = 4


def make_record(account: ModelPlan) -> Record:
    """Return the account as a JSON object. Bytes are of each device, tokens per second of all together."""
    devices, plan, samples = account.devices, account.plan, account.plan.samples
    return {
        "base_model": account.base_model,
        "architecture": account.model.architecture,
        "num_parameters": plan.num_parameters,
        "num_active_parameters": account.num_active,
        "dtype": plan.dtype,
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
        "mesh": account.chosen.mesh.model_dump(),
        "meshes": [_make_candidate_record(each) for each in (account.chosen, *account.others)],
        "fits": account.fits,
        "memory": [asdict(item) for item in account.items],
        "free_bytes": devices.limit_bytes - account.used_bytes,
        "limits": {
            "context_tokens": samples.max_length,
            "kv_tokens": samples.tokens,
            "sample_slots": samples.num_slots,
            "samples_of_longest_context": account.samples_at_context,
            "models": plan.max_models,
            "row_tokens": plan.longest_row,
            "row_host_bytes": plan.offloaded_bytes,
            "micro_batch_tokens": plan.passes.micro_batch_tokens,
            "is_rematerialized": plan.passes.remat,
        },
        "long_rows": None if account.long_rows is None else _make_long_rows_record(account.long_rows),
        "kernels": list(explain_kernels(plan.kernels, account.model)),
        "rates": [asdict(rate) for rate in account.rates],
        "warnings": list(account.warnings),
    }


def format_plan(account: ModelPlan) -> Iterator[str]:
    """Yield the account as text."""
    devices, plan, samples = account.devices, account.plan, account.plan.samples
    verdict = "fits" if account.fits else "does not fit"
    yield (
        f"{account.base_model} ({account.model.architecture}, {plan.num_parameters:,} parameters, "
        f"{account.num_active:,} active) {verdict} on {devices} with mesh {account.chosen.mesh}."
    )
    limit = devices.limit_bytes
    yield from ("", f"Memory of each device, {format_bytes(limit)} of which the server may take:")
    rows = [_make_row(item.item, item.bytes, item.detail, limit) for item in account.items]
    rows.append(_make_row("free", limit - account.used_bytes, "", limit))
    yield from format_table(rows)
    yield from ("", "What fits:")
    yield f"  context       {samples.max_length} tokens, prompt and new ones"
    at_context = f"{account.samples_at_context} of {samples.max_length}"
    at_most = f"{samples.num_slots} of {samples.equal_sample_length} tokens, {at_context}"
    yield f"  samples       {at_most}"
    yield f"  models        {plan.max_models} in training at the same time; others are evicted to disk"
    yield f"  micro-batch   {plan.passes.micro_batch_tokens} tokens on all devices"
    yield f"  training row  {plan.longest_row} tokens by memory, {account.model.max_context_length} by the model"
    yield from _format_long_rows(account)
    yield from ("", *explain_kernels(plan.kernels, account.model))
    yield from ("", "Tokens per second on all devices, at most (a roofline):")
    for rate in account.rates:
        expected = rate.expected_tokens_per_s
        share = "no share of it was measured there" if expected is None else f"about {expected:,} are to be expected"
        yield f"  {rate.work:<13} {rate.tokens_per_s:,}, bound by {rate.bound_by}: {rate.detail}; {share}"
    if account.others:
        yield from ("", "Meshes, by the least time to sample a token and train on it:")
        candidates = (account.chosen, *account.others)[:_SHOWN_MESHES]
        yield from format_table([_make_mesh_row(each) for each in candidates])
    for warning in account.warnings:
        yield from ("", f"warning: {warning}")
    yield from ("", f"skyrl-tx serve --base-model {account.base_model}{_format_flags(account.chosen.mesh)}")


def _make_long_rows_record(rows: LongRows) -> Record:
    fitting = None if rows.fitting is None else rows.fitting.model_dump()
    return {"tokens": rows.tokens, "mesh": rows.mesh.model_dump(), "longest": rows.longest, "fitting_mesh": fitting}


def _format_long_rows(account: ModelPlan) -> Iterator[str]:
    """Yield how rows are computed that are longer than a micro-batch."""
    plan, devices = account.plan, account.devices
    shards = make_training_layout(make_abstract_layout(account.chosen.mesh)).num_shards("tokens")
    passes, indent = plan.passes, " " * 16
    most = account.model.max_context_length
    if passes.remat_above is not None and passes.remat_above * shards < most:
        yield f"{indent}of more than {passes.remat_above * shards} tokens: layers rematerialized"
    if passes.offload_above is not None and passes.offload_above * shards < most:
        taken = plan.offloaded_bytes * min(devices.number, devices.kind.per_host)
        yield (
            f"{indent}of more than {passes.offload_above * shards} tokens: layers' inputs in the host's memory, "
            f"{format_bytes(taken)} of each host for the longest"
        )


def _make_row(item: str, size: int, detail: str, limit: int) -> Record:
    shown = f"-{format_bytes(-size)}" if size < 0 else format_bytes(size)
    return {"item": item, "bytes": shown, "share": f"{100 * size / limit:.1f} %", "what": detail}


def _make_candidate_record(each: Candidate) -> Record:
    return {
        "mesh": each.mesh.model_dump(),
        "weight_bytes": each.weight_bytes,
        "has_room": each.has_fitting_weights,
        "training_tokens_per_s": int(each.training.tokens_per_s),
        "sampling_tokens_per_s": int(each.decoding.tokens_per_s),
    }


def _make_mesh_row(each: Candidate) -> Record:
    return {
        "mesh": str(each.mesh),
        "weights": format_bytes(each.weight_bytes) + ("" if each.has_fitting_weights else ", too much"),
        "training": f"{each.training.tokens_per_s:,.0f} ({each.training.by})",
        "sampling": f"{each.decoding.tokens_per_s:,.0f} ({each.decoding.by})",
    }


def _format_flags(mesh: MeshConfig) -> str:
    return "".join(f" --backend-config.mesh.{axis} {size}" for axis, size in mesh.model_dump().items() if size > 1)
