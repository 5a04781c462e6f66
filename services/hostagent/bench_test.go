package hostagent

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	hostv1 "github.com/berth-dev/berth/schemas/gen/berth/host/v1"
	"github.com/berth-dev/berth/services/hostagent/guest/hostend"
)

func durationMS(n int) *durationpb.Duration {
	return durationpb.New(time.Duration(n) * time.Millisecond)
}

// timeDirect runs true at the guest, without the bus.
func timeDirect(t *testing.T, s *session, key string) time.Duration {
	s.mu.Lock()
	conn := s.sb.guest
	s.mu.Unlock()
	start := time.Now()
	e, err := conn.StartExec(context.Background(), hostend.ExecSpec{Key: key, Argv: []string{"/bin/true"}})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	for {
		ev, err := e.Next(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if ev.Exit != nil {
			return time.Since(start)
		}
	}
}

func median(d []time.Duration) time.Duration {
	d = slices.Clone(d)
	slices.Sort(d)
	return d[len(d)/2]
}

// TestExecTrueThroughTheBus prints what the way over the bus adds to the guest's own time.
func TestExecTrueThroughTheBus(t *testing.T) {
	r := newRig(t, newProcs(t))
	r.start()
	one := ref("ann", 5, 6)
	r.mustWake(one, nil)
	c := r.client(one)
	c.exec("warm", "true")
	s := r.run.h.session(key("ann"))
	const n = 300
	var prepare, answer, exit, through, direct []time.Duration
	for i := range n {
		start := time.Now()
		o := c.prepare(execOp(fmt.Sprintf("b%d", i), "/bin/true"), nil)
		made := time.Now()
		sub, err := c.conn.NATS().SubscribeSync(o.deliver)
		must(t, err)
		reply, err := c.send(o)
		must(t, err)
		opened := time.Now()
		st := &cstream{c: c, id: reply.GetStream(), sub: sub, reply: reply}
		if _, err := st.drain(); err != nil {
			t.Fatal(err)
		}
		end := time.Now()
		_ = sub.Unsubscribe()
		prepare, answer = append(prepare, made.Sub(start)), append(answer, opened.Sub(made))
		exit, through = append(exit, end.Sub(opened)), append(through, end.Sub(start))
		direct = append(direct, timeDirect(t, s, fmt.Sprintf("d%d", i)))
	}
	var info []time.Duration
	for range n {
		o := c.prepare(&boxv1.Operation{Op: &boxv1.Operation_Info{Info: &boxv1.Info{}}}, nil)
		start := time.Now()
		_, err := c.send(o)
		must(t, err)
		info = append(info, time.Since(start))
	}
	t.Logf("a call that needs no guest (two ways over the bus, seals, grant, proof, nonce): p50 %s", median(info))
	t.Logf("exec of true, p50: %s through the bus (client seals %s, answer %s, exit %s), %s at the guest alone",
		median(through), median(prepare), median(answer), median(exit), median(direct))
}

// TestAWakeThroughTheBus prints what a wake takes on a host with the null driver, cold and claimed, one
// at a time and many at once.
func TestAWakeThroughTheBus(t *testing.T) {
	r := newRig(t, nil)
	r.cfg.Capacity.MemoryBytes = 1 << 50
	r.start()
	p := newPool(r)
	const n = 100
	one := func(user string, cold bool) time.Duration {
		start := time.Now()
		reply, err := r.wake(ref(user, 5, 6), func(w *hostv1.WakeRequest) { w.Cold = cold })
		took := time.Since(start)
		if err != nil || (reply.GetWarm() == "") != cold {
			t.Errorf("%v %v", reply, err)
		}
		return took
	}
	for _, cold := range []bool{true, false} {
		if !cold {
			p.must(2 * n)
		}
		var alone []time.Duration
		for i := range n {
			alone = append(alone, one(fmt.Sprintf("a%d%v", i, cold), cold))
		}
		together := make([]time.Duration, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { together[i] = one(fmt.Sprintf("t%d%v", i, cold), cold) })
		}
		wg.Wait()
		slices.Sort(together)
		t.Logf("cold %v: p50 %s one at a time; %d at once p50 %s, p99 %s", cold, median(alone), n, median(together), together[n*99/100])
	}
}
