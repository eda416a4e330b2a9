"use strict";

function tiles() {
  const host = element("div", { class: "tiles" }, main);
  for (const tile of data.tiles) {
    const box = element("div", { class: "tile" }, host);
    element("b", {}, box, typeof tile.value === "number" ? shown(tile.value) : tile.value);
    element("span", {}, box, tile.label);
  }
}

function toolbar() {
  const bar = element("div", { class: "toolbar" }, main);
  data.runs.forEach((run) => {
    const chip = element("button", { type: "button", class: "chip", "aria-pressed": "true", title: run.path }, bar);
    element("i", { style: `background:var(--${run.color})` }, chip);
    chip.append(run.name);
    chip.addEventListener("click", () => {
      if (!state.hidden.delete(run.id)) state.hidden.add(run.id);
      chip.setAttribute("aria-pressed", String(!state.hidden.has(run.id)));
      redraw();
    });
  });
  const label = element("label", {}, bar, "smoothing");
  const slider = element("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0 }, label);
  slider.addEventListener("input", () => { state.smoothing = Number(slider.value); redraw(); });
}

function findings() {
  element("h2", {}, main, "Findings");
  if (!data.findings.length) {
    element("p", { class: "soft" }, main, data.checked ? "The mismatch detectors found nothing." : "No findings were recorded.");
    return;
  }
  addFindings(main, data.findings);
}

function sampleTable() {
  element("h2", {}, main, "Samples");
  const bar = element("div", { class: "toolbar" }, main);
  const label = element("label", {}, bar, "search");
  const box = element("input", { type: "search", placeholder: "text, best, worst, truncated" }, label);
  const count = element("span", { class: "soft" }, bar);
  const rows = data.samples.map((sample) => {
    const parts = Object.entries(sample.rewards || {}).map(([name, value]) => `${name} ${shown(value)}`);
    const kind = sample.kind + (sample.truncated ? ", truncated" : "");
    const row = [sample.step, kind, sample.reward, parts.join(", "), sample.tokens, sample.prompt, sample.response];
    return data.runs.length > 1 ? [sample.run, ...row] : row;
  });
  const names = ["step", "sample", "reward", "parts", "tokens", "prompt", "response"];
  const titles = data.runs.length > 1 ? ["run", ...names] : names;
  const host = element("div", { class: "samples" }, main);
  addTable(host, titles, rows, [titles.length - 2, titles.length - 1]);
  const lines = [...host.querySelectorAll("tbody tr")];
  const search = () => {
    const wanted = box.value.toLowerCase();
    let found = 0;
    lines.forEach((line, i) => {
      const hit = rows[i].join("\n").toLowerCase().includes(wanted);
      line.hidden = !hit;
      found += hit;
    });
    count.textContent = `${found} of ${rows.length} samples`;
  };
  box.addEventListener("input", search);
  search();
}

const headers = ["setting", ...data.runs.map((run) => run.name)];

function differences() {
  element("h2", {}, main, "Settings that differ");
  if (data.different.length) addTable(main, headers, data.different, headers.map((_, i) => i));
  else element("p", { class: "soft" }, main, "The runs have the same settings.");
}

function settings() {
  element("h2", {}, main, "Settings");
  const details = element("details", {}, main);
  element("summary", {}, details, `all ${data.settings.length} settings`);
  addTable(details, headers, data.settings, headers.map((_, i) => i));
}

tiles();
toolbar();
if (data.runs.length > 1) differences();
const grave = data.findings.some((item) => item.severity === "error");
if (grave) findings();
const grid = element("div", { class: "grid" }, main);
for (const chart of data.charts) addChart(grid, chart);
if (data.slices.length) {
  element("h2", {}, main, "Where the mismatch sits (mean of the last steps)");
  const slices = element("div", { class: "grid" }, main);
  for (const chart of data.slices) addChart(slices, chart);
}
if (data.other.length) {
  element("h2", {}, main, "Other metrics");
  const others = element("div", { class: "grid" }, main);
  for (const chart of data.other) addChart(others, chart);
}
if (!grave) findings();
if (data.samples.length) sampleTable();
settings();
finish();
