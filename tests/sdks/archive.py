"""Runs the installed SDK's command line: `python archive.py checkpoint download …`."""

from tinker.cli.__main__ import main

if __name__ == "__main__":
    main()
