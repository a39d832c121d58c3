"""The records of phases: one for each commit, device, model, shape and set of the server's flags."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import describe_machine

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tinker")


@dataclass(slots=True)
class Records:
    """Records of this and earlier runs, in one or more files that are written after each phase."""

    files: Sequence[Path]
    commit: str
    machine: dict[str, Any]
    options: dict[str, Any]
    """The measured configuration, without the phase."""
    benchmark: str = "gpu_rl"
    conditions: str = "one process on the device"
    _records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @classmethod
    def open(cls, files: Sequence[Path], commit: str, device: dict[str, Any], options: dict[str, Any]) -> "Records":
        """Read all files; of records of the same phase and configuration the newest is kept."""
        records = cls(files, commit, describe_machine(PACKAGES) | device, options)
        for file in files:
            for record in json.loads(file.read_text()) if file.exists() else []:
                if record not in records._records:
                    records._records.append(record)
        return records

    def find(self, phase: str) -> dict[str, Any] | None:
        """Return the results of a phase of this configuration."""
        found = [record["results"] for record in self._records if self._key(record) == self._own_key(phase)]
        return found[-1] if found else None

    def put(self, phase: str, results: dict[str, Any]) -> None:
        """Add a record, or replace the record of the same phase, and write all files."""
        self._records = [record for record in self._records if self._key(record) != self._own_key(phase)]
        self._records.append(
            {
                "benchmark": self.benchmark,
                "date": datetime.now(UTC).date().isoformat(),
                "commit": self.commit,
                "machine": self.machine,
                "conditions": self.conditions,
                "command": f"python -m benchmarks.bench_{self.benchmark} {' '.join(sys.argv[1:])}".rstrip(),
                "options": {"phase": phase, **self.options},
                "results": results,
            }
        )

        for file in self.files:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(".new")
            new.write_text(json.dumps(self._records, indent=2) + "\n")
            new.replace(file)

    def _own_key(self, phase: str) -> list[Any]:
        return [self.commit, self.machine["device"], {"phase": phase, **self.options}]

    def _key(self, record: dict[str, Any]) -> list[Any]:
        return [record["commit"], record["machine"]["device"], record["options"]]
