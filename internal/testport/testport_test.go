package testport

import (
	"fmt"
	"net"
	"testing"
)

func TestReservedPortsAreDifferentAndFree(t *testing.T) {
	seen := map[int]bool{}
	for _, port := range append(Reserve(t, 50), Reserve(t, 50)...) {
		if seen[port] || port < lowest || port >= ephemeral() {
			t.Errorf("port %d", port)
		}
		seen[port] = true
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
}
