// What changes a topic: a write, and a deletion that first shows what would go.

import { html, useState } from "../vendor/preact-htm.js";
import { call, post, topicPath } from "../api.js";
import { clock, count, plural } from "../format.js";
import { Dialog, Field, Problem, Tabs, oneLine, useAction } from "../ui.js";

const LOOKED_AT_MAX = 5000;
const PAGE = 1000;
const PAGES_MAX = 100; // a page may have no records although more follow: it looks at a thousand seqs, deleted or not
const SHOWN = 8;

export const WriteRecord = ({ name, queue, onClose }) => {
  const [text, setText] = useState('{\n  "hello": "world"\n}');
  let wrong = null;
  try { JSON.parse(text); } catch (error) { wrong = error.message; }
  const [write, busy, error, answer] = useAction((form) => {
    const given = new FormData(form);
    const fields = ["tag", "node", "order_key"].filter((field) => given.get(field)).map((field) => `,${JSON.stringify(field)}:${JSON.stringify(given.get(field))}`);
    const delay = Number(given.get("delay_s")) ? `,"delay_ms":${Math.round(Number(given.get("delay_s")) * 1000)}` : "";
    return call("POST", topicPath(name), { body: `{"records":[{"data":${text}${fields.join("")}${delay}}]}` }); // the text as it was typed
  });
  return html`
    <${Dialog} title="Write to ${name}" onClose=${onClose}>
      <form onSubmit=${(event) => { event.preventDefault(); write(event.target); }}>
        <${Field} label="Data (JSON)"><textarea rows="8" spellcheck="false" autofocus value=${text} onInput=${(event) => setText(event.target.value)} aria-invalid=${wrong !== null}></textarea><//>
        ${wrong && html`<p class="bad">${wrong}</p>`}
        <div class="columns"><${Field} label="Tag"><input name="tag" /><//><${Field} label="Node"><input name="node" /><//>
          ${queue && html`<${Field} label="Order key"><input name="order_key" /><//><${Field} label="Delay, seconds"><input name="delay_s" type="number" min="0" step="any" /><//>`}</div>
        <${Problem} error=${error} what="It was not written" />
        <div class="actions"><span role="status">${answer && `Written as ${count(answer.last_seq)}.`}</span><button type="button" class="quiet" onClick=${onClose}>Close</button><button class="main" disabled=${busy || wrong !== null}>Write</button></div>
      </form>
    <//>`;
};

const matcher = (match) => {
  if (!match) return () => true;
  return match.endsWith("*") ? (tag) => tag !== undefined && tag.startsWith(match.slice(0, -1)) : (tag) => tag === match;
};

// Looks at the oldest records, LOOKED_AT_MAX at most, and counts those that a deletion would take.
const preview = async (name, state, { before_seq, match }) => {
  const fits = matcher(match), last = before_seq ? Math.min(before_seq - 1, state.head_seq) : state.head_seq;
  const shown = [];
  let from_seq = state.earliest_seq - 1, taken = 0, looked = 0, ended = false;
  for (let pages = 0; !ended && looked < LOOKED_AT_MAX && pages < PAGES_MAX; pages += 1) {
    const page = await post(topicPath(name, "/diff"), { from_seq, limit: PAGE, include_tags: true, include_meta: false });
    const within = page.records.filter((record) => record.$seq <= last);
    looked += page.records.length;
    for (const record of within) if (fits(record.$tag)) { taken += 1; if (shown.length < SHOWN) shown.push(record); }
    from_seq = page.next_from_seq;
    ended = page.caught_up || from_seq >= last;
  }
  return { taken, shown, looked, ended, most: taken + (ended ? 0 : Math.max(0, last - from_seq)) };
};

export const DeleteRecords = ({ name, state, onClose }) => {
  const [kind, setKind] = useState("records");
  const [wanted, setWanted] = useState({ before_seq: null, match: "" });
  const [typed, setTyped] = useState("");
  const chosen = wanted.before_seq || wanted.match;
  const [look, looking, lookError, found] = useAction(() => preview(name, state, wanted));
  const [remove, busy, error, answer] = useAction(() => (kind === "topic" ? call("DELETE", topicPath(name)) : post(topicPath(name, "/delete"), {
    ...(wanted.before_seq ? { before_seq: wanted.before_seq } : {}), ...(wanted.match ? { match: wanted.match.endsWith("*") ? ["tag", "Glob", wanted.match] : ["tag", "Eq", wanted.match] } : {}),
  })));
  const [looked, setLooked] = useState(null);
  const isShown = found && looked === wanted;
  const gone = answer && (kind === "topic" ? "The topic is gone." : `${plural(answer.deleted, "record")} ${answer.deleted === 1 ? "is" : "are"} gone.`);
  return html`
    <${Dialog} title="Delete from ${name}" onClose=${onClose}>
      <${Tabs} label="What to delete" now=${kind} onPick=${setKind} of=${[["records", "Records"], ["topic", "The whole topic"]]} />
      ${kind === "records" ? html`
        <form onSubmit=${(event) => { event.preventDefault(); setLooked(wanted); look(); }}>
          <div class="columns">
            <${Field} label="Below seq" hint="of ${count(state.earliest_seq)} – ${count(state.head_seq)}"><input inputmode="numeric" autofocus onInput=${(event) => setWanted({ ...wanted, before_seq: Number(event.target.value.replace(/\D/g, "")) || null })} /><//>
            <${Field} label="With the tag" hint="a star at the end stands for anything"><input onInput=${(event) => setWanted({ ...wanted, match: event.target.value.trim() })} /><//>
          </div>
          <div class="actions"><button disabled=${!chosen || looking}>Show what would go</button></div>
        </form>
        <${Problem} error=${lookError} />
        ${isShown && html`<div class="preview" role="status">
          <p><b>${found.ended ? plural(found.taken, "record") : `${count(found.taken)} to ${count(found.most)} records`}</b> of ${count(state.count)} would go, for good.
            ${!found.ended && html` <span class="dim">The oldest ${count(found.looked)} were looked at.</span>`}</p>
          ${found.shown.length > 0 && html`<table class="records"><caption class="unseen">The first that would go</caption><tbody>${found.shown.map((record) => html`
            <tr key=${record.$seq}><th scope="row" class="number mono">${count(record.$seq)}</th><td class="mono nowrap">${clock(record.$ts)}</td><td class="mono cut">${record.$tag || ""}</td><td class="mono data"><span>${oneLine(record.data, 120)}</span></td></tr>`)}</tbody></table>
            ${found.taken > found.shown.length && html`<p class="dim">… and more</p>`}`}
        </div>`}`
        : html`<p>The topic goes with its ${count(state.count)} records, its cursors and leases, and all routers from and to it.</p>
          <${Field} label="Type its name to allow this"><input class="mono" autocomplete="off" autofocus onInput=${(event) => setTyped(event.target.value)} /><//>`}
      <${Problem} error=${error} what="It was not deleted, or not all of it" />
      <div class="actions"><span role="status">${gone}</span><button class="quiet" onClick=${onClose}>Close</button>
        <button class="danger" disabled=${busy || answer || (kind === "topic" ? typed !== name : !isShown || !found.most)} onClick=${remove}>${kind === "topic" ? "Delete the topic" : "Delete the records"}</button></div>
    <//>`;
};
