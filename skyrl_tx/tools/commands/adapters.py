"""`skyrl-tx export` and `skyrl-tx import`.

`export` writes a checkpoint as a PEFT adapter, or merges it into the base model. `import` stores a PEFT adapter as a
new training run with two checkpoints, one to train on and one to sample from. It does not load the run into an engine.
With `--server`, it sends the adapter over HTTP to a server on any machine.
"""

import argparse
import json
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from sqlmodel import Session

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, SessionId, checkpoint_name, model_id
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.contract.state_files import CONFIG_FILE, WEIGHTS_FILE
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import (
    find_checkpoint,
    finish_parser,
    open_artifact_store,
    open_database,
    parse_path,
    record_audit,
)
from skyrl_tx.store import engine_state, keys, manifests, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import CheckpointRow
from skyrl_tx.tools.quickstart.model import open_built_in_model

if TYPE_CHECKING:
    import httpx

    from skyrl_tx.weights.peft import AdapterFiles


_KEY_VARIABLE = "TINKER_API_KEY"
_FILES = CONFIG_FILE, WEIGHTS_FILE
_TIMEOUT_S = 900.0
"""The server checks a large adapter for minutes before it responds."""
_MLP_PARTS = (".mlp.", ".experts.", ".gate_proj.", ".up_proj.", ".down_proj.")
_UNEMBED_PARTS = ("lm_head.", "unembed_tokens.", "embed_tokens.")


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    # The checkpoint, and where to write it
    parser.add_argument(
        "path",
        metavar="PATH",
        help="the checkpoint, tinker://<run>/<kind>/<name>; `skyrl-tx checkpoints list` shows all",
    )
    parser.add_argument("out", metavar="OUT", type=parse_path, help="the directory to create; it must not exist")

    # What to write
    parser.add_argument(
        "--merge",
        action="store_true",
        help="write a full model, with the adapter merged into the weights of the base model",
    )
    parser.add_argument(
        "--format",
        choices=("peft", "cookbook"),
        default="peft",
        help="the tensor names of an adapter: `peft` uses the module names of the Hugging Face model (default); "
        "`cookbook` uses the names that build_lora_adapter and build_hf_model of tinker-cookbook read, for example "
        "unembed_tokens for tied embeddings",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="the dtype of merged weights (default: the dtype of the base model's files)",
    )
    parser.add_argument(
        "--base-model",
        metavar="MODEL",
        help="the base model: a hub id, a directory or `tiny` (default: the base model of the server)",
    )
    finish_parser(parser, _export)


def _export(arguments: argparse.Namespace) -> None:
    if not arguments.merge and arguments.dtype is not None:
        raise CommandError("--dtype requires --merge: adapters are always written in float32")
    out: Path = arguments.out
    if out.exists():
        raise CommandError(f"{out} already exists; choose a new directory")

    with open_database(arguments) as store:
        row = find_checkpoint(store, arguments.path)
        served_names = _read_model_names(store)
    artifacts = open_artifact_store(arguments)
    with artifacts.keep_local(row.artifact_id):
        _write_export(arguments, row, artifacts.open(row.artifact_id).path, served_names)


