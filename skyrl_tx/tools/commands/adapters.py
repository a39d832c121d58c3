"""`skyrl-tx export` and `skyrl-tx import`: checkpoints from and to PEFT adapters, and merged models."""

import argparse
import json
import stat
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sqlmodel import Session

from skyrl_tx.artifacts import Artifact
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, SessionId, checkpoint_name, model_id
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.launch.command import CommandError
from skyrl_tx.launch.command_line import (
    find_checkpoint,
    finish_parser,
    open_artifact_store,
    open_database,
    parse_path,
    record_audit,
)
from skyrl_tx.store import checkpoints, engine_state, keys, manifests, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import CheckpointRow, ModelRow


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    parser.add_argument("path", metavar="PATH", help="checkpoint: tinker://<run>/<kind>/<name>")
    parser.add_argument("out", metavar="OUT", type=parse_path, help="directory to create")
    parser.add_argument(
        "--merge", action="store_true", help="write the whole model with the adapter merged into its weights"
    )
    parser.add_argument(
        "--format",
        choices=("peft", "cookbook"),
        default="peft",
        help="tensor names of an adapter: `peft`, the modules of the Hugging Face model (default), or `cookbook`, as "
        "tinker-cookbook's build_lora_adapter and build_hf_model read them (unembed_tokens for tied embeddings)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of merged weights (default: that of the base model's files)",
    )
    parser.add_argument("--base-model", metavar="MODEL", help="hub id or directory (default: that of the server)")
    finish_parser(parser, _export)


def _read_model_names(store: Store) -> list[str]:
    """Return the names of the latest engine's base model, of which the last is the source of its files."""
    state = store.read(engine_state.get)
    return [] if state is None else state.base_models


def _use_default_modes(folder: Path) -> None:
    """Set each file's mode to the default: safetensors creates files that only their owner can read."""
    default = stat.S_IMODE(next(folder.glob("*config.json")).stat().st_mode)
    for path in folder.iterdir():
        path.chmod(default)


def _export(arguments: argparse.Namespace) -> None:
    if not arguments.merge and arguments.dtype is not None:
        raise CommandError("--dtype requires --merge: adapters are float32")
    out: Path = arguments.out
    if out.exists():
        raise CommandError(f"{out} exists already")
    with open_database(arguments) as store:
        row = find_checkpoint(store, arguments.path)
        served = _read_model_names(store)
    artifacts = open_artifact_store(arguments)
    with artifacts.keep_local(row.artifact_id):
        _write_export(arguments, row, artifacts.open(row.artifact_id).path, served)


def _write_export(arguments: argparse.Namespace, row: CheckpointRow, source: Path, served: list[str]) -> None:
    from skyrl_tx.models import UnsupportedModel, find_family, make_adapter_format  # late, because they import JAX
    from skyrl_tx.weights import hf
    from skyrl_tx.weights.merge import merge_adapter
    from skyrl_tx.weights.peft import AdapterError, read_adapter

    out: Path = arguments.out
    if any(source.glob("*.age")):
        raise CommandError(f"{row.path} is encrypted; export the checkpoint that it was made from")
    try:
        adapter = read_adapter(source)
        named = adapter.config.get("base_model_name_or_path")
        name = arguments.base_model or (served[-1] if named in served else named)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Written to a temporary directory and renamed, so that it is never visible half written.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
            folder = Path(temporary) / "model"
            folder.mkdir()
            if not arguments.merge and (arguments.format != "peft" or not adapter.has_fused_maps):
                adapter.to_layout(arguments.format).write(folder)
            elif not name:
                raise CommandError("--base-model is required: the checkpoint does not name its base model")
            else:
                base = hf.resolve_model(name, with_weights=arguments.merge)
                content = hf.read_json(base, "config.json")
                family = find_family(content)
                config = family.config_from_hf(content)
                if arguments.merge:
                    weights, is_tied = family.bind_weights(config), config.tied_embeddings
                    merge_adapter(base, weights, adapter, folder, arguments.dtype, ties_by_default=is_tied)
                else:
                    fused = make_adapter_format(config, family.weights, name).fused
                    adapter.to_layout("peft", fused).write(folder)
            _use_default_modes(folder)
            folder.rename(out)
    except (AdapterError, UnsupportedModel, hf.CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    what = "model" if arguments.merge else f"adapter for {name or 'its base model'}"
    print(f"wrote {what}: {out}")
    if not arguments.merge and arguments.format == "peft" and adapter.has_repeated_factors:
        print("factors that all experts of a layer share are written once for each expert; --format cookbook has one")


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `import`."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=parse_path,
        help="directory of a PEFT adapter: adapter_config.json and adapter_model.safetensors",
    )
    parser.add_argument("--name", default="imported", help="name of the checkpoint (default: imported)")
    parser.add_argument(
        "--base-model",
        metavar="MODEL",
        help="hub id or directory (default: that of the server, else that of the adapter)",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the server's name of the base model (default: its last one)"
    )
    parser.add_argument("--owner", help="owner of the checkpoint; required if several owners have keys")
    finish_parser(parser, _import)


