"use strict";
// Draw the curves of the page from the JSON in #data, again whenever a setting, the width or the data change.

const NAMESPACE = "http://www.w3.org/2000/svg";
const MARGIN = { left: 66, right: 14, top: 10, bottom: 24 };
const COLORS = 8; // --c0 to --c7 of the page

const form = document.querySelector("form");
const view = { smoothing: 0, x: "step", logX: false, range: null, cursor: null, hidden: new Set(), logY: new Map() };
let data = JSON.parse(document.getElementById("data").textContent);
let plots = []; // by figure: what the cursor needs of its last drawing

// Formatting

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) {
    const [digits, power] = value.toExponential(2).split("e");
    return `${parseFloat(digits)}e${parseInt(power, 10)}`;
  }
  return parseFloat(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 6 });
}

function withSuffix(value, sizes) {
  const [size, unit] = sizes.find(([size]) => Math.abs(value) >= size) || sizes[sizes.length - 1];
  return `${parseFloat((value / size).toPrecision(4))}${unit}`;
}

const COUNTS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
const BYTES = [[2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"], [1, " B"]];

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
  if (unit !== "×" || largest < 1e6) return formatValue(value, unit);
  const power = Math.log2(value);
  return Number.isInteger(power) ? `2^${power}` : withSuffix(value, COUNTS);
}

function clock(seconds) {
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = whole % 60;
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

function formatX(x) {
  if (view.x === "seconds") return clock(x);
  return view.x === "units" ? withSuffix(x, COUNTS) : Math.round(x).toLocaleString("en");
}

// Points

function interpolate(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  if (x <= xs[0]) return ys[0];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

function xOf(run, step) {
  const [steps, seconds, units] = run.clock;
  if (view.x === "step") return step;
  return interpolate(steps, view.x === "seconds" ? seconds : units, step);
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

function linesOf(chart) {
  const lines = [];
  data.runs.forEach((run, r) => {
    if (view.hidden.has(run.name)) return;
    chart.curves.forEach((curve, c) => {
      const series = run.series[curve.metric];
      if (!series) return;
      const { steps, values: raw, low, high } = series;
      const smooth = curve.smooth && view.smoothing > 0;
      const values = smooth ? movingAverage(raw, view.smoothing) : raw;
      const alone = data.runs.length === 1;
      lines.push({
        run, curve, steps, values, raw: smooth && !low ? raw : null, low, high,
        label: alone ? curve.label : chart.curves.length > 1 ? `${run.name}, ${curve.label}` : run.name,
        color: `var(--c${(alone ? c : r) % COLORS})`,
        dashed: !alone && c > 0,
        xs: steps.map((step) => xOf(run, step)),
      });
    });
  });
  return lines;
}

// Axes

function linearTicks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].find((s) => s * power >= rough) * power;
  const ticks = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-9; i += 1) ticks.push(i * size);
  return ticks.map((t) => parseFloat(t.toPrecision(12)));
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1.2) return linearTicks(low, high, count).filter((t) => t > 0);
  const every = Math.ceil(decades / count);
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += every)
    for (const m of decades < 2.5 ? [1, 2, 5] : [1]) ticks.push(m * 10 ** p);
  return ticks.filter((t) => t >= low * (1 - 1e-9) && t <= high * (1 + 1e-9));
}

function byteTicks(low, high, count) {
  const [size] = BYTES.find(([size]) => high >= size) || [1];
  return linearTicks(low / size, high / size, count).map((t) => t * size);
}

// A loss scale is a power of 2.
function binaryTicks(low, high, count) {
  const [from, to] = [Math.floor(Math.log2(low)), Math.ceil(Math.log2(high))];
  const every = Math.max(1, Math.ceil((to - from) / count));
  const ticks = [];
  for (let p = from; p <= to; p += every) ticks.push(2 ** p);
  return ticks;
}

