// One answer on the page: its tokens by where they came from, and its figures. Text enters the document as text nodes only.

const MODEL = "model";

/** The tokens of one answer and what was measured of them. */
export class Answer {
  /**
   * @param {HTMLElement} root the side of the page that shows it
   * @param {string[]} drafters in the order of their colours
   */
  constructor(root, drafters) {
    this.root = root;
    this.drafters = drafters;
    this.text = root.querySelector(".answer");
    this.bar = root.querySelector(".bar");
    this.list = root.querySelector(".sources");
    this.clear();
  }

  /** Begin anew; `pressed` is when it was asked for, on the clock of performance.now(). */
  clear(pressed = performance.now()) {
    this.pressed = pressed;
    this.ids = [];
    this.spans = []; // of each token; several share one where their bytes make one character
    this.counts = new Map([[MODEL, 0], ...this.drafters.map((name) => [name, 0])]);
    this.stats = null;
    this.complete = false;
    this.firstAt = this.lastAt = null;
    this.firstBurst = 0;
    this.waiting = []; // sources of tokens whose character is not whole yet
    this.text.replaceChildren();
    this.fail(null);
    this.figure("speedup", "–");
    this.showSources();
    this.showFigures();
  }

  /** Take a frame's choice. */
  take(choice) {
    const texts = choice.token_texts ?? [];
    if (texts.length) {
      this.lastAt = performance.now();
      if (this.firstAt === null) [this.firstAt, this.firstBurst] = [this.lastAt, texts.length];
    }
    const fragment = document.createDocumentFragment();
    texts.forEach((text, i) => this.token(fragment, text, choice.token_sources[i] ?? MODEL));
    const rest = (choice.delta.content ?? "").slice(texts.join("").length);
    if (rest) this.token(fragment, rest, null);
    this.text.append(fragment);
    this.ids.push(...(choice.token_ids ?? []));
    this.complete ||= choice.finish_reason !== null;
    this.stats = choice.stats ?? this.stats;
    this.showSources();
    this.showFigures();
  }

  token(fragment, text, source) {
    if (source !== null) {
      this.waiting.push(source);
      this.counts.set(source, (this.counts.get(source) ?? 0) + 1);
    }
    if (!text) return;
    const span = document.createElement("span");
    span.textContent = text;
    span.dataset.source = this.colour(source ?? MODEL);
    span.title = this.waiting.join(" + ");
    for (const _ of this.waiting) this.spans.push(span);
    this.waiting = [];
    fragment.append(span);
  }

  colour(source) {
    return source === MODEL ? MODEL : String(Math.max(0, [...this.counts.keys()].indexOf(source) - 1) % 6);
  }

  /** Tokens per pass so far. Each pass adds one token of the model's own; the server's count replaces this at the end. */
  get tau() {
    return this.stats?.tokens_per_pass ?? this.ids.length / Math.max(1, this.counts.get(MODEL));
  }

  /** Tokens per second after the first burst, or null while there is none. */
  get rate() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.ids.length - this.firstBurst) / seconds : null;
  }

  showFigures() {
    this.figure("tokens", this.ids.length || "–");
    this.figure("tau", this.ids.length ? this.tau.toFixed(2) : "–");
    this.figure("rate", this.rate === null ? "–" : this.rate.toFixed(this.rate < 100 ? 1 : 0));
    this.figure("first", this.firstAt === null ? "–" : `${Math.round(this.firstAt - this.pressed)} ms`);
  }

  figure(name, value) {
    this.root.querySelector(`[data-figure="${name}"]`).textContent = value;
  }

  /** Show a speed-up; `label` says against what, or whose figure it is. */
  showSpeedup(value, label) {
    this.figure("speedup", value === null ? "–" : `${value.toFixed(2)}×`);
    this.root.querySelector('[data-label="speedup"]').textContent = label;
  }

  showSources() {
    const total = Math.max(1, this.ids.length);
    const rows = [...this.counts].map(([name, count]) => {
      const row = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.dataset.source = this.colour(name);
      row.append(swatch, name === MODEL ? "the model itself" : name);
      const share = document.createElement("b");
      share.textContent = this.ids.length ? `${count} (${Math.round((100 * count) / total)} %)` : "";
      row.append(" ", share);
      return row;
    });
    this.list.replaceChildren(...rows);
    this.bar.replaceChildren(
      ...[...this.counts].filter(([, count]) => count).map(([name, count]) => {
        const part = document.createElement("i");
        part.dataset.source = this.colour(name);
        part.style.flexGrow = count;
        return part;
      }),
    );
  }

  /** Show an error, or none. */
  fail(error) {
    const place = this.root.querySelector(".error");
    place.hidden = error === null;
    place.replaceChildren();
    if (error === null) return;
    const details = document.createElement("small");
    details.textContent = error.details ?? "";
    place.append(error.message, " ", details);
  }

  /** Mark the token with this index, where it has a text. */
  mark(index) {
    this.spans[index]?.classList.add("differs");
  }
}

/** The index of the first token in which two answers differ; -1 where they are the same. */
export function firstDifference(a, b) {
  const longest = Math.max(a.ids.length, b.ids.length);
  for (let i = 0; i < longest; i++) if (a.ids[i] !== b.ids[i]) return i;
  return -1;
}
