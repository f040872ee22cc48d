// The whole service on one page: warnings first, then figures, charts, processes and shards.

import { html, useMemo } from "../vendor/preact-htm.js";
import { get, leaderUrl, metrics } from "../api.js";
import { Chart, History } from "../charts.js";
import { ago, bytes, count, duration, exitReason, ms, percent, plural, quantile, rate, short } from "../format.js";
import { HIDDEN_TIMES, usePoll } from "../store.js";
import { Badge, Figures, Loading, Panel, Problem, Table } from "../ui.js";

const INTERVAL_MS = 3000;
const BEHIND_MS = 10_000; // while another view is open
const APART_MS = 1000; // looks that are closer say little about rates
const RECENT_MS = 15 * 60 * 1000;
const LAG_WARNED_S = 120;
const ARCHIVE_WARNED_S = 60;
const PRESSURE_WARNED = 0.7;

// Of this tab, over all views. What it adds are means since the look before, so a line is true however far these are apart.
export const history = new History(600, BEHIND_MS * HIDDEN_TIMES);
let before = null;

const series = (found, name) => found[`topics_${name}`];
const increase = (now, old, name, index) => {
  if (!old) return null;
  const value = (of) => (index === undefined ? series(of, name) : series(of, name)[index]);
  const passed_s = (series(now, "uptime_ms") - series(old, "uptime_ms")) / 1000;
  return passed_s > 0 ? Math.max(0, value(now) - value(old)) / passed_s : null;
};

const load = async (signal) => {
  const [found, ready] = await Promise.all([metrics(signal), get("ready", {}, signal).catch((error) => { if (error.code !== "not_ready") throw error; return error; })]);
  const leader = found.topics_archive_taken_over ? await leaderUrl(signal) : "";
  const at_ms = Date.now();
  const old = before && before.found.topics_uptime_ms <= found.topics_uptime_ms ? before.found : null;
  const figures = {
    written: increase(found, old, "records_written_total"), delivered: increase(found, old, "records_delivered_total"),
    requests: increase(found, old, "requests_total"), throttled: increase(found, old, "throttled_total"),
    walBytes: increase(found, old, "wal_bytes_written_total"),
    sync50: quantile(found.topics_wal_fsync_latency_us, old && old.topics_wal_fsync_latency_us, 0.5),
    sync99: quantile(found.topics_wal_fsync_latency_us, old && old.topics_wal_fsync_latency_us, 0.99),
    write50: quantile(found.topics_request_duration_seconds.append, old && old.topics_request_duration_seconds.append, 0.5),
    write99: quantile(found.topics_request_duration_seconds.append, old && old.topics_request_duration_seconds.append, 0.99),
    failed: old ? found.topics_error_responses_total["5xx"] - old.topics_error_responses_total["5xx"] : 0,
  };
  const scaled = (value, by) => (value === null ? null : value * by);
  if (!before || at_ms - before.at_ms >= APART_MS) {
    history.add(at_ms, [figures.written, figures.delivered, scaled(figures.sync50, 1e-3), scaled(figures.sync99, 1e-3), scaled(figures.write50, 1e3), scaled(figures.write99, 1e3), found.topics_pressure]);
    before = { found, at_ms };
  }
  return { found, ready, leader, old, figures, at_ms };
};

const ALONE = ["compactor", "archiver", "follower"];

const processes = (found) => Object.entries(found.topics_process_up).flatMap(([role, of]) => Object.keys(of).map((index) => {
  const value = (name) => ((found[`topics_process_${name}`] || {})[role] || {})[index];
  return {
    role, index, name: ALONE.includes(role) ? role : `${role} ${index}`, up: value("up") === 1, restarts: value("restarts_total"),
    exit: value("last_exit_code"), since_ms: value("since_timestamp_seconds") * 1000, pressure: value("pressure"), busy: value("busy_ratio"),
  };
}));

