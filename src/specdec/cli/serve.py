"""``specdec serve``: the OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specdec.cli import render
from specdec.cli.options import GenerationConfig, ModelOptions, command
from specdec.config import AUTO, ConfigError, ServeConfig

if TYPE_CHECKING:
    from specdec.llm import LLM
    from specdec.serve.logs import LogFormat
    from specdec.serve.scale.worker import Ready

_SERVER = "Server"
_DEFAULT = ServeConfig()


def _option(*names: str, help: str) -> object:
    return typer.Option(*names, help=help, rich_help_panel=_SERVER)


@command
def serve(
    host: Annotated[str, _option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Clients must show one of these; repeatable.", envvar="SPECDEC_API_KEY", rich_help_panel=_SERVER),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None, _option(help="Web pages of this origin, or * for all, may call the server; repeatable.")
    ] = None,
    model_name: Annotated[str | None, _option(help="What clients call the model.")] = None,
    replicas: Annotated[int, _option(help="Processes that each serve the model, behind one address; docs/scaling.md.")] = 1,
    max_sequences: Annotated[int, _option(help="Most sequences that run at once.")] = 32,
    max_queue: Annotated[int, _option(help="Most sequences that wait; a request beyond gets 429.")] = _DEFAULT.max_queue,
    kv_tokens: Annotated[int | None, _option(help="Tokens that the key and value pool holds.")] = None,
    max_body_bytes: Annotated[int, _option(help="Longest body of a request.")] = _DEFAULT.max_body_bytes,
    body_seconds: Annotated[float, _option(help="Longest time for a body to arrive.")] = _DEFAULT.body_seconds,
    request_seconds: Annotated[float, _option(help="Longest time for an answer.")] = _DEFAULT.request_seconds,
    stalled_seconds: Annotated[
        float, _option(help="A streaming client that takes nothing for so long is given up.")
    ] = _DEFAULT.stalled_seconds,
    stream_rate: Annotated[float | None, _option(help="Most tokens per second that one stream is sent.")] = None,
    shutdown_seconds: Annotated[
        float, _option(help="How long running requests may go on at the end.")
    ] = _DEFAULT.shutdown_seconds,
    log_format: Annotated[
        Literal["text", "json"], _option(help="One line per request and warning, on stderr: for people, or an object of JSON.")
    ] = "text",
    otlp_endpoint: Annotated[
        str | None, _option(help="Collector of OpenTelemetry traces, as OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra otel.")
    ] = None,
    trace_sample: Annotated[float | None, _option(help="Share of the traces that are kept, 0 to 1.")] = None,
    model: ModelOptions = ModelOptions(),  # noqa: B008 - replaced by one option per field
    generation_config: GenerationConfig = AUTO,
) -> None:
    """Serve a model over HTTP, to OpenAI's clients among others; docs/serving.md has the routes.

    Ctrl-C or SIGTERM ends it: requests that run may finish first.
    """
    config = ServeConfig(
        model_name=model_name,
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(allowed_origins or ()),
        max_queue=max_queue,
        max_body_bytes=max_body_bytes,
        body_seconds=body_seconds,
        request_seconds=request_seconds,
        stalled_seconds=stalled_seconds,
        stream_rate=stream_rate,
        shutdown_seconds=shutdown_seconds,
        otlp_endpoint=otlp_endpoint,
        trace_sample=trace_sample,
    )
    if replicas < 1:
        raise ConfigError(f"--replicas must be an integer >= 1, got {replicas}")
    _check_address(host, port)
    from specdec.serve.logs import configure

    configure(log_format)
    settings: dict[str, Any] = {"max_sequences": max_sequences, "kv_tokens": kv_tokens, "generation_config": generation_config}
    if replicas > 1:
        _serve_replicas(replicas, model, config, host, port, functools.partial(_load_replica, log_format, settings))
        return
    from specdec.serve.promptness import set_aside
    from specdec.serve.server import Server

    llm = model.load(progress=True, **settings)
    server = Server(llm, config, host, port, lambda address: _announce(llm, config, address))
    set_aside()
    server.run()
    if not server.started:
        raise typer.Exit(1)


def _check_address(host: str, port: int) -> None:
    """Raise ConfigError, before a model is loaded, where nobody could listen."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {port}")
    failed = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as listener:
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listener.bind(address)
                return
            except OSError as error:  # one of several, of a family that this machine does not have, say
                failed = error
        raise failed or OSError("it has no address")
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, port {port}: {error.strerror or error}; see --host and --port") from error


def _load_replica(log_format: LogFormat, settings: Mapping[str, Any], model: ModelOptions) -> LLM:
    """In the process that serves it."""
    from specdec.serve.logs import configure

    configure(log_format)
    return model.load(progress=False, **settings)


def _serve_replicas(
    n: int, model: ModelOptions, config: ServeConfig, host: str, port: int, load: Callable[[ModelOptions], LLM]
) -> None:
    from specdec.serve.scale.server import ScaledServer

    if model.threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        model = dataclasses.replace(model, threads=max(1, cores // n))
    server = ScaledServer(
        functools.partial(load, model),
        config,
        n,
        host,
        port,
        lambda address, ready: _announce_replicas(n, model, config, address, ready),
    )
    typer.echo(f"starting {n} replicas, {model.threads} threads each")
    server.run()
    if not server.started:
        raise typer.Exit(1)


def _announce_replicas(n: int, model: ModelOptions, config: ServeConfig, address: str, ready: Ready) -> None:
    typer.echo(f"{ready.model} at {address}/v1 ({ready.precision}), {n} replicas with {model.threads} threads each")
    typer.echo(f"  context {ready.max_len} tokens; speculation: {', '.join(ready.drafters) or 'off'}")
    _announce_addresses(config, address)


def _announce_addresses(config: ServeConfig, address: str) -> None:
    typer.echo(f"  playground {address}/; API keys: {len(config.api_keys) or 'none, open to all'}")
    typer.echo(f"  documentation {address}/docs, metrics {address}/metrics, health {address}/health")


def _announce(llm: LLM, config: ServeConfig, address: str) -> None:
    engine, drafters = llm.engine, [drafter.name for drafter in llm.engine.drafters]
    typer.echo(f"{config.model_name or llm.name} at {address}/v1 ({llm.precision})")
    typer.echo(f"  context {engine.max_len} tokens, {llm.config.max_sequences} sequences at once, {config.max_queue} may wait")
    speculation = ", ".join(filter(None, (*drafters, render.accepted_by(engine.acceptance.facts)))) if drafters else "off"
    typer.echo(f"  speculation: {speculation}")
    if llm.generation_defaults:
        typer.echo(f"  sampling defaults of the model: {render.defaults(llm.generation_defaults)}")
    _announce_addresses(config, address)
