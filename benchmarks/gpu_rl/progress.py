"""How the process of a phase gets its arguments and tells its figures: two JSON files, named on its command line."""

import json
import sys
from pathlib import Path
from typing import Any


def read_arguments() -> dict[str, Any]:
    """Return the arguments of this phase."""
    return json.loads(Path(sys.argv[1]).read_text())


def save_progress(results: dict[str, Any]) -> None:
    """Replace the figures of this phase, so that those before a kill remain."""
    path = Path(sys.argv[2])
    new = path.with_suffix(".new")
    new.write_text(json.dumps(results))
    new.replace(path)
