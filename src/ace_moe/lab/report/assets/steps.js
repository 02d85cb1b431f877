// What a step costs: experts read by `ace simulate`, times of `ace bench`.
function drawReads(found) {
  const skips = [...new Set(found.rows.map((r) => r.skip))], state = { skip: skips[skips.length - 1] };
  const lines = [["experts read", (r) => r.reads / r.asked], ["slots run", (r) => r.slots], ["slots run with restore", (r) => r.restored]];
  const tip = (r) => `batch ${r.batch}, ${percent(r.skip)} asked\nexperts read ${r.reads.toFixed(1)} of ${r.asked.toFixed(1)} a layer\n` +
    `slots run ${percent(r.slots, 1)}, with restore ${percent(r.restored, 1)}`;
  section("reads", "Experts read against batch",
    `Simulated on ${found.trace}: the part of the experts a decode step reads, and of the slots it runs. Slots whose expert another ` +
    "sequence keeps anyway are restored without reading more.", (width) => {
      const rows = found.rows.filter((r) => r.skip === state.skip).sort((a, b) => a.batch - b.batch);
      return [el("div", { class: "controls" }, segments("budget", skips, state, "skip", (b) => percent(b))), steps(rows, lines, tip, width),
        el("div", { class: "legend" }, lines.map(([name], n) => el("span", { class: "chip", colour: colour(n), "aria-pressed": "true" }, el("i"), name)))];
    }, () => [["batch", "skip", "slots", "restored", "reads", "asked"], ...found.rows.map((r) => [r.batch, r.skip, r.slots, r.restored, r.reads, r.asked])]);
}

function steps(rows, lines, tip, width) {
  const height = 280, left = 50, bottom = height - 38, x = linear([0, Math.max(1, rows.length - 1)], [left + 16, width - 24]), y = linear([0, 1], [bottom, 12]);
  const made = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "experts read against batch" });
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) made.append(el("line", { class: tick ? "axis" : "base", x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }),
    el("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, percent(tick)));
  rows.forEach((r, i) => made.append(el("text", { x: x(i), y: bottom + 18, "text-anchor": "middle" }, r.batch)));
  lines.forEach(([name, value], n) => made.append(el("g", { class: "series", colour: colour(n), "data-line": name },
    el("path", { class: "curve", d: rows.map((r, i) => `${i ? "L" : "M"}${x(i).toFixed(1)},${y(value(r)).toFixed(1)}`).join("") }),
    rows.map((r, i) => [el("circle", { class: "dot", cx: x(i), cy: y(value(r)), r: 3.6 }),
      el("circle", { class: "hit", cx: x(i), cy: y(value(r)), r: 11, "data-tip": tip(r) })]).flat())));
  made.append(el("text", { x: width - 8, y: height - 4, "text-anchor": "end" }, "sequences in a step"));
  return made;
}

function drawSpeed(found) {
  const names = { tpot: "time per output token", ttft: "time to first token" }, kinds = [...new Set(found.rows.map((r) => r.what))];
  const state = { what: kinds.includes("tpot") ? "tpot" : kinds[0] }, own = (r) => r.path === "ace";
  const place = (r) => `${r.what}|${r.tokens}|${r.batch}`;
  const zero = new Map(found.rows.filter((r) => own(r) && r.requested === 0).map((r) => [place(r), r]));
  const label = (r) => (own(r) ? `${percent(r.requested)} skipped` : r.path);
  const times = (r) => (zero.has(place(r)) ? ` · ${(zero.get(place(r)).wall_ms / r.wall_ms).toFixed(2)}×` : "");
  section("speed", "Speed", `Measured by ace bench${found.device ? ` on ${found.device}` : ""}: milliseconds, and how many times as fast as the same path with nothing skipped.`,
    (width) => {
      const rows = found.rows.filter((r) => r.what === state.what), most = Math.max(...rows.map((r) => r.wall_ms));
      const left = Math.min(200, 0.38 * width), x = linear([0, most], [0, Math.max(60, width - left - 130)]), made = [];
      let y = 4, before = null;
      for (const r of rows) {
        if (place(r) !== before) { made.push(el("text", { class: "group", x: 0, y: y + 14 }, `batch ${r.batch}, ${r.tokens.toLocaleString("en")} tokens`)); y += 22; before = place(r); }
        made.push(el("g", { class: "series", colour: own(r) ? colour(r.requested ? 0 : 6) : colour(9), "data-tip":
          `${label(r)}\n${r.wall_ms.toFixed(2)} ms${times(r)}\nrealised ${percent(r.realised, 1)}` },
        el("text", { x: left - 10, y: y + 12, "text-anchor": "end" }, label(r)), el("rect", { class: "bar-of", x: left, y, width: x(r.wall_ms), height: 15, rx: 3 }),
        el("text", { x: left + x(r.wall_ms) + 6, y: y + 12 }, `${r.wall_ms.toFixed(2)}${times(r)}`)));
        y += 19;
      }
      return [el("div", { class: "controls" }, segments("show", kinds, state, "what", (k) => names[k] ?? k)),
        el("svg", { viewBox: `0 0 ${width} ${y + 6}`, height: y + 6, role: "img", "aria-label": names[state.what] ?? state.what }, made)];
    }, () => [["what", "path", "tokens", "batch", "requested", "realised", "wall_ms"],
      ...found.rows.map((r) => [r.what, r.path, r.tokens, r.batch, r.requested, r.realised, r.wall_ms])]);
}
