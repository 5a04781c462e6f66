//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
)

func TestReadSocketDir(t *testing.T) {
	var before []byte
	before = protowire.AppendTag(before, 1, protowire.BytesType)
	before = protowire.AppendString(before, "the task's id")
	before = protowire.AppendTag(before, 4, protowire.VarintType)
	before = protowire.AppendVarint(before, 300)
	with := func(dir string) []byte {
		message := protowire.AppendTag(bytes.Clone(before), socketDirField, protowire.BytesType)
		return protowire.AppendString(message, dir)
	}
	cases := map[string]struct {
		message []byte
		want    string
	}{
		"given":     {with("/run/berth/s"), "/run/berth/s"},
		"absent":    {before, defaultSocketDir},
		"empty":     {nil, defaultSocketDir},
		"relative":  {with("s"), defaultSocketDir},
		"truncated": {with("/run/berth/s")[:len(before)+5], defaultSocketDir},
		"garbage":   {bytes.Repeat([]byte{0xff}, 40), defaultSocketDir},
	}
	for name, c := range cases {
		if got := readSocketDir(bytes.NewReader(c.message)); got != c.want {
			t.Errorf("%s: %q; want %q", name, got, c.want)
		}
	}
}

func TestSandboxOf(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	for text, want := range map[string]string{
		`{}`: "own",
		`{"annotations":{"io.kubernetes.cri.sandbox-id":"pod"}}`: "pod",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := sandboxOf(path, "own"); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", text, got, err, want)
		}
	}
	if _, err := sandboxOf(path+"x", "own"); err == nil {
		t.Error("a missing spec is accepted")
	}
}
