"use strict";
// The text of the place under the pointer, or chosen by the arrow keys, is shown below its chart. Without scripts,
// tooltips show it.
for (const chart of document.querySelectorAll("figure > .chart:has(.stops)")) {
  const stops = [...chart.querySelectorAll(".stops rect")], readout = document.createElement("p");
  readout.className = "readout dim";
  chart.parentElement.append(readout);
  let at = -1;
  const show = (i) => {
    stops[at]?.classList.remove("on");
    stops[at = i].classList.add("on");
    readout.textContent = stops[i].textContent;
    chart.setAttribute("aria-valuenow", i + 1);
    chart.setAttribute("aria-valuetext", stops[i].textContent);
  };
  const attributes = { role: "slider", tabindex: 0, "aria-valuemin": 1, "aria-valuemax": stops.length, "aria-valuenow": 1 };
  for (const [name, value] of Object.entries(attributes)) chart.setAttribute(name, value);
  chart.addEventListener("pointerover", ({ target }) => stops.includes(target) && show(stops.indexOf(target)));
  chart.addEventListener("keydown", (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: stops.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(Math.min(Math.max(to, 0), stops.length - 1));
  });
}
