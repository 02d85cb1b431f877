// Heat maps of numbers by layer and expert, and how well tables know the oracle.
function heatMap(title, rows, keys, { centre, low, high, unit, sorted }) {
  const values = rows.map((row) => (sorted ? [...row].sort((a, b) => (b ?? -1) - (a ?? -1)) : row));
  const columns = Math.max(...values.map((row) => row.length)), canvas = el("canvas", { width: columns, height: rows.length });
  canvas.style.aspectRatio = `${columns} / ${Math.max(rows.length, columns * 0.22)}`;
  const pen = canvas.getContext("2d"), cold = css("--cold"), warm = css("--warm");
  values.forEach((row, y) => row.forEach((value, x) => {
    if (value === null) return;
    const away = value >= centre ? (value - centre) / (high - centre || 1) : (centre - value) / (centre - low || 1);
    pen.fillStyle = `rgba(${value >= centre ? warm : cold}, ${Math.min(1, 0.04 + 0.96 * away)})`;
    pen.fillRect(x, y, 1, 1);
  }));
  canvas.tipAt = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * columns), y = Math.floor(((event.clientY - box.top) / box.height) * rows.length);
    const value = values[y]?.[x];
    return value === undefined ? null : `layer ${keys[y]}, ${sorted ? "rank" : "expert"} ${x}\n${value === null ? "no slot routed" : unit(value)}`;
  };
  const from = low < centre ? `rgb(${cold})` : "transparent";
  return el("figure", { "data-map": title }, el("figcaption", {}, title), canvas, el("div", { class: "scale" }, unit(low),
    el("i", { style: `background: linear-gradient(90deg, ${from}, transparent ${low < centre ? 50 : 0}%, rgb(${warm}))` }), unit(high)));
}

function drawMaps(results) {
  const keys = Object.keys(results.tables), names = Object.keys(results.tables[keys[0]] ?? {});
  const detailed = results.cells.filter((c) => c.experts);
  const state = { order: "by expert", method: detailed[0]?.method, gain: detailed[0]?.gain };

  if (names.length) section("tables", "What the tables say",
    "One number per expert and layer, 1 on average in its layer: experts that amplify their input more than others are warm. " +
    "They come from the checkpoint alone.", () => [
      el("div", { class: "controls" }, segments("experts", ["by expert", "sorted"], state, "order")),
      el("div", { class: "maps" }, names.filter((n) => results.tables[keys[0]][n].length > 1).map((name) => {
        const rows = keys.map((key) => results.tables[key][name]), all = rows.flat();
        return heatMap(name, rows, keys, { centre: 1, low: Math.min(...all), high: Math.max(...all),
          unit: (v) => v.toFixed(2), sorted: state.order === "sorted" });
      }))]);

  if (names.length && results.oracle) section("oracle", "What the tables know",
    "Correlation of each table with the true norm of the expert outputs, slot by slot (Pearson; Spearman on hover). 1 would be " +
    "perfect knowledge, 0 none.", (width) => correlation(results.oracle, names, width));

  if (detailed.length) section("experts", "Which experts are skipped",
    `Realised ratio by layer and expert at a budget of ${percent(detailed[0].budget)}. Warm experts are skipped most of the times they are routed to.`, () => {
      const chosen = detailed.find((c) => c.method === state.method && c.gain === state.gain) ?? detailed[0];
      const rows = Object.keys(chosen.experts).map((key) => chosen.experts[key]), all = rows.flat().filter((v) => v !== null);
      return [el("div", { class: "controls" }, chooser("method", [...new Set(detailed.map((c) => c.method))], state, "method"),
        segments("gain", [...new Set(detailed.map((c) => c.gain))], state, "gain"), segments("experts", ["by expert", "sorted"], state, "order")),
      heatMap(`${chosen.method}, gain ${chosen.gain}`, rows, Object.keys(chosen.experts), { centre: Math.min(0, ...all), low: Math.min(0, ...all),
        high: Math.max(...all, 0.01), unit: (v) => percent(v, 1), sorted: state.order === "sorted" })];
    });
}

function correlation(oracle, names, width) {
  const keys = Object.keys(oracle), height = 240, left = 44, bottom = height - 26;
  const known = names.filter((name) => oracle[keys[0]][name]), all = keys.flatMap((k) => known.map((n) => oracle[k][n].pearson));
  const x = linear([0, Math.max(1, keys.length - 1)], [left + 14, width - 20]), y = linear([Math.min(0, ...all), Math.max(0.1, ...all)], [bottom - 4, 12]);
  const made = el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "correlation by layer" });
  for (let tick = Math.ceil(Math.min(0, ...all) * 5) / 5; tick <= Math.max(0.1, ...all); tick += 0.2) made.append(
    el("line", { class: Math.abs(tick) < 1e-9 ? "base" : "axis", x1: left, x2: width - 8, y1: y(tick), y2: y(tick) }),
    el("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, tick.toFixed(1).replace("-0.0", "0.0")));
  const step = Math.ceil(keys.length / Math.max(4, width / 48));
  keys.forEach((key, i) => i % step === 0 && made.append(el("text", { x: x(i), y: height - 6, "text-anchor": "middle" }, key)));
  known.forEach((name, n) => made.append(el("g", { class: "series", colour: colour(n) },
    el("path", { class: "curve", d: keys.map((k, i) => `${i ? "L" : "M"}${x(i)},${y(oracle[k][name].pearson)}`).join("") }),
    keys.map((k, i) => el("circle", { class: "dot", cx: x(i), cy: y(oracle[k][name].pearson), r: 4 })),
    keys.map((k, i) => el("circle", { class: "hit", cx: x(i), cy: y(oracle[k][name].pearson), r: 10,
      "data-tip": `${name} · layer ${k}\nPearson ${oracle[k][name].pearson.toFixed(2)}, Spearman ${oracle[k][name].spearman.toFixed(2)}\n` +
        `mean of each expert: ${oracle[k][name].expert_pearson.toFixed(2)}, ${oracle[k][name].expert_spearman.toFixed(2)}` })))));
  const legend = el("div", { class: "legend" }, known.map((name, n) => el("span", { class: "chip", colour: colour(n), "aria-pressed": "true" }, el("i"), name)));
  return [made, legend];
}
