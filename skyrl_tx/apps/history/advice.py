"""Say what slows a run down, and what to change: advice from the time of the run's iterations."""

from statistics import fmean

from skyrl_tx.apps.history.breakdown import Breakdown
from skyrl_tx.apps.history.hints import Hint, name_main_users

_MIN_SHARE = 0.25
"""A bottleneck takes at least this share of the time."""
MIN_ITERATIONS = 3
"""There is no advice before a run has this many steps."""
_MANY_REQUESTS = 4
_SMALL_PASS = 2.0
"""Passes with at most this many examples are small."""
_LOW_DECODE_FILL = 0.1
_LOW_BATCH_FILL = 0.5

Finding = tuple[float, str, str]
"""The share of time that a bottleneck takes, what was found, and what to change."""


def find_advice(breakdown: Breakdown) -> list[Hint]:
    """Return what slows a run down, the largest share of time first."""
    if len(breakdown.iterations) < MIN_ITERATIONS:
        return []

    checks = (_check_client, _check_queue, _check_compilation, _check_weights, _check_sampling, _check_passes)
    findings = sorted(
        (finding for check in checks if (finding := check(breakdown)) is not None and finding[0] >= _MIN_SHARE),
        reverse=True,
    )
    first = breakdown.iterations[0].step
    return [Hint("note", text, advice, first) for _, text, advice in findings]


def _check_client(breakdown: Breakdown) -> Finding:
    share = breakdown.compute_share("client")
    has_samples = breakdown.compute_share("sampling") > 0
    return (
        share,
        f"{share:.0%} of the time no request of this run was open.",
        "Send the next batch before the rewards are done."
        if has_samples
        else "Prepare the next batch while this one trains, and send forward_backward and optim_step before you wait "
        "for a result.",
    )


def _check_queue(breakdown: Breakdown) -> Finding:
    share = breakdown.compute_share("queued")
    names = name_main_users(breakdown.other_users)
    return (
        share,
        f"{share:.0%} of the time requests of this run waited for the device"
        + (f", used by {names}." if names else "."),
        "Ask an admin for a larger weight or another engine, or train when the server is less busy.",
    )


def _check_compilation(breakdown: Breakdown) -> Finding:
    share = breakdown.compute_share("compilation")
    return (
        share,
        f"{share:.0%} of the time this run waited for the compiler.",
        "Use similar lengths and the same number of examples in every step. Each program is compiled only once.",
    )


def _check_weights(breakdown: Breakdown) -> Finding:
    share = breakdown.compute_share("weights")
    return (
        share,
        f"{share:.0%} of the time this run saved or loaded weights.",
        "Save checkpoints less often. To sample, call save_weights_and_get_sampling_client.",
    )


def _check_sampling(breakdown: Breakdown) -> Finding | None:
    """Return why sampling takes long. Only the first cause counts, because it may lead to the next ones."""
    iterations, share = breakdown.iterations, breakdown.compute_share("sampling")
    requests = fmean(iteration.sample_requests for iteration in iterations)
    alone = sum(iteration.alone_s for iteration in iterations) / breakdown.wall_s
    tail = sum(iteration.tail_s for iteration in iterations) / breakdown.wall_s

    # How the requests are sent
    if breakdown.has_single_samples and requests >= _MANY_REQUESTS:
        return (
            share,
            f"{requests:.0f} sample requests per step with one sample each, and several with the same prompt.",
            f"Ask for all samples of a prompt in one request, for example num_samples={min(requests, 16):.0f}.",
        )
    if alone >= _MIN_SHARE and requests >= _MANY_REQUESTS:
        return (
            alone,
            f"The {requests:.0f} sample requests of a step ran one after another, for {alone:.0%} of the time.",
            "Send all of them before you wait for the first result.",
        )

    # How full the decode rows are
    if tail >= _MIN_SHARE:
        return (
            tail,
            f"{tail:.0%} of the time only the last few sample requests of a step were running.",
            "Lower max_tokens, or train on complete groups while the longest samples continue.",
        )
    if breakdown.decode_fill is not None and breakdown.decode_fill < _LOW_DECODE_FILL:
        return (
            share / 2,
            f"Only {breakdown.decode_fill:.0%} of the decode rows were in use while this run sampled.",
            "Sample more prompts at once, or larger groups.",
        )
    return None


def _check_passes(breakdown: Breakdown) -> Finding | None:
    iterations, share = breakdown.iterations, breakdown.compute_share("training")
    passes = fmean(iteration.passes for iteration in iterations)
    datums = fmean(iteration.datums for iteration in iterations)
    if passes >= _MANY_REQUESTS and datums <= _SMALL_PASS * passes:
        return (
            share,
            f"{passes:.0f} forward_backward requests per step for {datums:.0f} examples.",
            "Send the examples of a step in one request. The server splits it if it is large.",
        )

    if breakdown.batch_fill is not None and breakdown.batch_fill < _LOW_BATCH_FILL:
        return (
            share,
            f"Micro-batches were only {breakdown.batch_fill:.0%} full of tokens.",
            "Send more examples in each forward_backward: a micro-batch holds examples of one request.",
        )
    return None
