// One topic: what it is, what of it is there, how fast it grows, its records.

import { html, useEffect, useMemo, useState } from "../vendor/preact-htm.js";
import { get, post, topicPath } from "../api.js";
import { Chart, History } from "../charts.js";
import { ago, bytes, count, duration, moment, rate, short } from "../format.js";
import { HIDDEN_TIMES, can, href, keepInHash, refreshNow, usePoll, useStore } from "../store.js";
import { Badge, Figures, Loading, Panel, Problem, Tabs } from "../ui.js";
import { DeleteRecords, WriteRecord } from "./changes.js";
import { Records } from "./records.js";
import { Tail } from "./tail.js";

const INTERVAL_MS = 2000;
const FLOOR_EVERY = 5; // the floor of what was lost is asked for with every fifth poll
const PAST_MIN = [10, 8, 6, 5, 4, 3, 2.5, 2, 1.5, 1, 0.5];
const CONFIG_SHOWN = [
  ["ttl_ms", (value) => (value ? duration(value) : null)], ["cap_records", (value) => (value ? count(value) : null)], ["cap_bytes", (value) => (value ? bytes(value) : null)],
  ["discard", (value) => value], ["durability", (value) => value], ["priority", (value) => (value === null ? null : String(value))],
  ["idempotency_window_ms", (value) => duration(value)], ["dedupe_node", (value) => (value ? "yes" : "no")],
];
const QUEUE_CONFIG = [
  ["lease_ms", (value) => duration(value)], ["max_deliveries", (value) => (value ? count(value) : null)],
  ["dead_letter", (value) => (value ? html`<a class="mono" href=${href("topic", value)}>${value}</a>` : null)],
  ["on_ack", (value) => value], ["leases_durable", (value) => (value ? "yes" : null)], ["claim_jitter_ms", (value) => (value ? duration(value) : null)],
];

// The growth before the page was opened: where the topic was at some moments, found by time.
const past = async (name, state, signal) => {
  const now_ms = Date.now();
  const points = await Promise.all(PAST_MIN.map(async (minutes) => {
    const from_ts = Math.round(now_ms - minutes * 60000);
    const page = await post(topicPath(name, "/diff"), { from_ts, limit: 1, max_batch_bytes: 1, include_meta: false }, signal);
    const first = page.records[0];
    return { at_ms: from_ts, seq: first ? first.$seq - 1 : page.head_seq };
  }));
  points.push({ at_ms: now_ms, seq: state.head_seq });
  return points;
};

const load = async (name, memory, signal) => {
  const state = await get(topicPath(name), { touch: false }, signal);
  const at_ms = Date.now();
  if (memory.epoch !== state.epoch) {
    const points = state.last_write_ts && at_ms - state.last_write_ts < PAST_MIN[0] * 60000 ? await past(name, state, signal) : [];
    Object.assign(memory, { epoch: state.epoch, polls: 0, last: null, history: new History(400, INTERVAL_MS * HIDDEN_TIMES), floor: null });
    points.slice(1).forEach((point, index) => {
      const passed_s = (point.at_ms - points[index].at_ms) / 1000;
      memory.history.push((point.at_ms - passed_s * 500) / 1000, [Math.max(0, point.seq - points[index].seq) / passed_s]);
    });
    memory.rate = memory.history.column(0).at(-1);
  }
  if (memory.polls++ % FLOOR_EVERY === 0) memory.floor = (await get(topicPath(name, "/segments"), { from_seq: state.head_seq }, signal)).evict_floor;
  if (memory.last) {
    memory.rate = Math.max(0, state.head_seq - memory.last.head_seq) / ((at_ms - memory.last.at_ms) / 1000);
    memory.history.add(at_ms, [memory.rate]);
  }
  memory.last = { at_ms, head_seq: state.head_seq };
  return state;
};

// Seqs from 1 to the head: lost to a cap or ttl, deleted, live.
const Floors = ({ state, floor }) => {
  const { earliest_seq: earliest, head_seq: head, count: live } = state;
  const lost = Math.max(0, Math.min((floor || 1) - 1, head)), removed = Math.max(0, earliest - 1 - lost), rest = Math.max(0, head - earliest + 1);
  const parts = [["evicted", lost, 1, lost], ["deleted", removed, lost + 1, lost + removed], ["live", rest, earliest, head]].filter(([, size]) => size > 0);
  const width = (size) => Math.max(1.5, (100 * size) / Math.max(1, head));
  let x = 0;
  const all = parts.reduce((sum, [, size]) => sum + width(size), 0) || 1;
  return html`
    <div class="floors">
      <svg viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label=${parts.map(([name, size, first, last]) => `${name}: ${count(size)} seqs, ${first} to ${last}`).join("; ") || "no seq was given out yet"}>
        ${parts.map(([name, size]) => { const w = (100 * width(size)) / all; x += w; return html`<rect key=${name} class=${name} x=${x - w} y="0" width=${w} height="6" />`; })}
      </svg>
      <dl>${parts.map(([name, size, first, last]) => html`<div key=${name}><dt><i class="swatch ${name}"></i>${name}</dt><dd>${count(first)} – ${count(last)}</dd></div>`)}
        ${rest > live && html`<div><dt>deleted in between</dt><dd>${count(rest - live)}</dd></div>`}
        <div><dt>durable up to</dt><dd>${count(state.durable_seq)}</dd></div></dl>
    </div>`;
};

