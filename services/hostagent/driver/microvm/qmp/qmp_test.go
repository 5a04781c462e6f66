package qmp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// monitor serves one connection of a false QEMU.
func monitor(t *testing.T, serve func(in *bufio.Reader, out io.Writer)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "q")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		serve(bufio.NewReader(c), c)
	}()
	return path
}

const greeting = `{"QMP": {"version": {}}}` + "\r\n"

func take(in *bufio.Reader) (command, id string) {
	line, _ := in.ReadBytes('\n')
	var q struct{ Execute, ID string }
	_ = json.Unmarshal(line, &q)
	return q.Execute, q.ID
}

func TestAnswersAreTakenByTheirOwnRequest(t *testing.T) {
	path := monitor(t, func(in *bufio.Reader, out io.Writer) {
		_, _ = io.WriteString(out, greeting)
		_, id := take(in)
		_, _ = io.WriteString(out, `{"return": {}, "id": "`+id+`"}`+"\r\n")
		_, id = take(in)
		_, _ = io.WriteString(out, `{"event": "STOP"}`+"\n"+`{"return": {"status": "wrong"}, "id": "77"}`+"\n"+
			`{"return": {"status": "running"}, "id": "`+id+`"}`+"\n")
		_, id = take(in)
		_, _ = io.WriteString(out, `{"error": {"class": "GenericError", "desc": "no such disk"}, "id": "`+id+`"}`+"\n")
		_, _ = in.ReadByte()
	})
	events := make(chan Event, 1)
	c, err := Dial(t.Context(), path, func(e Event) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var st struct{ Status string }
	if err := c.Call(t.Context(), "query-status", nil, &st); err != nil || st.Status != "running" {
		t.Errorf("got %+v, %v", st, err)
	}
	if e := <-events; e.Name != "STOP" {
		t.Errorf("got %+v", e)
	}
	var refused *Error
	if err := c.Call(t.Context(), "block_resize", nil, nil); !errors.As(err, &refused) || refused.Desc != "no such disk" {
		t.Errorf("got %v", err)
	}
}

func TestASilentMonitorCostsNoMoreThanTheDeadline(t *testing.T) {
	hold := make(chan struct{})
	defer close(hold)
	for name, said := range map[string]string{"nothing": "", "greeting": greeting, "half": `{"QMP":`} {
		path := monitor(t, func(_ *bufio.Reader, out io.Writer) { _, _ = io.WriteString(out, said); <-hold })
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		began := time.Now()
		if _, err := Dial(ctx, path, nil); err == nil || time.Since(began) > 5*time.Second {
			t.Errorf("%s: %v after %s", name, err, time.Since(began))
		}
		cancel()
	}
}

func TestAMonitorThatFloodsOrEndsIsLeft(t *testing.T) {
	for name, said := range map[string]string{"long": strings.Repeat("x", MaxLine+1) + "\n", "nonsense": "}{\n", "end": ""} {
		path := monitor(t, func(in *bufio.Reader, out io.Writer) {
			_, _ = io.WriteString(out, greeting)
			_, id := take(in)
			_, _ = io.WriteString(out, `{"return": {}, "id": "`+id+`"}`+"\n")
			_, _ = take(in)
			_, _ = io.WriteString(out, said)
		})
		c, err := Dial(t.Context(), path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Call(t.Context(), "stop", nil, nil); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: got %v", name, err)
		}
		<-c.Done()
	}
}

// FuzzReadMessage: whatever a QEMU that was taken over says, the reader ends with a message or an
// error, holds no more than one line, and goes forward.
func FuzzReadMessage(f *testing.F) {
	f.Add([]byte(greeting))
	f.Add([]byte("\r\n\r\n{\"return\":{}}\n{\"event\":\"STOP\",\"data\":{}}\n"))
	f.Add([]byte(`{"error":{"desc":"x"},"id":"1"}` + "\n[]\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		in := bufio.NewReaderSize(bytes.NewReader(b), 16)
		for range len(b) + 1 {
			if _, err := readMessage(in); err == io.EOF {
				return
			}
		}
		if _, err := in.ReadByte(); err != io.EOF {
			t.Error("it reads the same again and again")
		}
	})
}

// TestAMonitorThatTellsForEverWaits: events, answers to nobody and empty lines are read slowly, so that a
// QEMU that a machine took over cannot keep the host busy; a call is answered all the same.
func TestAMonitorThatTellsForEverWaits(t *testing.T) {
	for name, say := range map[string]string{
		"events": `{"event": "SHUTDOWN"}` + "\n", "answers to nobody": `{"return": {}, "id": "77"}` + "\n",
		"no id": `{"return": {}}` + "\n", "empty lines": strings.Repeat("\r\n", 100),
	} {
		t.Run(name, func(t *testing.T) {
			sent := make(chan int, 1)
			path := monitor(t, func(in *bufio.Reader, out io.Writer) {
				_, _ = io.WriteString(out, greeting)
				_, id := take(in)
				_, _ = io.WriteString(out, `{"return": {}, "id": "`+id+`"}`+"\n")
				_ = out.(net.Conn).SetWriteDeadline(time.Now().Add(500 * time.Millisecond))
				n := 0
				for ; ; n++ {
					if _, err := io.WriteString(out, say); err != nil {
						break
					}
				}
				sent <- n
			})
			var told atomic.Int64
			c, err := Dial(t.Context(), path, func(Event) { told.Add(1) })
			if err != nil {
				t.Fatal(err)
			}
			n := <-sent
			c.Close()
			if n > 20000 || told.Load() > 200 {
				t.Errorf("the host took %d of %d bytes, and told %d", n, len(say), told.Load())
			}
		})
	}
}
