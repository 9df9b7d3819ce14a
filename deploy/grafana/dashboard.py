"""Writes specdec.json beside this file, the dashboard that Grafana imports. A panel is a title, a unit, and its queries.

python deploy/grafana/dashboard.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("specdec.json")
HERE = '{model_name=~"$model_name", instance=~"$instance"}'
WIDTH, HEIGHT = 8, 7
COLUMNS = 24 // WIDTH

Query = tuple[str, str]
"""PromQL and the legend of what it gives."""


def rate(name: str, by: str = "", labels: str = "") -> str:
    """Per second, summed over servers."""
    inside = HERE[:-1] + (f", {labels}" if labels else "") + "}"
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate(specdec:{name}{inside}[$__rate_interval]))"


def ratio(above: str, below: str, by: str = "") -> str:
    return f"{rate(above, by)} / {rate(below, by)}"


def quantiles(name: str, *shares: float) -> list[Query]:
    return [(f"histogram_quantile({share}, {rate(f'{name}_bucket', 'le')})", f"p{round(share * 100)}") for share in shares]


def gauge(name: str, by: str = "", how: str = "sum") -> str:
    return f"{how} by ({by}) (specdec:{name}{HERE})" if by else f"{how}(specdec:{name}{HERE})"


PANELS: list[tuple[str, list[tuple[str, str, str, list[Query]]]]] = [
    (
        "Speculation",
        [
            (
                "Speed-up over speculation off",
                "x",
                "Estimated: what the same tokens would have taken without drafts, over what they took.",
                [
                    (ratio("plain_seconds_total", "engine_seconds_total"), "over the interval"),
                    (gauge("speedup", how="avg"), "last minute of passes"),
                ],
            ),
            (
                "Tokens per pass (τ)",
                "none",
                "Tokens that a pass over the model emits for a sequence; 1 without speculation.",
                [
                    (ratio("generation_tokens_total", "target_passes_total"), "over the interval"),
                    (gauge("tokens_per_pass", how="avg"), "last minute of passes"),
                ],
            ),
            (
                "Acceptance collapsed",
                "none",
                "1 while a drafter is right far less often than it usually is.",
                [(gauge("acceptance_collapsed", "drafter", "max"), "{{drafter}}")],
            ),
            (
                "Drafted tokens that were accepted",
                "percentunit",
                "Of the drafted tokens that were verified.",
                [
                    (
                        ratio(
                            "spec_decode_num_accepted_tokens_per_drafter_total",
                            "spec_decode_num_draft_tokens_per_drafter_total",
                            "drafter",
                        ),
                        "{{drafter}}",
                    )
                ],
            ),
            (
                "Acceptance by position",
                "percentunit",
                "Of the drafts whose earlier tokens were all accepted; 0 is a draft's first token.",
                [
                    (
                        ratio(
                            "spec_decode_num_accepted_tokens_per_pos_total",
                            "spec_decode_num_reached_tokens_per_pos_total",
                            "position",
                        ),
                        "{{position}}",
                    )
                ],
            ),
            (
                "Accepted tokens by drafter",
                "tps",
                "Tokens per second that came from drafts.",
                [(rate("spec_decode_num_accepted_tokens_per_drafter_total", "drafter"), "{{drafter}}")],
            ),
        ],
    ),
    (
        "Load",
        [
            (
                "Tokens",
                "tps",
                "Tokens per second, of answers and of prompts.",
                [
                    (rate("generation_tokens_total"), "emitted"),
                    (rate("prompt_tokens_total"), "prompts"),
                ],
            ),
            (
                "Sequences",
                "short",
                "Those that run and those that wait.",
                [(gauge("num_requests_running"), "running"), (gauge("num_requests_waiting"), "waiting")],
            ),
            (
                "Seconds by phase",
                "percentunit",
                "Share of time that the engine spends; what is left to 100 % is idle.",
                [(rate("engine_seconds_total", "phase"), "{{phase}}")],
            ),
            (
                "Ends",
                "reqps",
                "Sequences that ended, by reason.",
                [(rate("request_success_total", "finished_reason"), "{{finished_reason}}")],
            ),
            (
                "Refused",
                "reqps",
                "HTTP requests that got an error, by status.",
                [(rate("requests_refused_total", "status"), "{{status}}")],
            ),
            ("Engine", "none", "1 while the engine runs.", [(gauge("engine_up", "instance", "min"), "{{instance}}")]),
        ],
    ),
    (
        "Latency",
        [
            (
                "Time to first token",
                "s",
                "From the arrival of a request.",
                quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            ),
            ("Between tokens", "s", "Of each answer.", quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99)),
            (
                "Whole request",
                "s",
                "From arrival to the last token.",
                quantiles("e2e_request_latency_seconds", 0.5, 0.95, 0.99),
            ),
            ("Waiting", "s", "From being queued to the first pass.", quantiles("request_queue_time_seconds", 0.5, 0.95)),
            (
                "Reading the prompt",
                "s",
                "From the first pass to the first token.",
                quantiles("request_prefill_time_seconds", 0.5, 0.95),
            ),
            ("Delivery", "s", "From the end of a pass to the write of its tokens.", quantiles("delivery_seconds", 0.5, 0.99)),
        ],
    ),
    (
        "Memory",
        [
            (
                "Blocks in use",
                "percentunit",
                "Share of the key and value pool held by sequences.",
                [(gauge("kv_cache_usage_perc", how="max"), "in use")],
            ),
            (
                "Blocks by state",
                "short",
                "Cached ones hold prefixes and are free to be taken.",
                [(gauge("kv_cache_blocks", "state"), "{{state}}")],
            ),
            (
                "Prompts found in the prefix cache",
                "percentunit",
                "Share of the tokens of prompts.",
                [(ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), "found")],
            ),
            (
                "Preemptions",
                "short",
                "Sequences per second that had to let go of their blocks.",
                [(rate("num_preemptions_total"), "preemptions")],
            ),
            (
                "Length of prompts and answers",
                "short",
                "Tokens: the median, in the buckets' resolution.",
                [
                    (quantiles("request_prompt_tokens", 0.5)[0][0], "prompts"),
                    (quantiles("request_generation_tokens", 0.5)[0][0], "answers"),
                ],
            ),
            ("Memory of the process", "bytes", "", [('process_resident_memory_bytes{instance=~"$instance"}', "{{instance}}")]),
        ],
    ),
]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(number: int, title: str, unit: str, about: str, queries: list[Query], x: int, y: int) -> dict[str, Any]:
    stacked = title in ("Seconds by phase", "Blocks by state")
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "min": 0,
                "custom": {
                    "drawStyle": "line",
                    "lineWidth": 1,
                    "fillOpacity": 25 if stacked else 5,
                    "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
                },
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "none"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend, "range": True}
            for i, (expr, legend) in enumerate(queries)
        ],
    }


def variable(name: str, query: str, label: str) -> dict[str, Any]:
    """A list that the reader chooses from, all at first."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    """The whole, as Grafana's JSON."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, inside in PANELS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for i, (title, unit, about, queries) in enumerate(inside):
            place = (i % COLUMNS) * WIDTH, y + i // COLUMNS * HEIGHT
            panels.append(panel(len(panels) + 1, title, unit, about, queries, *place))
        y += -(-len(inside) // COLUMNS) * HEIGHT
    return {
        "uid": "specdec",
        "title": "specdec",
        "description": "What a server of specdec does, and what speculation gains.",
        "tags": ["specdec"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
                variable("model_name", "label_values(specdec:engine_up, model_name)", "Model"),
                variable("instance", "label_values(specdec:engine_up, instance)", "Server"),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