function axis(low, high, from, to, log) {
  if (log) [low, high] = [Math.log(low), Math.log(high)];
  return {
    at: (v) => from + (((log ? Math.log(v) : v) - low) / (high - low || 1)) * (to - from),
    value: (p) => {
      const v = low + ((p - from) / (to - from)) * (high - low);
      return log ? Math.exp(v) : v;
    },
  };
}

function extent(values, log) {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v === null || (log && v <= 0)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return low <= high ? [low, high] : null;
}

function fullRange() {
  const xs = data.runs.filter((run) => !view.hidden.has(run.name)).flatMap((run) =>
    Object.values(run.series).flatMap(({ steps }) => [steps[0], steps[1] ?? steps[0], steps[steps.length - 1]])
      .map((step) => xOf(run, step)));
  return extent(xs, view.logX) || [0, 1];
}

// Drawing

function svg(parent, name, attributes, text) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function path(line, values, x, y, logY) {
  let d = "", pen = false;
  line.xs.forEach((at, i) => {
    const v = values[i];
    if (v === null || (logY && v <= 0) || (view.logX && at <= 0)) { pen = false; return; }
    const [px, py] = [x.at(at).toFixed(1), y.at(v).toFixed(1)];
    if (!pen) d += `M${px} ${py}h0`; // a single point is drawn as a dot
    else if (line.curve.stepped) d += `H${px}V${py}`;
    else d += `L${px} ${py}`;
    pen = true;
  });
  return d;
}

// The range of the points that each mean stands for.
function band(line, x, y, logY) {
  const known = line.xs.map((at, i) => [at, line.low[i], line.high[i]])
    .filter(([at, low]) => low !== null && !(logY && low <= 0) && !(view.logX && at <= 0));
  const edge = (points, which) => points.map((p) => `${x.at(p[0]).toFixed(1)} ${y.at(p[which]).toFixed(1)}`);
  return known.length ? `M${[...edge(known, 2), ...edge([...known].reverse(), 1)].join("L")}Z` : "";
}

