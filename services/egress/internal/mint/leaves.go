package mint

import (
	"container/list"
	"crypto/tls"
	"sync"
	"time"

	"github.com/berth-dev/berth/services/egress/authority"
)

// leaves remembers certificates by name, at most so many: what was not asked for longest goes. Who asks for
// a name that is being made waits for it.
type leaves struct {
	most int

	mu     sync.Mutex
	byName map[authority.Name]*list.Element // of *leaf
	order  *list.List                       // last used first
}

type leaf struct {
	name authority.Name
	done chan struct{} // closed once cert or err is set
	cert *tls.Certificate
	err  error
}

func newLeaves(most int) *leaves {
	return &leaves{most: most, byName: map[authority.Name]*list.Element{}, order: list.New()}
}

// get returns the certificate for name, from memory if it is there and lives for long enough. An error is
// not remembered.
func (l *leaves) get(name authority.Name, now time.Time, issue func() (*tls.Certificate, error)) (*tls.Certificate, error) {
	mine, wait := l.find(name, now)
	if mine == nil {
		<-wait.done
		return wait.cert, wait.err
	}
	defer func() {
		if mine.cert == nil {
			l.drop(mine)
		}
		close(mine.done)
	}()
	mine.cert, mine.err = issue()
	return mine.cert, mine.err
}

// find returns the entry to wait for, or one that the caller has to fill.
func (l *leaves) find(name authority.Name, now time.Time) (mine, wait *leaf) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if el, ok := l.byName[name]; ok {
		e := el.Value.(*leaf)
		if !e.stale(now) {
			l.order.MoveToFront(el)
			return nil, e
		}
		l.remove(el)
	}
	e := &leaf{name: name, done: make(chan struct{})}
	l.byName[name] = l.order.PushFront(e)
	for l.order.Len() > l.most {
		l.remove(l.order.Back())
	}
	return e, nil
}

// stale reports whether a certificate should be made anew; one that is being made is not.
func (e *leaf) stale(now time.Time) bool {
	select {
	case <-e.done:
	default:
		return false
	}
	if e.cert == nil {
		return true
	}
	life := e.cert.Leaf.NotAfter.Sub(e.cert.Leaf.NotBefore)
	return e.cert.Leaf.NotAfter.Sub(now) < min(leafLeft, life/2)
}

func (l *leaves) remove(el *list.Element) {
	l.order.Remove(el)
	delete(l.byName, el.Value.(*leaf).name)
}

// drop forgets an entry that failed, if it is still the one of its name.
func (l *leaves) drop(e *leaf) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if el, ok := l.byName[e.name]; ok && el.Value.(*leaf) == e {
		l.remove(el)
	}
}

// count is for tests and measurements.
func (l *leaves) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.order.Len()
}
