"""The playground in a real browser: what it shows is the API's answer, and nothing that a model writes can become markup.

Every test fails on a request that leaves the server and on an error that the browser reports.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import WORDS  # type: ignore[import-not-found]
from serving import Running, along, copy, joined, one_of, serving, slowed, words_llm

from specdec.llm import LLM

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

N = len(WORDS)
NASTY = [
    "go", "<b>bold</b>", "<img src=x onerror=alert(1)>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", " &amp;", "\n",
    " שלום", " عالم", "<script>alert(2)</script>", "</p></div>", "end",
]  # fmt: skip

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def counting(words: LLM) -> Iterator[Running]:
    """CHAIN that counts, with drafts that are always right, four at a time."""
    with serving(copy(words, 4, along(N))) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: install it (Debian: apt install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'specdec[dev]'")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page of a server. At the end no request may have left it and nothing may have gone wrong in the page."""
    with contextlib.ExitStack() as contexts:

        def opened(server: Running, *, expected: tuple[str, ...] = (), **settings: Any) -> Any:
            context = browser.new_context(**settings)
            contexts.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)
            said: list[str] = []
            left: list[str] = []
            page.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("dialog", lambda dialog: (said.append("a dialog"), dialog.dismiss()))
            page.on("request", lambda request: None if request.url.startswith(server.url + "/") else left.append(request.url))
            contexts.callback(lambda: _clean(said, left, expected))
            page.goto(server.url)
            page.wait_for_function("() => document.getElementById('served').textContent !== 'Asking the server …'")
            return page

        yield opened


def _clean(said: list[str], left: list[str], expected: tuple[str, ...]) -> None:
    assert left == [], "a request left the server"
    assert [text for text in said if not any(part in text for part in expected)] == []


def ask(page: Any, prompt: str, **fields: str) -> None:
    """Fill in the form of the first setting, and press Enter in the prompt."""
    for name, value in fields.items():
        page.locator(f"[name={name}]").first.fill(value)
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def done(page: Any, text: str = "Done.") -> None:
    page.wait_for_function("text => document.getElementById('status').textContent.startsWith(text)", arg=text)


def tokens(page: Any, side: int = 0) -> list[tuple[str, str, str]]:
    """Text, colour and title of each token that is shown."""
    shown: list[tuple[str, str, str]] = (
        page.locator(".answer").nth(side).evaluate("e => [...e.children].map(s => [s.textContent, s.dataset.source, s.title])")
    )
    return [tuple(token) for token in shown]  # type: ignore[misc]


def figure(page: Any, name: str, side: int = 0) -> str:
    text: str = page.locator(f"[data-figure={name}]").nth(side).inner_text()
    return text


def test_tokens_are_shown_with_their_sources_and_speculation_off_gives_the_same(counting: Running, open_page: Open) -> None:
    """Text, sources, counts and tokens per pass are those of the API; without speculation the text is the same, uncoloured."""
    page = open_page(counting)
    body = {"messages": [{"role": "user", "content": WORDS[-1]}], "temperature": 0, "max_tokens": 11, "stats": True}
    answer = counting.ask("/v1/chat/completions", **body)
    choice = one_of(answer)
    ask(page, WORDS[-1], max_tokens="11")
    done(page)
    sources = [source or "model" for source in choice["token_sources"]]
    assert "oracle" in sources
    colours = {"model": "model", "oracle": "0"}
    assert tokens(page) == [(t, colours[s], s) for t, s in zip(choice["token_texts"], sources, strict=True)]
    assert figure(page, "tokens") == "11"
    assert figure(page, "tau") == f"{answer['choices'][0]['stats']['tokens_per_pass']:.2f}"
    assert re.fullmatch(r"\d+ ms", figure(page, "first"))
    legend = page.locator(".sources").first.inner_text()
    assert f"oracle {sources.count('oracle')} (" in legend
    assert f"the model itself {sources.count('model')} (" in legend

    page.locator("[name=speculation]").first.select_option("off")
    ask(page, WORDS[-1])
    done(page)
    assert tokens(page) == [(text, "model", "model") for text in choice["token_texts"]]
    assert figure(page, "tau") == "1.00"


