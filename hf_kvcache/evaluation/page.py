"""The parts of report.html that are the same for every report."""

STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #777; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.failed { color: #c00; font-weight: 600; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.85rem; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.note { color: var(--dim); max-width: 60rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
.chart { flex: 1 1 32rem; max-width: 44rem; }
.chart text { fill: currentColor; } .title { font-size: 15px; text-anchor: middle; } .tick { font-size: 12px; }
.middle { text-anchor: middle; } .end { text-anchor: end; }
.grid { stroke: var(--line); } .frame { fill: none; stroke: var(--dim); }
.hidden-dot { opacity: 0; } .hidden-dot:hover { opacity: 1; }
.legend { cursor: pointer; } .legend[aria-pressed=false] { opacity: 0.35; } .off { display: none; }
.heat td { text-align: center; } .heat td.value { min-width: 3.5rem; }
#tip { position: fixed; display: none; padding: 0.3rem 0.5rem; background: #222; color: #fff; font-size: 0.8rem;
  border-radius: 4px; pointer-events: none; max-width: 24rem; }
"""

SCRIPT = """
"use strict";
function key(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace(/,/g, ""));
  return Number.isNaN(number) ? text : number;
}
function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "number") return -1;
  if (typeof b === "number") return 1;
  return a.localeCompare(b);
}
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => (down ? -1 : 1) * compare(key(a, column), key(b, column)));
    table.tBodies[0].append(...rows);
  }));
}
const tip = document.getElementById("tip");
for (const mark of document.querySelectorAll("[data-tip]")) {
  mark.addEventListener("pointermove", (event) => {
    tip.textContent = mark.dataset.tip;
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 12, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 12 + "px";
  });
  mark.addEventListener("pointerleave", () => { tip.style.display = "none"; });
}
for (const legend of document.querySelectorAll(".legend")) {
  const toggle = () => {
    const shown = legend.getAttribute("aria-pressed") === "true";
    legend.setAttribute("aria-pressed", String(!shown));
    const series = legend.ownerSVGElement.querySelector('.series[data-series="' + legend.dataset.series + '"]');
    series.classList.toggle("off", shown);
  };
  legend.addEventListener("click", toggle);
  legend.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); toggle(); }
  });
}
"""
