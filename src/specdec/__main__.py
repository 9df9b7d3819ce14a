"""``python -m specdec``: the command line, where its script is not on the path."""

from specdec.cli import main

if __name__ == "__main__":
    main()
