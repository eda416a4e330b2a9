"use strict";
element("h2", {}, main, "What each method does with these tokens");
addTable(element("div", { class: "card" }, main), data.headers, data.rows);
if (data.charts.length) {
  element("h2", {}, main, "Thresholds");
  for (const text of data.recommendations) element("p", { style: "white-space:pre-line" }, main, text);
  const grid = element("div", { class: "grid" }, main);
  for (const chart of data.charts) addChart(grid, chart);
}
if (data.findings.length) element("h2", {}, main, "Findings");
addFindings(main, data.findings);
finish();
