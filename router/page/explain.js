// The explanation of a request as a timeline.

import { call } from "./api.js";
import { byId, duration, el, number } from "./format.js";

const BAD = new Set(["readmitted", "transfer_failed", "rejected", "worker_lost"]);

const TEXTS = {
  arrived: (e) => `arrived with ${number(e.tokens)} tokens`,
  placed: (e) => `placed on ${e.worker}${e.other_worker ? `, then ${e.other_worker}` : ""}`,
  submitted: (e) => `sent to ${e.worker}${e.other_worker ? `, with KV from ${e.other_worker}` : ""}`,
  admitted: (e) => `admitted by ${e.worker}; ${number(e.tokens)} prompt tokens were cached`,
  readmitted: (e) => `admitted again by ${e.worker}; ${number(e.tokens)} prompt tokens were cached`,
  first_token: (e) => `first token from ${e.worker}`,
  continued: (e) => `token ${e.tokens + 1} from ${e.worker}`,
  yielded: (e) => `${e.worker} yielded and keeps the KV of ${number(e.tokens)} tokens`,
  transfer_started: (e) => `KV transfer from ${e.other_worker} to ${e.worker}`,
  transfer_ended: (e) => `${e.worker} received ${e.bytes ? `${number(e.bytes)}B` : "the KV blocks"}`,
  transfer_failed: (e) => `the KV transfer to ${e.worker} failed`,
  rejected: (e) => `${e.worker} rejected the request`,
  worker_lost: (e) => `${e.worker} was lost`,
  ended: (e) => `ended after ${number(e.tokens)} tokens`,
};

export async function fetchExplanation(id) {
  return (await call(`/v1/requests/${encodeURIComponent(id)}/explain`)).json();
}

export async function explain(id) {
  byId("explain-id").value = id;
  byId("explain-error").textContent = "";
  const shown = byId("explanation");
  try {
    const found = await fetchExplanation(id);
    shown.replaceChildren(...found.requests.map((request) => view(request, found)));
    shown.focus({ preventScroll: true });
    byId("explain").scrollIntoView({ block: "nearest" });
  } catch (error) {
    shown.replaceChildren();
    byId("explain-error").textContent = error.message;
  }
}

function view(request, found) {
  return el(
    "article",
    {},
    el("h3", { textContent: `${found.request_id} at ${found.router}` }),
    el("p", { textContent: summary(request) }),
    ...phases(request),
    el("ol", { className: "timeline" }, ...request.events.map(eventItem)),
    request.events_left_out ? `${request.events_left_out} later events are not kept` : "",
  );
}

function summary(request) {
  const facts = [
    `${request.finish_reason || request.state} after ${duration(request.seconds)} for ${request.tenant}`,
    `${request.prompt_tokens} prompt tokens, ${request.cached_prompt_tokens} of them cached`,
    `${request.completion_tokens} generated`,
  ];
  if (request.first_token_seconds) facts.push(`first token after ${duration(request.first_token_seconds)}`);
  const steps = request.prefill_steps;
  if (steps) facts.push(`prompt in ${steps} step${steps === 1 ? "" : "s"}`);
  for (const name of ["preemptions", "failovers", "migrations"]) {
    if (request[name]) facts.push(`${name}: ${request[name]}`);
  }
  return facts.join("; ");
}

function phases(request) {
  const spent = request.times.filter((each) => each.seconds > 0);
  const pieces = spent.map((each) => {
    const piece = el("i", { "data-phase": each.phase, title: `${each.phase} ${duration(each.seconds)}` });
    piece.style.width = `${(100 * each.seconds) / request.seconds}%`;
    return piece;
  });
  const names = spent.map((each) =>
    el("li", { "data-phase": each.phase, textContent: `${each.phase.replace("_", " ")} ${duration(each.seconds)}` }),
  );
  return [
    el("div", { className: "phases", "aria-hidden": "true" }, ...pieces),
    el("ul", { className: "legend", "aria-label": "Time by phase" }, ...names),
  ];
}

function eventItem(event) {
  const text = (TEXTS[event.kind] ?? (() => event.kind))(event);
  const what = el("div", { className: BAD.has(event.kind) ? "what bad" : "what" }, text);
  if (event.detail) what.append(" ", el("small", { textContent: `(${event.detail})` }));
  if (event.candidates.length) what.append(candidates(event));
  return el("li", {}, el("time", { textContent: `+${duration(event.seconds)}` }), what);
}

function candidates(event) {
  const states = event.candidates.map((each) =>
    each.state !== "ready" ? each.state : each.has_capacity ? "" : "full",
  );
  const titles = ["", "worker", "role", "cost", "queued", "sequences", "cached"];
  if (states.some(Boolean)) titles.push("state");
  const head = titles.map((title) =>
    el("th", { scope: "col", textContent: title }),
  );
  const rows = event.candidates.map((each, index) => {
    const isChosen = [event.worker, event.other_worker].includes(each.worker);
    const cells = [
      ...[isChosen ? "→" : "", each.worker, each.role, number(each.cost)],
      ...[number(each.queued_tokens), each.sequences, number(each.cached_tokens), states[index]],
    ];
    return el(
      "tr",
      isChosen ? { className: "chosen", title: "chosen", "aria-label": `chosen: ${each.worker}` } : {},
      ...cells.slice(0, titles.length).map((cell) => el("td", { textContent: cell })),
    );
  });
  const left = event.num_workers - event.candidates.length;
  const more = left > 0 ? [el("p", {}, el("small", { textContent: `and ${left} more workers` }))] : [];
  return el(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Candidates" },
    el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)),
    ...more,
  );
}

export function startExplain() {
  byId("explain-form").addEventListener("submit", (event) => {
    event.preventDefault();
    explain(byId("explain-id").value.trim());
  });
}
