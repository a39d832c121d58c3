"""`skyrl-tx import`: an adapter that was made elsewhere, as a checkpoint to train on and to sample from."""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sqlmodel import Session

from skyrl_tx.artifacts import Artifact
from skyrl_tx.commands.place import CommandError, add_data_dir, artifacts_of, opened
from skyrl_tx.contract import codec
from skyrl_tx.contract.ids import CheckpointKind, CheckpointPath, SessionId, checkpoint_name, model_id
from skyrl_tx.contract.requests import LoraSpec, ModelSpec
from skyrl_tx.store import checkpoints, engine_state, keys, models, sessions
from skyrl_tx.store.database import Store
from skyrl_tx.store.keys import LOCAL_OWNER
from skyrl_tx.store.tables import CheckpointRow

if TYPE_CHECKING:
    from skyrl_tx.weights.adapter_files import AdapterFiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="PEFT adapter: adapter_config.json and _model")
    parser.add_argument("--name", default="imported", help="name of the checkpoint (default: imported)")
    parser.add_argument(
        "--base-model", metavar="MODEL", help="hub id or directory (default: what the server loaded, else DIR's own)"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="the server's name for it (default: its last)")
    parser.add_argument("--owner", help="whose it shall be; needed where keys of several owners are in use")
    add_data_dir(parser)
    parser.set_defaults(run=_import)


@dataclass(frozen=True, slots=True)
class _Base:
    """The base model: where its files are, and what clients call it."""

    source: str
    name: str


def _import(arguments: argparse.Namespace) -> int:
    name = checkpoint_name(arguments.name)
    directory: Path = arguments.directory.expanduser().absolute()
    if not directory.is_dir():
        raise CommandError(f"{directory}: no such directory")
    with opened(arguments, create=True) as store:
        owner = _owner(store, arguments.owner)
        base = _base(store, directory, arguments)
        spec, tensors, config = _fitted(directory, base)

        def write(folder: Path) -> None:
            from safetensors.numpy import save_file

            save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
            (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))

        artifact = artifacts_of(arguments.data_dir).create(write, {"kind": "weights", "base_model": base.name})
        training, sampler = store.write(lambda tx: _record(tx, artifact, base, spec, owner, name))
    print(f"imported {directory}")
    print(f"  to train on:    {training} (without optimizer moments: create_training_client_from_state)")
    print(f"  to sample from: {sampler}")
    return 0


def _owner(store: Store, named: str | None) -> str:
    """Return whose a thing shall be: as told, or of nobody in particular where no keys are asked for."""
    rows = store.read(keys.list_all)
    if not rows:
        if named not in (None, LOCAL_OWNER):
            raise CommandError(f"--owner {named!r}: no key was ever made, so there are no owners; leave it out")
        return LOCAL_OWNER
    known = sorted({row.owner for row in rows})
    owners = sorted({row.owner for row in rows if row.revoked_at is None})
    if named is not None and named not in known:
        raise CommandError(f"--owner {named!r}: has no key, and could not get at it; those with keys are {known}")
    if named is None and len(owners) != 1:
        raise CommandError(f"--owner: missing; keys are in use, so say whose it shall be ({', '.join(known)})")
    return named or owners[0]


