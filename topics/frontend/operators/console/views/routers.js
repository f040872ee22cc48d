// Routers: a graph of where records go, and the same as a table.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { get } from "../api.js";
import { count, rate } from "../format.js";
import { RouterGraph } from "../graph.js";
import { href, usePoll } from "../store.js";
import { Badge, Empty, Loading, Panel, Problem, Table } from "../ui.js";
import { useTyped } from "./topics.js";

const INTERVAL_MS = 5000;
const ROUTERS_MAX = 1000;

const written = (filter) => (filter == null ? null : Array.isArray(filter) ? filter.at(-1) : filter);

const load = async (memory, signal) => {
  const page = await get("routers", { page_size: ROUTERS_MAX }, signal);
  const at_ms = Date.now(), passed_s = memory.at_ms ? (at_ms - memory.at_ms) / 1000 : 0;
  const edges = page.routers.map((one) => {
    const before = memory.forwarded && memory.forwarded.get(one.router);
    const speed = before === undefined || !passed_s ? null : Math.max(0, one.forwarded_total - before) / passed_s;
    return { ...one, filter: written(one.filter), rate: speed, busy: speed > 0 };
  });
  Object.assign(memory, { at_ms, forwarded: new Map(page.routers.map((one) => [one.router, one.forwarded_total])) });
  return { edges, more: Boolean(page.next_cursor) };
};

const topic = (name) => html`<a href=${href("topic", name)}>${name}</a>`;
const COLUMNS = [
  { name: "Router", class: "mono", of: (one) => one.router }, { name: "From", class: "mono", of: (one) => topic(one.source) }, { name: "To", class: "mono", of: (one) => topic(one.dest) },
  { name: "Filter", class: "mono", of: (one) => one.filter || html`<span class="dim">all</span>` },
  { name: "Rate", number: true, of: (one) => (one.rate === null ? "–" : rate(one.rate)), hint: "copies per second" }, { name: "Copies", number: true, of: (one) => count(one.forwarded_total) },
  { name: "Guarantee", of: (one) => (one.guarantee === "exactly_once" ? html`<${Badge}>exactly once<//>` : html`<span class="dim">at least once</span>`) },
];

export const Routers = () => {
  const memory = useMemo(() => ({}), []);
  const [picked, setPicked] = useState(null);
  const [text, setText] = useTyped("");
  const [result, error] = usePoll((signal) => load(memory, signal), INTERVAL_MS, []);
  if (!result) return html`<h1 class="unseen">Routers</h1>${error ? html`<${Problem} error=${error} />` : html`<${Loading} />`}`;
  const { edges, more } = result;
  const fits = (one) => [one.router, one.source, one.dest].some((name) => name.includes(text));
  const found = text ? new Set(edges.filter(fits).flatMap((one) => [one.source, one.dest])) : null;
  const rows = edges.filter((one) => (!text || fits(one)) && (!picked || one.source === picked || one.dest === picked));
  const pick = (name) => setPicked(name === picked ? null : name);
  return html`
    <h1 class="unseen">Routers</h1>
    <${Problem} error=${error} what="This is not up to date" />
    <${Panel} id="router-graph" title="Routers" aside=${html`<span class="dim">${more ? `the first ${count(edges.length)}` : count(edges.length)}</span>`}>
      <div class="bar"><input type="search" placeholder="Search routers and topics  /" aria-label="Search routers and topics by name" onInput=${(event) => setText(event.target.value)} />
        ${picked && html`<span>Around <b class="mono">${picked}</b></span><a class="button" href=${href("topic", picked)}>Open it</a><button onClick=${() => setPicked(null)}>Show all</button>`}</div>
      ${edges.length ? html`<${RouterGraph} edges=${edges} picked=${picked} onPick=${pick} found=${found} />` : html`<${Empty}>There are no routers. One copies what comes into a topic to another one.<//>`}
    <//>
    ${edges.length > 0 && html`<${Panel} id="router-table" title=${picked ? `From and to ${picked}` : "All routers"}><${Table} label="Routers" columns=${COLUMNS} rows=${rows} keyOf=${(one) => one.router} /><//>`}`;
};
