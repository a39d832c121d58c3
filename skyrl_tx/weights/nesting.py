"""Names of a text model's tensors in a checkpoint that nests it, for example next to vision."""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Nesting:
    """A prefix that a checkpoint has where a checkpoint of the text model alone has `plain`."""

    prefix: str
    plain: str

    def add_prefix(self, name: str) -> str:
        """Return the name of a tensor or module of the text model in this checkpoint."""
        return self.prefix + name.removeprefix(self.plain) if name.startswith(self.plain) else name


_NOT_NESTED = Nesting("", "")
_NESTINGS = (
    Nesting("backbone.", "model."),  # Nemotron-H; transformers uses the plain names
    Nesting("model.language_model.", "model."),  # Qwen3.5 and new files of Gemma 3; lm_head keeps its plain name
    Nesting("language_model.", ""),  # Kimi K2.5 and Gemma 3
)


def find_nesting(names: Collection[str]) -> Nesting:
    """Return how a checkpoint with tensors of these names nests its text model.

    Most do not nest it.
    """
    return next(
        (nesting for nesting in _NESTINGS if any(name.startswith(nesting.prefix) for name in names)), _NOT_NESTED
    )
