package hostagent

import (
	"context"
	"fmt"
	"time"

	"github.com/berth-dev/berth/services/hostagent/internal/core"
	"github.com/berth-dev/berth/services/hostagent/internal/disk"
	"github.com/berth-dev/berth/services/hostagent/internal/inventory"
)

// How full a disk is when its user hears of it, in percent; below quotaCalm it may be told again.
const (
	quotaNear = 90
	quotaFull = 100
	quotaCalm = 85
)

// quotas looks every second how full the disks of awake sessions are, until ctx ends.
func (h *host) quotas(ctx context.Context) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, s := range h.all() {
			s.mu.Lock()
			rec, sb := s.rec, s.sb
			awake := s.st.Phase == core.Awake && sb != nil
			s.mu.Unlock()
			switch {
			case !awake:
			case h.raw(rec.Tier):
				s.askForQuota(ctx, rec, sb)
			default:
				s.lookAtQuota(ctx, rec, sb)
			}
		}
	}
}

// askForQuota is lookAtQuota where a guest has to be asked, which may say nothing; one question at a time.
func (s *session) askForQuota(ctx context.Context, rec inventory.Record, sb *sandbox) {
	s.mu.Lock()
	asked := sb.memo().asked
	sb.memo().asked = true
	s.mu.Unlock()
	if asked {
		return
	}
	s.h.ops.Go(func() {
		s.lookAtQuota(ctx, rec, sb)
		s.mu.Lock()
		defer s.mu.Unlock()
		sb.memo().asked = false
	})
}

// lookAtQuota tells when a disk has come near its end, and again when it is full.
func (s *session) lookAtQuota(ctx context.Context, rec inventory.Record, sb *sandbox) {
	u, err := s.h.usage(ctx, rec, sb)
	if err != nil || u.Size == 0 {
		return // it was just taken away
	}
	s.mu.Lock()
	was := sb.memo().quota
	level := quotaLevel(u, was)
	sb.memo().quota = level
	s.mu.Unlock()
	if level > was {
		s.h.tell(refOf(rec), telling{what: "quota", reason: quotaText(level, u), done: u.Used, total: u.Size, again: true})
	}
}

// quotaLevel is 0, quotaNear or quotaFull. It goes down with hysteresis.
func quotaLevel(u disk.Usage, was int) int {
	percent := percentFull(u)
	switch {
	case u.Free < 64<<10:
		return quotaFull
	case percent >= quotaNear:
		return max(was, quotaNear)
	case percent >= quotaCalm && was > 0:
		return min(was, quotaNear)
	}
	return 0
}

// percentFull counts what the file system keeps for itself as used up, as df does, which a user compares it with.
func percentFull(u disk.Usage) int {
	most := max(u.Used+u.Free, 1)
	return int((u.Used*100 + most - 1) / most)
}

func quotaText(level int, u disk.Usage) string {
	if level == quotaFull {
		return fmt.Sprintf("The disk of this session is full (%s): programs cannot write until files are deleted or the plan is raised.", size(u.Size))
	}
	return fmt.Sprintf("The disk of this session is %d%% full: %s of %s are left.", percentFull(u), size(u.Free), size(u.Size))
}
