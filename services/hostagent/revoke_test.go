package hostagent

import (
	"crypto/ed25519"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/berth-dev/berth/internal/bus/bustest"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/subjects"
)

// withGrant is the same client with another grant.
func (c *client) withGrant(change func(*grant.Claims)) *client {
	c.t.Helper()
	d := *c
	d.grant = c.r.creds.mint(c.t, c.ref, c.me, c.proof.Public().(ed25519.PublicKey), change)
	return &d
}

// TestAGrantOpensWhatItsVerbsCover goes through every operation that there is with a grant of each verb:
// the guest hears of none that the grant does not cover.
func TestAGrantOpensWhatItsVerbsCover(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	ops := (&boxv1.Operation{}).ProtoReflect().Descriptor().Oneofs().ByName("op").Fields()
	sample := map[protoreflect.Name]*boxv1.Operation{
		"exec": execOp("x1", "true"), "exec_attach": attachOp("x1", 0),
		"read_file":  {Op: &boxv1.Operation_ReadFile{ReadFile: &boxv1.ReadFile{Path: "/f"}}},
		"write_file": {Op: &boxv1.Operation_WriteFile{WriteFile: &boxv1.WriteFile{Path: "/f"}}},
		"stat":       {Op: &boxv1.Operation_Stat{Stat: &boxv1.Stat{Path: "/f"}}},
		"list_dir":   {Op: &boxv1.Operation_ListDir{ListDir: &boxv1.ListDir{Path: "/"}}},
		"move":       {Op: &boxv1.Operation_Move{Move: &boxv1.Move{From: "/f", To: "/g"}}},
		"remove":     {Op: &boxv1.Operation_Remove{Remove: &boxv1.Remove{Path: "/f"}}},
		"make_dir":   {Op: &boxv1.Operation_MakeDir{MakeDir: &boxv1.MakeDir{Path: "/d"}}},
		"watch":      {Op: &boxv1.Operation_Watch{Watch: &boxv1.Watch{Path: "/"}}},
	}
	for _, verb := range []grant.Verb{grant.VerbExec, grant.VerbFiles, grant.VerbPorts, grant.VerbRead} {
		d := c.withGrant(func(g *grant.Claims) { g.Verbs = []grant.Verb{verb} })
		for i := range ops.Len() {
			field := ops.Get(i)
			op := sample[field.Name()]
			if op == nil {
				op = &boxv1.Operation{}
				op.ProtoReflect().Set(field, protoreflect.ValueOfMessage(op.ProtoReflect().NewField(field).Message()))
			}
			may := grant.Claims{Verbs: []grant.Verb{verb}}.Covers(op) == nil
			s, err := d.open(op)
			f := (*failed)(nil)
			denied := errors.As(err, &f) && f.kind == "denied" && strings.Contains(f.reason, "is good for")
			if denied == may {
				t.Errorf("%s with a grant for %s: %v", field.Name(), verb, err)
			}
			if s != nil && s.id != "" {
				s.send(&boxv1.Frame{Body: &boxv1.Frame_Cancel{Cancel: &boxv1.Cancel{Kill: true}}})
			}
		}
	}
}

// last takes frames to the last one of a stream and returns how it failed.
func (s *cstream) last(within time.Duration) (string, error) {
	until := time.Now().Add(within)
	for {
		f, err := s.recv(time.Until(until))
		if err != nil {
			return "", err
		}
		if x := f.GetFailure(); x != nil {
			return x.GetKind() + ": " + x.GetReason(), nil
		}
	}
}

var cat = &boxv1.Operation{Op: &boxv1.Operation_Exec{Exec: &boxv1.Exec{Key: "x1", Argv: []string{"cat"}, Stdin: true}}}

