// Incidents, commands and checkpoints on the step axis, read from the page's own tables.
"use strict";
window.ForeshockMarks = (() => {
  function read() {
    return [...document.querySelectorAll("tr[data-mark]")].flatMap((row) => {
      const { mark, severity, attempt, from, to, label } = row.dataset;
      if (from === "") return [];
      return [{ mark, severity, attempt: Number(attempt), from: Number(from), to: to ? Number(to) : null, label }];
    });
  }

  function incident(u, mark, colours) {
    const { ctx, bbox } = u;
    const left = u.valToPos(mark.from, "x", true);
    ctx.fillStyle = mark.severity === "critical" ? colours.critical : colours.warning;
    ctx.fillRect(left - devicePixelRatio / 2, bbox.top, 1.5 * devicePixelRatio, bbox.height);
  }

  // Where several incidents are open at once the ground is shaded once: by the gravest.
  function shade(u, marks, colours) {
    const { ctx, bbox } = u;
    const spans = marks.filter((m) => m.mark === "incident").map((m) => ({ ...m, to: m.to ?? u.scales.x.max }));
    const edges = [...new Set(spans.flatMap((m) => [m.from, m.to]))].sort((a, b) => a - b);
    for (let i = 0; i + 1 < edges.length; i++) {
      const [first, last] = [edges[i], edges[i + 1]];
      const open = spans.filter((m) => m.from <= first && m.to >= last);
      if (!open.length) continue;
      ctx.fillStyle = open.some((m) => m.severity === "critical") ? colours.shadeCritical : colours.shadeWarning;
      const left = Math.round(u.valToPos(first, "x", true));
      ctx.fillRect(left, bbox.top, Math.round(u.valToPos(last, "x", true)) - left, bbox.height);
    }
  }

  function command(u, mark, colours) {
    const { ctx, bbox } = u;
    const x = u.valToPos(mark.from, "x", true);
    const size = 4.5 * devicePixelRatio;
    ctx.fillStyle = ctx.strokeStyle = colours.command;
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top - size);
    ctx.lineTo(x + size, bbox.top);
    ctx.lineTo(x, bbox.top + size);
    ctx.lineTo(x - size, bbox.top);
    ctx.fill();
  }

  function checkpoint(u, mark, colours) {
    const { ctx, bbox } = u;
    const x = u.valToPos(mark.from, "x", true);
    const foot = bbox.top + bbox.height;
    const size = 3.5 * devicePixelRatio;
    const quarantined = mark.label.endsWith("quarantined");
    ctx.fillStyle = quarantined ? colours.critical : mark.label.endsWith("healthy") ? colours.healthy : colours.unknown;
    ctx.beginPath();
    ctx.moveTo(x, foot - 2 * size);
    ctx.lineTo(x + size, foot);
    ctx.lineTo(x - size, foot);
    ctx.fill();
  }

  const DRAW = { incident, command, checkpoint };

  // Under the curves: spans; over them: what happened at one step. A mark outside the window is not drawn.
  function draw(u, marks, colours, kinds) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 6 * devicePixelRatio, bbox.width, bbox.height + 6 * devicePixelRatio);
    ctx.clip();
    const { min, max } = u.scales.x;
    if (kinds.includes("incident")) shade(u, marks, colours);
    for (const mark of marks) {
      if (!kinds.includes(mark.mark)) continue;
      const end = mark.mark === "incident" ? (mark.to ?? Infinity) : mark.from;
      if (end < min || mark.from > max) continue;
      DRAW[mark.mark](u, mark, colours);
    }
    ctx.restore();
  }

  function at(marks, step) {
    return marks.filter((m) => m.mark === "incident" ? step >= m.from && step <= (m.to ?? Infinity) : m.from === step);
  }

  return { read, draw, at };
})();
