"""Make `python -m skyrl_tx` equivalent to `skyrl-tx`."""

import sys

from skyrl_tx.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
