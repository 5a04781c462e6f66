package layer

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestOtherProgramsReadIt: GNU tar brings back holes, also one at the end, and what has no holes.
func TestOtherProgramsReadIt(t *testing.T) {
	program, err := exec.LookPath("tar")
	if err != nil {
		t.Skip("there is no tar here")
	}
	tr, out := newTree(t), t.TempDir()
	for name, at := range map[string]int64{"hole in front": 1 << 20, "hole at the end": 0} {
		f, err := os.Create(tr.path(name))
		tr.must(err)
		_, err = f.WriteAt([]byte("data"), at)
		tr.must(err)
		tr.must(f.Truncate(1<<20 + 4))
		tr.must(f.Close())
	}
	f, err := os.Create(tr.path("nothing but a hole"))
	tr.must(err)
	tr.must(f.Truncate(5 << 20))
	tr.must(f.Close())
	tr.file("small", "small")
	tr.file("sub/b\xffd", "bytes")
	raw, _ := tr.write(Limits{})
	file := filepath.Join(t.TempDir(), "a.tar")
	tr.must(os.WriteFile(file, raw, 0o600))
	if said, err := exec.Command(program, "-C", out, "-xf", file).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	for _, name := range []string{"hole in front", "hole at the end", "nothing but a hole", "small", "sub/b\xffd"} {
		want, err := os.ReadFile(tr.path(name))
		tr.must(err)
		got, err := os.ReadFile(filepath.Join(out, name))
		if err != nil || string(got) != string(want) {
			t.Errorf("%q: %d bytes, want %d, %v", name, len(got), len(want), err)
		}
		var st unix.Stat_t
		tr.must(unix.Stat(filepath.Join(out, name), &st))
		if len(want) > worthwhile && st.Blocks*512 > worthwhile {
			t.Errorf("%q has no holes", name)
		}
	}
}
