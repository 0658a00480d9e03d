// The page: a conversation with the server that sent it, and what that server does meanwhile.

import { Refused, ask, events, usedKey, useKey } from "./api.js";
import { watch } from "./live.js";
import { TokenText, showAlternativesIn } from "./tokens.js";

const ALTERNATIVES = 5;
const NARROW = "(max-width: 860px)";
const at = (id) => document.getElementById(id);
const [text, send, log, scroll, notice, settings] = ["text", "send", "log", "scroll", "notice", "settings"].map(at);
let turns = [];
let running = null; // the AbortController of the answer that is being written

// --- what is asked ---------------------------------------------------------------------------------------------------

function body() {
  const system = at("system").value.trim();
  const listed = at("show").checked ? { logprobs: true, top_logprobs: ALTERNATIVES } : {};
  const seed = at("seed").value === "" ? {} : { seed: Number(at("seed").value) };
  const numbers = Object.fromEntries(["temperature", "top_p", "max_tokens"].map((id) => [id, Number(at(id).value)]));
  return JSON.stringify({
    model: at("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    stream: true,
    stream_options: { include_usage: true },
    ...numbers,
    ...listed,
    ...seed,
  });
}

async function answer() {
  const turn = addTurn("assistant");
  const tokens = new TokenText();
  const facts = { began: performance.now(), first: null, usage: null, end: null, said: "", count: 0 };
  running = new AbortController();
  showRunning(true);
  try {
    const response = await ask("v1/chat/completions", { method: "POST", body: body(), signal: running.signal });
    for await (const event of events(response)) take(event, turn, tokens, facts);
  } catch (error) {
    if (error.name !== "AbortError") fail(turn, error, tokens);
    facts.end = error.name === "AbortError" ? "stopped" : "failed";
  }
  tokens.finish();
  turn.classList.remove("waiting");
  turn.querySelector(".facts").textContent = sentence(facts);
  if (facts.said) turns.push({ role: "assistant", content: facts.said });
  else turns.pop(); // what got no answer is not said again
  running = null;
  showRunning(false);
}

function take(event, turn, tokens, facts) {
  facts.usage = event.usage ?? facts.usage;
  const [choice] = event.choices;
  if (!choice) return;
  const { content, reasoning } = choice.delta;
  const entries = choice.logprobs?.content ?? [];
  if (content || reasoning) facts.first ??= performance.now();
  facts.said += content ?? "";
  facts.count += entries.length;
  const isAtEnd = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
  tokens.add(reasoning ?? content ?? "", entries, reasoning ? thoughtsOf(turn) : turn.querySelector(".text"));
  if (entries.some((entry) => entry.drafted !== undefined)) at("legend").hidden = false;
  if (isAtEnd) scroll.scrollTop = scroll.scrollHeight;
  facts.end = choice.finish_reason ?? facts.end;
}

/** Such as "64 tokens · 53.1 tokens/s · first after 0.21 s · 40 of 44 drafted tokens accepted". */
function sentence({ began, first, usage, end, count: counted }) {
  const seconds = (performance.now() - began) / 1000;
  const count = usage?.completion_tokens ?? counted;
  const { accepted_prediction_tokens: accepted = 0, rejected_prediction_tokens: rejected = 0 } =
    usage?.completion_tokens_details ?? {};
  const parts = count ? [`${count} tokens`, `${(count / seconds).toFixed(1)} tokens/s`] : [];
  if (first !== null) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  if (accepted + rejected) parts.push(`${accepted} of ${accepted + rejected} drafted tokens accepted`);
  if (end === "length") parts.push("cut at the most tokens");
  if (end === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

function fail(turn, error, tokens) {
  if (error instanceof Refused && error.status === 401) wantKey();
  turn.classList.add("failed");
  if (!tokens.text) turn.querySelector(".text").textContent = why(error);
  else say(why(error));
}

const why = (error) => (error instanceof Refused ? error.message : "The server cannot be reached.");

// --- what is shown ---------------------------------------------------------------------------------------------------

function addTurn(role, content = "") {
  const [turn, said, facts] = ["article", "div", "p"].map((kind) => document.createElement(kind));
  turn.className = `turn ${role}${role === "assistant" ? " waiting" : ""}`;
  said.className = "text";
  said.textContent = content;
  facts.className = "facts";
  turn.append(said, ...(role === "assistant" ? [facts] : []));
  at("welcome").hidden = true;
  log.append(turn);
  scroll.scrollTop = scroll.scrollHeight;
  return turn;
}

/** Where an answer's thoughts stand, made when the first comes. */
function thoughtsOf(turn) {
  if (!turn.querySelector(".thoughts")) {
    const [box, title, said] = ["details", "summary", "div"].map((kind) => document.createElement(kind));
    box.className = "thoughts";
    box.open = true;
    title.textContent = "Thoughts";
    box.append(title, said);
    turn.prepend(box);
  }
  return turn.querySelector(".thoughts div");
}

function showRunning(isRunning) {
  send.textContent = isRunning ? "Stop" : "Send";
  at("clear").disabled = isRunning;
}

function say(sentence) {
  notice.textContent = sentence ?? "";
  notice.hidden = !sentence;
}

function wantKey() {
  say("This server wants an API key: give it under Settings.");
  if (!settings.open && !usedKey()) openSettings();
}

function openSettings() {
  at("key").value = usedKey();
  settings.showModal();
}

function fitText() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

// --- the server ------------------------------------------------------------------------------------------------------

/** Until the server names its models: it may be loading, or want a key first. */
async function listModels() {
  for (;;) {
    try {
      const { data } = await (await ask("v1/models")).json();
      const options = data.map(({ id, parent }) => new Option(parent ? `${id} (adapter)` : id, id));
      const chosen = at("model").value;
      at("model").replaceChildren(...options);
      if (data.some(({ id }) => id === chosen)) at("model").value = chosen;
      at("model").disabled = options.length < 2;
      document.title = `${data[0].id} · potstill`;
      say(null);
      return;
    } catch (error) {
      if (error.status === 401) return wantKey();
      say(error.status === 503 ? "The model is being loaded; this goes on by itself." : why(error));
    }
    await new Promise((wake) => setTimeout(wake, 1500));
  }
}

let lost = false;
function heard(error) {
  if (error && error.status !== 401) {
    lost = true;
    say(why(error));
  } else if (lost && !error) {
    lost = false;
    listModels();
  }
}

// --- the reader ------------------------------------------------------------------------------------------------------

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const said = text.value.trim();
  if (!said) return;
  text.value = "";
  fitText();
  turns.push({ role: "user", content: said });
  addTurn("user", said);
  answer();
});
text.addEventListener("input", fitText);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) at("composer").requestSubmit();
});
at("clear").addEventListener("click", () => {
  turns = [];
  log.replaceChildren();
  at("welcome").hidden = false;
  text.focus();
  listModels(); // adapters come and go
});
at("open-settings").addEventListener("click", openSettings);
settings.addEventListener("close", () => {
  if (at("key").value.trim() === usedKey()) return;
  useKey(at("key").value);
  listModels();
});

at("address").textContent = new URL("v1", location.href).href;
at("live").open = !matchMedia(NARROW).matches;
showAlternativesIn(log);
listModels();
watch(heard);
if (!matchMedia(NARROW).matches) text.focus();
