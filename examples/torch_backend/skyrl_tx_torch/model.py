"""The base model of transformers, and adapters on its linear maps by forward hooks.

Legend: T tokens, D embedding, V vocabulary, K targets of a position, I inputs and O outputs of a linear map, R rank.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from skyrl_tx.contract.errors import UserError
from skyrl_tx.contract.state_files import ALPHA, LORA_A, LORA_B, PREFIX, TIED_UNEMBED_MODULE
from skyrl_tx_torch.config import TorchConfig

Tensors = Mapping[str, Tensor]
"""Tensors of an adapter, or its gradients or moments, by their names in files."""

_GROUPS = {"attn": ("attn", "attention"), "mlp": ("mlp", "feed_forward", "ffn")}
_SMALL = 16


@dataclass(frozen=True)
class Target:
    """A linear map that adapters change. `name` is the name of its module in files."""

    name: str
    group: str
    inputs: int
    outputs: int

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of A and B by the names of their tensors in files."""
        return {
            f"{PREFIX}{self.name}{LORA_A}": (rank, self.inputs),
            f"{PREFIX}{self.name}{LORA_B}": (self.outputs, rank),
        }


def find_directory(base_model: str) -> Path:
    """Return the directory of a model. The name of a model on the hub is downloaded. Raises UserError."""
    if Path(base_model).expanduser().is_dir():
        return Path(base_model).expanduser()
    try:
        patterns = ["*.json", "*.txt", "*.jinja", "*.model", "*.safetensors"]
        return Path(snapshot_download(base_model, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise UserError(f"base_model {base_model!r} is neither a directory nor a model on the hub: {error}") from error


def _find_max_length(config: Any) -> int:
    """Return the context length after the scaling of the rope, or 0 if the config has none."""
    length, rope = getattr(config, "max_position_embeddings", None) or 0, getattr(config, "rope_parameters", None) or {}
    factor, original = rope.get("factor") or 1.0, rope.get("original_max_position_embeddings") or 0
    return max(length, int(factor * original)) if rope.get("rope_type") in ("yarn", "llama3") else length


class Model:
    """The frozen base model on one device."""

    def __init__(self, directory: Path, config: TorchConfig) -> None:
        # Choose the device and the dtype.
        has_cuda = torch.cuda.is_available()
        if config.device == "cuda" and not has_cuda:
            raise UserError("--backend-config.device cuda: torch finds no CUDA device")
        self.device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
        full = self.device.type == "cpu" if config.dtype == "auto" else config.dtype == "float32"
        self.dtype = torch.float32 if full else torch.bfloat16
        self._chunk = config.logits_chunk

        # Load the model. Eager attention uses plain products and softmax, which give the same bits every time, also on
        # CUDA.
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=self.dtype, attn_implementation="eager", trust_remote_code=False
        )
        self._model.eval().requires_grad_(False).to(self.device)
        self._head: nn.Linear = self._model.get_output_embeddings()

        # Read its configuration, and find the modules that adapters change.
        self.vocab_size = self._head.out_features
        text_config = self._model.config.get_text_config()
        self.max_length = _find_max_length(text_config) or config.max_context_length
        self._softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self.num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        is_tied = self._head.weight is self._model.get_input_embeddings().weight  # the files decide, not the config
        self.targets = tuple(self._find_targets(is_tied=is_tied))
        has_new_name = "cache" in inspect.signature(self._model.get_decoder().forward).parameters
        self._cache_name = "cache" if has_new_name else "past_key_values"  # before transformers 5.24
        self._adapter: Tensors = {}
        self._scale = 0.0
        self._check_logits()

    def _find_targets(self, *, is_tied: bool) -> Iterator[Target]:
        for name, module in self._model.named_modules():
            if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)) and not isinstance(
                module, nn.Conv1d
            ):
                raise UserError(f"base_model: {name} has its experts in one tensor, which this backend cannot adapt")
            groups = [group for group, parts in _GROUPS.items() if any(part in name for part in parts)]
            if not isinstance(module, nn.Linear) or not (groups or module is self._head):
                continue
            if module is self._head:
                name, groups = TIED_UNEMBED_MODULE if is_tied else name, ["unembed"]
            module.register_forward_hook(partial(self._add_update, name))
            yield Target(name, groups[0], module.in_features, module.out_features)

    def _add_update(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        a_RI = self._adapter.get(f"{PREFIX}{name}{LORA_A}")
        if a_RI is None:
            return None
        b_OR = self._adapter[f"{PREFIX}{name}{LORA_B}"]
        update = (inputs[0].float() @ a_RI.T) @ b_OR.T * self._scale
        return output + update.to(output.dtype)

    def _check_logits(self) -> None:
        """Raise UserError if the model computes logits in another way than `logits`."""
        tokens = torch.arange(min(_SMALL, self.vocab_size), device=self.device)
        with torch.no_grad():
            expected = self._model(input_ids=tokens[None], use_cache=False).logits[0].float()
            found = self.logits(self.compute_hidden(tokens))
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-3):
            raise UserError(f"base_model: {type(self._model).__name__} changes its logits after the unembedding")

    @contextmanager
    def apply_adapter(self, adapter: Tensors | None, rank: int) -> Iterator[None]:
        """Apply an adapter while the context is entered. The backward pass must run in the context as well."""
        self._adapter, self._scale = adapter or {}, ALPHA / rank
        try:
            yield
        finally:
            self._adapter = {}

    def compute_hidden(self, tokens_T: Tensor) -> Tensor:
        """Return the hidden states of the last layer for one sequence, [T, D]."""
        return self._model.get_decoder()(input_ids=tokens_T[None], use_cache=False).last_hidden_state[0]

    def extend(self, tokens_T: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Process more tokens of a sequence.

        Returns the logits after the last token, [V], and the KV cache, which is changed in place.
        """
        past = {self._cache_name: cache}
        found = self._model.get_decoder()(input_ids=tokens_T[None], use_cache=True, **past)
        return self.logits(found.last_hidden_state[0, -1:])[0], found[self._cache_name]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return float32 logits [T, V]."""
        logits_TV = self._head(hidden_TD).float()
        return logits_TV if self._softcap is None else self._softcap * torch.tanh(logits_TV / self._softcap)

    def logprobs(self, hidden_TD: Tensor, targets_TK: Tensor) -> Tensor:
        """Return the log-probabilities of targets, float32 [T, K].

        Logits are computed for one chunk of positions at a time, to save memory.
        """

        def compute_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = self.logits(hidden)
            return logits.gather(1, targets) - logits.logsumexp(dim=1, keepdim=True)

        chunks = zip(hidden_TD.split(self._chunk), targets_TK.split(self._chunk), strict=True)
        return torch.cat([checkpoint(compute_chunk, *chunk, use_reentrant=False) for chunk in chunks])
