"""The mapping between parameters and tensors of a Hugging Face checkpoint, usable in both directions."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from skyrl_tx.layers.parameter import Parameter


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A parameter and its tensor, or its tensors per layer and expert.

    `tensor` may hold `{layer}` and `{expert}`, for the dims that come first. Linear maps lie as [out, in] in
    checkpoints and as [in, out] here: `transpose`.
    """

    path: str  # ours, such as layers.q_proj, whatever the stack
    tensor: str  # theirs, such as model.layers.{layer}.self_attn.q_proj.weight
    transpose: bool = False

    @property
    def module(self) -> str:
        """The name of the module that owns the tensor, as adapters name it."""
        return self.tensor.rpartition(".")[0]

    def tensors(self, parameter: Parameter) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield the index in the array and the name of each tensor."""
        return expand(self.tensor, parameter.shape, parameter.layers)

    @property
    def num_stacked(self) -> int:
        """How many leading dims are layers and experts."""
        return ("{layer}" in self.tensor) + ("{expert}" in self.tensor)

    def in_layer_order(self, stacks: Iterable[Parameter]) -> list[tuple[str, Parameter]]:
        """Return the names of all tensors of these stacks, by layer and expert, each with its stack."""
        found = [
            (parameter.layers[index[0]] if parameter.layers is not None else 0, index[1:], name, parameter)
            for parameter in stacks
            for index, name in self.tensors(parameter)
        ]
        return [(name, parameter) for *_, name, parameter in sorted(found, key=lambda each: each[:2])]


WeightMap = tuple[WeightRule, ...]


def rule_path(path: str) -> str:
    """Return the path of a parameter's rule: its own without the number of its stack."""
    return ".".join(each for each in path.split(".") if not each.isdigit())


def expand(
    pattern: str, shape: tuple[int, ...], layers: tuple[int, ...] | None
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield each index of the leading dims that a pattern names, and the pattern filled in with it.

    `layers` are the numbers of the layers that are stacked, where those are not all.
    """
    num_dims = ("{layer}" in pattern) + ("{expert}" in pattern)
    for index in itertools.product(*map(range, shape[:num_dims])):
        name = pattern
        if index:
            name = name.replace("{layer}", str(index[0] if layers is None else layers[index[0]]))
        yield index, name.replace("{expert}", str(index[-1])) if num_dims == 2 else name


TIED_UNEMBED_MODULE = "model.unembed_tokens"
"""How an adapter names the unembedding of a model that has no lm_head of its own."""


def _layer(path: str, tensor: str, *, transpose: bool = False) -> WeightRule:
    return WeightRule(f"layers.{path}", f"model.layers.{{layer}}.{tensor}", transpose)


DENSE_WEIGHTS: WeightMap = (
    WeightRule("embed", "model.embed_tokens.weight"),
    _layer("attn_norm", "input_layernorm.weight"),
    _layer("q_proj", "self_attn.q_proj.weight", transpose=True),
    _layer("k_proj", "self_attn.k_proj.weight", transpose=True),
    _layer("v_proj", "self_attn.v_proj.weight", transpose=True),
    _layer("o_proj", "self_attn.o_proj.weight", transpose=True),
    _layer("mlp_norm", "post_attention_layernorm.weight"),
    _layer("gate_proj", "mlp.gate_proj.weight", transpose=True),
    _layer("up_proj", "mlp.up_proj.weight", transpose=True),
    _layer("down_proj", "mlp.down_proj.weight", transpose=True),
    WeightRule("final_norm", "model.norm.weight"),
    WeightRule("unembed", "lm_head.weight"),
)
QK_NORM_WEIGHTS: WeightMap = (
    _layer("q_norm", "self_attn.q_norm.weight"),
    _layer("k_norm", "self_attn.k_norm.weight"),
)
QKV_BIAS_WEIGHTS: WeightMap = (
    _layer("q_bias", "self_attn.q_proj.bias"),
    _layer("k_bias", "self_attn.k_proj.bias"),
    _layer("v_bias", "self_attn.v_proj.bias"),
)


EXPERT_WEIGHTS: WeightMap = (
    _layer("router", "mlp.gate.weight"),  # as it lies there, [E, D]: it is no map that adapters touch
    _layer("expert_gate_proj", "mlp.experts.{expert}.gate_proj.weight", transpose=True),
    _layer("expert_up_proj", "mlp.experts.{expert}.up_proj.weight", transpose=True),
    _layer("expert_down_proj", "mlp.experts.{expert}.down_proj.weight", transpose=True),
)


STACKED_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names in adapter files of stacked tensors with all experts of a layer; a large mixture has thousands of maps."""


def adapter_modules(weights: WeightMap, *, tied_embeddings: bool, stacks_experts: bool = True) -> dict[str, str]:
    """Return, for each linear map that an adapter can touch, the name of its module in adapter files.

    The names lack the files' own prefix. Block maps keep their `{layer}`, and `{expert}` where experts are not stacked.
    """
    modules = {rule.path.removeprefix("layers."): rule.module for rule in weights if rule.transpose}
    if stacks_experts:
        for leaf, stacked in STACKED_EXPERTS.items():
            modules = {name: each.replace(f"{{expert}}.{leaf}", stacked) for name, each in modules.items()}
    unembed = next(rule.module for rule in weights if rule.path == "unembed")
    return {**modules, "unembed": TIED_UNEMBED_MODULE if tied_embeddings else unembed}
