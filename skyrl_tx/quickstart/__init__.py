"""The first run: a tiny model trained through the Tinker SDK. What the command line needs of it, light to import."""

import os

from skyrl_tx.quickstart.settings import QuickstartSettings


def main(settings: QuickstartSettings) -> int:
    """Run the quickstart, print its progress, and return the exit status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would tell that there is no torch; none is needed
    from skyrl_tx.quickstart.run import run  # the SDK and the plotting library would only slow --help down

    return run(settings)


__all__ = ["QuickstartSettings", "main"]
