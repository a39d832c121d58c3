"""Commands in documents can be pasted: no command is broken over lines without a backslash."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"^( *)```(?:bash|sh)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
ARGUMENT = re.compile(r"[a-z_]+=|[A-Z]\w+/|--|/\S+,")
"""The beginning of an argument. A command does not begin like this; variables have upper-case names."""


def list_blocks(document: Path) -> list[str]:
    """Return the shell commands of a document, one text per block."""
    text = document.read_text()
    return [re.sub(rf"^{found[1]}", "", found[2], flags=re.MULTILINE) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_command_is_broken_over_lines(document: Path) -> None:
    for block in list_blocks(document):
        assert "\\ " not in re.sub(r"'[^']*'", "", block), f"a backslash in the middle of a line:\n{block}"
        for line in block.replace("\\\n", " ").splitlines():
            assert not ARGUMENT.match(line), f"an argument of the command before:\n{line}"


def test_shells_can_parse_every_block() -> None:
    blocks = [block for document in DOCUMENTS for block in list_blocks(document)]
    assert len(blocks) > 100
    for block in blocks:
        done = subprocess.run(["bash", "-n"], input=block.replace("…", "x"), capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr}\n{block}"
