// The table of workers: filtered, sorted, and shown in pages, so that 1,000 workers stay fast.

import { byId, duration, el, kvBar, number, percent } from "./format.js";

const PAGE = 50;
const KV = ["used", "leased", "reserved", "cached", "free"];

const COLUMNS = [
  ["worker", "worker", (w) => w.worker],
  ["role", "role", (w) => w.role],
  ["state", "state", (w) => w.state],
  ["running", "running", (w) => (w.running == null ? "–" : `${w.running} of ${w.places}`)],
  ["waiting", "waiting", (w) => (w.waiting == null ? "–" : number(w.waiting))],
  ["waiting_tokens", "tokens", (w) => (w.waiting_tokens == null ? "–" : number(w.waiting_tokens))],
  ["in_use", "KV in use", null],
  ["hit_fraction", "cache hits", (w) => (w.hit_fraction == null ? "–" : percent(w.hit_fraction))],
  ["preemptions", "preempted", (w) => (w.preemptions == null ? "–" : number(w.preemptions))],
  ["step_seconds", "step", (w) => (w.step_seconds ? duration(w.step_seconds) : "–")],
];
const TEXTS = new Set(["worker", "role", "state"]);

const workers = new Map(); // by name
let sortKey = "worker";
let direction = 1;
let page = 0;

export function updateWorkers(message, isFirst) {
  if (isFirst) workers.clear();
  for (const name of message.gone) workers.delete(name);
  for (const row of message.workers) {
    const worker = Object.fromEntries(message.columns.map((name, index) => [name, row[index]]));
    const total = KV.reduce((sum, state) => sum + (worker[state] ?? 0), 0);
    worker.in_use = total ? 1 - (worker.cached + worker.free) / total : 0;
    workers.set(worker.worker, worker);
  }
  if (isFirst || message.workers.length || message.gone.length) render();
}

// Return the KV blocks of all workers of a role, by state.
export function kvOfPool(role) {
  const sum = Object.fromEntries(KV.map((state) => [state, 0]));
  for (const worker of workers.values()) {
    if (worker.role === role) for (const state of KV) sum[state] += worker[state] ?? 0;
  }
  return sum;
}

function compare(a, b) {
  const [left, right] = [a[sortKey] ?? -1, b[sortKey] ?? -1];
  const order = TEXTS.has(sortKey)
    ? String(left).localeCompare(String(right), undefined, { numeric: true })
    : left - right;
  return direction * order || a.worker.localeCompare(b.worker, undefined, { numeric: true });
}

function cell(worker, [key, , text]) {
  if (key === "worker") return el("th", { scope: "row", textContent: worker.worker });
  if (key === "in_use") {
    if (worker.used == null) return el("td", { textContent: "–" });
    const share = el("span", { textContent: percent(worker.in_use) });
    return el("td", {}, el("div", { className: "share" }, kvBar(worker), share));
  }
  const name = key === "state" ? `state-${worker.state}` : TEXTS.has(key) ? "" : "number";
  return el("td", { className: name, textContent: text(worker) });
}

function render() {
  const words = byId("worker-filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const found = [...workers.values()].filter((worker) => {
    const text = `${worker.worker} ${worker.role} ${worker.state}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  found.sort(compare);
  const last = Math.max(Math.ceil(found.length / PAGE) - 1, 0);
  page = Math.min(page, last);
  const shown = found.slice(page * PAGE, (page + 1) * PAGE);
  const rows = shown.map((worker) => {
    worker.element ??= el("tr", {}, ...COLUMNS.map((column) => cell(worker, column)));
    return worker.element;
  });
  byId("worker-table").tBodies[0].replaceChildren(...rows);
  const range = found.length > PAGE ? `${page * PAGE + 1} to ${page * PAGE + shown.length} of ` : "";
  const all = found.length < workers.size ? ` of ${workers.size}` : "";
  byId("worker-count").textContent = `${range}${found.length}${all} workers`;
  byId("previous").disabled = page === 0;
  byId("next").disabled = page === last;
}

function sortBy(key) {
  direction = sortKey === key ? -direction : TEXTS.has(key) ? 1 : -1;
  sortKey = key;
  markSorted();
  render();
}

function markSorted() {
  for (const header of byId("worker-table").tHead.rows[0].cells) {
    const order = direction === 1 ? "ascending" : "descending";
    header.setAttribute("aria-sort", header.dataset.key === sortKey ? order : "none");
  }
}

export function startWorkers() {
  const headers = COLUMNS.map(([key, title]) => {
    const button = el("button", { type: "button", textContent: title });
    button.addEventListener("click", () => sortBy(key));
    const isNumber = !TEXTS.has(key) && key !== "in_use";
    return el("th", { scope: "col", "data-key": key, className: isNumber ? "number" : "" }, button);
  });
  byId("worker-table").tHead.rows[0].replaceChildren(...headers);
  markSorted();
  byId("worker-filter").addEventListener("input", () => {
    page = 0;
    render();
  });
  for (const [id, step] of [["previous", -1], ["next", 1]]) {
    byId(id).addEventListener("click", () => {
      page += step;
      render();
    });
  }
}
