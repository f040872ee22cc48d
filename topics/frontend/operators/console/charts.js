// Charts by uPlot: time to the right, in the colours of the theme, with a sentence for who does not see them.

import { html, useEffect, useRef } from "./vendor/preact-htm.js";
import "./locale.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 132;
const SPAN_MIN_S = 60; // a chart that has just begun shows a minute, not one point that fills it

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// `series`: [[name, colour variable, values]]; `times` in seconds; `show(value)` writes a value.
export const Chart = ({ label, times, series, show, height = HEIGHT, themed }) => {
  const own = useRef(null), chart = useRef(null);
  const data = [times, ...series.map(([, , values]) => values)];
  const latest = series.map(([name, , values]) => `${name} ${show(values.at(-1))}`).join(", ");

  useEffect(() => {
    const host = own.current;
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: host.clientWidth || 300, height, legend: { show: false }, padding: [10, 22, 0, 0],
      cursor: { y: false, points: { size: 6 } },
      scales: { x: { time: true, range: (of) => { const all = of.data[0], last = all.at(-1) ?? 0; return [Math.min(all[0] ?? 0, last - SPAN_MIN_S), last]; } }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.1 : 1] } },
      axes: [
        { ...axis, grid: { show: false }, space: 70, size: 24, values: (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toTimeString().slice(0, 8)) },
        { ...axis, size: 62, space: 34, values: (_, ticks) => ticks.map(show) },
      ],
      series: [{}, ...series.map(([name, variable], at) => ({
        label: name, stroke: colour(variable), width: 1.5, points: { show: false }, spanGaps: false,
        fill: at === 0 && series.length < 3 ? `${colour(variable)}1f` : undefined,
      }))],
      hooks: { setCursor: [(of) => {
        const at = of.cursor.idx;
        const cells = host.parentElement.querySelectorAll("[data-value]");
        series.forEach(([, , values], index) => { cells[index].firstChild.data = show((at == null ? values : of.data[index + 1]).at(at == null ? -1 : at)); });
      }] },
    };
    chart.current = new uPlot(options, data, host);
    const watch = new ResizeObserver(() => chart.current && chart.current.setSize({ width: host.clientWidth, height }));
    watch.observe(host);
    return () => { watch.disconnect(); chart.current.destroy(); chart.current = null; };
  }, [themed, series.length]);

  useEffect(() => { if (chart.current) chart.current.setData(data); });

  return html`
    <figure class="chart">
      <figcaption><b>${label}</b>${series.map(([name, variable, values]) => html`
        <span key=${name}><i class="swatch ${variable.slice(2)}"></i>${name} <b data-value>${show(values.at(-1))}</b></span>`)}</figcaption>
      <div class="plot" ref=${own} role="img" aria-label="${label} over time. Now: ${latest}"></div>
    </figure>`;
};

// A history that a view adds to. Looks that are further apart than three times `interval_ms` have a hole between them.
export class History {
  constructor(most, interval_ms) { this.most = most; this.interval_ms = interval_ms; this.times = []; this.columns = []; this.added_ms = 0; }

  add(at_ms, values) {
    if (at_ms === this.added_ms) return;
    if (this.added_ms && at_ms - this.added_ms > 3 * this.interval_ms) this.push(this.added_ms / 1000 + 0.001, values.map(() => null));
    this.push(at_ms / 1000, values);
    this.added_ms = at_ms;
  }

  push(time, values) {
    this.times.push(time);
    values.forEach((value, at) => { (this.columns[at] ||= []).push(Number.isFinite(value) ? value : null); });
    if (this.times.length > this.most) { this.times.shift(); for (const column of this.columns) column.shift(); }
  }

  column(at) { return this.columns[at] || []; }
}
