// What the server does right now, from /load and /metrics.

import { ask, samples } from "./api.js";

const EVERY_MS = 2000;
const KEPT = 60;
const rates = [];
let before = null;

const put = (id, text) => { document.getElementById(id).textContent = text; };

/** Asks again and again while the page is seen; `failed` hears what went wrong, null when nothing did. */
export async function watch(failed) {
  for (;;) {
    if (!document.hidden) await refresh().then(() => failed(null), failed);
    await new Promise((wake) => setTimeout(wake, EVERY_MS));
  }
}

export async function refresh() {
  const [load, text] = await Promise.all([
    ask("load").then((response) => response.json()),
    ask("metrics").then((response) => response.text()),
  ]);
  const found = samples(text);
  showThroughput(total(found, "generation_tokens_total"));
  showLoad(load);
  showPages(load.kv_cache_usage, Number(found.get("cache_config_info")?.[0]?.labels.num_gpu_blocks ?? 0));
  showDrafts(found);
  put("brief", `${rates.at(-1).toFixed(1)} tokens/s · ${load.num_requests_running} running`);
}

const total = (found, name) => (found.get(name) ?? []).reduce((sum, sample) => sum + sample.value, 0);

function showThroughput(tokens) {
  const now = { at: performance.now(), tokens };
  const rate = before && tokens >= before.tokens ? (1000 * (tokens - before.tokens)) / (now.at - before.at) : 0;
  before = now;
  rates.push(rate);
  rates.splice(0, rates.length - KEPT);
  put("throughput", rate.toFixed(1));
  const most = Math.max(...rates, 1);
  const points = rates.map((one, index) => [(240 * (KEPT - rates.length + index)) / (KEPT - 1), 42 - (38 * one) / most]);
  const line = points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
  document.querySelector("#spark .line").setAttribute("d", `M${line}`);
  document.querySelector("#spark .area").setAttribute("d", `M${points[0][0].toFixed(1)} 44L${line}L240 44Z`);
}

function showLoad(load) {
  put("running", load.num_requests_running);
  put("waiting", load.num_requests_waiting);
  for (const name of ["ttft", "tpot"]) {
    for (const share of ["p50", "p90", "p99"]) put(`${name}-${share}`, duration(load[`${name}_s`]?.[share]));
  }
  const cost = load.cost_per_million_tokens;
  document.getElementById("cost-tile").hidden = cost === null;
  if (cost !== null) put("cost", cost.toLocaleString("en", { maximumSignificantDigits: 3 }));
}

function duration(seconds) {
  if (seconds === undefined) return "–";
  return seconds < 1 ? `${(1000 * seconds).toPrecision(seconds < 0.1 ? 2 : 3)} ms` : `${seconds.toPrecision(3)} s`;
}

function showPages(usage, pages) {
  put("pages", `${Math.round(usage * pages).toLocaleString("en")} of ${pages.toLocaleString("en")}`);
  document.getElementById("pages-bar").style.width = `${100 * usage}%`;
}

function showDrafts(found) {
  const drafts = total(found, "spec_decode_num_drafts_total");
  document.getElementById("drafts").hidden = !drafts;
  if (!drafts) return;
  const proposed = total(found, "spec_decode_num_draft_tokens_total");
  const accepted = total(found, "spec_decode_num_accepted_tokens_total");
  put("accepted", `${((100 * accepted) / proposed).toFixed(0)} % of all`);
  const positions = (found.get("spec_decode_num_accepted_tokens_per_pos_total") ?? [])
    .sort((one, other) => one.labels.position - other.labels.position)
    .map((sample, index) => bar(index + 1, sample.value / drafts));
  document.getElementById("positions").replaceChildren(...positions);
}

function bar(position, share) {
  const [item, column] = [document.createElement("li"), document.createElement("i")];
  column.style.height = `${48 * share}px`;
  item.title = `Position ${position}: accepted in ${(100 * share).toFixed(1)} % of drafts`;
  item.append(`${(100 * share).toFixed(0)}%`, column, String(position));
  return item;
}