def test_tokens_show_while_they_come_and_escape_stops(words: LLM, open_page: Open) -> None:
    """A stopped answer keeps what it has, leaves the engine at once, and the next one begins anew."""
    with serving(slowed(copy(words, 2, along(N)), 0.2)) as server:
        page = open_page(server)
        ask(page, WORDS[-1], max_tokens="200")
        page.wait_for_selector(".answer span:nth-child(4)")
        assert page.locator(".answer").first.get_attribute("aria-busy") == "true"
        assert float(figure(page, "tau")) >= 1
        page.keyboard.press("Escape")
        done(page, "Stopped.")
        assert server.settled()["specdec:request_success_total{abort}"] == 1
        shown = "".join(text for text, *_ in tokens(page))
        assert "".join(WORDS * 20).startswith(shown)
        assert page.is_hidden("#stop")

        ask(page, WORDS[-1], max_tokens="200")
        page.click("#stop")
        done(page, "Stopped.")
        assert page.evaluate("document.activeElement.id") == "prompt"


def test_two_settings_are_compared_token_by_token(tiny_server: Running, open_page: Open) -> None:
    """The same seed: identical, whatever drafts; other seeds: the first token that differs is marked on both sides."""
    page = open_page(tiny_server, viewport={"width": 1200, "height": 800})
    page.check("#compare")
    for side in (0, 1):
        page.locator("[name=temperature]").nth(side).fill("0.8")
        page.locator("[name=max_tokens]").nth(side).fill("30")
    ask(page, "abcabcabc")
    done(page, "Identical, token by token: 30 tokens.")
    assert "".join(text for text, *_ in tokens(page, 0)) == "".join(text for text, *_ in tokens(page, 1))
    assert figure(page, "seed", 0) == figure(page, "seed", 1)
    assert re.fullmatch(r"[\d.]+×", figure(page, "speedup", 0))
    assert figure(page, "speedup", 1) == "1.00×"
    assert page.locator(".differs").count() == 0

    page.locator("[name=seed]").nth(0).fill("1")
    page.locator("[name=seed]").nth(1).fill("2")
    ids = []
    for seed in (1, 2):
        body = {"messages": [{"role": "user", "content": "abcabcabc"}], "temperature": 0.8, "max_tokens": 30, "seed": seed}
        ids.append(joined(tiny_server.stream("/v1/chat/completions", return_token_ids=True, **body))[0]["token_ids"])
    first = next(i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
    ask(page, "abcabcabc")
    done(page, f"Different from token {first + 1} on.")


def test_what_a_model_writes_stays_text(tmp_path: Any, open_page: Open) -> None:
    """Markup, entities, right-to-left text and a character of four tokens arrive as they are, in the right place."""
    with serving(words_llm(tmp_path, NASTY)) as server:
        page = open_page(server, expected=("TrustedHTML",))
        ask(page, "go", max_tokens=str(len(NASTY) - 1))
        done(page)
        texts = ["😀" if text == "<0x80>" else text for text in NASTY[1:] if text not in ("<0xF0>", "<0x9F>", "<0x98>")]
        assert [text for text, *_ in tokens(page)] == texts
        assert page.locator(".answer").first.evaluate("e => e.textContent") == "".join(texts)
        assert {text: title for text, _, title in tokens(page)}["😀"].count("+") == 3
        assert page.locator(".answer *:not(span), body > img").count() == 0
        assert figure(page, "tokens") == str(len(NASTY) - 1)
        made = page.evaluate("() => { try { document.body.innerHTML += '<b>'; return true } catch { return false } }")
        assert not made, "the policy lets strings become elements"


def test_a_key_is_asked_for_and_kept_in_memory(words: LLM, open_page: Open) -> None:
    """Without the key the page says what the API says; with it, it answers; nothing is stored, and the URL is as before."""
    with serving(copy(words, 4, along(N)), api_keys=("sesame",)) as server:
        page = open_page(server, expected=("status of 401",))
        assert "Authorization: Bearer KEY" in page.inner_text("#served")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("wrong")
        page.keyboard.press("Tab")
        page.wait_for_function("() => document.getElementById('served').textContent.includes('not known')")
        page.fill("#key", "sesame")
        page.press("#key", "Tab")
        page.wait_for_function("() => document.getElementById('served').textContent.includes('context')")
        ask(page, WORDS[-1], max_tokens="3")
        done(page)
        assert "".join(text for text, *_ in tokens(page)) == "".join(WORDS[:3])
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.search]") == [0, 0, "", ""]


