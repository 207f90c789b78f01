// Totals, pools and routers.

import { byId, el, kvBar, number } from "./format.js";
import { kvOfPool } from "./workers.js";

const tiles = new Map(); // value element by name

function tile(name, value) {
  if (!tiles.has(name)) {
    const shown = el("dd");
    byId("tiles").append(el("div", {}, el("dt", { textContent: name }), shown));
    tiles.set(name, shown);
  }
  if (tiles.get(name).textContent !== value) tiles.get(name).textContent = value;
}

export function showCluster(message) {
  byId("model").textContent = message.model;
  byId("router").textContent = `${message.router}, Penstock ${message.version}`;
  const finished = Object.entries(message.finished);
  const failed = finished
    .filter(([reason]) => !["stop", "length", "cancelled"].includes(reason))
    .reduce((sum, [, count]) => sum + count, 0);
  tile("state", message.not_ready || "serving");
  tile("open requests", number(message.streams));
  tile("queued here", `${number(message.waiting)} (${number(message.waiting_tokens)} tokens)`);
  tile("finished", number(finished.reduce((sum, [, count]) => sum + count, 0)));
  tile("failed", number(failed));
  tile("failovers", number(message.failovers));
  tile("KV transfers", `${number(message.kv_transfers)} (${number(message.kv_transfer_bytes)}B)`);
  tile("failed transfers", number(message.kv_transfers_failed));
  showPools(message.pools);
  showRouters(message.routers);
}

function showPools(pools) {
  const rows = pools.map((pool) => {
    const kv = kvOfPool(pool.pool);
    return el(
      "tr",
      {},
      el("th", { scope: "row", textContent: pool.pool }),
      el("td", { textContent: `${pool.ready} of ${pool.workers}` }),
      el("td", { textContent: number(pool.running) }),
      el("td", { textContent: number(pool.waiting) }),
      el("td", { textContent: number(pool.waiting_tokens) }),
      el("td", {}, kvBar(kv)),
    );
  });
  byId("pools").tBodies[0].replaceChildren(...rows);
}

function showRouters(routers) {
  byId("routers-region").hidden = routers.length < 2;
  const rows = routers.map((router) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", textContent: router.router }),
      el("td", { className: `state-${router.state}`, textContent: router.state }),
      el("td", { textContent: router.http }),
      el("td", { textContent: number(router.streams) }),
      el("td", { textContent: number(router.waiting) }),
    ),
  );
  byId("routers").tBodies[0].replaceChildren(...rows);
}

