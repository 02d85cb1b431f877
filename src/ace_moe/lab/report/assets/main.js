// Order of the page, theme, and what is redrawn when the window changes.
function chosenTheme() {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

document.documentElement.dataset.theme = chosenTheme();
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  redrawAll();
});

document.getElementById("main").append(el("h1", {}, data.title), el("p", { class: "lead" }, data.lead));
data.compare.forEach((results) => { drawCompare(results); drawMaps(results); });
data.thresholds.forEach(drawThresholds);
data.eval.forEach(drawTasks);
data.simulate.forEach(drawReads);
data.bench.forEach(drawSpeed);
document.getElementById("main").append(el("footer", {}, data.notes.map((note) => el("p", {}, note)),
  data.commands.map((command) => el("p", {}, el("code", {}, command)))));

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redrawAll(); } });
