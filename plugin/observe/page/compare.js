"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.querySelector("main");
themeButton(document.querySelector("header"));
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
if (data.problems.length) {
  element("h2", {}, main, "What could not be read");
  const list = element("ul", { class: "soft" }, main);
  for (const problem of data.problems) element("li", {}, list, problem);
}
element("footer", {}, main, data.footer);
document.documentElement.dataset.drawn = String(document.querySelectorAll("svg[data-plot]").length);
