"""``specdec pull``: fetch a model ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec.cli.options import command
from specdec.config import DEFAULT_MODEL


@command
def pull(
    model: Annotated[str, typer.Argument(help="Alias or hub id.")] = DEFAULT_MODEL,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
) -> None:
    """Fetch a model into the cache and print where it lies."""
    from specdec.models.source import resolve

    typer.echo(resolve(model, revision=revision, progress=True).path)
