#!/bin/sh
# Says in one sentence that this machine has too little disk or memory for the tests, before they begin.
set -eu
need_disk=20  # GiB: a build cache of 8, two disk pools of 2, images and templates
need_memory=6 # GiB: two emulated VMs, a cluster of eleven processes and a build
for dir in "${TMPDIR:-/tmp}" "${BERTH_CACHE:-$HOME}"; do
	free=$(df -Pk "$dir" | awk 'NR == 2 { print int($4 / 1048576) }')
	if [ "$free" -lt "$need_disk" ]; then
		echo "room: the tests need $need_disk GiB of free disk in $dir, and there are $free GiB" >&2
		exit 1
	fi
done
free=$(awk '$1 == "MemAvailable:" { print int($2 / 1048576) }' /proc/meminfo)
if [ "$free" -lt "$need_memory" ]; then
	echo "room: the tests need $need_memory GiB of available memory, and there are $free GiB" >&2
	exit 1
fi
