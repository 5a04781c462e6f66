package e2e

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// TestThePlaceIsCurrentAfterResume: session.json tells of this wake, not of
// the one before, and what a process did to a copy in its own root does not count.
func TestThePlaceIsCurrentAfterResume(t *testing.T) {
	placeIsCurrent(t, common.For(t))
}

func placeIsCurrent(t *testing.T, e *testenv.Env) {
	eachTier(t, e, func(t *testing.T, tier, template string) {
		c := e.Client("acme", "ann-"+tier)
		o := sdk.OpenOptions{Template: template}
		s := open(t, c, o)
		type place struct {
			Origin string
			Since  time.Time `json:"awake_since"`
		}
		read := func() (p place) {
			text := sh(t, s, "cat /run/berth/session.json")
			if err := json.Unmarshal([]byte(text), &p); err != nil {
				t.Fatalf("%v: %s", err, text)
			}
			if info, err := s.Info(t.Context()); err != nil || strings.TrimSpace(info) != text {
				t.Errorf("info says %q (%v), inside it says %q", info, err, text)
			}
			return p
		}
		first := read()
		for _, try := range []string{"rm /run/berth/session.json", "mv /run/berth /run/elsewhere", "umount /run/berth", "mount -o remount,rw /run/berth"} {
			if out, err := s.Output(t.Context(), "sh", "-c", try); err == nil {
				t.Errorf("%s went well: %s", try, out)
			}
		}
		if err := s.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		s = open(t, c, o)
		if second := read(); first.Origin != "created" || second.Origin != "resumed" || !second.Since.After(first.Since) {
			t.Errorf("first %+v, after the resume %+v", first, second)
		}
	})
}

// TestAFullDiskStillWakes: a session that filled its disk to the last block
// sleeps and wakes, a program gets a clear ENOSPC, and there is room to delete.
func TestAFullDiskStillWakes(t *testing.T) { fullDiskWakes(t, common.For(t)) }

func fullDiskWakes(t *testing.T, e *testenv.Env) {
	eachTier(t, e, func(t *testing.T, tier, template string) {
		c := e.Client("acme", "full-"+tier)
		o := sdk.OpenOptions{Template: template}
		s := open(t, c, o)
		sh(t, s, `echo precious > /root/f
			for m in 2048 1024 512 256 128 64 32 16 8 4 2 1; do i=0
			while [ $i -lt 3 ] && fallocate -l ${m}M /root/big.$m.$i 2>/dev/null; do i=$((i+1)); done; done
			cat /dev/zero > /root/rest 2>/dev/null; i=0; while echo x > /root/small.$i; do i=$((i+1)); done 2>/dev/null; sync`)
		for range 2 {
			if err := s.Close(t.Context()); err != nil {
				t.Fatalf("a full session does not sleep: %v", err)
			}
			if s = open(t, c, o); s.Origin() != sdk.Resumed {
				t.Fatalf("it is %s", s.Origin())
			}
		}
		if got := sh(t, s, "df --output=avail / | tail -n1; cat /root/f; { cat /dev/zero > /root/more; } 2>&1 || true"); !strings.Contains(got, "No space left") || !strings.Contains(got, "precious") {
			t.Errorf("a full disk says %q", got)
		}
		if _, err := s.Files().Write(t.Context(), "/root/upload", strings.NewReader(strings.Repeat("x", 1<<20)), sdk.WriteOptions{}); err == nil || !strings.Contains(err.Error(), "space") {
			t.Errorf("an upload to a full disk: %v", err)
		}
		if got := sh(t, s, "rm -f /root/big.* /root/rest /root/small.* /root/more && echo more > /root/g && cat /root/f /root/g"); got != "precious\nmore" {
			t.Errorf("after deleting: %q", got)
		}
	})
}
