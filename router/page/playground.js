// A chat that streams, with sampling controls; shows which worker computed each token.

import { call, lines } from "./api.js";
import { explain, fetchExplanation } from "./explain.js";
import { byId, el } from "./format.js";

const NUM_COLOURS = 6;
const history = []; // messages of the chat
let running = null; // AbortController of the running call

function sampling() {
  const chosen = {};
  for (const input of byId("chat-form").querySelectorAll("fieldset input")) {
    if (input.value !== "") chosen[input.name] = Number(input.value);
  }
  return chosen;
}

function addMessage(who) {
  const text = el("p", {}, el("strong", { textContent: who }));
  byId("messages").append(text);
  return text;
}

function scrollDown() {
  const box = byId("messages");
  box.scrollTop = box.scrollHeight;
}

async function send() {
  const content = byId("message").value;
  addMessage("you").append(content);
  history.push({ role: "user", content });
  byId("message").value = "";
  const answer = addMessage("model");
  const tokens = []; // spans with their token index
  running = new AbortController();
  setRunning(true);
  let id = "";
  let text = "";
  try {
    const reply = await call("/v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ messages: history, stream: true, return_token_ids: true, ...sampling() }),
    });
    id = reply.headers.get("x-request-id");
    let count = 0;
    for await (const line of lines(reply)) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (!choice) continue;
      const piece = choice.delta.content ?? "";
      if (piece) {
        const span = el("span", { className: "token", textContent: piece });
        answer.append(span);
        tokens.push({ span, index: count });
        text += piece;
        scrollDown();
      }
      count += choice.token_ids?.length ?? 0;
    }
    byId("chat-status").textContent = `${count} tokens`;
  } catch (error) {
    byId("chat-status").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    if (text) history.push({ role: "assistant", content: text });
    else history.pop(); // a message without an answer is not sent again
    setRunning(false);
  }
  if (id) await markWorkers(id, tokens, answer);
}

// Underline each token in the colour of the worker that computed it.
async function markWorkers(id, tokens, answer) {
  const link = el("button", { type: "button", className: "link", textContent: "explain this answer" });
  link.addEventListener("click", () => explain(id));
  answer.append("\n", link);
  scrollDown();
  let request;
  try {
    request = (await fetchExplanation(id)).requests.at(-1);
  } catch {
    return; // without an explanation, the answer is shown without marks
  }
  const starts = request.events.filter((event) => ["first_token", "continued"].includes(event.kind));
  const workers = [...new Set(starts.map((event) => event.worker))];
  for (const { span, index } of tokens) {
    const start = starts.findLast((event) => event.tokens <= index);
    if (!start) continue;
    span.dataset.worker = workers.indexOf(start.worker) % NUM_COLOURS;
    span.title = start.worker;
  }
  const items = workers.map((worker, index) => {
    const count = tokens.filter(({ span }) => span.title === worker).length;
    return el("li", { "data-worker": index % NUM_COLOURS, textContent: `${worker}: ${count} pieces of text` });
  });
  byId("token-legend").replaceChildren(...items);
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  byId("messages").setAttribute("aria-busy", String(isRunning));
  if (isRunning) byId("chat-status").textContent = "generating";
}

export function startPlayground() {
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (byId("stop").disabled) send();
  });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      byId("chat-form").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    history.length = 0;
    byId("messages").replaceChildren();
    byId("token-legend").replaceChildren();
    byId("chat-status").textContent = "";
  });
}
