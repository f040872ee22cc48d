// The live tail: one event stream, a buffer of bounded length, drawn at most ten times a second in animation frames.

import { html, useEffect, useReducer, useRef, useState } from "../vendor/preact-htm.js";
import { follow } from "../api.js";
import { count, rate } from "../format.js";
import { useStore } from "../store.js";
import { oneLine } from "../ui.js";
import { RecordHead, RecordRow, useOpen } from "./records.js";

export const KEPT_MAX = 2000;
export const DRAWN_MAX = 100;
const KEPT_BYTES = 32 << 20; // about: of larger records fewer are kept, but never less than are drawn
const DRAW_MS = 100;
const RATE_MS = 1000;

// Receives records and remembers the newest that fit the filters. Drawing looks at it; it knows nothing of drawing.
export class Buffer {
  constructor() { this.kept = []; this.received = 0; this.fitting = 0; this.filters = {}; this.notes = []; this.trouble = null; }

  fits({ tag, node, text }, record) {
    return (!tag || (record.$tag || "").includes(tag)) && (!node || (record.$node || "").includes(node))
      && (!text || oneLine(record.data, Infinity).toLowerCase().includes(text));
  }

  add(records, size) {
    this.received += records.length;
    const any = this.filters.tag || this.filters.node || this.filters.text;
    const fitting = any ? records.filter((record) => this.fits(this.filters, record)) : records;
    this.fitting += fitting.length;
    this.kept.push(...fitting);
    const most = Math.max(DRAWN_MAX, Math.min(KEPT_MAX, Math.floor((KEPT_BYTES * records.length) / size)));
    if (this.kept.length > 2 * most) this.kept = this.kept.slice(-most);
  }

  filter(filters) {
    this.filters = filters;
    this.kept = this.kept.slice(-KEPT_MAX).filter((record) => this.fits(filters, record));
  }

  newest() { return this.kept.slice(-DRAWN_MAX).reverse(); }
}

export const Tail = ({ name }) => {
  const { needsKey } = useStore();
  const buffer = useRef(null);
  buffer.current ||= new Buffer();
  const [link, setLink] = useState("connecting");
  const [paused, setPaused] = useState(false);
  const [frozen, setFrozen] = useState(null);
  const [open, toggle] = useOpen();
  const [, draw] = useReducer((frames) => frames + 1, 0);
  const pace = useRef({ received: 0, at_ms: 0, now: 0 });
  const place = useRef({ start: { tail: true } });
  const wanted = useRef(false), drawn_ms = useRef(0), isPaused = useRef(false);
  isPaused.current = paused;

  useEffect(() => {
    if (needsKey) return undefined; // with another key it goes on where it was
    const stop = new AbortController();
    let frame = 0;
    buffer.current.notes = [];
    const tick = (now_ms) => {
      frame = requestAnimationFrame(tick);
      const { current: one } = pace;
      if (now_ms - one.at_ms >= RATE_MS) {
        const received = buffer.current.received;
        const next = one.at_ms ? ((received - one.received) * 1000) / (now_ms - one.at_ms) : 0;
        if (next !== one.now) wanted.current = true;
        pace.current = { received, at_ms: now_ms, now: next };
      }
      if (!wanted.current || now_ms - drawn_ms.current < DRAW_MS) return;
      wanted.current = false;
      drawn_ms.current = now_ms;
      draw();
    };
    frame = requestAnimationFrame(tick);
    follow(name, place.current, (kind, data, size) => {
      if (kind === "record" || kind === "caught-up") buffer.current.trouble = null;
      if (kind === "record") buffer.current.add(data.records, size);
      else if (kind === "error" && data.code !== "server_shutting_down") buffer.current.trouble = data.error;
      else if (kind === "tombstone") buffer.current.notes = [`${count(data.gap_from)} – ${count(data.gap_to)} were gone before they came (${data.reason})`, ...buffer.current.notes].slice(0, 3);
      else if (kind === "topic-deleted") { buffer.current.notes = ["The topic was deleted."]; setLink("ended"); }
      else if (kind === "refused") { buffer.current.notes = [data.message]; setLink("ended"); }
      wanted.current = true;
    }, setLink, stop.signal);
    return () => { stop.abort(); cancelAnimationFrame(frame); };
  }, [name, needsKey]);

  const pause = () => { setFrozen(paused ? null : buffer.current.newest()); setPaused(!paused); };
  const filter = (field) => (event) => {
    const value = event.target.value.trim();
    buffer.current.filter({ ...buffer.current.filters, [field]: field === "text" ? value.toLowerCase() : value });
    if (paused) setFrozen(buffer.current.newest());
    wanted.current = true;
  };
  const rows = frozen || buffer.current.newest();
  const { received, fitting, notes, trouble, filters } = buffer.current;
  const words = { live: "following", lost: "connection lost, trying again", connecting: "connecting", ended: "ended" };
  return html`
    <div class="bar tail-bar">
      <button data-pause aria-pressed=${paused} onClick=${pause}>${paused ? "Resume" : "Pause"}</button>
      <input type="search" placeholder="Text" aria-label="Only records with this text" onInput=${filter("text")} />
      <input placeholder="Tag" aria-label="Only records with this in their tag" onInput=${filter("tag")} />
      <input placeholder="Node" aria-label="Only records with this in their node" onInput=${filter("node")} />
      <span class="tail-state" data-received=${received} data-fitting=${fitting}><span role="status" class="link ${link === "live" ? "live" : link === "lost" ? "lost" : ""}"><i aria-hidden="true"></i>${words[link]}</span>
        <span class="dim">${rate(pace.current.now)} · ${count(received)} received${filters.tag || filters.node || filters.text ? `, ${count(fitting)} fit` : ""}</span></span>
    </div>
    ${trouble && html`<p class="gap" role="alert">It cannot be read now: ${trouble}</p>`}
    ${notes.map((note) => html`<p class="gap">${note}</p>`)}
    <div class="scroll tail" tabindex="0" role="group" aria-label="Live tail, newest first">
      <table class="records"><caption class="unseen">The newest records of ${name}</caption><${RecordHead} />
        <tbody>${rows.map((record) => html`<${RecordRow} key=${record.$seq} record=${record} open=${open.has(record.$seq)} onToggle=${() => { if (!paused) pause(); toggle(record.$seq); }} />`)}</tbody></table>
      ${rows.length === 0 && html`<p class="empty">${link === "live" ? "Waiting for the next record." : ""}</p>`}
    </div>`;
};
