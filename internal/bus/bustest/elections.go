package bustest

import (
	"os"
	"time"
	_ "unsafe" // for go:linkname
)

// nats-server elects a new leader of a stream 4 to 9 s after the old one died, and has no option for it.
// The nodes of a Cluster take a quarter of that, so that tests wait for elections and not for their
// time-outs. Set BERTH_REAL_ELECTIONS to test with the times of production.

//go:linkname minElectionTimeout github.com/nats-io/nats-server/v2/server.minElectionTimeout
var minElectionTimeout time.Duration

//go:linkname maxElectionTimeout github.com/nats-io/nats-server/v2/server.maxElectionTimeout
var maxElectionTimeout time.Duration

//go:linkname hbInterval github.com/nats-io/nats-server/v2/server.hbInterval
var hbInterval time.Duration

//go:linkname lostQuorumInterval github.com/nats-io/nats-server/v2/server.lostQuorumInterval
var lostQuorumInterval time.Duration

//go:linkname lostQuorumCheck github.com/nats-io/nats-server/v2/server.lostQuorumCheck
var lostQuorumCheck time.Duration

// shortenElections must be called before a server starts.
func shortenElections() {
	if os.Getenv("BERTH_REAL_ELECTIONS") != "" {
		return
	}
	for _, d := range []*time.Duration{&minElectionTimeout, &maxElectionTimeout, &hbInterval, &lostQuorumInterval, &lostQuorumCheck} {
		*d /= 4
	}
}
