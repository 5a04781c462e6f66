package disk

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"
)

// TestARecordNeverSaysLessThanItsImageHas: a disk that grew with a wake which failed, or was cut short, is
// handed to a virtual machine later, and all beyond its record is cut off.
func TestARecordNeverSaysLessThanItsImageHas(t *testing.T) {
	needRoot(t)
	for _, point := range []string{"record.written", "grow.stretched", "grow.device", "mount.mounted", "disk.mount"} {
		t.Run(point, func(t *testing.T) {
			s := openTest(t, t.TempDir(), nil)
			awake(t, s, 1, 1)
			slept(t, s, 1, 1, "m1")
			image := func() uint64 {
				st, err := os.Stat(s.image(key(1)))
				if err != nil {
					t.Fatal(err)
				}
				return uint64(st.Size())
			}
			s.fault = func(step string) error {
				if step == "record.written" && point == step { // only now it becomes true
					time.Sleep(300 * time.Millisecond)
					if n := image(); n != testSize {
						t.Errorf("the image has %d bytes before its record says so", n)
					}
				}
				if step == point {
					s.fault, s.run.Fault = nil, nil
					return errCrash
				}
				return nil
			}
			s.run.Fault = s.fault
			want := Want{Key: key(1), Epoch: ep(2), Head: "m1", LastActive: ep(1), Size: 2 * testSize}
			if _, err := s.Attach(context.Background(), want); !errors.Is(err, errCrash) {
				t.Fatalf("got %v", err)
			}
			if rec, err := s.Get(key(1)); err != nil || rec.Size < image() || rec.State != Clean || rec.Base != "m1" {
				t.Errorf("an image of %d bytes has the record %+v, %v", image(), rec, err)
			}
			want.Raw, want.Size = true, 0
			a := attach(t, s, want)
			if st, err := os.Stat(a.File); err != nil || uint64(st.Size()) != a.Size {
				t.Errorf("%v %v", st, err)
			}
		})
	}
}
