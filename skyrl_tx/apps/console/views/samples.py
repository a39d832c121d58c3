"""View models of sampled sequences, in the groups of their prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptSample

Decode = Callable[[Sequence[int]], str | None]
"""Returns the text of tokens, or None if the tokenizer is unknown."""

_SHOWN_TOKENS = 4000
_SHOWN_IDS = 600
_SHOWN_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sampled sequence."""

    number: int
    text: str
    is_text: bool
    """False if `text` shows the ids of tokens."""
    num_tokens: int
    is_cut: bool
    stop_reason: str
    probability: float | None
    """Geometric mean of the probabilities of its tokens."""
    advantage: float | None
    bar: float
    """Length of the advantage from -1 to 1, where 1 is the largest in the step."""
    kl: float | None
    trainer_gap: float | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """The samples of one prompt."""

    number: int
    request_id: str
    prompt: str
    is_text: bool
    num_prompt_tokens: int
    samples: Sequence[SampleView]


def groups(kept: Sequence[KeptGroup], decode: Decode) -> list[GroupView]:
    """Describe the groups of a step; the best sample of a group first."""
    advantages = [sample.advantage for group in kept for sample in group.samples if sample.advantage is not None]
    largest = max(map(abs, advantages), default=0.0)
    return [_group(number, group, largest, decode) for number, group in enumerate(kept, start=1)]


def _group(number: int, group: KeptGroup, largest: float, decode: Decode) -> GroupView:
    text, is_text = _written(group.prompt.tolist(), decode)
    ordered = sorted(
        group.samples,
        key=lambda sample: (-(sample.advantage if sample.advantage is not None else -math.inf), sample.sample_index),
    )
    return GroupView(
        number=number,
        request_id=group.request_id,
        prompt=text,
        is_text=is_text,
        num_prompt_tokens=group.prompt.size,
        samples=[
            _sample(index, sample, largest, decode) for index, sample in enumerate(ordered[:_SHOWN_SAMPLES], start=1)
        ],
    )


def _sample(number: int, sample: KeptSample, largest: float, decode: Decode) -> SampleView:
    mean = float(sample.logprobs.mean()) if sample.logprobs.size else math.nan
    text, is_text = _written(sample.tokens.tolist(), decode)
    return SampleView(
        number=number,
        text=text,
        is_text=is_text,
        num_tokens=sample.tokens.size,
        is_cut=sample.tokens.size > _SHOWN_TOKENS,
        stop_reason=sample.stop_reason,
        probability=math.exp(min(mean, 0.0)) if math.isfinite(mean) else None,
        advantage=sample.advantage,
        bar=sample.advantage / largest if sample.advantage is not None and largest else 0.0,
        kl=sample.kl,
        trainer_gap=sample.trainer_gap,
    )


def _written(tokens: Sequence[int], decode: Decode) -> tuple[str, bool]:
    """Return tokens as text, or their ids, and whether it is text."""
    text = decode(tokens[:_SHOWN_TOKENS])
    if text is not None:
        return text, True
    ids = " ".join(str(token) for token in tokens[:_SHOWN_IDS])
    return (ids if len(tokens) <= _SHOWN_IDS else f"{ids} …"), False
