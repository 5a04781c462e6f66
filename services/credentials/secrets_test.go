package credentials

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	schedulerv1 "github.com/berth-dev/berth/schemas/gen/berth/scheduler/v1"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/berth-dev/berth/services/credentials/internal/core"
	"github.com/berth-dev/berth/services/credentials/internal/platform/platformtest"
)

const marker = "sk-live-MARKER-0123456789" // a secret's value, looked for where it must not be

// secrets is a world with an operator and the gates of its hosts.
type secrets struct {
	*world
	op, gate, other *bus.Conn
}

func newSecrets(t *testing.T, platformKey string) *secrets {
	w := newWorldWith(t, platformKey)
	w.say(&schedulerv1.SessionRecord{Session: ref(10, 12), State: corev1.State_STATE_ACTIVE, Host: "h1"})
	return &secrets{world: w, op: bustest.Connect(t, w.bus, subjects.Operator()),
		gate: bustest.Connect(t, w.bus, subjects.Gate("h1")), other: bustest.Connect(t, w.bus, subjects.Gate("h2"))}
}

// call is one request, also while credentials says that it serves.
func call[T proto.Message](t *testing.T, c *bus.Conn, method string, req proto.Message) (T, error) {
	t.Helper()
	return bus.Call[T](bustest.Context(t), c, subjects.RPC("credentials", method, c.Self()), req)
}

func (s *secrets) put(t *testing.T, v *credentialsv1.SecretValue) (uint64, error) {
	t.Helper()
	keys, err := call[*credentialsv1.JwksReply](t, s.op, "jwks", &credentialsv1.JwksRequest{})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := proto.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	box, err := seal.RandomBox()
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := box.Seal(keys.GetCurveKey(), raw)
	if err != nil {
		t.Fatal(err)
	}
	reply, err := call[*credentialsv1.SecretPutReply](t, s.op, "secret_put", &credentialsv1.SecretPutRequest{Sealed: sealed, Sender: box.Public()})
	return reply.GetVersion(), err
}

func apiKey(value string) *credentialsv1.SecretValue {
	return &credentialsv1.SecretValue{Tenant: "acme", Name: "api-key", Value: []byte(value), Hosts: []string{"api.example.com"}}
}

func (s *secrets) reveal(t *testing.T, gate *bus.Conn, on *corev1.SessionRef, name string) (string, *credentialsv1.RevealReply, error) {
	t.Helper()
	key, err := seal.NewKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	reply, err := call[*credentialsv1.RevealReply](t, gate, "reveal", &credentialsv1.RevealRequest{Session: on, Name: name, GateKey: string(key.Public())})
	if err != nil {
		return "", nil, err
	}
	value, err := key.Open(reply.GetSealed())
	if err != nil {
		t.Fatal(err)
	}
	return string(value), reply, nil
}

func TestASecretGoesToTheGateOfTheOwnerOnly(t *testing.T) {
	s := newSecrets(t, "")
	version, err := s.put(t, apiKey(marker))
	if err != nil {
		t.Fatal(err)
	}
	value, reply, err := s.reveal(t, s.gate, ref(10, 12), "api-key")
	if err != nil || value != marker || reply.GetVersion() != version || len(reply.GetHosts()) != 1 || reply.GetHosts()[0] != "api.example.com" {
		t.Fatalf("%v, version %d of %v, %v", value == marker, reply.GetVersion(), reply.GetHosts(), err)
	}
	for name, c := range map[string]struct {
		gate *bus.Conn
		on   *corev1.SessionRef
		want errkind.Kind
	}{
		"the gate of another host": {s.other, ref(10, 12), errkind.Denied},
		"an earlier epoch":         {s.gate, ref(10, 11), errkind.StaleEpoch},
		"a later epoch":            {s.gate, ref(10, 13), errkind.StaleEpoch},
		"an earlier generation":    {s.gate, ref(9, 12), errkind.StaleEpoch},
		"no generation":            {s.gate, &corev1.SessionRef{Tenant: "acme", Session: string(session)}, errkind.Invalid},
	} {
		if _, _, err := s.reveal(t, c.gate, c.on, "api-key"); !errs.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, _, err := s.reveal(t, s.gate, ref(10, 12), "other"); !errs.Is(err, errkind.NotFound) {
		t.Errorf("a secret that is not there: %v", err)
	}
	_, err = call[*credentialsv1.RevealReply](t, s.gate, "reveal", &credentialsv1.RevealRequest{Session: ref(10, 12), Name: "api-key", GateKey: "X"})
	wantKind(t, err, errkind.Invalid)
}

func TestASecretOfAnotherTenantIsNeverRevealed(t *testing.T) {
	s := newSecrets(t, "")
	v := apiKey(marker)
	v.Tenant = "globex"
	if _, err := s.put(t, v); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); !errs.Is(err, errkind.NotFound) {
		t.Error(err)
	}
	// A gate that lies about the tenant names a session that scheduler does not know like this.
	lie := ref(10, 12)
	lie.Tenant = "globex"
	if _, _, err := s.reveal(t, s.gate, lie, "api-key"); !errs.Is(err, errkind.StaleEpoch) {
		t.Error(err)
	}
}

