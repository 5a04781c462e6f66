#!/bin/bash
# Checks that no go command has a reason to change a module file: go.work.sum has the sum of every module that
# the workspace selects, and each module builds by itself from its own go.mod and go.sum. It changes nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."

modules=$(go list -m -f '{{.Dir}}')
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
git ls-files -z -- go.work go.work.sum '*go.mod' '*go.sum' | xargs -0 cp --parents -t "$tmp"
(cd "$tmp" && GOWORK=$tmp/go.work go list -m all >/dev/null)
if ! diff -u go.work.sum "$tmp/go.work.sum"; then
	echo "go.work.sum is not complete: run go list -m all, and commit the file" >&2
	exit 1
fi
for dir in $modules; do
	if ! (cd "$dir" && GOWORK=off go list -mod=readonly -deps -test ./... >/dev/null); then
		echo "$dir/go.mod does not match what the module imports: run go work sync, then GOWORK=off go mod tidy there" >&2
		exit 1
	fi
done
