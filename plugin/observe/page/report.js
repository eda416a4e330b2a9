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

function settings() {
  element("h2", {}, main, data.runs.length > 1 ? "Settings that differ" : "Settings");
  const headers = ["setting", ...data.runs.map((run) => run.name)];
  if (data.different.length) addTable(main, headers, data.different, headers.map((_, i) => i));
  else if (data.runs.length > 1) element("p", { class: "soft" }, main, "The runs have the same settings.");
  const details = element("details", {}, main);
  element("summary", {}, details, `all ${data.settings.length} settings`);
  addTable(details, headers, data.settings, headers.map((_, i) => i));
}

tiles();
toolbar();
const grid = element("div", { class: "grid" }, main);
for (const chart of data.charts) addChart(grid, chart);
if (data.slices.length) {
  element("h2", {}, main, "Where the mismatch sits (mean of the last steps)");
  const slices = element("div", { class: "grid" }, main);
  for (const chart of data.slices) addChart(slices, chart);
}
findings();
settings();
finish();
