"""The routes."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response, WebSocket
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from specdec import __version__
from specdec.config import ServeConfig
from specdec.llm import LLM
from specdec.serve.account import ID_HEADER, LONGEST_ID, Account, Accounts, is_id
from specdec.serve.body import SMALL, read_body
from specdec.serve.documentation import describe, takes
from specdec.serve.errors import ApiError
from specdec.serve.origins import open_to
from specdec.serve.page import add_page
from specdec.serve.schema import Body, ChatBody, CompletionBody, DetokenizeBody, Strict, TokenizeBody, parse
from specdec.serve.service import Service
from specdec.serve.shapes import token_text
from specdec.serve.socket import Conversation
from specdec.serve.stream import Reply

if TYPE_CHECKING:
    from specdec.serve.tracing import Tracing

_B = TypeVar("_B", bound=Strict)


def create_app(llm: LLM, config: ServeConfig, tracing: Tracing | None = None) -> FastAPI:
    """The server as an ASGI application; its engine runs from start-up to shut-down of the application's lifespan."""
    service = Service(llm, config, tracing)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await service.stop()

    app = _Application(title="specdec", version=__version__, lifespan=lifespan, redoc_url=None, telemetry=_NO_TELEMETRY)
    app.state.service = service
    app.add_middleware(Accounts, tracing=service.tracing)
    app.include_router(public)
    app.include_router(guarded)
    app.include_router(sockets)
    add_page(app)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_exception)
    describe(app)
    return app


class _Application(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        """With what must lie even around the answer to a fault, which FastAPI gives outside of all middleware."""
        return open_to(self.state.service.config.allowed_origins, super().build_middleware_stack())


_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI's own, of which older versions know nothing: requests are told of once, by their accounts."""


def _service(connection: HTTPConnection) -> Service:
    service: Service = connection.app.state.service
    return service


def authorise(connection: HTTPConnection) -> str | None:
    """The key that a client showed, or None where none is needed. Raises ApiError."""
    keys = _service(connection).config.api_keys
    if not keys:
        return None
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise ApiError(401, "an API key is needed: Authorization: Bearer KEY", code="missing_api_key", headers=_CHALLENGE)
    for key in keys:
        if secrets.compare_digest(given.strip().encode(), key.encode()):
            return key
    raise ApiError(401, "the API key is not known here", code="invalid_api_key", headers=_CHALLENGE)


def check_id(connection: HTTPConnection) -> None:
    """Raise ApiError where a client has named its request as none can be called."""
    given = connection.headers.get(ID_HEADER)
    if given is not None and not is_id(given):
        raise ApiError(400, f"{ID_HEADER} must be 1 to {LONGEST_ID} visible ASCII characters", code="bad_request_id")


_CHALLENGE = {"WWW-Authenticate": "Bearer"}

Served = Annotated[Service, Depends(_service)]
Tenant = Annotated[str | None, Depends(authorise)]

public = APIRouter()
guarded = APIRouter(dependencies=[Depends(HTTPBearer(auto_error=False)), Depends(authorise), Depends(check_id)])
sockets = APIRouter()


@public.head("/health", include_in_schema=False)
@public.get("/health")
async def health(service: Served) -> dict[str, str]:
    """200 while requests can be served; 503 once the engine has failed or the server is about to stop."""
    service.check_health()
    return {"status": "ok"}


@public.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Served) -> Response:
    """Counters and gauges for Prometheus."""
    return Response(await service.figures(), media_type="text/plain; version=0.0.4; charset=utf-8")


@guarded.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    """The served model."""
    return {"object": "list", "data": [_model(service)]}


@guarded.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> dict[str, Any]:
    """The served model, by its name."""
    service.check_model(name)
    return _model(service)


@guarded.post("/v1/completions", openapi_extra=takes(CompletionBody, streams=True))
async def completions(request: Request, tenant: Tenant) -> Response:
    """Continue a text, or token ids, as they are."""
    return await _answer(request, await _read(request, CompletionBody), tenant)


