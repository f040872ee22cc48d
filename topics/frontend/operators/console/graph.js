// Topics and the routers between them as a graph: dagre places them, this draws, pans and zooms.

import { Graph, layout } from "./vendor/dagre.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const NODE_HEIGHT = 26;
const CHARACTER = 7.3;
const NAME_MAX = 26;
const GAP = 36;
const ZOOM_MIN = 0.08;
const ZOOM_MAX = 2.5;
const STEP = 1.3;
const READABLE = 0.7; // what does not fit at this scale is panned to, not shrunk
const LEAVES_MAX = 4; // more dests of one source that lead nowhere else are one stack, until somebody opens it

const cut = (name) => (name.length > NAME_MAX ? `${name.slice(0, NAME_MAX - 1)}…` : name);

// The dests of one source that lead nowhere else, in one stack if there are many.
const fold = (edges, opened) => {
  const sources = new Set(edges.map((edge) => edge.source)), leaves = new Map();
  for (const edge of edges) if (!sources.has(edge.dest)) leaves.set(edge.source, [...(leaves.get(edge.source) || []), edge]);
  const isFolded = (edge) => !sources.has(edge.dest) && leaves.get(edge.source).length > LEAVES_MAX && !opened.has(edge.source);
  const stacks = [...leaves].filter(([, of]) => isFolded(of[0])).map(([source, of]) => (
    { router: `${source} >>`, source, dest: `${of.length} topics of ${source}`, stack: of, busy: of.some((edge) => edge.busy), filter: null }));
  return [...edges.filter((edge) => !isFolded(edge)), ...stacks];
};

// Groups of topics that hang together, each by itself: so 200 routers become rows of small graphs, not one long strip.
const groups = (edges) => {
  const parent = new Map();
  const root = (name) => { let at = name; while (parent.get(at) !== at) at = parent.get(at); parent.set(name, at); return at; };
  for (const { source, dest } of edges) {
    for (const name of [source, dest]) if (!parent.has(name)) parent.set(name, name);
    parent.set(root(source), root(dest));
  }
  const found = new Map();
  for (const edge of edges) { const key = root(edge.source); if (!found.has(key)) found.set(key, []); found.get(key).push(edge); }
  return [...found.values()];
};

