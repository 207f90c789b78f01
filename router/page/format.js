// Short texts of numbers, and creation of elements. Texts are never parsed as HTML.

export function number(value) {
  const units = ["", "k", "M", "G", "T"];
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return (unit && Math.abs(value) < 9.95 ? value.toFixed(1) : value.toFixed(0)) + units[unit];
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds >= 599.5) return `${(seconds / 60).toFixed(0)} min`;
  if (seconds >= 0.9995) return `${seconds.toFixed(1)} s`;
  const ms = seconds * 1000;
  return `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function percent(share) {
  return `${Math.round(share * 100)}%`;
}

export function clock(secondsSince1970) {
  return new Date(secondsSince1970 * 1000).toLocaleTimeString();
}

// Return an element with properties (`data-*` and `aria-*` as attributes) and children.
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.includes("-") || key === "role" || key === "scope") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

const KV_STATES = ["used", "leased", "reserved", "cached", "free"];

// Return a bar of KV blocks by state, with a text for screen readers.
export function kvBar(blocks) {
  const total = KV_STATES.reduce((sum, state) => sum + blocks[state], 0);
  const label = KV_STATES.map((state) => `${blocks[state]} ${state}`).join(", ");
  const bar = el("div", { className: "kv", role: "img", "aria-label": `KV blocks: ${label}`, title: label });
  for (const state of KV_STATES) {
    const piece = el("i", { "data-kv": state });
    piece.style.width = total ? `${(100 * blocks[state]) / total}%` : "0";
    bar.append(piece);
  }
  return bar;
}
