"""Web pages of other origins: a browser lets those that are allowed ask and read every answer, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from serving import PATIENCE, ROUTES, Running, frames_of, serving, slowed
from typer.testing import CliRunner

from specdec.cli import app
from specdec.config import ConfigError, ServeConfig
from specdec.llm import LLM
from specdec.serve.scale.replicas import NoReplica
from specdec.serve.scale.router import Router

PAGE = "https://page.example"
FROM_PAGE = {"Origin": PAGE}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
OPEN = "access-control-allow-origin"


@pytest.fixture(scope="module")
def server(tiny_folder) -> Iterator[Running]:
    """Open to one origin, with a key, and for one request at a time."""
    llm = slowed(LLM(str(tiny_folder), precision="fp32", self_test=False, max_sequences=1, speculation="off"), 0.02)
    with serving(llm, api_keys=("sesame",), allowed_origins=(PAGE,), max_queue=0) as running:
        yield running


def test_answers_can_be_read(server: Running) -> None:
    """Whole and streamed, with the headers that a page may want; the answer differs by origin, which caches must know."""
    body = {"prompt": "a", "max_tokens": 3}
    for more in ({}, {"stream": True}):
        response = server.http.post(ROUTES[0], json=body | more, headers=FROM_PAGE)
        assert (response.status_code, response.headers[OPEN]) == (200, PAGE)
        assert response.headers["vary"] == "Origin"
        assert "X-Request-Id" in response.headers["access-control-expose-headers"]
    assert frames_of(response.content)


def test_errors_can_be_read(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is to show what is wrong: a missing key, a bad field, a full queue, a fault of the server."""
    found = {}

    def note(response: httpx.Response) -> None:
        found[response.status_code] = response.headers.get(OPEN)

    with httpx.Client(base_url=server.url, timeout=PATIENCE, headers=FROM_PAGE) as keyless:
        note(keyless.post(ROUTES[0], json={"prompt": "a"}))
    note(server.http.post(ROUTES[0], json={"prompt": "a", "top_p": 2}, headers=FROM_PAGE))
    note(server.http.get("/nowhere", headers=FROM_PAGE))
    running = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", ROUTES[0], json=running) as stream:
        lines = stream.iter_lines()
        next(lines)
        note(server.http.post(ROUTES[0], json={"prompt": "a"}, headers=FROM_PAGE))
    server.settled()

    def fail(name: str) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(server.server.service, "check_model", fail)
    note(server.http.get("/v1/models/x", headers=FROM_PAGE))
    assert found == dict.fromkeys((401, 400, 404, 429, 500), PAGE)


def test_a_preflight_needs_no_key(server: Running) -> None:
    """Browsers send none with it. What they ask for is allowed, from this origin and from no other."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as keyless:
        for route in ROUTES:
            response = keyless.options(route, headers=FROM_PAGE | PREFLIGHT)
            assert (response.status_code, response.headers[OPEN]) == (200, PAGE)
            assert "POST" in response.headers["access-control-allow-methods"]
            assert "authorization" in response.headers["access-control-allow-headers"]
        refused = keyless.options(ROUTES[0], headers={"Origin": "https://other.example"} | PREFLIGHT)
    assert refused.status_code == 400
    assert OPEN not in refused.headers


def test_other_origins_are_told_nothing(server: Running) -> None:
    """Their pages may send a request, but a browser does not show them what comes of it."""
    for origin in ("https://other.example", "http://page.example", f"{PAGE}:8080", f"{PAGE}.evil.example"):
        assert OPEN not in server.http.get("/v1/models", headers={"Origin": origin}).headers


def test_it_is_off_unless_asked_for(tiny_server: Running) -> None:
    """A server in somebody's network is no matter of any page that they look at."""
    assert OPEN not in tiny_server.http.get("/v1/models", headers=FROM_PAGE).headers
    assert tiny_server.http.options(ROUTES[0], headers=FROM_PAGE | PREFLIGHT).status_code == 405


def test_the_router_answers_for_its_replicas() -> None:
    """Once: replicas are not told of the origin, so they add no header of their own; and a preflight reaches none of them."""

    class Nobody:
        def __init__(self) -> None:
            self.headers: list[bytes] = []

        async def ask(self, asked, avoid):
            self.headers += [name for name, _ in asked.headers]
            raise NoReplica

    async def ask(origins: tuple[str, ...]) -> tuple[httpx.Response, httpx.Response, list[bytes]]:
        replicas = Nobody()
        router = Router(replicas, ServeConfig(allowed_origins=origins))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url="http://test") as client:
            before = await client.options(ROUTES[0], headers=FROM_PAGE | PREFLIGHT)
            after = await client.post(ROUTES[0], json={"prompt": "a"}, headers=FROM_PAGE)
            return before, after, replicas.headers

    for origins, told in (((PAGE,), PAGE), (("*",), "*")):
        before, after, passed_on = asyncio.run(ask(origins))
        assert (before.status_code, before.headers[OPEN]) == (200, told)
        assert (after.status_code, after.headers.get_list(OPEN)) == (503, [told])
        assert passed_on.count(b"content-type") == 1, "only the request itself went on"
        assert b"origin" not in passed_on
    before, after, _ = asyncio.run(ask(()))
    assert OPEN not in before.headers
    assert OPEN not in after.headers


@pytest.mark.parametrize("value", ["page.example", f"{PAGE}/", f"{PAGE}/app", "", '["*"]', "https://*.example https://a"])
def test_what_is_no_origin_is_refused(value: str) -> None:
    """It would never equal what a browser sends, so that the option would be without effect."""
    with pytest.raises(ConfigError, match=r"allowed_origins must be origins such as https://example.org"):
        ServeConfig(allowed_origins=(value,))
    result = CliRunner().invoke(app, ["serve", "--allowed-origins", "*", "--allowed-origins", value])
    assert result.exit_code == 2
    assert "allowed_origins must be origins" in result.stderr


def test_origins_are_a_list() -> None:
    """A string is not taken for a list of its letters."""
    assert ServeConfig(allowed_origins=[PAGE, "null", "*"]).allowed_origins == (PAGE, "null", "*")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allowed_origins"):
        ServeConfig(allowed_origins="*")  # type: ignore[arg-type]
