// What all views share: the state of the connection, the rights of the key, and polling that costs little.

import { useEffect, useRef, useState } from "./vendor/preact-htm.js";
import { ApiError, get } from "./api.js";

export const HIDDEN_TIMES = 15; // a hidden tab asks so much less often
const BACKOFF_MAX = 8;

const listeners = new Set();
const AGAIN_MS = 5000; // what is loaded once is tried again after a failure
export const state = { link: "connecting", rights: null, needsKey: false, refresh: 0, heard_ms: 0 }; // heard_ms: of the last answer

export const change = (members) => {
  if (Object.entries(members).every(([name, value]) => state[name] === value)) return;
  Object.assign(state, members);
  for (const listener of [...listeners]) listener();
};

export const useStore = () => {
  const [, draw] = useState(0);
  useEffect(() => {
    const listener = () => draw((count) => count + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return state;
};

export const can = (scope, name) => {
  const { rights } = state;
  if (!rights) return false;
  return rights.scopes.includes(scope) && (name === undefined || !rights.prefixes.length || rights.prefixes.some((one) => name.startsWith(one)));
};

export const learnRights = async () => {
  try {
    const { keys, scopes, prefixes } = await get("key");
    change({ rights: { keys, scopes, prefixes }, needsKey: false, refresh: state.refresh + 1 });
    return true;
  } catch (error) {
    noteFailure(error);
    return false;
  }
};

export const noteFailure = (error) => {
  if (error.name === "AbortError") return;
  if (error instanceof ApiError && error.status === 401) change({ needsKey: true, link: "live" });
  else if (error instanceof ApiError && (error.status === 0 || error.code.startsWith("http_5"))) change({ link: "lost" }); // a proxy answers for it
};

export const refreshNow = () => change({ refresh: state.refresh + 1 });

// Calls `load(signal)` now and then every `interval_ms`: one at a time, slower while the tab is hidden or the service
// does not answer. Returns [what it returned last, the error of the last try, when it was loaded].
export const usePoll = (load, interval_ms, dependencies) => {
  const [result, setResult] = useState([null, null, 0]);
  const { refresh, needsKey } = useStore();
  const loadNow = useRef(load);
  loadNow.current = load;
  useEffect(() => {
    if (needsKey) return undefined;
    const stop = new AbortController();
    let timer = 0, failures = 0, busy = false;
    const plan = () => {
      clearTimeout(timer);
      const next_ms = interval_ms || (failures && AGAIN_MS);
      if (next_ms) timer = setTimeout(step, next_ms * (document.hidden ? HIDDEN_TIMES : 1) * Math.min(2 ** failures, BACKOFF_MAX));
    };
    const step = async () => {
      if (busy) return;
      busy = true;
      try {
        const value = await loadNow.current(stop.signal);
        if (stop.signal.aborted) return;
        failures = 0;
        state.heard_ms = Date.now();
        change({ link: "live" });
        if (!state.rights) learnRights();
        setResult([value, null, Date.now()]);
      } catch (error) {
        if (stop.signal.aborted) return;
        failures += 1;
        noteFailure(error);
        setResult(([value, , at]) => [value, error, at]);
      } finally {
        busy = false;
        if (!stop.signal.aborted) plan();
      }
    };
    const shown = () => { if (!document.hidden) step(); else plan(); };
    document.addEventListener("visibilitychange", shown);
    step();
    return () => { stop.abort(); clearTimeout(timer); document.removeEventListener("visibilitychange", shown); };
  }, [...dependencies, refresh, needsKey, interval_ms]);
  return result;
};

// -- where we are: #/view/name?parameter=value

const decoded = (text) => { try { return decodeURIComponent(text); } catch { return text; } }; // an address that somebody typed

const read = () => {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...names] = path.split("/");
  return { view: view || "overview", name: names.length ? decoded(names.join("/")) : null, query: new URLSearchParams(query || "") };
};

export const href = (view, name, query) => {
  const given = Object.entries(query || {}).filter(([, value]) => value !== "" && value != null);
  return `#/${view}${name == null ? "" : `/${encodeURIComponent(name)}`}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
};

export const useRoute = () => {
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
};

export const keepInHash = (view, name, query) => history.replaceState(null, "", href(view, name, query));
