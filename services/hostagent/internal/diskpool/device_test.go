package diskpool

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/hostagent/internal/loopdev"
)

// disk is a block device that holds what a program made on it.
func disk(t *testing.T, mkfs ...string) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "device")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 512<<20)); err != nil {
		t.Fatal(err)
	}
	if len(mkfs) > 0 {
		if out, err := exec.Command(mkfs[0], append(mkfs[1:], image)...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", mkfs, err, out)
		}
	}
	dev, err := loopdev.Attach(image, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(dev.Close(), loopdev.WaitFree(image, freeTime)); err != nil {
			t.Error(err)
		}
	})
	return dev.Name()
}

func begin(t *testing.T, device string) []byte {
	t.Helper()
	f, err := os.Open(device)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 1<<20)
	if _, err := f.Read(b); err != nil {
		t.Fatal(err)
	}
	return b
}

// deviceRoom unmounts before the device goes: its cleanup must be registered after the device's.
func deviceRoom(t *testing.T, mkfs ...string) Config {
	t.Helper()
	if err := canMake(); err != nil {
		t.Skip("skipped: ", err)
	}
	dev := disk(t, mkfs...)
	return Config{Dir: room(t), Mode: Device, Device: dev}
}

func TestABlankDeviceIsFormattedOnce(t *testing.T) {
	cfg := deviceRoom(t)
	if err := Preflight(cfg); err != nil {
		t.Fatal(err)
	}
	p := mustOpen(t, cfg)
	if !p.Reflink() || p.Outer() != "" || p.Missing() != "" {
		t.Errorf("got %+v", p)
	}
	put(t, p.Dir(), "disk")
	again := mustOpen(t, cfg) // adopted
	if err := errors.Join(again.Close(), p.Close()); err != nil || isMount(t, cfg.Dir) {
		t.Errorf("it is still mounted: %v", err)
	}
	if p = mustOpen(t, cfg); !has(t, p.Dir(), "disk") {
		t.Error("the disk is lost")
	}
}

// A device with something on it is somebody's data.
func TestAForeignDeviceIsRefused(t *testing.T) {
	for name, foreign := range map[string]func(device string){
		"ext4": func(device string) {
			if out, err := exec.Command("mkfs.ext4", "-q", device).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		},
		"partition table (dos)": func(device string) {
			mbr := make([]byte, 512)
			copy(mbr[446:], []byte{0, 0, 2, 0, 0x83, 0xfe, 0xff, 0xff, 0, 8, 0, 0, 0, 0, 1, 0})
			copy(mbr[510:], []byte{0x55, 0xaa})
			overwrite(t, device, 0, mbr)
		},
	} {
		cfg := deviceRoom(t)
		foreign(cfg.Device)
		before := begin(t, cfg.Device)
		refused(t, cfg, errkind.Refused)
		_, err := Open(t.Context(), cfg)
		if !strings.Contains(err.Error(), name) || !bytes.Equal(before, begin(t, cfg.Device)) {
			t.Errorf("%s: %v, or it was changed", name, err)
		}
	}
	refused(t, Config{Dir: room(t), Mode: Device, Device: "/dev/null"}, errkind.Invalid)
	refused(t, Config{Dir: room(t), Mode: Device, Device: "/dev/berth-missing"}, errkind.Unavailable)
}

func TestXFSWithoutReflinkIsTakenAndSaid(t *testing.T) {
	p := mustOpen(t, deviceRoom(t, "mkfs.xfs", "-q", "-K", "-s", "size=4096", "-m", "reflink=0"))
	if p.Reflink() || !strings.Contains(p.Missing(), "without reflink") {
		t.Errorf("got %+v", p)
	}
}

func TestKilledAtEveryStepOfADevice(t *testing.T) {
	for _, step := range []string{"marked", "formatted", "mounted"} {
		t.Run(step, func(t *testing.T) {
			cfg := deviceRoom(t)
			dieAt(t, step, cfg)
			if step == "formatted" {
				unfinished(t, cfg.Device)
			}
			if p := mustOpen(t, cfg); !p.Reflink() {
				t.Errorf("got %+v", p)
			}
			if left, err := os.ReadDir(filepath.Dir(cfg.Dir)); err != nil || len(left) != 1 {
				t.Errorf("left are %v, %v", left, err)
			}
		})
	}
}

// unfinished makes a device look as if mkfs.xfs had been killed on it.
func unfinished(t *testing.T, device string) {
	t.Helper()
	overwrite(t, device, 126, []byte{1})
}

func overwrite(t *testing.T, device string, at int64, with []byte) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(with, at)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// An unfinished file system that we did not begin may be a copy that somebody waits for.
func TestAnUnfinishedDeviceOfOthersIsRefused(t *testing.T) {
	cfg := deviceRoom(t, "mkfs.xfs", "-q", "-K", "-s", "size=4096")
	unfinished(t, cfg.Device)
	if p, err := Open(t.Context(), cfg); !errs.Is(err, errkind.Refused) {
		t.Errorf("got %+v, %v", p, err)
	}
}
