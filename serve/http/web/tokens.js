// An answer as tokens: where each came from, and what else could have stood there.

const popover = document.querySelector("#alternatives");

/** Text of an answer and the tokens that spell it, drawn as they come. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.tokens = [];
    this.decoder = new TextDecoder();
    this.spelled = 0; // characters of the text that have their token
    this.drawn = 0; // tokens that have been looked at
  }

  add(text, entries) {
    this.text += text;
    for (const entry of entries) {
      this.tokens.push({ entry, text: this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) });
    }
    if (!this.tokens.length) this.element.append(text);
    else this.draw();
  }

  /** Draws each token whose whole text has arrived: text may lag behind tokens, and an end token has none. */
  draw() {
    while (this.drawn < this.tokens.length) {
      const { entry, text } = this.tokens[this.drawn];
      const left = this.text.slice(this.spelled);
      const shown = left.startsWith(text) ? text : this.spelled === 0 ? text.trimStart() : text;
      if (left.length < shown.length) return;
      if (left.startsWith(shown) && shown) {
        this.element.append(span(entry, shown));
        this.spelled += shown.length;
      }
      this.drawn += 1;
    }
  }

  /** What no token spells, such as the beginning of a stop string that turned out to be none. */
  finish() {
    if (!this.tokens.length || this.spelled === this.text.length) return;
    this.element.append(this.text.slice(this.spelled));
    this.spelled = this.text.length;
  }
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
