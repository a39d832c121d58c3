"""Requests into what a backend takes, and what it gives into results. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.batches import PassExample, PreparedModelPassBatch, SampleRequest
from skyrl_tx.contract.capabilities import Capabilities, LossSpec
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Datum, ModelPass, PromptOptions, Sample
from skyrl_tx.contract.results import ForwardBackwardOutput, PassResult


def pass_examples(
    request_id: RequestId, model_id: ModelId, request: ModelPass, capabilities: Capabilities
) -> Iterator[PassExample]:
    """One checked request's examples: every input there, in the contract's dtypes, and every config value."""
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


def _loss_inputs(datum: Datum, spec: LossSpec) -> Mapping[str, NumberArray]:
    # Absent inputs take the shape of those that came: that of the targets, which a loss has and cannot do without.
    shape = next((array.shape for array in datum.loss_inputs.values()), datum.tokens.shape)
    inputs: dict[str, NumberArray] = {}
    for name, expected in spec.inputs.items():
        dtype = np.int32 if expected.is_integer else np.float32
        array = datum.loss_inputs.get(name)
        inputs[name] = np.full(shape, expected.fill, dtype) if array is None else np.ascontiguousarray(array, dtype)
    return inputs


def pass_batch(requests: Sequence[tuple[PassExample, ...]]) -> PreparedModelPassBatch:
    """Requests side by side."""
    return PreparedModelPassBatch(examples=tuple(example for examples in requests for example in examples))


def pass_output(results: Sequence[PassResult], num_tokens: int) -> ForwardBackwardOutput:
    """Fold one request's results as the SDK folds those of chunks: each metric name ends in its way of folding.

    The SDK weights the means of chunks by their datums, ours are over positions: totals and counts come beside them,
    whose quotient is the mean over any number of chunks. Where nothing was counted there is no mean, and the SDK
    leaves out a name that a chunk lacks.
    """
    sums: dict[str, float] = {"loss": 0.0}
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    for result in results:
        for name, value in result.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, term in result.means.items():
            totals[name] = totals.get(name, 0.0) + term.total
            counts[name] = counts.get(name, 0.0) + term.count
    metrics = {f"{name}:sum": float(value) for name, value in sums.items()}
    metrics |= {"num_tokens:sum": float(num_tokens), "num_datums:sum": float(len(results))}
    for name, total in totals.items():
        metrics |= {f"{name}:sum": float(total), f"{name}_count:sum": float(counts[name])}
        if counts[name]:
            metrics[f"{name}:mean"] = float(total / counts[name])
    return ForwardBackwardOutput(logprobs=tuple(result.logprobs for result in results), metrics=metrics)


def sample_request(request_id: RequestId, request: Sample, capabilities: Capabilities) -> SampleRequest:
    """A checked request with its length settled."""
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
    )


def sample_part(request: SampleRequest, first: int, end: int) -> SampleRequest:
    """Some of a request's samples; what is asked of its prompt goes with the first of them."""
    options = PromptOptions(sample_topk=request.options.sample_topk) if first else request.options
    return replace(request, first_index=first, num_samples=end - first, options=options)
