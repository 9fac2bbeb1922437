"""Which checkpoints the service has quarantined, asked once before a restart; a service that is down says nothing."""

from __future__ import annotations

import os

import httpx

TIMEOUT_S = 3.0


def quarantined(run: str) -> frozenset[str]:
    """Paths of the run's quarantined checkpoints. Needs a token that may read; else empty."""
    base = os.environ.get("FORESHOCK_URL", "").rstrip("/")
    if not base:
        return frozenset()
    token = os.environ.get("FORESHOCK_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        answer = httpx.get(f"{base}/v1/runs/{run}/checkpoints", headers=headers, timeout=TIMEOUT_S)
        rows = answer.json()["checkpoints"] if answer.status_code == 200 else []
        return frozenset(str(row["path"]) for row in rows if row["status"] == "quarantined")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return frozenset()
