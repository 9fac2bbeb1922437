// One event stream for all tabs: a browser allows six connections to a host, and a tab each would use them up.
"use strict";
const ports = new Set();
const KINDS = ["run", "incident", "command"];
let events = null;
let state = "connecting";
const known = new Map();

function tell(message) {
  for (const port of ports) port.postMessage(message);
}

function connect() {
  events = new EventSource("/v1/events");
  events.onopen = () => tell({ state: (state = "live") });
  events.onerror = () => {
    tell({ state: (state = "lost") });
    // A browser comes again by itself after a broken stream, and gives up after a refusal.
    if (events.readyState === EventSource.CLOSED) setTimeout(connect, 5000 + 5000 * Math.random());
  };
  for (const kind of KINDS) {
    events.addEventListener(kind, (event) => {
      const data = JSON.parse(event.data);
      if (data.gone) known.delete(`${kind} ${data.id}`);
      else known.set(`${kind} ${data.id}`, { kind, data });
      tell({ kind, data });
    });
  }
}

self.onconnect = (event) => {
  const port = event.ports[0];
  ports.add(port);
  port.onmessage = (message) => {
    if (message.data !== "bye") return;
    ports.delete(port);
    if (ports.size === 0 && events) {
      events.close();
      events = null;
      known.clear();
    }
  };
  if (events === null) connect();
  port.postMessage({ state });
  // A tab that comes later is told how things stand, as the stream told the first.
  for (const message of known.values()) port.postMessage(message);
};
