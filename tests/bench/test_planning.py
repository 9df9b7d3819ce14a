"""Plans from result files: what is read out of them, how near the plan comes to the clock, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import tiny_config
from measurements import report, timing

from specdec.bench import planning
from specdec.bench.memory import Memory
from specdec.bench.result import Report, load
from specdec.config import ConfigError
from specdec.draft import shape
from specdec.models.errors import ModelError
from specdec.plan import Prices
from specdec.runner.cost import Costs

RESULT = Path(__file__).parents[2] / "bench" / "results" / "specdec.json"
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}


def counters(passes: int, emitted: int, drafted: list[int], accepted: list[int], forward: float, **beside: float):
    return {
        "target_passes": passes,
        "quiet_passes": passes - drafted[0] if drafted else passes,
        "emitted": emitted,
        "drafted_by_depth": drafted,
        "reached_by_depth": drafted,
        "accepted_by_depth": accepted,
        "seconds": {"forward": forward, "draft": 0.0, "verify": 0.0, "host": 0.0, **beside},
    }


def measured(**more) -> Report:
    """A prompt whose first token takes a second; then 10 plain steps of 0.9 + 0.1 s, or 5 of which 4 draft two tokens."""
    off = counters(11, 11, [], [], 9.9, host=1.1)
    on = counters(6, 11, [4, 4], [3, 2], 6.0, draft=0.8, host=1.0)
    return report(
        timing("off", "chat-1", 11.0, stats=off),
        timing("on", "chat-1", 8.0, stats=on),
        **{"v": {"1": 1.0, "2": 1.2, "3": 1.5}, **more},
    )


def test_what_a_result_says() -> None:
    """Shares of all passes, and times in units of a plain step."""
    seen = planning.observe(measured())
    assert seen.acceptance == (0.75, 0.5)
    assert (seen.mix.drafted, seen.mix.accepted) == ([4 / 6, 4 / 6], [3 / 6, 2 / 6])
    assert seen.host == pytest.approx(0.1)
    assert seen.ask == pytest.approx(0.8 / 4)
    assert seen.beside == pytest.approx(1.8 / 6)
    (row, total) = planning.check(measured(), planning.costs_of(measured()))
    assert (row.task, total.task) == ("chat", "all")
    assert row.tokens == pytest.approx(11 / 6)
    assert row.expected == pytest.approx(11 / 6 / (0.3 + 0.9 * (1 + 4 / 6 * 0.5)))
    assert row.measured == pytest.approx(10 / 7)


def test_the_plan_is_within_seven_per_cent_of_the_engine() -> None:
    """The committed measurement: over all tasks, from acceptance and v(M) alone, at each temperature."""
    made = load(RESULT)
    checked = [row for row in planning.check(made, planning.costs_of(made)) if row.task == "all"]
    assert [row.temperature for row in checked] == made.temperatures
    for row in checked:
        told = made.row("on", "all", row.temperature)
        assert told is not None
        assert row.tokens == pytest.approx(told.tau, rel=1e-3)
        assert row.measured == told.speedup_decoding
        assert abs(row.error) < 0.07, row


def test_the_best_tree_beats_the_best_chain() -> None:
    """Where first candidates are weak and rows cheap, second ones are worth theirs; the shapes come from draft/shape."""
    accuracy = [[0.4, 0.3, 0.1], [0.5, 0.2]]
    made = planning.make(accuracy, Prices(cost=lambda rows: 1 + 0.02 * rows), budget=8, batches=[1])
    assert made.tree is not None
    assert made.tree.speedup > made.best.speedup
    assert made.tree.tokens == pytest.approx(shape.expected_tokens(made.tree.shape, accuracy))
    assert {1, 2} <= {rank + 1 for rank in made.tree.shape.ranks}
    assert planning.make([[0.4], [0.5]], Prices(), budget=8, batches=[1]).tree is None


def test_the_budget_bounds_chain_and_tree() -> None:
    """No more rows than are allowed, though more would pay."""
    made = planning.make([[0.9, 0.05]] * 12, Prices(), budget=3, batches=[1])
    assert [chain.depth for chain in made.chains] == [0, 1, 2, 3]
    assert made.tree is not None
    assert len(made.tree.shape) == 3


def test_where_drafting_stops_to_pay() -> None:
    """The first number of sequences from which on it never pays; None where rows are free."""
    costs = Costs({1: 1.0, 4: 1.2, 32: 8.0})
    made = planning.make([(0.8,)] * 8, Prices(cost=costs.seconds), budget=8, batches=[1, 2, 200])
    assert made.stops is not None
    assert [bool(row.depth) for row in made.throttle] == [row.batch < made.stops for row in made.throttle]
    assert planning.make([(0.8,)], Prices(), budget=8, batches=[1]).stops is None
    assert planning.make([(0.0,)], Prices(), budget=8, batches=[1]).stops == 1


@pytest.mark.parametrize(("more", "message"), [
    ({"task": "poems"}, "has chat, all at 0"),
    ({"temperature": 0.5}, "has chat, all at 0"),
])  # fmt: skip
def test_what_a_result_does_not_hold(more, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planning.observe(measured(), **more)


def test_results_that_give_no_plan() -> None:
    """Several requests in flight share passes; other programs tell no counters; without v(M) there are no costs."""
    with pytest.raises(ConfigError, match="one request in flight"):
        planning.observe(measured(settings={**measured().settings, "concurrency": 4}))
    bare = measured().runs[1].stats
    assert bare is not None
    lacking = {key: value for key, value in bare.items() if key != "drafted_by_depth"}
    runs = measured().runs[0], timing("on", "chat-1", 8.0, stats=lacking)
    with pytest.raises(ConfigError, match="drafted_by_depth"):
        planning.observe(report(*runs))
    with pytest.raises(ConfigError, match="no v"):
        planning.costs_of(measured(v={}))
    for v in ({"many": 1.0}, {"1": 0.0}, {"1": None}):
        with pytest.raises(ConfigError, match="costs by rows"):
            planning.costs_of(measured(v=v))
    busy = timing("off", "chat-1", 11.0, stats=counters(11, 11, [], [], 1.0, host=50.0))
    with pytest.raises(ConfigError, match="contradict"):
        planning.observe(report(busy, measured().runs[1]))


def test_memory_of_models(tmp_path: Path) -> None:
    """From config.json alone, or its folder: no weights are needed."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    for name in (path, tmp_path):
        kept = Memory.of(str(name), "bf16", None)
        assert (kept.per_token, kept.tokens, kept.unshared) == (131072, 8192, 4)
    facts = Memory.of(str(path), "fp32", 1000).as_dict([1, 3])
    assert facts["bytes"] == {"1": 262_144_000, "3": 786_432_000}
    path.write_text(json.dumps(tiny_config("qwen3")))
    assert Memory.of(str(path), "fp8", 1).per_token == 2 * 2 * 2 * 16
    assert Memory.of(str(path), "int8", 1).per_token == 2 * 2 * 2 * (16 + 2), "a scale for every group"
    assert Memory.of(str(path), "int4", 1).per_token == 2 * 2 * 2 * (8 + 2)
    with pytest.raises(ConfigError, match="kv format"):
        Memory.of(str(path), "nf4", None)
    path.write_text("{}")
    with pytest.raises(ModelError, match="model_type"):
        Memory.of(str(path), "bf16", None)
