"""Grafana boards as code: one board a file, built to JSON in `built/` by `foreshock dashboards build`.

Curves over steps read PostgreSQL's `grafana_*` views (a contract, docs/grafana.md); the pipeline board
reads Prometheus.
"""

from __future__ import annotations