const place = (edges) => {
  const graph = new Graph({ multigraph: true });
  graph.setGraph({ rankdir: "LR", nodesep: 9, ranksep: 46, marginx: 0, marginy: 0 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { source, dest, router, stack } of edges) {
    const node = (name, of) => { const text = of ? `${of.length} topics` : cut(name); graph.setNode(name, { text, stack: of, source, width: text.length * CHARACTER + 20, height: NODE_HEIGHT }); };
    node(source);
    node(dest, stack);
    graph.setEdge(source, dest, {}, router);
  }
  layout(graph);
  const { width, height } = graph.graph();
  return {
    width, height,
    nodes: graph.nodes().map((name) => ({ name, ...graph.node(name) })),
    edges: edges.map((edge) => ({ ...edge, points: graph.edge({ v: edge.source, w: edge.dest, name: edge.router }).points })),
  };
};

const pack = (placed) => {
  placed.sort((a, b) => b.height - a.height || b.width - a.width);
  const area = placed.reduce((sum, one) => sum + (one.width + GAP) * (one.height + GAP), 0);
  const widest = Math.max(...placed.map((one) => one.width), Math.sqrt(area * 1.9));
  let x = 0, y = 0, row = 0, width = 0;
  for (const one of placed) {
    if (x && x + one.width > widest) { x = 0; y += row + GAP; row = 0; }
    Object.assign(one, { x, y });
    x += one.width + GAP;
    row = Math.max(row, one.height);
    width = Math.max(width, x - GAP);
  }
  return { placed, width, height: y + row };
};

const reach = (edges, from, near, far) => {
  const found = new Set([from]);
  for (let grown = true; grown;) { grown = false; for (const edge of edges) if (found.has(edge[near]) && !found.has(edge[far])) { found.add(edge[far]); grown = true; } }
  return found;
};

const curve = ([first, ...rest]) => {
  let path = `M${first.x},${first.y}`;
  for (let at = 0; at < rest.length - 1; at += 1) path += `Q${rest[at].x},${rest[at].y} ${(rest[at].x + rest[at + 1].x) / 2},${(rest[at].y + rest[at + 1].y) / 2}`;
  return `${path}L${rest.at(-1).x},${rest.at(-1).y}`;
};

// `edges`: [{ router, source, dest, busy, filter }]. `picked` is a topic; what it reaches, and what reaches it, stands out.
export const RouterGraph = ({ edges, picked, onPick, found }) => {
  const [opened, setOpened] = useState(new Set());
  const drawn = useMemo(() => fold(edges, opened), [edges, opened]);
  const shape = drawn.map(({ router, source, dest }) => `${router} ${source} ${dest}`).join("\n");
  const { placed, width, height } = useMemo(() => pack(groups(drawn).map(place)), [shape]);
  const busy = new Set(drawn.filter((edge) => edge.busy).map((edge) => edge.router));
  const host = useRef(null), drag = useRef(null);
  const [view, setView] = useState(null);
  const look = (left, top, wide, high, least) => {
    const { clientWidth, clientHeight } = host.current;
    const fitting = Math.min((clientWidth - 60) / wide, (clientHeight - 40) / high, 1.1), scale = Math.max(fitting, least);
    const along = (room, size, from) => (size * scale < room - 40 ? (room - size * scale) / 2 - from * scale : 20 - from * scale);
    setView({ scale, x: along(clientWidth, wide, left), y: along(clientHeight, high, top) });
  };
  const fit = () => look(0, 0, width, height, ZOOM_MIN);
  const near = useMemo(() => picked && new Set([...reach(drawn, picked, "source", "dest"), ...reach(drawn, picked, "dest", "source")]), [picked, shape]);
  const lit = found || near;
  useEffect(() => {
    const spots = lit ? placed.flatMap((one) => one.nodes.filter((node) => lit.has(node.name)).map((node) => [one.x + node.x, one.y + node.y, node.width / 2])) : [];
    if (!spots.length) { look(0, 0, width, height, READABLE); return; }
    const left = Math.min(...spots.map(([x, , half]) => x - half)), right = Math.max(...spots.map(([x, , half]) => x + half));
    const top = Math.min(...spots.map(([, y]) => y)) - NODE_HEIGHT, bottom = Math.max(...spots.map(([, y]) => y)) + NODE_HEIGHT;
    look(left, top, right - left, bottom - top, READABLE);
  }, [shape, picked, found && [...found].join()]);
  const zoom = (factor, x = host.current.clientWidth / 2, y = host.current.clientHeight / 2) => setView((now) => {
    const scale = Math.min(ZOOM_MAX, Math.max(ZOOM_MIN, now.scale * factor));
    return { scale, x: x - ((x - now.x) * scale) / now.scale, y: y - ((y - now.y) * scale) / now.scale };
  });
  const wheel = (event) => { event.preventDefault(); const box = host.current.getBoundingClientRect(); zoom(event.deltaY < 0 ? 1.12 : 1 / 1.12, event.clientX - box.left, event.clientY - box.top); };
  useEffect(() => { const own = host.current; own.addEventListener("wheel", wheel, { passive: false }); return () => own.removeEventListener("wheel", wheel); }, []);
  const moves = {
    onPointerDown: (event) => { if (event.button === 0 && !event.target.closest(".node, button")) { drag.current = [event.clientX, event.clientY]; host.current.setPointerCapture(event.pointerId); } },
    onPointerMove: (event) => { if (!drag.current) return; const [x, y] = drag.current; drag.current = [event.clientX, event.clientY]; setView((now) => ({ ...now, x: now.x + event.clientX - x, y: now.y + event.clientY - y })); },
    onPointerUp: () => { drag.current = null; },
  };
  const tone = (names) => (found ? (names.some((name) => found.has(name)) ? "near" : "far") : near ? (names.every((name) => near.has(name)) ? "near" : "far") : "");
  const act = (node) => { if (node.stack) setOpened(new Set([...opened, node.source])); else onPick(node.name); };
  const keyed = (node) => (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(node); } };
  return html`
    <div class="graph ${near || found ? "focused" : ""}" ref=${host} ...${moves}>
      <svg role="group" aria-label="Topics and the routers between them; the table below has the same">
        <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0.5L8,4L0,7.5z" /></marker></defs>
        ${view && html`<g transform="translate(${view.x},${view.y}) scale(${view.scale})">${placed.map((one) => html`
          <g key=${one.nodes[0].name} transform="translate(${one.x},${one.y})">
            ${one.edges.map((edge) => html`<path key=${edge.router} class="edge ${busy.has(edge.router) ? "busy" : ""} ${tone([edge.source, edge.dest])}" d=${curve(edge.points)} marker-end="url(#arrow)"><title>${edge.router}${edge.filter ? ` (${edge.filter})` : ""}</title></path>`)}
            ${one.nodes.map((node) => html`<g key=${node.name} class="node ${node.stack ? "stack" : ""} ${node.name === picked ? "picked" : ""} ${tone([node.name])}" transform="translate(${node.x - node.width / 2},${node.y - node.height / 2})"
                tabindex="0" role="button" aria-pressed=${node.name === picked} aria-label=${node.stack ? `Show ${node.name}` : node.name} onClick=${() => act(node)} onKeyDown=${keyed(node)}>
              ${node.stack && html`<rect x="4" y="4" width=${node.width} height=${node.height} rx="6" />`}<rect width=${node.width} height=${node.height} rx="6" /><text x="10" y="17">${node.text}</text><title>${node.name}</title></g>`)}
          </g>`)}</g>`}
      </svg>
      <div class="graph-tools"><button aria-label="Closer" onClick=${() => zoom(STEP)}>+</button><button aria-label="Further" onClick=${() => zoom(1 / STEP)}>−</button><button aria-label="Show all" onClick=${fit}>⤢</button></div>
    </div>`;
};
