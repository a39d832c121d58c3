"""The configuration of the decoder, and readers for the `config.json` of Hugging Face checkpoints.

The readers refuse every key that would change the maths, instead of ignoring it. This includes
quantization configs, except for the packed formats that the server can read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_tx.layers.rope import Rope
from skyrl_tx.models.parts.base import CacheSpec, FeedForward, Mixer, Target, UnsupportedModel
from skyrl_tx.weights.packed import FP8_BLOCK, INT4_GROUP

HfConfig = Mapping[str, Any]

ExpertLora = Literal["shared", "own"]
"""The form of experts' adapters.

With "shared", all experts of a layer share the factor next to the hidden size: A of gate and up,
and B of down. With "own", experts share no factors.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """One layer as data: a mixer, a feed-forward, or both in this order."""

    mixer: Mixer | None
    feed_forward: FeedForward | None
    has_output_norms: bool = False
    """Whether the output of each part passes a norm before it is added to the hidden states."""

    @property
    def parts(self) -> tuple[Mixer | FeedForward, ...]:
        """The one or two parts, in the order in which they run."""
        return tuple(part for part in (self.mixer, self.feed_forward) if part is not None)

    def targets(self) -> dict[str, Target]:
        """Return the linear maps that adapters change, by name."""
        return {name: target for part in self.parts for name, target in part.targets().items()}

    def describe_cache(self) -> CacheSpec:
        """Return the arrays that the cache has for the layer."""
        return CacheSpec() if self.mixer is None else self.mixer.describe_cache()


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers with equal blocks, whose parameters are stacked.

    The layers of a stack have the same index in the cycle of their group.
    """

    block: Block
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive layers that repeat a cycle of blocks.

    They run as one loop whose body is one cycle.

    For example, 48 layers with three delta nets before each attention are one group: a cycle of
    four blocks, 12 repeats.
    """

    stacks: tuple[Stack, ...]  # of equal length, in the order of the cycle

    @property
    def num_repeats(self) -> int:
        """The number of repeats of the cycle."""
        return len(self.stacks[0].layers)


def group_blocks(blocks: Sequence[Block]) -> tuple[Group, ...]:
    """Group layers so that the number of stacks is minimal.

    The compiled program is then as small as possible. If multiple groupings have the minimal number
    of stacks, choose the one with the fewest groups.
    """
    kinds = [blocks.index(block) for block in blocks]

    # Dynamic programming from the last layer. An entry is the best grouping from a layer on: the
    # number of stacks, the number of groups, minus the end of the first group (to prefer a long
    # one), and the length of its cycle.
    best = {len(blocks): (0, 0, 0, 0)}
    for first in reversed(range(len(blocks))):
        best[first] = min(
            (cycle + best[end][0], 1 + best[end][1], -end, cycle) for cycle, end in _find_cycles(kinds, first)
        )

    groups: list[Group] = []
    first = 0
    while first < len(blocks):
        *_, end, cycle = best[first]
        stacks = (Stack(blocks[layer], tuple(range(layer, -end, cycle))) for layer in range(first, first + cycle))
        groups.append(Group(tuple(stacks)))
        first = -end
    return tuple(groups)


