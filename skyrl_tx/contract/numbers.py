"""The numeric fields of requests as one table: their ranges, and which are integers.

API and engine check numbers with this table, so a wrong number is refused with its name, its value
and the range. Limits of a backend, for example its highest LoRA rank, are passed as `high`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from skyrl_tx.contract.arrays import NumberArray
from skyrl_tx.contract.errors import FieldError

MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_INT32 = 2**31 - 1
MAX_SAMPLES = 4096
"""Maximum number of samples of one prompt. The response to the POST has an id for each of them."""
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class NumberField:
    """The numbers that a field accepts: from `low` to `high`, and the numbers in `also`.

    `excludes` names a bound that is not accepted itself. For example, `NumberField(0, 1,
    excludes="low")` accepts 1 and 0.5, but not 0.
    """

    low: float
    high: float
    excludes: Literal["low", "high"] | None = None
    is_integer: bool = False
    also: tuple[int, ...] = ()

    def accepts(self, value: float, high: float) -> bool:
        """Return whether the field accepts a number, with `high` as the upper bound.

        NaN is never accepted.
        """
        if value in self.also:
            return True
        if self.is_integer and value != value // 1:
            return False
        is_excluded = (self.excludes == "low" and value == self.low) or (self.excludes == "high" and value == high)
        return self.low <= value <= high and not is_excluded

    def describe(self, high: float) -> str:
        """Describe the range, for example "from 1 to 4096, or -1"."""
        if high == self.low == 0:
            return "0: this server does not offer it"
        if self.excludes is not None:
            return f"in (0, {high:g}]" if self.excludes == "low" else f"in [{self.low:g}, {high:g})"
        if high == MAX_FLOAT32:
            return f"a finite number (float32), {self.low:g} or more{self._describe_also()}"
        return f"from {self.low} to {high}{self._describe_also()}"

    def _describe_also(self) -> str:
        return "".join(f", or {value}" for value in self.also)


NUMBERS: Mapping[str, NumberField] = {
    # Models
    "rank": NumberField(1, MAX_INT32, is_integer=True),
    "seed": NumberField(-(2**63), 2**64 - 1, is_integer=True),
    # AdamW
    "learning_rate": NumberField(0, MAX_FLOAT32),
    "beta1": NumberField(0, 1, excludes="high"),
    "beta2": NumberField(0, 1, excludes="high"),
    "eps": NumberField(0, MAX_FLOAT32),
    "weight_decay": NumberField(0, MAX_FLOAT32),
    "grad_clip_norm": NumberField(0, MAX_FLOAT32),
    # Losses
    "clip_low_threshold": NumberField(0, MAX_FLOAT32),
    "clip_high_threshold": NumberField(0, MAX_FLOAT32),
    "beta": NumberField(0, MAX_FLOAT32),
    "kl_coeff": NumberField(0, MAX_FLOAT32),
    # Saves
    "ttl_seconds": NumberField(MIN_TTL_S, MAX_TTL_S, is_integer=True),
    # Sampling. Logits of up to a hundred million, divided by the lowest temperature, fit into
    # float32, and so does the reciprocal of the highest one.
    "num_samples": NumberField(1, MAX_SAMPLES, is_integer=True),
    "max_tokens": NumberField(1, MAX_INT32, is_integer=True),
    "temperature": NumberField(1e-30, 2.0**126, also=(0,)),
    "top_p": NumberField(0, 1, excludes="low"),
    "top_k": NumberField(1, MAX_INT32, is_integer=True, also=(0, -1)),
    # Sampling, with vLLM's ranges
    "min_p": NumberField(0, 1),
    "presence_penalty": NumberField(-2, 2),
    "frequency_penalty": NumberField(-2, 2),
    "repetition_penalty": NumberField(0, MAX_FLOAT32, excludes="low"),
    "logit_bias": NumberField(-100, 100),
    "min_tokens": NumberField(0, MAX_INT32, is_integer=True),
    "stop_token": NumberField(0, MAX_INT32, is_integer=True),
    "topk_logprobs": NumberField(0, MAX_INT32, is_integer=True),
    "prompt_alt_tokens_k": NumberField(0, MAX_INT32, is_integer=True),
    "prompt_logprobs_last_n": NumberField(1, MAX_INT32, is_integer=True),
    # Tensors
    "int32": NumberField(-(2**31), MAX_INT32, is_integer=True),
    "int64": NumberField(-(2**63), 2**63 - 1, is_integer=True),
}
_ANY = NumberField(-MAX_FLOAT32, MAX_FLOAT32)
"""The range of a setting of a loss that another package defines. Its name is not in `NUMBERS`."""
_IN_ORDER = (("clip_low_threshold", "clip_high_threshold"),)
"""Pairs of fields. The first number must not be greater than the second."""


def check_number(name: str, value: float, *, field: str | None = None, high: float | None = None) -> None:
    """Raise FieldError unless a number is in the range of its field.

    Args:
        name: The name in the request, for example `adam_params.eps`.
        value: The number.
        field: The name of the field in `NUMBERS`. By default, it is the last part of `name`.
        high: The highest number that the backend supports.
    """
    allowed = NUMBERS.get(field or name.rpartition(".")[2], _ANY)
    limit = allowed.high if high is None else min(high, allowed.high)
    if not allowed.accepts(value, limit):
        raise FieldError(f"{name} {str(value)[:100]} must be {allowed.describe(limit)}", name)


def check_order(prefix: str, values: Mapping[str, float]) -> None:
    """Raise FieldError if two numbers of a request are in the wrong order."""
    for low, high in _IN_ORDER:
        if low in values and high in values and values[low] > values[high]:
            raise FieldError(
                f"{prefix}{low} {values[low]} must not be greater than {high} {values[high]}", prefix + low
            )


def make_integers(values: Sequence[float], dtype: str, name: str) -> NumberArray:
    """Return an integer array. Raises FieldError for the first number that `dtype` cannot hold."""
    array, allowed = np.array(values, np.float64), NUMBERS[dtype]
    wrong = ~((array >= allowed.low) & (array < allowed.high + 1.0) & (array == np.floor(array)))
    if wrong.any():
        index = int(np.argmax(wrong))
        check_number(f"{name}[{index}]", values[index], field=dtype)
    return array.astype(dtype)
