"""The names of a text model's tensors in a checkpoint that has it as a part, or under another name."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nesting:
    """A prefix, and what it stands for in the checkpoint of the text model alone."""

    prefix: str
    plain: str

    def add_prefix(self, name: str) -> str:
        """Return the name here of a tensor or module of the text model."""
        return self.prefix + name.removeprefix(self.plain) if name.startswith(self.plain) else name


_NOT_NESTED = Nesting("", "")
_NESTINGS = (
    Nesting("backbone.", "model."),  # Nemotron-H, whose modules have the plain names in transformers
    Nesting("model.language_model.", "model."),  # Qwen3.5 and new files of Gemma 3; the unembedding has its plain name
    Nesting("language_model.", ""),  # Kimi K2.5 and Gemma 3
)


def find_nesting(names: Collection[str]) -> Nesting:
    """Return how a checkpoint with these tensors nests its text model, which most do not."""
    return next((each for each in _NESTINGS if any(name.startswith(each.prefix) for name in names)), _NOT_NESTED)
