package audit

import egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"

// room is who takes how much of a spool: what waits for the bus, and what is held for the records of what is
// open. Up to the half of it anybody takes what is there. From there on a session takes an eighth of all at
// most, and a tenant a quarter; sessions that have next to nothing go on to three quarters whatever their
// tenant has. The last quarter is for those alone, of tenants that have not taken a quarter.
type room struct {
	max      int64
	waiting  int64
	held     int64
	sessions map[string]*part
	tenants  map[string]int64
}

// part is what one session has.
type part struct {
	tenant  string
	waiting int64
	held    int64 // for what is open
	spent   int64 // of what was held, records took this before release
}

// Shares of a spool, as what it is divided by.
const (
	sessionShare = 8
	tenantShare  = 4
	littleShare  = 64
)

func newRoom(most int64) *room {
	return &room{max: most, sessions: map[string]*part{}, tenants: map[string]int64{}}
}

// fits says whether n bytes more may be taken by a session, where all files together have total bytes. The
// tenant may be empty if it is not known.
func (m *room) fits(tenant, session string, total, n int64) error {
	var have int64
	if p := m.sessions[session]; p != nil {
		have, tenant = p.waiting+p.held, p.tenant
	}
	used := m.waiting + m.held + n
	little := have+n <= m.max/littleShare
	modest := m.tenants[tenant]+n <= m.max/tenantShare
	ok := false
	switch {
	case total+m.held+n > m.max:
	case used <= m.max/2:
		ok = true
	case used <= m.max/4*3:
		ok = little || modest && have+n <= m.max/sessionShare
	default:
		ok = little && modest
	}
	if !ok {
		return ErrFull
	}
	return nil
}

func (m *room) part(tenant, session string) *part {
	p := m.sessions[session]
	if p == nil {
		p = &part{tenant: tenant}
		m.sessions[session] = p
	}
	return p
}

// changed forgets who has nothing.
func (m *room) changed(session string, p *part, by int64) {
	if m.tenants[p.tenant] += by; m.tenants[p.tenant] <= 0 {
		delete(m.tenants, p.tenant)
	}
	if p.waiting <= 0 && p.held <= 0 && p.spent <= 0 {
		delete(m.sessions, session)
	}
}

// wait takes n bytes for what waits; sent gives them back.
func (m *room) wait(tenant, session string, n int64) {
	p := m.part(tenant, session)
	m.waiting, p.waiting = m.waiting+n, p.waiting+n
	m.changed(session, p, n)
}

func (m *room) sent(session string, n int64) {
	m.waiting -= n
	if p := m.sessions[session]; p != nil {
		n = min(n, p.waiting)
		p.waiting -= n
		m.changed(session, p, -n)
	}
}

// hold keeps n bytes free for the record of something that is open, until release.
func (m *room) hold(tenant, session string, n int64) {
	p := m.part(tenant, session)
	m.held, p.held = m.held+n, p.held+n
	m.changed(session, p, n)
}

// release ends hold, but for what spend took already.
func (m *room) release(session string, n int64) {
	p := m.sessions[session]
	if p == nil {
		return
	}
	took := min(n, p.spent)
	p.spent -= took
	n = min(n-took, p.held)
	m.held, p.held = m.held-n, p.held-n
	m.changed(session, p, -n)
}

// spend gives n bytes of what is held for a session to a record of it.
func (m *room) spend(session string, n int64) bool {
	p := m.sessions[session]
	if p == nil || p.held < n {
		return false
	}
	m.held, p.held, p.spent = m.held-n, p.held-n, p.spent+n
	m.changed(session, p, -n)
	return true
}

// take says whether a record may be kept. One of something that was open may take what was held for it.
func (m *room) take(r *egressv1.Record, total, n int64) error {
	session := r.GetSession().GetSession()
	err := m.fits(r.GetSession().GetTenant(), session, total, n)
	if err != nil && r.GetVerdict() != egressv1.Verdict_VERDICT_DENIED && m.spend(session, n) {
		return nil
	}
	return err
}
