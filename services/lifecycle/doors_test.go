package lifecycle

import (
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/bus/bustest"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	lifecyclev1 "github.com/berth-dev/berth/schemas/gen/berth/lifecycle/v1"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// TestAfterARotationAResumeIsToldUnderTheKeyOfTheSession: and not under the newest key, which leads nowhere
// while the session is an older one; where there is no answer that says which, under the newest.
func TestAfterARotationAResumeIsToldUnderTheKeyOfTheSession(t *testing.T) {
	w := newWorld(t)
	defer w.start(NewConfig())()
	newest := string(ids.DeriveSessionKey([]byte("newer"), "https://issuer.test", tenant, "ann", "default"))
	foreign := string(ids.DeriveSessionKey([]byte("k"), "https://issuer.test", tenant, "bob", "default"))
	told, err := bustest.Connect(t, w.bus, subjects.Operator()).NATS().SubscribeSync("berth.v1.session.*.*.resume")
	must(t, err)
	caller := w.identity()
	for name, tc := range map[string]struct {
		keys  []string
		fault error
		want  string
	}{
		"one key":                  {keys: []string{string(session)}, want: string(session)},
		"the session is older":     {keys: []string{newest, string(session)}, want: string(session)},
		"the wake failed":          {keys: []string{newest, string(session)}, fault: errs.E("wake", errkind.NoCapacity, "", "no host has room"), want: newest},
		"one key, the wake failed": {keys: []string{newest}, fault: errs.E("wake", errkind.NoCapacity, "", "no host has room"), want: newest},
		"an answer of another":     {keys: []string{newest, foreign}, want: newest},
	} {
		w.mu.Lock()
		w.wakeFault = tc.fault
		w.mu.Unlock()
		v := w.verified()
		v.Keys = tc.keys
		_, err := bus.Invoke[*lifecyclev1.OpenReply](t.Context(), caller, "lifecycle", "open", &lifecyclev1.OpenRequest{Verified: v, Ask: &identityv1.OpenRequest{}})
		if (err != nil) != (tc.fault != nil) {
			t.Errorf("%s: %v", name, err)
		}
		if asked := (<-w.wakes).GetAdmission().GetKeys(); !slices.Equal(asked, tc.keys) {
			t.Errorf("%s: scheduler was asked for %v", name, asked)
		}
		m, err := told.NextMsg(20 * time.Second)
		must(t, err)
		r := &lifecyclev1.Resume{}
		must(t, bus.Decode(m.Data, m.Header.Get(bus.HeaderContentType), r))
		on, err := subjects.ParseSession(m.Subject)
		if err != nil || string(on.Session) != tc.want || r.GetSession().GetSession() != tc.want || r.GetRequestId() != "r1" {
			t.Errorf("%s: told on %s: %v", name, m.Subject, r)
		}
	}
	if n, _, err := told.Pending(); err != nil || n != 0 {
		t.Errorf("%d more were told, %v", n, err)
	}
}
