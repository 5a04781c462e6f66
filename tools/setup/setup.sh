#!/bin/sh
# Installs by name what Berth's build and tests need on Debian 12 and this machine lacks.
# Arguments are further packages. Prints what it installs; does nothing, quickly, when all is there. Needs root only when something is missing.
set -eu

need=""
have() { command -v "$1" >/dev/null 2>&1; }
want() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'ok installed' || need="$need $1"; }

if ! have go; then
	echo "setup: Go 1.26 or newer is needed; see https://go.dev/doc/install" >&2
	exit 1
fi
if ! have dpkg-query; then
	echo "setup: not a Debian system; please see tools/setup/setup.sh for the programs that are needed" >&2
	exit 0
fi
want gcc; want libc6-dev; want pkg-config; want libseccomp-dev   # runc is built with seccomp
want mmdebstrap                                                  # the default image
want e2fsprogs; want xfsprogs; want mount; want util-linux; want git; want ca-certificates
want procps; want iproute2
want qemu-system-x86; want erofs-utils; want xz-utils            # the tier microvm
for p in "$@"; do want "$p"; done                                # what a benchmark compares with

[ -z "$need" ] && exit 0
if [ "$(id -u)" != 0 ]; then
	echo "setup: please install as root: apt-get install$need" >&2
	exit 1
fi
echo "setup: apt-get install$need"
log=$(mktemp)
if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $need; } >"$log" 2>&1; then
	tail -n 20 "$log" >&2
	echo "setup: apt-get failed; its log is $log" >&2
	exit 1
fi
rm -f "$log"
