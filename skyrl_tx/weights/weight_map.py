"""Rules that map parameters to tensors of a Hugging Face checkpoint and back.

The first part defines rules, the second part has the rules of all families. A model family has a
`WeightMap`, which is a tuple of `WeightRule`. Loading, merging and exporting all use it.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from skyrl_tx.contract.state_files import TIED_UNEMBED_MODULE
from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.weights.nesting import find_nesting

Part = tuple[tuple[int, int], ...]
"""Start and end of a part of an array, for each dimension."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Maps one parameter to one tensor, or to one tensor per layer and expert.

    `tensor` may contain `{layer}` and `{expert}`; the first dimensions of the parameter are then
    layers and experts. Linear maps are [out, in] in checkpoints and [in, out] here, which
    `transpose` says. Of a fused tensor, the parameter may have only some columns: with `every` =
    (first, step) it has every step-th column. Multiple rules with the same tensor share its rows
    (the outputs of linear maps) in the order of the rules. `bind_rows` computes the rows of each
    rule. With `by_head` the tensor consists of heads, and the rules share the rows of each head.
    """

    path: str  # path of the parameter without the number of its stack, for example layers.q_proj
    tensor: str  # name of the tensor, for example model.layers.{layer}.self_attn.q_proj.weight
    transpose: bool = False
    every: tuple[int, int] | None = None
    adapted_as: str | None = None
    """The name of the linear map in adapters, if it is not the module of the tensor."""
    offset: float = 0.0
    """Added to the tensor. It is 1 for norms whose weights are stored relative to 1."""
    by_head: bool = False
    rows: "Rows | None" = None

    @property
    def module(self) -> str:
        """The name of the module in adapters."""
        return self.adapted_as or self.tensor.rpartition(".")[0]

    def view(self, tensor: np.ndarray) -> np.ndarray:
        """Return the parameter as a view (a copy if its rows are apart). Does not add `offset`."""
        return self._transpose(tensor[self._get_index(None if self.rows is None else self.rows.index)])

    def put(self, tensor: np.ndarray, array: np.ndarray) -> None:
        """Write the parameter into a tensor. Does not subtract `offset`."""
        tensor[self._get_index(None if self.rows is None else self.rows.index)] = self._transpose(array)

    def view_part(self, tensor: np.ndarray, part: Part) -> np.ndarray:
        """Return a part of the parameter from the part of the tensor that `get_tensor_part` names.

        The result is a view, or a copy if the rows of the part are not adjacent.
        """
        rows = None if self.rows is None else self.rows.index_in_span(*self._transpose_part(part)[self._row_dim])
        return self._transpose(tensor[self._get_index(rows)])

    def get_tensor_part(self, part: Part) -> Part:
        """Return the part of the tensor that contains a part of the parameter, see `view_part`."""
        tensor_part = self._transpose_part(part)
        if self.rows is not None:
            tensor_part[self._row_dim] = self.rows.span(*tensor_part[self._row_dim])
        if self.every is not None:
            step, (start, stop) = self.every[1], tensor_part[-1]
            tensor_part[-1] = start * step, stop * step
        return tuple(tensor_part)

    def get_tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tensor's shape, given the parameter's shape without layers and experts."""
        sizes = [stop for _, stop in self.get_tensor_part(tuple((0, size) for size in shape))]
        if self.rows is not None:
            sizes[self._row_dim] = self.rows.total * self.rows.num_heads
        return tuple(sizes)

    @property
    def _row_dim(self) -> int:
        return -2 if self.transpose else 0

    def _get_index(self, rows: "Index | None") -> Any:
        """Return the index of the parameter in a tensor, given the index of its rows."""
        if self.every is not None:
            return ..., slice(self.every[0], None, self.every[1])
        if rows is None:
            return ...
        return (..., rows, slice(None)) if self.transpose else rows

    def _transpose(self, array: np.ndarray) -> np.ndarray:
        return array.swapaxes(-1, -2) if self.transpose else array

    def _transpose_part(self, part: Part) -> list[tuple[int, int]]:
        return [*part[:-2], part[-1], part[-2]] if self.transpose else [*part]

    def iterate_tensors(self, parameter: Parameter) -> Iterator[tuple[tuple[int, ...], str]]:
        """Yield the name of each tensor, with its index in the parameter."""
        return expand_pattern(self.tensor, parameter.shape, parameter.layers)

    @property
    def num_stacked(self) -> int:
        """Number of leading dimensions that are layers and experts."""
        return ("{layer}" in self.tensor) + ("{expert}" in self.tensor)

    def sort_by_layer(self, stacks: Iterable[Parameter]) -> list[tuple[str, Parameter]]:
        """Return the tensor names of these parameters by layer and expert, with the parameters."""
        tensors = [
            (parameter.layers[index[0]] if parameter.layers is not None else 0, index[1:], name, parameter)
            for parameter in stacks
            for index, name in self.iterate_tensors(parameter)
        ]
        return [(name, parameter) for *_, name, parameter in sorted(tensors, key=lambda entry: entry[:2])]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor that one parameter has: `start` to `stop` of the `total` per head."""

    start: int
    stop: int
    total: int
    num_heads: int = 1

    @property
    def index(self) -> "Index":
        """The indices of these rows in the tensor."""
        if self.num_heads == 1:
            return slice(self.start, self.stop)
        return (np.arange(self.num_heads)[:, None] * self.total + np.arange(self.start, self.stop)).reshape(-1)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Return the rows of the tensor that contain this parameter's rows `first` to `last`.

        With multiple heads, these are the rows of whole heads.
        """
        if self.num_heads == 1:
            return self.start + first, self.start + last
        size = self.stop - self.start
        return first // size * self.total, -(-last // size) * self.total

    def index_in_span(self, first: int, last: int) -> "Index":
        """Return the indices of rows `first` to `last` within their `span`."""
        if self.num_heads == 1:
            return slice(None)
        assert not isinstance(self.index, slice)
        return self.index[first:last] - self.span(first, last)[0]


