"""`skyrl-tx export`: a checkpoint as an adapter, or as a whole model, for other software."""

import argparse
import shutil
import stat
import tempfile
from pathlib import Path

from skyrl_tx.commands.place import CommandError, add_data_dir, artifacts_of, find_checkpoint, opened
from skyrl_tx.store import engine_state
from skyrl_tx.store.tables import EngineStateRow

_LAYOUTS = ("peft", "cookbook")
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    parser.add_argument("path", metavar="PATH", help="checkpoint: tinker://<run>/<kind>/<name>")
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to make")
    parser.add_argument("--merge", action="store_true", help="write the whole model, the adapter added to its weights")
    parser.add_argument(
        "--format",
        choices=_LAYOUTS,
        default="peft",
        help="how an adapter names its tensors: `peft` as modules of the Hugging Face model (default), `cookbook` "
        "as its build_lora_adapter and build_hf_model read them (unembed_tokens where embeddings are tied)",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="type of merged weights (default: as the base model's files)")
    parser.add_argument("--base-model", metavar="MODEL", help="hub id or directory (default: what the server loaded)")
    add_data_dir(parser)
    parser.set_defaults(run=_export)


def _loaded_as(name: str | None, state: EngineStateRow | None) -> str | None:
    """Where a base model's files are; external weights say by which name it was served."""
    return state.base_models[-1] if state is not None and name in state.base_models else name


def _let_others_read(folder: Path) -> None:
    """Give each file the mode of one that was written plainly: safetensors keeps its own to the owner alone."""
    plain = stat.S_IMODE(next(folder.glob("*config.json")).stat().st_mode)
    for path in folder.iterdir():
        path.chmod(plain)


def _export(arguments: argparse.Namespace) -> int:
    from skyrl_tx.models import UnsupportedModel, find_family  # bring JAX
    from skyrl_tx.weights import hf
    from skyrl_tx.weights.adapter_files import AdapterError, read_adapter
    from skyrl_tx.weights.merge import merge

    if not arguments.merge and arguments.dtype is not None:
        raise CommandError("--dtype is for --merge: adapters are float32")
    out: Path = arguments.out.expanduser().absolute()
    if out.exists():
        raise CommandError(f"{out} exists already")
    with opened(arguments) as store:
        row = find_checkpoint(store, arguments.path)
        source = artifacts_of(arguments.data_dir).open(row.artifact_id)
        state = store.read(engine_state.get)
    if any(source.glob("*.age")):
        raise CommandError(f"{row.path} is encrypted; export the checkpoint that it was made from")
    try:
        adapter = read_adapter(source)
        name = arguments.base_model or _loaded_as(adapter.config.get("base_model_name_or_path"), state)
        out.parent.mkdir(parents=True, exist_ok=True)
        # Written apart and renamed, so that nobody ever sees half of it.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as apart:
            folder = Path(apart) / "model"
            folder.mkdir()
            if arguments.merge:
                if not name:
                    raise CommandError("--base-model is needed: the checkpoint does not say what it belongs on")
                base = hf.resolve(name)
                family = find_family(hf.read_json(base, "config.json"))
                merge(base, family.weights, adapter, folder, arguments.dtype)
            else:
                adapter.in_layout(arguments.format).write(folder)
            _let_others_read(folder)
            shutil.move(folder, out)
    except (AdapterError, UnsupportedModel, hf.CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    what = "model" if arguments.merge else f"adapter for {name or 'its base model'}"
    print(f"wrote {what}: {out}")
    return 0
