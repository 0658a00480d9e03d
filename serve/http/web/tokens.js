// An answer as tokens: where each came from, and what else could have stood there.

const popover = document.querySelector("#alternatives");

const MOST_UNDRAWN = 60;

/** Text of an answer and the tokens that spell it, drawn as they come; its thoughts may stand in an element apart. */
export class TokenText {
  constructor() {
    this.text = "";
    this.runs = []; // [first character, element that it and the next stand in]
    this.tokens = []; // not drawn yet
    this.hasTokens = false;
    this.decoder = new TextDecoder();
    this.drawn = 0; // characters
  }

  add(text, entries, element) {
    if (text && this.runs.at(-1)?.[1] !== element) this.runs.push([this.text.length, element]);
    this.text += text;
    this.hasTokens ||= entries.length > 0;
    for (const entry of entries) {
      this.tokens.push({ entry, text: this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) });
    }
    if (this.hasTokens) this.draw();
    if (!this.hasTokens || this.text.length - this.drawn > MOST_UNDRAWN) this.finish();
  }

  /** Draws what tokens spell. Text may lag behind them, and of tags and end tokens there is none. */
  draw(isAll = false) {
    while (this.tokens.length) {
      const { entry, text } = this.tokens[0];
      const left = this.text.slice(this.drawn);
      const spelled = this.drawn === 0 && !left.startsWith(text) ? text.trimStart() : text;
      if (!isAll && left.length < spelled.length && spelled.startsWith(left)) return;
      const shown = commonStart(spelled, left);
      if (shown) this.put(span(entry, shown), shown.length);
      this.tokens.shift();
    }
  }

  /** Draws what no token spells, too, such as the beginning of a stop string that turned out to be none. */
  finish() {
    this.draw(true);
    for (let [, next] = this.here(); this.drawn < this.text.length; [, next] = this.here()) {
      this.put(this.text.slice(this.drawn, next), next - this.drawn);
    }
  }

  put(piece, length) {
    this.here()[0].append(piece);
    this.drawn += length;
  }

  /** The element of the next character, and where the one behind it begins. */
  here() {
    const index = this.runs.findLastIndex(([first]) => first <= this.drawn);
    return [this.runs[index]?.[1], this.runs[index + 1]?.[0] ?? this.text.length];
  }
}

function commonStart(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return one.slice(0, length);
}

function span(entry, text) {
  const element = document.createElement("span");
  element.className = "t";
  if (entry.drafted !== undefined) element.classList.add(entry.drafted ? "drafted" : "own");
  if (entry.top_logprobs.length) element.classList.add("listed");
  element.textContent = text;
  element.entry = entry;
  return element;
}

/** Shows alternatives of the token under the pointer or the finger, within `area`. */
export function showAlternativesIn(area) {
  area.addEventListener("pointerover", (event) => show(event.target.closest(".listed")));
  area.addEventListener("pointerleave", () => show(null));
  area.addEventListener("click", (event) => show(event.target.closest(".listed")));
  area.closest("#scroll").addEventListener("scroll", () => show(null));
  document.addEventListener("keydown", (event) => event.key === "Escape" && show(null));
}

function show(token) {
  document.querySelector(".t.chosen")?.classList.remove("chosen");
  popover.hidden = !token;
  if (!token) return;
  token.classList.add("chosen");
  const { entry } = token;
  const origin = { true: "Drafted, and accepted", false: "The target’s own" }[entry.drafted];
  const title = document.createElement("p");
  title.textContent = origin ?? "Most probable here";
  popover.replaceChildren(title, ...rows(entry));
  place(token.getClientRects()[0]);
}

function rows(entry) {
  const listed = entry.top_logprobs.some((one) => one.token === entry.token) ? [] : [entry];
  return [...entry.top_logprobs, ...listed].map((one) => {
    const [row, bar, name, chance] = ["div", "i", "code", "span"].map((kind) => document.createElement(kind));
    const probability = Math.exp(one.logprob);
    bar.style.width = `${100 * probability}%`;
    name.textContent = visible(one.token);
    chance.textContent = probability < 0.001 ? "< 0.1 %" : `${(100 * probability).toFixed(1)} %`;
    row.classList.toggle("chosen", one.token === entry.token);
    row.append(bar, name, chance);
    return row;
  });
}

const visible = (token) => token.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(nothing)";

function place(box) {
  const { width, height } = popover.getBoundingClientRect();
  const below = box.bottom + 8 + height <= innerHeight;
  popover.style.left = `${Math.max(8, Math.min(box.left - 12, innerWidth - width - 8))}px`;
  popover.style.top = `${below ? box.bottom + 8 : Math.max(8, box.top - height - 8)}px`;
}
