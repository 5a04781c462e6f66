#!/bin/sh
# Runs every fuzz target of the workspace for the time given, one after the other.
set -eu
for dir in $(git ls-files '*_test.go' | xargs grep -l '^func Fuzz' | xargs -n1 dirname | sort -u); do
	for target in $(grep -ho '^func Fuzz[A-Za-z0-9_]*' "$dir"/*_test.go | sed 's/^func //'); do
		echo "fuzz ./$dir $target for $1"
		go test "./$dir" -run '^$' -fuzz "^$target\$" -fuzztime "$1"
	done
done
