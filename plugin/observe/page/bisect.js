"use strict";
const box = element("div", { class: `finding ${data.finding.severity}` }, main);
element("b", {}, box, data.finding.title);
const list = element("dl", {}, box);
element("dt", {}, list, "likely cause");
element("dd", {}, list, data.finding.cause);
element("h2", {}, main, "By layer");
const grid = element("div", { class: "grid" }, main);
for (const chart of data.charts) addChart(grid, chart);
for (const item of data.tables) {
  element("h2", {}, main, item.title);
  addTable(element("div", { class: "card" }, main), item.headers, item.rows);
}
finish();