def _write_export(arguments: argparse.Namespace, row: CheckpointRow, source: Path, served_names: list[str]) -> None:
    """Write a checkpoint, whose files are in `source`, as an adapter or a merged model. Raises CommandError."""
    # Imported here because they import JAX.
    from skyrl_tx.models import UnsupportedModel, read_model
    from skyrl_tx.weights import hf
    from skyrl_tx.weights.merge import merge_adapter
    from skyrl_tx.weights.peft import AdapterError, read_adapter

    out: Path = arguments.out
    if any(source.glob("*.age")):
        raise CommandError(f"{row.path} is encrypted for download; export a checkpoint that is not encrypted")
    try:
        adapter = read_adapter(source)
        name = arguments.base_model or adapter.config.get("base_model_name_or_path")
        name = served_names[-1] if name in served_names else name
        out.parent.mkdir(parents=True, exist_ok=True)

        # Write to a temporary directory and rename it, so that no half-written model is ever visible.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            folder = Path(temporary) / "model"
            folder.mkdir()

            # Merge the adapter into the base model, or write it alone
            if not name and (arguments.merge or (arguments.format == "peft" and adapter.has_fused_parts)):
                raise CommandError("--base-model is required: the checkpoint does not name its base model")
            if arguments.merge and name:
                with open_built_in_model(name) as source_name:
                    base = hf.resolve_model(source_name)
                    family, config = read_model(base)
                    weights, is_tied = family.bind_weights(config), config.tied_embeddings
                    merge_adapter(base, weights, adapter, folder, arguments.dtype, is_tied=is_tied)
            else:
                public_name = choose_public_name(name, served_names)
                adapter = replace(adapter, config={**adapter.config, "base_model_name_or_path": public_name})
                _convert_format(adapter, arguments.format, name).write(folder)

            _use_default_modes(folder)
            folder.rename(out)
    except (AdapterError, UnsupportedModel, hf.CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error

    what = "model" if arguments.merge else f"adapter for {name or 'its base model'}"
    print(f"wrote {what}: {out}")
    if not arguments.merge and arguments.format == "peft" and adapter.has_repeated_factors:
        print(
            "the experts of a layer share LoRA factors, and the format `peft` has a copy of them for each expert; "
            "--format cookbook writes them once"
        )


def _convert_format(adapter: "AdapterFiles", format_name: str, base_model: str | None) -> "AdapterFiles":
    """Return an adapter in the format "peft" or "cookbook", as the flag `--format` describes them.

    In the format "peft", tensors have the module names of the base model's Hugging Face class. If the base model cannot
    be read, they get the names of a text model. Raises CheckpointError or UnsupportedModel if even these names are
    unknown without the base model.
    """
    from skyrl_tx.models import UnsupportedModel, make_adapter_format, read_model
    from skyrl_tx.weights import hf
    from skyrl_tx.weights.nesting import find_module_nesting

    if format_name != "peft" or not base_model:
        return adapter.to_layout(format_name)
    try:
        with open_built_in_model(base_model) as source:
            directory = hf.resolve_model(source, with_weights=False)
            family, config = read_model(directory)
            nesting = find_module_nesting(hf.read_json(directory, "config.json"))
        return adapter.to_layout("peft", make_adapter_format(config, family.weights, source).fused, nesting)
    except (UnsupportedModel, hf.CheckpointError) as error:
        if adapter.has_fused_parts:
            raise
        note = "note: the base model cannot be read, so the adapter has the module names of a text-only model"
        print(f"{note} ({error}); if it also accepts images, name it with --base-model", file=sys.stderr)
        return adapter.to_layout("peft")


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_CACHE = re.compile(r"/models--([^/]+)/snapshots/")


def choose_public_name(base_model: str | None, served_names: list[str]) -> str | None:
    """Return the name that PEFT can use to load the base model.

    `base_model` is returned as it is unless it is a directory. For a directory, the result is the hub id if the
    directory is in the hub's cache, or if the server served it under a hub id. A hub id also works on other machines.
    Without a hub id, the result is the absolute path of the directory.
    """
    directory = Path(base_model or "").expanduser()
    if not base_model or not directory.is_dir():
        return base_model
    if cached := _HUB_CACHE.search(str(directory.resolve())):
        return cached[1].replace("--", "/")
    names = served_names[:-1] if base_model in served_names else []
    return next((name for name in names if _HUB_ID.fullmatch(name)), str(directory.resolve()))


def _use_default_modes(folder: Path) -> None:
    """Give all files the mode of the config file. safetensors creates files that only their owner can read."""
    default = stat.S_IMODE(next(folder.glob("*config.json")).stat().st_mode)
    for path in folder.iterdir():
        path.chmod(default)


def _read_model_names(store: Store) -> list[str]:
    """Return the names of the latest engine's base model. The last name is the hub id or directory of its files."""
    state = store.read(engine_state.get)
    return [] if state is None else state.base_models


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `import`."""
    parser.add_argument(
        "source",
        metavar="DIR",
        help="the directory of a PEFT adapter, with adapter_config.json and adapter_model.safetensors, or its URL",
    )
    parser.add_argument(
        "--server",
        metavar="URL",
        help="upload the adapter to this server, with the API key in $TINKER_API_KEY, instead of using --data-dir",
    )

    parser.add_argument("--name", help="the name of the checkpoint (default: imported)")
    parser.add_argument(
        "--base-model",
        metavar="MODEL",
        help="the base model: a hub id, a directory or `tiny` (default: the base model of the server, or the base "
        "model that the adapter names)",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help="the name under which the server serves the base model (default: the name from its last start)",
    )
    parser.add_argument("--owner", help="the owner of the checkpoint; required if more than one owner has keys")
    finish_parser(parser, _import)


def _import(arguments: argparse.Namespace) -> None:
    with _open_source(arguments.source) as directory:
        if not directory.is_dir():
            raise CommandError(f"{directory}: no such directory")
        if arguments.server is None:
            training, sampler = _import_directory(arguments, directory)
        elif (arguments.name, arguments.owner, arguments.served_model_name) == (None, None, None):
            training = sampler = _upload(directory, arguments.server, arguments.base_model)
        else:
            raise CommandError(
                "--name, --owner and --served-model-name cannot be used with --server: the server chooses these", 2
            )

    print(f"imported {arguments.source}")
    print(f"  to train on:    {training} (no optimizer state; load it with create_training_client_from_state)")
    print(f"  to sample from: {sampler}")


@contextmanager
def _open_source(source: str) -> Generator[Path]:
    """Yield the directory of an adapter. The files of a URL are downloaded for this."""
    if not source.startswith(("http://", "https://")):
        yield Path(source).expanduser().absolute()
        return
    import httpx  # imported here because only extras install it

    with tempfile.TemporaryDirectory(prefix="skyrl_tx-") as directory:
        for name in _FILES:
            url = f"{source.rstrip('/')}/{name}"
            try:
                with httpx.stream("GET", url, follow_redirects=True, timeout=60.0) as response:
                    response.raise_for_status()
                    with (Path(directory) / name).open("wb") as file:
                        for piece in response.iter_bytes(2**20):
                            file.write(piece)
            except httpx.HTTPError as error:
                raise CommandError(f"{url}: {error}") from error
        yield Path(directory)


def _upload(directory: Path, server: str, base_model: str | None) -> str:
    """Upload an adapter, and return the path of its checkpoint. Raises CommandError or UserError.

    Without `base_model`, the adapter is for the first model that the server lists.
    """
    import httpx  # imported here because only extras install it

    from skyrl_tx.weights.peft import read_config  # imported here because it imports JAX

    lora = {"rank": read_config(directory)["r"], **_find_groups(directory / WEIGHTS_FILE)}
    headers = {"X-API-Key": os.environ.get(_KEY_VARIABLE, "")}
    with httpx.Client(base_url=f"{server.rstrip('/')}/api/v1/", headers=headers, timeout=_TIMEOUT_S) as client:
        if base_model is None:
            models = _call(client, "GET", "get_server_capabilities")["supported_models"]
            base_model = models[0]["model_name"]
        body = {"base_model": base_model, "lora_config": lora}
        started = _call(client, "POST", "external_weights_upload_start", json=body)

        # Send the files without the API key, because the URLs may lead to another host.
        for name in _FILES:
            size = str((directory / name).stat().st_size)
            with (directory / name).open("rb") as file, httpx.Client(timeout=_TIMEOUT_S) as plain:
                _call(plain, "PUT", started["urls"][name], content=file, headers={"content-length": size})
        finish = {"upload_id": started["upload_id"]}
        return _call(client, "POST", "external_weights_upload_finish", json=finish)["tinker_path"]


def _find_groups(weights: Path) -> dict[str, bool]:
    """Return which groups of modules an adapter changes, by the usual names of modules."""
    try:
        with safe_open(weights, framework="np") as file:
            names = list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CommandError(f"{weights}: {error}") from error
    mlp = {name for name in names if any(part in name for part in _MLP_PARTS)}
    unembed = {name for name in names if any(part in name for part in _UNEMBED_PARTS)} - mlp
    return {"train_attn": bool(set(names) - mlp - unembed), "train_mlp": bool(mlp), "train_unembed": bool(unembed)}


def _call(client: "httpx.Client", method: str, url: str, **arguments: Any) -> dict[str, Any]:
    """Make a call, and return the JSON object of the response. Raises CommandError with the server's reason."""
    import httpx  # imported here because only extras install it

    try:
        response = client.request(method, url, **arguments)
        content: dict[str, Any] = response.json() if response.content else {}
    except (httpx.HTTPError, ValueError) as error:
        raise CommandError(f"{client.base_url or url}: {error or type(error).__name__}") from error
    if not response.is_success:
        advice = f"; set ${_KEY_VARIABLE} to an API key" if response.status_code == HTTPStatus.UNAUTHORIZED else ""
        raise CommandError(f"the server refused the adapter: {content.get('detail', response.status_code)}{advice}")
    return content


def _import_directory(arguments: argparse.Namespace, directory: Path) -> tuple[CheckpointPath, CheckpointPath]:
    """Import an adapter into the data directory. Return the paths of its two checkpoints."""
    name = checkpoint_name(arguments.name or "imported")
    with open_database(arguments, create=True) as store:
        # Check the adapter before anything is stored.
        owner = _choose_owner(store, arguments.owner)
        base, base_name = _choose_base(store, directory, arguments)
        spec, write = _convert(directory, base)

        # Store the files first, then the rows that refer to them.
        artifacts = open_artifact_store(arguments)
        session_id = sessions.make_id()
        metadata = {
            **manifests.make_run_metadata(
                model_id=model_id(session_id, 0), owner=owner, base_model=base_name, spec=spec, now=time.time()
            ),
            **manifests.make_checkpoint_metadata(
                kind=CheckpointKind.TRAINING, name=name, expires_at=None, user_metadata=None
            ),
        }
        artifact = artifacts.create(write, metadata)
        return store.write(lambda tx: _store_run(tx, artifact, session_id, base_name, spec, owner, name))


def _choose_owner(store: Store, named: str | None) -> str:
    """Return the owner of the import.

    This is the owner that the user named, or the only owner with a key that is not revoked. On a server without keys
    it is the local owner. Raises CommandError if the named owner has no key, or if the choice is not clear.
    """
    rows = store.read(keys.list_all)
    if not rows:
        if named not in (None, LOCAL_OWNER):
            raise CommandError(f"--owner {named!r}: this server has no API keys and so no owners; omit the flag")
        return LOCAL_OWNER

    known = sorted({row.owner for row in rows})
    owners = sorted({row.owner for row in rows if row.revoked_at is None})
    if named is not None and named not in known:
        raise CommandError(
            f"--owner {named!r} has no API key and could not use the checkpoint; owners with keys are {known}"
        )
    if named is None and len(owners) != 1:
        raise CommandError(f"--owner is required; choose one of the owners with keys: {', '.join(known)}")
    return named or owners[0]


def _choose_base(store: Store, directory: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the base model as a hub id, directory or built-in name, and the name under which it is served.

    The base model is --base-model if given, else the base model of the latest engine, else the base model in the
    configuration of the adapter.
    """
    served_names = _read_model_names(store)
    try:
        path = directory / "adapter_config.json"
        named = json.loads(path.read_text()).get("base_model_name_or_path") if path.is_file() else None
        adapter_base = named if isinstance(named, str) else None
    except (OSError, ValueError, AttributeError, RecursionError):
        adapter_base = None  # `_convert` reports what is wrong with the file
    base = arguments.base_model or (served_names[-1] if served_names else adapter_base)
    if not base:
        raise CommandError("--base-model is required: neither a server nor the adapter names the base model")
    source, name = (served_names[-1], served_names[0]) if base in served_names else (base, base)
    return str(source), arguments.served_model_name or name


def _convert(directory: Path, base: str) -> tuple[ModelSpec, Callable[[Path], None]]:
    """Read an adapter. Return its LoRA settings, and a function that writes it as a checkpoint into a directory.

    Raises CommandError if the adapter cannot be read or does not fit the base model.
    """
    # Imported here because `models` imports JAX.
    from skyrl_tx.models import UnsupportedModel
    from skyrl_tx.models.adapter_import import read_import
    from skyrl_tx.weights import hf, peft

    try:
        with open_built_in_model(base) as source:
            lora, write = read_import(directory, source, base)
    except peft.AdapterError as error:
        raise CommandError(f"{directory}: {error}") from error
    except (UnsupportedModel, hf.CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    return ModelSpec(lora=lora), write


def _store_run(
    tx: Session, artifact: Artifact, session_id: SessionId, base_model: str, spec: ModelSpec, owner: str, name: str
) -> tuple[CheckpointPath, CheckpointPath]:
    """Store the rows of the imported run. Returns the paths of its training checkpoint and its sampler checkpoint."""
    training, sampler = manifests.import_run(
        tx,
        artifact,
        session_id=session_id,
        owner=owner,
        base_model=base_model,
        spec=spec,
        kinds=(CheckpointKind.TRAINING, CheckpointKind.SAMPLER),
        name=name,
        created_by="skyrl-tx import",
        now=time.time(),
    )
    for path in (training, sampler):
        record_audit(tx, "checkpoint_create", path=path, purpose="import")
    return training, sampler
