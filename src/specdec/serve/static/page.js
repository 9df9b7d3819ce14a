// The playground: asks the server it came from, with one setting or with two in turn.

import { Answer, firstDifference } from "./answer.js";
import { ApiError, chat, gauge, servedModel } from "./api.js";

const SPEEDUP_GAUGE = "specdec:speedup";
const GAUGE_MS = 1000;
const find = (id) => document.getElementById(id);
const [form, prompt, key, send, stop, compare] = ["ask", "prompt", "key", "send", "stop", "compare"].map(find);

let model = null;
let running = null; // the AbortController of what runs
const sides = [addSide("Setting A"), addSide("Setting B")];

/** A copy of the template: a setting and its answer. */
function addSide(title) {
  const root = find("side").content.cloneNode(true).firstElementChild;
  find("sides").append(root);
  root.querySelector(".answer").setAttribute("aria-label", `Answer of ${title.toLowerCase()}`);
  return { root, title, input: (name) => root.querySelector(`[name="${name}"]`), answer: new Answer(root, []) };
}

async function connect() {
  try {
    model = await servedModel(key.value);
  } catch (error) {
    find("key-field").hidden = error.status !== 401 && !key.value;
    find("served").textContent = error.message;
    if (error.status === 401 && !key.value) key.focus();
    return;
  }
  find("served").textContent = `${model.id}, ${model.precision}, context ${model.max_model_len.toLocaleString("en")}`;
  for (const [at, side] of sides.entries()) {
    const select = side.input("speculation");
    const choices = [["auto", model.drafters.length ? `on: ${model.drafters.join(", ")}` : "on: no drafters"], ["off", "off"]];
    if (model.drafters.length > 1) choices.push(...model.drafters.map((name) => [`drafter ${name}`, `only ${name}`]));
    select.replaceChildren(...choices.map(([value, label]) => new Option(label, value)));
    if (at === 1) select.value = "off";
    side.answer = new Answer(side.root, model.drafters);
  }
}

function layOut() {
  const two = compare.checked;
  find("sides").classList.toggle("two", two);
  sides[1].root.hidden = !two;
  sides[0].root.querySelector("legend").textContent = two ? sides[0].title : "Settings";
  sides[1].root.querySelector("legend").textContent = sides[1].title;
  tell("");
}

/** Say how it stands; a verdict, `same` or `different`, stands out. */
function tell(text, verdict = "") {
  find("status").textContent = text;
  find("status").className = verdict;
}

/** The body of a side's request; null, with the field marked, where something typed is no number. */
function bodyOf(side, drawn) {
  const body = { model: model.id, messages: [{ role: "user", content: prompt.value }], stream: true, stats: true, return_token_ids: true };
  const speculation = side.input("speculation").value;
  body.speculation = speculation.startsWith("drafter ") ? { drafter: speculation.slice(8) } : speculation;
  body.seed = drawn;
  for (const name of ["temperature", "seed", "max_tokens"]) {
    const input = side.input(name);
    if (!input.reportValidity()) return null;
    if (input.value !== "") body[name] = Number(input.value);
  }
  return body;
}

/** A number below 2^53, the largest that JavaScript passes on exactly. */
function draw() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return (high & 0x1fffff) * 2 ** 32 + low;
}

async function ask(pressed) {
  if (running) return;
  if (!model) await connect();
  if (!model) return;
  const asked = compare.checked ? sides : [sides[0]];
  const drawn = draw();
  const bodies = asked.map((side) => bodyOf(side, drawn));
  if (bodies.includes(null)) return;
  // Compared sides read their prompt anew: else the second would find the first one's in the prefix cache.
  if (compare.checked) for (const body of bodies) body.cache_salt = `playground ${draw()}`;

  running = new AbortController();
  const { signal } = running;
  busy(true);
  for (const side of asked) side.answer.clear(pressed);
  try {
    if (asked.length > 1) {
      await askBoth(bodies, signal);
    } else {
      tell("Answering …");
      await askOne(bodies[0], pressed, signal);
      tell("Done.");
    }
  } catch (error) {
    tell(signal.aborted ? "Stopped." : "The answer failed.");
  } finally {
    running = null;
    busy(false);
  }
}

async function askOne(body, pressed, signal) {
  const side = sides[0];
  const timer = setInterval(() => showGauge(side, body), GAUGE_MS);
  try {
    await answer(side, body, pressed, signal, () => {});
  } finally {
    clearInterval(timer);
  }
  await showGauge(side, body);
}

/** One after the other, so that neither slows the other; the speed-up shows as soon as both have a rate. */
async function askBoth(bodies, signal) {
  for (const at of inOrder(bodies)) {
    tell(`${sides[at].title} answers …`);
    await answer(sides[at], bodies[at], performance.now(), signal, () => showSpeedups(bodies));
  }
  judge(...sides.map((side) => side.answer));
}

/** Speculating sides first: drafters may remember finished answers, and a plain side's would help them. */
function inOrder(bodies) {
  return bodies[0].speculation === "off" ? [1, 0] : [0, 1];
}

async function answer(side, body, pressed, signal, shown) {
  side.answer.clear(pressed);
  side.root.querySelector('[data-optional="seed"]').hidden = !(body.temperature > 0);
  side.answer.figure("seed", body.seed);
  side.answer.text.setAttribute("aria-busy", "true");
  try {
    for await (const frame of chat(body, key.value, signal)) {
      if (frame.choices.length) side.answer.take(frame.choices[0]);
      shown();
    }
  } catch (error) {
    if (!signal.aborted) side.answer.fail(error instanceof ApiError ? error : new ApiError(null, { message: `The server cannot be reached: ${error.message}` }));
    throw error;
  } finally {
    side.answer.text.setAttribute("aria-busy", "false");
  }
}

/** Measured: a speculating side against the plain one, or B against A where both speculate or neither does. */
function showSpeedups(bodies) {
  const plain = bodies.findIndex((body) => body.speculation === "off");
  const base = Math.max(0, plain);
  const [over, under] = [sides[1 - base].answer, sides[base].answer];
  const label = plain < 0 ? "against A" : "speed-up";
  over.showSpeedup(over.rate && under.rate ? over.rate / under.rate : null, label);
  under.showSpeedup(under.rate ? 1 : null, label);
}

/** Not measured: what the server estimates over all its requests, where it does. */
async function showGauge(side, body) {
  const value = body.speculation === "off" ? 1 : await gauge(SPEEDUP_GAUGE);
  side.answer.showSpeedup(value, body.speculation === "off" || value === null ? "speed-up" : "speed-up (server's estimate)");
}

function judge(a, b) {
  const at = firstDifference(a, b);
  if (at < 0) {
    tell(`Identical, token by token: ${a.ids.length} tokens.`, "same");
    return;
  }
  tell(`Different from token ${at + 1} on.`, "different");
  a.mark(at);
  b.mark(at);
}

function busy(yes) {
  if (!yes && document.activeElement === stop) prompt.focus();
  stop.hidden = !yes;
  send.setAttribute("aria-disabled", String(yes));
  form.setAttribute("aria-busy", String(yes));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask(event.timeStamp);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask(event.timeStamp);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
compare.addEventListener("change", layOut);
key.addEventListener("change", connect);
layOut();
connect();