// Each warning: [tone, what is wrong, what it means or what to do].
const warnings = ({ found, ready, leader, figures, at_ms }, all) => {
  const list = [];
  const add = (tone, what, means) => list.push([tone, what, means]);
  if (ready.code === "not_ready") add("bad", `Logs are being replayed: ${percent(found.topics_recovery_progress)}`, "Requests for data wait or are refused until every shard has read its log.");
  for (const shard of ready.read_only_shards || []) add("bad", `Shard ${shard} cannot write its log`, "Its topics can be read; writes are refused. Look at the disk and the log of the service.");
  for (const shard of ready.hanging_shards || []) add("bad", `Shard ${shard} hangs`, "It has had no heartbeat for 5 s. Its topics can be read; writes wait. Perhaps its disk hangs.");
  for (const one of all) {
    if (!one.up) add("bad", `${one.name} is not running`, `${one.exit || one.restarts ? `It ended with ${exitReason(one.exit)} ${ago(one.since_ms, at_ms)}. ` : ""}The supervisor starts it again.`);
    else if (one.restarts && at_ms - one.since_ms < RECENT_MS) add("warn", `${one.name} was restarted ${ago(one.since_ms, at_ms)}`, `Its life before ended with ${exitReason(one.exit)}; ${count(one.restarts)} restart${one.restarts === 1 ? "" : "s"} since the service started.`);
  }
  if (found.topics_pressure > PRESSURE_WARNED) add("warn", `Pressure is ${percent(found.topics_pressure)}`, "The service is asked for more than it can do: writers are throttled, low priorities wait.");
  if (figures.throttled > 0) add("warn", `${rate(figures.throttled)} writes are throttled`, "The ring of a shard is full. Clients repeat these by themselves.");
  if (figures.failed > 0) add("warn", `${count(figures.failed)} requests failed with 5xx in the last seconds`, "The log of the service says why.");
  if (found.topics_archive_taken_over) add("bad", "Another service took over from this one", `This one only reads. Send clients to ${leader || "the other one; the log says where it is"}.`);
  if (found.topics_archive_promotion_seconds) add("warn", `This copy is to take over since ${duration(found.topics_archive_promotion_seconds * 1000)}, and does not lead yet`, "The follower's log lines say what it waits for.");
  if (found.topics_archive_takeover_blocked) add("bad", "This copy cannot take over", "An object that it needs in the archive is damaged. The follower's log lines name it.");
  const behind = found.topics_archive_lag_seconds > ARCHIVE_WARNED_S;
  if (behind && found.topics_process_up.follower) add("warn", `This copy is ${duration(found.topics_archive_lag_seconds * 1000)} behind its leader`, "It cannot reach the archive, or the leader cannot. The follower's log lines say why.");
  else if (behind) add("warn", `The archive lacks the last ${duration(found.topics_archive_lag_seconds * 1000)}`, "They would be lost with this machine. The archiver's log lines say why; logs are kept meanwhile.");
  if (found.topics_archive_holes_total) add("warn", `The archive has ${count(found.topics_archive_holes_total)} holes`, "Logs were removed before they were there: moments in between cannot be restored.");
  if (found.topics_compactor_lag_seconds > LAG_WARNED_S) add("warn", `The newest snapshot is ${duration(found.topics_compactor_lag_seconds * 1000)} old`, "The compactor is behind: logs grow, and a restart takes longer.");
  if (found.topics_compactor_failures_total) add("warn", `The compactor failed ${count(found.topics_compactor_failures_total)} times`, "It repeats what failed. The log of the service names the files.");
  if (found.topics_compactor_segments_unexplained) add("warn", `${count(found.topics_compactor_segments_unexplained)} segments belong to no topic`, "They are kept, and use room on the disk.");
  if (found.topics_deferring) add("warn", "Topics of negative priority wait", "Routers copy less at a time, until the pressure falls.");
  if (found.topics_router_oversize_total) add("note", `${count(found.topics_router_oversize_total)} copies were larger than their dest may hold`, "Routers left them out; each is a gap in the dest.");
  return list;
};

