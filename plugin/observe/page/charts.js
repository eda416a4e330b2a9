"use strict";
/* Line charts as inline SVG. A chart is {title, note, log, series, bands, marks, xLabels}:
   series: [{run, label, color, dash, dots, x: [...], y: [...]}], bands: [{run, color, opacity, x, low, high}],
   marks: [{y}] horizontal reference lines, points: [{x, label}] vertical lines with a name, xLabels: names of the x values of a categorical axis. */

const SVG = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
const state = { hidden: new Set(), smoothing: 0, charts: [] };

function element(name, attributes, parent, text) {
  const svg = ["svg", "path", "line", "text", "circle", "g", "rect"].includes(name);
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  return String(Number(value.toPrecision(4)));
}

function smooth(values, weight) {
  if (!weight) return values;
  let average = null, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    average = weight * (average || 0) + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return average / norm;
  });
}

function linearTicks(low, high, wanted) {
  const raw = (high - low) / wanted, power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) ticks.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return ticks;
}

function logTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const inside = (ticks) => ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  const powers = [];
  for (let p = first; p <= last; p += 1) powers.push(Math.pow(10, p));
  const decades = inside(powers);
  if (decades.length > 3) return decades.filter((_, i) => i % Math.ceil(decades.length / 5) === 0);
  const finer = inside(powers.flatMap((p) => [p, 2 * p, 5 * p]));
  return finer.length > 2 ? finer : linearTicks(low, high, 5).filter((t) => t > 0);
}

function visible(items) { return (items || []).filter((item) => item.run === undefined || !state.hidden.has(item.run)); }

function yRange(chart, series, bands, log) {
  let values = [];
  for (const s of series) values = values.concat(s.drawn);
  for (const b of bands) values = values.concat(b.low, b.high);
  values = values.filter((v) => v !== null && Number.isFinite(v) && (!log || v > 0));
  if (!values.length) return null;
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  for (const mark of chart.marks || []) if (!log || mark.y > 0) { low = Math.min(low, mark.y); high = Math.max(high, mark.y); }
  if (log) {
    const pad = low === high ? 1.25 : Math.pow(high / low, 0.06);
    return [low / pad, high * pad];
  }
  if (chart.floor != null) low = Math.min(low, chart.floor);
  if (chart.ceiling != null) high = Math.max(high, chart.ceiling);
  const pad = low === high ? Math.max(Math.abs(low) * 0.1, 0.05) : (high - low) * 0.06;
  return [chart.floor != null && low >= chart.floor ? low : low - pad, high + pad];
}

function path(xs, ys, X, Y) {
  let d = "", pen = false;
  xs.forEach((x, i) => {
    const y = ys[i], fine = y !== null && Number.isFinite(Y(y));
    if (fine) d += (pen ? "L" : "M") + X(x).toFixed(1) + " " + Y(y).toFixed(1);
    pen = fine;
  });
  return d;
}

