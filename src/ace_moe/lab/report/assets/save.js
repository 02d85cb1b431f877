// What is shown, as a file: tables as CSV, drawings as PNG.
const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight"];

function savers(id, body, rows) {
  const name = `${data.title}-${id}`.replace(/[^\w.-]+/g, "-");
  const button = (kind, make) => el("button", { type: "button", class: "chip save", "data-save": kind, title: `Download as ${kind}`,
    onclick: async () => save(`${name}.${kind.toLowerCase()}`, await make()) }, kind);
  return el("div", { class: "savers" },
    rows || body.querySelector("table") ? button("CSV", () => new Blob([csvOf(rows ? rows() : shownRows(body))], { type: "text/csv" })) : null,
    body.querySelector("svg") ? button("PNG", () => pngOf(body.querySelector("svg"))) : null);
}

function shownRows(body) {
  return [...body.querySelectorAll("tr")].map((row) => [...row.children].map((cell) => cell.textContent.replace(/\u00a0/g, " ").replace(/−/g, "-")));
}

function csvOf(rows) {
  const field = (value) => (/[",\n]/.test(String(value ?? "")) ? `"${String(value).replace(/"/g, '""')}"` : String(value ?? ""));
  return rows.map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

// A drawing has its colours from the style sheet: a copy takes them along.
async function pngOf(svg, scale = 2) {
  const { width, height } = svg.getBoundingClientRect(), copy = svg.cloneNode(true);
  const parts = [copy, ...copy.querySelectorAll("*")];
  [svg, ...svg.querySelectorAll("*")].forEach((part, i) => LOOKS.forEach((look) =>
    parts[i].style.setProperty(look, getComputedStyle(part).getPropertyValue(look))));
  for (const [name, value] of Object.entries({ xmlns: "http://www.w3.org/2000/svg", width, height })) copy.setAttribute(name, value);
  const image = new Image(), canvas = el("canvas", { width: scale * width, height: scale * height }), pen = canvas.getContext("2d");
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await image.decode();
  pen.fillStyle = css("--card");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function save(name, blob) {
  const url = URL.createObjectURL(blob);
  el("a", { download: name, href: url }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
