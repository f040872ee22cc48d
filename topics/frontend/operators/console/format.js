// Numbers as people read them. Digits are grouped, units stand behind, and what is unknown is a dash.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NONE = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(Number(value));

export const count = (value) => (known(value) ? grouped.format(value) : value === null || value === undefined ? NONE : String(value.text || value));

export const plural = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

const scaled = (value, step, units) => {
  let at = 0;
  while (value >= step * 0.9995 && at < units.length - 1) { value /= step; at += 1; }
  return [at === 0 ? String(Math.round(value * 10) / 10) : value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0), units[at]];
};

export const short = (value) => (known(value) ? scaled(Number(value), 1000, ["", "k", "M", "G", "T"]).join(" ").trim() : NONE);
export const bytes = (value) => (known(value) ? scaled(Number(value), 1024, ["B", "KiB", "MiB", "GiB", "TiB"]).join(" ") : NONE);
export const rate = (value, unit = "/s") => (known(value) ? `${short(value)}${unit}` : NONE);
export const percent = (value) => (known(value) ? `${(value * 100).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %` : NONE);

export const ms = (value) => {
  if (!known(value)) return NONE;
  if (value < 1) return `${Math.round(value * 1000)} µs`;
  if (value < 1000) return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
  return duration(value);
};

export const duration = (value) => {
  if (!known(value)) return NONE;
  const s = Math.round(value / 1000);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60 ? `${s % 60} s` : ""}`.trim();
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
};

export const ago = (timestamp_ms, now_ms = Date.now()) => {
  if (!timestamp_ms) return "never";
  const passed = now_ms - timestamp_ms;
  return passed < 2000 ? "now" : `${duration(passed).split(" ").slice(0, 2).join(" ")} ago`;
};

const pad = (value, width = 2) => String(value).padStart(width, "0");
export const clock = (timestamp_ms) => {
  const at = new Date(timestamp_ms);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)}`;
};
export const moment = (timestamp_ms) => {
  const at = new Date(timestamp_ms);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${clock(timestamp_ms)}`;
};

export const exitReason = (code) => {
  const signals = { 6: "SIGABRT", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM", 7: "SIGBUS" };
  if (code > 128) return signals[code - 128] || `signal ${code - 128}`;
  return code === 0 ? "ended by itself" : `exit code ${code}`;
};

// The upper bound of the bucket that holds a quantile, of what two cumulative histograms have between them.
export const quantile = (now, before, part) => {
  if (!now) return null;
  const total = now.count - (before ? before.count : 0);
  if (total <= 0) return null;
  const bounds = Object.entries(now.buckets).filter(([bound]) => bound !== "+Inf").sort((a, b) => a[0] - b[0]);
  for (const [bound, value] of bounds) {
    if (value - (before ? before.buckets[bound] || 0 : 0) >= total * part) return Number(bound);
  }
  return Number(bounds.at(-1)[0]);
};
