// Results of `ace study thresholds` and `ace eval`.
const stem = (name) => name.replace(/\.[a-z]+$/, "");

function drawThresholds(study) {
  const budgets = study.budgets, own = study.workloads, names = [...new Set(own.map((r) => r.workload))];
  const state = { budget: budgets.reduce((a, b) => (Math.abs(b - 0.5) < Math.abs(a - 0.5) ? b : a)) };
  const threshold = (name, budget) => own.find((r) => r.workload === name && r.budget === budget);
  const carried = (from, to, budget) => study.transfers.find((r) => r.from === from && r.to === to && r.budget === budget);

  section("thresholds", "Do thresholds travel?",
    "Each workload's own threshold by budget, then the ratio realised when the threshold of the row is carried to the workload " +
    "of the column: the difference to the budget in points.", () => [
      table(["workload", ...budgets.map((b) => percent(b))], names.map((name) => el("tr", {}, el("td", {}, stem(name)),
        budgets.map((b) => el("td", {}, threshold(name, b)?.threshold.toFixed(6) ?? "–"))))),
      el("p"), el("div", { class: "controls" }, segments("budget", budgets, state, "budget", (b) => percent(b))),
      table(["from ↓ to →", ...names.map(stem)], names.map((from) => el("tr", {}, el("td", {}, stem(from)), names.map((to) => {
        const found = from === to ? threshold(from, state.budget) : carried(from, to, state.budget);
        return found ? transferCell(found.realised, state.budget, `${stem(from)} → ${stem(to)}`) : el("td", {}, "–");
      })))),
    ]);
  section("cost", "What finding thresholds costs",
    "Passes of the model over the text to map all budgets, and how far the realised ratio ends from the request at worst.", () =>
      table(["way", "passes", "seconds", "worst miss"], study.cost.map((r) => el("tr", {}, el("td", {}, r.way),
        el("td", {}, r.passes), el("td", {}, r.seconds.toFixed(1)), el("td", {}, `${(100 * r.worst).toFixed(2)} points`)))));
}

function transferCell(realised, budget, name) {
  const points = 100 * (realised - budget), strength = Math.min(0.85, Math.abs(points) / 6);
  return el("td", { class: "heat", style: `background: rgba(var(${points >= 0 ? "--warm" : "--cold"}), ${strength.toFixed(3)})`,
    "data-tip": `${name}\nrequested ${percent(budget)}, realised ${percent(realised, 2)}` }, signed(points / 100).replace("\u00a0%", ""));
}

function drawTasks(evaluation) {
  const skips = [...new Set(evaluation.cells.map((c) => c.skip))].sort((a, b) => a - b), tasks = [...new Set(evaluation.cells.map((c) => c.task))];
  const find = (task, skip) => evaluation.cells.find((c) => c.task === task && c.skip === skip);
  const text = (c) => `${c.task} at ${percent(c.skip)}\n${c.metric} ${percent(c.value, 2)} (${percent(c.interval[0], 1)} – ${percent(c.interval[1], 1)}), ${c.questions.length} questions` +
    (c.change ? `\nagainst unskipped ${signed(c.change.value, 2)} (${signed(c.change.low, 2)} … ${signed(c.change.high, 2)})` : "") +
    `\nrealised ${percent(c.realised, 2)}`;
  section("tasks", "Tasks", `Accuracy of ${evaluation.settings} by task and budget. Point at a cell for its interval and the paired difference to the unskipped model.`, () =>
    table(["task", ...skips.map((s) => (s ? percent(s) : "unskipped"))], tasks.map((task) => el("tr", {}, el("td", {}, task), skips.map((skip) => {
      const c = find(task, skip);
      return c ? el("td", { "data-tip": text(c) }, (100 * c.value).toFixed(2)) : el("td", {}, "–");
    })))));
}
