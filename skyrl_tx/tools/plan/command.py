"""The command `skyrl-tx plan`: prints the plan of a model on given devices as text or as JSON.

The code that computes the plan imports JAX, so it is imported only when the command runs.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from skyrl_tx.backends.jax.config import JaxConfig, JaxFlags, MeshConfig
from skyrl_tx.backends.jax.gpu_memory import read_gpu_share
from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.command import CommandError, CommandParser
from skyrl_tx.launch.command_line import parse_count
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.tools.plan.hardware import HOW_TO_PLAN_THIS_MACHINE, KINDS, parse_devices
from skyrl_tx.tools.quickstart.model import open_built_in_model
from skyrl_tx.tools.serve import add_settings

if TYPE_CHECKING:
    from skyrl_tx.tools.plan.model_plan import ModelPlan

_SHORT_FLAGS = {"context": "max_context_length", "adapters": "max_lora_adapters", "rank": "max_lora_rank"}
"""Flags of this command that are short for a `--backend-config.…` setting, and its name."""


def add_arguments(parser: CommandParser) -> None:
    """Add the command's arguments."""
    read_settings = add_flags(parser)
    parser.set_defaults(run=lambda arguments: _run(arguments, read_settings(arguments)))


def add_flags(parser: CommandParser) -> Callable[[argparse.Namespace], ServerSettings]:
    """Add the flags of `plan` and of `serve`.

    Returns the function that turns the parsed arguments into the settings of `serve`.
    """
    parser.usage = "skyrl-tx plan --base-model MODEL --device DEVICE [flags]"
    parser.description = (
        "Estimate how a model runs on given hardware: the memory of each device by item, the context length and number "
        "of samples that fit, the best mesh, and an upper bound for the tokens per second. The command reads only the "
        "model's config.json and needs no accelerator. It also accepts all flags of `skyrl-tx serve`, including "
        "--config. The exit status is 0 if the model fits, 1 if it does not, and 2 for a wrong command line."
    )

    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--device",
        type=parse_devices,
        metavar="NAME[:TOPOLOGY]",
        help=f"the devices, for example h200, h200:8, v5e:2x4 or v5p:2x2x1; the names are {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--mesh",
        type=_parse_mesh,
        metavar="dp=N,fsdp=N,tp=N,ep=N,cp=N",
        help="the mesh of the devices, for example fsdp=2,tp=4 (default: the fastest mesh)",
    )
    parser.add_argument(
        "--context",
        type=parse_count,
        metavar="TOKENS",
        help="the length of the longest sequence, including the prompt and the new tokens",
    )
    parser.add_argument(
        "--adapters",
        type=parse_count,
        metavar="N",
        help="how many LoRA adapters (training runs) are on the device at the same time",
    )
    parser.add_argument("--rank", type=parse_count, metavar="N", help="the highest LoRA rank that clients may use")
    return add_settings(parser)


def _run(arguments: argparse.Namespace, settings: ServerSettings) -> int:
    plan, _ = plan_from_flags(arguments, settings)
    from skyrl_tx.tools.plan import report  # imported here because it imports JAX

    if arguments.json:
        print(json.dumps(report.make_record(plan), indent=2))
    else:
        print("\n".join(report.format_plan(plan)))
    return 0 if plan.fits else 1


def plan_from_flags(arguments: argparse.Namespace, settings: ServerSettings) -> "tuple[ModelPlan, JaxConfig]":
    """Return the plan for a command line, and the settings of its backend.

    Raises CommandError, which names the flag, if no plan can be made.
    """
    if arguments.device is None:
        raise CommandError(f"--device is required, for example --device h200:8; {HOW_TO_PLAN_THIS_MACHINE}", status=2)

    # Apply the short flags to the settings of the backend.
    if not isinstance(settings.backend_config, JaxFlags):
        raise CommandError(f"--backend {settings.backend}: `plan` supports only the backend jax", status=2)
    config = JaxConfig.from_flags(settings.backend_config)
    changes = {field: getattr(arguments, flag) for flag, field in _SHORT_FLAGS.items()} | {"mesh": arguments.mesh}
    given = {name: value for name, value in changes.items() if value is not None}
    is_mesh_given = "mesh" in given or "mesh" in config.model_fields_set
    config = config.model_copy(update=given)

    # JAX is imported here because it takes more than a second, which --help should not need.
    import jax

    from skyrl_tx.tools.plan.model_plan import plan_model

    # Planning needs only shapes. Without this, JAX would take the GPU, which a server may be using.
    jax.config.update("jax_platforms", "cpu")
    try:
        with open_built_in_model(settings.base_model) as model:  # other models are opened by their path or hub id
            devices = replace(arguments.device, gpu_share=read_gpu_share(config.gpu_memory_share))
            plan = plan_model(model, config, devices, is_mesh_given=is_mesh_given)
    except UserError as error:
        raise CommandError(str(error), status=2) from error
    return replace(plan, base_model=settings.base_model), config


def _parse_mesh(text: str) -> MeshConfig:
    """Parse a mesh such as `fsdp=2,tp=4`. Axes that are not named have size 1."""
    sizes: dict[str, str] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if name in sizes or name not in MeshConfig.model_fields or re.fullmatch(r"[1-9]\d{0,3}", size) is None:
            axes = ", ".join(MeshConfig.model_fields)
            raise argparse.ArgumentTypeError(
                f"{part!r} must be one of {axes} with a size, each axis once, for example fsdp=2,tp=4"
            )
        sizes[name] = size
    return MeshConfig.model_validate(sizes)
