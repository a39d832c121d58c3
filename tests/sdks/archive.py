"""Run the command line of the installed SDK: `python archive.py checkpoint download …`."""

from tinker.cli.__main__ import main

if __name__ == "__main__":
    main()
