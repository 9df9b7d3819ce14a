"""The decoder computes what transformers computes, for every family and setting, in one pass, in pieces, and while it grows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoints import ARCHITECTURES, chain, path_law, tiny
from forward import attention_of, batch_of, greedy, logits_of
from scalings import SCALINGS

from specdec import kernels
from specdec.config import ConfigError
from specdec.models.load import load_model
from specdec.models.source import resolve

CPU = torch.device("cpu")
SHORT = list(b"tick tok")
LONG = list((b"It was the best of times, it was the worst of times, " * 3)[:150])
SLIDING = {
    "mistral": {"sliding_window": 8},
    "qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
}
NO_WINDOW = {"mistral": {"sliding_window": None}}


def load(folder: Path, precision="fp32"):
    return load_model(resolve(str(folder)), precision, kernels.select(CPU), CPU)


def reference(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def reference_logits(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def check_parity(folder: Path, prompts=(SHORT, LONG)) -> None:
    ours, theirs = load(folder), reference(folder)
    for prompt in prompts:
        torch.testing.assert_close(logits_of(ours, prompt), reference_logits(theirs, prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family(tmp_path, family, tied):
    """Same logits at every position, with an output matrix of its own or the embedding's."""
    check_parity(tiny(tmp_path, family, tie_word_embeddings=tied, **NO_WINDOW.get(family, {})))


@pytest.mark.parametrize("family", SLIDING)
def test_sliding_window(tmp_path, family):
    """A window hides the same keys, in the layers that have one."""
    check_parity(tiny(tmp_path, family, **SLIDING[family]))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_bias(tmp_path, family):
    """Biases of attention, and of llama's feed-forward, are added."""
    check_parity(tiny(tmp_path, family, attention_bias=True, **({"mlp_bias": True} if family == "llama" else {})))


def test_heads_wider_than_their_share(tmp_path):
    """qwen3's query size is not the hidden size."""
    check_parity(tiny(tmp_path, "qwen3", head_dim=32))


@pytest.mark.parametrize("context", [256, 64])
@pytest.mark.parametrize("name", SCALINGS)
def test_every_rope_scaling(tmp_path, name, context):
    """Prompts within the original context and past it, under every scaling.

    transformers scales a prompt by its own length, and does so afresh only when the model is: a new one for each prompt.
    """
    folder = tiny(tmp_path, rope_scaling=SCALINGS[name], max_position_embeddings=context)
    for prompt in (SHORT, LONG):
        check_parity(folder, prompts=(prompt,))


