// Results of `ace compare`: curves, the main table, differences against a rival, layers.
function drawCompare(results) {
  const { methods, budgets, gains } = results.grid;
  const dense = results.dense, references = new Set(results.references);
  const at = new Map(results.cells.map((cell) => [`${cell.method}|${cell.gain}|${cell.budget}`, cell]));
  const cell = (method, gain, budget) => at.get(`${method}|${gain}|${budget}`);
  const used = methods.filter((method) => results.cells.some((c) => c.method === method));
  const middle = budgets.reduce((a, b) => (Math.abs(b - 0.5) < Math.abs(a - 0.5) ? b : a));
  const start = gains.includes("power") ? "power" : gains[gains.length - 1]; // the default gain
  const faithful = results.cells.some((c) => c.kl); // results of earlier releases know perplexity alone
  const judge = (c) => (c ? (faithful ? c.kl?.value ?? 1e9 : c.perplexity) : 1e9);
  const measures = [...(faithful ? ["KL"] : []), "perplexity", "change"];
  const ranked = [...used].sort((a, b) => judge(cell(a, start, middle)) - judge(cell(b, start, middle)));
  const index = (method) => ranked.indexOf(method); // colours go to the best first: those are looked at
  const best = ranked.slice(0, 6).concat(["ace", "share"].filter((m) => index(m) >= 6));
  const state = { gain: start, measure: faithful ? "KL" : "change", shows: measures[0], budget: middle, shown: new Set(best) };

  cards();
  if (results.advice) section("advice", "What to use", results.advice.words, () => el("pre", {}, results.advice.commands.join("\n")));
  section("quality", "Quality against budget",
    "How far each method moves the model as more expert slots are skipped. KL, in nats a token, is the distance of its predictions " +
    "from the unskipped model's; perplexity can fall when a model only gets blunter. Bands are 95\u00a0% intervals over windows, " +
    "paired for the change of perplexity; KL has one from 8 windows on. Point at a dot for its numbers.", drawCurves);
  section("main-table", "Main table",
    "By method and budget, nearest to the unskipped model first, the best of each column in colour. A star marks a realised ratio more than half a point off the " +
    "budget; point at a cell to see it. Methods in italics run every expert to know its output: they save nothing and show " +
    "what a perfect score could reach. A click on a heading sorts by it; the CSV has every gain and measure.", drawTable, everyCell);
  if (data.rivals.length) section("rival", `Against ${data.rivals[0].rival}`,
    `Change of ${faithful ? "KL" : "perplexity"} against this method at the same budget and gain, on the same windows, with 95\u00a0% intervals. ` +
    "Left of the line is better.", drawRival);
  section("layers", "Where slots are skipped",
    "Realised ratio by layer: one threshold for all layers spends the budget where contributions are small.", drawLayers);

  function cards() {
    const best = (budget) => results.cells.filter((c) => c.budget === budget && !references.has(c.method))
      .reduce((a, c) => (!a || judge(c) < judge(a) ? c : a), null);
    const chosen = [budgets[0], middle, budgets[budgets.length - 1]].filter((b, i, all) => all.indexOf(b) === i);
    const made = chosen.map(best).filter(Boolean).map((c) => card(faithful ? c.kl.value.toFixed(3) : signed(c.change.value),
      `${faithful ? "least KL" : "best"} at ${percent(c.budget)}: ${c.method}, gain ${c.gain}`));
    document.getElementById("main").append(el("div", { class: "cards" },
      card(number(dense.perplexity), "perplexity unskipped"), made));
  }

  function card(value, text) {
    return el("div", { class: "card" }, el("b", {}, value), el("span", {}, text));
  }

  function describe(c) {
    const bounds = (low, high, show) => (low === null ? "(no interval)" : `(${show(low)} … ${show(high)})`);
    const fine = (x) => x.toFixed(4), share = (x) => percent(x, 1), two = (x) => signed(x, 2);
    const kl = c.kl ? `KL ${fine(c.kl.value)} ${bounds(c.kl.low, c.kl.high, fine)}\n` +
      `same top token ${share(c.agreement.value)}, accepted as a draft ${share(c.acceptance.value)}\n` : "";
    return `${c.method} · gain ${c.gain}\nbudget ${percent(c.budget)}, realised ${percent(c.realised, 2)}\n${kl}` +
      `perplexity ${number(c.perplexity)} ${bounds(...c.interval, number)}\n` +
      `change ${two(c.change.value)} ${bounds(c.change.low, c.change.high, two)}`;
  }

  function everyCell() {
    const bounds = (name) => [name, `${name}_low`, `${name}_high`], of = (found) => [found?.value, found?.low, found?.high];
    return [["method", "gain", "budget", "realised", ...bounds("kl"), "agreement", "acceptance", "perplexity", ...bounds("change")],
      ...results.cells.map((c) => [c.method, c.gain, c.budget, c.realised, ...of(c.kl), c.agreement?.value, c.acceptance?.value, c.perplexity, ...of(c.change)])];
  }

  // ---- curves ----

  function values(c) {
    const around = (value, bounds) => [value, ...bounds.map((x) => x ?? value)]; // no interval: no band
    if (state.measure === "KL") return around(c.kl.value, [c.kl.low, c.kl.high]);
    const paired = [c.change.low, c.change.high].map((x) => (x === null ? null : dense.perplexity * (1 + x)));
    return around(c.perplexity, state.measure === "change" ? paired : c.interval);
  }

  function level(value) {
    return state.measure === "KL" ? value : Math.log(value);
  }

  function base() {
    return state.measure === "KL" ? 0 : dense.perplexity;
  }

  function drawCurves(width) {
    const shown = used.filter((m) => state.shown.has(m));
    const lines = shown.map((m) => ({ method: m, cells: budgets.map((b) => cell(m, state.gain, b)).filter(Boolean) }));
    return [controls("measure"), plot(lines.filter((line) => line.cells.length), width), legend()];
  }

  function controls(key) {
    return el("div", { class: "controls" }, segments("gain", gains, state, "gain"),
      segments("show", measures, state, key));
  }

  function plot(lines, width) {
    const height = Math.max(280, Math.min(480, width * 0.52)), left = 54, bottom = height - 40, right = width - (width > 640 ? 128 : 12);
    const all = lines.flatMap((line) => line.cells.flatMap(values)).concat(base()).map(level);
    const span = [Math.min(...all), Math.max(...all)], pad = 0.04 * (span[1] - span[0]) + 1e-4;
    const y = linear([span[0] - pad, span[1] + pad], [bottom, 12]);
    const x = linear([0, Math.max(...lines.flatMap((l) => l.cells.map((c) => c.realised)), ...budgets)], [left, right]);
    const made = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "distance from the unskipped model against realised ratio" });
    axes(made, x, y, span, { right, left, bottom });
    lines.forEach((line) => made.append(series(line, x, y)));
    if (width > 640) made.append(...names(lines, y, right + 10));
    made.append(el("text", { x: right, y: height - 4, "text-anchor": "end" }, "slots not executed"));
    return made;
  }

  function names(lines, y, x) {
    const placed = lines.map((line) => ({ method: line.method, y: y(level(values(line.cells[line.cells.length - 1])[0])) }))
      .sort((a, b) => b.y - a.y);
    placed.forEach((label, i) => { if (i) label.y = Math.min(label.y, placed[i - 1].y - 14); });
    return placed.map((label) => el("text", { class: "name", x, y: label.y + 4, colour: colour(index(label.method)) }, label.method));
  }

  function axes(made, x, y, span, { right, left, bottom }) {
    for (const b of [0, ...budgets]) made.append(el("text", { x: x(b), y: bottom + 18, "text-anchor": "middle" }, percent(b)));
    for (const tick of ticks(span)) {
      const label = { KL: () => String(tick), change: () => signed(tick / dense.perplexity - 1, 0) }[state.measure] ?? (() => number(tick, tick < 20 ? 1 : 0));
      made.append(el("line", { class: "axis", x1: left, x2: right, y1: y(level(tick)), y2: y(level(tick)) }),
        el("text", { x: left - 8, y: y(level(tick)) + 4, "text-anchor": "end" }, label()));
    }
    const floor = y(level(base()));
    made.append(el("line", { class: "base", x1: left, x2: right, y1: floor, y2: floor }));
  }

  function ticks([low, high]) {
    if (state.measure === "KL") {
      const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5].find((s) => high / s <= 8) ?? 10;
      return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => Number((i * step).toFixed(4)));
    }
    const steps = [0, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 5, 8, 15, 30, 100, 300, 1000];
    const inside = steps.map((s) => dense.perplexity * (1 + s)).filter((t) => Math.log(t) >= low - 0.02 && Math.log(t) <= high);
    const far = 0.07 * (high - low);
    return inside.reduce((kept, t) => (kept.length && Math.log(t / kept[kept.length - 1]) < far ? kept : [...kept, t]), []);
  }

  function series({ method, cells }, x, y) {
    const n = index(method), points = cells.map((c) => [x(c.realised), ...values(c).map((v) => y(level(v)))]);
    const start = [x(0), y(level(base()))];
    const path = [start, ...points].map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)},${py.toFixed(1)}`).join("");
    const edge = [start, ...points.map(([px, , low]) => [px, low]), ...points.map(([px, , , high]) => [px, high]).reverse()];
    const band = edge.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)},${py.toFixed(1)}`).join("") + "Z";
    return el("g", { class: "series", colour: colour(n), "data-method": method },
      el("path", { class: "band", d: band }), el("path", { class: "curve", d: path, "stroke-dasharray": dash(n) }),
      points.map(([px, py], i) => [el("circle", { class: "dot", cx: px, cy: py, r: 3.6 }),
        el("circle", { class: "hit", cx: px, cy: py, r: 11, "data-tip": describe(cells[i]), "data-budget": cells[i].budget })]).flat());
  }

  function legend() {
    const set = (name, methods) => el("button", { class: "chip set", type: "button",
      onclick: () => { state.shown = new Set(methods); redrawAll(); } }, name);
    return el("div", { class: "legend" }, used.map((method) => el("button", {
      class: "chip", type: "button", colour: colour(index(method)), "aria-pressed": String(state.shown.has(method)),
      onclick: () => { state.shown.has(method) ? state.shown.delete(method) : state.shown.add(method); redrawAll(); },
    }, el("i"), method)), used.length > best.length ? [set("best", best), set("all", used)] : []);
  }

  // ---- tables ----

  function drawTable() {
    const usable = used.filter((m) => !references.has(m));
    const shown = { KL: (c) => c.kl?.value.toFixed(4) ?? "–", perplexity: (c) => number(c.perplexity), change: (c) => signed(c.change.value) }[state.shows];
    const least = budgets.map((b) => Math.min(...usable.map((m) => judge(cell(m, state.gain, b)))));
    const row = (method) => el("tr", { "data-method": method, class: references.has(method) ? "reference" : null }, el("td", {}, method), budgets.map((b, i) => {
      const c = cell(method, state.gain, b);
      if (!c) return el("td", {}, "–");
      const kind = [judge(c) === least[i] && !references.has(method) && "best", Math.abs(c.realised - b) > 0.005 && "off"].filter(Boolean).join(" ");
      return el("td", { class: kind || null, "data-tip": describe(c), "data-budget": b }, shown(c));
    }));
    const first = el("tr", { class: "dense" }, el("td", {}, "perplexity unskipped"), budgets.map(() => el("td", {}, number(dense.perplexity))));
    const order = [...used].sort((a, b) => judge(cell(a, state.gain, middle)) - judge(cell(b, state.gain, middle)));
    return [controls("shows"), table(["method", ...budgets.map((b) => percent(b))], [first, ...order.map(row)]), ...refused()];
  }

  function refused() {
    return Object.entries(results.refused || {}).map(([method, { budgets: some, reason }]) => el("p", { class: "note" },
      `${method}${some.length < budgets.length ? ` at ${some.map((b) => percent(b)).join(", ")}` : ""}: ${reason}`));
  }

  function drawRival(width) {
    const rows = data.rivals.filter((r) => r.gain === state.gain && r.budget === state.budget)
      .map((r) => ({ ...r, ...r.kl })).map((r) => ({ ...r, low: r.low ?? r.value, high: r.high ?? r.value })).sort((a, b) => a.value - b.value);
    const height = 26 * rows.length + 34, left = Math.min(width * 0.42, 12 + 6.6 * Math.max(...rows.map((r) => r.method.length), 4));
    const sizes = rows.map((r) => Math.abs(r.value)).sort((a, b) => a - b), reach = Math.max(0.02, 3.5 * (sizes[Math.floor(sizes.length / 2)] || 0));
    const clip = (value) => Math.max(-reach, Math.min(reach, value)); // a hopeless method would squeeze all others
    const bounds = rows.flatMap((r) => [clip(r.low), clip(r.high)]).concat(0);
    const scale = linear([Math.min(...bounds), Math.max(...bounds)], [left + 12, width - 74]), x = (value) => scale(clip(value));
    const made = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "paired differences" },
      el("line", { class: "base", x1: x(0), x2: x(0), y1: 4, y2: height - 24 }),
      el("text", { x: x(0), y: height - 8, "text-anchor": "middle" }, "no change"));
    rows.forEach((r, i) => made.append(forest(r, x, 16 + 26 * i, left, width, r.value > reach)));
    return [el("div", { class: "controls" }, segments("gain", gains, state, "gain"),
      segments("budget", budgets, state, "budget", (b) => percent(b))), made];
  }

  function short(name, room) {
    const letters = Math.floor((room - 4) / 6.6);
    return name.length <= letters ? name : `${name.slice(0, letters - 1)}…`;
  }

  function forest(r, x, y, left, width, beyond) {
    const text = `${r.method} against ${r.rival}\n${signed(r.value, 2)} (${signed(r.low, 2)} … ${signed(r.high, 2)}), p = ${r.p.toFixed(3)}`;
    return el("g", { class: "series", colour: colour(index(r.method)), "data-tip": text },
      el("rect", { class: "hit", x: 0, y: y - 13, width, height: 26 }),
      el("text", { x: left, y: y + 4, "text-anchor": "end" }, short(r.method, left)),
      el("line", { class: "whisker", x1: x(r.low), x2: x(r.high), y1: y, y2: y }),
      beyond ? el("path", { class: "arrow", d: `M${x(r.value)},${y - 5}l8,5l-8,5Z` }) : el("circle", { class: "dot", cx: x(r.value), cy: y, r: 4.4 }),
      el("text", { x: width - 2, y: y + 4, "text-anchor": "end" }, signed(r.value)));
  }

  function drawLayers() {
    const rows = used.map((m) => cell(m, state.gain, state.budget)).filter(Boolean);
    const keys = Object.keys(rows[0]?.layers ?? {}), few = keys.length <= 16;
    const most = Math.max(1e-9, ...rows.flatMap((c) => Object.values(c.layers)));
    const body = rows.map((c) => el("tr", {}, el("td", {}, c.method), keys.map((key) => el("td", {
      class: "heat", style: `background: rgba(var(--fill), ${(0.85 * Math.max(0, c.layers[key]) / most).toFixed(3)})`,
      "data-tip": `${c.method} · layer ${key}\nrealised ${percent(c.layers[key], 1)}`,
    }, few ? (100 * c.layers[key]).toFixed(0) : ""))));
    return [el("div", { class: "controls" }, segments("gain", gains, state, "gain"),
      segments("budget", budgets, state, "budget", (b) => percent(b))), table(["layer", ...keys], body)];
  }
}
