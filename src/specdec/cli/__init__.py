"""The command line: one thin command per verb. Torch is loaded by the commands that need it, not by ``--help``."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec import __version__
from specdec.cli import bench, train
from specdec.cli.audit import audit
from specdec.cli.chat import chat
from specdec.cli.generate import generate
from specdec.cli.info import info
from specdec.cli.plan import plan
from specdec.cli.pull import pull
from specdec.cli.roofline import roofline
from specdec.cli.serve import serve

app = typer.Typer(
    name="specdec",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, serve, audit, pull, info, roofline, plan):
    app.command()(command)
app.add_typer(bench.app)
app.add_typer(train.app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specdec {__version__}")
        raise typer.Exit


@app.callback()
def specdec(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Speculative decoding that changes nothing but the speed, and that you can check."""


def main() -> None:
    """Run the command that the program's arguments name."""
    app()