// TestARevokedStreamEndsWithinASecond: each kind of revocation ends the streams that it meets with an
// explicit failure, and those of nobody else; the exec goes on.
func TestARevokedStreamEndsWithinASecond(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 7, 8)
	r.mustWake(one, nil)
	r.mustWake(two, nil)
	ann := r.client(one)
	bob := r.client(two).withGrant(func(g *grant.Claims) { g.Principal.Subject = "bob" })
	other := bob.mustOpen(cat)
	for name, tc := range map[string]struct {
		kind  string
		ended *credentialsv1.EndedGrants
		gone  *credentialsv1.RevokedGeneration
	}{
		"user":          {"denied", &credentialsv1.EndedGrants{Tenant: "acme", Issuer: "https://issuer", Subject: "u"}, nil},
		"user+frontend": {"denied", &credentialsv1.EndedGrants{Tenant: "acme", Issuer: "https://issuer", Subject: "u", Frontend: "web"}, nil},
		"deleted":       {"superseded", nil, &credentialsv1.RevokedGeneration{Tenant: "acme", Session: one.GetSession(), Generation: one.GetGeneration()}},
	} {
		s := ann.mustOpen(cat)
		w := ann.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Watch{Watch: &boxv1.Watch{Path: "/"}}})
		began, asked := time.Now(), 0
		r.creds.change(func() {
			asked = r.creds.asked
			r.creds.ended, r.creds.revoked = nil, nil
			if tc.ended != nil {
				tc.ended.At = timestamppb.Now()
				r.creds.ended = append(r.creds.ended, tc.ended)
			}
			if tc.gone != nil {
				r.creds.revoked = append(r.creds.revoked, tc.gone)
			}
		})
		for what, s := range map[string]*cstream{"exec": s, "watch": w} {
			how, err := s.last(20 * time.Second)
			if err != nil || !strings.HasPrefix(how, tc.kind+": ") {
				t.Errorf("%s, %s: %q %v", name, what, how, err)
			}
		}
		// The next asking tells it: three askings are a second. A busy machine may be late to look.
		r.creds.mu.Lock()
		asked = r.creds.asked - asked
		r.creds.mu.Unlock()
		if t.Logf("%s: the streams ended after %s", name, time.Since(began)); asked > 10 {
			t.Errorf("%s: the streams ended after %d askings", name, asked)
		}
		if _, err := ann.open(attachOp("x1", 0)); kindIn(err) != tc.kind {
			t.Errorf("%s: the grant opens: %v", name, err)
		}
		r.creds.change(func() { r.creds.ended, r.creds.revoked = nil, nil })
		eventually(t, 20*time.Second, "the revocation is taken back", func() bool {
			_, err := ann.open(&boxv1.Operation{Op: &boxv1.Operation_Present{Present: &boxv1.Present{}}})
			return err == nil
		})
	}
	if f, err := other.recv(time.Second); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("another user's stream: %v %v", f, err)
	}
	execs := bob.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_ListExecs{ListExecs: &boxv1.ListExecs{}}}).reply.GetResult().GetExecs()
	if !slices.ContainsFunc(execs, func(e *boxv1.ExecInfo) bool { return e.GetRunning() }) {
		t.Errorf("execs: %v", execs)
	}
}

// TestASuspendedTenantsStreamsEnd: also of two users and two sessions at once.
func TestASuspendedTenantsStreamsEnd(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one, two := ref("ann", 5, 6), ref("bob", 7, 8)
	r.mustWake(one, nil)
	r.mustWake(two, nil)
	a, b := r.client(one).mustOpen(cat), r.client(two).mustOpen(cat)
	r.creds.end(&credentialsv1.EndedGrants{Tenant: "acme", At: timestamppb.Now()})
	for _, s := range []*cstream{a, b} {
		if how, err := s.last(20 * time.Second); err != nil || !strings.HasPrefix(how, "denied: ") {
			t.Errorf("%q %v", how, err)
		}
	}
}

