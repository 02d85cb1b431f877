// Small helpers: elements, scales, numbers, tooltip, controls. No library, no network.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = new Set(["svg", "g", "path", "line", "circle", "text", "rect"]);
const COLOURS = ["#2f6fd0", "#d9622b", "#1f9d6b", "#c2334d", "#7d5bd0", "#b58900", "#1498a8", "#c54b9a", "#6c8f1f", "#6f7885"];

function el(tag, attributes, ...children) {
  const made = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "colour") made.style.setProperty("--colour", value);
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const percent = (x, digits = 0) => `${(100 * x).toFixed(digits)}\u00a0%`;
const signed = (x, digits = 1) => {
  const size = Math.abs(100 * x).toFixed(digits);
  return `${Number(size) === 0 ? "±" : x > 0 ? "+" : "−"}${size}\u00a0%`;
};
const number = (x, digits = 2) => (x >= 10000 ? x.toExponential(1) : x.toFixed(digits));
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (index) => COLOURS[index % COLOURS.length];
const dash = (index) => [undefined, "7 4", "2 4", "10 3 2 3"][Math.floor(index / COLOURS.length) % 4];

function linear([a, b], [from, to]) {
  return (x) => from + ((x - a) / (b - a || 1)) * (to - from);
}

// `rows`: what the file has beyond what the table shows, for the download.
function section(id, title, text, draw, rows) {
  const body = el("div");
  const made = el("section", { id }, el("h2", {}, title), el("p", {}, text), body);
  document.getElementById("main").append(made);
  document.getElementById("nav").append(el("a", { href: `#${id}` }, title));
  const redraw = () => body.replaceChildren(...[draw(body.clientWidth || 640)].flat());
  redraws.push(redraw);
  redraw();
  made.append(savers(id, body, rows));
}

const redraws = [];
const redrawAll = () => redraws.forEach((redraw) => redraw());

function segments(name, options, state, key, label = (x) => x) {
  const buttons = options.map((option) =>
    el("button", {
      type: "button",
      "aria-pressed": String(state[key] === option),
      onclick: () => { state[key] = option; redrawAll(); },
    }, label(option)));
  return options.length < 2 ? null : el("label", {}, name, el("span", { class: "segments", role: "group" }, buttons));
}

function chooser(name, options, state, key) {
  const made = el("select", { onchange: (event) => { state[key] = event.target.value; redrawAll(); } },
    options.map((option) => el("option", { value: option, selected: state[key] === option ? "" : null }, option)));
  return el("label", {}, name, made);
}

// One tooltip for everything that carries data-tip; its first line is bold.
const tip = document.getElementById("tip");

function showTip(text, x, y) {
  const [first, ...rest] = text.split("\n");
  tip.replaceChildren(el("b", {}, first), rest.length ? `\n${rest.join("\n")}` : "");
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 6))}px`;
  tip.style.top = `${y - height - 12 < 6 ? y + 18 : y - height - 12}px`;
}

for (const kind of ["pointermove", "pointerdown"]) {
  addEventListener(kind, (event) => {
    const target = event.target.closest ? event.target.closest("[data-tip], canvas") : null;
    const text = !target ? null : target.tipAt ? target.tipAt(event) : target.dataset.tip;
    if (text) showTip(text, event.clientX, event.clientY);
    else tip.hidden = true;
  });
}
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

function table(head, rows, kind = "") {
  const body = el("tbody", {}, rows);
  const sorter = (cell, i) => el("th", {}, el("button", { type: "button", class: "sort", title: "Sort",
    onclick: (event) => sortBy(body, i, event.currentTarget.parentNode) }, cell));
  return el("div", { class: "scroll" }, el("table", { class: kind }, el("thead", {}, el("tr", {}, head.map(sorter))), body));
}

// Rows by a column, upwards first; what has no number comes last, the unskipped model stays on top.
function sortBy(body, column, header) {
  const down = header.getAttribute("aria-sort") === "ascending", way = down ? -1 : 1;
  const text = (row) => row.children[column].textContent;
  const value = (row) => parseFloat(text(row).replace("−", "-").replace(/[±+]/, ""));
  const order = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (column === 0 || (isNaN(x) && isNaN(y))) return way * text(a).localeCompare(text(b));
    return isNaN(x) ? 1 : isNaN(y) ? -1 : way * (x - y);
  };
  const rows = [...body.children], fixed = rows.filter((row) => row.classList.contains("dense"));
  body.append(...fixed, ...rows.filter((row) => !fixed.includes(row)).sort(order));
  for (const other of header.parentNode.children) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
}
