// The stored records of a topic, a page at a time; a jump to a seq or to a time.

import { html, useState } from "../vendor/preact-htm.js";
import { post, topicPath } from "../api.js";
import { clock, count, moment } from "../format.js";
import { usePoll } from "../store.js";
import { Badge, Field, Json, Loading, Problem, oneLine } from "../ui.js";

const PAGE = 50;
const SIZES = [PAGE, 10, 1]; // fewer where so many are larger than an answer may be

const REASONS = {
  cap: "evicted by a cap", ttl: "expired", mixed: "evicted or expired", restart: "lost with a restart", lost_tail: "lost with the power", restored: "not in the backup",
  source_trim: "lost before a router could copy it", recreated: "of a former topic of this name", from_seq_too_old: "no longer there",
};
export const Gap = ({ of }) => html`<p class="gap"><b>${count(of.gap_from)} – ${count(of.gap_to)}</b> ${REASONS[of.reason] || of.reason}</p>`;

// Of each record once: a tail draws the same ones again and again, and they may be large.
const lines = new WeakMap();
const lineOf = (record) => { if (!lines.has(record)) lines.set(record, oneLine(record.data)); return lines.get(record); };

export const RecordRow = ({ record, open, onToggle, extra, span }) => html`
  <tr class=${open ? "open" : ""}>
    <th scope="row" class="number mono"><button class="fold" aria-expanded=${open} aria-label="Record ${record.$seq}" onClick=${onToggle}>${count(record.$seq)}</button></th>
    <td class="mono nowrap" title=${moment(record.$ts)}>${clock(record.$ts)}</td>
    ${extra ? extra.map((value) => html`<td class="nowrap">${value}</td>`) : html`<td class="mono cut">${record.$tag || ""}</td><td class="mono cut">${record.$node || ""}</td>`}
    <td class="mono data" onClick=${onToggle}><span>${lineOf(record)}</span></td>
  </tr>
  ${open && html`<tr class="unfolded"><td colspan=${span || 5}><div class="fold-body">
    <p class="dim">${moment(record.$ts)}${record.$tag ? html` · tag <b class="mono">${record.$tag}</b>` : ""}${record.$node ? html` · node <b class="mono">${record.$node}</b>` : ""}</p>
    <${Json} value=${record.data} />
    ${record.meta && html`<h4>meta</h4><${Json} value=${record.meta} />`}
  </div></td></tr>`}`;

export const useOpen = () => {
  const [open, setOpen] = useState(new Set());
  const toggle = (seq) => setOpen((before) => { const next = new Set(before); if (!next.delete(seq)) next.add(seq); return next; });
  return [open, toggle];
};

const HEAD = html`<thead><tr><th scope="col" class="number">Seq</th><th scope="col">Time</th><th scope="col">Tag</th><th scope="col">Node</th><th scope="col">Data</th></tr></thead>`;
export const RecordHead = () => HEAD;

// A page behind `from_seq` or `from_ts`, or the one that ends with `to_seq`, with the seq that it begins with.
const load = async (name, { to_seq, ...from }, { earliest, live }, signal) => {
  const look = async (behind, limit, last = Infinity) => {
    const page = await post(topicPath(name, "/diff"), { ...behind, limit, max_batch_bytes: 1 << 19, include_tags: true }, signal);
    const records = page.records.filter((record) => record.$seq <= last), reached = page.next_from_seq;
    return { ...page, records, first: records.length ? records[0].$seq : (behind.from_seq ?? reached) + 1, next_from_seq: Math.min(reached, last),
      caught_up: page.caught_up && page.head_seq <= last };
  };
  if (to_seq === undefined) return look(from, PAGE);
  let page = null;
  for (const size of live <= PAGE ? [Infinity, ...SIZES] : SIZES) {
    page = await look({ from_seq: Math.max(earliest - 1, to_seq - size, 0) }, Math.min(size, PAGE), to_seq);
    if (page.next_from_seq === to_seq) break;
  }
  return page;
};

export const Records = ({ name, state: { head_seq: head, earliest_seq: earliest, count: live } }) => {
  const [at, setAt] = useState(null); // null: the newest; { from_seq }, { to_seq } or { from_ts }
  const [open, toggle] = useOpen();
  const where = at || { to_seq: head };
  // A page that is looked at stays; only the newest one moves on with the topic, until somebody opens a record of it.
  const [page, error] = usePoll((signal) => load(name, where, { earliest, live }, signal), 0, [name, JSON.stringify(where)]);
  const records = page ? [...page.records].reverse() : [];
  const first = page ? page.first : 0;
  const unfold = (seq) => { if (at === null) setAt({ to_seq: page.next_from_seq }); toggle(seq); };
  const jump = (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    const seq = String(given.get("seq")).replace(/\D/g, ""), time = given.get("time");
    if (seq) setAt({ from_seq: Math.max(0, Number(seq) - 1) });
    else if (time) setAt({ from_ts: new Date(time).getTime() });
  };
  return html`
    <form class="bar" onSubmit=${jump}>
      <div class="group">
        <button type="button" onClick=${() => setAt({ from_seq: 0 })} disabled=${first <= earliest}>Oldest</button>
        <button type="button" onClick=${() => setAt({ to_seq: first - 1 })} disabled=${first <= earliest}>← Older</button>
        <button type="button" onClick=${() => setAt(page.caught_up ? null : { from_seq: page.next_from_seq })} disabled=${!page || (at === null)}>Newer →</button>
        <button type="button" aria-pressed=${at === null} onClick=${() => setAt(null)}>Newest</button>
      </div>
      <${Field} label="Seq"><input name="seq" inputmode="numeric" size="10" placeholder=${String(earliest)} /><//>
      <${Field} label="Time"><input name="time" type="datetime-local" step="1" /><//>
      <button>Jump</button>
    </form>
    <${Problem} error=${error} />
    ${page && page.tombstone && html`<${Gap} of=${page.tombstone} />`}
    ${page ? html`<div class="scroll" tabindex="0" role="group" aria-label="Records">
      <table class="records"><caption class="unseen">Records of ${name}, newest first</caption><${RecordHead} />
        <tbody>${records.map((record) => html`<${RecordRow} key=${record.$seq} record=${record} open=${open.has(record.$seq)} onToggle=${() => unfold(record.$seq)} />`)}</tbody></table>
      ${records.length === 0 && html`<p class="empty">${head === 0 ? "Nothing was written yet." : "None of these seqs is there."}</p>`}
    </div>` : !error && html`<${Loading} />`}`;
};