// TestAHostThatHearsNothingOpensNothing: from 5 s after its last good asking on, with one sentence; what is
// open goes on, and all is well when credentials is back.
func TestAHostThatHearsNothingOpensNothing(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	s := c.mustOpen(cat)
	r.creds.change(func() { r.creds.down = true })
	began := time.Now()
	var err error
	eventually(t, 20*time.Second, "nothing opens", func() bool { _, err = c.open(attachOp("x9", 0)); return kindIn(err) == "unavailable" })
	if took := time.Since(began); took < grant.MaxFeedAge-2*time.Second || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("after %s: %v", took, err)
	}
	s.send(dataFrame(0, []byte("still here")))
	for got := ""; got != "still here"; {
		f, err := s.recv(20 * time.Second)
		must(t, err)
		if f.GetFailure() != nil {
			t.Fatalf("the open stream: %v", f)
		}
		got += string(f.GetData().GetData())
	}
	r.creds.change(func() { r.creds.down = false })
	eventually(t, 20*time.Second, "it opens again", func() bool { _, err := c.open(attachOp("x9", 0)); return kindIn(err) == "not_found" })
}

// TestAStreamEndsWithItsGrantUnlessItIsRenewed: the holder shows a renewed grant, and one that cannot be
// renewed has its own time whatever else its holder has.
func TestAStreamEndsWithItsGrantUnlessItIsRenewed(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	short := func(g *grant.Claims) { g.Expires = g.IssuedAt + 12 } // a busy machine opens late
	kept := r.client(one)
	keptStream := kept.withGrant(short).mustOpen(cat)
	lone := r.client(one)
	loneStream := lone.withGrant(short).mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Watch{Watch: &boxv1.Watch{Path: "/"}}})
	once := kept.withGrant(func(g *grant.Claims) { short(g); g.Once, g.Verbs = true, []grant.Verb{grant.VerbRead} })
	onceStream := once.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Watch{Watch: &boxv1.Watch{Path: "/"}}})
	kept.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Present{Present: &boxv1.Present{}}})
	if how, err := loneStream.last(40 * time.Second); err != nil || !strings.HasPrefix(how, "unavailable: ") {
		t.Errorf("not renewed: %q %v", how, err)
	}
	if how, err := onceStream.last(40 * time.Second); err != nil || !strings.HasPrefix(how, "expired: ") {
		t.Errorf("cannot be renewed: %q %v", how, err)
	}
	if f, err := keptStream.recv(2 * time.Second); !errors.Is(err, nats.ErrTimeout) {
		t.Errorf("renewed: %v %v", f, err)
	}
}

// TestAnOperatorsGrantOpensFromTheOperatorsLogin: answer and frames go to the operator's inbox, and to no
// frontend's; a grant that is half of an operator is none.
func TestAnOperatorsGrantOpensFromTheOperatorsLogin(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	front := r.client(one)
	op := front.withGrant(func(g *grant.Claims) {
		g.Frontend, g.Principal, g.Once = grant.OperatorFrontend, grant.Principal{Issuer: grant.OperatorIssuer, Subject: "operator"}, true
	})
	if _, err := op.open(&boxv1.Operation{Op: &boxv1.Operation_ListExecs{ListExecs: &boxv1.ListExecs{}}}); kindIn(err) != "denied" {
		t.Errorf("from a frontend's inbox: %v", err)
	}
	op.me = subjects.Operator()
	op.conn = bustest.Connect(t, r.bus, op.me)
	op.mustOpen(&boxv1.Operation{Op: &boxv1.Operation_ListExecs{ListExecs: &boxv1.ListExecs{}}})
	s := op.mustOpen(cat)
	s.send(dataFrame(0, []byte("hello")))
	for got := ""; got != "hello"; {
		f, err := s.recv(20 * time.Second)
		must(t, err)
		if f.GetFailure() != nil {
			t.Fatalf("the operator's stream: %v", f)
		}
		got += string(f.GetData().GetData())
	}
	op.grant = front.grant
	if _, err := op.open(attachOp("x1", 0)); kindIn(err) != "denied" {
		t.Errorf("with a frontend's grant: %v", err)
	}
}

// TestShowingAGrantIsNoActivity: a client that only renews keeps no session awake.
func TestShowingAGrantIsNoActivity(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	s := r.run.h.session(key("ann"))
	s.mu.Lock()
	before := s.st.LastActivity
	s.mu.Unlock()
	r.client(one).mustOpen(&boxv1.Operation{Op: &boxv1.Operation_Present{Present: &boxv1.Present{}}})
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.st.LastActivity != before {
		t.Error("the session counts as used")
	}
}