func TestASecretIsRevealedWhileTheSessionIsWakingOrActiveOnly(t *testing.T) {
	s := newSecrets(t, "")
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Fatal(err)
	}
	for n := range corev1.State_name {
		state := corev1.State(n)
		s.say(&schedulerv1.SessionRecord{Session: ref(10, 12), State: state, Host: "h1"})
		_, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key")
		want := state == corev1.State_STATE_WAKING || state == corev1.State_STATE_ACTIVE
		if want && err != nil || !want && !errs.Is(err, errkind.StaleEpoch) {
			t.Errorf("%s: %v", state, err)
		}
	}
	s.say(nil)
	if _, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); !errs.Is(err, errkind.NotFound) {
		t.Error(err)
	}
}

// Nobody but operators and gates may ask: the bus does not even deliver.
func TestOthersCannotAskForSecrets(t *testing.T) {
	s := newSecrets(t, "")
	for _, c := range []*bus.Conn{s.host, s.identity, s.sched, s.op} {
		if _, err := call[*credentialsv1.RevealReply](t, c, "reveal", &credentialsv1.RevealRequest{}); !errs.Is(err, errkind.Denied) {
			t.Errorf("reveal by %s: %v", c.Self(), err)
		}
	}
	for _, c := range []*bus.Conn{s.host, s.gate, s.identity} {
		if _, err := call[*credentialsv1.SecretsReply](t, c, "secrets", &credentialsv1.SecretsRequest{Tenant: "acme"}); !errs.Is(err, errkind.Denied) {
			t.Errorf("secrets by %s: %v", c.Self(), err)
		}
	}
}

func TestANewVersionReplacesAndDestroysTheOldOne(t *testing.T) {
	s := newSecrets(t, "")
	first, err := s.put(t, apiKey(marker))
	if err != nil {
		t.Fatal(err)
	}
	b, err := bustest.Connect(t, s.bus, subjects.Service("credentials")).OpenBucket(t.Context(), "BERTH_SECRETS")
	if err != nil {
		t.Fatal(err)
	}
	old, _, err := b.Get(t.Context(), s.valueKeys(t)[0])
	if err != nil || !found(t, s.store, old) {
		t.Fatal("the test looks in the wrong place", err)
	}
	again := apiKey(marker + "-2")
	again.Hosts = []string{"b.example.com", "a.example.com"}
	second, err := s.put(t, again)
	if err != nil || second <= first {
		t.Fatal(first, second, err)
	}
	if value, reply, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); err != nil || value != marker+"-2" || reply.GetVersion() != second {
		t.Error(reply.GetVersion(), err)
	}
	if keys := s.valueKeys(t); len(keys) != 1 {
		t.Errorf("values: %v", keys)
	}
	if found(t, s.store, old[:len(old)/2]) || found(t, s.store, old[len(old)/2:]) {
		t.Error("the replaced record is in a file")
	}
	list, err := call[*credentialsv1.SecretsReply](t, s.op, "secrets", &credentialsv1.SecretsRequest{Tenant: "acme"})
	if err != nil || len(list.GetSecrets()) != 1 {
		t.Fatal(list, err)
	}
	if l := list.GetSecrets()[0]; l.GetName() != "api-key" || l.GetVersion() != second || strings.Join(l.GetHosts(), " ") != "a.example.com b.example.com" || time.Since(l.GetChangedAt().AsTime()) > time.Minute {
		t.Errorf("%v", l)
	}
}

// valueKeys are the records that hold values.
func (s *secrets) valueKeys(t *testing.T) []string {
	var out []string
	for _, k := range bucketKeys(t, s.bus, "BERTH_SECRETS") {
		if strings.HasPrefix(k, valuePrefix) {
			out = append(out, k)
		}
	}
	return out
}

func TestARemovedSecretIsGoneFromTheFilesAndCanBeMadeAgain(t *testing.T) {
	s := newSecrets(t, "")
	first, err := s.put(t, apiKey(marker))
	if err != nil {
		t.Fatal(err)
	}
	b, err := bustest.Connect(t, s.bus, subjects.Service("credentials")).OpenBucket(t.Context(), "BERTH_SECRETS")
	if err != nil {
		t.Fatal(err)
	}
	old, _, err := b.Get(t.Context(), s.valueKeys(t)[0])
	if err != nil {
		t.Fatal(err)
	}
	remove := func() error {
		_, err := call[*credentialsv1.SecretRemoveReply](t, s.op, "secret_remove", &credentialsv1.SecretRemoveRequest{Tenant: "acme", Name: "api-key"})
		return err
	}
	if err := remove(); err != nil {
		t.Fatal(err)
	}
	wantKind(t, remove(), errkind.NotFound)
	if found(t, s.store, old[:len(old)/2]) || found(t, s.store, old[len(old)/2:]) || len(bucketKeys(t, s.bus, "BERTH_SECRETS")) != 0 {
		t.Error("something is left")
	}
	if _, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); !errs.Is(err, errkind.NotFound) {
		t.Error(err)
	}
	if again, err := s.put(t, apiKey(marker+"-2")); err != nil || again <= first {
		t.Errorf("version %d after %d, %v", again, first, err)
	}
}