def _find_cycles(kinds: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """Yield (length of the cycle, end of its repeats) for every cycle from layer `first` on."""
    yield 1, first + 1
    for cycle in range(1, (len(kinds) - first) // 2 + 1):
        end = first + 2 * cycle
        while end <= len(kinds) and kinds[end - cycle : end] == kinds[first : first + cycle]:
            yield cycle, end
            end += cycle


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of the decoder.

    It is hashable, so it can be a static argument of jitted functions.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    norm_epsilon: float
    max_context_length: int  # tokens
    tied_embeddings: bool
    groups: tuple[Group, ...]
    scales_embeddings: bool = False  # by the square root of the hidden size
    expert_lora: ExpertLora = "shared"
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.architecture, self.vocab_size, self.hidden_size, self.groups)))

    def __hash__(self) -> int:
        return self._hash  # precomputed, because every call of a jitted function needs it

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks, in the order of the parameters and of the cache."""
        return tuple(stack for group in self.groups for stack in group.stacks)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The different mixers of all stacks."""
        return tuple(dict.fromkeys(stack.block.mixer for stack in self.stacks if stack.block.mixer is not None))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block of every layer, in order."""
        by_layer = {layer: stack.block for stack in self.stacks for layer in stack.layers}
        return tuple(by_layer[layer] for layer in range(len(by_layer)))

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return sum(len(stack.layers) for stack in self.stacks)


def read_required(hf: HfConfig, key: str) -> Any:
    """Return a value of `config.json`. Raises UnsupportedModel if the key is absent or null."""
    value = hf.get(key)
    if value is None:
        raise UnsupportedModel(f"config.json of a {(hf.get('architectures') or ['model'])[0]} lacks {key!r}")
    return value


def read_size(hf: HfConfig, key: str) -> int:
    """Return a positive whole number of `config.json`.

    Raises UnsupportedModel for anything else.
    """
    value = read_required(hf, key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json has {key} = {value!r}; it must be a whole number above 0")
    return value


# Keys that would change the maths, with the values that have no effect. Any other value is refused.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1, 1.0, None),
    "clip_qkv": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}

# The keys that a RoPE description must have besides its theta and its type. They are fields of
# `Rope`.
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "longrope": frozenset({"factor", "original_max_position_embeddings", "short_factor"}),
}
OPTIONAL_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "yarn": frozenset({"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}),
    "longrope": frozenset({"attention_factor", "long_factor"}),
}
_ABSENT_IF_ZERO = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
"""Keys that transformers treats as absent if they are 0."""
_ORIGINAL = "original_max_position_embeddings"


def check_values(hf: HfConfig, accepted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedModel if a key has a value that is neither null nor in `accepted`."""
    for key, values in accepted.items():
        if hf.get(key) not in (None, *values):
            raise UnsupportedModel(f"config.json has {key} = {hf[key]!r}; supported: {values[0]!r}")


def check_supported(hf: HfConfig, *, reads: frozenset[str]) -> None:
    """Raise UnsupportedModel if the config needs a feature that is not supported.

    The function checks the keys of `NEUTRAL`, sliding windows and quantization. Keys in `reads` are
    not checked, because the family reads them.
    """
    for key, neutral in NEUTRAL.items():
        if key in hf and key not in reads and hf[key] not in neutral:
            raise UnsupportedModel(f"config.json has {key} = {hf[key]!r}; supported: {neutral[0]!r}")
    if "quantization_config" not in reads:
        check_quantization(hf.get("quantization_config"))
    # Configs of Qwen contain a window, which has no effect unless `use_sliding_window` is true.
    if hf.get("use_sliding_window") and hf.get("sliding_window") is not None:
        raise UnsupportedModel(
            f"config.json has sliding_window = {hf['sliding_window']!r} and use_sliding_window = true; not supported"
        )
    unsupported = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if unsupported and "layer_types" not in reads:
        raise UnsupportedModel(f"config.json has layer_types with {unsupported}; supported: 'full_attention'")


def get_rope(hf: HfConfig) -> tuple[str, HfConfig]:
    """Return the RoPE description of a `config.json`, and its key.

    The key is `rope_parameters` (transformers 5) or `rope_scaling` (before). Raises
    UnsupportedModel if the config has two different descriptions.
    """
    given = {name: hf[name] for name in ("rope_parameters", "rope_scaling") if hf.get(name)}
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise UnsupportedModel(f"config.json has rope_parameters and rope_scaling, which differ: {given}; remove one")
    name, rope = next(iter(given.items()), ("rope_parameters", {}))
    if not isinstance(rope, Mapping):
        raise UnsupportedModel(f"config.json has {name} = {rope!r}; it must be an object")
    return name, rope


