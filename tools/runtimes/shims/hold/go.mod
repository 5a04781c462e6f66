module github.com/berth-dev/berth/tools/runtimes/shims/hold

go 1.26.0
