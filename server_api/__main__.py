"""The program: loads the command line, and ends without a word when it is interrupted before it has."""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """Run the command line."""
    # An interrupt while modules load would end in a traceback from the middle of one.
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from fednl_runtime.server_api.cli import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli()


if __name__ == "__main__":
    main()
