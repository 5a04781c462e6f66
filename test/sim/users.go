package sim

import (
	"fmt"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
	ident "github.com/berth-dev/berth/services/identity/simcore"
)

// users are people behind one frontend that never dies: they open, write, save, close, delete, and ask
// again with the same request id when no answer comes.
type users struct {
	w       *World
	p       *proc
	all     []*user
	working int
	calm    bool // no new work: what is unanswered is asked again until it is answered
}

type user struct {
	w       *World
	n       int
	subject string
	name    string
	key     ids.SessionKey
	durable bool
	grant   *openReply
	own     *content // newest write that was answered in this opening
	open    []*request
	nreq    int
}

// request is one request id with what was answered.
type request struct {
	id     ids.RequestID
	verb   string
	done   bool
	first  *openReply
	tries  int
	stored *durable
}

func newUsers(w *World, n int) *users {
	us := &users{w: w}
	us.p = w.proc("frontend", "frontend")
	us.p.up = true
	for i := range n {
		u := &user{w: w, n: i, subject: fmt.Sprintf("user-%d", i), name: "default", durable: !w.chance(0.15)}
		u.key = w.identity.keyOf(u.subject, u.name)
		us.all = append(us.all, u)
	}
	return us
}

func (us *users) begin() {
	for _, u := range us.all {
		us.working++
		us.w.spawn(us.p, "user", func(t *task) {
			t.sleep(nil, us.w.between(0, 10*time.Second))
			for !us.calm {
				u.act(t)
				t.sleep(nil, us.w.between(50*time.Millisecond, u.w.pace))
			}
			u.finish(t)
			us.working--
		})
	}
}

// act is one thing that a user does.
func (u *user) act(t *task) {
	w := u.w
	if len(u.open) > 0 && w.chance(0.6) { // ask again for what was not answered
		u.send(t, pick(&w.kernel, u.open))
		return
	}
	if u.grant == nil {
		switch {
		case w.chance(0.03):
			u.request(t, ident.Delete)
		case w.chance(0.04):
			u.request(t, ident.Close)
		default:
			u.request(t, ident.Open)
		}
		return
	}
	switch x := w.rng.Float64(); {
	case x < 0.45:
		u.box(t, "write")
	case x < 0.55:
		u.box(t, "read")
	case x < 0.67:
		u.box(t, "checkpoint")
	case x < 0.72:
		u.box(t, "work")
	case x < 0.80:
		u.request(t, ident.Open)
	case x < 0.90:
		u.request(t, ident.Close)
	case x < 0.925:
		u.request(t, ident.Delete)
	case x < 0.96: // away for a while: the session goes idle
		t.sleep(nil, w.between(10*time.Second, 100*time.Second))
	}
}

func (u *user) request(t *task, verb string) {
	u.nreq++
	r := &request{id: ids.RequestID(fmt.Sprintf("r%d-%d", u.n, u.nreq)), verb: verb}
	u.open = append(u.open, r)
	u.send(t, r)
}

// send sends a request by one of the two doors and heeds the answer.
func (u *user) send(t *task, r *request) {
	w := u.w
	req := identReq{verb: r.verb, id: r.id, subject: u.subject, name: u.name, durable: u.durable, dated: epoch0.Add(w.now),
		wait: 60 * time.Second, body: []byte(r.verb + u.subject)}
	if r.tries++; r.tries > 1 {
		w.cov.hit("request sent again")
	}
	c := w.within(nil, w.between(3*time.Second, 70*time.Second))
	var reply any
	var err error
	if r.stored == nil && w.chance(0.3) {
		req.stored = epoch0.Add(w.now)
		r.stored = &durable{req: req}
		w.stream.asked = append(w.stream.asked, r.stored)
		w.stream.queued.fire(w)
		w.cov.hit("request by the durable door")
	}
	if d := r.stored; d != nil && !d.done {
		t.wait(c, -1, &d.answer)
		if !d.answer.set {
			return
		}
		reply, err = d.reply, d.err
	} else {
		r.stored = nil
		reply, err = t.call(c, "identity", "request", req)
	}
	u.answered(r, reply, err)
}

// answered notes an answer; one that may go well later leaves the request open.
func (u *user) answered(r *request, reply any, err error) {
	w := u.w
	w.say("user %d: %s %s: %v %v", u.n, r.verb, r.id, reply, err)
	if err != nil {
		k := kindOf(err)
		switch k {
		case errkind.ReplayMismatch, errkind.Invalid, errkind.Unauthenticated, errkind.Denied, errkind.TooLarge, errkind.Unimplemented:
			w.breaks("request-answered", "user %d: a good request %s was refused: %v", u.n, r.id, err)
		}
		if k.Retry() && !finalFault(err) {
			return
		}
		w.cov.hit("answer: " + r.verb + " " + k.String())
		u.end(r)
		if r.verb == ident.Open {
			u.grant, u.own = nil, nil
			if k == errkind.DataLoss { // nothing is left of it: begin anew
				u.broken(r)
			}
		}
		return
	}
	w.cov.hit("answer: " + r.verb + " ok")
	u.end(r)
	if g, ok := reply.(granted); ok {
		if r.first != nil && (r.first.ref != g.open.ref) {
			w.breaks("request-answered-once", "request %s was answered with %v and then with %v", r.id, r.first.ref, g.open.ref)
		}
		r.first = &g.open
		if u.grant == nil || u.grant.ref != g.open.ref {
			u.own = nil
		}
		u.grant = &g.open
		return
	}
	u.grant, u.own = nil, nil
}

func (u *user) broken(*request) { u.open = append(u.open, u.delete()) }

func (u *user) delete() *request {
	u.nreq++
	return &request{id: ids.RequestID(fmt.Sprintf("r%d-%d", u.n, u.nreq)), verb: ident.Delete}
}

func (u *user) end(r *request) {
	r.done = true
	u.open = remove(u.open, r)
}

// box uses the data plane by the grant that the user has.
func (u *user) box(t *task, do string) {
	w := u.w
	reply, err := t.call(w.within(nil, w.between(2*time.Second, 20*time.Second)), "host."+string(u.grant.host), "box", boxReq{u.grant.ref, do})
	w.say("user %d: %s: %v %v", u.n, do, reply, err)
	if err != nil {
		if gone(err) || w.chance(0.3) { // the session is not there any more: open it again
			u.grant, u.own = nil, nil
		}
		return
	}
	got, _ := reply.(*content)
	if do == "write" {
		w.cov.hit("write answered")
	}
	if u.own != nil && !got.holds(u.own) {
		w.breaks("read-your-writes", "user %d sees %v after %v was acknowledged in the same opening", u.n, got, u.own)
	}
	u.own = got
}

// finish asks again for what was not answered, until it is.
func (u *user) finish(t *task) {
	for tries := 0; len(u.open) > 0; tries++ {
		u.send(t, u.open[0])
		if tries > 200 {
			u.w.breaks("request-answered", "user %d: request %s (%s) is not answered though nothing fails any more", u.n, u.open[0].id, u.open[0].verb)
			return
		}
		t.sleep(nil, 500*time.Millisecond)
	}
	if u.w.chance(0.5) {
		r := u.delete()
		u.open = append(u.open, r)
		for tries := 0; len(u.open) > 0 && tries < 100; tries++ {
			u.send(t, u.open[0])
			t.sleep(nil, 500*time.Millisecond)
		}
		if len(u.open) > 0 {
			u.w.breaks("delete-ends", "user %d: the delete %s does not end", u.n, r.id)
		}
	}
}
