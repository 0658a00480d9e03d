// What this page asks of the server, and how it reads the answers. Nothing is sent anywhere else.

let key = sessionStorage.getItem("potstill-key") ?? "";

export function useKey(given) {
  key = given.trim();
  sessionStorage.setItem("potstill-key", key);
}

export const usedKey = () => key;

/** An answer that is an error: the server's own sentence, status and code. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = error?.code;
  }
}

export async function ask(path, options = {}) {
  const headers = { ...(options.body ? { "Content-Type": "application/json" } : {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error);
}

/** The objects of a stream of server-sent events; throws Refused for an error among them. */
export async function* events(response) {
  let left = "";
  for await (const text of decoded(response.body)) {
    const lines = (left + text).split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:") || line.includes("[DONE]")) continue;
      const event = JSON.parse(line.slice(5));
      if (event.error) throw new Refused(200, event.error);
      yield event;
    }
  }
}

async function* decoded(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

/** Samples of Prometheus' text format: name → [{labels, value}]. */
export function samples(text) {
  const found = new Map();
  for (const [, name, labels, value] of text.matchAll(/^potstill:(\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    if (!found.has(name)) found.set(name, []);
    const pairs = [...(labels ?? "").matchAll(/(\w+)="([^"]*)"/g)].map(([, label, said]) => [label, said]);
    found.get(name).push({ labels: Object.fromEntries(pairs), value: Number(value) });
  }
  return found;
}
