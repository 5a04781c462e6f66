package natsblob

import (
	"fmt"
	"testing"

	"github.com/berth-dev/berth/internal/bus/bustest"
)

// BenchmarkObject puts and gets objects of 16 MiB in one store, synced before
// each acknowledgement, with chunks of several sizes.
func BenchmarkObject(b *testing.B) {
	e := bustest.Start(b, host)
	conn := bustest.Connect(b, e, host)
	data := random(16 << 20)
	for _, kib := range []int{64, 128, 256, 512, 1000} {
		bk := bucketOf(b, conn, kib<<10)
		name := fmt.Sprintf("%dKiB", kib)
		b.Run("put/"+name, func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for i := range b.N {
				if err := bk.WriteAll(b.Context(), fmt.Sprint(name, i%4), data, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("get/"+name, func(b *testing.B) {
			if err := bk.WriteAll(b.Context(), name+"0", data, nil); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(len(data)))
			for range b.N {
				if _, err := bk.ReadAll(b.Context(), name+"0"); err != nil {
					b.Fatal(err)
				}
			}
		})
		deleteAll(b, bk)
	}
}