function draw(figure) {
  const id = figure.dataset.chart, chart = data.charts[id], plot = figure.querySelector(".plot");
  const logY = view.logY.get(chart.title) ?? chart.log;
  const width = plot.clientWidth, height = plot.clientHeight;
  const lines = linesOf(chart);
  const [left, right] = view.range || fullRange();
  plot.replaceChildren();
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);

  const inside = lines.flatMap((line) => [line.values, line.raw || [], line.low || [], line.high || []].flatMap((values) =>
    values.filter((_, i) => line.xs[i] >= left && line.xs[i] <= right)));
  const found = extent([...inside, ...Object.values(chart.references)], logY);
  const box = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const x = axis(left, right, box.left, box.right, view.logX);
  if (!found) {
    svg(plot, "text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "no data in this range");
    plots[id] = { plot, chart, lines: [], x, box };
    return;
  }
  let [low, high] = found;
  if (low === high) [low, high] = logY ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const room = logY ? (high / low) ** 0.04 : (high - low) * 0.05;
  if (logY) [low, high] = [low / room, high * room];
  else [low, high] = [chart.zero ? Math.min(0, low) : found[0] >= 0 ? Math.max(0, low - room) : low - room, high + room];
  const y = axis(low, high, box.bottom, box.top, logY);

  const rows = Math.max(2, Math.floor((box.bottom - box.top) / 38));
  const ticks = logY
    ? chart.unit === "×" ? binaryTicks(found[0], found[1], rows) : logTicks(low, high, rows)
    : chart.unit === "B" ? byteTicks(low, high, rows) : linearTicks(low, high, rows);
  for (const t of ticks) {
    if (y.at(t) < box.top - 1 || y.at(t) > box.bottom + 1) continue;
    svg(plot, "line", { class: "grid", x1: box.left, x2: box.right, y1: y.at(t), y2: y.at(t) });
    svg(plot, "text", { x: box.left - 7, y: y.at(t) + 4, "text-anchor": "end" }, formatTick(t, chart.unit, ticks[ticks.length - 1]));
  }
  const columns = Math.max(2, Math.floor((box.right - box.left) / 95));
  const round = view.logX ? logTicks(left, right, columns) : timeTicks(left, right, columns);
  // The end of the axis has a label too, in place of one that would touch it.
  const apart = round.filter((t) => Math.abs(x.at(right) - x.at(t)) > 60);
  for (const t of [...apart, right]) {
    svg(plot, "line", { class: "grid", x1: x.at(t), x2: x.at(t), y1: box.bottom, y2: box.bottom + 4 });
    svg(plot, "text", { x: x.at(t), y: height - 5, "text-anchor": x.at(t) > width - 30 ? "end" : "middle" }, formatX(t));
  }
  svg(plot, "line", { class: "grid", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });

  const clip = svg(svg(plot, "defs", {}), "clipPath", { id: `inside-${id}` });
  svg(clip, "rect", { x: box.left - 3, y: 0, width: box.right - box.left + 6, height: box.bottom + 3 });
  const field = svg(plot, "g", { "clip-path": `url(#inside-${id})` });
  for (const [name, value] of Object.entries(chart.references)) {
    if (logY && value <= 0) continue;
    svg(field, "line", { class: "reference", x1: box.left, x2: box.right, y1: y.at(value), y2: y.at(value) });
    svg(field, "text", { x: box.right - 4, y: y.at(value) - 5, "text-anchor": "end" }, `${name} ${formatMeasured(value, chart.unit)}`);
  }
  for (const line of lines) {
    const style = { class: "line", style: `stroke: ${line.color}`, "stroke-dasharray": line.dashed ? "5 3" : "none" };
    if (line.low) svg(field, "path", { class: "band", style: `fill: ${line.color}; stroke: ${line.color}`, d: band(line, x, y, logY) });
    if (line.raw) svg(field, "path", { ...style, class: "line raw", d: path(line, line.raw, x, y, logY) });
    svg(field, "path", { ...style, d: path(line, line.values, x, y, logY) });
    if (line.curve.dotted && line.xs.length <= 80)
      line.xs.forEach((at, i) => {
        if (line.values[i] !== null && !(logY && line.values[i] <= 0) && !(view.logX && at <= 0))
          svg(field, "circle", { cx: x.at(at), cy: y.at(line.values[i]), r: 2.8, style: `fill: ${line.color}` });
      });
  }
  marks(field, chart, x, box);
  plots[id] = { plot, chart, lines, x, y, box, logY, over: svg(plot, "g", {}) };
}

// Round numbers of minutes and hours.
function timeTicks(low, high, count) {
  if (view.x !== "seconds") return linearTicks(low, high, count);
  const sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
  const size = sizes.find((s) => (high - low) / s <= count);
  if (!size || high - low < 2) return linearTicks(low, high, count);
  const ticks = [];
  for (let t = Math.ceil(low / size) * size; t <= high; t += size) ticks.push(t);
  return ticks;
}

function marks(field, chart, x, box) {
  data.runs.filter((run) => !view.hidden.has(run.name)).forEach((run) => {
    const of = data.runs.length > 1 ? `${run.name}: ` : "";
    if (chart.skips)
      for (const [step, count] of run.skips) {
        const at = x.at(xOf(run, step));
        const mark = svg(field, "path", { class: "skip", d: `M${at} ${box.bottom - 9}l4.5 8h-9z` });
        svg(mark, "title", {}, `${of}${count} updates skipped up to step ${step.toLocaleString("en")}`);
      }
    for (const [from, to] of run.rollbacks) {
      const at = x.at(xOf(run, from));
      svg(field, "line", { class: "rollback", x1: at, x2: at, y1: box.top, y2: box.bottom });
      if (chart.wide) svg(field, "text", { class: "label", x: at + 4, y: box.top + 10 }, `${of}spike at ${from}, rolled back to ${to}`);
    }
  });
}

