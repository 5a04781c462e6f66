package credentials

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/nats-io/nats.go"
)

// audit follows the records about a tenant.
func (s *secrets) audit(t *testing.T, subject string) *nats.Subscription {
	t.Helper()
	sub, err := s.op.NATS().SubscribeSync(subject)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.op.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	return sub
}

func next(t *testing.T, sub *nats.Subscription) *credentialsv1.Audit {
	t.Helper()
	msg, err := sub.NextMsg(10 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	var a credentialsv1.Audit
	if err := bus.Decode(msg.Data, bus.Protobuf, &a); err != nil {
		t.Fatal(err)
	}
	return &a
}

// What is done with a secret is recorded once for a session's epoch, and what a gate may not have too.
func TestSecretsAreAuditedOncePerEpoch(t *testing.T) {
	s := newSecrets(t, "")
	sub := s.audit(t, "berth.v1.audit.credentials.acme.*")
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		_, _, _ = s.reveal(t, s.gate, ref(10, 12), "api-key")
		_, _, _ = s.reveal(t, s.other, ref(10, 12), "api-key")
		_, _, _ = s.reveal(t, s.gate, ref(10, 12), "none")
	}
	s.say(&schedulerv1.SessionRecord{Session: ref(10, 14), State: corev1.State_STATE_ACTIVE, Host: "h1"})
	_, _, _ = s.reveal(t, s.gate, ref(10, 14), "api-key")
	if _, err := call[*credentialsv1.SecretRemoveReply](t, s.op, "secret_remove", &credentialsv1.SecretRemoveRequest{Tenant: "acme", Name: "api-key"}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"stored  secret api-key for api.example.com",
		"revealed 12 secret api-key to the gate of host h1",
		"refused 12 secret api-key for the gate of host h2: the host does not own this epoch",
		"refused 12 secret none for the gate of host h1: there is none",
		"revealed 14 secret api-key to the gate of host h1",
		"removed  secret api-key",
	} {
		a := next(t, sub)
		epoch := ""
		if a.GetSession() != nil {
			epoch = fmt.Sprint(a.GetSession().GetEpoch().GetIndex())
		}
		if got := a.GetWhat() + " " + epoch + " " + a.GetReason(); got != want {
			t.Errorf("recorded: %s\nwant:     %s", got, want)
		}
	}
}

// The value is in no log, error, audit record or file, in no common spelling.
func TestAValueIsSeenNowhere(t *testing.T) {
	s := newSecrets(t, "")
	var log syncBuffer
	s.stop()
	s.log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug - 8}))
	s.run(t)
	sub := s.audit(t, "berth.v1.audit.>")
	var said []string
	note := func(err error) {
		if err != nil {
			said = append(said, err.Error())
		}
	}
	_, err := s.put(t, apiKey(marker))
	note(err)
	for _, change := range []func(*credentialsv1.SecretValue){
		func(v *credentialsv1.SecretValue) { v.Value = []byte(marker + "\n") },
		func(v *credentialsv1.SecretValue) { v.Name = marker },
		func(v *credentialsv1.SecretValue) { v.Tenant = marker },
		func(v *credentialsv1.SecretValue) { v.Hosts = []string{marker} },
		func(v *credentialsv1.SecretValue) { v.Value = bytes.Repeat([]byte(marker), 1000) },
	} {
		v := apiKey(marker)
		change(v)
		_, err := s.put(t, v)
		if err == nil {
			t.Error("a bad secret was taken")
		}
		note(err)
	}
	_, err = call[*credentialsv1.SecretPutReply](t, s.op, "secret_put", &credentialsv1.SecretPutRequest{Sealed: []byte(marker), Sender: marker})
	note(err)
	_, _, err = s.reveal(t, s.gate, ref(10, 12), "api-key")
	note(err)
	_, _, err = s.reveal(t, s.other, ref(10, 12), "api-key")
	note(err)
	s.stop() // writes what is queued
	for _, secret := range []string{marker, base64.StdEncoding.EncodeToString([]byte(marker)), fmt.Sprintf("%x", marker), fmt.Sprint([]byte(marker))} {
		if strings.Contains(log.String(), secret) {
			t.Error("it is in the log")
		}
		if strings.Contains(strings.Join(said, "\n"), secret) {
			t.Errorf("it is in an error: %q", said)
		}
		if found(t, s.store, []byte(secret)) {
			t.Error("it is in a file of the bus")
		}
	}
	for {
		msg, err := sub.NextMsg(200 * time.Millisecond)
		if err != nil {
			break
		}
		if bytes.Contains(msg.Data, []byte(marker)) {
			t.Error("it is in an audit record")
		}
	}
}

// syncBuffer is a log that is read while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
