package sdk

import (
	"strings"
	"testing"
)

// TestInputThatWasAcknowledgedMeanwhile: after a reattach the guest may acknowledge more than the piece
// that is about to be sent again.
func TestInputThatWasAcknowledgedMeanwhile(t *testing.T) {
	for acked, want := range map[uint64]string{0: "0123", 2: "23", 4: "", 7: "", 10: ""} {
		in := newInput(strings.NewReader(""))
		in.buf = []byte("0123456789")
		sent := uint64(0)
		n, _, _ := in.wait(t.Context(), &sent)
		in.acked(acked)
		at, piece := in.piece(sent, min(n, 4))
		if string(piece) != want || want != "" && at != acked {
			t.Errorf("acknowledged to %d: %q from %d on", acked, piece, at)
		}
		if len(piece) > 0 {
			sent = at + uint64(len(piece))
		}
		in.ended = true
		if n, _, _ := in.wait(t.Context(), &sent); n != 10-int(max(acked, 4)) || in.taken != acked {
			t.Errorf("acknowledged to %d: %d bytes are left, %d are taken", acked, n, in.taken)
		}
	}
}
