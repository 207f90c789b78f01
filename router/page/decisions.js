// The latest decisions, newest first.

import { explain } from "./explain.js";
import { byId, clock, el } from "./format.js";

const MAX_ROWS = 100;

function row(decision) {
  const button = el("button", { type: "button", className: "link", textContent: decision.request_id });
  button.addEventListener("click", () => explain(decision.request_id));
  return el(
    "tr",
    {},
    el("td", { textContent: clock(decision.at) }),
    el("td", {}, button),
    el("td", { textContent: decision.tenant }),
    el("td", { textContent: decision.worker }),
    el("td", { textContent: decision.other_worker || "–" }),
    el("td", { className: "wrap", textContent: decision.reason }),
  );
}

export function addDecisions(decisions, isFirst) {
  const body = byId("decision-table").tBodies[0];
  if (isFirst) body.replaceChildren();
  const newest = decisions.slice(-MAX_ROWS).reverse().map(row);
  body.prepend(...newest);
  while (body.rows.length > MAX_ROWS) body.lastElementChild.remove();
}
