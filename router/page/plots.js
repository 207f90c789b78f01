// Latencies and throughput of the last 15 minutes as small plots.

import { byId, duration, el, number } from "./format.js";

const NUM_SAMPLES = 180;
const [WIDTH, HEIGHT] = [360, 100];
const SVG = "http://www.w3.org/2000/svg";

const PLOTS = [
  { title: "Time to first token", keys: ["ttft_p50", "ttft_p95"], names: ["median", "95%"], format: duration },
  { title: "Time per token", keys: ["tpot_p50", "tpot_p95"], names: ["median", "95%"], format: duration },
  { title: "Tokens per second", keys: ["tokens_per_second"], names: [""], format: number },
];
const samples = [];

export function clearSamples() {
  samples.length = 0;
  for (const plot of PLOTS) plot.drawn = false;
}

export function addSamples(added) {
  samples.push(...added);
  samples.splice(0, Math.max(samples.length - NUM_SAMPLES, 0));
  for (const plot of PLOTS) {
    if (plot.drawn && !added.length) continue;
    plot.drawn = true;
    draw(plot);
  }
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// Return the path of a series; the path has a gap at samples without a value.
function path(key, top) {
  const first = NUM_SAMPLES - samples.length;
  let pen = "M";
  let drawn = "";
  samples.forEach((sample, index) => {
    if (sample[key] == null) {
      pen = "M";
      return;
    }
    const x = ((first + index) * WIDTH) / (NUM_SAMPLES - 1);
    const y = HEIGHT - (sample[key] / top) * (HEIGHT - 4) - 2;
    drawn += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (pen === "M") drawn += `h1`;
    pen = "L";
  });
  return drawn;
}

function draw(plot) {
  if (!plot.figure) {
    plot.values = el("span");
    plot.axis = el("span");
    plot.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    plot.figure = el(
      "figure",
      {},
      el("figcaption", {}, el("strong", { textContent: plot.title }), plot.values),
      plot.svg,
      el("div", { className: "axis", "aria-hidden": "true" }, "15 min ago", plot.axis, "now"),
    );
    byId("plots").append(plot.figure);
  }
  const values = plot.keys.flatMap((key) => samples.map((sample) => sample[key] ?? 0));
  const top = Math.max(...values, 0) || 1;
  const last = samples.at(-1);
  const now = plot.keys.map((key, index) => `${plot.names[index]} ${last ? plot.format(last[key]) : "–"}`.trim());
  plot.values.textContent = now.join(", ");
  plot.axis.textContent = values.some(Boolean) ? `top ${plot.format(top)}` : "nothing measured yet";
  plot.svg.setAttribute(
    "aria-label",
    `${plot.title} over 15 minutes: now ${now.join(", ")}; highest ${plot.format(top)}`,
  );
  const grid = [0.25, 0.5, 0.75].map((share) =>
    shape("line", { class: "grid", x1: 0, x2: WIDTH, y1: share * HEIGHT, y2: share * HEIGHT }),
  );
  const series = plot.keys.map((key, index) =>
    shape("path", { class: index ? "line second" : "line", d: path(key, top) }),
  );
  plot.svg.replaceChildren(...grid, ...series);
}
