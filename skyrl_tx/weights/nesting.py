"""Tensor names of checkpoints that contain a text model and other parts, for example vision."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Nesting:
    """How a checkpoint with other parts names the tensors of its text model.

    Names have `prefix` where a checkpoint of the text model alone has `plain`. For example, with
    the prefix `model.language_model.` and the plain prefix `model.`, the tensor `model.norm.weight`
    is named `model.language_model.norm.weight`.
    """

    prefix: str
    plain: str

    def add_prefix(self, name: str) -> str:
        """Return the name of a tensor or module of the text model in this checkpoint."""
        return self.prefix + name.removeprefix(self.plain) if name.startswith(self.plain) else name

    def remove_prefix(self, name: str) -> str:
        """Return the name in the text model alone. The inverse of `add_prefix`."""
        return self.plain + name.removeprefix(self.prefix) if self.prefix and name.startswith(self.prefix) else name


NOT_NESTED = Nesting("", "")
_NEXT_TO_VISION = Nesting("model.language_model.", "model.")  # Qwen3.5, new files of Gemma 3; lm_head has no prefix
_WHOLE_IN_VISION = Nesting("language_model.", "")  # Kimi K2.5 and Gemma 3
_NESTINGS = (
    Nesting("backbone.", "model."),  # Nemotron-H; transformers uses the plain names
    _NEXT_TO_VISION,
    _WHOLE_IN_VISION,
)


def find_nesting(names: Collection[str]) -> Nesting:
    """Return how a checkpoint that has tensors with these names nests its text model.

    Most checkpoints do not nest it, and the result is NOT_NESTED.
    """
    return next(
        (nesting for nesting in _NESTINGS if any(name.startswith(nesting.prefix) for name in names)), NOT_NESTED
    )


def find_module_nesting(config: Mapping[str, Any]) -> Nesting:
    """Return how the model class that `config.json` names nests its text model.

    Adapters for transformers and vLLM contain module names of this class. The names of modules can
    differ from the names of the checkpoint's tensors.
    """
    names = [name for name in config.get("architectures") or () if name.endswith("ForConditionalGeneration")]
    if not names:
        return NOT_NESTED
    return _WHOLE_IN_VISION if names[0].startswith("Kimi") else _NEXT_TO_VISION
