// Material loads pages without reloading the browser, so formulas are typeset after each of them.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]], processEscapes: true },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
document$.subscribe(() => MathJax.typesetPromise && MathJax.typesetPromise());
