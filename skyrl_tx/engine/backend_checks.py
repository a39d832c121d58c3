"""Checks of the results of a backend.

A fault of a backend, for example a float64 array, makes its request fail with an error that names
the fault. Without these checks, clients would get wrong numbers or results that they cannot read.
"""

import logging
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.batches import PassExample
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, RequestError, ServerError
from skyrl_tx.contract.losses import TARGET_TOKENS
from skyrl_tx.contract.results import PassResult, SampledSequence
from skyrl_tx.process.setup import CannotServe

LORA_TARGETS = frozenset({"attn", "mlp", "unembed"})

_log = logging.getLogger(__name__)


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
