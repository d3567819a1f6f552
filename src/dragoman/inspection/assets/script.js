"use strict";
// Draws the heatmaps from the numbers in #data (whole thousandths) and answers the pointer. Nothing is fetched.
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(" ").map(Number);
let heat0, heat1, minus, zero;

function readColours() {
  [heat0, heat1, minus, zero] = ["--heat-0", "--heat-1", "--minus", "--zero"].map(colour);
}
function mix(a, b, t) {
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * t)).join(",")})`;
}
// Square root: attention is often spread over many tokens, and small weights should still be seen.
function shade(value, signed) {
  if (!signed) return mix(heat0, heat1, Math.sqrt(value / 1000));
  return mix(zero, value < 0 ? minus : heat1, Math.min(Math.abs(value) / 1000, 1));
}
// A canvas of `width` by `height` CSS pixels, sharp on any screen.
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}
function cells(pen, values, left, top, size, high, signed) {
  values.forEach((row, i) => row.forEach((value, j) => {
    pen.fillStyle = shade(value, signed);
    // Up to the next cell's edge, so that no seam is left between two.
    const x = Math.floor(left + j * size), y = Math.floor(top + i * high);
    pen.fillRect(x, y, Math.floor(left + (j + 1) * size) - x, Math.floor(top + (i + 1) * high) - y);
  }));
}
// The pointer's cell -> a tool tip.
function listen(canvas, map, left, top, size, high) {
  canvas.onmousemove = (event) => {
    const j = Math.floor((event.offsetX - left) / size), i = Math.floor((event.offsetY - top) / high);
    const row = map.values[i];
    if (!row || row[j] === undefined) return canvas.onmouseleave();
    tip.textContent = `${map.rows[i]} → ${map.columns[j]}   ${(row[j] / 1000).toFixed(3)}`;
    tip.style.display = "block";
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  };
  canvas.onmouseleave = () => { tip.style.display = "none"; };
}
// With the tokens along both axes.
function drawLarge(canvas, map) {
  const room = canvas.parentElement.clientWidth;
  const pen = canvas.getContext("2d");
  const font = `13px ${getComputedStyle(document.body).fontFamily}`;
  pen.font = font;
  const longest = (labels) => Math.max(...labels.map((label) => pen.measureText(label).width));
  const left = Math.min(longest(map.rows), 130) + 10;
  const top = Math.min(longest(map.columns), 120) * 0.87 + 16;
  // Column labels lean to the right and need room beyond the last column.
  const beyond = Math.min(longest(map.columns.slice(-2)), 120) * 0.5 + 14;
  const size = Math.max(6, Math.min(34, (room - left - beyond) / map.columns.length));
  const width = left + size * map.columns.length + beyond, height = top + size * map.rows.length + 2;
  const ready = prepare(canvas, width, height);
  cells(ready, map.values, left, top, size, size, false);
  ready.font = size < 12 ? font.replace("13px", `${Math.max(size, 7)}px`) : font;
  ready.fillStyle = getComputedStyle(document.body).color;
  ready.textBaseline = "middle";
  ready.textAlign = "right";
  map.rows.forEach((label, i) => ready.fillText(label, left - 6, top + (i + 0.5) * size, left - 8));
  ready.textAlign = "left";
  map.columns.forEach((label, j) => {
    ready.save();
    ready.translate(left + (j + 0.5) * size, top - 6);
    ready.rotate(-Math.PI / 3);
    ready.fillText(label, 0, 0, 120);
    ready.restore();
  });
  ready.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--line");
  ready.strokeRect(left - 0.5, top - 0.5, size * map.columns.length + 1, size * map.rows.length + 1);
  listen(canvas, map, left, top, size, size);
}
function drawPlain(canvas, map) {
  const room = canvas.parentElement.clientWidth;
  const wide = canvas.classList.contains("wide");
  const width = wide ? room : Math.min(room, 330), height = 330;
  const size = width / map.columns.length, high = height / map.rows.length;
  cells(prepare(canvas, width, height), map.values, 0, 0, size, high, map.signed);
  listen(canvas, map, 0, 0, size, high);
}
function mapOf(figure) {
  const { kind, layer, head } = figure.dataset;
  return { values: data.attention[`${kind}-${layer}`][head], ...data.labels[kind] };
}
function choose(figure) {
  const { kind, layer, head } = figure.dataset;
  const group = document.getElementById(`attention-${kind}`);
  for (const other of group.querySelectorAll(".head.chosen")) other.classList.remove("chosen");
  figure.classList.add("chosen");
  group.querySelector(".large figcaption").textContent = `layer ${+layer + 1}, head ${+head + 1}`;
  drawLarge(group.querySelector(".large canvas"), mapOf(figure));
}
function drawThumb(figure) {
  const canvas = figure.querySelector("canvas"), map = mapOf(figure);
  const size = figure.clientWidth / map.columns.length;
  const high = Math.min(size, 1.4 * figure.clientWidth / map.rows.length);
  cells(prepare(canvas, figure.clientWidth, Math.round(high * map.rows.length)), map.values, 0, 0, size, high, false);
  canvas.style.width = "100%";
  listen(canvas, map, 0, 0, size, high);
}
function draw() {
  readColours();
  for (const canvas of document.querySelectorAll("canvas[data-map]")) {
    const map = data[canvas.dataset.map];
    (canvas.dataset.map === "alignment" ? drawLarge : drawPlain)(canvas, map);
  }
  const scale = document.getElementById("scale");
  if (scale) {
    const steps = Array.from({ length: 111 }, (_, i) => i * 1000 / 110);
    cells(prepare(scale, 220, 12), [steps], 0, 0, 2, 12, false);
  }
  document.querySelectorAll(".head").forEach(drawThumb);
  document.querySelectorAll(".head.chosen").forEach(choose);
}
for (const figure of document.querySelectorAll(".head")) {
  figure.onclick = () => choose(figure);
  figure.onkeydown = (event) => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(figure); }
  };
}
for (const group of document.querySelectorAll(".group")) group.querySelector(".head").classList.add("chosen");
draw();
let waiting;
window.onresize = () => { clearTimeout(waiting); waiting = setTimeout(draw, 120); };
matchMedia("(prefers-color-scheme: dark)").onchange = draw;
