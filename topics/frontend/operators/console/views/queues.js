// Queues: how much waits, who holds what until when, and what went to the dead letters.

import { html, useMemo, useState } from "../vendor/preact-htm.js";
import { get, post, topicPath } from "../api.js";
import { Chart, History } from "../charts.js";
import { ago, count, duration, moment, rate, short } from "../format.js";
import { HIDDEN_TIMES, can, href, refreshNow, usePoll, useStore } from "../store.js";
import { Badge, Field, Figures, Loading, Panel, Problem, Table, Tabs, useAction } from "../ui.js";
import { RecordRow, useOpen } from "./records.js";
import { useTyped } from "./topics.js";

const LIST_MS = 5000;
const INTERVAL_MS = 2000;
const PEEKED = 100;
const HOLDERS_PEEKED = 1000;
const STATES = [["leased", "Leased"], ["waiting", "Waiting"], ["scheduled", "Scheduled"], ["behind", "Behind"], ["dead", "Dying"]];
const MEANS = {
  leased: "A worker has these until their deadline.", waiting: "A claim would get these now.", scheduled: "Not before their time.",
  behind: "Another job with the same order key comes first.", dead: "Being carried to the dead letters, or back.",
};

const rest = ({ count: all, queue }) => Math.max(0, all - queue.ready - queue.in_flight - queue.scheduled);

const COLUMNS = [
  { name: "Queue", sort: "topic", class: "mono", of: (one) => html`<a href=${href("queue", one.topic)}>${one.topic}</a>` },
  { name: "Ready", number: true, sort: "lag", of: (one) => html`<b>${count(one.queue.ready)}</b>`, hint: "what a claim would get now" },
  { name: "Leased", number: true, of: (one) => count(one.queue.in_flight) },
  { name: "Scheduled", number: true, of: (one) => count(one.queue.scheduled), hint: "not before their time" },
  { name: "Dead", number: true, of: (one) => (one.queue.dead_lettered ? html`<${Badge} tone="bad">${count(one.queue.dead_lettered)}<//>` : "0"), hint: "went to the dead letters so far" },
  { name: "In", number: true, sort: "rate", of: (one) => rate(one.rate) },
  { name: "Written", number: true, sort: "last_write_ts", of: (one) => ago(one.last_write_ts) },
];

export const Queues = () => {
  const [sort, setSort] = useState({ by: "lag", order: "desc" });
  const [text, setText] = useTyped("");
  const [result, error] = usePoll((signal) => get("topics", { sort: sort.by, order: sort.order, kind: "queue", contains: text, page_size: 200 }, signal), LIST_MS, [sort.by, sort.order, text]);
  const pick = (by) => setSort({ by, order: by === sort.by ? (sort.order === "asc" ? "desc" : "asc") : by === "topic" ? "asc" : "desc" });
  return html`
    <h1 class="unseen">Queues</h1>
    <${Panel} id="all-queues" title="Queues" aside=${result && html`<span class="dim">${count(result.topics.length)} of ${count(result.matched)}</span>`}>
      <div class="bar"><input type="search" placeholder="Search names  /" aria-label="Search queues by name" onInput=${(event) => setText(event.target.value)} /></div>
      <${Problem} error=${error} />
      ${result ? html`<${Table} label="Queues" columns=${COLUMNS} rows=${result.topics.filter((one) => one.queue)} keyOf=${(one) => one.topic} sort=${sort} onSort=${pick} empty="There are no queues: a topic of type queue is one." />` : !error && html`<${Loading} />`}
    <//>`;
};

const load = async (name, memory, signal) => {
  const state = await get(topicPath(name), { touch: false }, signal);
  if (state.queue) memory.history.add(Date.now(), [state.queue.ready, state.queue.in_flight, state.queue.scheduled, state.queue.dead_lettered]);
  return state;
};

const holders = (jobs) => {
  const byNode = new Map();
  for (const job of jobs) {
    const one = byNode.get(job.node) || { node: job.node, jobs: 0, first: Infinity, last: 0 };
    byNode.set(job.node, { node: job.node, jobs: one.jobs + 1, first: Math.min(one.first, job.deadline), last: Math.max(one.last, job.deadline) });
  }
  return [...byNode.values()].sort((a, b) => b.jobs - a.jobs);
};

const until = (timestamp_ms) => html`<span title=${moment(timestamp_ms)}>${timestamp_ms > Date.now() ? `in ${duration(timestamp_ms - Date.now())}` : "now"}</span>`;

const HOLDER_COLUMNS = [
  { name: "Node", class: "mono", of: (one) => one.node }, { name: "Jobs", number: true, of: (one) => count(one.jobs) },
  { name: "First deadline", number: true, of: (one) => until(one.first) }, { name: "Last deadline", number: true, of: (one) => until(one.last) },
];

