"""Between text and tokens: questions as chat prompts, worked answers as training data, samples as text."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tinker import Datum, ModelInput, SampledSequence

from skyrl_tx.quickstart.questions import Question
from skyrl_tx.quickstart.tokenizer import TURN_END

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizer


@dataclass(frozen=True)
class Chat:
    """One question, one answer, in the form of Qwen's chats."""

    tokenizer: "PreTrainedTokenizer"

    @cached_property
    def turn_end(self) -> int:
        """The token that ends an answer."""
        return self.encode(TURN_END)[0]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, control tokens among them."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, question: Question) -> list[int]:
        """Return the tokens after which the model is to answer."""
        return self.encode(f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n")

    def lesson(self, question: Question) -> Datum:
        """Return prompt and worked answer, to be learned from the answer's first token to the end of its turn."""
        prompt, answer = self.prompt(question), [*self.encode(question.answer), self.turn_end]
        tokens = prompt + answer
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[len(prompt) - 1 :] = 1.0
        return Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},  # type: ignore[dict-item]
        )

    def text(self, sequence: SampledSequence) -> str:
        """Return what a sample says, without the token that ended it."""
        tokens = sequence.tokens[:-1] if sequence.tokens[-1:] == [self.turn_end] else sequence.tokens
        text = self.tokenizer.decode(tokens)
        assert isinstance(text, str)
        return text