const Meter = ({ value }) => html`<span class="meter ${value > PRESSURE_WARNED ? "warn" : ""}"><span aria-hidden="true"><i style=${{ width: percent(Math.min(1, value || 0)).replace(" ", "") }}></i></span>${percent(value)}</span>`;

const PROCESS_COLUMNS = (at_ms) => [
  { name: "Process", of: (one) => one.name },
  { name: "State", of: (one) => html`<${Badge} tone=${one.up ? "good" : "bad"}>${one.up ? "running" : "down"}<//>` },
  { name: "Since", of: (one) => ago(one.since_ms, at_ms) },
  { name: "Busy", of: (one) => (one.busy === undefined ? "–" : html`<${Meter} value=${one.busy} />`), hint: "share of the time that it computes or waits for the disk" },
  { name: "Pressure", of: (one) => (one.pressure === undefined ? "–" : html`<${Meter} value=${one.pressure} />`) },
  { name: "Restarts", number: true, of: (one) => count(one.restarts) },
  { name: "Why", of: (one) => (one.restarts || !one.up ? exitReason(one.exit) : "–"), hint: "how its life before ended" },
];

const SHARD_COLUMNS = ({ found, old }) => {
  const of = (name) => (shard) => found[`topics_${name}`][shard];
  const grown = (name) => (shard) => increase(found, old, name, shard);
  const sync = (shard, part) => {
    const value = quantile(found.topics_shard_wal_fsync_seconds[shard], old && old.topics_shard_wal_fsync_seconds[shard], part);
    return value === null ? null : value * 1000;
  };
  return [
    { name: "Shard", of: (shard) => `shard ${shard}` },
    { name: "Topics", number: true, of: (shard) => count(of("shard_topics")(shard)) },
    { name: "Records", number: true, of: (shard) => short(of("shard_records_live")(shard)) },
    { name: "Stored", number: true, of: (shard) => bytes(of("shard_bytes_live")(shard)) },
    { name: "Log", number: true, of: (shard) => { const value = grown("shard_wal_bytes_written_total")(shard); return value === null ? "–" : `${bytes(value)}/s`; } },
    { name: "Groups", number: true, of: (shard) => rate(grown("shard_wal_batches_total")(shard)), hint: "commits, each with one write to the log" },
    { name: "Sync p50", number: true, of: (shard) => ms(sync(shard, 0.5)) },
    { name: "p99", number: true, of: (shard) => ms(sync(shard, 0.99)) },
    { name: "Unsynced", number: true, of: (shard) => bytes(of("shard_wal_unsynced_bytes")(shard)) },
    ...(found.topics_compactor_lag_bytes ? [ // a follower has no compactor
      { name: "Compactor lag", number: true, of: (shard) => bytes(of("compactor_lag_bytes")(shard)), hint: "bytes of its log in no snapshot" },
      { name: "Brake", number: true, of: (shard) => percent(of("shard_brake_ratio")(shard)), hint: "share of full braking of writers while the compactor is behind" },
    ] : []),
  ];
};

const FRONTEND_COLUMNS = ({ found, old }) => {
  const of = (name) => (index) => found[`topics_frontend_${name}`][index];
  return [
    { name: "Frontend", of: (index) => `frontend ${index}` },
    { name: "Requests", number: true, of: (index) => rate(increase(found, old, "frontend_requests_total", index)) },
    { name: "Connections", number: true, of: (index) => count(of("connections")(index)) },
    { name: "Event streams", number: true, of: (index) => count(of("sse_connections")(index)) },
    { name: "WebSockets", number: true, of: (index) => count(of("ws_connections")(index)) },
    { name: "Workers", number: true, of: (index) => count(of("work_streams")(index)) },
    { name: "Long polls", number: true, of: (index) => count(of("long_polls")(index)) },
    { name: "Loop lag", number: true, of: (index) => ms(found.topics_event_loop_lag_seconds[index] * 1000), hint: "how late its event loop was" },
    { name: "Delivery wait", number: true, of: (index) => ms(found.topics_scheduler_wait_seconds[index] * 1000) },
  ];
};

