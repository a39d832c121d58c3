"""Run a Python script and end without a shutdown of the interpreter: `run_without_shutdown.py SCRIPT ARGUMENTS…`.

Threads of the SDK's native transport outlive its clients. A call of theirs into an interpreter that is shutting down
can abort the process, although the script did all that it had to do.
"""

import os
import runpy
import sys
import traceback


def _run(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    status = _run(sys.argv[0])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