def _import(arguments: argparse.Namespace) -> None:
    name = checkpoint_name(arguments.name)
    directory: Path = arguments.directory
    if not directory.is_dir():
        raise CommandError(f"{directory}: no such directory")
    with open_database(arguments, create=True) as store:
        owner = _choose_owner(store, arguments.owner)
        base, base_name = _choose_base(store, directory, arguments)
        spec, write = _convert(directory, base)
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
        training, sampler = store.write(lambda tx: _store_run(tx, artifact, session_id, base_name, spec, owner, name))
    print(f"imported {directory}")
    print(f"  to train on:    {training} (without optimizer state: create_training_client_from_state)")
    print(f"  to sample from: {sampler}")


def _choose_owner(store: Store, named: str | None) -> str:
    """Return the owner of the import: the named one, the only one with keys, or the local owner without keys."""
    rows = store.read(keys.list_all)
    if not rows:
        if named not in (None, LOCAL_OWNER):
            raise CommandError(f"--owner {named!r}: there are no keys and so no owners; omit the flag")
        return LOCAL_OWNER
    known = sorted({row.owner for row in rows})
    owners = sorted({row.owner for row in rows if row.revoked_at is None})
    if named is not None and named not in known:
        raise CommandError(f"--owner {named!r}: has no key and could not use the import; owners with keys are {known}")
    if named is None and len(owners) != 1:
        raise CommandError(f"--owner is required: several owners have keys ({', '.join(known)})")
    return named or owners[0]


def _choose_base(store: Store, directory: Path, arguments: argparse.Namespace) -> tuple[str, str]:
    """Return the base model's source and name: the given one, that of the latest engine, or that of the adapter."""
    served = _read_model_names(store)
    try:
        own = json.loads((directory / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        own = None  # reading the adapter reports the error
    source = arguments.base_model or (served[-1] if served else own)
    if not source:
        raise CommandError("--base-model is required: neither a server nor the adapter names the base model")
    known = served[0] if source in served else source
    return str(source), arguments.served_model_name or known


def _convert(directory: Path, base: str) -> tuple[ModelSpec, Callable[[Path], None]]:
    """Read an adapter; return its specification as the server trains it, and a function that writes its files.

    Raises CommandError if it does not fit the base model.
    """
    from safetensors.numpy import save_file

    from skyrl_tx import models as families  # late, because it imports JAX
    from skyrl_tx.contract.state_files import ALPHA, WEIGHTS_FILE
    from skyrl_tx.weights import hf, peft

    try:
        adapter = peft.read_adapter(directory)
        files = hf.read_json(hf.resolve_model(base, with_weights=False), "config.json")
        family = families.find_family(files)
        model = family.config_from_hf(files)
        if adapter.base_layers:
            tensor_of = {rule.path: rule.tensor for rule in family.weights}
            adapter.check_base_layers(hf.resolve_model(base), tensor_of, is_tied=model.tied_embeddings)
        model = replace(model, expert_lora=families.choose_expert_lora(model, adapter))
        layout = families.make_adapter_format(model, family.weights, base)
        lora, weights = families.fit_adapter(model, layout, adapter)
    except peft.AdapterError as error:
        raise CommandError(f"{directory}: {error}") from error
    except (families.UnsupportedModel, hf.CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error

    def write(folder: Path) -> None:
        save_file(dict(layout.to_tensors(weights)), folder / WEIGHTS_FILE, metadata={"format": "pt"})
        layout.write_config(folder, tuple(weights), lora.rank, ALPHA)

    return ModelSpec(lora=lora), write


def _store_run(
    tx: Session, artifact: Artifact, session_id: SessionId, base_model: str, spec: ModelSpec, owner: str, name: str
) -> tuple[CheckpointPath, CheckpointPath]:
    """Store an unloaded run with two checkpoints of one artifact; return their paths."""
    now = time.time()
    sessions.create(tx, owner=owner, tags=["import"], now=now, session_id=session_id)
    sessions.finish(tx, session_id, "success", now)
    run = model_id(session_id, 0)
    model = ModelRow(
        model_id=run,
        session_id=session_id,
        base_model=base_model,
        spec=codec.encode(spec),
        user_metadata={"created_by": "skyrl-tx import"},
        status="unloaded",
        created_at=now,
        last_request_at=now,
    )
    models.create(tx, model)
    paths = tuple(CheckpointPath(run, kind, name) for kind in (CheckpointKind.TRAINING, CheckpointKind.SAMPLER))
    for path in paths:
        row = CheckpointRow(
            model_id=run,
            kind=path.kind,
            name=name,
            artifact_id=artifact.artifact_id,
            created_at=now,
            size_bytes=artifact.size_bytes,
        )
        checkpoints.put(tx, row, overwrite=False)
        record_audit(tx, "checkpoint_create", path=path, purpose="import")
    return paths[0], paths[1]
