package sim

import (
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/schemas/ids"
	sched "github.com/berth-dev/berth/services/scheduler/simcore"
)

// The requests of the services to each other, as far as they matter here.
type (
	wakeReq struct {
		tenant               ids.Tenant
		ref                  sched.Ref
		terms                *sched.Terms
		head, image, name    string
		lastActive           ids.Epoch
		fresh, unsaved, none bool
		until                time.Duration // real time; 0: none
		reservation          string        // of a warm sandbox, as committed with the placement
		cold                 bool
	}
	wakeReply struct {
		origin corev1.Origin
		asOf   time.Time
	}
	sleepReq struct {
		lastActive ids.Epoch
		tenant     ids.Tenant
		ref        sched.Ref
		parent     string
		reason     string
		idleSince  time.Time
		force      bool
	}
	sleepReply struct {
		missing  bool
		busy     bool
		since    time.Time
		manifest sched.ManifestInfo
	}
	deleteReq struct {
		tenant ids.Tenant
		ref    sched.Ref
	}
	deleteReply   struct{ erased bool } // also from the store
	activityReq   struct{ ref sched.Ref }
	activityReply struct {
		busy  bool
		since time.Time
	}

	revokeReq struct {
		tenant ids.Tenant
		ref    sched.Ref
	}
	keyReq struct {
		tenant ids.Tenant
		ref    sched.Ref
	}
	mintReq struct {
		tenant ids.Tenant
		ref    sched.Ref
		host   ids.Host
		actor  *corev1.Actor
	}

	joinReq struct {
		host ids.Host
		boot string
		cap  sched.Limits
	}
	joinReply struct {
		owned  []*sched.Session
		erased []deleteReq
		stale  []sched.Ref
	}
	leaseReq struct {
		host ids.Host
		boot string
	}
	commitReq struct {
		ref      sched.Ref
		manifest sched.ManifestInfo
		sealed   bool // the disk was not written to since
	}
	reportReq struct {
		ref  sched.Ref
		what string
		why  string
	}
	showReq struct {
		tenant ids.Tenant
		key    ids.SessionKey
	}
	showReply struct {
		s *sched.Session
		t *sched.Tombstone
	}
	openReply struct {
		ref    sched.Ref
		state  corev1.State
		origin corev1.Origin
		asOf   sched.Time
		host   ids.Host
	}
	closeReply struct {
		ref   sched.Ref
		state corev1.State
		busy  sched.Time
	}
	drainReq struct {
		host  ids.Host
		on    bool
		grace time.Duration
	}
	removeReq struct {
		host ids.Host
		lose bool
	}
)
