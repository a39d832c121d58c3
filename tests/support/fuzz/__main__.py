"""Entry point of the fuzz tests; child processes import `run` by name."""

from tests.support.fuzz.run import main

main()
