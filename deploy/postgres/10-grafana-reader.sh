#!/bin/sh
# Run once by PostgreSQL's image on an empty data folder: the login that Grafana reads the `grafana_*` views with.
# The migrations grant the views to foreshock_grafana; this login is a member of it and can do nothing else.
set -eu
psql -v ON_ERROR_STOP=1 -v password="$GRAFANA_DB_PASSWORD" -v database="$POSTGRES_DB" \
    --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
CREATE ROLE foreshock_grafana NOLOGIN;
CREATE ROLE grafana_reader LOGIN PASSWORD :'password' IN ROLE foreshock_grafana CONNECTION LIMIT 20;
ALTER ROLE grafana_reader SET default_transaction_read_only = on;
ALTER ROLE grafana_reader SET statement_timeout = '30s';
GRANT CONNECT ON DATABASE :"database" TO grafana_reader;
SQL
