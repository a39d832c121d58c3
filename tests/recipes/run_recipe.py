"""Run a module of the installed cookbook as a user does: `run_recipe.py MODULE key=value …`."""

import runpy
import sys

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    runpy.run_module(f"tinker_cookbook.{name}", run_name="__main__", alter_sys=True)
