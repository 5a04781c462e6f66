package drivertest

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/services/hostagent/driver"
)

// memory: a session that takes the host's memory, or that dies of less than its own.
func (s *suite) memory(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	limit := int(s.spec(t, 1, 1).Limits.MemoryBytes >> 20)
	if s.hog(t, k, limit/4) {
		t.Error("it did not get a quarter of its limit")
	}
	if !s.hog(t, k, limit*2) {
		t.Error("it took twice its limit")
	}
	if !s.caps.OOMKillsAll && s.caps.Native { // without programs the probe itself is what took it
		k.must(t, "echo", "the first process lives")
	}
	if m, ok := d.(driver.Meter); ok {
		if st, err := m.Stats(ctx(t), sb.ID); err == nil && st.MemoryBytes > 2*uint64(limit)<<20 {
			t.Errorf("it uses %d bytes", st.MemoryBytes)
		}
	}
}

// memoryOfNeighbour: a session that runs out of memory and takes another one with it.
func (s *suite) memoryOfNeighbour(t *testing.T) {
	d := s.open(t)
	_, k := s.start(t, d, 1, 1)
	_, neighbour := s.start(t, d, 2, 1)
	s.hog(t, k, int(s.spec(t, 1, 1).Limits.MemoryBytes>>20)*2)
	neighbour.must(t, "echo", "the neighbour lives")
}

// processes: a session that starts processes until the host can start none.
func (s *suite) processes(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	limit := int(s.spec(t, 1, 1).Limits.PIDs)
	n, err := strconv.Atoi(k.must(t, "fork", "1000"))
	if err != nil || n >= max(limit, 400) {
		t.Errorf("it started %d processes with a limit of %d, %v", n, limit, err)
	}
	k.must(t, "echo", "the first process lives")
	if sb.PID != 0 {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", sb.PID)); err != nil {
			t.Errorf("the first process died of its limit: %v", err)
		}
	}
}

// forkBomb: processes that start processes faster than they are ended, so that the session can never be
// removed.
func (s *suite) forkBomb(t *testing.T) {
	d := s.open(t)
	before := s.host.Left(t)
	sb, k := s.start(t, d, 1, 1)
	_, neighbour := s.start(t, d, 2, 1)
	k.must(t, "bomb")
	neighbour.must(t, "echo", "the neighbour lives")
	began := time.Now()
	s.stop(t, d, sb)
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it was removed after %s", took)
	}
	if f := only(t, d); f.ID == sb.ID {
		t.Errorf("it is still shown: %+v", f)
	}
	s.stop(t, d, only(t, d).Sandbox)
	s.nothing(t, d, before)
}

// cpu: a session that takes more of the processors than its share.
func (s *suite) cpu(t *testing.T) {
	d := s.open(t)
	m := optional[driver.Meter](t, d, "Meter")
	spec := s.spec(t, 1, 1)
	spec.Limits.CPUMillis = 200
	sb := s.create(t, d, spec)
	if share := s.share(t, m, sb, s.talk(t, sb), 2000); share > 0.3 || share < 0.01 {
		t.Errorf("it got %.2f of a core with a limit of 0.20", share)
	}
}

// openFiles: a process that opens files until the host has none left.
func (s *suite) openFiles(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	spec.Limits.OpenFiles = 100
	k := s.talk(t, s.create(t, d, spec))
	if n := number(t, k.must(t, "openmany", "1000")); n > 100 || n < 10 {
		t.Errorf("a process opened %d files with a limit of 100", n)
	}
	k.must(t, "echo", "it lives")
}

// diskSpace: a session that fills the host's disk instead of its own, or whose neighbours find theirs
// full.
func (s *suite) diskSpace(t *testing.T) {
	d := s.open(t)
	_, k := s.start(t, d, 1, 1)
	_, neighbour := s.start(t, d, 2, 1)
	if _, err := k.Do("fill", "/var/filled", "2048"); !s.isFull(err) {
		t.Fatalf("it wrote two GiB, or failed for another reason: %v", err)
	}
	k.must(t, "echo", "it lives")
	neighbour.must(t, "write", "/var/mine", "the neighbour writes")
	k.must(t, "remove", "/var/filled")
	k.must(t, "write", "/var/again", "room again")
}

// fullStarts: a session whose disk is full and that never starts again.
func (s *suite) fullStarts(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	if _, err := k.Do("fill", "/var/filled", "2048"); !s.isFull(err) {
		t.Fatalf("it is not full: %v", err)
	}
	s.stop(t, d, sb)
	_, k = s.start(t, d, 1, 2)
	k.must(t, "stat", "/var/filled")
	k.must(t, "remove", "/var/filled")
	k.must(t, "write", "/var/again", "room again")
}

// diskRate: a session that takes all that the host's disk can do.
func (s *suite) diskRate(t *testing.T) {
	d := s.open(t)
	spec := s.spec(t, 1, 1)
	const rate = 4 << 20
	spec.Limits.DiskBytesPerSecond = rate
	k := s.talk(t, s.create(t, d, spec))
	began := time.Now()
	k.must(t, "sync", "/var/written", "16")
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("16 MiB were on disk in %s, with a limit of 4 MiB in a second", took)
	}
}

// tmpIsCharged: files in memory that belong to nobody, with which a session takes the host's.
func (s *suite) tmpIsCharged(t *testing.T) {
	d := s.open(t)
	sb, k := s.start(t, d, 1, 1)
	m := optional[driver.Meter](t, d, "Meter")
	before := s.stats(t, m, sb)
	k.must(t, "write", "/tmp/some", strings.Repeat("x", 1000))
	k.must(t, "fill", "/tmp/more", "24")
	if after := s.stats(t, m, sb); !s.caps.OwnKernel && after.MemoryBytes < before.MemoryBytes+16<<20 {
		t.Errorf("24 MiB in /tmp are counted as %d before and %d after", before.MemoryBytes, after.MemoryBytes)
	}
	k.must(t, "remove", "/tmp/more")
}

// tmpIsBounded: files in memory that grow beyond the session's limit.
func (s *suite) tmpIsBounded(t *testing.T) {
	d := s.open(t)
	_, k := s.start(t, d, 1, 1)
	_, neighbour := s.start(t, d, 2, 1)
	mib := int(s.spec(t, 1, 1).Limits.MemoryBytes >> 20)
	if _, err := k.Do("fill", "/tmp/more", itoa(2*mib)); err == nil {
		t.Error("it wrote twice its memory to /tmp")
	} else if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("it neither fails nor ends: %v", err)
	}
	neighbour.must(t, "echo", "the neighbour lives")
}

// isFull reports that a write failed for want of space. A module's runtime knows no such error.
func (s *suite) isFull(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "no space") || !s.caps.Native && strings.Contains(err.Error(), "I/O error"))
}