def test_errors_are_shown_as_the_api_tells_them(counting: Running, open_page: Open) -> None:
    page = open_page(counting, expected=("status of 400",))
    error = counting.refused("/v1/chat/completions", messages=[{"role": "user", "content": WORDS[-1]}], temperature=-1)
    ask(page, WORDS[-1], temperature="-1")
    done(page, "The answer failed.")
    shown = page.locator(".error[role=alert]").first.inner_text()
    assert error["message"] in shown
    assert "temperature" in shown
    assert "HTTP 400" in shown
    ask(page, WORDS[-1], temperature="0", max_tokens="2")
    done(page)
    assert page.locator(".error[role=alert]").first.is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read(counting: Running, open_page: Open, scheme: str) -> None:
    """No sideways scrolling at 360 pixels, and every text has a contrast of 4.5 to what is behind it."""
    page = open_page(counting, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    page.check("#compare")
    page.locator("[name=max_tokens]").nth(1).fill("12")
    ask(page, WORDS[-1], max_tokens="12")
    page.wait_for_selector("#status.same")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".answer").nth(1).bounding_box()["width"] > 250
    page.evaluate(  # every colour that a source can have
        "document.querySelectorAll('.answer')[0].append(...[...Array(6).keys()].map(i => "
        "{ const s = document.createElement('span'); s.textContent = i; s.dataset.source = i; return s; }))"
    )
    page.wait_for_function("() => document.getAnimations().length === 0")
    low = page.evaluate(_CONTRASTS)
    assert low == [], low
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 200) == (scheme == "dark")


_CONTRASTS = """() => {
  const parse = (c) => { const [r, g, b, a = 1] = c.match(/[\\d.]+/g).map(Number); return { rgb: [r, g, b], a }; };
  const light = (rgb) => rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    const c = parse(getComputedStyle(e).backgroundColor);
    return c.a ? c.rgb : behind(e.parentElement);
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()) || !e.offsetParent) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color).rgb), light(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([e.tagName, e.textContent.slice(0, 20), ratio]);
  }
  return low;
}"""


def test_it_works_by_keyboard_alone(counting: Running, open_page: Open) -> None:
    """Tab reaches every control in the order of the page, each has a name and shows its focus; settings change by keys."""
    page = open_page(counting)
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type(WORDS[-1])
    seen = []
    for _ in range(7):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.className")
        )
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        if seen[-1] == "speculation":
            page.keyboard.press("ArrowDown")
        if seen[-1] == "max_tokens":
            page.keyboard.press("Control+A")
            page.keyboard.type("4")
    assert seen == ["send", "compare", "speculation", "temperature", "seed", "max_tokens", "answer"]
    assert page.locator("[name=speculation]").first.input_value() == "off"
    names = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea, button, [role=region]')].map(e => "
        "e.ariaLabel || [...(e.labels ?? [])].map(l => l.textContent.trim()).join() || e.textContent.trim())"
    )
    assert all(names)
    for _ in range(6):
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    done(page)
    assert "".join(text for text, *_ in tokens(page)) == "".join(WORDS[:4])


def test_the_page_is_packaged_and_open_and_not_in_the_document(words: LLM) -> None:
    """Every file that the page names is served with a strict policy, without a key; the OpenAPI document knows none of it."""
    with serving(copy(words, 4, along(N)), api_keys=("sesame",)) as server:
        page = server.http.get("/", headers={"Authorization": ""})
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "://" not in page.text.replace("http://www.w3.org", "")
        for file in re.findall(r'(?:href|src)="(static/[^"]+)"', page.text):
            found = server.http.get(f"/{file}", headers={"Authorization": ""})
            assert (found.status_code, found.headers["x-content-type-options"]) == (200, "nosniff")
        assert not [path for path in server.http.get("/openapi.json").json()["paths"] if path == "/" or "static" in path]
        assert server.http.get("/static/../page.py").status_code == 404
        assert server.http.head("/").status_code == 200
