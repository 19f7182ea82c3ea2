#!/bin/sh
# Make the secrets that compose.yaml mounts, once; what is there is left alone.
set -eu
umask 077

folder=$(dirname "$0")/secrets
mkdir -p "$folder"

random() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

if [ ! -e "$folder/postgres_password" ]; then
    random >"$folder/postgres_password"
fi
if [ ! -e "$folder/prefect_auth" ]; then
    printf 'admin:%s' "$(random)" >"$folder/prefect_auth"
fi
# The containers' user is not the owner of these files, and each file is mounted by itself; nobody
# else on this machine enters the folder.
chmod 0644 "$folder/postgres_password" "$folder/prefect_auth"
chmod 0700 "$folder"
echo "user and password of the UI: $(cat "$folder/prefect_auth")"
