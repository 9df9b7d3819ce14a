"""Web pages of other origins: which of them a browser lets call the server (CORS)."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from specdec.serve.account import ID_HEADER


def open_to(origins: Sequence[str], app: ASGIApp) -> ASGIApp:
    """The application, with the headers by which browsers let pages of these origins read its answers.

    To be put around everything else: errors carry the headers too, and a browser's question whether it may ask (a preflight)
    is answered here, so it needs no API key. Without origins it is the application itself.
    """
    if not origins:
        return app
    told = (ID_HEADER, "Retry-After", "WWW-Authenticate")
    return CORSMiddleware(app, allow_origins=origins, allow_methods=("*",), allow_headers=("*",), expose_headers=told)
