# syntax=docker/dockerfile:1
# The service alone: no torch, no Grafana SDK. Two stages, so that neither compiler nor source is in the image.
FROM python:3.12.8-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY collectors collectors
COPY service service
COPY alembic alembic
COPY lab lab
COPY dashboards dashboards
RUN python -m venv /opt/foreshock \
    && /opt/foreshock/bin/pip install --no-cache-dir --disable-pip-version-check ".[postgres]"

FROM python:3.12.8-slim-bookworm
LABEL org.opencontainers.image.title="foreshock" \
      org.opencontainers.image.description="Training-health service for RL post-training of LLMs" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/foreshock /opt/foreshock
COPY deploy/foreshock/tokens.sh /opt/foreshock/bin/foreshock-tokens
# A new volume takes over the owner of the folder that it is mounted on.
RUN useradd --system --uid 10001 --user-group --home-dir /var/lib/foreshock --create-home foreshock \
    && install -d -o foreshock -g foreshock /run/foreshock/tokens
ENV PATH=/opt/foreshock/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_DATA_HOME=/var/lib \
    FORESHOCK_HOST=0.0.0.0 \
    FORESHOCK_PORT=8720
USER 10001:10001
WORKDIR /var/lib/foreshock
EXPOSE 8720
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8720/readyz', timeout=4)"]
ENTRYPOINT ["foreshock"]
CMD ["serve"]
