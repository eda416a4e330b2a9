"use strict";
const PARTS = ["parameters", "gradients", "main_parameters", "optimizer", "activations", "logits", "other"];
const COLOR = (i) => `var(--c${i % 8})`;
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (bytes >= 1024 && i < 4) { bytes /= 1024; i += 1; }
  return `${i ? bytes.toFixed(bytes < 10 ? 2 : 1) : bytes} ${units[i]}`;
}
function tile(parent, value, label, color) {
  const box = element("div", { class: "tile" }, parent);
  element("b", color ? { style: `color:${color}` } : {}, box, value);
  element("span", {}, box, label);
}
function tooltip(node, text) {
  node.appendChild(document.createElementNS(SVG, "title")).textContent = text;
}
const memory = data.gpu ? data.gpu.memory_bytes : 0;
const largest = Math.max(memory, ...data.ranks.map((rank) => rank.peak_bytes));
const tiles = element("div", { class: "tiles" }, main);
if (data.gpu) tile(tiles, data.fits ? "fits" : "does not fit", data.gpu.name, data.fits ? "var(--good)" : "var(--bad)");
tile(tiles, size(Math.max(...data.ranks.map((rank) => rank.peak_bytes))), "fullest rank at its peak");
if (data.time) {
  tile(tiles, `${data.time.step_seconds.toPrecision(3)} s`, "step (estimate)");
  tile(tiles, `${(100 * data.time.bubble).toFixed(1)} %`, "pipeline bubble");
}
tile(tiles, String(data.batch.microbatches), "microbatches per rank");
tile(tiles, size(data.weight_sync.bytes), `weight sync: ${data.weight_sync.transport}`);

element("h2", {}, main, "Memory of every kind of rank");
const card = element("div", { class: "card" }, main);
const key = element("div", { class: "key" }, card);
PARTS.forEach((part, i) => {
  const item = element("span", {}, key);
  element("i", { style: `display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px;background:${COLOR(i)}` }, item);
  item.append(part.replace("_", " "));
});
// What a stage holds, and on a line of its own the size of its optimizer shard, where these differ.
const LABELS = data.ranks.map((rank) => rank.kind.split(": ")[1].split(/, (?=optimizer shard)/));
const ROW = 34 + 14 * Math.max(...LABELS.map((lines) => lines.length)), LEFT = 250, RIGHT = 130, WIDTH = 1240;
const bars = element("svg", { viewBox: `0 0 ${WIDTH} ${ROW * data.ranks.length + 24}`, style: "height:auto", role: "img", "data-plot": "memory",
  "aria-label": "memory by part, one bar per kind of rank" }, card);
const X = (bytes) => LEFT + (bytes / largest) * (WIDTH - LEFT - RIGHT);
data.ranks.forEach((rank, row) => {
  const y = row * ROW + 8;
  const stage = rank.kind.split(": ")[0];
  element("text", { x: 0, y: y + 13, fill: "var(--ink)", "font-size": 14, "font-weight": 600 }, bars, `${stage} × ${rank.count} ranks`);
  LABELS[row].forEach((line, i) => element("text", { x: 0, y: y + 30 + 14 * i, fill: "var(--soft)", "font-size": 12 }, bars, line));
  let from = 0;
  PARTS.forEach((part, i) => {
    const bytes = rank.bytes[part];
    if (!bytes) return;
    const bar = element("rect", { x: X(from), y: y, width: Math.max(0.5, X(from + bytes) - X(from)), height: 26, fill: COLOR(i) }, bars);
    tooltip(bar, `${part.replace("_", " ")}: ${size(bytes)}`);
    from += bytes;
  });
  element("text", { x: X(from) + 8, y: y + 18, fill: "var(--ink)", "font-size": 13 }, bars, size(rank.peak_bytes));
});
if (memory) {
  const bottom = ROW * data.ranks.length + 4;
  element("line", { x1: X(memory), x2: X(memory), y1: 0, y2: bottom, stroke: "var(--bad)", "stroke-dasharray": "5 3", "stroke-width": 1.5 }, bars);
  element("text", { x: X(memory), y: bottom + 15, fill: "var(--bad)", "font-size": 12, "text-anchor": "middle" }, bars, `${data.gpu.name}: ${size(memory)}`);
}
for (const advice of data.advice)
  element("p", {}, card, `${advice.flags}: ${size(advice.peak_bytes)}${advice.fits ? ", fits" : ""}`);

if (data.timeline) {
  element("h2", {}, main, "Timeline of a step (estimate)");
  const box = element("div", { class: "card" }, main);
  element("div", { class: "soft" }, box, "Forward passes blue, backward passes purple, one after the other by microbatch; the first ones of the step. Gaps are the pipeline bubble.");
  const height = 30, end = Math.max(...data.timeline.map((row) => row.length ? row[row.length - 1].start + row[row.length - 1].length : 0));
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${height * data.timeline.length + 22}`, style: "height:auto", role: "img", "data-plot": "timeline", "aria-label": "timeline by pipeline stage" }, box);
  const T = (seconds) => 70 + (seconds / end) * (WIDTH - 80);
  data.timeline.forEach((row, stage) => {
    element("text", { x: 0, y: stage * height + 18, fill: "var(--soft)", "font-size": 12 }, svg, `stage ${stage}`);
    for (const pass of row) {
      const bar = element("rect", { x: T(pass.start), y: stage * height + 3, width: Math.max(0.5, T(pass.start + pass.length) - T(pass.start) - 0.7),
        height: height - 8, rx: 2, fill: COLOR(pass.kind === "F" ? 0 : 4), opacity: pass.kind === "F" ? 0.55 : 1 }, svg);
      tooltip(bar, `${pass.kind === "F" ? "forward" : "backward"} of microbatch ${pass.number}, ${pass.length.toPrecision(3)} s`);
    }
  });
  element("text", { x: 70, y: height * data.timeline.length + 16, fill: "var(--soft)", "font-size": 12 }, svg, "0 s");
  element("text", { x: WIDTH - 10, y: height * data.timeline.length + 16, fill: "var(--soft)", "font-size": 12, "text-anchor": "end" }, svg, `${end.toPrecision(3)} s`);
}

element("h2", {}, main, "Bytes");
const table = element("div", { class: "card scroll" }, main);
addTable(table, ["kind of rank", "ranks", ...PARTS.map((part) => part.replace("_", " ")), "peak"],
  data.ranks.map((rank) => [rank.kind, rank.count, ...PARTS.map((part) => size(rank.bytes[part])), size(rank.peak_bytes)]));
element("h2", {}, main, "Messages of a step");
const traffic = element("div", { class: "card scroll" }, main);
addTable(traffic, ["kind of rank", "group", "operation", "count", "input bytes of a rank"],
  data.collectives.map((entry) => [entry.kind, entry.group, entry.operation, entry.count, size(entry.bytes)]), [1, 2]);
element("h2", {}, main, "Formulas and assumptions");
const list = element("ul", { class: "soft" }, main);
for (const line of data.formulas) element("li", {}, list, line);
finish();
