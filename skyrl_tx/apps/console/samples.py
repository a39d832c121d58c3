"""The samples tab of a run: choose a step and a group, and read the samples grouped by prompt."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_tx.apps.chat.reply import get_service
from skyrl_tx.apps.chat.text import ModelText
from skyrl_tx.apps.console.queries import RunLine
from skyrl_tx.apps.console.visit import Visit
from skyrl_tx.apps.history import kept_samples
from skyrl_tx.apps.history.kept_samples import KeptGroup, KeptSample

Decode = Callable[[Sequence[int]], str | None]
"""Returns the text of tokens, or None if they cannot be decoded."""

_MAX_STEPS = 200
_MAX_GROUPS = 64
_SHOWN_TOKENS = 4000
_SHOWN_IDS = 600
_SHOWN_SAMPLES = 64


def find_owner(visit: Visit, line: RunLine) -> str | None:
    """Return the owner whose samples are shown, or None for all owners."""
    return None if visit.caller.is_admin else line.session.owner


def read_tab(visit: Visit, line: RunLine) -> dict[str, Any]:
    """Return the values for the tab's template.

    `?step=` chooses the step. The default is the result of `choose_step`.
    """
    # The weights after n - 1 optimizer steps make the samples that step n trains on
    owner = find_owner(visit, line)
    kept = visit.read(lambda tx: kept_samples.list_steps(tx, line.row.model_id, owner, _MAX_STEPS))
    steps = [(number + 1, count) for number, count in kept if number is not None]
    step = visit.get_int("step", choose_step([number for number, _ in steps], line.row.num_steps))
    rows = visit.read(lambda tx: kept_samples.read_step(tx, line.row.model_id, step - 1, _MAX_GROUPS, owner=owner))

    groups = describe_groups(rows, make_decoder(get_service(visit.request).text))
    number = visit.get_int("group", 0, maximum=_MAX_GROUPS)
    return {
        "sample_steps": steps,
        "step": step,
        "groups": [group for group in groups if number in (0, group.number)],
        "num_groups": len(groups),
        "group": number,
        "num_samples": sum(len(row.samples) for row in rows),
    }


def choose_step(steps: Sequence[int], num_steps: int) -> int:
    """Return the newest of the steps with samples that the run has completed.

    If the run has completed none of them, return the newest step with samples. `steps` are the
    steps with samples, in descending order. Samples of the newest weights belong to a step that the run has
    not completed: they are not trained on yet, or are from an evaluation.
    """
    newest = steps[0] if steps else 0
    return next((step for step in steps if step <= num_steps), newest)


def make_decoder(text: ModelText) -> Decode:
    """Return a function that decodes tokens.

    The function returns None if there is no tokenizer, or if a token id is out of range.
    """
    if not text.has_tokenizer:
        return lambda _: None

    def decode(tokens: Sequence[int]) -> str | None:
        try:
            return text.decode([token for token in tokens if token >= 0])
        except OverflowError:
            return None

    return decode


@dataclass(frozen=True, slots=True)
class SampleView:
    """A sampled sequence as the page shows it."""

    number: int
    kept: KeptSample
    text: str
    is_cut: bool
    probability: float | None
    """Geometric mean of the probabilities of the sampled tokens."""
    bar: float
    """The advantage divided by the largest absolute advantage of the step."""


@dataclass(frozen=True, slots=True)
class GroupView:
    """The samples of one prompt as the page shows them."""

    number: int
    prompt: str
    is_text: bool
    """False if `prompt` has token ids, because there is no tokenizer."""
    num_prompt_tokens: int
    samples: Sequence[SampleView]


def describe_groups(kept: Sequence[KeptGroup], decode: Decode) -> list[GroupView]:
    """Describe the groups of a step.

    The samples of a group are sorted by advantage, highest first.
    """
    advantages = [sample.advantage for group in kept for sample in group.samples if sample.advantage is not None]
    largest = max(map(abs, advantages), default=0.0)
    return [_describe_group(number, group, largest, decode) for number, group in enumerate(kept, start=1)]


def _describe_group(number: int, group: KeptGroup, largest: float, decode: Decode) -> GroupView:
    text, is_text = _format_tokens(group.prompt.tolist(), decode)
    ordered = sorted(
        group.samples,
        key=lambda sample: -math.inf if sample.advantage is None else sample.advantage,
        reverse=True,
    )

    return GroupView(
        number=number,
        prompt=text,
        is_text=is_text,
        num_prompt_tokens=group.prompt.size,
        samples=[
            _describe_sample(index, sample, largest, decode)
            for index, sample in enumerate(ordered[:_SHOWN_SAMPLES], start=1)
        ],
    )


def _describe_sample(number: int, sample: KeptSample, largest: float, decode: Decode) -> SampleView:
    mean = float(sample.logprobs.mean()) if sample.logprobs.size else math.nan
    text, _ = _format_tokens(sample.tokens.tolist(), decode)
    return SampleView(
        number=number,
        kept=sample,
        text=text,
        is_cut=sample.tokens.size > _SHOWN_TOKENS,
        probability=math.exp(min(mean, 0.0)) if math.isfinite(mean) else None,
        bar=sample.advantage / largest if sample.advantage is not None and largest else 0.0,
    )


def _format_tokens(tokens: Sequence[int], decode: Decode) -> tuple[str, bool]:
    """Return the text of tokens, or their ids if they cannot be decoded.

    The second value is True for text.
    """
    text = decode(tokens[:_SHOWN_TOKENS])
    if text is not None:
        return text, True
    ids = " ".join(str(token) for token in tokens[:_SHOWN_IDS])
    return (ids if len(tokens) <= _SHOWN_IDS else f"{ids} …"), False
