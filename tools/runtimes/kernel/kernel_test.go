package kernel

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// vmlinux stands for a kernel: more than one block of lz4's old format.
var vmlinux = append([]byte("\x7fELF"), bytes.Repeat([]byte("kernel "), 2<<20)...)

// bzImage packs payload as a kernel's build does.
func bzImage(payload []byte, size uint32) []byte {
	head := make([]byte, 5*512)
	head[0x1f1] = 4
	copy(head[0x202:], "HdrS")
	payload = binary.LittleEndian.AppendUint32(payload, size)
	binary.LittleEndian.PutUint32(head[0x248:], 16)
	binary.LittleEndian.PutUint32(head[0x24c:], uint32(len(payload)))
	return append(append(append(head, make([]byte, 16)...), payload...), "what follows"...)
}

func lz4Old(b []byte) []byte {
	out := []byte("\x02\x21\x4c\x18")
	for len(b) > 0 {
		part := b[:min(len(b), legacyBlock)]
		packed := make([]byte, lz4.CompressBlockBound(len(part)))
		n, _ := lz4.CompressBlock(part, packed, nil)
		out = append(binary.LittleEndian.AppendUint32(out, uint32(n)), packed[:n]...)
		b = b[len(part):]
	}
	return out
}

func TestExtractKnowsHowKernelsArePacked(t *testing.T) {
	var zipped, other bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, _ = w.Write(vmlinux)
	_ = w.Close()
	z, err := zstd.NewWriter(&other)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = z.Write(vmlinux)
	_ = z.Close()
	for name, payload := range map[string][]byte{"lz4": lz4Old(vmlinux), "gzip": zipped.Bytes(), "zstd": other.Bytes()} {
		got, err := Extract(bzImage(payload, uint32(len(vmlinux))))
		if err != nil || !bytes.Equal(got, vmlinux) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

func TestExtractRefusesWhatIsNoKernel(t *testing.T) {
	good := bzImage(lz4Old(vmlinux), uint32(len(vmlinux)))
	for name, image := range map[string][]byte{
		"nothing":     nil,
		"zeros":       make([]byte, 4096),
		"cut":         good[:len(good)/2],
		"torn":        bzImage(lz4Old(vmlinux)[:5000], uint32(len(vmlinux))),
		"other size":  bzImage(lz4Old(vmlinux), 7),
		"no ELF":      bzImage(lz4Old([]byte(strings.Repeat("x", 9999))), 9999),
		"not packed":  bzImage(vmlinux[:100], 100),
		"huge blocks": bzImage([]byte("\x02\x21\x4c\x18\xff\xff\xff\x7f12345678"), 5),
	} {
		if got, err := Extract(image); err == nil {
			t.Errorf("%s: %d bytes", name, len(got))
		}
	}
}

// A module that is not packed, packed with another dash, built in, or missing.
func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	var need []string
	l := &loading{files: map[string]string{}, builtin: map[string]bool{"in_kernel": true}, data: map[string][]byte{}}
	dir := t.TempDir()
	for name, depends := range map[string]string{"top": "middle,in-kernel", "middle": "low", "low": ""} {
		l.files[name] = filepath.Join(dir, name+".ko")
		if err := os.WriteFile(l.files[name], object("depends="+depends), 0o600); err != nil {
			t.Fatal(err)
		}
		need = append(need, name+".ko")
	}
	if err := l.add("top", 0); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(l.order, []string{"low.ko", "middle.ko", "top.ko"}) || len(l.data) != len(need) {
		t.Errorf("the order is %v", l.order)
	}
	if err := l.add("absent", 0); err == nil {
		t.Error("a module that is not there was taken")
	}
	if got := nameOf("virtio-rng.ko.xz"); got != "virtio_rng" {
		t.Errorf("the name is %s", got)
	}
}

// object is a small ELF file with a section .modinfo.
func object(info string) []byte {
	names := "\x00.modinfo\x00.shstrtab\x00"
	data := []byte(info + "\x00")
	var b bytes.Buffer
	put := func(v any) { _ = binary.Write(&b, binary.LittleEndian, v) }
	b.WriteString("\x7fELF\x02\x01\x01" + strings.Repeat("\x00", 9))
	put([]uint16{1, 62})
	put(uint32(1))
	put([]uint64{0, 0, uint64(64 + len(data) + len(names))})
	put(uint32(0))
	put([]uint16{64, 0, 0, 64, 3, 2})
	b.Write(data)
	b.WriteString(names)
	for _, s := range [][4]uint64{{0, 0, 0, 0}, {1, 1, 64, uint64(len(data))}, {10, 3, uint64(64 + len(data)), uint64(len(names))}} {
		put([]uint32{uint32(s[0]), uint32(s[1])})
		put([]uint64{0, 0, s[2], s[3]})
		put([]uint32{0, 0})
		put([]uint64{1, 0})
	}
	return b.Bytes()
}
