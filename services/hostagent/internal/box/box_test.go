package box

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
	"github.com/berth-dev/berth/services/hostagent/guest/wire"
)

// FuzzOpening feeds the decoders of what a client sends before anything of it is believed.
func FuzzOpening(f *testing.F) {
	op, _ := proto.Marshal(&boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x1", Argv: []string{"true"}}}})
	o, _ := proto.Marshal(&boxv1.Opening{Grant: "g", Operation: op, Deliver: "_INBOX.fe-a-b.box.d1", Credit: 5})
	req, _ := proto.Marshal(&boxv1.OpenRequest{Sealed: o})
	for _, seed := range [][]byte{op, o, req, {}, {0xff}} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		if r, err := decodeRequest(raw); err == nil && len(r.GetSealed()) == 0 {
			t.Error("a request without content was taken")
		}
		if o, err := decodeOpening(raw); err == nil && o.GetCredit() > MaxCredit {
			t.Error("too much credit was taken")
		}
		if op, err := decodeOperation(raw); err == nil {
			if e := op.GetExec(); e != nil && (len(e.GetArgv()) == 0 || strings.ContainsRune(strings.Join(e.GetArgv(), ""), 0)) {
				t.Errorf("an absurd exec was taken: %v", e)
			}
			opName(op)
		} else if errs.Kind(err) == errkind.Internal {
			t.Errorf("a bad operation counts as a fault of ours: %v", err)
		}
	})
}

// FuzzFrames feeds frames of a client to a stream: it never blocks, never keeps more than its
// bounds, and never takes a frame out of order.
func FuzzFrames(f *testing.F) {
	for _, fr := range []*boxv1.Frame{
		{Seq: 1, Body: &boxv1.Frame_Data{Data: &boxv1.Data{Data: []byte("abc")}}},
		{Seq: 2, Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: 7}}},
		{Seq: 1, Body: &boxv1.Frame_Cancel{Cancel: &boxv1.Cancel{Kill: true}}},
	} {
		raw, _ := proto.Marshal(fr)
		f.Add(raw, raw)
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		s := newStream(context.Background(), "d1", "x", 10, 100)
		s.publish = func(string, []byte) error { return nil }
		defer s.stop(nil)
		for _, raw := range [][]byte{a, b} {
			fr, err := decodeFrame(raw)
			if err != nil {
				continue
			}
			before := s.in.seq
			if err := s.take(fr); err == nil && s.in.seq != before+1 {
				t.Error("a frame out of order was taken")
			}
		}
		held := 0
		for _, fr := range s.in.queue {
			held += len(fr.GetData().GetData())
		}
		if held > 100 || s.out.credit > MaxCredit || s.in.control > maxControl+1 {
			t.Errorf("holds %d bytes, credit %d, %d frames", held, s.out.credit, s.in.control)
		}
	})
}

func testStream(credit uint32) (*stream, *[]*boxv1.Frame) {
	s := newStream(context.Background(), "d1", "x", credit, MaxCredit)
	var sent []*boxv1.Frame
	s.publish = func(_ string, raw []byte) error {
		f := &boxv1.Frame{}
		if err := proto.Unmarshal(raw, f); err != nil {
			return err
		}
		sent = append(sent, f)
		return nil
	}
	return s, &sent
}

// TestOneLastFrame: nothing follows the last frame of a stream.
func TestOneLastFrame(t *testing.T) {
	s, sent := testStream(10)
	if err := s.finish(&boxv1.Frame{Body: &boxv1.Frame_Exit{Exit: &boxv1.Exit{}}}); err != nil {
		t.Fatal(err)
	}
	s.fail(errors.New("too late"))
	s.ping()
	if len(*sent) != 1 || (*sent)[0].GetExit() == nil || (*sent)[0].GetSeq() != 1 {
		t.Errorf("sent %v", *sent)
	}
}

// TestCreditBoundsData: no byte is sent without credit, and all are once it comes.
func TestCreditBoundsData(t *testing.T) {
	s, sent := testStream(5)
	done := make(chan error, 1)
	go func() { done <- s.data(boxv1.Channel_CHANNEL_STDOUT, 100, []byte("0123456789")) }()
	select {
	case err := <-done:
		t.Fatalf("it did not wait for credit: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := s.take(&boxv1.Frame{Seq: 1, Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: 5}}}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	var got []byte
	for i, f := range *sent {
		if f.GetSeq() != uint64(i+1) || f.GetData().GetOffset() != 100+uint64(len(got)) {
			t.Errorf("frame %v", f)
		}
		got = append(got, f.GetData().GetData()...)
	}
	if string(got) != "0123456789" {
		t.Errorf("sent %q", got)
	}
	if err := s.take(&boxv1.Frame{Seq: 2, Body: &boxv1.Frame_Credit{Credit: &boxv1.Credit{Bytes: MaxCredit + 1}}}); err == nil {
		t.Error("absurd credit was taken")
	}
	s.mute(errGone)
	if _, err := s.spend(1); !errors.Is(err, errGone) {
		t.Errorf("after the end: %v", err)
	}
}

// TestAnExitIsNeverInvented: what the guest does not say is unknown.
func TestAnExitIsNeverInvented(t *testing.T) {
	if x := exit(&wire.Exit{}); x.GetUnknown() == "" {
		t.Errorf("%v", x)
	}
	zero := 0
	if x := exit(&wire.Exit{Code: &zero}); x.GetHow() == nil || x.GetCode() != 0 || x.GetUnknown() != "" {
		t.Errorf("%v", x)
	}
	if x := exit(&wire.Exit{Signal: 9}); x.GetSignal() != "SIGKILL" {
		t.Errorf("%v", x)
	}
	if x := exit(&wire.Exit{Signal: 63}); x.GetSignal() != "SIG63" {
		t.Errorf("%v", x)
	}
}

func TestKinds(t *testing.T) {
	for err, want := range map[error]errkind.Kind{
		&hostend.Error{Kind: wire.KindStartFailed, Errno: 2}: errkind.NotFound,
		&hostend.Error{Kind: wire.KindStartFailed, Errno: 8}: errkind.Refused,
		&hostend.Error{Kind: wire.KindNoSpace}:               errkind.Quota,
		&hostend.Error{Kind: "who knows"}:                    errkind.Internal,
		hostend.ErrChannelLost:                               errkind.Unavailable,
		context.DeadlineExceeded:                             errkind.Deadline,
	} {
		if got := kindOf(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

func TestSignals(t *testing.T) {
	for name, want := range map[string]int{"SIGTERM": 15, "int": 2, "KILL": 9} {
		if n, err := signalNumber(name); err != nil || int(n) != want {
			t.Errorf("%s: %d %v", name, n, err)
		}
	}
	for _, name := range []string{"", "SIG", "SIGNONSENSE", strings.Repeat("A", 100)} {
		if _, err := signalNumber(name); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
}
