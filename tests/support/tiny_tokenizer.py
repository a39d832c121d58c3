"""Training of the quickstart's tokenizer: `python -m tests.support.tiny_tokenizer` writes its file in the package."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from skyrl_tx.tools.quickstart import model
from skyrl_tx.tools.quickstart.training import load_excerpt

PACKAGED = Path(model.__file__).parent / "tiny_model"
VOCAB_SIZE: int = json.loads((PACKAGED / "config.json").read_text())["vocab_size"]

# The special tokens of Qwen3, in its order. Chat renderers for Qwen3 expect each to be one id.
CONTROL_TOKENS: list[str] = json.loads((PACKAGED / "tokenizer_config.json").read_text())["additional_special_tokens"]
# Added tokens of Qwen3 that decoders show.
MARKUP_TOKENS = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]

# Words with their leading space, single digits (numbers are tokenized digit by digit), runs of signs, newlines.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*\n+|\s+"


def excerpt_texts() -> list[str]:
    """Return what the tokenizer is trained on: the training questions of the excerpt of GSM8K, and their answers."""
    return [text for question in load_excerpt().train for text in (question.text, question.answer)]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer with the ids 0 … VOCAB_SIZE - 1, added tokens included; deterministic.

    Raises ValueError if the texts are too short.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
    learned = tokenizer.get_vocab_size()
    if learned != VOCAB_SIZE:
        raise ValueError(f"the texts are too short to learn {VOCAB_SIZE} tokens: they gave {learned}")
    return tokenizer


if __name__ == "__main__":
    train_tokenizer(excerpt_texts()).save(str(PACKAGED / "tokenizer.json"))
