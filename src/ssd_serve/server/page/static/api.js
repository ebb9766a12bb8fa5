// Requests to the server: the key of this tab, errors with the server's text, and streamed answers.

const KEY = "ssd-key";
const BASE = new URL("./", location.href);

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const baseUrl = () => BASE.href.replace(/\/$/, "");
export const hasKey = () => Boolean(sessionStorage.getItem(KEY));
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

const authorized = () => (hasKey() ? { Authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : {});
// With a part of the prefix cache of its own, this tab may see what of a prompt was cached.
const SALT = crypto.getRandomValues(new Uint32Array(4)).join("-");

async function send(path, body, signal) {
  const headers = authorized();
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    const text = body && JSON.stringify(body);
    answer = await fetch(new URL(path, BASE), { method: body ? "POST" : "GET", headers, body: text, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it running?");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) window.dispatchEvent(new Event("key-needed"));
  throw new ServerError(await errorText(answer), answer.status);
}

async function errorText(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || answer.statusText;
  }
}

export const get = async (path, signal) => (await send(path, null, signal)).json();

const COUNTER = /^[\w:]*?(spec_decode_\w+|engine_(?:forward|wait|host)_seconds)_total(?:\{(.*)\})? (\S+)$/gm;

// Counters of the server by name, and by name and depth or source; null where this tab may not read them.
export async function counters() {
  const answer = await fetch(new URL("metrics", BASE), { headers: authorized() });
  if (!answer.ok) return null;
  return Object.fromEntries([...(await answer.text()).matchAll(COUNTER)].map(([, name, labels, value]) => {
    const label = /(?:position|source)="([^"]*)"/.exec(labels)?.[1];
    return [label === undefined ? name : `${name} ${label}`, Number(value)];
  }));
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

// The body of a chat request; parameters that are empty are left out.
export function chatBody(messages, parameters) {
  const body = { messages, stream: true };
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== "" && value !== null && value !== undefined) body[name] = Number(value);
  }
  return body;
}

// Streams an answer into an object, which `changed` gets after each chunk. Times are seconds since the request.
export async function ask(messages, parameters, { mode = "auto", signal, changed = () => {} } = {}) {
  const found = {
    messages, mode, text: "", reasoning: "", ids: [], arrivals: [], trace: [], running: true,
    finish: null, timings: null, metrics: null, progress: null, seconds: 0, error: "", stopped: false,
  };
  const own = { cache_salt: SALT, return_progress: true, return_token_ids: true, speculation: { mode, trace: true } };
  const body = { ...chatBody(messages, parameters), ...own };
  const began = performance.now();
  changed(found);
  try {
    for await (const event of events(await send("v1/chat/completions", body, signal))) {
      take(found, event, (performance.now() - began) / 1000);
      changed(found);
    }
    if (!found.finish) throw new ServerError("The answer broke off: the connection was lost.");
  } catch (error) {
    if (error.name === "AbortError") found.stopped = true;
    else found.error = error.message;
  }
  found.running = false;
  found.seconds ||= (performance.now() - began) / 1000;
  changed(found);
  return found;
}

function take(found, event, at) {
  if (event.error) throw new ServerError(event.error.message);
  const choice = event.choices?.[0];
  if (choice) {
    const text = choice.delta?.content ?? "";
    const ids = choice.token_ids ?? [];
    found.text += text;
    found.reasoning += choice.delta?.reasoning_content ?? "";
    found.ids.push(...ids);
    found.trace.push(...(choice.trace ?? []));
    if (ids.length || text) {
      found.arrivals.push({ at, tokens: found.ids.length, characters: found.text.length });
      found.seconds = at;
    }
    found.finish = choice.finish_reason ?? found.finish;
  }
  found.progress = event.prompt_progress ?? found.progress;
  found.timings = event.timings ?? found.timings;
  found.metrics = event.metrics?.speculative_decoding ?? found.metrics;
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// The same request for other clients.
export const SNIPPETS = {
  curl: (body) => [
    `curl -N ${baseUrl()}/v1/chat/completions \\`,
    ...(hasKey() ? ['  -H "Authorization: Bearer $SSD_API_KEY" \\'] : []),
    "  -H 'Content-Type: application/json' \\",
    `  -d ${shellQuoted(JSON.stringify(body))}`,
  ].join("\n"),
  Python: (body) => [
    "import json, os",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${baseUrl()}/v1`)}, api_key=os.environ.get("SSD_API_KEY", "none"))`,
    `body = json.loads(${JSON.stringify(JSON.stringify(body))})`,
    "for chunk in client.chat.completions.create(**body):",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n"),
  JavaScript: (body) => [
    `const answer = await fetch(${JSON.stringify(`${baseUrl()}/v1/chat/completions`)}, {`,
    '  method: "POST",',
    `  headers: { "Content-Type": "application/json"${hasKey() ? ', Authorization: `Bearer ${process.env.SSD_API_KEY}`' : ""} },`,
    `  body: JSON.stringify(${JSON.stringify(body)}),`,
    "});",
    "for await (const part of answer.body.pipeThrough(new TextDecoderStream())) console.log(part);",
  ].join("\n"),
};
