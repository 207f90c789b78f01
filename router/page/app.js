// The operators' page: receives the cluster's state as a stream and shows it.

import { Refused, call, hasKey, lines, setKey } from "./api.js";
import { showCluster } from "./cluster.js";
import { addDecisions } from "./decisions.js";
import { startExplain } from "./explain.js";
import { byId } from "./format.js";
import { startPlayground } from "./playground.js";
import { addSamples, clearSamples } from "./plots.js";
import { startWorkers, updateWorkers } from "./workers.js";

const SILENT_MS = 30000; // an open stream without updates for longer counts as lost
const MAX_PAUSE_MS = 10000;

const dialog = byId("key-dialog");
const connection = byId("connection");
let onKey = null; // called when a key was entered, or null if the dialog waits for no key

function show(state, text) {
  connection.dataset.state = state;
  if (connection.textContent !== text) connection.textContent = text;
}

async function askForKey(message) {
  byId("key-error").textContent = message;
  show("lost", "not connected");
  if (!dialog.open) dialog.showModal();
  byId("key").focus();
  await new Promise((resolve) => {
    onKey = resolve;
  });
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  const entered = onKey;
  onKey = null;
  dialog.close();
  entered?.();
});
// Without a key there is nothing to show, so Escape must not close the dialog for good.
dialog.addEventListener("close", () => {
  if (onKey) dialog.showModal();
});
byId("forget").addEventListener("click", () => {
  setKey("");
  location.reload();
});

function update(message, isFirst) {
  if (isFirst) clearSamples();
  updateWorkers(message, isFirst);
  showCluster(message); // adds up the KV blocks that `updateWorkers` has stored
  addDecisions(message.decisions, isFirst);
  addSamples(message.samples);
  byId("forget").hidden = !hasKey();
  document.title = `${message.model} – Penstock`;
}

// Show updates until the stream ends or is silent for too long.
async function follow() {
  const abort = new AbortController();
  let timer = setTimeout(() => abort.abort(), SILENT_MS);
  try {
    const reply = await call("/live", { signal: abort.signal });
    let isFirst = true;
    for await (const line of lines(reply)) {
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENT_MS);
      update(JSON.parse(line), isFirst);
      show("live", "live");
      isFirst = false;
    }
  } finally {
    clearTimeout(timer);
  }
}

async function run() {
  let pause = 500;
  for (;;) {
    const began = Date.now();
    try {
      await follow();
    } catch (error) {
      if (error instanceof Refused && (error.status === 401 || error.status === 403)) {
        await askForKey(hasKey() || error.status === 403 ? error.message : "");
        continue;
      }
    }
    if (Date.now() - began > 2 * MAX_PAUSE_MS) pause = 500;
    show("lost", "connection lost, trying again");
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, MAX_PAUSE_MS);
  }
}

startWorkers();
startExplain();
startPlayground();
run();
