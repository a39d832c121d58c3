"""Compile the programs of a plan for given devices, without having the devices.

Takes the flags of `skyrl-tx plan`, and `--programs`. Needs the compiler of the devices: libtpu for TPUs,
jax-cuda12-plugin and jax-cuda12-pjrt for GPUs (h100 and h200). For each program it prints

- the memory according to the compiler and according to the plan, and its parts: arguments (weights, adapters, cache),
  temporary memory, results and code; on TPU also the bytes that instructions read and write, with the body of a loop
  counted once;
- the number of sequential loop iterations; for nested loops the product. A loop whose length depends on data, for
  example on the length of a prompt, counts as one iteration and is named;
- the kernel calls, and the data that devices send each other. A loop with as many iterations as the model has layers
  counts as a loop over layers.

A compiler reports no times. The GPU compiler does not check whether the memory is sufficient, so compare with the plan.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from benchmarks.ahead.program_text import ProgramText
from benchmarks.ahead.programs import CompiledProgram, compile_programs
from benchmarks.ahead.topology import describe_layout
from skyrl_tx.contract.errors import UserError
from skyrl_tx.launch.command import CommandError, CommandParser
from skyrl_tx.launch.command_line import Record, format_table
from skyrl_tx.process.text import format_bytes
from skyrl_tx.tools.plan import report
from skyrl_tx.tools.plan.command import add_flags, plan_from_flags

PROGRAMS = "forward", "gradient", "optimizer", "prefill", "decode", "adapter", "adapters"
"""All programs that take much memory or time; they are compiled in their largest shapes."""


def main(given: Sequence[str]) -> int:
    parser = CommandParser(given, prog="python -m benchmarks.ahead.plan_programs")
    read = add_flags(parser)
    parser.usage, parser.description = None, __doc__
    parser.add_argument(
        "--programs",
        type=_programs,
        default=PROGRAMS,
        metavar="PROGRAM,…",
        help=f"all by default, which are {', '.join(PROGRAMS)}",
    )

    try:
        arguments = parser.parse_args(given)
        account, config = plan_from_flags(arguments, read(arguments))
        layout = describe_layout(account.devices.kind.family, str(account.devices), account.chosen.mesh)
        programs = list(compile_programs(config, layout, account.model, account.plan, arguments.programs))
    except (CommandError, UserError) as error:
        print(error, file=sys.stderr)
        return 2

    if arguments.json:
        print(
            json.dumps({**report.make_record(account), "programs": [asdict(program) for program in programs]}, indent=2)
        )
    else:
        print("\n".join((*report.format_plan(account), *_lines(programs, account.model.num_layers))))
    return 0 if account.fits else 1


def _programs(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PROGRAMS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} must be one of {', '.join(PROGRAMS)}")
    return names


def _lines(programs: Sequence[CompiledProgram], num_layers: int) -> Iterator[str]:
    yield from ("", "Memory of programs by the compiler for these devices, and by this plan:")
    yield from format_table([_memory_row(program) for program in programs])
    yield from (f"{program.name}: {program.problem[:300]}" for program in programs if program.problem)
    if rows := [_work_row(program.name, program.text, num_layers) for program in programs if program.text is not None]:
        yield from ("", "One run of each: steps of loops one after another, kernels, and what each device sends:")
        yield from format_table(rows)


def _memory_row(program: CompiledProgram) -> Record:
    sizes = {
        "compiler": program.total_bytes,
        "plan": program.planned_bytes,
        "arguments": program.argument_bytes,
        "temporary": program.temporary_bytes,
        "results": program.output_bytes,
        "code": program.code_bytes,
        "accessed": program.accessed_bytes,
    }
    shown = {name: format_bytes(size) if size else "unknown" for name, size in sizes.items()}
    if program.problem:
        shown["compiler"] = "too much"
    return {"program": program.name, **shown, "what": program.detail}


def _work_row(name: str, text: ProgramText, num_layers: int) -> Record:
    steps = f"{text.num_steps:,}" + (f", and {text.num_open_loops} loops by data" if text.num_open_loops else "")
    sent = (f"{number.calls} {kind} of {format_bytes(number.bytes)}" for kind, number in text.collectives.items())
    in_layers = (f"{number.calls / num_layers:.3g} {kind}" for kind, number in text.in_layers.items())
    return {
        "program": name,
        "steps": steps,
        "kernels": ", ".join(f"{calls} {kernel}" for kernel, calls in text.kernels.items()) or "none",
        "collectives a layer": ", ".join(in_layers) or "none",
        "all collectives": ", ".join(sent) or "none",
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