@pytest.mark.parametrize("name", ["default", "dynamic", "longrope", "yarn"])
def test_growing_past_the_original_context(tmp_path, name):
    """Token by token with a cache, as transformers generates: keys keep the angles of the length at which they were stored."""
    folder = tiny(tmp_path, rope_scaling=SCALINGS[name], max_position_embeddings=40 if name == "dynamic" else 256)
    prompt = LONG[:24]
    tokens, rows = greedy(load(folder), prompt, 40)
    with torch.no_grad():
        out = reference(folder).generate(
            torch.tensor([prompt]),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert tokens == out.sequences[0, len(prompt) :].tolist()
    torch.testing.assert_close(rows, torch.cat(out.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "q8", "q4"])
def test_a_row_does_not_depend_on_its_company(tmp_path, precision):
    """The same logits, bit for bit, from one pass over the prompt, from pieces of it, and from single rows."""
    model = load(tiny(tmp_path, "qwen3"), precision)
    whole = logits_of(model, LONG[:40])
    for sizes in ((1,) * 40, (7, 16, 17), (39, 1)):
        cache = attention_of(model)
        pieces = []
        for stop, size in zip(itertools.accumulate(sizes), sizes, strict=True):
            logits, _ = model.forward(batch_of(LONG[stop - size : stop], stop - size, 40), cache)
            pieces.append(logits)
        assert torch.equal(torch.cat(pieces), whole)


def test_only_wanted_rows(tmp_path):
    """Logits of the rows asked for, the same as when all are."""
    model = load(tiny(tmp_path))
    whole = logits_of(model, SHORT)
    logits, taps = model.forward(batch_of(SHORT, wanted=[2, 6]), attention_of(model), taps=(0, 1))
    assert torch.equal(logits, whole[[2, 6]])
    assert {layer: tuple(tap.shape) for layer, tap in taps.items()} == {0: (len(SHORT), 64), 1: (len(SHORT), 64)}


def test_a_pass_that_wants_nothing_still_stores_its_keys(tmp_path):
    """The first part of a long prompt: no logits, but every layer's keys, so that the rest comes out the same."""
    model = load(tiny(tmp_path))
    cache = attention_of(model)
    logits, taps = model.forward(batch_of(SHORT[:5], 0, 8, wanted=[]), cache, taps=(0, 1))
    assert (tuple(logits.shape), tuple(taps[0].shape), tuple(taps[1].shape)) == ((0, 320), (5, 64), (5, 64))
    rest, _ = model.forward(batch_of(SHORT[5:], 5, 8), cache)
    assert torch.equal(rest, logits_of(model, SHORT)[5:])


@pytest.mark.parametrize("fused", [True, False])
def test_taps_hold_every_row_whichever_are_wanted(tmp_path, fused):
    """Drafters learn from prompt rows too, whose logits nobody wants; the logits stay those of the wanted rows."""
    model = load(tiny(tmp_path))
    model._fused = model._fused if fused else None
    whole, all_taps = model.forward(batch_of(SHORT), attention_of(model), taps=(0, 1))
    for wanted in ([], [2, 6]):
        logits, taps = model.forward(batch_of(SHORT, wanted=wanted), attention_of(model), taps=(0, 1))
        assert torch.equal(logits, whole[wanted])
        assert all(torch.equal(taps[layer], all_taps[layer]) for layer in (0, 1))


def test_taps_are_the_hidden_states_of_transformers(tmp_path):
    """A tap of layer i is that layer's output, before the final norm."""
    folder = tiny(tmp_path)
    model = load(folder)
    _, taps = model.forward(batch_of(SHORT), attention_of(model), taps=(0,))
    with torch.no_grad():
        states = reference(folder)(torch.tensor([SHORT]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps[0], states[1][0], rtol=0, atol=1e-4)


def test_unknown_tap(tmp_path):
    """A layer that the model does not have is an error."""
    model = load(tiny(tmp_path))
    with pytest.raises(ValueError, match=r"taps \[2\]"):
        model.forward(batch_of(SHORT), attention_of(model), taps=(2,))


@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-4), ("bf16", 0.06)])
def test_chain_has_the_law_it_was_given(tmp_path, precision, error):
    """The rig of the other tests: log-probabilities after each token are those of the table, whatever came before."""
    law = torch.tensor(
        [[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0], [0.0, 0.6, 0.0, 0.4]], dtype=torch.float64
    )
    model = load(chain(tmp_path, law, [" a", " b", " c", " d"]), precision)
    tokens = [0, 1, 2, 3, 3, 2, 1, 0]
    found = logits_of(model, tokens).double().log_softmax(-1)
    expected = law[tokens].log()
    torch.testing.assert_close(found[expected.isfinite()], expected[expected.isfinite()], rtol=0, atol=error)
    assert found[~expected.isfinite()].max() < -25


def test_chain_follows_a_path(tmp_path):
    """A scripted text comes out token by token."""
    pieces = [" zero", " one", " two", " three", " four"]
    model = load(chain(tmp_path, path_law([2, 0, 4, 1], 5), pieces))
    assert greedy(model, [2], 4)[0] == [0, 4, 1, 2]


def test_precisions_differ_as_expected(tmp_path):
    """Each coarser precision is close to fp32 and none is fp32 by mistake; the cache is bfloat16 except under fp32."""
    folder = tiny(tmp_path)
    exact = logits_of(load(folder), LONG[:60])
    errors = {}
    for precision in ("bf16", "q8", "q4"):
        model = load(folder, precision)
        errors[precision] = float((logits_of(model, LONG[:60]) - exact).square().mean().sqrt())
        assert model.kv_dtype is torch.bfloat16
    assert load(folder).kv_dtype is torch.float32
    assert 1e-4 < errors["bf16"] < errors["q8"] < errors["q4"] < 1.5
    assert torch.equal(logits_of(load(folder, "auto"), SHORT), logits_of(load(folder, "q8"), SHORT))


@pytest.mark.parametrize("precision", ["q3", "Q8", "fp16"])
def test_an_unknown_precision_is_not_another_one(tmp_path: Path, precision: str) -> None:
    """A name that nobody knows would fall through to float32, slow and mislabelled: it is refused instead."""
    device = torch.device("cpu")
    with pytest.raises(ConfigError, match="precision must be one of"):
        load_model(resolve(str(tiny(tmp_path))), precision, kernels.select(device), device)
