"""Entry point of the ``gem`` command.

Exit codes: 0 done, 1 the run failed, 2 the request is wrong, 3 this machine cannot do it.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from gem_core.cli.output import print_error
from gem_core.spec import GemError


def run(arguments: Sequence[str]) -> int:
    """Run one command line; return its exit code. Errors a user can act on are printed in three lines, without a traceback."""
    try:
        if tuple(arguments[:2]) == ("plugins", "list") and set(arguments[2:]) <= {"--json"}:
            # typer builds a pydantic adapter for every option, which alone takes longer than this command may
            from gem_core.cli.listing import print_plugins

            print_plugins(json="--json" in arguments)
            return 0
        from gem_core.cli.app import invoke

        return invoke(list(arguments) or ["--help"])
    except GemError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("gem: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader is gone: nothing more to flush into it
        return 1


def main() -> NoReturn:
    """The console script."""
    import logging

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("gem_core").setLevel(logging.INFO)
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Threads of process groups outlive them, and now and then abort a process while its libraries are unloaded. torchrun would then stop the
        # other ranks, which may still be writing. All files of this rank are closed by now.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