@guarded.post("/v1/chat/completions", openapi_extra=takes(ChatBody, streams=True))
async def chat_completions(request: Request, tenant: Tenant) -> Response:
    """Answer a conversation, laid out by the model's chat template."""
    return await _answer(request, await _read(request, ChatBody), tenant)


@guarded.post("/tokenize", openapi_extra=takes(TokenizeBody))
async def tokenize(request: Request, service: Served) -> dict[str, Any]:
    """Token ids of a prompt or a conversation, exactly as they would be run."""
    body = await _read(request, TokenizeBody)
    service.check_model(body.model)
    ids = await service.beside(service.intake.tokenize, body)
    answer = {"count": len(ids), "max_model_len": service.llm.engine.max_len, "tokens": ids}
    return {**answer, "token_strs": [token_text(service.vocabulary, i) for i in ids]} if body.return_token_strs else answer


@guarded.post("/detokenize", openapi_extra=takes(DetokenizeBody))
async def detokenize(request: Request, service: Served) -> dict[str, str]:
    """The text of token ids, special tokens included."""
    body = await _read(request, DetokenizeBody)
    service.check_model(body.model)
    return {"prompt": await service.beside(service.intake.detokenize, body.tokens)}


@sockets.websocket("/v1/completions")
async def completions_socket(socket: WebSocket) -> None:
    """As the route; see docs/serving.md."""
    await _converse(socket, CompletionBody)


@sockets.websocket("/v1/chat/completions")
async def chat_socket(socket: WebSocket) -> None:
    """As the route; see docs/serving.md."""
    await _converse(socket, ChatBody)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "max_model_len": service.llm.engine.max_len,
        "precision": service.llm.precision,
        "kv_format": service.llm.kv_format,
        "drafters": [drafter.name for drafter in service.llm.engine.drafters],
        "default_sampling_params": dict(service.llm.generation_defaults),
    }


async def _answer(request: Request, body: Body, tenant: str | None) -> Response:
    if body.stream_options is not None and not body.streamed:
        raise ApiError(400, "stream_options has no effect without stream: true", param="stream_options")
    service, account = _service(request), request.state.account
    generation, shape = await service.begin(body, tenant, account, streamed=body.streamed)
    config = service.config
    return Reply(generation, shape, streamed=body.streamed, rate=config.stream_rate, stalled=config.stalled_seconds)


async def _converse(socket: WebSocket, kind: type[Body]) -> None:
    service = _service(socket)
    try:
        tenant = authorise(socket)
        check_id(socket)
        service.check_health()
    except ApiError as error:
        service.metrics.refused.labels(str(error.status)).inc()
        account = Account(socket.state.request_id, socket.url.path, socket.headers, service.tracing)
        account.status, account.error = error.status, error
        try:
            await socket.send_denial_response(_error_response(error))
        finally:
            account.end()
        return
    await Conversation(socket, service, kind, tenant).run()


async def _read(request: Request, kind: type[_B]) -> _B:
    """The body, within the limits of size and time. Raises ApiError."""
    service = _service(request)
    data = await read_body(request, service.config)
    if len(data) <= SMALL:
        return parse(kind, data)
    return await service.beside(parse, kind, data)


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    _service(request).metrics.refused.labels(str(error.status)).inc()
    account: Account | None = getattr(request.state, "account", None)
    if account:
        account.error = error
    return _error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    told = {404: f"there is no {asked} here; GET /docs shows all routes", 405: f"{asked} is not served; see the header Allow"}
    message = told.get(error.status_code, str(error.detail))
    return _error_response(ApiError(error.status_code, message, headers=error.headers))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_exception(request: Request, error: Exception) -> Response:
    # Answered outside of all middleware, so the id has to be put in here.
    headers = {ID_HEADER: request.state.request_id}
    return _error_response(ApiError(500, "the server has a fault; its log says more", code="internal_error", headers=headers))
