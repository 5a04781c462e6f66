package web

import (
	"io"
	"net/http"
	"testing"
)

// A gate that dies, or whose audit log is full, at the end of a request leaves a trace of it: the request is
// recorded before the audit log forgets that it is open, and not forgotten if it is not recorded.
func TestARequestStaysOpenUntilItIsRecorded(t *testing.T) {
	for name, full := range map[string]bool{"recorded": false, "not recorded": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, twoHosts)
			w.box.noAudit = full
			w.host("a.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				_, _ = rw.Write(make([]byte, 1<<20))
				rw.(http.Flusher).Flush()
			}))
			resp, err := w.client("a.test", 80, false).Do(get(t, "http://a.test/"))
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
			if full != (err != nil) {
				t.Fatal(err)
			}
			if !full {
				w.box.last(t)
			}
			w.box.mu.Lock()
			defer w.box.mu.Unlock()
			want := 0
			if full {
				want = 1
			}
			if w.box.atNote != 1 || w.box.kept != want {
				t.Errorf("%d were open when it was recorded, %d are kept", w.box.atNote, w.box.kept)
			}
		})
	}
}
