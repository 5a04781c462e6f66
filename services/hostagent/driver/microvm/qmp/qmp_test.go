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
