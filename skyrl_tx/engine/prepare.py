"""Convert requests to the input of the backend, and check and convert what it returns.

A fault of a backend, for example a float64 array, makes its request fail with an error that names
the fault. Without these checks, clients would get wrong numbers or results that they cannot read.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.batches import PassExample, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.constraints import MakeConstraint
from skyrl_tx.contract.custom_loss import LOGPROBS, CustomLoss
from skyrl_tx.contract.errors import BackendLost, RequestError, ServerError
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.losses import TARGET_TOKENS, LossSpec
from skyrl_tx.contract.requests import Datum, ModelPass, PromptOptions, Sample
from skyrl_tx.contract.results import ForwardBackwardOutput, PassResult, SampledSequence
from skyrl_tx.process.setup import CannotServe

LORA_TARGETS = frozenset({"attn", "mlp", "unembed"})

_log = logging.getLogger(__name__)


def make_pass_examples(
    request_id: RequestId, model_id: ModelId, request: ModelPass, capabilities: Capabilities
) -> Iterator[PassExample]:
    """Yield the examples of a valid pass in the dtypes of the contract.

    Loss inputs and loss config values that the request leaves out have their defaults.
    """
    custom = request.custom or None
    if custom is not None:
        config: dict[str, float] = {}
        make_inputs = partial(_make_custom_inputs, loss=custom)
    else:
        spec = capabilities.losses[request.loss]
        config = {name: float(request.loss_config.get(name, default)) for name, default in spec.config.items()}
        make_inputs = partial(_fill_loss_inputs, spec=spec)

    for datum in request.data:
        yield PassExample(
            request_id=request_id,
            model_id=model_id,
            tokens=np.ascontiguousarray(datum.tokens, np.int32),
            loss=request.loss,
            loss_inputs=make_inputs(datum),
            loss_config=config,
            custom=custom,
        )


def _make_custom_inputs(datum: Datum, loss: CustomLoss) -> Mapping[str, NumberArray]:
    inputs: dict[str, NumberArray] = {}
    for declared in loss.inputs:
        if declared.name != LOGPROBS:
            array = np.ascontiguousarray(datum.loss_inputs[declared.name], np.float32)
            inputs[declared.name] = array.reshape(()) if declared.rank == 0 else array
    inputs[TARGET_TOKENS] = np.ascontiguousarray(datum.loss_inputs[TARGET_TOKENS], np.int32)
    return inputs


def _fill_loss_inputs(datum: Datum, spec: LossSpec) -> Mapping[str, NumberArray]:
    # A missing input gets the shape of another input. Targets are never missing.
    shape = next((array.shape for array in datum.loss_inputs.values()), datum.tokens.shape)
    inputs: dict[str, NumberArray] = {}
    for name, expected in spec.inputs.items():
        dtype = np.int32 if expected.is_integer else np.float32
        array = datum.loss_inputs.get(name)
        inputs[name] = np.full(shape, expected.fill, dtype) if array is None else np.ascontiguousarray(array, dtype)
    return inputs


def combine_pass_results(results: Sequence[PassResult], num_tokens: int) -> ForwardBackwardOutput:
    """Combine the results of the examples of one request.

    The SDK splits a large request into chunks and combines the metrics of the chunks. The suffix of
    a metric, for example `:sum`, says how. It weights means by the number of datums of a chunk, but
    our means are over positions. So each mean comes with its sum and count: the sum over all chunks
    divided by the count over all chunks is the correct mean. A mean over no positions is left out.

    Other metrics, for example of custom losses, are sums, means and maxima over datums, as the SDK
    weights them.
    """
    # Add up the results.
    sums: dict[str, float] = {"loss": 0.0}
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    other: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, term in result.means.items():
            totals[name] = totals.get(name, 0.0) + term.total
            counts[name] = counts.get(name, 0.0) + term.count
        for name, value in result.metrics.items():
            if name.endswith(":max"):
                other[name] = max(other.get(name, value), value)
            else:
                other[name] = other.get(name, 0.0) + value

    # Name the metrics.
    metrics = {f"{name}:sum": float(value) for name, value in sums.items()}
    metrics |= {"num_tokens:sum": float(num_tokens), "num_datums:sum": float(len(results))}
    for name, total in totals.items():
        metrics |= {f"{name}:sum": float(total), f"{name}_count:sum": float(counts[name])}
        if counts[name]:
            metrics[f"{name}:mean"] = float(total / counts[name])
    for name, total in other.items():
        metrics[name] = total / len(results) if name.endswith(":mean") else total
    return ForwardBackwardOutput(logprobs=tuple(result.logprobs for result in results), metrics=metrics)


def make_sample_request(
    request_id: RequestId,
    request: Sample,
    capabilities: Capabilities,
    cache_scope: str = "",
    make_constraint: MakeConstraint | None = None,
) -> SampleRequest:
    """Convert a valid sample request.

    If `max_tokens` is null, it becomes the rest of the context.
    """
    max_tokens = request.params.max_tokens
    if max_tokens is None:
        max_tokens = capabilities.max_context_length - request.prompt.size
    return SampleRequest(
        request_id=request_id,
        sampler=request.sampler,
        prompt=np.ascontiguousarray(request.prompt, np.int32),
        num_samples=request.num_samples,
        params=replace(request.params, max_tokens=max_tokens),
        options=request.options,
        cache_scope=cache_scope,
        make_constraint=make_constraint,
    )


def slice_sample_request(request: SampleRequest, first: int, end: int) -> SampleRequest:
    """Return a request for the samples `first` to `end` (exclusive).

    Only the first part has the prompt options.
    """
    options = PromptOptions(sample_topk=request.options.sample_topk) if first else request.options
    return replace(request, first_index=first, num_samples=end - first, options=options)


def start_backend(backend: AbstractBackend) -> Capabilities:
    """Start a backend, and check what it returns.

    Errors about a wrong model, path or setting keep their type. Raises CannotServe for other
    errors, and ServerError for wrong capabilities.
    """
    try:
        capabilities = backend.start()
    except (RequestError, OSError, ValueError, BackendLost):
        raise
    except Exception as error:
        raise CannotServe(f"start() of the backend failed: {type(error).__name__}: {error}") from error
    check_capabilities(capabilities)
    return capabilities


def check_capabilities(capabilities: Any) -> None:
    """Raise ServerError unless `capabilities` is what `AbstractBackend.start` must return."""
    if not isinstance(capabilities, Capabilities):
        raise _report(f"start returned {type(capabilities).__name__} instead of Capabilities")
    if unknown := capabilities.lora_targets - LORA_TARGETS:
        names = ", ".join(map(repr, sorted(LORA_TARGETS)))
        raise _report(f"Capabilities.lora_targets contains {min(unknown)!r}, but may only contain {names}")


def check_pass_results(examples: Sequence[PassExample], results: Sequence[PassResult]) -> None:
    """Raise ServerError unless the results of the examples of one request have the right form.

    The caller has checked their number.
    """
    for index, (example, result) in enumerate(zip(examples, results, strict=True)):
        where = f"of the pass result of example {index}"
        _check_float32(f"logprobs {where}", result.logprobs, example.loss_inputs[TARGET_TOKENS].shape)
        if "loss" not in result.sums:
            raise _report(f'sums {where} lack "loss"')
        for name in (*result.sums, *result.means):
            if ":" in name:
                raise _report(f"the name {name!r} in sums or means {where} contains a colon; the engine adds suffixes")


def check_pass_count(num_results: int, num_examples: int) -> None:
    """Raise ServerError unless a pass has one result for each example."""
    if num_results != num_examples:
        raise _report(f"a pass returned {num_results} results for {num_examples} examples")


def check_sequence(sequence: SampledSequence) -> None:
    """Raise ServerError unless the arrays of a complete sample have the right form."""
    if sequence.tokens.dtype != np.int32:
        raise _report(f"tokens of SampleDelta are {sequence.tokens.dtype}, and must be int32")
    _check_float32("logprobs of SampleDelta", sequence.logprobs, sequence.tokens.shape)


def check_deltas(num_deltas: int, num_samples: int) -> None:
    """Raise ServerError if a decode slice gave no delta although samples are running."""
    if num_samples and not num_deltas:
        raise _report(f"step_sample returned no delta, although {num_samples} samples are running")


def _check_float32(name: str, value: object, shape: tuple[int, ...]) -> None:
    if not isinstance(value, np.ndarray):
        raise _report(f"{name} are of type {type(value).__name__}, and must be a NumPy array")
    array = cast(NumberArray, value)
    if array.dtype != np.float32 or array.shape != shape:
        raise _report(f"{name} are {array.dtype} of shape {array.shape}, and must be float32 of shape {shape}")


def _report(fault: str) -> ServerError:
    """Log a fault of the backend, and return the error for the client."""
    _log.error("fault of the backend: %s", fault)
    return ServerError(f"fault of the backend: {fault}")