def read_rope(hf: HfConfig) -> Rope:
    """Read the RoPE description of a `config.json`, with the defaults of transformers."""
    name, given = get_rope(hf)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise UnsupportedModel(f"config.json has {name} of type {kind!r}; supported: {', '.join(ROPE_KEYS)}")

    # Refuse unknown keys, unless their value has no effect.
    optional = OPTIONAL_ROPE_KEYS.get(kind, frozenset())
    extra = set(given) - {"rope_theta", "rope_type", "type"} - ROPE_KEYS[kind] - optional
    neutral = {key for key in extra if given[key] in NEUTRAL.get(key, (None,))}
    if extra - neutral:
        raise UnsupportedModel(
            f"config.json has {name} with {sorted(extra - neutral)}, which type {kind!r} does not support"
        )

    # Fill in the defaults, and check the required keys.
    values = {key: value for key, value in given.items() if value is not None and (value or key not in _ABSENT_IF_ZERO)}
    if _ORIGINAL in ROPE_KEYS[kind]:
        length = hf.get("max_position_embeddings")
        values[_ORIGINAL] = original = hf.get(_ORIGINAL) or values.get(_ORIGINAL) or length
        if kind in ("yarn", "longrope") and "factor" not in values and length and original:
            values["factor"] = length / original
    missing = ROPE_KEYS[kind] - set(values)
    if missing:
        raise UnsupportedModel(f"config.json has {name} of type {kind!r} without {sorted(missing)}")

    # Check the values.
    theta = values.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise UnsupportedModel("config.json has no rope_theta")
    fields: dict[str, Any] = {"theta": check_number("rope_theta", theta)}
    for key in sorted((ROPE_KEYS[kind] | optional) & set(values) - {"long_factor"}):
        value, path = values[key], f"{name}.{key}"
        if key == "short_factor":
            fields[key] = tuple(
                check_number(path, number) for number in (value if isinstance(value, list) else [value])
            )
        else:
            fields[key] = bool(value) if key == "truncate" else check_number(path, value)
    return Rope(kind=kind, **fields)


def check_number(path: str, value: Any) -> float:
    """Return a value of `config.json` as a float.

    Raises UnsupportedModel unless it is a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UnsupportedModel(f"config.json has {path} = {value!r}; it must be a number above 0")
    return float(value)


_QUANTIZATION_KEY = "quantization_config"
_Accepted = Mapping[str, tuple[Any, ...]]

_FP8: _Accepted = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),  # has no effect, because activations are not quantized here
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
}
_INT4: _Accepted = {
    "format": ("pack-quantized",),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_INT4_GROUP: _Accepted = {"format": (None, "pack-quantized")}
_INT4_WEIGHTS: _Accepted = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (INT4_GROUP,),
    "dynamic": (False, None),
}
_WITHOUT_EFFECT = frozenset(
    {
        *("quant_method", "scale_fmt", "modules_to_not_convert"),  # packed tensors are recognised by their names
        *("config_groups", "global_compression_ratio", "ignore", "quantization_status", "version"),
        *("targets", "weights", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    }
)


def check_quantization(given: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedModel if a checkpoint is quantized in a format that the server cannot read.

    Supported are FP8 blocks, INT4 groups, and no quantization. The message names the key and its
    value.
    """
    if given is None:
        return
    method = given.get("quant_method")
    if method == "fp8":
        _check_quantization_values(_QUANTIZATION_KEY, given, _FP8)
    elif method == "compressed-tensors":
        _check_quantization_values(_QUANTIZATION_KEY, given, _INT4)
        for name, group in (given.get("config_groups") or {}).items():
            path = f"{_QUANTIZATION_KEY}.config_groups.{name}"
            _check_quantization_values(path, group, _INT4_GROUP)
            _check_quantization_values(f"{path}.weights", group.get("weights") or {}, _INT4_WEIGHTS)
    else:
        raise UnsupportedModel(
            f"config.json has {_QUANTIZATION_KEY}.quant_method = {method!r}; supported: 'fp8', 'compressed-tensors'"
        )


def _check_quantization_values(path: str, given: Mapping[str, Any], accepted: _Accepted) -> None:
    """Raise UnsupportedModel if a key of `given` has a value that is not in `accepted`.

    Keys that are not in `accepted` must be null, unless they have no effect.
    """
    for key in sorted({*given, *accepted} - _WITHOUT_EFFECT):
        values = accepted.get(key, (None,))
        if given.get(key) not in values:
            raise UnsupportedModel(f"config.json has {path}.{key} = {given.get(key)!r}; supported: {values[0]!r}")
