// All topics, in any order. The service sorts: 100,000 topics stay there, a page of them comes here.

import { html, useState } from "../vendor/preact-htm.js";
import { get } from "../api.js";
import { ago, bytes, count, rate } from "../format.js";
import { href, keepInHash, usePoll } from "../store.js";
import { Badge, Loading, Panel, Problem, Table, Tabs } from "../ui.js";

const INTERVAL_MS = 5000;
const PAGE = 100;
const PAGE_MAX = 1000;
const TYPED_MS = 250;

export const COLUMNS = [
  { name: "Topic", sort: "topic", class: "mono", of: (one) => html`<a href=${href("topic", one.topic)}>${one.topic}</a>` },
  { name: "Kind", of: (one) => html`${one.type === "queue" ? html`<${Badge}>queue<//>` : html`<span class="dim">log</span>`}${one.durable ? html` <${Badge}>fsync<//>` : ""}` },
  { name: "Rate", number: true, sort: "rate", of: (one) => rate(one.rate), hint: "records written per second" },
  { name: "Records", number: true, sort: "count", of: (one) => count(one.count) },
  { name: "Size", number: true, sort: "bytes", of: (one) => bytes(one.bytes) },
  { name: "Lag", number: true, sort: "lag", of: (one) => (one.lag === undefined ? html`<span class="dim">–</span>` : count(one.lag)), hint: "of its slowest named cursor; of a queue, its ready jobs" },
  { name: "Written", number: true, sort: "last_write_ts", of: (one) => ago(one.last_write_ts), hint: "when it was written last" },
];

export const useTyped = (first) => {
  const [typed, setTyped] = useState(first);
  const [timer, setTimer] = useState(0);
  const type = (value) => { clearTimeout(timer); setTimer(setTimeout(() => setTyped(value), TYPED_MS)); };
  return [typed, type];
};

export const Topics = ({ query }) => {
  const [sort, setSort] = useState({ by: query.get("sort") || "rate", order: query.get("order") || (query.get("sort") === "topic" ? "asc" : "desc") });
  const [type, setType] = useState(query.get("type") || "");
  const [size, setSize] = useState(PAGE);
  const [text, setText] = useTyped(query.get("find") || "");
  const [result, error] = usePoll(
    (signal) => get("topics", { sort: sort.by, order: sort.order, kind: type, contains: text, page_size: size }, signal), INTERVAL_MS, [sort.by, sort.order, type, text, size]);
  keepInHash("topics", null, { sort: sort.by, order: sort.order, type, find: text });
  const pick = (by) => setSort({ by, order: by === sort.by ? (sort.order === "asc" ? "desc" : "asc") : by === "topic" ? "asc" : "desc" });
  return html`
    <h1 class="unseen">Topics</h1>
    <${Panel} id="all-topics" title="Topics" aside=${result && html`<span class="dim" aria-live="polite">${count(result.topics.length)} of ${count(result.matched)}</span>`}>
      <div class="bar">
        <input type="search" placeholder="Search names  /" aria-label="Search topics by name" value=${text} onInput=${(event) => setText(event.target.value)} />
        <${Tabs} label="Kind" now=${type} onPick=${setType} of=${[["", "All"], ["log", "Logs"], ["queue", "Queues"]]} />
      </div>
      <${Problem} error=${error} />
      ${result ? html`<${Table} label="Topics" columns=${COLUMNS} rows=${result.topics} keyOf=${(one) => one.topic} sort=${sort} onSort=${pick}
          empty=${text || type ? "No topic matches." : "There are no topics yet. The first write makes one."} />
        ${result.matched > result.topics.length && size < PAGE_MAX && html`<div class="more"><button onClick=${() => setSize(PAGE_MAX)}>Show up to ${count(PAGE_MAX)}</button></div>`}
        ${result.matched > PAGE_MAX && size === PAGE_MAX && html`<p class="empty">${count(result.matched - PAGE_MAX)} more: search, or sort by something else.</p>`}`
        : !error && html`<${Loading} />`}
    <//>`;
};
