// Keeps the page current: when an event says that something changed, the main part is fetched again.
"use strict";
(() => {
  const live = document.getElementById("live");
  let waiting = null;
  async function refresh() {
    waiting = null;
    // A form in use is left alone; the next change brings the news.
    if (document.activeElement && document.activeElement.closest("main form")) return;
    const answer = await fetch(location.pathname, { credentials: "same-origin" });
    if (!answer.ok || answer.redirected) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.getElementById("main").replaceWith(page.getElementById("main"));
  }
  function soon() { if (waiting === null) waiting = setTimeout(refresh, 300); }
  const events = new EventSource("/v1/events");
  for (const kind of ["run", "incident", "command"]) events.addEventListener(kind, soon);
  events.onopen = () => { live.textContent = "live"; };
  events.onerror = () => { live.textContent = "not connected; trying again"; };
})();
