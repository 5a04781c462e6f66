package proxy

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"runtime"
	"sync"
	"testing"
)

// pour sends n bytes over each of many connections made by dial, and waits until the other ends have them.
func pour(b *testing.B, connections int, dial func() net.Conn, n int) {
	b.Helper()
	conns := make([]net.Conn, connections)
	for i := range conns {
		conns[i] = dial()
	}
	chunk := make([]byte, 256<<10)
	b.SetBytes(int64(n))
	b.ResetTimer()
	for range b.N {
		var all sync.WaitGroup
		for _, c := range conns {
			all.Go(func() {
				for left := n / connections; left > 0; left -= len(chunk) {
					if _, err := c.Write(chunk[:min(left, len(chunk))]); err != nil {
						b.Error(err)
						return
					}
				}
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
					b.Error(err)
				}
			})
		}
		all.Wait()
	}
}

// drain answers with a byte for every n that come.
func drain(n int) func(net.Conn) {
	return func(c net.Conn) {
		buf := make([]byte, 256<<10)
		for {
			for left := n; left > 0; {
				k, err := c.Read(buf[:min(left, len(buf))])
				if err != nil {
					return
				}
				left -= k
			}
			if _, err := c.Write([]byte{1}); err != nil {
				return
			}
		}
	}
}

// BenchmarkThroughput: large bodies straight to a host and through the gate, over loopback, where all ends
// share the machine's cores.
func BenchmarkThroughput(b *testing.B) {
	const size = 256 << 20
	for _, connections := range []int{1, 100} {
		g := open(b, standard, Limits{})
		g.host(drain(size/connections), "bytes.example.com")
		straight := func() net.Conn { return dialBench(b, g.world.hosts["bytes.example.com"]) }
		passed := func() net.Conn { return dialBench(b, g.at["bytes.example.com"].String()) }
		b.Run(fmt.Sprintf("direct/%d", connections), func(b *testing.B) { pour(b, connections, straight, size) })
		b.Run(fmt.Sprintf("passed/%d", connections), func(b *testing.B) { pour(b, connections, passed, size) })
	}
}

func dialBench(b *testing.B, at string) net.Conn {
	c, err := net.Dial("tcp", at)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = c.Close() })
	return c
}

// BenchmarkConnect is a whole connection: TLS passed through, one byte there and back.
func BenchmarkConnection(b *testing.B) {
	g := open(b, standard, Limits{})
	g.secure("open.example.com", &tls.Config{}, echo)
	for _, c := range []struct{ name, at string }{{"direct", g.world.hosts["open.example.com"]}, {"passed", g.at["open.example.com"].String()}} {
		b.Run(c.name, func(b *testing.B) {
			for range b.N {
				raw, err := net.Dial("tcp", c.at)
				if err != nil {
					b.Fatal(err)
				}
				s := tls.Client(raw, &tls.Config{ServerName: "open.example.com", RootCAs: g.public.pool})
				_, _ = s.Write([]byte{1})
				if _, err := io.ReadFull(s, make([]byte, 1)); err != nil {
					b.Fatal(err)
				}
				_ = s.Close()
			}
		})
	}
}

// BenchmarkIdleConnection is what the gate holds in memory for a connection that is passed through while
// nothing moves. Both clients and the host are in this process too, with two sockets and one goroutine that
// are subtracted.
func BenchmarkIdleConnection(b *testing.B) {
	const n = 500
	for range b.N {
		held := func(at string) uint64 {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			conns := make([]net.Conn, n)
			for i := range conns {
				conns[i] = dialBench(b, at)
				_, _ = conns[i].Write([]byte{1})
				_, _ = io.ReadFull(conns[i], make([]byte, 1))
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			for _, c := range conns {
				_ = c.Close()
			}
			return (after.HeapAlloc + after.StackInuse - before.HeapAlloc - before.StackInuse) / n
		}
		g := open(b, standard, Limits{})
		g.host(func(c net.Conn) {
			one := make([]byte, 1)
			for {
				if _, err := c.Read(one); err != nil {
					return
				}
				_, _ = c.Write(one)
			}
		}, "bytes.example.com")
		held(g.world.hosts["bytes.example.com"]) // warm
		straight := held(g.world.hosts["bytes.example.com"])
		passed := held(g.at["bytes.example.com"].String())
		b.ReportMetric(float64(passed)-float64(straight), "B/connection")
		b.ReportMetric(float64(g.pipes.bigs), "pipes")
		g.stop()
	}
}