const Configuration = ({ config }) => html`
  <dl class="config">${[...CONFIG_SHOWN, ...(config.type === "queue" ? QUEUE_CONFIG : [])].map(([name, show]) => html`
    <div key=${name}><dt>${name}</dt><dd>${config[name] === undefined ? "–" : show(config[name]) ?? html`<span class="dim">none</span>`}</dd></div>`)}</dl>`;

export const Topic = ({ name, query, themed }) => {
  useStore();
  const memory = useMemo(() => ({}), [name]);
  const [tab, setTab] = useState(query.get("tab") || "records");
  const [dialog, setDialog] = useState(null);
  const [state, error] = usePoll((signal) => load(name, memory, signal), INTERVAL_MS, [name]);
  const [cursors] = usePoll((signal) => get(topicPath(name, "/cursors"), { page_size: 20 }, signal), 10000, [name]);
  useEffect(() => setTab(query.get("tab") || "records"), [query]);
  const pick = (one) => { setTab(one); keepInHash("topic", name, { tab: one === "tail" ? one : null }); };
  const head = html`<div class="title"><h1 class="mono">${name}</h1>
    ${state && html`<${Badge}>${state.type}<//> ${state.config.durability !== "disk" && html`<${Badge}>${state.config.durability}<//>`}`}
    ${state && html`<div class="actions">
      ${state.type === "queue" && html`<a class="button" href=${href("queue", name)}>Jobs</a>`}
      ${can("write", name) && html`<button onClick=${() => setDialog("write")}>Write…</button>`}
      ${can("delete", name) && html`<button onClick=${() => setDialog("delete")}>Delete…</button>`}
    </div>`}</div>`;
  if (!state) return html`${head}${error ? html`<${Problem} error=${error} what=${error.status === 404 ? "There is no such topic" : error.status === 403 ? "This key may not see it" : undefined} />` : html`<${Loading} />`}`;
  const { config } = state;
  const caps = [config.cap_records ? state.count / config.cap_records : 0, config.cap_bytes ? state.bytes / config.cap_bytes : 0];
  const full = Math.max(...caps);
  return html`
    ${head}
    <${Problem} error=${error} what="This is not up to date" />
    <${Figures} label="State" of=${[
      ["Rate", rate(memory.rate), "records"], ["Head", count(state.head_seq), "last seq"], ["Live records", count(state.count), full > 0 ? `${Math.round(full * 100)} % of the cap` : null],
      ["Size", bytes(state.bytes), state.count ? `${bytes(state.bytes / state.count)} each` : null],
      ["Written", ago(state.last_write_ts), state.last_write_ts ? moment(state.last_write_ts).slice(5, 19) : null], ["Read", ago(state.last_read_ts), null],
      ...(state.queue ? [["Ready", count(state.queue.ready), null], ["Leased", count(state.queue.in_flight), null], ["Dead", count(state.queue.dead_lettered), null]] : []),
    ]} />
    <div class="pair">
      <${Panel} id="growth" title="Growth">
        <${Chart} label="Records/s" show=${short} themed=${themed} times=${memory.history.times} series=${[["written", "--one", memory.history.column(0)]]} />
        <${Floors} state=${state} floor=${memory.floor} />
      <//>
      <${Panel} id="configuration" title="Configuration" aside=${html`<span class="dim mono" title="which topic of this name it is">${state.epoch}</span>`}>
        <${Configuration} config=${config} />
        ${cursors && cursors.cursors.length > 0 && html`<h3>Cursors</h3><dl class="config">${cursors.cursors.map((one) => html`<div key=${one.cursor}><dt class="mono">${one.cursor}</dt><dd>${count(Math.max(0, state.head_seq - one.cursor_seq))} behind</dd></div>`)}</dl>`}
      <//>
    </div>
    <${Panel} id="records" title="Records" aside=${html`<${Tabs} label="Records" now=${tab} onPick=${pick} of=${[["records", "Stored"], ["tail", "Live tail"]]} />`}>
      ${tab === "tail" ? html`<${Tail} name=${name} />` : html`<${Records} name=${name} state=${state} />`}
    <//>
    ${dialog === "write" && html`<${WriteRecord} name=${name} queue=${state.type === "queue"} onClose=${() => { setDialog(null); refreshNow(); }} />`}
    ${dialog === "delete" && html`<${DeleteRecords} name=${name} state=${state} onClose=${() => { setDialog(null); refreshNow(); }} />`}`;
};
