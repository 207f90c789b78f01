// Calls of the router. The key stays in this tab: in memory and in its session storage.

const STORED = "penstock-operator-key";
let key = sessionStorage.getItem(STORED) ?? "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
}

// Fetch a path of this router; throw Refused unless the status is 200.
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (reply.ok) return reply;
  let message = `HTTP ${reply.status}`;
  try {
    message = (await reply.json()).error.message;
  } catch {
    // The reply has no message of the router, so the HTTP status is the message.
  }
  throw new Refused(reply.status, message);
}

// Yield the lines of a streamed response.
export async function* lines(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n");
    rest = pieces.pop();
    yield* pieces;
  }
}