const Jobs = ({ name }) => {
  const [state, setState] = useState("leased");
  const [from, setFrom] = useState(0);
  const [open, toggle] = useOpen();
  const [page, error] = usePoll((signal) => post(topicPath(name, "/peek"), { state, from_seq: from, max: state === "leased" && !from ? HOLDERS_PEEKED : PEEKED }, signal), LIST_MS, [name, state, from]);
  const jobs = page ? page.jobs.slice(0, PEEKED) : [];
  const extra = (job) => [`${job.deliveries}×`, job.node ? html`<span class="mono">${job.node}</span>` : "", job.deadline ? until(job.deadline) : job.deliver_at ? until(job.deliver_at) : "", html`<span class="mono">${job.order_key || ""}</span>`];
  return html`
    ${state === "leased" && page && !from && page.jobs.length > 0 && html`<${Panel} id="holders" title="Who holds jobs" aside=${page.next_from_seq ? html`<span class="dim">of the first ${count(page.jobs.length)} leased jobs</span>` : ""}>
      <${Table} label="Who holds jobs" columns=${HOLDER_COLUMNS} rows=${holders(page.jobs)} keyOf=${(one) => one.node} /><//>`}
    <${Panel} id="jobs" title="Jobs" aside=${html`<span class="dim">${MEANS[state]}</span>`}>
      <div class="bar"><${Tabs} label="State" now=${state} of=${STATES} onPick=${(value) => { setState(value); setFrom(0); }} />
        <div class="group"><button disabled=${!from} onClick=${() => setFrom(0)}>First</button><button disabled=${!page || (!page.next_from_seq && page.jobs.length <= PEEKED)} onClick=${() => setFrom(jobs.length ? jobs.at(-1).$seq : page.next_from_seq)}>Next →</button></div></div>
      <${Problem} error=${error} />
      ${page ? html`<div class="scroll" tabindex="0" role="group" aria-label="Jobs"><table class="records"><caption class="unseen">Jobs that are ${state}</caption>
        <thead><tr><th scope="col" class="number">Seq</th><th scope="col">Written</th><th scope="col">Delivered</th><th scope="col">Node</th><th scope="col">${state === "scheduled" ? "Due" : "Until"}</th><th scope="col">Order key</th><th scope="col">Data</th></tr></thead>
        <tbody>${jobs.map((job) => html`<${RecordRow} key=${job.$seq} record=${job} span="7" open=${open.has(job.$seq)} onToggle=${() => toggle(job.$seq)} extra=${extra(job)} />`)}</tbody></table>
        ${jobs.length === 0 && html`<p class="empty">No job is ${state === "dead" ? "on its way to the dead letters" : state} ${page.next_from_seq ? "among those that were looked at." : "now."}</p>`}</div>` : !error && html`<${Loading} />`}
    <//>`;
};

const Redrive = ({ name, from }) => {
  const [dead, deadError] = usePoll((signal) => get(topicPath(from), { touch: false }, signal), LIST_MS, [from]);
  const [most, setMost] = useState("100");
  const [total, setTotal] = useState(0);
  const [redrive, busy, error, answer] = useAction(async (from_seq) => {
    const done = await post(topicPath(name, "/redrive"), { from, max: Math.min(1000, Number(most) || 100), from_seq });
    setTotal((before) => before + done.redriven);
    refreshNow();
    return done;
  });
  return html`
    <${Panel} id="dead" title="Dead letters" aside=${html`<a class="mono" href=${href("topic", from)}>${from}</a>`}>
      <div class="bar plain">
        <span>${deadError ? (deadError.status === 404 ? "Nothing went there yet." : deadError.message) : dead ? `${count(dead.count)} records, the newest ${ago(dead.last_write_ts)}.` : "…"}</span>
        ${can("admin", name) && can("admin", from) && dead && dead.count > 0 && html`
          <${Field} label="Bring back at most"><input type="number" min="1" max="1000" value=${most} onInput=${(event) => setMost(event.target.value)} /><//>
          <button disabled=${busy} onClick=${() => redrive(0)}>Redrive</button>
          ${answer && answer.next_from_seq && html`<button disabled=${busy} onClick=${() => redrive(answer.next_from_seq)}>Go on</button>`}`}
        <span role="status" class="good">${answer && `${count(total)} jobs are back.`}</span>
      </div>
      <${Problem} error=${error} what="Not all were brought back" />
    <//>`;
};

export const Queue = ({ name, themed }) => {
  useStore();
  const memory = useMemo(() => ({ history: new History(400, INTERVAL_MS * HIDDEN_TIMES) }), [name]);
  const [state, error] = usePoll((signal) => load(name, memory, signal), INTERVAL_MS, [name]);
  const head = html`<div class="title"><h1 class="mono">${name}</h1><${Badge}>queue<//><div class="actions"><a class="button" href=${href("topic", name)}>Records and configuration</a></div></div>`;
  if (!state) return html`${head}${error ? html`<${Problem} error=${error} />` : html`<${Loading} />`}`;
  if (!state.queue) return html`${head}<${Problem} error=${{ message: "It is a log: it has records, and no jobs." }} what="This is no queue" />`;
  const { history } = memory, { config } = state;
  return html`
    ${head}
    <${Problem} error=${error} what="This is not up to date" />
    <${Figures} label="Jobs" of=${[
      ["Ready", count(state.queue.ready), "a claim gets these"], ["Leased", count(state.queue.in_flight), `${duration(config.lease_ms)} each`],
      ["Scheduled", count(state.queue.scheduled), "not before their time"], ["Dead", count(state.queue.dead_lettered), config.max_deliveries ? `after ${config.max_deliveries} ${config.max_deliveries === 1 ? "delivery" : "deliveries"}` : "no limit of deliveries"],
      ["Jobs", count(state.count), `${count(rest(state))} ${config.on_ack === "keep" ? "behind others, or done" : "behind others"}`], ["Written", ago(state.last_write_ts), null],
    ]} />
    <div class="charts"><${Chart} label="Depth" show=${short} themed=${themed} times=${history.times} series=${[["ready", "--one", history.column(0)], ["leased", "--two", history.column(1)], ["scheduled", "--three", history.column(2)], ["dead", "--bad", history.column(3)]]} /></div>
    ${config.dead_letter && html`<${Redrive} name=${name} from=${config.dead_letter} />`}
    <${Jobs} name=${name} />`;
};
