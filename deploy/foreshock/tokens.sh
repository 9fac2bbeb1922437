#!/bin/sh
# Makes, once, the tokens that the other services and you start with, in $FORESHOCK_TOKENS. The service refuses to listen
# beyond loopback without one. Tokens for trainers: `foreshock token create trainer --scope ingest`.
set -eu
folder="${FORESHOCK_TOKENS:-/run/foreshock/tokens}"
foreshock db upgrade
make() {
    file="$folder/$1"
    if [ ! -s "$file" ]; then
        # Into a file beside it first: a half-written token would be kept for ever.
        foreshock token create "$2" --scope "$3" >"$file.new"
        chmod "$4" "$file.new"
        mv "$file.new" "$file"
    fi
}
# Prometheus runs under a user of its own and reads this one through a read-only mount.
make foreshock_read_token prometheus read 0444
make admin_token compose admin 0400
