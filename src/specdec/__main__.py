"""The program: ``specdec`` on the command line, and ``python -m specdec``."""

from __future__ import annotations

import signal


def main() -> None:
    """Run a command.

    Until its libraries are imported, Ctrl-C ends the process at once: as an exception it would leave half of a module behind,
    and some of them swallow it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from specdec.cli import main as run

    run()


if __name__ == "__main__":
    main()