// Legend: the values at the cursor, or the last ones

function updateLegend(id) {
  const of = plots[id];
  const key = of.plot.parentElement.querySelector(".key");
  key.replaceChildren();
  if (of.over) of.over.replaceChildren();
  const descriptions = [];
  const shown = of.over && view.cursor !== null && of.x.at(view.cursor) >= of.box.left - 1 && of.x.at(view.cursor) <= of.box.right + 1;
  if (shown) {
    const at = of.x.at(view.cursor);
    svg(of.over, "line", { class: "cursor", x1: at, x2: at, y1: of.box.top, y2: of.box.bottom });
    descriptions.push(`${{ step: "step ", seconds: "", units: "" }[view.x]}${formatX(view.cursor)}`);
    const where = document.createElement("span");
    where.textContent = descriptions[0];
    key.append(where);
  }
  for (const line of of.lines) {
    const i = shown ? nearest(line, view.cursor) : lastOf(line);
    const value = i === null ? null : line.values[i];
    const entry = document.createElement("span"), swatch = document.createElement("i"), bold = document.createElement("b");
    swatch.style.color = line.color;
    if (line.dashed) swatch.className = "dashed";
    bold.textContent = value === null ? "—" : formatMeasured(value, of.chart.unit);
    entry.append(swatch, line.label, bold);
    key.append(entry);
    descriptions.push(`${line.label} ${bold.textContent}`);
    if (shown && value !== null && !(of.logY && value <= 0))
      svg(of.over, "circle", { cx: of.x.at(line.xs[i]), cy: of.y.at(value), r: 3.6, style: `fill: ${line.color}` });
  }
  const skips = of.chart.skips ? data.runs.filter((r) => !view.hidden.has(r.name)).flatMap((r) => r.skips) : [];
  if (skips.length) {
    const entry = document.createElement("span"), mark = document.createElement("span");
    const count = skips.reduce((sum, [, n]) => sum + n, 0);
    const text = `${count.toLocaleString("en")} ${count === 1 ? "update" : "updates"} skipped`;
    mark.className = "bad";
    mark.textContent = "▲ ";
    entry.append(mark, text);
    key.append(entry);
    descriptions.push(text);
  }
  const [low, high] = view.range || fullRange();
  of.plot.setAttribute("aria-valuemin", Math.round(low));
  of.plot.setAttribute("aria-valuemax", Math.round(high));
  of.plot.setAttribute("aria-valuenow", Math.round(view.cursor ?? high));
  of.plot.setAttribute("aria-valuetext", descriptions.join(", "));
}

function lastOf(line) {
  for (let i = line.values.length - 1; i >= 0; i -= 1) if (line.values[i] !== null) return i;
  return null;
}

function nearest(line, at) {
  let best = null;
  line.xs.forEach((x, i) => {
    if (line.values[i] !== null && (best === null || Math.abs(x - at) < Math.abs(line.xs[best] - at))) best = i;
  });
  return best;
}

function redraw() {
  plots = [];
  document.querySelectorAll("figure[data-chart]").forEach(draw);
  form.whole.hidden = view.range === null;
  updateLegends();
}

function updateLegends() {
  Object.keys(plots).forEach(updateLegend);
}

function zoom(low, high) {
  const whole = fullRange();
  const range = [Math.max(low, whole[0]), Math.min(high, whole[1])];
  view.range = range[1] > range[0] && (range[0] > whole[0] || range[1] < whole[1]) ? range : null;
  redraw();
}

// Input

function chartOf(event) {
  const plot = event.target.closest?.(".plot");
  return plot ? plots[plot.parentElement.dataset.chart] : null;
}

function xUnder(of, event) {
  const at = event.clientX - of.plot.getBoundingClientRect().left;
  return of.x.value(Math.min(Math.max(at, of.box.left), of.box.right));
}

