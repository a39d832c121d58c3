"""The command `skyrl-tx plan`: prints the plan of a model on devices that are not here, as a table or as JSON."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_tx.backends.jax.config import JaxConfig, JaxFlags, MeshConfig
from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.command import CommandError, CommandParser
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.tools.plan.hardware import KINDS, DeviceError, Devices, parse_devices
from skyrl_tx.tools.quickstart.model import open_built_in_model
from skyrl_tx.tools.serve import add_settings

if TYPE_CHECKING:
    from skyrl_tx.tools.plan.model_plan import ModelPlan

_SHORT_FLAGS = {"context": "max_context_length", "adapters": "max_lora_adapters", "rank": "max_lora_rank"}
"""Short names of settings of the backend."""


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments."""
    read = add_flags(parser)
    parser.set_defaults(run=lambda arguments: _run(arguments, read(arguments)))


def add_flags(parser: CommandParser) -> Callable[[argparse.Namespace], ServerSettings]:
    """Add the command's own flags and those of `serve`; return a function that reads the latter."""
    parser.usage = "skyrl-tx plan --base-model MODEL --device DEVICE [flags]"
    parser.description = (
        "Plan a model on devices that are not here: memory by item, what fits, the best mesh, and the most tokens per "
        "second. Reads config.json of the model, no weights, and needs no accelerator. Takes all flags of `skyrl-tx "
        "serve` too, or its --config. The exit status is 0 if the model fits, 1 if not, 2 for a wrong command line."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--device",
        type=_parse_devices,
        required=True,
        metavar="NAME[:TOPOLOGY]",
        help=f"the devices, such as h200, h200:8, v5e:2x4 or v5p:2x2x1; names: {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--mesh",
        type=_parse_mesh,
        metavar="dp=N,fsdp=N,tp=N,ep=N,cp=N",
        help="the mesh of all devices, by default the best one",
    )
    parser.add_argument(
        "--context", type=_parse_size, metavar="TOKENS", help="the longest sequence, prompt and new tokens"
    )
    parser.add_argument("--adapters", type=_parse_size, metavar="N", help="models in training at the same time")
    parser.add_argument("--rank", type=_parse_size, metavar="N", help="the highest LoRA rank")
    return add_settings(parser)


def _run(arguments: argparse.Namespace, settings: ServerSettings) -> int:
    account, _ = plan_from_flags(arguments, settings)
    from skyrl_tx.tools.plan import report  # late, because it imports JAX

    if arguments.json:
        print(json.dumps(report.make_record(account), indent=2))
    else:
        print("\n".join(report.format_plan(account)))
    return 0 if account.fits else 1


def plan_from_flags(arguments: argparse.Namespace, settings: ServerSettings) -> "tuple[ModelPlan, JaxConfig]":
    """Return the plan for the flags, and the settings of the backend that it is for.

    Raises CommandError, naming the flag, for what cannot be planned.
    """
    if not isinstance(settings.backend_config, JaxFlags):
        raise CommandError(f"--backend {settings.backend}: only plans of the backend jax are known", status=2)
    config = JaxConfig.from_flags(settings.backend_config)
    changes = {field: getattr(arguments, flag) for flag, field in _SHORT_FLAGS.items()} | {"mesh": arguments.mesh}
    given = {name: value for name, value in changes.items() if value is not None}
    is_mesh_given = "mesh" in given or "mesh" in config.model_fields_set
    config = config.model_copy(update=given)

    import jax  # late, because it takes a second, which --help need not

    from skyrl_tx.tools.plan.model_plan import plan_model

    jax.config.update("jax_platforms", "cpu")  # shapes need no device: a server may be using that of this machine
    try:
        with open_built_in_model(settings.base_model) as model:
            account = plan_model(model, config, arguments.device, is_mesh_given=is_mesh_given)
    except UserError as error:
        raise CommandError(str(error), status=2) from error
    return replace(account, base_model=settings.base_model), config


def _parse_devices(text: str) -> Devices:
    try:
        return parse_devices(text)
    except DeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _parse_mesh(text: str) -> MeshConfig:
    """Convert `fsdp=2,tp=4`; sizes that are not named are 1."""
    sizes: dict[str, str] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name in sizes or name not in MeshConfig.model_fields or re.fullmatch(r"[1-9]\d{0,3}", size) is None:
            axes = ", ".join(MeshConfig.model_fields)
            raise argparse.ArgumentTypeError(f"{part!r} must be one of {axes}, with a size, such as fsdp=2,tp=4")
        sizes[name] = size
    return MeshConfig.model_validate(sizes)


def _parse_size(text: str) -> int:
    if re.fullmatch(r"[1-9]\d{0,8}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)
