"""Converts requests to the input of a backend, and its results to those of requests. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from msgspec import UnsetType

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.batches import PassExample, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.custom_loss import CUSTOM, LOGPROBS, CustomLoss
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.losses import TARGET_TOKENS, LossSpec
from skyrl_tx.contract.requests import Datum, ModelPass, PromptOptions, Sample
from skyrl_tx.contract.results import ForwardBackwardOutput, PassResult


def pass_examples(
    request_id: RequestId, model_id: ModelId, request: ModelPass, capabilities: Capabilities
) -> Iterator[PassExample]:
    """Yield a valid request's examples, in the contract's dtypes, with all loss inputs and loss config values."""
    if not isinstance(request.custom, UnsetType):
        yield from _custom_examples(request_id, model_id, request, request.custom)
        return
    spec = capabilities.losses[request.loss]
    config = {name: float(request.loss_config.get(name, default)) for name, default in spec.config.items()}
    for datum in request.data:
        yield PassExample(
            request_id=request_id,
            model_id=model_id,
            tokens=np.ascontiguousarray(datum.tokens, np.int32),
            loss=request.loss,
            loss_inputs=_loss_inputs(datum, spec),
            loss_config=config,
        )


def _custom_examples(
    request_id: RequestId, model_id: ModelId, request: ModelPass, loss: CustomLoss
) -> Iterator[PassExample]:
    """Yield the examples of a valid request with a custom loss, in the contract's dtypes."""
    for datum in request.data:
        inputs: dict[str, NumberArray] = {}
        for declared in loss.inputs:
            if declared.name != LOGPROBS:
                array = np.ascontiguousarray(datum.loss_inputs[declared.name], np.float32)
                inputs[declared.name] = array.reshape(()) if declared.rank == 0 else array
        inputs[TARGET_TOKENS] = np.ascontiguousarray(datum.loss_inputs[TARGET_TOKENS], np.int32)
        yield PassExample(
            request_id=request_id,
            model_id=model_id,
            tokens=np.ascontiguousarray(datum.tokens, np.int32),
            loss=CUSTOM,
            loss_inputs=inputs,
            loss_config={},
            custom=loss,
        )


def _loss_inputs(datum: Datum, spec: LossSpec) -> Mapping[str, NumberArray]:
    # Absent inputs take the shape of the present ones. Targets are always present.
    shape = next((array.shape for array in datum.loss_inputs.values()), datum.tokens.shape)
    inputs: dict[str, NumberArray] = {}
    for name, expected in spec.inputs.items():
        dtype = np.int32 if expected.is_integer else np.float32
        array = datum.loss_inputs.get(name)
        inputs[name] = np.full(shape, expected.fill, dtype) if array is None else np.ascontiguousarray(array, dtype)
    return inputs


def pass_output(results: Sequence[PassResult], num_tokens: int) -> ForwardBackwardOutput:
    """Combine the results of one request's examples. Each metric's suffix names how the SDK combines it over chunks.

    The SDK weights means by the number of datums in a chunk, but means here are over positions. So each mean comes with
    its total and count, whose quotient is the mean over any number of chunks. A mean without positions is left out.
    Metrics of custom losses are sums and means over datums, as the SDK weights them.
    """
    sums: dict[str, float] = {"loss": 0.0}
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    custom: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, term in result.means.items():
            totals[name] = totals.get(name, 0.0) + term.total
            counts[name] = counts.get(name, 0.0) + term.count
        for name, value in result.metrics.items():
            custom[name] = custom.get(name, 0.0) + value
    metrics = {f"{name}:sum": float(value) for name, value in sums.items()}
    metrics |= {"num_tokens:sum": float(num_tokens), "num_datums:sum": float(len(results))}
    for name, total in totals.items():
        metrics |= {f"{name}:sum": float(total), f"{name}_count:sum": float(counts[name])}
        if counts[name]:
            metrics[f"{name}:mean"] = float(total / counts[name])
    for name, total in custom.items():
        metrics[name] = total / len(results) if name.endswith(":mean") else total
    return ForwardBackwardOutput(logprobs=tuple(result.logprobs for result in results), metrics=metrics)


def sample_request(
    request_id: RequestId, request: Sample, capabilities: Capabilities, cache_scope: str = ""
) -> SampleRequest:
    """Convert a valid request. `max_tokens` null becomes what fits in the context."""
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
    )


def sample_part(request: SampleRequest, first: int, end: int) -> SampleRequest:
    """Return the samples from `first` to `end` of a request. Only the first part has the prompt options."""
    options = PromptOptions(sample_topk=request.options.sample_topk) if first else request.options
    return replace(request, first_index=first, num_samples=end - first, options=options)
