#!/bin/sh
# Turn secret files into what Prefect reads, then become the command.
#
# Each file is read only where it is mounted, so every service is given only what it needs. Nothing
# of them stands in the compose file, in an image, or in a command line.
set -eu

secrets=${SECRETS_DIR:-/run/secrets}

if [ -r "$secrets/postgres_password" ]; then
    password=$(cat "$secrets/postgres_password")
    case $password in
        *[!A-Za-z0-9_.~-]*)
            echo "postgres_password: letters, digits and _.~- only, for it becomes part of a URL" >&2
            exit 2
            ;;
    esac
    host=${POSTGRES_HOST:-postgres}
    PREFECT_SERVER_DATABASE_CONNECTION_URL="postgresql+asyncpg://prefect:$password@$host/prefect"
    export PREFECT_SERVER_DATABASE_CONNECTION_URL
fi

if [ -r "$secrets/prefect_auth" ]; then
    PREFECT_SERVER_API_AUTH_STRING=$(cat "$secrets/prefect_auth")
    PREFECT_API_AUTH_STRING=$PREFECT_SERVER_API_AUTH_STRING
    export PREFECT_SERVER_API_AUTH_STRING PREFECT_API_AUTH_STRING
fi

exec "$@"
