// The frame of the console: navigation, theme, key, keyboard. Each view is a module of its own.

import { html, render, useEffect, useState } from "./vendor/preact-htm.js";
import { hasKey, setKey } from "./api.js";
import { clock } from "./format.js";
import { change, href, learnRights, refreshNow, state, useRoute, useStore } from "./store.js";
import { Dialog, Field } from "./ui.js";
import { Cursors } from "./views/cursors.js";
import { Behind, Overview } from "./views/overview.js";
import { Queue, Queues } from "./views/queues.js";
import { Routers } from "./views/routers.js";
import { Topic } from "./views/topic.js";
import { Topics } from "./views/topics.js";

const VIEWS = [["overview", "Overview"], ["topics", "Topics"], ["queues", "Queues"], ["cursors", "Cursors"], ["routers", "Routers"]];
const SHORTCUTS = [
  ["1 – 5", "Overview, Topics, Queues, Cursors, Routers"], ["/", "search"], ["r", "refresh now"], ["p", "pause or resume the tail"],
  ["d", "dark, light, or as the system"], ["k", "enter or change the key"], ["?", "this list"], ["Esc", "close"],
];
const THEMES = ["system", "light", "dark"];
const LINKS = { live: "live", lost: "no connection", connecting: "connecting" };

const Shortcuts = ({ onClose }) => html`
  <${Dialog} title="Keyboard" onClose=${onClose}>
    <dl class="shortcuts">${SHORTCUTS.map(([keys, what]) => html`<div key=${keys}><dt><kbd>${keys}</kbd></dt><dd>${what}</dd></div>`)}</dl>
  <//>`;

const KeyDialog = ({ onClose }) => {
  const [refused, setRefused] = useState(hasKey());
  const submit = async (event) => {
    event.preventDefault();
    setKey(new FormData(event.target).get("key").trim());
    if (await learnRights()) onClose(); else setRefused(true);
  };
  const forget = () => { setKey(""); change({ rights: null }); learnRights(); onClose(); };
  return html`
    <${Dialog} title="Key" onClose=${state.needsKey ? undefined : onClose}>
      <form onSubmit=${submit}>
        <p>${refused && state.needsKey ? html`<span class="bad" role="alert">This key is not valid here.</span>` : state.needsKey ? "The service asks for a key." : "Use another key."}
          It stays in this tab's memory: a reload forgets it.</p>
        <${Field} label="Key"><input name="key" type="password" autocomplete="off" required autofocus /><//>
        <div class="actions">${hasKey() && !state.needsKey && html`<button type="button" class="quiet" onClick=${forget}>Forget it</button>`}<button class="main">Use key</button></div>
      </form>
    <//>`;
};

const Rights = ({ onOpen }) => {
  const { rights } = useStore();
  if (!rights || !rights.keys) return null;
  const scopes = rights.scopes.length === 4 ? "all rights" : rights.scopes.length === 1 && rights.scopes[0] === "read" ? "read only" : rights.scopes.join(" + ") || "no rights";
  return html`<button class="rights quiet" onClick=${onOpen} aria-label="Change the key">${scopes}${rights.prefixes.length ? html` <span class="dim">${rights.prefixes.map((one) => `${one}*`).join(" ")}</span>` : ""}</button>`;
};

const nextTheme = (theme) => {
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
  return next;
};

const App = () => {
  const route = useRoute();
  const { link, needsKey, rights } = useStore();
  const [dialog, setDialog] = useState(null);
  const [theme, setTheme] = useState("system");
  const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
  const themed = theme === "system" ? (dark ? "dark" : "light") : theme;

  useEffect(() => {
    learnRights();
    const media = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setDark(media.matches);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, []);

  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (event.target.closest("input, textarea, select")) { if (event.key === "Escape") event.target.blur(); return; }
      const view = VIEWS[Number(event.key) - 1];
      const acts = { "?": () => setDialog("help"), k: () => setDialog("key"), r: refreshNow, d: () => setTheme(nextTheme),
        "/": () => document.querySelector("input[type=search]")?.focus(), p: () => document.querySelector("[data-pause]")?.click() };
      const act = view ? () => { location.hash = href(view[0]); } : acts[event.key];
      if (act) { event.preventDefault(); act(); }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);

  const current = route.view === "topic" ? "topics" : route.view === "queue" ? "queues" : route.view;
  useEffect(() => { document.title = `${route.name || (VIEWS.find(([view]) => view === current) || ["", ""])[1]} · topics`; }, [route.name, current]);
  const View = { overview: Overview, topics: Topics, topic: Topic, queues: Queues, queue: Queue, cursors: Cursors, routers: Routers }[route.view] || Overview;
  const close = () => setDialog(null);
  const unreadable = rights && rights.keys && !rights.scopes.includes("read");
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href=${href("overview")}><span class="mark" aria-hidden="true"></span>topics</a>
      <nav aria-label="Views">${VIEWS.map(([view, name]) => html`<a key=${view} href=${href(view)} aria-current=${view === current ? "page" : undefined}>${name}</a>`)}</nav>
      <div class="tools">
        <span class="link ${link}" role="status"><i aria-hidden="true"></i>${LINKS[link]}</span>
        <${Rights} onOpen=${() => setDialog("key")} />
        <button class="quiet" onClick=${() => setTheme(nextTheme)} aria-label="Theme: ${theme}" title="Theme: ${theme}">${{ system: "◐", light: "○", dark: "●" }[theme]}</button>
        <button class="quiet" onClick=${() => setDialog("help")} aria-label="Keyboard shortcuts" title="Keyboard shortcuts">?</button>
      </div>
    </header>
    <main id="main" tabindex="-1" key=${`${route.view}/${route.name}`}>
      ${link === "lost" && html`<div class="problem" role="alert"><b>No connection.</b> ${state.heard_ms ? `What you see is from ${clock(state.heard_ms).slice(0, 8)}.` : ""} Trying again…</div>`}
      ${unreadable ? html`<div class="problem"><b>This key cannot read.</b> The console needs a key with the scope read.</div>` : html`<${View} name=${route.name} query=${route.query} themed=${themed} />`}
    </main>
    ${View !== Overview && rights && !unreadable && html`<${Behind} />`}
    ${(needsKey || dialog === "key") && html`<${KeyDialog} onClose=${close} />`}
    ${dialog === "help" && !needsKey && html`<${Shortcuts} onClose=${close} />`}`;
};

render(html`<${App} />`, document.getElementById("app"));
