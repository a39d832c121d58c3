#!/bin/sh
# Starts the server in a container, with the arguments of `skyrl-tx serve`.
#
# Other machines may reach a published port, so the server requires API keys. The first start creates an admin key and
# prints it once. Data of a container that ran with --no-auth then belongs to the owner of this key. No key is created
# with --no-auth, or if arguments name another place for the data: then create one with `skyrl-tx keys create`.
set -eu

needs_key=true
case "${SKYRL_TX_NO_AUTH:-}" in 1 | [Tt]rue | [Yy]es | [Oo]n) needs_key=false ;; esac
for argument in "$@"; do
    case "$argument" in --no-auth | --config* | --data-dir* | --database-url* | -h | --help) needs_key=false ;; esac
done

if "$needs_key"; then
    skyrl-tx keys create root --admin --if-none
fi
exec skyrl-tx serve --host 0.0.0.0 "$@"