Index = slice | np.ndarray


WeightMap = tuple[WeightRule, ...]


def bind_rows(weights: WeightMap, parameters: Mapping[str, Parameter]) -> WeightMap:
    """Return the rules with the rows of those rules that share a tensor.

    `parameters` are by dotted path. Rules for different layers may name the same tensor pattern;
    they do not share rows.
    """
    by_path = {get_rule_path(path): parameter for path, parameter in parameters.items()}
    layers: dict[str, set[int]] = {}
    for path, parameter in parameters.items():
        layers.setdefault(get_rule_path(path), set()).update(parameter.layers or ())

    # Group the rules that share a tensor.
    shared: dict[tuple[str, frozenset[int]], list[WeightRule]] = {}
    for rule in weights:
        if rule.every is None and rule.path in by_path:
            shared.setdefault((rule.tensor, frozenset(layers[rule.path])), []).append(rule)

    # Give each rule of a group its rows.
    rows: dict[str, Rows] = {}
    for rules in shared.values():
        num_heads = by_path[rules[0].path].num_heads if rules[0].by_head else 1
        sizes = [by_path[rule.path].shape[-1 if rule.transpose else rule.num_stacked] // num_heads for rule in rules]
        ends = list(itertools.accumulate(sizes))
        if len(rules) > 1:
            rows |= {
                rule.path: Rows(end - size, end, ends[-1], num_heads)
                for rule, size, end in zip(rules, sizes, ends, strict=True)
            }
    return tuple(replace(rule, rows=rows.get(rule.path)) for rule in weights)


_EXPERT_TENSOR = re.compile(r"(language_)?model\..+\.experts\.\d+\.")


def fit_to_checkpoint(weights: WeightMap, names: Collection[str]) -> WeightMap:
    """Return the rules for a checkpoint with tensors of these names.

    The checkpoint may nest its text model, and it may have one tensor per expert instead of stacked
    experts.
    """
    if any(_EXPERT_TENSOR.match(name) for name in names):
        weights = split_experts(weights)
    nesting = find_nesting(names)
    return tuple(replace(rule, tensor=nesting.add_prefix(rule.tensor)) for rule in weights)


def split_experts(weights: WeightMap) -> WeightMap:
    """Replace the rules of stacked experts by rules with one tensor for each map of each expert."""
    return tuple(
        replace(rule, tensor=f"{rule.adapted_as}.weight", adapted_as=None, rows=None)
        if rule.transpose and rule.adapted_as and "{expert}" in rule.adapted_as
        else rule
        for rule in weights
    )


def get_rule_path(path: str) -> str:
    """Return the path of a parameter's rule, which has no number of a stack."""
    return ".".join(name for name in path.split(".") if not name.isdigit())


def find_fused(weights: WeightMap, module: str) -> tuple[WeightRule, str, int | None] | None:
    """Return the rule, tensor name and expert, if any, of a module that is a part of a tensor."""
    for rule in weights:
        pattern = re.escape(rule.adapted_as or "")
        for name in ("layer", "expert"):
            pattern = pattern.replace(re.escape(f"{{{name}}}"), rf"(?P<{name}>\d+)")
        if rule.adapted_as and (match := re.fullmatch(pattern, module)):
            expert = match.groupdict().get("expert")
            return rule, rule.tensor.replace("{layer}", match["layer"]), None if expert is None else int(expert)
    return None


def expand_pattern(
    pattern: str, shape: tuple[int, ...], layers: tuple[int, ...] | None
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield each index of the layers and experts in a pattern, and the pattern filled in with it.

    `layers` are the numbers of the stacked layers. None means all layers, from 0.
    """
    num_dims = ("{layer}" in pattern) + ("{expert}" in pattern)
    for index in itertools.product(*map(range, shape[:num_dims])):
        name = pattern
        if index:
            name = name.replace("{layer}", str(index[0] if layers is None else layers[index[0]]))
        yield index, name.replace("{expert}", str(index[-1])) if num_dims == 2 else name


def _layer_rule(path: str, tensor: str, *, transpose: bool = False) -> WeightRule:
    return WeightRule(f"layers.{path}", f"model.layers.{{layer}}.{tensor}", transpose)


def _linear_rules(module: str, *names: str, prefix: str = "") -> WeightMap:
    """Return the rules of linear maps of a module of a layer. `prefix` begins our names of them."""
    return tuple(_layer_rule(prefix + name, f"{module}.{name}.weight", transpose=True) for name in names)


_GATED_MAPS = "gate_proj", "up_proj", "down_proj"


def _fuse_experts(
    path: str, tensor: str, every: tuple[int, int] | None = None, *, leaf: str | None = None, transpose: bool = False
) -> WeightRule:
    """Return the rule of a tensor of all experts, or of its columns. `leaf` is its adapter name."""
    module = None if leaf is None else f"model.layers.{{layer}}.mlp.experts.{{expert}}.{leaf}"
    return WeightRule(f"layers.{path}", f"model.layers.{{layer}}.mlp.experts.{tensor}", transpose, every, module)


DENSE_WEIGHTS: WeightMap = (
    WeightRule("embed", "model.embed_tokens.weight"),
    _layer_rule("attn_norm", "input_layernorm.weight"),
    *_linear_rules("self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
    _layer_rule("mlp_norm", "post_attention_layernorm.weight"),
    *_linear_rules("mlp", *_GATED_MAPS),
    WeightRule("final_norm", "model.norm.weight"),
    WeightRule("unembed", "lm_head.weight"),
)
QK_NORM_WEIGHTS: WeightMap = (
    _layer_rule("q_norm", "self_attn.q_norm.weight"),
    _layer_rule("k_norm", "self_attn.k_norm.weight"),
)
QKV_BIAS_WEIGHTS: WeightMap = (
    _layer_rule("q_bias", "self_attn.q_proj.bias"),
    _layer_rule("k_bias", "self_attn.k_proj.bias"),
    _layer_rule("v_bias", "self_attn.v_proj.bias"),
)

OUTPUT_BIAS_WEIGHTS: WeightMap = (_layer_rule("o_bias", "self_attn.o_proj.bias"),)
SINK_WEIGHTS: WeightMap = (_layer_rule("sinks", "self_attn.sinks"),)


EXPERT_WEIGHTS: WeightMap = (
    _layer_rule("router", "mlp.gate.weight"),  # stays [E, D], because it has no adapter
    *_linear_rules("mlp.experts.{expert}", *_GATED_MAPS, prefix="expert_"),
)

STACKED_EXPERT_WEIGHTS: WeightMap = (  # [E, out, in], where the rows of gate precede the rows of up
    _layer_rule("router", "mlp.gate.weight"),
    _fuse_experts("expert_gate_proj", "gate_up_proj", leaf="gate_proj", transpose=True),
    _fuse_experts("expert_up_proj", "gate_up_proj", leaf="up_proj", transpose=True),
    _fuse_experts("expert_down_proj", "down_proj", leaf="down_proj", transpose=True),
)

SHARED_EXPERT_WEIGHTS: WeightMap = (
    _layer_rule("shared_gate", "mlp.shared_expert_gate.weight"),
    *_linear_rules("mlp.shared_expert", *_GATED_MAPS, prefix="shared_"),
)

SHARED_EXPERTS_WEIGHTS: WeightMap = (  # of DeepSeek: no gate of the shared expert, and a correction of scores
    _layer_rule("router_correction", "mlp.gate.e_score_correction_bias"),
    *_linear_rules("mlp.shared_experts", *_GATED_MAPS, prefix="shared_"),
)
LATENT_WEIGHTS: WeightMap = (
    _layer_rule("q_a_proj", "self_attn.q_a_proj.weight", transpose=True),
    _layer_rule("q_a_norm", "self_attn.q_a_layernorm.weight"),
    _layer_rule("q_b_proj", "self_attn.q_b_proj.weight", transpose=True),
    _layer_rule("kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", transpose=True),
    _layer_rule("kv_a_norm", "self_attn.kv_a_layernorm.weight"),
    replace(_layer_rule("k_b", "self_attn.kv_b_proj.weight"), by_head=True),  # stays [out, in], has no adapter
    replace(_layer_rule("v_b", "self_attn.kv_b_proj.weight"), by_head=True),
)

EVEN, ODD = (0, 2), (1, 2)
FUSED_EXPERT_WEIGHTS: WeightMap = (  # [E, in, out] as here, where columns of gate and up alternate
    _layer_rule("router", "mlp.router.weight"),
    _layer_rule("router_bias", "mlp.router.bias"),
    _fuse_experts("expert_gate_proj", "gate_up_proj", EVEN, leaf="gate_proj"),
    _fuse_experts("expert_up_proj", "gate_up_proj", ODD, leaf="up_proj"),
    _fuse_experts("expert_down_proj", "down_proj", leaf="down_proj"),
    _fuse_experts("expert_gate_bias", "gate_up_proj_bias", EVEN),
    _fuse_experts("expert_up_bias", "gate_up_proj_bias", ODD),
    _fuse_experts("expert_down_bias", "down_proj_bias"),
)


def _make_input_rules(names: str, *, by_head: bool = False) -> WeightMap:
    """Return the rules of maps of a delta net that share the rows of one tensor, in order."""
    net = "model.layers.{layer}.linear_attn"
    return tuple(
        WeightRule(
            f"layers.in_proj_{name}",
            f"{net}.in_proj_{names}.weight",
            transpose=True,
            adapted_as=f"{net}.in_proj_{name}",
            by_head=by_head,
        )
        for name in names
    )


def _make_delta_net_rules(fused_rules: WeightMap, input_rules: WeightMap) -> WeightMap:
    """Return the rules of a delta net. Layouts differ in how they store the maps of its inputs."""
    return (
        *fused_rules,
        *(_layer_rule(f"{name}_conv", "linear_attn.conv1d.weight") for name in ("q", "k", "v")),
        *input_rules,
        _layer_rule("decay_log", "linear_attn.A_log"),
        _layer_rule("dt_bias", "linear_attn.dt_bias"),
        _layer_rule("out_norm", "linear_attn.norm.weight"),
        _layer_rule("out_proj", "linear_attn.out_proj.weight", transpose=True),
    )


DELTA_NET_WEIGHTS = _make_delta_net_rules(  # of Qwen3.5
    _make_input_rules("qkv"),
    (
        _layer_rule("in_proj_z", "linear_attn.in_proj_z.weight", transpose=True),
        _layer_rule("in_proj_a", "linear_attn.in_proj_a.weight"),  # stay [out, in], have no adapters
        _layer_rule("in_proj_b", "linear_attn.in_proj_b.weight"),
    ),
)
DELTA_NET_BY_HEAD_WEIGHTS = _make_delta_net_rules(  # of Qwen3-Next: the maps of one key head follow each other
    _make_input_rules("qkvz", by_head=True),
    tuple(
        replace(_layer_rule(f"in_proj_{name}", "linear_attn.in_proj_ba.weight"), by_head=True) for name in ("b", "a")
    ),
)


def _make_mamba_rules() -> WeightMap:
    """Return the rules of a Mamba-2 layer.

    Its input maps share one tensor, and so do its convolutions.
    """
    module = "model.layers.{layer}.mixer"
    maps = (("z", "gate_proj"), ("x", "x_proj"), ("b", None), ("c", None), ("dt", None))
    return (
        *(
            WeightRule(
                f"layers.in_proj_{name}",
                f"{module}.in_proj.weight",
                transpose=adapted is not None,
                adapted_as=adapted and f"{module}.{adapted}",
            )
            for name, adapted in maps
        ),
        *(_layer_rule(f"{name}_conv", "mixer.conv1d.weight") for name in "xbc"),
        # Biases, and parameters of the state space.
        *(_layer_rule(f"{name}_conv_bias", "mixer.conv1d.bias") for name in "xbc"),
        _layer_rule("decay_log", "mixer.A_log"),
        _layer_rule("skip", "mixer.D"),
        _layer_rule("dt_bias", "mixer.dt_bias"),
        _layer_rule("out_norm", "mixer.norm.weight"),
        _layer_rule("out_proj", "mixer.out_proj.weight", transpose=True),
    )


NEMOTRON_WEIGHTS: WeightMap = (  # every layer has a mixer or a feed-forward, and one norm
    WeightRule("embed", "model.embeddings.weight"),
    _layer_rule("attn_norm", "norm.weight"),
    _layer_rule("mlp_norm", "norm.weight"),
    *_linear_rules("mixer", "q_proj", "k_proj", "v_proj", "o_proj"),
    *_make_mamba_rules(),
    *_linear_rules("mixer", "up_proj", "down_proj"),
    _layer_rule("router", "mixer.gate.weight"),
    _layer_rule("router_correction", "mixer.gate.e_score_correction_bias"),
    *_linear_rules("mixer", "fc1_latent_proj", "fc2_latent_proj"),
    *_linear_rules("mixer.experts.{expert}", "up_proj", "down_proj", prefix="expert_"),
    *_linear_rules("mixer.shared_experts", "up_proj", "down_proj", prefix="shared_"),
    WeightRule("final_norm", "model.norm_f.weight"),
    WeightRule("unembed", "lm_head.weight"),
)


def with_output_norms(weights: WeightMap) -> WeightMap:
    """Return the rules of a checkpoint whose blocks have output norms."""
    norms = (
        _layer_rule("attn_output_norm", "post_attention_layernorm.weight"),
        _layer_rule("mlp_norm", "pre_feedforward_layernorm.weight"),
        _layer_rule("mlp_output_norm", "post_feedforward_layernorm.weight"),
    )
    own = {rule.path for rule in norms}
    return (*(rule for rule in weights if rule.path not in own), *norms)


def offset_norms(weights: WeightMap) -> WeightMap:
    """Return the rules of a checkpoint that stores norm weights relative to 1."""
    return tuple(replace(rule, offset=1.0) if rule.path.endswith("_norm") else rule for rule in weights)


FUSED_MAPS = {"in_proj_qkv": 3, "in_proj_qkvz": 4, "in_proj": 2}
"""Modules that consist of multiple linear maps, with the number of maps that adapters can change.

PEFT adapts such a module as a whole. The hosted service adapts each of its maps.
"""
FUSED_PARTS = ("in_proj_q", "x_proj")
"""For each kind of fused module, one map that an adapter of the hosted service contains."""

FusedModules = Mapping[str, Mapping[str, Rows]]
"""For each fused module, the rows of its linear maps."""


def find_fused_modules(weights: WeightMap) -> FusedModules:
    """Return the modules of FUSED_MAPS that a model has. `bind_rows` must have set the rows."""
    fused: dict[str, dict[str, Rows]] = {}
    for rule in weights:
        leaf = rule.tensor.removesuffix(".weight").rpartition(".")[2]
        if leaf in FUSED_MAPS and rule.rows is not None and rule.adapted_as is not None:
            fused.setdefault(leaf, {})[rule.module.rpartition(".")[2]] = rule.rows
    return fused


_STACKED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKED_UNGATED = {"up_proj": "w1", "down_proj": "w2"}


def get_stack_names(prefix: str) -> Mapping[str, str]:
    """Return the names of stacked experts in adapter files, by the names of one expert's maps.

    `prefix` is the module of the experts. Experts of Nemotron-H have no gate. Files stack experts
    because a large mixture has thousands of maps.
    """
    return _STACKED_UNGATED if prefix.endswith(".mixer.experts") else _STACKED


def name_adapter_modules(weights: WeightMap, *, tied_embeddings: bool, stacks_experts: bool = True) -> dict[str, str]:
    """Return the module name in adapter files for each linear map that adapters can change.

    The names lack the prefix `base_model.model.`. They contain `{layer}`, and `{expert}` if experts
    are not stacked.
    """
    maps = [rule for rule in weights if rule.transpose or rule.adapted_as]
    modules = {rule.path.removeprefix("layers."): rule.module for rule in maps}
    if stacks_experts:
        for name, module in modules.items():
            prefix, is_expert, leaf = module.partition(".{expert}.")
            if is_expert:
                modules[name] = f"{prefix}.{get_stack_names(prefix)[leaf]}"
    unembed = next(rule.module for rule in weights if rule.path == "unembed")
    return {**modules, "unembed": TIED_UNEMBED_MODULE if tied_embeddings else unembed}
