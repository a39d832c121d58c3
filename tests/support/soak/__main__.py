"""Entry point of the soak test."""

from tests.support.soak.run import main

main()
