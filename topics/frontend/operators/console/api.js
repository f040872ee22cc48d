// Requests to the API (docs/api.md): the key, errors, and one event stream. The key lives in this module and nowhere else.

const BASE = new URL("../../v0/", import.meta.url);
const RETRY_MS = [500, 1000, 2000, 5000];
const TIMEOUT_MS = 15000;
const PACE_MS = 250; // a tail draws four times a second: more frames would cost the service, and show nothing
const HEARTBEAT_MS = 5000; // a stream that is silent for three of these is dead, whatever its connection says

let key = "";

export class ApiError extends Error {
  constructor(status, code, message, detail) {
    super(message);
    Object.assign(this, { status, code, detail: detail || {} });
  }
}

export const setKey = (text) => { key = text; };
export const hasKey = () => key !== "";

// A number that a double cannot hold is shown as it was written.
export class Written {
  constructor(text) { this.text = text; }
  toJSON() { return JSON.rawJSON ? JSON.rawJSON(this.text) : this.text; }
}
const exact = (_, value, context) =>
  typeof value === "number" && context && context.source && /\d{16}/.test(context.source) && String(value) !== context.source
    ? new Written(context.source) : value;
export const parse = (text) => (/\d{16}/.test(text) ? JSON.parse(text, exact) : JSON.parse(text));

const send = async (method, path, { query, body, signal, headers = {} } = {}) => {
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(query || {})) if (value !== "" && value != null) url.searchParams.set(name, value);
  const given = { ...headers };
  if (key) given.Authorization = `Bearer ${key}`;
  if (body !== undefined) given["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(url, {
      method, headers: given, signal, cache: "no-store", credentials: "omit",
      body: body === undefined ? undefined : typeof body === "string" ? body : JSON.stringify(body),
    });
  } catch (error) {
    if (signal && signal.aborted) throw error;
    throw new ApiError(0, "unreachable", "The service does not answer.");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let problem = {};
  try { problem = JSON.parse(text).error || {}; } catch { /* a proxy's own page */ }
  throw new ApiError(answer.status, problem.code || `http_${answer.status}`, problem.message || `The service answered ${answer.status}.`, problem.detail);
};

export const call = async (method, path, options = {}) => {
  const signals = [AbortSignal.timeout(TIMEOUT_MS), ...(options.signal ? [options.signal] : [])];
  try {
    return parse(await (await send(method, path, { ...options, signal: AbortSignal.any(signals) })).text());
  } catch (error) {
    if (error.name === "TimeoutError") throw new ApiError(0, "unreachable", "The service does not answer in time.");
    throw error;
  }
};

export const get = (path, query, signal) => call("GET", path, { query, signal });
export const post = (path, body, signal) => call("POST", path, { body, signal });
export const metrics = (signal) => call("GET", "metrics", { query: { topic_series: false }, headers: { Accept: "application/json" }, signal });
// The address of the service that leads, as this one refuses what it may not do; "" if it does not know it.
export const leaderUrl = (signal) => call("GET", "key", { headers: { "Topics-Leader": "required" }, signal }).then(() => "", (error) => { if (error.code !== "not_leader") throw error; return error.detail.leader || ""; });
export const topicPath = (name, rest = "") => `topics/${encodeURIComponent(name)}${rest}`;

const wait = (ms, signal) => new Promise((done) => {
  const timer = setTimeout(done, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
});

// Follows one topic from `place.start` ({ tail: true } or { from_seq }), and keeps there how far it came, until `signal`
// is aborted. `on` gets (event, data, size); `state` gets
// "live" or "lost". EventSource cannot send the key in a header, so the stream is read by hand.
export const follow = async (topic, place, on, state, signal) => {
  let stream = null, id = null, failures = 0;
  while (!signal.aborted) {
    const silent = new AbortController();
    let timer = 0;
    const heard = () => { clearTimeout(timer); timer = setTimeout(() => silent.abort(), 3 * HEARTBEAT_MS); };
    try {
      if (stream === null) {
        const body = { topics: { [topic]: place.start }, include_tags: true, limit: 1000, pace_ms: PACE_MS, heartbeat_ms: HEARTBEAT_MS };
        const made = await call("POST", "watch", { body, signal });
        [stream, id, place.start] = [made.wid, null, { from_seq: made.topics[topic].from_seq }];
      }
      heard();
      const answer = await send("GET", `watch/${stream}`, { signal: AbortSignal.any([silent.signal, signal]), headers: { Accept: "text/event-stream", ...(id ? { "Last-Event-ID": id } : {}) } });
      state("live");
      failures = 0;
      for await (const event of events(answer.body, heard)) {
        if (event.id) id = event.id;
        if (!event.data) continue;
        const data = parse(event.data);
        if (event.kind === "record") place.start = { from_seq: data.to_seq };
        on(event.kind, data, event.data.length);
        if (event.kind === "topic-deleted") return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 404 && error.code === "not_found") stream = null;
      else if (error.status >= 400 && error.status < 500 && error.status !== 429) { on("refused", error); return; }
    } finally {
      clearTimeout(timer);
    }
    if (signal.aborted) return;
    state("lost");
    await wait(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
  }
};

async function* events(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { kind: "message", data: "", id: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.kind = line.slice(7);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
      }
      yield event;
    }
  }
}