// Snap to a point of a curve, so that the legend shows measured values.
function snap(of, x) {
  const points = of.lines.map((line) => [line, nearest(line, x)]).filter(([, i]) => i !== null).map(([line, i]) => line.xs[i]);
  return points.length ? points.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a)) : x;
}

let dragged = null;
document.addEventListener("pointerdown", (event) => {
  const of = chartOf(event);
  if (of && of.over && event.button === 0) dragged = { of, from: xUnder(of, event), band: null };
});
document.addEventListener("pointermove", (event) => {
  const of = dragged?.of ?? chartOf(event);
  if (!of || !of.over) {
    if (view.cursor !== null && !document.activeElement?.closest?.(".plot")) { view.cursor = null; updateLegends(); }
    return;
  }
  view.cursor = snap(of, xUnder(of, event));
  updateLegends();
  if (dragged && event.pointerType !== "touch") {
    const [a, b] = [of.x.at(dragged.from), of.x.at(xUnder(of, event))];
    svg(of.over, "rect", { class: "chosen", x: Math.min(a, b), width: Math.abs(a - b), y: of.box.top, height: of.box.bottom - of.box.top });
  }
});
document.addEventListener("pointerup", (event) => {
  if (!dragged) return;
  const { of, from } = dragged, to = xUnder(of, event);
  dragged = null;
  if (event.pointerType !== "touch" && Math.abs(of.x.at(from) - of.x.at(to)) > 8) zoom(Math.min(from, to), Math.max(from, to));
});
document.addEventListener("dblclick", (event) => { if (chartOf(event)) { view.range = null; redraw(); } });
document.addEventListener("focusout", (event) => { if (chartOf(event)) { view.cursor = null; updateLegends(); } });
document.addEventListener("keydown", (event) => {
  const of = chartOf(event);
  if (!of || !of.lines.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const [low, high] = view.range || fullRange();
  const points = [...new Set(of.lines.flatMap((line) => line.xs.filter((x, i) => line.values[i] !== null && x >= low && x <= high)))].sort((a, b) => a - b);
  const here = view.cursor === null ? points.length - 1 : points.findIndex((x) => x >= view.cursor - 1e-9);
  const to = { ArrowLeft: here - 1, ArrowRight: here + 1, PageDown: here - 10, PageUp: here + 10, Home: 0, End: points.length - 1 }[event.key];
  const middle = view.cursor ?? (low + high) / 2;
  if (to !== undefined) view.cursor = points[Math.min(Math.max(to, 0), points.length - 1)] ?? null;
  else if (event.key === "+" || event.key === "=") zoom(middle - (middle - low) / 2, middle + (high - middle) / 2);
  else if (event.key === "-") zoom(middle - (middle - low) * 2, middle + (high - middle) * 2);
  else if (event.key === "Escape") { view.range = null; redraw(); }
  else return;
  event.preventDefault();
  updateLegends();
});
document.addEventListener("change", (event) => {
  const figure = event.target.closest("figure[data-chart]");
  if (figure) {
    view.logY.set(data.charts[figure.dataset.chart].title, event.target.checked);
    redraw();
  }
  if (event.target.dataset.run !== undefined) {
    const { name } = data.runs[event.target.dataset.run];
    if (event.target.checked) view.hidden.delete(name); else view.hidden.add(name);
    redraw();
  }
});
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", () => {
  const x = form.x.value, logX = form.log_x.checked;
  if (x !== view.x || logX !== view.logX) { view.range = null; view.cursor = null; }
  Object.assign(view, { smoothing: Number(form.smoothing.value), x, logX });
  form.amount.value = view.smoothing;
  redraw();
});
form.whole.addEventListener("click", () => { view.range = null; redraw(); });

let width = 0;
new ResizeObserver(([entry]) => {
  if (entry.contentRect.width !== width) { width = entry.contentRect.width; requestAnimationFrame(redraw); }
}).observe(document.querySelector(".charts"));

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
