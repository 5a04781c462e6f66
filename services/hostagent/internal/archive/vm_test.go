package archive

import (
	"bytes"
	"encoding/hex"
	"os"
	"strings"
	"testing"
	"time"
)

// What the version before wrote is read, and what has nothing to do with virtual machines is still
// written so that it can read it.
func TestAManifestWithoutAVirtualMachineIsOfTheOldFormat(t *testing.T) {
	golden, err := os.ReadFile("testdata/index-v1.hex")
	if err != nil {
		t.Fatal(err)
	}
	old, err := hex.DecodeString(strings.TrimSpace(string(golden)))
	if err != nil {
		t.Fatal(err)
	}
	ix, err := DecodeIndex(old)
	if err != nil || !ix.info.CrashConsistent || ix.info.VMWritten || len(ix.history) != 1 || ix.history[0].Image != "sha256:y" {
		t.Fatalf("got %+v, %v", ix, err)
	}
	if !bytes.Equal(ix.Encode(), old) {
		t.Error("it is written in another way now")
	}
	ix.info.VMWritten = true
	if b := ix.Encode(); b[7] != formatVM {
		t.Errorf("format %d", b[7])
	}
	b := ix.Encode()
	copy(b, old[:8]) // it says that it is of the old one
	if _, err := decodeHeader(b[32:len(b)-32], formatPlain); err == nil {
		t.Error("a flag that the old format lacks was read")
	}
	if _, err := decodeHeader(sample().header.encode(), formatVM); err == nil {
		t.Error("a header has two forms")
	}
}

// Once a virtual machine wrote a disk, every manifest of its generation says so, also one that brings
// back a snapshot of the time before.
func TestVMWrittenStaysInAllThatFollow(t *testing.T) {
	d := depot(newShelf().bucket(t))
	m := make(image, 4<<20).fill(0, 1<<20, 1)
	first, _ := save(t, d, m.source(nil, nil), metaAt(1, 0))
	meta := metaAt(2, time.Minute)
	meta.VMWritten = true
	second, _ := save(t, d, m.source(m, first), meta) // the same bytes, and yet it is to be said
	if second == first || !second.Info().VMWritten {
		t.Fatalf("got %+v", second.Info())
	}
	if again, _ := save(t, d, m.source(m, second), meta); again != second {
		t.Error("what is known was said again")
	}
	back, err := d.Rewind(t.Context(), testDisk, testKey, second, first.Info().ID, metaAt(3, time.Hour))
	if err != nil || !back.Info().VMWritten {
		t.Fatalf("got %+v, %v", back, err)
	}
	m2 := append(image{}, m...).fill(2<<20, 1<<20, 2)
	if last, _ := save(t, d, m2.source(m, back), metaAt(4, 2*time.Hour)); !last.Info().VMWritten {
		t.Errorf("got %+v", last.Info())
	}
	list, err := depot(d.bucket).Snapshots(t.Context(), testDisk, back.Info().ID)
	if err != nil || len(list) != 3 || !list[1].VMWritten || list[2].VMWritten {
		t.Errorf("got %+v, %v", list, err)
	}
}