function draw(entry) {
  const { chart, host } = entry;
  host.replaceChildren();
  const series = visible(chart.series).map((s) => ({ ...s, drawn: chart.xLabels ? s.y : smooth(s.y, state.smoothing) }));
  const bands = visible(chart.bands), log = entry.log;
  const range = yRange(chart, series, bands, log);
  if (!range) {
    element("div", { class: "empty" }, host, chart.series.some((s) => s.y.some((v) => v !== null)) ? "Nothing to draw: hidden, or not positive on a log axis" : chart.missing || "Not recorded in this run");
    return;
  }
  const width = Math.max(host.clientWidth, 240), height = 210, left = 52, right = 12, top = 8, bottom = 24;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title, "data-plot": chart.id }, host);
  let xs = [];
  for (const s of [...series, ...bands]) xs = xs.concat(s.x);
  let x0 = xs.reduce((a, b) => Math.min(a, b)), x1 = xs.reduce((a, b) => Math.max(a, b));
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  const f = log ? Math.log : (v) => v;
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => (log && y <= 0 ? NaN : top + (1 - (f(y) - f(range[0])) / (f(range[1]) - f(range[0]))) * (height - top - bottom));
  let label = null; // values that differ in further digits alone are labeled once
  for (const tick of log ? logTicks(range[0], range[1]) : linearTicks(range[0], range[1], 5)) {
    element("line", { class: "gridline", x1: left, x2: width - right, y1: Y(tick), y2: Y(tick) }, svg);
    if (shown(tick) !== label) element("text", { class: "tick", x: left - 7, y: Y(tick) + 4, "text-anchor": "end" }, svg, shown(tick));
    label = shown(tick);
  }
  drawXAxis(svg, chart, x0, x1, X, width, height, left, right, bottom);
  for (const mark of chart.marks || []) element("line", { class: "zero", x1: left, x2: width - right, y1: Y(mark.y), y2: Y(mark.y) }, svg);
  for (const point of chart.points || []) {
    const after = X(point.x) < width / 2;
    element("line", { class: "point", x1: X(point.x), x2: X(point.x), y1: top, y2: height - bottom }, svg);
    element("text", { class: "point", x: X(point.x) + (after ? 6 : -6), y: top + 10, "text-anchor": after ? "start" : "end" }, svg, point.label);
  }
  for (const band of bands) {
    const back = band.x.slice().reverse(), low = band.low.slice().reverse();
    const d = path(band.x, band.high, X, Y) + path(back, low, X, Y).replace(/^M/, "L") + "Z";
    if (!d.includes("NaN") && d.length > 3) element("path", { d, fill: `var(--${band.color})`, opacity: band.opacity, stroke: "none" }, svg);
  }
  for (const s of series) {
    if (state.smoothing && !chart.xLabels) element("path", { d: path(s.x, s.y, X, Y), fill: "none", stroke: `var(--${s.color})`, "stroke-width": 1, opacity: 0.22 }, svg);
    element("path", { class: "line", d: path(s.x, s.drawn, X, Y), fill: "none", stroke: `var(--${s.color})`, "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-dasharray": s.dash || "none" }, svg);
    if (s.dots || s.x.length < 3) s.x.forEach((x, i) => { if (s.drawn[i] !== null && Number.isFinite(Y(s.drawn[i]))) element("circle", { cx: X(x), cy: Y(s.drawn[i]), r: 3, fill: `var(--${s.color})` }, svg); });
  }
  hover(entry, svg, series, X, Y, x0, x1, left, width, right, top, height, bottom);
}

function drawXAxis(svg, chart, x0, x1, X, width, height, left, right, bottom) {
  const base = height - bottom;
  element("line", { class: "axis", x1: left, x2: width - right, y1: base, y2: base }, svg);
  if (!chart.xLabels) {
    for (const tick of linearTicks(x0, x1, Math.max(2, Math.floor(width / 110)))) {
      if (tick >= x0 && tick <= x1) element("text", { class: "tick", x: X(tick), y: base + 16, "text-anchor": "middle" }, svg, shown(tick));
    }
    return;
  }
  const shownEvery = Math.ceil(chart.xLabels.length / Math.floor((width - left) / 62));
  chart.xLabels.forEach((label, i) => {
    if (i % shownEvery === 0) element("text", { class: "tick", x: X(i), y: base + 16, "text-anchor": "middle" }, svg, label);
  });
}

