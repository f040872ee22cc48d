// Parts that several views are made of. Everything from the service is set as text, never as HTML.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { Written } from "./api.js";
import { noteFailure, refreshNow } from "./store.js";

export const Problem = ({ error, what }) => (!error || error.status === 401 ? null : html`
  <div class="problem" role="alert"><b>${what || "This could not be loaded"}.</b> ${error.message} <button class="quiet" onClick=${refreshNow}>Try again</button></div>`);

export const Loading = () => html`<p class="loading" role="status">Loading…</p>`;
export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

export const Panel = ({ title, aside, children, id, class: extra = "" }) => html`
  <section class="panel ${extra}" aria-labelledby=${id}>
    <header><h2 id=${id}>${title}</h2><div class="aside">${aside}</div></header>
    ${children}
  </section>`;

export const Figures = ({ of, label }) => html`
  <dl class="figures" aria-label=${label}>
    ${of.filter(Boolean).map(([name, value, note, tone]) => html`<div key=${name} class=${tone || ""}><dt>${name}</dt><dd>${value}</dd>${note && html`<dd class="note">${note}</dd>`}</div>`)}
  </dl>`;

// `columns`: [{ name, of(row), number, sort, hint }]. A column with `sort` has a button in its head.
export const Table = ({ label, columns, rows, keyOf, sort, onSort, rowClass, after, empty }) => html`
  <div class="scroll" tabindex="0" role="group" aria-label=${label}>
    <table>
      <caption class="unseen">${label}</caption>
      <thead><tr>${columns.map((column) => html`
        <th scope="col" class=${column.number ? "number" : ""} title=${column.hint}
            aria-sort=${column.sort && sort && sort.by === column.sort ? (sort.order === "asc" ? "ascending" : "descending") : undefined}>
          ${column.sort ? html`<button class="head" onClick=${() => onSort(column.sort)}>${column.name}<i aria-hidden="true">${sort.by === column.sort ? (sort.order === "asc" ? "↑" : "↓") : ""}</i></button>` : column.name}
        </th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`
        <tr key=${keyOf(row)} class=${rowClass ? rowClass(row) : ""}>${columns.map((column, at) => (at === 0
          ? html`<th scope="row" class=${column.class || ""}>${column.of(row)}</th>`
          : html`<td class="${column.number ? "number" : ""} ${column.class || ""}">${column.of(row)}</td>`))}</tr>
        ${after && after(row)}`)}
      </tbody>
    </table>
    ${rows.length === 0 && html`<${Empty}>${empty || "Nothing here."}<//>`}
  </div>`;

export const Badge = ({ tone = "", children, title }) => html`<span class="badge ${tone}" title=${title}>${children}</span>`;

export const Field = ({ label, children, hint }) => html`<label class="field"><span>${label}</span>${children}${hint && html`<small>${hint}</small>`}</label>`;

export const Tabs = ({ label, of, now, onPick }) => html`
  <div class="tabs" role="group" aria-label=${label}>
    ${of.map(([value, name]) => html`<button key=${value} aria-pressed=${value === now} onClick=${() => onPick(value)}>${name}</button>`)}
  </div>`;

// A modal dialog: the browser keeps the focus in it, closes it by Escape and gives the focus back. One without onClose
// stays: a second Escape closes it whatever the page says, and it is opened again.
export const Dialog = ({ title, onClose, children, wide }) => {
  const own = useRef(null);
  useEffect(() => {
    const dialog = own.current;
    dialog.showModal();
    return () => { own.isGone = true; dialog.close(); }; // its event comes later, when the next dialog may be open
  }, []);
  return html`
    <dialog ref=${own} class=${wide ? "wide" : ""} aria-labelledby="dialog-title" onClose=${() => { if (own.isGone) return; if (onClose) onClose(); else own.current.showModal(); }} onCancel=${(event) => { if (!onClose) event.preventDefault(); }}>
      <header><h2 id="dialog-title">${title}</h2>${onClose && html`<button class="quiet" aria-label="Close" onClick=${onClose}>✕</button>`}</header>
      ${children}
    </dialog>`;
};

// Runs an action once at a time. Returns [run, isBusy, error, what it returned].
export const useAction = (action) => {
  const [state, setState] = useState({ busy: false, error: null, result: null });
  const run = async (...given) => {
    if (state.busy) return;
    setState({ busy: true, error: null, result: null });
    try {
      setState({ busy: false, error: null, result: await action(...given) });
    } catch (error) {
      noteFailure(error);
      setState({ busy: false, error, result: null });
    }
  };
  return [run, state.busy, state.error, state.result];
};

// -- JSON, folded

const FOLDED_OVER = 3;
const SHOWN_MAX = 200;

const leaf = (value) => (value instanceof Written ? value.text : JSON.stringify(value));
const kindOf = (value) => (value === null ? "null" : value instanceof Written ? "number" : typeof value);
const isTree = (value) => value !== null && typeof value === "object" && !(value instanceof Written);

export const Json = ({ value, name, depth = 0 }) => {
  const label = name === undefined ? null : html`<span class="name">${name}: </span>`;
  if (!isTree(value)) {
    return html`<div class="json-leaf">${label}<span class=${kindOf(value)}>${leaf(value)}</span></div>`;
  }
  const entries = Object.entries(value);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  if (!entries.length) return html`<div class="json-leaf">${label}${open}${close}</div>`;
  return html`
    <details class="json" open=${depth < FOLDED_OVER && entries.length <= 50}>
      <summary>${label}${open}<span class="dim"> ${entries.length} </span>${close}</summary>
      ${entries.slice(0, SHOWN_MAX).map(([inner, of]) => html`<${Json} key=${inner} name=${inner} value=${of} depth=${depth + 1} />`)}
      ${entries.length > SHOWN_MAX && html`<div class="dim">… ${entries.length - SHOWN_MAX} more</div>`}
    </details>`;
};

export const oneLine = (value, most = 400) => {
  const text = JSON.stringify(value);
  return text === undefined ? "" : text.length > most ? `${text.slice(0, most)}…` : text;
};
