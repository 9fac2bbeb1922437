// Draws the panels of boards.py.
"use strict";
const COLOURS = ["#1d5bb8", "#0b7a86", "#b3261e", "#875500", "#6a3fb5", "#1c6b50", "#7b6a58", "#b0418a"];
for (const holder of document.querySelectorAll(".drawn")) {
  const { xs, names, curves, log, time } = JSON.parse(holder.dataset.plot);
  const positive = curves.flat().filter((v) => v > 0);
  const usable = log && positive.length > 0;
  const floor = usable ? 10 ** (Math.floor(Math.log10(Math.min(...positive))) - 0.5) : 0;
  const ready = curves.map((c) => c.map((v) => (v === null ? null : usable ? Math.max(v, floor) : v)));
  const band = names.indexOf("baseline low"), high = names.indexOf("baseline high");
  const colour = (name, i) => (name.startsWith("baseline") ? "#8a9097" : COLOURS[i % COLOURS.length]);
  const keys = document.createElement("div");
  keys.className = "keys-of";
  names.forEach((name, i) => {
    const key = document.createElement("span");
    key.innerHTML = "<i></i>";
    key.firstChild.style.color = colour(name, i);
    key.append(name);
    keys.append(key);
  });
  const panel = holder.closest(".panel");
  const height = panel.clientHeight - 52;
  const number = (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6) ? v.toExponential(0) : String(Number(v.toPrecision(5))));
  const each = (low, high) => {
    const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
    const step = Math.max(1, Math.ceil((last - first + 1) / 5));
    return Array.from({ length: Math.max(0, Math.floor((last - first) / step) + 1) }, (_, i) => 10 ** (first + i * step));
  };
  const decades = usable ? { splits: (u, axis, low, high) => each(low, high), filter: (_, vs) => vs } : {};
  const around = xs.length === 1 ? { range: () => [xs[0] - 1800, xs[0] + 1800] } : {};
  new uPlot({
    width: holder.clientWidth, height, legend: { show: false }, cursor: { show: false }, padding: [6, 8, 0, 0],
    scales: { x: { time, ...around }, y: usable ? { distr: 3 } : {} },
    series: [{}, ...names.map((name, i) => ({ stroke: colour(name, i), width: /baseline (low|high)/.test(name) ? 0 : 1.5, spanGaps: time, points: { show: xs.length < 12 } }))],
    bands: band >= 0 && high >= 0 ? [{ series: [high + 1, band + 1], fill: "#1c6b5022" }] : [],
    axes: [{ font: "10px sans-serif", size: time ? 36 : 24, grid: { stroke: "#e8e5df" }, ticks: { show: false } },
      { font: "10px sans-serif", size: 48, ...decades, grid: { stroke: "#e8e5df" }, ticks: { show: false }, values: (_, vs) => vs.map((v) => (v === null ? "" : number(v))) }],
  }, [xs, ...ready], holder);
  holder.after(keys);
}
document.body.dataset.ready = "1";