// Goes on with the history while another view is open.
export const Behind = () => { usePoll(load, BEHIND_MS, []); return null; };

export const Overview = ({ themed }) => {
  const [result, error] = usePoll(load, INTERVAL_MS, []);
  const all = useMemo(() => (result ? processes(result.found) : []), [result]);
  if (!result) return error ? html`<${Problem} error=${error} />` : html`<${Loading} />`;
  const { found, figures, at_ms } = result;
  const wrong = warnings(result, all);
  const plot = (label, show, ...of) => html`<${Chart} label=${label} show=${show} themed=${themed} times=${history.times} series=${of.map(([name, variable, at]) => [name, variable, history.column(at)])} />`;
  return html`
    <h1 class="unseen">Overview</h1>
    <${Problem} error=${error} what="This is not up to date" />
    <p class="unseen" role="status">${wrong.length ? plural(wrong.length, "warning") : "All is well"}</p>
    <section class="warnings" aria-label="Warnings">
      ${wrong.length ? html`<ul>${wrong.map(([tone, what, means]) => html`<li key=${what} class=${tone}><b>${what}</b><span>${means}</span></li>`)}</ul>`
        : html`<p class="fine"><b>All is well.</b> Every process runs, nothing waits. Up ${duration(found.topics_uptime_ms)} · version ${Object.keys(found.topics_build_info)[0]}.</p>`}
    </section>
    <${Figures} label="Totals" of=${[
      ["Written", rate(figures.written), "records"], ["Delivered", rate(figures.delivered), "records"], ["Requests", rate(figures.requests), plural(found.topics_sse_connections, "stream")],
      ["Write p99", ms(figures.write99 === null ? null : figures.write99 * 1000), `p50 ${ms(figures.write50 === null ? null : figures.write50 * 1000)}`],
      ["Sync p99", ms(figures.sync99 === null ? null : figures.sync99 / 1000), figures.sync50 === null ? "no write waits" : `p50 ${ms(figures.sync50 / 1000)}`],
      ["Pressure", percent(found.topics_pressure), null, found.topics_pressure > PRESSURE_WARNED ? "warn" : ""],
      ["Topics", count(found.topics_topics), plural(found.topics_queue_topics, "queue")], ["Live records", short(found.topics_records_live), bytes(found.topics_bytes_live)],
      ["Leased jobs", count(found.topics_queue_leases_in_flight), null], ["Router lag", count(found.topics_router_lag_records), plural(found.topics_routers, "router")],
    ]} />
    <div class="charts">
      ${plot("Records/s", short, ["written", "--one", 0], ["delivered", "--two", 1])}
      ${plot("Write latency", ms, ["p50", "--one", 4], ["p99", "--three", 5])}
      ${plot("Sync latency", ms, ["p50", "--one", 2], ["p99", "--three", 3])}
      ${plot("Pressure", percent, ["service", "--three", 6])}
    </div>
    <${Panel} id="shards" title="Shards"><${Table} label="Shards" columns=${SHARD_COLUMNS(result)} rows=${Object.keys(found.topics_shard_topics)} keyOf=${(one) => one} /><//>
    <${Panel} id="frontends" title="Frontends"><${Table} label="Frontends" columns=${FRONTEND_COLUMNS(result)} rows=${Object.keys(found.topics_frontend_connections)} keyOf=${(one) => one} /><//>
    <${Panel} id="processes" title="Processes"><${Table} label="Processes" columns=${PROCESS_COLUMNS(at_ms)} rows=${all} keyOf=${(one) => one.name} rowClass=${(one) => (one.up ? "" : "bad")} /><//>`;
};
