// Makes the page quick to use: news as they come, buttons without a reload, keys. Without it everything still works.
"use strict";
(() => {
  const body = document.body;
  const byId = (id) => document.getElementById(id);
  const LEAST_GAP_MS = 1500;
  const LEISURE_MS = 15000;
  body.classList.add("scripted");

  // --- The main part, as the server renders it

  let generation = 0;
  let fetchedAt = performance.now();

  function keepOpen(old, next) {
    for (const open of old.querySelectorAll("details[open][id]")) {
      const same = next.querySelector(`#${CSS.escape(open.id)}`);
      if (same) same.open = true;
    }
  }

  function replace(old, next) {
    keepOpen(old, next);
    if (old.isEqualNode(next)) return;
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    // A choice in the middle of being made is left alone; the next change brings the news.
    if (focused && focused.matches("select, input, textarea")) return;
    const anchor = focused && (focused.id || focused.getAttribute("href"));
    const scrolled = [...old.querySelectorAll(".tall")].map((e) => e.scrollTop);
    markFresh(old, next);
    old.replaceWith(next);
    next.querySelectorAll(".tall").forEach((e, i) => { e.scrollTop = scrolled[i] || 0; });
    if (!anchor) return;
    const same = focused.id ? byId(focused.id) : next.querySelector(`a[href="${CSS.escape(anchor)}"]`);
    (same || next.querySelector("a, button") || byId("main")).focus({ preventScroll: true });
  }

  function markFresh(old, next) {
    const known = new Set([...old.querySelectorAll(".card")].map((card) => card.id));
    for (const card of next.querySelectorAll(".card")) if (!known.has(card.id)) card.classList.add("fresh");
  }

  function show(page, { form = false } = {}) {
    const fresh = new DOMParser().parseFromString(page, "text/html");
    const main = fresh.getElementById("main");
    if (!main) return false;
    document.title = fresh.title;
    const parts = [...main.querySelectorAll("[data-live]")];
    const here = document.querySelectorAll("#main [data-live]");
    if (parts.length !== here.length || parts.some((part) => !byId(part.id))) {
      // Another shape: the first run, the first step. Charts and filters are set up anew.
      location.reload();
      return true;
    }
    for (const part of parts) replace(byId(part.id), part);
    tick();
    document.dispatchEvent(new CustomEvent("foreshock:shown", { detail: { form } }));
    return true;
  }

  async function refresh(address = location.pathname + location.search, how = {}) {
    const mine = ++generation;
    fetchedAt = performance.now();
    try {
      const answer = await fetch(address, { credentials: "same-origin" });
      if (answer.redirected && new URL(answer.url).pathname === "/login") return location.assign("/login");
      if (!answer.ok || mine !== generation) return;
      show(await answer.text(), how);
    } catch { /* no answer: the live sign says so */ }
  }

  let waiting = null;
  function soon(least = LEAST_GAP_MS) {
    if (waiting !== null || document.hidden) return;
    const wait = Math.max(150, fetchedAt + least - performance.now());
    waiting = setTimeout(() => { waiting = null; refresh(); }, wait);
  }

  // --- News

  const live = byId("live");
  const steps = new Map();
  let told = null;

  function hear({ state, kind, data }) {
    if (state) {
      live.textContent = { live: "live", lost: "not connected; trying again", connecting: "connecting" }[state];
      live.className = `live ${state === "live" ? "on" : state === "lost" ? "off" : ""}`;
      // What changed while nobody listened is not told again.
      if (state === "live" && told === "lost") soon();
      told = state;
      return;
    }
    const run = kind === "run" ? data.id : data.run;
    const about = byId("about");
    if (about && about.dataset.run !== run) return;
    if (kind !== "run") {
      // The stream begins by telling how things stand, which this page shows already.
      const card = byId(`${kind}-${data.id}`);
      const same = card && card.dataset.state === `${data.status || data.state} ${data.severity || ""}`.trim();
      return same && !data.gone ? undefined : soon();
    }
    const { last_step: step, ...rest } = data;
    const before = steps.get(run);
    const summary = JSON.stringify(rest);
    steps.set(run, { step, summary });
    const place = about || document.querySelector(`[data-run="${CSS.escape(run)}"]`);
    if (before && before.summary !== summary) return soon();
    if (!before && place && place.dataset.state !== `${data.verdict} ${data.status} ${data.attempt}`) return soon();
    // A new run, unless it is one of those that the filter leaves out: they are all told of at the beginning.
    if (!before && !place && (!location.search || performance.now() > 4000)) return soon();
    if (before && before.step === step) return;
    const shown = place && place.querySelector("[data-step]");
    if (shown && step !== null) shown.textContent = step;
    document.dispatchEvent(new CustomEvent("foreshock:step", { detail: { run, step } }));
    if (before) soon(LEISURE_MS);
  }

  function listen() {
    if (!live) return;
    if (window.SharedWorker) {
      const worker = new SharedWorker(body.dataset.stream, { name: "foreshock-events" });
      worker.port.onmessage = (message) => hear(message.data);
      worker.onerror = () => hear({ state: "lost" });
      addEventListener("pagehide", () => worker.port.postMessage("bye"));
      addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
      return;
    }
    // No shared worker: this tab's own stream, given back while nobody looks.
    let events = null;
    const open = () => {
      if (document.hidden) { if (events) events.close(); events = null; return; }
      if (events) return;
      events = new EventSource("/v1/events");
      events.onopen = () => hear({ state: "live" });
      events.onerror = () => hear({ state: "lost" });
      for (const kind of ["run", "incident", "command"]) {
        events.addEventListener(kind, (event) => hear({ kind, data: JSON.parse(event.data) }));
      }
    };
    document.addEventListener("visibilitychange", open);
    open();
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) soon(); });

  // --- Times

  const ahead = Date.now() / 1000 - Number(body.dataset.now);
  function span(seconds) {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
    }
    return `${Math.max(0, Math.floor(seconds))} s`;
  }
  function tick() {
    const now = Date.now() / 1000 - ahead;
    for (const time of document.querySelectorAll("time[data-at]")) {
      const text = span(now - Number(time.dataset.at));
      if (time.textContent !== text) time.textContent = text;
    }
  }
  setInterval(tick, 5000);

  // --- Buttons and the filter

  const said = byId("said");
  let silent = null;
  function say(words) {
    said.textContent = words;
    said.hidden = false;
    clearTimeout(silent);
    silent = setTimeout(() => { said.hidden = true; }, 6000);
  }

  async function press(form, button) {
    // Not disabled: that would take the focus away.
    if (form.dataset.busy) return;
    form.dataset.busy = "1";
    const label = button.textContent;
    try {
      const answer = await fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) });
      const text = await answer.text();
      if (answer.ok) {
        generation += 1;
        show(text, { form: true });
        say(`${label}: done`);
      } else {
        const refusal = new DOMParser().parseFromString(text, "text/html").querySelector("#refusal");
        say(refusal ? `Not done: ${refusal.textContent}` : `Not done (${answer.status}).`);
        soon(0);
      }
    } catch {
      say("Not done: the service does not answer.");
    } finally {
      delete form.dataset.busy;
    }
  }

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.matches("[data-press]")) {
      event.preventDefault();
      press(form, event.submitter || form.querySelector("button"));
    } else if (form.id === "filter") {
      event.preventDefault();
      filter();
    }
  });

  function filter() {
    const fields = new URLSearchParams(new FormData(byId("filter")));
    for (const [name, value] of [...fields]) {
      if (!value || (name === "sort" && value === "health")) fields.delete(name);
    }
    const query = fields.toString();
    const address = query ? `/?${query}` : "/";
    history.replaceState(null, "", address);
    refresh(address, { form: true });
  }
  let typing = null;
  document.addEventListener("input", (event) => {
    if (!event.target.closest("#filter")) return;
    clearTimeout(typing);
    typing = setTimeout(filter, event.target.type === "search" ? 180 : 0);
  });

  // --- Theme

  const THEMES = ["system", "light", "dark"];
  const themeButton = byId("theme");
  const root = document.documentElement;
  function theme(next) {
    const chosen = next || root.dataset.theme || "system";
    if (chosen === "system") delete root.dataset.theme;
    else root.dataset.theme = chosen;
    try {
      localStorage.setItem("foreshock-theme", chosen);
    } catch { /* storage is switched off: until the next page */ }
    if (themeButton) themeButton.textContent = `theme: ${chosen}`;
    if (next) document.dispatchEvent(new CustomEvent("foreshock:theme"));
  }
  function nextTheme() {
    theme(THEMES[(THEMES.indexOf(root.dataset.theme || "system") + 1) % THEMES.length]);
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new CustomEvent("foreshock:theme"));
  });

  // --- Keys

  const help = byId("help");
  function along(selector, forward) {
    const all = [...document.querySelectorAll(selector)];
    if (!all.length) return;
    const at = all.indexOf(document.activeElement);
    const next = at < 0 ? (forward ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + (forward ? 1 : -1)));
    all[next].focus();
    all[next].scrollIntoView({ block: "nearest" });
  }
  const LIST = byId("charts") ? ".plot[tabindex]" : ".row .name a";
  const KEYS = {
    "/": () => (byId("q") || byId("signal"))?.focus(),
    j: () => along(LIST, true),
    k: () => along(LIST, false),
    n: () => along(".card .actions button", true),
    h: () => location.assign("/"),
    t: nextTheme,
    "?": () => help.showModal(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || (help && help.open)) return;
    if (event.target.matches("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const act = KEYS[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });

  for (const [button, act] of [[themeButton, nextTheme], [byId("keys"), KEYS["?"]]]) {
    if (!button) continue;
    button.hidden = false;
    button.addEventListener("click", act);
  }
  theme();
  tick();
  listen();
})();
