"use strict";
// Draw the curves of the page from the JSON in #data, again whenever a setting, the width or the data change.

const COLORS = 8; // --c0 to --c7 of the page
const COUNTS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const BYTES = [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [1, " B"]];
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
const SIDE = 1000; // of the square that curves are drawn in, which is stretched to its chart

const form = document.querySelector("form");
const view = { smoothing: 0, x: "step", logX: false, range: null, cursor: null, hidden: new Set(), logY: new Map() };
let data = JSON.parse(document.getElementById("data").textContent);
let plots = {}; // by figure: what the cursor needs of its last drawing

const runs = () => data.runs.filter((run) => !view.hidden.has(run.name));

// Formatting

function number(value) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size && size < 1e-3)) return value.toExponential(2).replace(/\.?0*e\+?/, "e");
  return parseFloat(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 6 });
}

function withSuffix(value, sizes) {
  const [size, unit] = sizes.find(([size]) => Math.abs(value) >= size) || sizes[sizes.length - 1];
  return `${parseFloat((value / size).toPrecision(4))}${unit}`;
}

function formatValue(value, unit) {
  if (unit === "B") return withSuffix(value, BYTES);
  if (unit === "%") return `${number(value * 100)} %`;
  if (unit === "×" && value >= 1) return value.toLocaleString("en");
  if (unit === "s") return Math.abs(value) < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`;
  return Math.abs(value) >= 1e4 && unit !== "nats" ? withSuffix(value, COUNTS) : number(value);
}

// Losses beside each other have the same number of digits.
function formatMeasured(value, unit) {
  const size = Math.abs(value);
  return unit === "nats" && size >= 1e-3 && size < 1e6 ? value.toPrecision(4) : formatValue(value, unit);
}

// The margin has room for six digits; the ticks of larger loss scales are written as powers, such as 2^20.
function formatTick(value, unit, largest) {
  return unit === "×" && largest >= 1e6 ? `2^${Math.log2(value).toFixed(0)}` : formatValue(value, unit);
}

function formatX(x) {
  if (view.x === "units") return withSuffix(x, COUNTS);
  if (view.x === "step") return Math.round(x).toLocaleString("en");
  const s = Math.round(x), h = Math.floor(s / 3600), two = (n) => String(n).padStart(2, "0");
  return `${h ? `${h}:${two(Math.floor(s / 60) % 60)}` : Math.floor(s / 60)}:${two(s % 60)}`;
}

// Points

function xOf(run, step) {
  const [steps, seconds, units] = run.clock, ys = view.x === "seconds" ? seconds : units;
  if (view.x === "step") return step;
  let low = 0, high = steps.length - 1;
  if (step >= steps[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (step - steps[low])) / (steps[high] - steps[low]);
}

// The bias-corrected exponential moving average of TensorBoard's slider.
function movingAverage(values, weight) {
  let mean = 0, count = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean * weight + (1 - weight) * value;
    count += 1;
    return mean / (1 - weight ** count);
  });
}

// The lines of a chart: one for each curve of a single run, or for each run.
function linesOf(chart) {
  const found = data.runs.flatMap((run, r) => chart.curves.map((curve, c) => ({ run, curve, r, c, series: run.series[curve.metric] })));
  const alone = data.runs.length === 1;
  return found.filter(({ run, series }) => series && !view.hidden.has(run.name)).map(({ run, curve, r, c, series }) => {
    const { steps, values, low, high } = series, smooth = curve.smooth && view.smoothing > 0;
    return {
      curve, low, high,
      values: smooth ? movingAverage(values, view.smoothing) : values,
      raw: smooth && !low ? values : null,
      label: alone ? curve.label : run.name,
      color: `var(--c${(alone ? c : r) % COLORS})`,
      xs: steps.map((step) => xOf(run, step)),
    };
  });
}

// Axes

function linearTicks(low, high, count, unit = "") {
  const rough = (high - low) / count || 1;
  const of = (unit === "B" && BYTES.find(([size]) => high >= size)?.[0]) || 1, power = of * 10 ** Math.floor(Math.log10(rough / of));
  const round = [1, 2, 2.5, 5, 10].find((s) => s * power >= rough) * power;
  const size = (unit === "seconds" && rough > 0.5 && CLOCK.find((s) => s >= rough)) || round;
  const ticks = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i += 1) ticks.push(parseFloat((i * size).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, count, base = 10) {
  const log = (v) => Math.log(v) / Math.log(base), powers = log(high / low);
  if (base === 10 && powers < 1.2) return linearTicks(low, high, count).filter((t) => t > 0);
  const every = Math.max(1, Math.ceil(powers / count)), digits = base === 10 && powers < 2.5 ? [1, 2, 5] : [1], ticks = [];
  for (let p = digits[1] ? Math.floor(log(low)) : Math.ceil(log(low) - 1e-9); p <= log(high) + 1e-9; p += every)
    ticks.push(...digits.map((digit) => digit * base ** p));
  return ticks.filter((t) => t >= low && t <= high);
}

// Of a value its share of the axis, and of a share its value.
function axis(low, high, log) {
  if (log) [low, high] = [Math.log(low), Math.log(high)];
  return {
    at: (v) => ((log ? Math.log(v) : v) - low) / (high - low || 1),
    value: (share) => (log ? Math.exp : Number)(low + share * (high - low)),
  };
}

function extent(values, log) {
  const known = values.filter((v) => v !== null && !(log && v <= 0));
  return known.length ? known.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]) : null;
}

function fullRange() {
  const xs = runs().flatMap((run) => Object.values(run.series).flatMap(({ steps }) =>
    [steps[0], steps[1] ?? steps[0], steps[steps.length - 1]].map((step) => xOf(run, step))));
  return extent(xs, view.logX) || [0, 1];
}

// The range of a vertical axis, with some room at the ends.
function rangeOf([low, high], chart, log) {
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const room = log ? (high / low) ** 0.04 : (high - low) * 0.05;
  if (log) return [low / room, high * room];
  return [chart.zero ? Math.min(0, low) : low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

// Drawing

function svg(parent, name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

const percent = (share) => `${100 * share}%`;
const horizontal = (at) => ({ x2: "100%", y1: percent(1 - at), y2: percent(1 - at) });
const vertical = (at) => ({ x1: percent(at), x2: percent(at), y2: "100%" });

// The places of points in the square; null where there is none.
function places(xs, values, x, y, logY) {
  return xs.map((at, i) => values[i] === null || (logY && values[i] <= 0) || (view.logX && at <= 0) ? null
    : [(SIDE * x.at(at)).toFixed(1), (SIDE * (1 - y.at(values[i]))).toFixed(1)]);
}

function path(points, stepped) {
  return points.map((point, i) => {
    if (!point) return "";
    if (!points[i - 1]) return `M${point.join(" ")}h0`; // a single point is drawn as a dot
    return stepped ? `H${point[0]}V${point[1]}` : `L${point.join(" ")}`;
  }).join("");
}

function draw(figure) {
  const id = figure.dataset.chart, chart = data.charts[id], plot = figure.querySelector(".plot"), { unit } = chart;
  const logY = view.logY.get(chart.title) ?? chart.log, lines = linesOf(chart), references = Object.entries(chart.references);
  const [left, right] = view.range || fullRange(), x = axis(left, right, view.logX);
  plot.replaceChildren();
  const inside = lines.flatMap((line) => [line.values, line.raw, line.low, line.high].flatMap((values) =>
    (values || []).filter((_, i) => line.xs[i] >= left && line.xs[i] <= right)));
  const found = extent([...inside, ...references.map(([, value]) => value)], logY);
  if (!found) {
    svg(plot, "text", { x: "50%", y: "50%", "text-anchor": "middle" }, "no data in this range");
    plots[id] = { plot, chart, lines: [], x };
    return;
  }
  const [low, high] = rangeOf(found, chart, logY), y = axis(low, high, logY);
  const rows = Math.max(2, Math.floor(plot.clientHeight / 38)), columns = Math.max(2, Math.floor(plot.clientWidth / 95));
  const ticks = logY ? logTicks(low, high, rows, unit === "×" ? 2 : 10) : linearTicks(low, high, rows, unit);
  for (const t of ticks) {
    svg(plot, "line", { class: "grid", ...horizontal(y.at(t)) });
    svg(plot, "text", { x: -7, y: percent(1 - y.at(t)), dy: ".35em", "text-anchor": "end" }, formatTick(t, unit, ticks[ticks.length - 1]));
  }
  const round = view.logX ? logTicks(left, right, columns) : linearTicks(left, right, columns, view.x);
  // The end of the axis has a label too, in place of one that would touch it.
  for (const t of [...round.filter((t) => (1 - x.at(t)) * plot.clientWidth > 60), right])
    svg(plot, "text", { x: percent(x.at(t)), y: "100%", dy: 19, "text-anchor": t === right ? "end" : "middle" }, formatX(t));
  svg(plot, "line", { class: "grid", ...horizontal(0) });
  const field = svg(plot, "svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, preserveAspectRatio: "none", style: view.range ? "overflow: hidden" : "" });
  for (const line of lines) {
    const stroke = `stroke: ${line.color}`, points = (values) => places(line.xs, values, x, y, logY);
    if (line.low) {
      const [top, bottom] = [line.high, line.low].map((values) => points(values).filter(Boolean).map((point) => point.join(" ")));
      if (bottom.length) svg(field, "path", { class: "band", style: `fill: ${line.color}; ${stroke}`, d: `M${[...top, ...bottom.reverse()].join("L")}Z` });
    }
    if (line.raw) svg(field, "path", { class: "line raw", style: stroke, d: path(points(line.raw)) });
    svg(field, "path", { class: "line", style: stroke, d: path(points(line.values), line.curve.stepped) });
    if (line.curve.dotted && line.xs.length <= 80)
      svg(field, "path", { class: "dots", style: stroke, d: points(line.values).filter(Boolean).map((point) => `M${point.join(" ")}h0`).join("") });
  }
  for (const [name, value] of references.filter(([, value]) => !(logY && value <= 0))) {
    svg(plot, "line", { class: "reference", ...horizontal(y.at(value)) });
    svg(plot, "text", { x: "100%", dx: -4, y: percent(1 - y.at(value)), dy: -5, "text-anchor": "end" }, `${name} ${formatMeasured(value, unit)}`);
  }
  marks(plot, chart, x, left, right);
  plots[id] = { plot, chart, lines, x, y, logY, over: svg(plot, "g", {}) };
}

function marks(plot, chart, x, left, right) {
  for (const run of runs()) {
    const of = data.runs.length > 1 ? `${run.name}: ` : "", isInside = ([step]) => xOf(run, step) >= left && xOf(run, step) <= right;
    for (const [step, count] of chart.skips ? run.skips.filter(isInside) : []) {
      const mark = svg(plot, "text", { class: "bad skip", x: percent(x.at(xOf(run, step))), y: "100%", "text-anchor": "middle" }, "▲");
      svg(mark, "title", {}, `${of}${count} updates skipped up to step ${step.toLocaleString("en")}`);
    }
    for (const [from, to] of run.rollbacks.filter(isInside)) {
      const at = x.at(xOf(run, from));
      svg(plot, "line", { class: "rollback", ...vertical(at) });
      if (chart.wide) svg(plot, "text", { class: "bad", x: percent(at), dx: 4, y: 10 }, `${of}spike at ${from}, rolled back to ${to}`);
    }
  }
}

// Legend: the values at the cursor, or the last ones

function updateLegend({ plot, chart, lines, x, y, logY, over }) {
  const key = plot.parentElement.querySelector(".key"), at = view.cursor === null ? NaN : x.at(view.cursor);
  const shown = over && at >= -0.001 && at <= 1.001, descriptions = [];
  const add = (...parts) => { const entry = document.createElement("span"); entry.append(...parts); key.append(entry); return entry; };
  const note = (text) => { descriptions.push(text); return text; };
  key.replaceChildren();
  over?.replaceChildren();
  if (shown) {
    svg(over, "line", { class: "cursor", ...vertical(at) });
    add(note(`${{ step: "step ", seconds: "", units: "" }[view.x]}${formatX(view.cursor)}`));
  }
  for (const line of lines) {
    const i = shown ? nearest(line, view.cursor) : line.values.findLastIndex((value) => value !== null);
    const value = line.values[i] ?? null, swatch = document.createElement("i"), bold = document.createElement("b");
    swatch.style.color = line.color;
    bold.textContent = value === null ? "—" : formatMeasured(value, chart.unit);
    add(swatch, line.label, bold);
    note(`${line.label} ${bold.textContent}`);
    if (shown && value !== null && !(logY && value <= 0))
      svg(over, "circle", { cx: percent(x.at(line.xs[i])), cy: percent(1 - y.at(value)), r: 3.6, style: `fill: ${line.color}` });
  }
  const skipped = (chart.skips ? runs() : []).flatMap((run) => run.skips).reduce((sum, [, count]) => sum + count, 0);
  if (skipped) add(note(`▲ ${skipped.toLocaleString("en")} ${skipped === 1 ? "update" : "updates"} skipped`)).className = "bad";
  const [low, high] = view.range || fullRange();
  const values = { min: Math.round(low), max: Math.round(high), now: Math.round(view.cursor ?? high), text: descriptions.join(", ") };
  for (const [name, value] of Object.entries(values)) plot.setAttribute(`aria-value${name}`, value);
}

function nearest(line, at) {
  let best = -1;
  line.xs.forEach((x, i) => {
    if (line.values[i] !== null && (best < 0 || Math.abs(x - at) < Math.abs(line.xs[best] - at))) best = i;
  });
  return best;
}

function redraw() {
  plots = {};
  document.querySelectorAll("figure[data-chart]").forEach(draw);
  form.whole.hidden = view.range === null;
  updateLegends();
}

function updateLegends() {
  Object.values(plots).forEach(updateLegend);
}

function zoom(low, high) {
  const whole = fullRange(), range = [Math.max(low, whole[0]), Math.min(high, whole[1])];
  view.range = range[1] > range[0] && (range[0] > whole[0] || range[1] < whole[1]) ? range : null;
  redraw();
}

// Input

function chartOf(event) {
  const plot = event.target.closest?.(".plot");
  return plot ? plots[plot.parentElement.dataset.chart] : null;
}

function shareUnder(of, event) {
  const box = of.plot.getBoundingClientRect();
  return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
}

// Snap to a point of a curve, so that the legend shows measured values.
function snap(of, x) {
  const points = of.lines.map((line) => line.xs[nearest(line, x)]).filter((at) => at !== undefined);
  return points.length ? points.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a)) : x;
}

function setCursor(at) {
  view.cursor = at;
  updateLegends();
}

let dragged = null;
document.addEventListener("pointerdown", (event) => {
  const of = chartOf(event);
  if (of?.over && event.button === 0) dragged = { of, from: shareUnder(of, event) };
});
document.addEventListener("pointermove", (event) => {
  const of = dragged?.of ?? chartOf(event);
  if (!of?.over) {
    if (view.cursor !== null && !document.activeElement?.closest?.(".plot")) setCursor(null);
    return;
  }
  const at = shareUnder(of, event);
  setCursor(snap(of, of.x.value(at)));
  if (dragged && event.pointerType !== "touch")
    svg(of.over, "rect", { class: "chosen", x: percent(Math.min(at, dragged.from)), width: percent(Math.abs(at - dragged.from)), height: "100%" });
});
document.addEventListener("pointerup", (event) => {
  if (!dragged) return;
  const { of, from } = dragged, to = shareUnder(of, event);
  dragged = null;
  if (event.pointerType !== "touch" && Math.abs(from - to) * of.plot.clientWidth > 8) zoom(of.x.value(Math.min(from, to)), of.x.value(Math.max(from, to)));
});
document.addEventListener("dblclick", (event) => { if (chartOf(event)) zoom(-Infinity, Infinity); });
document.addEventListener("focusout", (event) => { if (chartOf(event)) setCursor(null); });
document.addEventListener("keydown", (event) => {
  const of = chartOf(event);
  if (!of?.lines.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const [low, high] = view.range || fullRange();
  const points = [...new Set(of.lines.flatMap((line) => line.xs.filter((x, i) => line.values[i] !== null && x >= low && x <= high)))].sort((a, b) => a - b);
  const here = view.cursor === null ? points.length - 1 : points.findIndex((x) => x >= view.cursor - 1e-9);
  const to = { ArrowLeft: here - 1, ArrowRight: here + 1, PageDown: here - 10, PageUp: here + 10, Home: 0, End: points.length - 1 }[event.key];
  const middle = view.cursor ?? (low + high) / 2, scale = { "+": 0.5, "=": 0.5, "-": 2, Escape: Infinity }[event.key];
  if (to !== undefined) setCursor(points[Math.min(Math.max(to, 0), points.length - 1)] ?? null);
  else if (scale) zoom(middle - (middle - low) * scale, middle + (high - middle) * scale);
  else return;
  event.preventDefault();
});
document.addEventListener("change", ({ target }) => {
  const figure = target.closest("figure[data-chart]"), run = data.runs[target.dataset.run];
  if (figure) view.logY.set(data.charts[figure.dataset.chart].title, target.checked);
  if (run) view.hidden[target.checked ? "delete" : "add"](run.name);
  if (figure || run) redraw();
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => {
  const x = form.x.value, logX = form.log_x.checked;
  if (x !== view.x || logX !== view.logX) view.range = view.cursor = null;
  Object.assign(view, { smoothing: Number(form.smoothing.value), x, logX });
  form.amount.value = view.smoothing;
  redraw();
});
form.whole.addEventListener("click", () => zoom(-Infinity, Infinity));
window.addEventListener("resize", redraw);
redraw();

// Media: one step of each tag at a time

const chosen = new Map(); // tag -> the step that the reader chose; none for the latest

function showStep(tag, index) {
  const steps = [...tag.querySelectorAll("[data-step]")], slider = tag.querySelector("input");
  steps.forEach((step, i) => { step.hidden = i !== index; });
  const text = `step ${steps[index].dataset.step}`;
  tag.querySelector("output").textContent = text;
  slider.value = index;
  slider.setAttribute("aria-valuetext", text);
}

function restoreSteps() {
  for (const [name, step] of chosen) {
    const tag = [...document.querySelectorAll("[data-tag]")].find((one) => one.dataset.tag === name);
    const index = tag ? [...tag.querySelectorAll("[data-step]")].findIndex((one) => one.dataset.step === step) : -1;
    if (index >= 0 && tag.querySelector("input")) showStep(tag, index);
  }
}

document.querySelector(".media").addEventListener("input", (event) => {
  const tag = event.target.closest("[data-tag]"), index = Number(event.target.value);
  showStep(tag, index);
  if (index === Number(event.target.max)) chosen.delete(tag.dataset.tag);
  else chosen.set(tag.dataset.tag, tag.querySelectorAll("[data-step]")[index].dataset.step);
});

// Live: replace the parts of the page that changed

const live = document.getElementById("live");
const parts = [...document.querySelectorAll("[data-part]")];
const shown = new Map(parts.map((part) => [part.dataset.part, part.innerHTML])); // as loaded, before the reader's changes

async function refresh() {
  try {
    const answer = await fetch(location.pathname, { cache: "no-cache" });
    if (!answer.ok) throw new Error(answer.status);
    replace(new DOMParser().parseFromString(await answer.text(), "text/html"));
    live.className = "";
    live.textContent = "live";
  } catch {
    live.className = "lost";
    live.textContent = "jaxtrain report no longer responds: showing the last update";
  }
  setTimeout(refresh, 2000);
}

function replace(page) {
  const changed = parts.filter((part) => {
    const now = page.querySelector(`[data-part="${part.dataset.part}"]`).innerHTML;
    if (now === shown.get(part.dataset.part)) return false;
    shown.set(part.dataset.part, now);
    const focused = part.contains(document.activeElement) ? document.activeElement.closest("figure")?.dataset.chart : null;
    part.innerHTML = now;
    if (focused) part.querySelector(`figure[data-chart="${focused}"] .plot`)?.focus();
    return true;
  });
  if (!changed.length) return;
  restoreSteps();
  data = JSON.parse(document.getElementById("data").textContent);
  document.querySelectorAll("figure[data-chart]").forEach((figure) => {
    const { title, log } = data.charts[figure.dataset.chart];
    figure.querySelector("input").checked = view.logY.get(title) ?? log;
  });
  document.querySelectorAll("[data-run]").forEach((box) => { box.checked = !view.hidden.has(data.runs[box.dataset.run].name); });
  redraw();
}

if (live) setTimeout(refresh, 2000);
