"""The playground: a page at ``/`` and its files below ``/static``. No build step, and nothing of it comes from elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).with_name("static")

HEADERS = {
    # Nothing but our own files and routes; no element may be made from a string, whatever a model writes.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # asked for again, and answered 304 while it is the same
}


class _Files(StaticFiles):
    """Our files, with our headers."""

    def file_response(self, full_path: Any, stat_result: os.stat_result, scope: Any, status_code: int = 200) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Give the application the page. It is open to all, knows no key, and is not listed in the OpenAPI document."""

    async def page() -> Response:
        return FileResponse(FOLDER / "index.html", headers=HEADERS)

    app.add_api_route("/", page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", _Files(directory=FOLDER), name="static")
