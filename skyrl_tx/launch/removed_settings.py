"""Settings of 0.2 that no longer exist.

For one release, a server ignores them and logs a warning.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_REMOVED: Mapping[str, str] = {
    # API
    "max_streams": "64 streams get tokens while they are decoded",
    "max_inflight_bytes": "four times --max-request-bytes applies",
    "failed_key_limit": "20 wrong keys from one address apply",
    "retrieve_hold_s": "polls are held for 30 seconds",
    "large_result_bytes": "results of more than 1 MiB are announced by their size",
    "engine_silence_s": "10 seconds apply",
    "download_url_ttl_s": "download URLs are valid for an hour",
    "request_threads": "100 threads handle requests",
    "max_connections_per_address": "three quarters of the limit of open files apply",
    "header_timeout_s": "10 seconds apply",
    "body_timeout_s": "30 seconds apply",
    # Engine
    "max_engine_starts": "the server ends after 5 starts without progress",
    "gap_timeout_s": "10 seconds apply",
    "training_steps_per_turn": "one step applies",
    "decode_slices_per_turn": "one slice applies",
    "snapshot_interval_s": "snapshots are 60 seconds apart",
    "snapshot_interval_requests": "a snapshot follows 100 training requests",
    "snapshot_max_share": "snapshots take 2 % of the time at most",
    "max_backlog_bytes": "2 GiB apply",
    "max_queued_sample_bytes": "1 GiB applies",
    "max_attempts": "a request fails after 3 crashes",
    "session_timeout_s": "30 minutes apply",
    "run_retention_s": "30 days apply",
    "sampler_retention_s": "a day applies",
    "max_ephemeral_sampler_bytes": "32 GiB apply",
    "min_free_disk_bytes": "1 GiB stays free",
    "max_pending_sampler_writes": "8 writes may wait",
    "result_retention_s": "10 minutes apply",
    "request_retention_s": "an hour applies",
    "deletion_undo_s": "a day applies",
    "max_trash_bytes": "32 GiB apply",
    "kept_sample_retention_s": "7 days apply",
    "max_kept_sample_bytes": "64 MiB for an owner and a model apply",
    "housekeeping_interval_s": "60 seconds apply",
    "hosts.silence_s": "--step-timeout-s applies",
    # Backend jax
    "backend_config.compile_threads": "on CPU half of the cores compile, at most 4; elsewhere all but two",
    "backend_config.max_pass_tokens": "65,536 tokens apply",
    "backend_config.attention_kernel": "the kernel for the device applies, or --backend-config.kernels loops",
    "backend_config.experts_kernel": "the kernel for the device applies, or --backend-config.kernels loops",
    "backend_config.pages_kernel": "the kernel for the device applies, or --backend-config.kernels loops",
    "backend_config.decode_slice_tokens": "16 tokens apply",
    "backend_config.async_decoding": "it is on for GPU and TPU, and off for CPU",
    "backend_config.prefill_tokens": "2,048 tokens apply on CPU, 8,192 elsewhere",
    "backend_config.prefill_chunk_tokens": "256 tokens apply on CPU, 512 elsewhere",
    "backend_config.max_topk_logprobs": "20 apply",
    # Sampler vllm
    "sampler_config.port": "a free port applies",
    "sampler_config.model": "the first model that the server lists applies",
    "sampler_config.stream_tokens": "16 tokens apply",
    "sampler_config.start_timeout_s": "10 minutes apply with a URL, an hour without",
    "sampler_config.connect_timeout_s": "10 seconds apply",
    "sampler_config.load_timeout_s": "2 minutes apply",
    "sampler_config.silence_timeout_s": "5 minutes apply",
    "sampler_config.lost_after_s": "10 seconds apply",
    "sampler_config.outage_timeout_s": "10 minutes apply",
    "sampler_config.max_restarts": "3 apply",
}
"""The removed settings, and what the server does instead.

Names have dots as in a flag, and underscores as in the file.
"""

Exists = Callable[[str], bool]
"""Returns whether a setting exists.

One backend may still have a setting that another backend lost.
"""


def is_removed(name: str) -> bool:
    """Whether a setting existed in the last release, but no longer exists."""
    return name in _REMOVED


def accept_removed_flags(parser: argparse.ArgumentParser, exists: Exists) -> None:
    """Let a parser accept the flags of removed settings, hidden from --help.

    The parsed arguments have the names of the given ones in `removed_settings`.
    """
    for name in _REMOVED:
        if not exists(name):
            flag = name.replace("_", "-")
            parser.add_argument(
                *(f"--{flag}", f"--no-{flag}"),
                action="append",
                nargs="?",
                # Whether a value follows or not, the name of the setting is recorded.
                type=lambda _, name=name: name,
                const=name,
                dest="removed_settings",
                default=[],
                help=argparse.SUPPRESS,
            )


def drop_values(values: Mapping[str, Any], exists: Exists, prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """Drop removed settings from values of the environment or a file. Returns their names too."""
    remaining: dict[str, Any] = {}
    names: list[str] = []
    for key, value in values.items():
        name = prefix + key
        if name in _REMOVED and not exists(name):
            names.append(name)
        elif isinstance(value, Mapping) and not prefix:
            remaining[key], inner = drop_values(value, exists, f"{name}.")
            names += inner
        else:
            remaining[key] = value
    return remaining, names


def describe_removed(names: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each removed setting that was given."""
    for name in dict.fromkeys(names):
        yield f"--{name.replace('_', '-')} no longer exists and is ignored: {_REMOVED[name]}"
