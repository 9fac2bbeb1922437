// Draws a run's signals over its steps. The server thins every window with its extremes kept; zooming asks it again.
"use strict";
(() => {
  const charts = document.getElementById("charts");
  if (!charts || typeof uPlot === "undefined") return;
  const about = () => document.getElementById("about");
  const run = about().dataset.run;
  const figures = [...charts.querySelectorAll("figure.chart")];
  const MOST_SIGNALS = 64;
  const FOLLOW_MS = 2000;
  const query = new URLSearchParams(location.search);
  const asNumber = (text) => (text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null);
  const view = { from: asNumber(query.get("from")), to: asNumber(query.get("to")), attempt: query.get("attempt") || "" };
  const plots = new Map();
  let answer = null;
  let marks = ForeshockMarks.read();
  let colours = null;

  // --- Numbers and colours

  function number(value) {
    if (value === null || value === undefined) return "–";
    if (typeof value === "string") return { nan: "NaN", inf: "∞", "-inf": "−∞" }[value] || value;
    const size = Math.abs(value);
    if (value === 0) return "0";
    const text = Number.isInteger(value) && size < 1e6 ? String(value)
      : size >= 1e-3 && size < 1e6 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
    return text.replaceAll("-", "−").replace("e+", "e");
  }

  function axisNumber(value) {
    if (value === null) return "";
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e6)) {
      return value.toExponential(2).replace(/\.?0+e/, "e").replaceAll("-", "−").replace("e+", "e");
    }
    return String(Number(value.toPrecision(6))).replaceAll("-", "−");
  }

  function readColours() {
    const probe = document.createElement("span");
    document.body.append(probe);
    const read = (name) => {
      probe.style.color = `var(--${name})`;
      return getComputedStyle(probe).color;
    };
    const found = {
      ink: read("ink"), faint: read("faint"), line: read("line"), band: read("band"), critical: read("critical"),
      warning: read("warning"), healthy: read("healthy"), unknown: read("unknown"), command: read("command"),
      shadeCritical: read("shade-critical"), shadeWarning: read("shade-warning"),
      curves: [read("first"), read("second"), read("third")],
    };
    probe.remove();
    return found;
  }

  const faded = (colour) => colour.replace(/^rgb\((.*)\)$/, "rgba($1, 0.5)");

  // --- From the answer to columns

  const finite = (value) => (typeof value === "number" ? value : null);

  function columns(figure) {
    const names = figure.dataset.signals.split(" ");
    const log = figure.dataset.log === "1";
    const tables = [];
    const series = [];
    const odd = [];
    let floor = Infinity;
    const chosen = names.map((name) => answer.series.get(name) || []);
    if (log) for (const points of chosen) for (const p of points) if (p.value > 0 && p.value < floor) floor = p.value;
    const usable = log && Number.isFinite(floor);
    // A zero has no place on a logarithmic axis: it lies on the floor, half a decade below the least number.
    floor = usable ? 10 ** (Math.floor(Math.log10(floor)) - 0.5) : null;
    const place = (value) => (value === null ? null : usable ? Math.max(value, floor) : value);
    const newest = Math.max(0, ...chosen.flatMap((points) => (points.length ? [points[points.length - 1].attempt] : [])));
    chosen.forEach((points, index) => {
      for (const attempt of [...new Set(points.map((p) => p.attempt))]) {
        const of = points.filter((p) => p.attempt === attempt);
        for (const p of of) if (typeof p.value === "string") odd.push({ step: p.step, word: p.value });
        tables.push([of.map((p) => p.step), of.map((p) => place(finite(p.value)))]);
        series.push({ name: names[index], index, earlier: attempt !== newest });
      }
    });
    const banded = chosen[0].filter((p) => p.attempt === newest && p.band);
    const band = banded.length > 0;
    if (band) {
      tables.push([banded.map((p) => p.step), banded.map((p) => place(finite(p.band[0])))]);
      tables.push([banded.map((p) => p.step), banded.map((p) => place(finite(p.band[2])))]);
    }
    const data = tables.length ? uPlot.join(tables, tables.map(() => [1, 1])) : [[], []];
    return { data, series, band, odd, log: usable, floor, chosen, names, range: heights(data, series.length, band, usable) };
  }

  // The curves decide on the height; a wide baseline may add a third of it, and is cut off beyond.
  function heights(data, curves, band, log) {
    const up = log ? Math.log10 : (v) => v;
    const extent = (columns) => {
      let [low, high] = [Infinity, -Infinity];
      for (const column of columns) {
        for (const value of column) {
          if (value === null || value === undefined) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
      return [up(low), up(high)];
    };
    let [low, high] = extent(data.slice(1, 1 + curves));
    if (!Number.isFinite(low)) return log ? [0.1, 1] : [0, 1];
    const least = log ? 1 : Math.max(Math.abs(high), Math.abs(low)) * 0.04 || 1;
    const room = Math.max(high - low, least) / 3;
    if (band) {
      const [below, above] = extent(data.slice(1 + curves, 3 + curves));
      [low, high] = [Math.max(low - room, Math.min(low, below)), Math.min(high + room, Math.max(high, above))];
    }
    if (high - low < least) [low, high] = [(low + high - least) / 2, (low + high + least) / 2];
    const pad = 0.06 * (high - low);
    return log ? [10 ** (low - pad), 10 ** (high + pad)] : [low - pad, high + pad];
  }

  // --- One plot

  function bounds() {
    const first = view.from ?? answer.first;
    const last = view.to ?? answer.last;
    return first === last ? [first - 1, last + 1] : [first, last];
  }

  const spaced = (step) => String(step).replace(/\B(?=(\d{3})+$)/g, "\u2009");

  function options(figure, shape, size) {
    const curve = ({ index, earlier }) => ({
      stroke: earlier ? faded(colours.curves[index % 3]) : colours.curves[index % 3],
      width: earlier ? 1 : 1.5,
      dash: earlier ? [4, 3] : undefined,
      points: { show: (u, s) => u.data[0].length < 3 && u.data[s].some((v) => v !== null), size: 5 },
    });
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    const axis = { stroke: colours.faint, grid: { stroke: colours.line, width: 1 }, ticks: { show: false } };
    const font = "11px system-ui, sans-serif";
    // uPlot's own splits never end below 1e-16, where a δ of equal passes may well lie.
    const decades = (u, axis, low, high) => {
      const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
      const each = Math.max(1, Math.ceil((last - first + 1) / 5));
      const found = [];
      for (let power = Math.ceil(first / each) * each; power <= last; power += each) found.push(10 ** power);
      return found;
    };
    return {
      ...size,
      padding: [10, 8, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        sync: { key: "foreshock", setSeries: false },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        points: { size: 6 },
        bind: { dblclick: () => () => { zoom(null, null); } },
      },
      scales: {
        x: { time: false, range: () => bounds() },
        y: { distr: shape.log ? 3 : 1, log: 10, range: () => plots.get(figure)?.shape.range ?? shape.range },
      },
      series: [{}, ...shape.series.map(curve), ...(shape.band ? [edge, edge] : [])],
      bands: shape.band ? [{ series: [shape.series.length + 2, shape.series.length + 1], fill: colours.band }] : [],
      axes: [
        { ...axis, font, size: 26, space: 48, incrs: [1, 2, 5].flatMap((i) => [...Array(12)].map((_, d) => i * 10 ** d)).sort((a, b) => a - b), values: (_, vs) => vs.map(spaced) },
        { ...axis, font, size: 58, space: 28, ...(shape.log ? { splits: decades, filter: (_, vs) => vs } : {}), values: (_, vs) => vs.map((v) => (v !== null && shape.floor !== null && v <= shape.floor ? "0" : axisNumber(v))) },
      ],
      hooks: {
        drawAxes: [(u) => ForeshockMarks.draw(u, shown(), colours, ["incident"])],
        draw: [
          (u) => ForeshockMarks.draw(u, shown(), colours, ["command", "checkpoint"]),
          (u) => drawOdd(u, plots.get(figure)?.shape.odd || []),
        ],
        setCursor: [(u) => read(figure, u)],
        setSelect: [(u) => { if (u.select.width > 5) select(u); }],
      },
    };
  }

  const shown = () => marks.filter((m) => view.attempt === "" || m.attempt === Number(view.attempt));

  function drawOdd(u, odd) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.fillStyle = colours.critical;
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    let free = -Infinity;
    for (const { step, word } of odd) {
      const x = u.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.fillRect(x - devicePixelRatio, bbox.top, 2 * devicePixelRatio, 8 * devicePixelRatio);
      if (x < free) continue;
      ctx.fillText(number(word), x + 3 * devicePixelRatio, bbox.top + 9 * devicePixelRatio);
      free = x + 40 * devicePixelRatio;
    }
    ctx.restore();
  }

  function draw(figure) {
    const holder = figure.querySelector(".plot");
    const shape = columns(figure);
    const size = { width: Math.max(holder.clientWidth, 120), height: holder.clientHeight };
    const old = plots.get(figure);
    const sameAs = JSON.stringify([shape.series, shape.band, shape.log]);
    if (old && old.sameAs === sameAs && shape.floor === old.shape.floor) {
      old.shape = shape;
      old.u.setData(shape.data, true);
    } else {
      if (old) old.u.destroy();
      else holder.replaceChildren();
      const u = new uPlot(options(figure, shape, size), shape.data, holder);
      plots.set(figure, { u, shape, sameAs });
    }
    figure.classList.remove("stale");
    describe(figure, shape, holder);
  }

  // --- In words

  function describe(figure, shape, holder) {
    const [first, last] = bounds();
    const words = shape.names.map((name, i) => {
      const points = shape.chosen[i];
      if (!points.length) return `${name}: nothing in these steps`;
      const numbers = points.filter((p) => typeof p.value === "number");
      const end = points[points.length - 1];
      if (!numbers.length) return `${name}: not finite`;
      const low = numbers.reduce((a, b) => (b.value < a.value ? b : a));
      const high = numbers.reduce((a, b) => (b.value > a.value ? b : a));
      const usual = end.band ? `, usual ${number(end.band[0])} to ${number(end.band[2])}` : "";
      return `${name}: last ${number(end.value)}, lowest ${number(low.value)} at step ${low.step}, highest ${number(high.value)} at step ${high.step}${usual}`;
    });
    if (shape.odd.length) words.push(`not finite at ${shape.odd.length} steps`);
    holder.setAttribute("role", "img");
    holder.tabIndex = 0;
    holder.setAttribute("aria-label", `${figure.querySelector("strong").textContent}, steps ${first} to ${last}. ${words.join(". ")}`);
    rest(figure, shape);
  }

  function rest(figure, shape) {
    const output = figure.querySelector(".reading");
    const end = shape.chosen[0][shape.chosen[0].length - 1];
    output.textContent = end ? number(end.value) : "no value here";
  }

  function read(figure, u) {
    const plot = plots.get(figure);
    const output = figure.querySelector(".reading");
    if (!plot) return;
    const at = u.cursor.idx;
    if (at === null || at === undefined || u.cursor.left < 0) return rest(figure, plot.shape);
    const step = u.data[0][at];
    const values = plot.shape.names.map((name, i) => {
      const nearest = plot.shape.chosen[i].filter((p) => p.step === step);
      return nearest.length ? number(nearest[nearest.length - 1].value) : "–";
    });
    const here = ForeshockMarks.at(shown(), step).map((m) => m.label);
    output.textContent = `step ${step}: ${values.join(", ")}${here.length ? ` · ${[...new Set(here)].slice(0, 2).join(", ")}` : ""}`;
  }

  // --- The window

  let pending = null;
  function select(u) {
    const from = Math.max(0, Math.floor(u.posToVal(u.select.left, "x")));
    const to = Math.ceil(u.posToVal(u.select.left + u.select.width, "x"));
    clearTimeout(pending);
    pending = setTimeout(() => zoom(from, to), 30);
  }

  function zoom(from, to) {
    view.from = from;
    view.to = to === null || from === null || to > from ? to : from + 1;
    for (const { u } of plots.values()) u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    note();
    load();
  }

  function note() {
    const fields = new URLSearchParams(location.search);
    for (const name of ["from", "to", "attempt"]) {
      if (view[name] === null || view[name] === "") fields.delete(name);
      else fields.set(name, view[name]);
    }
    const text = fields.toString();
    history.replaceState(null, "", location.pathname + (text ? `?${text}` : "") + location.hash);
    document.getElementById("from").value = view.from ?? "";
    document.getElementById("to").value = view.to ?? "";
    document.getElementById("attempt").value = view.attempt;
  }

  // --- Asking

  let asking = null;

  async function ask(extra) {
    const names = [...new Set(figures.flatMap((f) => f.dataset.signals.split(" ")))].slice(0, MOST_SIGNALS);
    const width = Math.max(...figures.map((f) => f.clientWidth), 200);
    const fields = new URLSearchParams(names.map((name) => ["signal", name]));
    fields.set("bands", "true");
    fields.set("max_points", String(Math.min(1200, Math.round(1.3 * width))));
    if (view.attempt) fields.set("attempt", view.attempt);
    for (const [name, value] of Object.entries(extra)) if (value !== null) fields.set(name, value);
    if (asking) asking.abort();
    asking = new AbortController();
    const reply = await fetch(`/v1/runs/${run}/series?${fields}`, { credentials: "same-origin", signal: asking.signal });
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.detail || `status ${reply.status}`);
    return body.series;
  }

  async function load() {
    const began = performance.now();
    charts.dataset.state = "loading";
    if (answer) for (const figure of figures) figure.classList.add("stale");
    try {
      const series = await ask({ from_step: view.from, to_step: view.to });
      const all = series.flatMap((one) => one.points);
      const steps = all.map((p) => p.step);
      answer = {
        series: new Map(series.map((one) => [one.signal, one.points])),
        first: steps.reduce((a, b) => Math.min(a, b), Infinity),
        last: steps.reduce((a, b) => Math.max(a, b), -Infinity),
        most: Math.max(1, ...series.map((one) => one.points.length)),
      };
      if (!all.length) Object.assign(answer, { first: view.from ?? 0, last: view.to ?? 1 });
      colours ??= readColours();
      for (const figure of figures) draw(figure);
      complain(null);
      charts.dataset.state = "drawn";
      charts.dataset.ms = String(Math.round(performance.now() - began));
    } catch (error) {
      if (error.name === "AbortError") return;
      charts.dataset.state = "failed";
      complain(`The signals could not be read: ${error.message}`);
    }
  }

  function complain(words) {
    let problem = document.getElementById("chart-problem");
    if (!words) return problem?.remove();
    if (!problem) {
      problem = document.createElement("p");
      problem.id = "chart-problem";
      problem.className = "alert";
      problem.setAttribute("role", "alert");
      charts.before(problem);
    }
    problem.textContent = `${words} `;
    const again = document.createElement("button");
    again.type = "button";
    again.textContent = "try again";
    again.addEventListener("click", load);
    problem.append(again);
  }

  // Only what is new, while the window is open to the right; all of it once the curves have grown by half.
  let following = null;
  function follow() {
    if (following !== null || view.to !== null || document.hidden || !answer) return;
    following = setTimeout(async () => {
      following = null;
      if (charts.dataset.state === "loading" || !answer) return;
      if ([...answer.series.values()].some((points) => points.length > 1.5 * answer.most + 50)) return load();
      try {
        const attempt = view.attempt || about().dataset.attempt;
        const news = await ask({ from_step: answer.last + 1, attempt });
        for (const { signal, points } of news) {
          answer.series.get(signal)?.push(...points);
          for (const p of points) answer.last = Math.max(answer.last, p.step);
        }
        if (news.some((one) => one.points.length)) for (const figure of figures) draw(figure);
      } catch { /* the next step asks again */ }
    }, FOLLOW_MS);
  }

  document.addEventListener("foreshock:step", (event) => { if (event.detail.run === run) follow(); });
  let attempt = about().dataset.attempt;
  document.addEventListener("foreshock:shown", () => {
    marks = ForeshockMarks.read();
    if (about().dataset.attempt !== attempt) {
      attempt = about().dataset.attempt;
      return load();
    }
    for (const { u } of plots.values()) u.redraw(false);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) follow(); });
  document.addEventListener("foreshock:theme", () => {
    colours = readColours();
    for (const { u } of plots.values()) u.destroy();
    plots.clear();
    if (answer) for (const figure of figures) draw(figure);
  });

  // --- Hands

  function step(figure, forward) {
    const { u } = plots.get(figure);
    const last = u.data[0].length - 1;
    const at = u.cursor.idx === null || u.cursor.idx === undefined || u.cursor.left < 0 ? (forward ? -1 : last + 1) : u.cursor.idx;
    const next = Math.min(last, Math.max(0, at + (forward ? 1 : -1)));
    figure.querySelector(".reading").setAttribute("aria-live", "polite");
    u.setCursor({ left: u.valToPos(u.data[0][next], "x"), top: u.over.clientHeight / 2 });
  }

  function closer(figure, factor) {
    const { u } = plots.get(figure);
    const [first, last] = bounds();
    const middle = u.cursor.left >= 0 && u.cursor.idx !== null ? u.data[0][u.cursor.idx] : (first + last) / 2;
    const half = Math.max(1, ((last - first) * factor) / 2);
    if (half * 2 > 1e12) return zoom(null, null);
    const to = Math.round(middle + half);
    const newest = asNumber(about().dataset.last);
    // Beyond the newest step lies nothing: the window stays open there, and follows.
    zoom(Math.max(0, Math.round(middle - half)), newest !== null && to >= newest ? null : to);
  }

  charts.addEventListener("keydown", (event) => {
    const figure = event.target.closest("figure");
    if (!event.target.matches(".plot") || !plots.has(figure) || event.ctrlKey || event.metaKey || event.altKey) return;
    const { u } = plots.get(figure);
    const act = {
      ArrowRight: () => step(figure, true), ArrowLeft: () => step(figure, false), "+": () => closer(figure, 0.5),
      "=": () => closer(figure, 0.5), "-": () => closer(figure, 2), 0: () => zoom(null, null),
      Enter: () => { if (u.cursor.idx !== null && u.cursor.left >= 0) location.assign(`/runs/${run}/steps/${u.data[0][u.cursor.idx]}`); },
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  const form = document.getElementById("window");
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => {
    view.attempt = document.getElementById("attempt").value;
    const [from, to] = ["from", "to"].map((id) => asNumber(document.getElementById(id).value || null));
    zoom(from, to);
  });
  form.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const steps = Number(button.dataset.lastSteps || 0);
    const last = asNumber(about().dataset.last) ?? answer?.last ?? 0;
    zoom(steps ? Math.max(0, last - steps + 1) : null, null);
  });

  let resizing = null;
  new ResizeObserver(() => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => {
      for (const [figure, { u }] of plots) {
        const holder = figure.querySelector(".plot");
        if (holder.clientWidth !== u.width) u.setSize({ width: Math.max(holder.clientWidth, 120), height: holder.clientHeight });
      }
    });
  }).observe(charts);

  note();
  load();
})();