func TestPlatformKeyRotationCoversSecrets(t *testing.T) {
	s := newSecrets(t, "")
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Fatal(err)
	}
	s.stop()
	if _, err := keyfile.Rotate(filepath.Join(s.dir, "credentials-platform.json"), 2); err != nil {
		t.Fatal(err)
	}
	s.run(t)
	if value, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); err != nil || value != marker {
		t.Error(err)
	}
}

func TestWithTheKeyServiceAwaySecretsAreListedAndRemovedOnly(t *testing.T) {
	f := platformtest.Vault(t)
	s := newSecrets(t, inVault)
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Fatal(err)
	}
	f.Fail(platformtest.Answer(http.StatusServiceUnavailable, `{"errors":["Vault is sealed"]}`))
	if _, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); !errs.Is(err, errkind.Unavailable) {
		t.Error(err)
	}
	_, err := s.put(t, apiKey(marker+"-2"))
	wantKind(t, err, errkind.Unavailable)
	list, err := call[*credentialsv1.SecretsReply](t, s.op, "secrets", &credentialsv1.SecretsRequest{Tenant: "acme"})
	if err != nil || len(list.GetSecrets()) != 1 {
		t.Error(list, err)
	}
	if _, err := call[*credentialsv1.SecretRemoveReply](t, s.op, "secret_remove", &credentialsv1.SecretRemoveRequest{Tenant: "acme", Name: "api-key"}); err != nil {
		t.Error(err)
	}
}

// Who can write the bucket can neither send a secret to another host nor give it another name.
func TestHostsOfASecretAreBoundToItsValue(t *testing.T) {
	s := newSecrets(t, "")
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Fatal(err)
	}
	b, err := bustest.Connect(t, s.bus, subjects.Service("credentials")).OpenBucket(t.Context(), "BERTH_SECRETS")
	if err != nil {
		t.Fatal(err)
	}
	note, _, err := b.Get(t.Context(), secretKey("acme", "api-key"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Put(t.Context(), secretKey("acme", "api-key"), bytes.ReplaceAll(note, []byte("api.example.com"), []byte("bad.example.com"))); err != nil {
		t.Fatal(err)
	}
	_, reply, err := s.reveal(t, s.gate, ref(10, 12), "api-key")
	if err != nil || reply.GetHosts()[0] != "api.example.com" {
		t.Errorf("%v, %v", reply.GetHosts(), err)
	}
	if _, err := b.Put(t.Context(), secretKey("acme", "other"), note); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.reveal(t, s.gate, ref(10, 12), "other"); !errs.Is(err, errkind.DataLoss) {
		t.Error(err)
	}
}

func TestManyWritersLeaveOneValue(t *testing.T) {
	s := newSecrets(t, "")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if _, err := s.put(t, apiKey(fmt.Sprintf("%s-%d", marker, i))); err != nil {
				t.Error(err)
			}
			if _, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if keys := s.valueKeys(t); len(keys) != 1 {
		t.Errorf("values: %v", keys)
	}
}

// A stop between the two writes leaves a value that nobody names; it is destroyed once it was found so twice.
func TestAValueThatNoNoteNamesIsDestroyed(t *testing.T) {
	s := newSecrets(t, "")
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Fatal(err)
	}
	b, err := bustest.Connect(t, s.bus, subjects.Service("credentials")).OpenBucket(t.Context(), "BERTH_SECRETS")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Put(t.Context(), valueKey("acme", "api-key", "glost"), []byte("x")); err != nil {
		t.Fatal(err)
	}
	store := secretStore{vault: s.vault(t)}
	for _, want := range []int{2, 1, 1} {
		if err := store.sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		if keys := s.valueKeys(t); len(keys) != want {
			t.Errorf("%d values are there, want %d", len(keys), want)
		}
	}
	if _, _, err := s.reveal(t, s.gate, ref(10, 12), "api-key"); err != nil {
		t.Error(err)
	}
}

func TestATenantHasABoundedNumberOfSecrets(t *testing.T) {
	s := newSecrets(t, "")
	store := secretStore{vault: s.vault(t)}
	b, err := bustest.Connect(t, s.bus, subjects.Service("credentials")).OpenBucket(t.Context(), "BERTH_SECRETS")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Fatal(err)
	}
	for i := range core.MaxSecrets - 1 {
		if _, err := b.Put(t.Context(), secretKey("acme", fmt.Sprintf("s%d", i)), []byte("\x03{}")); err != nil {
			t.Fatal(err)
		}
	}
	more := apiKey(marker)
	more.Name = "one-more"
	_, err = s.put(t, more)
	wantKind(t, err, errkind.Exhausted)
	if _, err := s.put(t, apiKey(marker)); err != nil {
		t.Errorf("one that is there cannot be replaced: %v", err)
	}
	if _, _, err := store.read(t.Context(), "acme", "s1"); !errs.Is(err, errkind.DataLoss) {
		t.Errorf("a note that is malformed: %v", err)
	}
}
