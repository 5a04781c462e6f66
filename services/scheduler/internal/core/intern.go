package core

import (
	"strings"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"

	"time"
)

// maxInterned bounds what is remembered of values that were seen; when it is
// full it begins anew, and only sharing is lost.
const maxInterned = 1 << 15

// interner has equal values of many sessions share their memory. It changes
// nothing of what a state says.
type interner struct {
	words map[string]string
	terms map[termsKey]*Terms
}

// termsKey is Terms as a value that can be compared.
type termsKey struct {
	plan, template, image, tierReason, zones string
	tier                                     corev1.Tier
	limits                                   Limits
	ephemeral                                bool
	idle, retention                          time.Duration
	snapshots                                Snapshots
	priority, maxAwake                       uint32
}

func newInterner() *interner {
	return &interner{words: map[string]string{}, terms: map[termsKey]*Terms{}}
}

func intern[T ~string](in *interner, v T) T {
	if v == "" {
		return v
	}
	if w, ok := in.words[string(v)]; ok {
		return T(w)
	}
	if len(in.words) >= maxInterned {
		clear(in.words)
	}
	w := strings.Clone(string(v))
	in.words[w] = w
	return T(w)
}

// termsOf returns terms that equal t and are never changed.
func (in *interner) termsOf(t *Terms) *Terms {
	if t == nil {
		t = &Terms{}
	}
	k := termsKey{plan: t.Plan, template: t.Template, image: t.Image, tierReason: t.TierReason, zones: strings.Join(t.Zones, "\x00"),
		tier: t.Tier, limits: t.Limits, ephemeral: t.Ephemeral, idle: t.Idle, retention: t.Retention,
		snapshots: t.Snapshots, priority: t.Priority, maxAwake: t.MaxAwake}
	if v := in.terms[k]; v != nil {
		return v
	}
	if len(in.terms) >= maxInterned {
		clear(in.terms)
	}
	n := *t
	in.terms[k] = &n
	return &n
}

func (in *interner) actor(a Actor) Actor {
	a.Tenant, a.Issuer, a.Frontend, a.Acting = intern(in, a.Tenant), intern(in, a.Issuer), intern(in, a.Frontend), intern(in, a.Acting)
	return a
}

// session shares what a session that was read has in common with others.
func (s *State) share(v *Session) {
	in := s.in
	v.Tenant, v.Name, v.Boot, v.ImageDigest = intern(in, v.Tenant), intern(in, v.Name), intern(in, v.Boot), intern(in, v.ImageDigest)
	v.Host, v.Newest, v.From = intern(in, v.Host), intern(in, v.Newest), intern(in, v.From)
	v.Actor, v.Terms = in.actor(v.Actor), in.termsOf(v.Terms)
	v.Holders = s.shareHolders(v.Holders)
	if v.Wake != nil {
		v.Wake.Terms = in.termsOf(v.Wake.Terms)
	}
}

// shareHolders takes the list of a host alone from the host's record.
func (s *State) shareHolders(hosts []ids.Host) []ids.Host {
	if len(hosts) == 1 {
		if r := s.hosts[hosts[0]]; r != nil {
			return r.alone
		}
	}
	for i, h := range hosts {
		hosts[i] = intern(s.in, h)
	}
	return hosts
}