def _base(store: Store, directory: Path, arguments: argparse.Namespace) -> _Base:
    """Find the base model: as told, as the last engine had it, or as the adapter says."""
    state = store.read(engine_state.get)
    served = [] if state is None else state.base_models
    try:
        own = json.loads((directory / "adapter_config.json").read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        own = None  # what is wrong with it is said when it is read
    source = arguments.base_model or (served[-1] if served else own)
    if not source:
        raise CommandError("--base-model is needed: neither a server nor the adapter says what it belongs on")
    known = served[0] if served and source in served else source
    return _Base(str(source), arguments.served_model_name or known)


def _fitted(directory: Path, base: _Base) -> tuple[ModelSpec, Mapping[str, np.ndarray], Mapping[str, object]]:
    """Read an adapter and fit it to how this server trains: whole groups of modules, one alpha.

    The update of each module stays what it was: alpha goes into B, and modules that the adapter leaves out get an A
    from a seed and a B of zeros, as in a fresh model. Raises CommandError for an adapter that does not fit.
    """
    from skyrl_tx import models as families  # bring JAX
    from skyrl_tx.backends.jax.checkpoint import AdapterFormat
    from skyrl_tx.weights import hf
    from skyrl_tx.weights.adapter_files import PREFIX, AdapterError, place_in_stack, read_adapter
    from skyrl_tx.weights.weight_map import TIED_UNEMBED_MODULE, adapter_modules

    try:
        adapter = read_adapter(directory)
        files = hf.read_json(hf.resolve(base.source, with_weights=False), "config.json")
        family = families.find_family(files)
        model = family.config_from_hf(files)
        _check_copies(adapter, base, {rule.path: rule.tensor for rule in family.weights}, model.tied_embeddings)
    except (AdapterError, families.UnsupportedModel, hf.CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    modules = adapter_modules(family.weights, tied_embeddings=model.tied_embeddings)
    given = dict(adapter.factors)
    if model.tied_embeddings and "lm_head" in given:
        given[TIED_UNEMBED_MODULE] = given.pop("lm_head")
    leaves = {place_in_stack(module)[0].rpartition(".")[2] for module in given}
    touched = {name for name, module in modules.items() if module.rpartition(".")[2] in leaves}
    groups = {
        part: families.AdapterSpec(
            rank=adapter.rank,
            seed=0,
            train_attn=part == "attn",
            train_mlp=part == "mlp",
            train_unembed=part == "unembed",
        ).targets(model)
        for part in ("attn", "mlp", "unembed")
    }
    lora = LoraSpec(
        rank=adapter.rank, seed=0, **{f"train_{part}": bool(touched & set(names)) for part, names in groups.items()}
    )
    targets = tuple(name for part, names in groups.items() if getattr(lora, f"train_{part}") for name in names)
    fresh = families.AdapterSpec(
        rank=lora.rank,
        seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )
    layout = AdapterFormat(base_model=base.source, config=model, modules=modules)
    started = layout.tensors(families.init_adapter(model, fresh).weights, targets, lora.rank)
    tensors = {name: array.copy() for name, array in started.items()}
    factor = np.float32(adapter.scale * lora.rank / families.ALPHA)
    for module, (a, b) in given.items():
        for part, array in (("lora_A", a), ("lora_B", b * factor)):
            holder, expert = place_in_stack(module)
            into = tensors.get(f"{PREFIX}{holder}.{part}.weight")
            if into is not None and expert is not None:
                into = into[expert] if expert < len(into) else None
            if into is None:
                known = ", ".join(sorted(name.rpartition(".")[2] for name in modules.values()))
                raise CommandError(f"{directory}: module {module!r} is none that this base model trains ({known})")
            if into.shape != array.shape:
                raise CommandError(
                    f"{directory}: {part} of {module!r} is {array.shape}, {base.source} needs {into.shape}"
                )
            into[...] = array
    return ModelSpec(lora=lora), tensors, layout.peft_config(targets, lora.rank, families.ALPHA)


def _check_copies(adapter: "AdapterFiles", base: _Base, tensor_of: Mapping[str, str], is_tied: bool) -> None:
    """Raise AdapterError for base weights within an adapter that are not those of the base model."""
    from safetensors import safe_open

    from skyrl_tx.weights import hf
    from skyrl_tx.weights.adapter_files import AdapterError

    if not adapter.base_layers:
        return
    files = hf.locate_tensors(hf.resolve(base.source))
    for module, copy in adapter.base_layers.items():
        name = f"{module}.weight"
        if is_tied and name == tensor_of["unembed"]:
            name = tensor_of["embed"]
        if name not in files:
            raise AdapterError(f"adapter: it holds weights of {module!r}, which the base model has not")
        with safe_open(files[name], framework="np") as file:
            ours = file.get_tensor(name)
        if ours.shape != copy.shape or not np.array_equal(ours.astype(copy.dtype), copy):
            raise AdapterError(f"adapter: its base weights of {module!r} are not those of {base.source}")


def _record(
    tx: Session, artifact: Artifact, base: _Base, spec: ModelSpec, owner: str, name: str
) -> tuple[CheckpointPath, CheckpointPath]:
    """Note a run that was never trained here, with one set of files under two names."""
    now = time.time()
    session_id: SessionId = sessions.create(
        tx,
        owner=owner,
        tags=["import"],
        user_metadata=None,
        sdk_version=None,
        project_id=None,
        display_name=None,
        now=now,
    )
    sessions.finish(tx, session_id, "success", now)
    run = model_id(session_id, 0)
    models.create(
        tx,
        model_id=run,
        session_id=session_id,
        base_model=base.name,
        spec=codec.encode(spec),
        user_metadata={"created_by": "skyrl-tx import"},
        now=now,
    )
    models.set_status(tx, run, "unloaded")
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
    return paths[0], paths[1]
