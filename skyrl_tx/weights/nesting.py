"""Names of a text model's tensors in a checkpoint that nests it, for example next to vision."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Nesting:
    """A prefix that a checkpoint has where a checkpoint of the text model alone has `plain`."""

    prefix: str
    plain: str

    def add_prefix(self, name: str) -> str:
        """Return the name of a tensor or module of the text model in this checkpoint."""
        return self.prefix + name.removeprefix(self.plain) if name.startswith(self.plain) else name

    def remove_prefix(self, name: str) -> str:
        """Return the name in the text model alone. The inverse of `add_prefix`."""
        return self.plain + name.removeprefix(self.prefix) if self.prefix and name.startswith(self.prefix) else name


NOT_NESTED = Nesting("", "")
_NEXT_TO_VISION = Nesting("model.language_model.", "model.")  # Qwen3.5, new files of Gemma 3; not for lm_head
_WHOLE_IN_VISION = Nesting("language_model.", "")  # Kimi K2.5 and Gemma 3
_NESTINGS = (
    Nesting("backbone.", "model."),  # Nemotron-H; transformers uses the plain names
    _NEXT_TO_VISION,
    _WHOLE_IN_VISION,
)


def find_nesting(names: Collection[str]) -> Nesting:
    """Return how a checkpoint with tensors of these names nests its text model.

    Most do not nest it.
    """
    return next(
        (nesting for nesting in _NESTINGS if any(name.startswith(nesting.prefix) for name in names)), NOT_NESTED
    )


def find_module_nesting(config: Mapping[str, Any]) -> Nesting:
    """Return how the class that a `config.json` names nests the modules of its text model.

    Adapters for transformers and vLLM have the names of these modules. They can differ from the
    names of tensors.
    """
    names = [name for name in config.get("architectures") or () if name.endswith("ForConditionalGeneration")]
    if not names:
        return NOT_NESTED
    return _WHOLE_IN_VISION if names[0].startswith("Kimi") else _NEXT_TO_VISION
