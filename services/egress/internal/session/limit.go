package session

import (
	"encoding/json"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/services/egress/policy"
)

// useKey is one rule of one session, whichever of its sandboxes it is by.
type useKey struct {
	tenant, session string
	layer           egressv1.Layer
	rule            string
}

// use is what one session has of one rule.
type use struct {
	perDay atomic.Uint64 // the most bytes of a day; 0: any
	bytes  atomic.Uint64 // of day
	day    atomic.Int64

	mu   sync.Mutex
	open int
	max  policy.Limit
	rate *rate.Limiter
}

// uses are all of them. Bytes of a day, and what may begin in a time, outlive a binding: a session that wakes
// again has not more of them.
type uses struct {
	mu    sync.Mutex
	by    map[useKey]*use
	begun map[sessionKey]*rate.Limiter
}

type sessionKey struct{ tenant, session string }

// begin counts something that a session begins, by whatever rule; false: it is one too many.
func (u *uses) begin(ref *corev1.SessionRef, cfg Config) bool {
	k := sessionKey{ref.GetTenant(), ref.GetSession()}
	u.mu.Lock()
	defer u.mu.Unlock()
	l := u.begun[k]
	if l == nil {
		l = rate.NewLimiter(rate.Limit(cfg.RecordsPS), cfg.RecordsAtOnce)
		u.begun[k] = l
	}
	return l.AllowN(cfg.Now(), 1)
}

func dayOf(t time.Time) int64 { return t.Unix() / 86400 }

// take counts one request by a rule, or says that it is one too many.
func (u *uses) take(ref *corev1.SessionRef, dec policy.Decision, now time.Time) (*use, error) {
	k := useKey{ref.GetTenant(), ref.GetSession(), dec.Layer, dec.Rule}
	u.mu.Lock()
	x := u.by[k]
	if x == nil {
		x = &use{}
		u.by[k] = x
	}
	x.mu.Lock() // before clean can find it idle
	u.mu.Unlock()
	defer x.mu.Unlock()
	x.setLimits(dec.Limit)
	switch {
	case x.max.Connections > 0 && x.open >= x.max.Connections:
		return nil, &Refusal{policy.Rate, "the rule lets no more connections be open at once"}
	case x.rate != nil && !x.rate.AllowN(now, 1):
		return nil, &Refusal{policy.Rate, "the rule lets no more requests out in a second"}
	case x.over(now):
		return nil, &Refusal{policy.Bytes, "more bytes went through today than the rule allows"}
	}
	x.open++
	return x, nil
}

// limits changes the limits of what is open.
func (x *use) limits(l policy.Limit) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setLimits(l)
}

// setLimits is limits with the lock held.
func (x *use) setLimits(l policy.Limit) {
	if x.max == l {
		return
	}
	x.max = l
	x.perDay.Store(l.BytesPerDay)
	switch burst := max(l.Burst, 1, int(l.RequestsPerSecond)); {
	case l.RequestsPerSecond <= 0:
		x.rate = nil
	case x.rate == nil:
		x.rate = rate.NewLimiter(rate.Limit(l.RequestsPerSecond), burst)
	default:
		x.rate.SetLimit(rate.Limit(l.RequestsPerSecond))
		x.rate.SetBurst(burst)
	}
}

// today begins a day anew when there is another.
func (x *use) today(now time.Time) {
	if d, old := dayOf(now), x.day.Load(); d != old && x.day.CompareAndSwap(old, d) {
		x.bytes.Store(0)
	}
}

// over reports whether the day's bytes are used up.
func (x *use) over(now time.Time) bool {
	x.today(now)
	most := x.perDay.Load()
	return most > 0 && x.bytes.Load() >= most
}

// spend counts bytes; false: they are too many.
func (x *use) spend(n uint64, now func() time.Time) bool {
	most := x.perDay.Load()
	if most == 0 {
		x.bytes.Add(n)
		return true
	}
	x.today(now())
	return x.bytes.Add(n) <= most
}

func (x *use) release() {
	x.mu.Lock()
	x.open--
	x.mu.Unlock()
}

// clean forgets what is of an earlier day and not in use, and who has begun nothing for a while.
func (u *uses) clean(now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for k, l := range u.begun {
		if l.TokensAt(now) >= float64(l.Burst()) {
			delete(u.begun, k)
		}
	}
	for k, x := range u.by {
		x.mu.Lock()
		if x.open == 0 && (x.day.Load() != dayOf(now) || x.bytes.Load() == 0 && x.rate == nil) {
			delete(u.by, k)
		}
		x.mu.Unlock()
	}
}

// keptUse is what a restart of the gate keeps of a rule with a limit of bytes.
type keptUse struct {
	Tenant, Session, Rule string
	Layer                 int32
	Day                   int64
	Bytes, PerDay         uint64
}

// save writes the bytes of the day to a file, whole or not at all.
func (u *uses) save(file string, now time.Time) error {
	kept := []keptUse{}
	u.mu.Lock()
	for k, x := range u.by {
		if most, n := x.perDay.Load(), x.bytes.Load(); most > 0 && n > 0 && x.day.Load() == dayOf(now) {
			kept = append(kept, keptUse{k.tenant, k.session, k.rule, int32(k.layer), x.day.Load(), n, most})
		}
	}
	u.mu.Unlock()
	raw, err := json.Marshal(kept)
	if err != nil {
		return err
	}
	if err := os.WriteFile(file+".new", raw, 0o600); err != nil {
		return err
	}
	return os.Rename(file+".new", file)
}

// load reads them. A file that cannot be read has none.
func (u *uses) load(file string) {
	raw, err := os.ReadFile(file)
	var kept []keptUse
	if err != nil || json.Unmarshal(raw, &kept) != nil {
		return
	}
	for _, k := range kept {
		x := &use{}
		x.day.Store(k.Day)
		x.bytes.Store(k.Bytes)
		x.perDay.Store(k.PerDay)
		x.max.BytesPerDay = k.PerDay
		u.by[useKey{k.Tenant, k.Session, egressv1.Layer(k.Layer), k.Rule}] = x
	}
}