function hover(entry, svg, series, X, Y, x0, x1, left, width, right, top, height, bottom) {
  const cursor = element("line", { class: "axis", y1: top, y2: height - bottom, visibility: "hidden" }, svg);
  const tip = entry.tip;
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; cursor.setAttribute("visibility", "hidden"); });
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) * (width / box.width) - left) / (width - left - right) * (x1 - x0);
    const rows = [];
    let at = null;
    for (const s of series) {
      let best = -1;
      s.x.forEach((value, i) => { if (s.y[i] !== null && (best < 0 || Math.abs(value - x) < Math.abs(s.x[best] - x))) best = i; });
      if (best < 0) continue;
      if (at === null || Math.abs(s.x[best] - x) < Math.abs(at - x)) at = s.x[best];
      rows.push([s, best]);
    }
    if (at === null) return;
    tip.replaceChildren();
    element("b", {}, tip, entry.chart.xLabels ? entry.chart.xLabels[at] : `${entry.chart.xName || "step"} ${shown(at)}`);
    for (const [s, i] of rows) {
      if (s.x[i] !== at) continue;
      const row = element("div", {}, tip);
      element("i", { style: `background:var(--${s.color})` }, row);
      row.append(`${s.label}: ${shown(s.y[i])}`);
    }
    cursor.setAttribute("x1", X(at)); cursor.setAttribute("x2", X(at)); cursor.setAttribute("visibility", "visible");
    tip.style.display = "block";
    const card = entry.card.getBoundingClientRect();
    const offset = event.clientX - card.left + 14;
    tip.style.left = Math.min(offset, card.width - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.max(event.clientY - card.top - tip.offsetHeight - 10, 4) + "px";
  });
}

function addChart(parent, chart) {
  const card = element("section", { class: "card" }, parent);
  const heading = element("h3", {}, card);
  element("span", {}, heading, chart.title);
  const button = element("button", { type: "button", "aria-pressed": String(!!chart.log), title: "logarithmic axis" }, heading, "log");
  element("p", {}, card, chart.note || "");
  const host = element("div", {}, card);
  const entry = { chart, card, host, log: !!chart.log, tip: element("div", { class: "tip" }, card) };
  button.addEventListener("click", () => { entry.log = !entry.log; button.setAttribute("aria-pressed", String(entry.log)); draw(entry); });
  const key = element("div", { class: "key" }, card), seen = new Set();
  for (const s of chart.series) {
    const label = s.kind || "";
    if (!label || seen.has(label) || !s.y.some((v) => v !== null)) continue;
    seen.add(label);
    const item = element("span", {}, key);
    const line = element("svg", { viewBox: "0 0 22 8" }, item);
    element("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: `var(--${chart.keyColors ? s.color : "soft"})`, "stroke-width": 2, "stroke-dasharray": s.dash || "none" }, line);
    item.append(label);
  }
  state.charts.push(entry);
  draw(entry);
}

/* What every page ends with; data-drawn says how many plots there are. */
function finish() {
  if (data.problems.length) {
    element("h2", {}, main, "What could not be read");
    const list = element("ul", { class: "soft" }, main);
    for (const problem of data.problems) element("li", {}, list, problem);
  }
  element("footer", {}, main, data.footer);
  document.documentElement.dataset.drawn = String(document.querySelectorAll("svg[data-plot]").length);
}

function redraw() { for (const entry of state.charts) draw(entry); }

function themeButton() {
  const button = element("button", { type: "button" }, document.querySelector("header"), "light / dark");
  button.addEventListener("click", () => {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
  });
}

function addTable(parent, headers, rows, textColumns) {
  const table = element("table", {}, element("div", { class: "scroll" }, parent));
  const head = element("tr", {}, element("thead", {}, table));
  const kind = (i) => ((textColumns || []).includes(i) ? { class: "text" } : {});
  headers.forEach((header, i) => element("th", kind(i), head, header));
  const body = element("tbody", {}, table);
  for (const row of rows) {
    const line = element("tr", {}, body);
    row.forEach((cell, i) => element("td", kind(i), line, cell === null ? "–" : typeof cell === "number" ? shown(cell) : String(cell)));
  }
}

function addFindings(parent, findings) {
  for (const item of findings) {
    const box = element("div", { class: `finding ${item.severity}` }, parent);
    element("b", {}, box, item.title);
    element("span", { class: "soft" }, box, item.where);
    const list = element("dl", {}, box);
    for (const [name, text] of [["evidence", item.evidence], ["likely cause", item.likely_cause], ["what to try", item.what_to_try]]) {
      element("dt", {}, list, name);
      element("dd", {}, list, text);
    }
  }
}

themeButton();
let resizing = 0;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(redraw, 120); });
