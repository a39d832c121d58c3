"""Sets the description on PyPI: README.md, with links to the files of the release on GitHub."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = "skyrl-tx/skyrl_tx"


def read_description() -> str:
    """Return README.md with absolute links, because PyPI has no other file of the repository."""
    (version,) = re.findall(r'^__version__ = "(.+)"', (ROOT / "skyrl_tx" / "__init__.py").read_text(), re.MULTILINE)
    text = re.sub(
        r"(!\[[^]]*\]\()(?!https?:)",
        rf"\1https://raw.githubusercontent.com/{REPOSITORY}/v{version}/",
        (ROOT / "README.md").read_text(),
    )
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1https://github.com/{REPOSITORY}/blob/v{version}/", text)


setup(long_description=read_description(), long_description_content_type="text/markdown")
