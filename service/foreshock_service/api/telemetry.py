"""The service's own health as Prometheus metrics, in a registry of its own (several apps may live in one process)."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Telemetry:
    """Counters that the door keeps. Routes are templates, so labels stay bounded."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "foreshock_http_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self.request_seconds = Histogram(
            "foreshock_http_request_seconds",
            "Time to answer, long-polls left out.",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.rate_limited = Counter("foreshock_http_rate_limited", "Requests answered 429.", registry=self.registry)
        self.envelopes = Counter(
            "foreshock_ingest_envelopes",
            "Envelopes by outcome: stored, refused, failed.",
            ("outcome",),
            registry=self.registry,
        )
        self.items = Counter("foreshock_ingest_items", "Frames and notices stored.", registry=self.registry)
        self.ingest_bytes = Counter("foreshock_ingest_bytes", "Bytes of envelopes received.", registry=self.registry)
        build = Gauge("foreshock_build_info", "1, with the version as a label.", ("version",), registry=self.registry)
        build.labels(version("foreshock")).set(1)
        self.database_up = Gauge(
            "foreshock_database_up", "1 where the database answered this scrape.", registry=self.registry
        )
        self.leads = Gauge(
            "foreshock_leads",
            "1 on the one replica that shows runs and backlog, 0 on the others.",
            registry=self.registry,
        )
        self.heartbeat = Gauge(
            "foreshock_heartbeat_timestamp_seconds",
            "When this process last had its database and every worker alive, as of a scrape.",
            registry=self.registry,
        )
        # The child of a metric costs more to find than to count with.
        self.outcome = lru_cache(8)(self.envelopes.labels)
        self._requests = lru_cache(4096)(self.requests.labels)
        self._seconds = lru_cache(512)(self.request_seconds.labels)
        self.waiters = Gauge("foreshock_waiters", "Long-polls and event streams open now.", registry=self.registry)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Counts one answer. `route` is the template, never the path that was asked for."""
        known = method if method in ("GET", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS", "PUT") else "other"
        self._requests(known, route, str(status)).inc()
        if not route.endswith(("/health", "/events")):
            self._seconds(route).observe(seconds)
