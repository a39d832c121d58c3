"""`python -m skyrl_tx` is `skyrl-tx`."""

import sys

from skyrl_tx.cli import main

if __name__ == "__main__":
    sys.exit(main())
