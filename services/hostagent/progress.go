package hostagent

import (
	"sync"
	"time"
)

// progress tells how far a restore is, at most once a second and not for what is quick.
type progress struct {
	tell func(done, total uint64)

	mu    sync.Mutex
	began time.Time
	told  time.Time
	done  uint64
	total uint64
}

const progressEvery = time.Second

func (p *progress) at(done, total uint64) {
	p.mu.Lock()
	now := time.Now()
	if p.began.IsZero() {
		p.began, p.told = now, now
	}
	p.done, p.total = max(p.done, done), total
	due := now.Sub(p.told) >= progressEvery
	if due {
		p.told = now
	}
	done = p.done
	p.mu.Unlock()
	if due {
		p.tell(done, total)
	}
}

// end tells the last state, if anything was told.
func (p *progress) end() {
	p.mu.Lock()
	told, done, total := p.told.After(p.began), p.done, p.total
	p.mu.Unlock()
	if told {
		p.tell(done, total)
	}
}
