"""Compile the programs of each model for each kind of device, without having the devices.

Each combination runs `benchmarks.ahead.plan_programs` in a separate process, and its record is added to
results/aot.json when it is done. A run skips combinations that have a record, so it can be stopped at any time. It
writes the complete table into docs/internals/measurements/compiled.md, and which models fit into docs/performance.md.
The compilers are in a separate environment. A large model takes minutes and a few GiB for each combination.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine, get_commit
from tests.support.client_environments import COMPILERS, prepare
from tests.support.model_configs import QWEN3_8B, QWEN3_30B_A3B, QWEN3_600M

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "aot.json"
PAGE = ROOT / "docs" / "internals" / "measurements" / "compiled.md"
SUMMARY_PAGE = ROOT / "docs" / "performance.md"
CONFIGS = ROOT / "tests" / "unit" / "models" / "hub_configs"
BEGIN, END = "<!-- begin: make aot -->", "<!-- end: make aot -->"
OWN = {"Qwen3-0.6B": QWEN3_600M, "Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
FAMILIES = (
    "Mistral-7B-v0.3",
    "gemma-3-4b-it",
    "Qwen3.5-9B",
    "Qwen3.5-35B-A3B",
    "Qwen3-Next-80B-A3B-Instruct",
    "gpt-oss-20b",
    "Moonlight-16B-A3B",
    "GLM-4.7-Flash",
    "GLM-4.5-Air",
    "Nemotron-3-Nano-30B-A3B",
)
DEVICES: tuple[str, ...] = ("h200:1", "h200:8", "v5e:1x1", "v5e:2x4", "v5p:2x2x1", "v6e:2x4")
GIB = 2**30


def read_config(model: str) -> dict[str, Any]:
    return OWN[model] if model in OWN else json.loads((CONFIGS / f"{model}.json").read_text())


def compile_cell(model: str, device: str, packages: Path, timeout_s: float) -> dict[str, Any]:
    """Return the plan with its programs as JSON, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(read_config(model)))
        flags = ["--base-model", folder, "--device", device, "--json"]
        command = [sys.executable, "-m", "skyrl_tx", "plan", *flags]
        plan = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout)
        if not plan["fits"]:
            return {"problem": "does not fit"}

        paths = os.pathsep.join((str(ROOT), str(packages)))
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        command = [sys.executable, "-m", "benchmarks.ahead.plan_programs", *flags, "--programs", "gradient,decode"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return {"problem": f"took more than {timeout_s:.0f} s"}

    if done.returncode:
        return {"problem": done.stderr.strip().splitlines()[-1][:200]}
    return {key: json.loads(done.stdout)[key] for key in ("mesh", "limits", "kernels", "programs")}


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def save(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write all records, in one step."""
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    partial = path.with_suffix(".new")
    partial.write_text(f"[\n{lines}\n]\n")
    partial.replace(path)


def newest_results(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """Return the newest results by model and device."""
    return {(record["options"]["model"], record["options"]["device"]): record["results"] for record in records}


def describe_mesh(results: Mapping[str, Any]) -> str:
    """Return the axes of a mesh that are above 1, for example `dp=4, tp=2`, and `1` for a single device."""
    return ", ".join(f"{axis}={size}" for axis, size in results["mesh"].items() if size > 1) or "1"


def summarize(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table with the mesh that fits each model on each device."""
    newest = newest_results(records)
    yield "| Model | " + " | ".join(f"`{device}`" for device in DEVICES) + " |"
    yield "|---" * (len(DEVICES) + 1) + "|"
    for model in (*OWN, *FAMILIES):
        cells: list[str] = []
        for device in DEVICES:
            results = newest.get((model, device), {"problem": "unknown"})
            mesh = results.get("problem") or describe_mesh(results)
            cells.append({"does not fit": "–", "1": "fits"}.get(mesh, mesh))
        yield f"| {model} | " + " | ".join(cells) + " |"


def make_table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the newest record of each cell as rows of a table, in the order of models and devices."""
    newest = newest_results(records)
    models, devices = [*OWN, *FAMILIES], list(DEVICES)
    yield "| model | devices | mesh | micro-batch | gradient | decode slice | steps | kernels | collectives a layer |"
    yield "|---|---|---|---|---|---|---|---|---|"

    for model, device in sorted(newest, key=lambda cell: (models.index(cell[0]), devices.index(cell[1]))):
        found = newest[model, device]
        if "problem" in found:
            yield f"| {model} | {device} | {found['problem']} | | | | | | |"
            continue

        gradient, decode = found["programs"]
        mesh = describe_mesh(found)
        remat = ", rematerialized" if found["limits"]["is_rematerialized"] else ""
        content = read_config(model)
        text, layers = gradient["text"], content.get("text_config", content)["num_hidden_layers"]
        steps = kernels = sent = "unknown"
        if text is not None:
            steps = f"{text['num_steps']:,}" + (f" and {text['num_open_loops']} loops" * bool(text["num_open_loops"]))
            kernels = ", ".join(dict.fromkeys(map(_kind, text["kernels"]))) or "none"
            in_layers = text["in_layers"].items()
            sent = ", ".join(f"{record['calls'] / layers:.3g} {kind}" for kind, record in in_layers) or "none"

        size = f"{found['limits']['micro_batch_tokens']:,}{remat}"
        yield (
            f"| {model} | {device} | {mesh} | {size} | {_memory(gradient)} | {_memory(decode)} | {steps} | {kernels} "
            f"| {sent} |"
        )


def _kind(kernel: str) -> str:
    """Return what kernels of both directions have in common: `mha` of mha_forward, mha_d_query and mha_d_key."""
    kernel = kernel.removeprefix("d_")
    return next((kind for kind in ("splash", "mha") if kernel.startswith(kind)), kernel)


def _memory(program: Mapping[str, Any]) -> str:
    if program["problem"]:
        return "too much"
    found = sum(program[f"{part}_bytes"] for part in ("argument", "temporary", "output"))
    return f"{found / GIB:.1f} GiB ({program['planned_bytes'] / found:.2f})"


def write_pages(records: Sequence[Mapping[str, Any]]) -> None:
    """Write the tables into both pages."""
    write_table(PAGE, make_table(records))
    write_table(SUMMARY_PAGE, summarize(records))


def write_table(page: Path, lines: Iterable[str]) -> None:
    """Replace the table between the markers of a page."""
    before, rest = page.read_text().split(BEGIN)
    _, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*OWN, *FAMILIES], help="names of models, by default all")
    parser.add_argument("--devices", nargs="+", default=DEVICES, help="as in `skyrl-tx plan`, by default all")
    parser.add_argument("--again", action="store_true", help="also compile cells that have a record")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of a cell")
    options = parser.parse_args()

    records = load(RECORDS)
    known = {(record["options"]["model"], record["options"]["device"]) for record in records}
    packages = prepare(COMPILERS).packages

    for model in options.models:
        for device in options.devices:
            if (model, device) in known and not options.again:
                continue

            started = time.monotonic()
            results = compile_cell(model, device, packages, options.timeout_s)
            records.append(
                {
                    "benchmark": "aot",
                    "date": datetime.now(UTC).date().isoformat(),
                    "commit": get_commit(),
                    "machine": describe_machine(("jax", "jaxlib")),
                    "conditions": "any: memory and steps do not depend on the load",
                    "command": f"python -m benchmarks.bench_aot --models {model} --devices {device}",
                    "options": {"model": model, "device": device},
                    "results": results,
                }
            )

            save(RECORDS, records)
            write_pages(records)
            print(f"{model} on {device}: {results.get('problem', 'compiled')}, {time.monotonic() - started:.0f} s")

    write_pages(records)


if __name__ == "__main__":
    main()
