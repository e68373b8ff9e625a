#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# packages.sh PACKAGE...: makes sure that Debian packages are installed. As root it installs what is missing; otherwise it
# prints the one command that would. Does nothing where dpkg is absent.
set -eu
command -v dpkg-query >/dev/null 2>&1 || { echo "packages.sh: no dpkg here; needed: $*" >&2; exit 0; }
missing=
for p in "$@"; do
  case "$(dpkg-query -W -f='${Status}' "$p" 2>/dev/null || true)" in
  *"install ok installed") ;;
  *) missing="$missing $p" ;;
  esac
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ]; then
  echo "installing:$missing" >&2
  export DEBIAN_FRONTEND=noninteractive
  # shellcheck disable=SC2086
  apt-get install -y --no-install-recommends $missing >/dev/null 2>&1 || {
    apt-get update >/dev/null
    apt-get install -y --no-install-recommends $missing >/dev/null
  }
else
  echo "missing packages; run:  sudo apt-get install -y$missing" >&2
  exit 1
fi
