"""Base weights: load Hugging Face checkpoints into stacked arrays, or make dummy weights."""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError

from skyrl_tx.layers.parameter import Parameter, flatten, map_named, pseudo_random
from skyrl_tx.process.paths import explain_os_error
from skyrl_tx.process.progress import ByteProgress
from skyrl_tx.weights.nesting import find_nesting
from skyrl_tx.weights.tensor_file import (
    Fp8Numbers,
    TensorFile,
    copy_array,
    find_packing,
    find_plain_names,
    make_aligned,
)
from skyrl_tx.weights.weight_map import Part, WeightMap, WeightRule, bind_rows, fit_to_checkpoint, get_rule_path

_log = logging.getLogger(__name__)

Tree = TypeVar("Tree")
Placement = Callable[[Parameter], jax.sharding.Sharding | None]
"""Returns the sharding of a parameter. None means the default device."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_PATTERNS = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
CHAT_TEMPLATES = "additional_chat_templates/*.jinja"

REDUNDANT_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors that some checkpoints contain although they follow from the config."""
UNUSED_PREFIXES = (
    *("mtp.", "model.visual.", "vision_tower.", "mm_projector."),
    *("multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
"""Tensors of parts that are not loaded: multi-token prediction and vision."""
MTP_LAYERS_KEY = "num_nextn_predict_layers"
"""The config key with the number of layers for multi-token prediction, which are the last layers."""


_ROWS = 8192
"""How many rows of two tensors are compared at a time."""
PIECE_BYTES = 2 << 30
"""How much of a stacked array is read before it is transferred to the devices."""
_MAX_THREADS = 16

_LFS_POINTER = b"version https://git-lfs"


class CheckpointError(ValueError):
    """The files of a checkpoint are missing, damaged or do not match the config.

    The message names file and tensor.
    """


def resolve_model(base_model: str, *, with_weights: bool = True) -> Path:
    """Return the local directory of a model, which is given as a path or as a hub id.

    A hub model is downloaded unless it is cached. Raises CheckpointError if this fails.
    """
    path = Path(base_model).expanduser()
    if path.is_dir():
        return path
    if base_model.startswith((".", "/", "~")) or base_model.count("/") > 1:
        raise CheckpointError(f"{base_model}: no such directory")
    try:
        return _download(base_model, with_weights=with_weights)
    except Exception as error:  # the errors of the hub's HTTP client have no common class
        raise CheckpointError(f"{base_model}: no such directory, and {_explain_hub_error(error)}") from error


def _download(base_model: str, *, with_weights: bool) -> Path:
    """Return the directory of a hub model.

    Subdirectories are not read, so they are not downloaded, except for chat templates.
    """
    directory = Path(snapshot_download(base_model, allow_patterns=list(CONFIG_PATTERNS), ignore_patterns=["*/*"]))

    # Download the same revision, even if there is a newer one now.
    snapshot_download(base_model, revision=directory.name, allow_patterns=[CHAT_TEMPLATES], ignore_patterns=["*/*/*"])
    if with_weights:
        files = sorted(set(read_index(directory).values())) or [SINGLE_FILE]
        snapshot_download(base_model, revision=directory.name, allow_patterns=files, ignore_patterns=["*/*"])
    return directory


def _explain_hub_error(error: Exception) -> str:
    """Return why a model cannot be downloaded. The client's messages are long and name no model."""
    cause = " ".join(str(error.__cause__ or error).split())
    match error:
        case HFValidationError():
            return "this is not a hub id such as Qwen/Qwen3-8B"
        case GatedRepoError():
            return "access to this model is restricted: accept its terms on the hub, and set HF_TOKEN"
        case RepositoryNotFoundError():
            return "the hub has no such model; set HF_TOKEN if it is private"
        case LocalEntryNotFoundError() if isinstance(error.__cause__, OfflineModeIsEnabled):
            return "the model is not in the cache of the hub, and HF_HUB_OFFLINE is set"
        case LocalEntryNotFoundError():
            return f"the model is not in the cache of the hub, and the hub cannot be reached: {cause}"
        case _:
            return f"the model cannot be downloaded from the hub: {cause}"


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return a JSON object of a checkpoint.

    Raises CheckpointError if the file is absent or not a JSON object.
    """
    path = directory / name
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(explain_os_error(error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return content


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a model and of its tokenizer.

    The tokens of the model are in `generation_config.json`, or else in `config.json`. The tokenizer
    of some base models has another token. A sample ends at any of these tokens, as in vLLM.
    """
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        if not found and (directory / name).is_file():
            content = read_json(directory, name)
            ids = content.get("eos_token_id", (content.get("text_config") or {}).get("eos_token_id"))
            found += ids if isinstance(ids, list) else [] if ids is None else [int(ids)]
    tokenizer_id = _read_tokenizer_eos(directory)
    return tuple(dict.fromkeys(found if tokenizer_id is None else [*found, tokenizer_id]))


def _read_tokenizer_eos(directory: Path) -> int | None:
    """Return the end-of-sequence token of a tokenizer, or None if its files do not say which it is."""
    # The configuration names the token by its text
    config, older = (
        read_json(directory, name) if (directory / name).is_file() else dict[str, Any]()
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    value = config.get("eos_token")
    if "added_tokens_decoder" not in config:
        value = older.get("eos_token") or value
    text = value.get("content") if isinstance(value, dict) else value

    # Its id is in the configuration, in the list of added tokens, or in the vocabulary
    ids = {token["content"]: int(id_) for id_, token in (config.get("added_tokens_decoder") or {}).items()}
    if text is not None and text not in ids and (directory / "tokenizer.json").is_file():
        tokenizer = read_json(directory, "tokenizer.json")
        vocabulary = (tokenizer.get("model") or {}).get("vocab")
        ids |= vocabulary if isinstance(vocabulary, dict) else {}
        ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    return ids.get(text)


def load(
    directory: Path,
    parameters: Tree,
    weights: WeightMap,
    *,
    dtype: Any = jnp.float32,
    placement: Placement = lambda _: None,
) -> Tree:
    """Return the tree of `Parameter`s filled with the tensors of a checkpoint.

    Files are memory-mapped, and threads copy the needed parts of their tensors. Besides the files,
    host memory holds at most PIECE_BYTES, or one device's part of one layer if that is larger. If a
    tensor stores multiple linear maps head by head, whole heads are read. Packed tensors are
    unpacked. Raises CheckpointError if a tensor is missing, unexpected or has another shape.
    """
    # Fit the rules to the names of the checkpoint.
    located = locate_tensors(directory)
    _compare_with_index(directory, located)
    rules = {rule.path: rule for rule in bind_rows(fit_to_checkpoint(weights, located), flatten(parameters))}
    files = find_plain_names(located)
    expected = {
        name
        for path, parameter in flatten(parameters).items()
        for _, name in rules[get_rule_path(path)].iterate_tensors(parameter)
    }
    _check_names(directory, files, expected, rules["unembed"].tensor)

    # Read the tensors, one parameter after the other.
    opened = {path: open_file(path) for path in sorted(set(located.values()))}
    itemsizes = (4 if leaf.is_float32 else jnp.dtype(dtype).itemsize for leaf in flatten(parameters).values())
    sizes = (int(np.prod(leaf.shape)) for leaf in flatten(parameters).values())
    total = sum(size * itemsize for size, itemsize in zip(sizes, itemsizes, strict=True))
    with (
        ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as pool,
        closing(ByteProgress("loading weights", total)) as progress,
    ):
        # Fill one parameter.
        def fill(path: str, parameter: Parameter) -> jax.Array:
            rule = rules[get_rule_path(path)]
            stored = jnp.float32 if parameter.is_float32 else dtype

            # Returns a part of the parameter, from the tensors of its layers and experts.
            def read(part: Part) -> np.ndarray:
                host = make_aligned([stop - start for start, stop in part], stored)

                def read_tensor(index: tuple[int, ...], name: str) -> None:
                    stacked, rest = part[: len(index)], part[len(index) :]
                    into = host[tuple(i - start for i, (start, _) in zip(index, stacked, strict=True))]
                    tensor, shape = get_tensor_slice(opened, located, name), parameter.shape[len(index) :]
                    _read_tensor(tensor, files[name], name, rule, shape, rest, into)
                    progress.add(into.nbytes)

                # Skip the layers and experts outside the part. Packed tensors are unpacked one after
                # the other, because an unpacked tensor may take gigabytes.
                inside = [
                    (index, name)
                    for index, name in rule.iterate_tensors(parameter)
                    if all(start <= i < stop for i, (start, stop) in zip(index, part, strict=False))
                ]
                is_packed = any(find_packing(name, located) for _, name in inside)
                for _ in (map if is_packed else pool.map)(read_tensor, *zip(*inside, strict=True)):
                    pass
                for file in opened.values():
                    file.release_memory()
                return host

            return _assemble(parameter.shape, placement(parameter), read, stored)

        return map_named(fill, parameters)


def _check_names(directory: Path, files: Mapping[str, Path], expected: Collection[str], unembed: str) -> None:
    """Raise CheckpointError if tensors are missing or unknown, and log which tensors are not used.

    `unembed` is the name of the unembedding. If that tensor is not expected, the embeddings are
    tied, and the tensor is ignored as a copy of the embedding.
    """
    # Find the part of each tensor that is not loaded.
    prefixes = (*UNUSED_PREFIXES, *map(find_nesting(files).add_prefix, _list_mtp_prefixes(directory)))
    parts = {
        name: next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        for name in sorted(files.keys() - set(expected) - {unembed})
        if not name.endswith(REDUNDANT_SUFFIXES)
    }
    unexpected = [name for name, part in parts.items() if part is None]
    if unexpected:
        raise CheckpointError(f"{files[unexpected[0]]}: unexpected {_format_names(unexpected)}")

    missing = sorted(set(expected) - files.keys())
    if missing:
        hint = "; set tie_word_embeddings = true in config.json if it is the embedding" if unembed in missing else ""
        raise CheckpointError(f"{directory}: lacks {_format_names(missing)}{hint}")
    if parts:
        counts = ", ".join(f"{number} in {part}*" for part, number in Counter(parts.values()).items())
        _log.info("%s: tensors that are not used: %s", directory, counts)


def has_other_unembedding(directory: Path, weights: WeightMap) -> bool:
    """Return whether the files of a checkpoint have an unembedding that differs from the embedding.

    Returns False if the files cannot be read, for example because they are not downloaded.
    """
    try:
        located = locate_tensors(directory)
    except CheckpointError:
        return False  # loading reports it
    names = {rule.path: rule.tensor for rule in fit_to_checkpoint(weights, located)}
    if not {names["embed"], names["unembed"]} <= located.keys():
        return False

    # Compare some rows at a time, because the tensors may take gigabytes.
    opened = {path: open_file(path) for path in set(located.values())}
    embed, unembed = (get_tensor_slice(opened, located, names[path]) for path in ("embed", "unembed"))
    num_rows, width = embed.get_shape()
    if tuple(unembed.get_shape()) != (num_rows, width):
        return True
    blocks = ((slice(row, min(row + _ROWS, num_rows)), slice(0, width)) for row in range(0, num_rows, _ROWS))
    return not all(np.array_equal(embed[block], unembed[block]) for block in blocks)


def _list_mtp_prefixes(directory: Path) -> Iterator[str]:
    """Yield the prefixes of multi-token prediction layers in a checkpoint of the text model."""
    config = read_json(directory, "config.json")
    config = config.get("text_config") or config
    first = config.get("num_hidden_layers", 0)
    for layer in range(first, first + (config.get(MTP_LAYERS_KEY) or 0)):
        yield f"model.layers.{layer}."


def _assemble(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding | None, read: Callable[[Part], np.ndarray], dtype: Any
) -> jax.Array:
    """Build an array from its parts.

    The parts are read and transferred one by one, and equal parts are read once.
    """
    if sharding is None:
        return jax.device_put(read(tuple((0, size) for size in shape)))
    devices_by_part: dict[Part, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        part = tuple(dim.indices(size)[:2] for dim, size in zip(index, shape, strict=True))
        devices_by_part.setdefault(part, []).append(device)
    shards = [
        shard for part, devices in devices_by_part.items() for shard in _transfer_pieces(part, devices, read, dtype)
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _transfer_pieces(
    part: Part, devices: Sequence[Any], read: Callable[[Part], np.ndarray], dtype: Any
) -> list[jax.Array]:
    """Return a part of an array on each device. Reads and transfers a large part in pieces."""
    (start, stop), *rest = part
    shape = [last - first for first, last in part]
    step = max(PIECE_BYTES * shape[0] // max(math.prod(shape) * jnp.dtype(dtype).itemsize, 1), 1)
    if step >= shape[0]:
        host = read(part)
        return jax.block_until_ready([jax.device_put(host, device) for device in devices])

    shards = [jnp.zeros(shape, dtype, device=device) for device in devices]
    for first in range(start, stop, step):
        host = read(((first, min(first + step, stop)), *rest))
        pieces = [jax.device_put(host, device) for device in devices]
        shards = [_write_piece(shard, piece, first - start) for shard, piece in zip(shards, pieces, strict=True)]
        jax.block_until_ready(shards)  # otherwise all pieces would be in host memory at once
    return shards


@partial(jax.jit, donate_argnums=0)
def _write_piece(shard: jax.Array, piece: jax.Array, first: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(shard, piece, first, axis=0)


def make_dummy(
    parameters: Tree, *, seed: int = 0, dtype: Any = jnp.float32, placement: Placement = lambda _: None
) -> Tree:
    """Return the tree of `Parameter`s filled with deterministic random values of a usual scale.

    The values are computed on the device.
    """

    def fill(path: str, parameter: Parameter) -> jax.Array:
        # The seed depends on the path of the parameter, read as a number. So all parameters have
        # different values, and all machines have the same values.
        first_layer = parameter.layers[0] if parameter.layers else 0
        parameter_seed = (
            seed + 65_537 * first_layer + int.from_bytes(get_rule_path(path).encode(), "big")
        ) % 4_294_967_291

        stored = jnp.float32 if parameter.is_float32 else dtype

        def make() -> jax.Array:
            if parameter.init == "normal":
                return pseudo_random(parameter.shape, parameter_seed, stored)
            return jnp.full(parameter.shape, 1.0 if parameter.init == "ones" else 0.0, stored)

        return jax.jit(make, out_shardings=placement(parameter))()

    return map_named(fill, parameters)


def locate_tensors(directory: Path) -> Mapping[str, Path]:
    """Return the file of each tensor, for the files in the index, or else for the single file.

    Raises CheckpointError if a file is missing or damaged, or if two files have the same tensor.
    """
    index = read_index(directory)
    names = sorted(set(index.values())) or [SINGLE_FILE]
    files: dict[str, Path] = {}
    for path in (directory / name for name in names):
        if not path.is_file():
            if not index:
                raise CheckpointError(
                    f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; no other file is read"
                )
            raise CheckpointError(f"{directory / INDEX_FILE}: names {path.name!r}, which is not there")

        for tensor in open_file(path).keys():  # noqa: SIM118  (it is no mapping)
            if tensor in files:
                raise CheckpointError(f"{directory}: tensor {tensor!r} is in {files[tensor].name} and {path.name}")
            files[tensor] = path
    return files


def _compare_with_index(directory: Path, files: Mapping[str, Path]) -> None:
    """Log a warning if the index differs from the files, or if there is also a single file."""
    index, path = read_index(directory), directory / INDEX_FILE
    found = {tensor: file.name for tensor, file in files.items()}
    wrong = sorted(tensor for tensor in found.keys() | index.keys() if found.get(tensor) != index.get(tensor))
    if index and wrong:
        _log.warning(
            "%s: says that %s is in %s, but it is in %s; the tensors are read from where they are",
            *(path, _format_names(wrong), index.get(wrong[0], "no file"), found.get(wrong[0], "no file")),
        )
    if index and SINGLE_FILE not in found.values() and (directory / SINGLE_FILE).is_file():
        _log.warning(
            "%s: %s is not read, because it is not in the index; transformers reads it instead of the indexed files, "
            "so delete the files that are out of date",
            *(path, SINGLE_FILE),
        )


def read_index(directory: Path) -> Mapping[str, str]:
    """Return the file name of each tensor, as the index of shards says. Empty without an index.

    Raises CheckpointError for an invalid index, or names outside the directory.
    """
    if not (directory / INDEX_FILE).is_file():
        return {}
    names = read_json(directory, INDEX_FILE).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{directory / INDEX_FILE}: no weight_map")
    for name in names.values():
        if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
            raise CheckpointError(f"{directory / INDEX_FILE}: names {name!r}, which is not there")
    return names


def open_file(path: Path) -> TensorFile:
    """Open a file of a checkpoint. Raises CheckpointError if it is not a safetensors file."""
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(f"{path}: is a pointer of Git LFS, not the file itself; run `git lfs pull`")
        return TensorFile(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def get_tensor_slice(opened: Mapping[Path, TensorFile], files: Mapping[str, Path], name: str) -> Any:
    """Return a slice object for a tensor, given its plain name.

    `files` is the result of `locate_tensors`.

    Raises CheckpointError if the file lacks the tensor, or if the checkpoint lacks its scales.
    """

    def find(name: str) -> Any:
        try:
            return opened[files[name]].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{files[name]}: {name}: {error}") from error

    packing = find_packing(name, files)
    if packing is not None:
        return packing.unpack(*map(find, packing.parts(name)))
    tensor = find(name)
    if isinstance(tensor, Fp8Numbers):
        raise CheckpointError(f"{files[name]}: {name} is in FP8, and the checkpoint lacks its scales {name}_scale_inv")
    return tensor


def _read_tensor(
    tensor: Any, path: Path, name: str, rule: WeightRule, shape: tuple[int, ...], part: Part, into: np.ndarray
) -> None:
    """Read a part of one tensor of a parameter into the array `into`.

    `shape` is the shape of the parameter, without the dims of layers and experts.
    """
    actual, expected = tuple(tensor.get_shape()), rule.get_tensor_shape(shape)
    if actual != expected:
        raise CheckpointError(f"{path}: {name} has shape {actual}, the config says {expected}")
    read = rule.view_part(tensor[tuple(slice(start, stop) for start, stop in rule.get_tensor_part(part))], part)
    # The sum is computed in float32, because bfloat16 would lose most of a value that is stored
    # relative to 1.
    copy_array(read.astype(np.float32) + np.float32(rule.offset) if rule.offset else read, into)


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"tensor {names[0]!r}{more}"
