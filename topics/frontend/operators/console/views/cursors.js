// All named cursors, those that are furthest behind first.

import { html } from "../vendor/preact-htm.js";
import { get } from "../api.js";
import { count, plural } from "../format.js";
import { href, usePoll } from "../store.js";
import { Badge, Loading, Panel, Problem, Table } from "../ui.js";
import { useTyped } from "./topics.js";

const INTERVAL_MS = 5000;

const SHOWN_MAX = 1000;

const load = async (text, signal) => {
  const page = await get("topics", { sort: "lag", kind: "followed", contains: text, page_size: SHOWN_MAX }, signal);
  const rows = page.topics.flatMap(({ topic, head_seq, cursors }) => (cursors || []).map((one) => ({ ...one, topic, head_seq, lag: Math.max(0, head_seq - one.cursor_seq) })));
  return { topics: page.matched, cursors: rows.sort((a, b) => b.lag - a.lag).slice(0, SHOWN_MAX) };
};

const Lag = ({ value, most }) => html`<span class="meter"><span aria-hidden="true"><i style=${{ width: `${most ? Math.max(2, (100 * value) / most) : 0}%` }}></i></span>${count(value)}</span>`;

const columns = (most) => [
  { name: "Cursor", class: "mono", of: (one) => one.cursor },
  { name: "Topic", class: "mono", of: (one) => html`<a href=${href("topic", one.topic)}>${one.topic}</a>` },
  { name: "Lag", of: (one) => (one.lag ? html`<${Lag} value=${one.lag} most=${most} />` : html`<span class="dim">none</span>`), hint: "seqs behind the head" },
  { name: "Position", number: true, of: (one) => count(one.cursor_seq) },
  { name: "After a crash", number: true, of: (one) => count(one.persisted_seq), hint: "where it would go on after a crash" },
  { name: "Head", number: true, of: (one) => count(one.head_seq) },
  { name: "Consistency", of: (one) => (one.consistency === "strictly_at_once" ? html`<${Badge}>strictly at once<//>` : html`<span class="dim">at least once</span>`) },
];

export const Cursors = () => {
  const [text, setText] = useTyped("");
  const [result, error] = usePoll((signal) => load(text, signal), INTERVAL_MS, [text]);
  return html`
    <h1 class="unseen">Cursors</h1>
    <${Panel} id="all-cursors" title="Cursors" aside=${result && html`<span class="dim">${plural(result.cursors.length, "cursor")} of ${plural(result.topics, "topic")}</span>`}>
      <div class="bar"><input type="search" placeholder="Search topics  /" aria-label="Search cursors by the name of their topic" onInput=${(event) => setText(event.target.value)} /></div>
      <${Problem} error=${error} />
      ${result ? html`<${Table} label="Cursors" columns=${columns(Math.max(0, ...result.cursors.map((one) => one.lag)))} rows=${result.cursors} keyOf=${(one) => `${one.topic}/${one.cursor}`}
        empty="There are no named cursors. A reader that wants the service to keep its position makes one." />` : !error && html`<${Loading} />`}
    <//>`;
};
