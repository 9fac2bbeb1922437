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
    const right = mark.to === null ? bbox.left + bbox.width : u.valToPos(mark.to, "x", true);
    ctx.fillStyle = mark.severity === "critical" ? colours.shadeCritical : colours.shadeWarning;
    ctx.fillRect(left, bbox.top, Math.max(right - left, 1), bbox.height);
    ctx.fillStyle = mark.severity === "critical" ? colours.critical : colours.warning;
    ctx.fillRect(left - devicePixelRatio / 2, bbox.top, 1.5 * devicePixelRatio, bbox.height);
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
