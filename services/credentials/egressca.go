package credentials

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/services/credentials/internal/core"
	"github.com/berth-dev/berth/services/credentials/internal/egressca"
	"github.com/berth-dev/berth/services/credentials/internal/vault"
)

const (
	rootPrefix = "root." // and a number from 1
	mostRoots  = 64
)

// rootStore keeps the cell's egress roots. Their private keys are in memory only while one signs.
type rootStore struct {
	vault *vault.Vault
	mu    sync.Mutex // one root is made at a time
}

// roots are those of the cell in order, with a new one if it needs one. What another replica made first is
// taken.
func (r *rootStore) roots(ctx context.Context, now time.Time) ([]egressca.Root, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all, last, err := r.stored(ctx)
	if err != nil {
		return nil, err
	}
	from, needed := egressca.Next(all, now)
	for n := last + 1; needed && n <= mostRoots; n++ {
		root, err := r.make(ctx, n, now, from)
		if errs.Is(err, errkind.NotFound) {
			continue // one of this number was destroyed
		}
		if err != nil {
			return nil, err
		}
		return append(all, root), nil
	}
	if needed {
		return nil, errs.E("make egress root", errkind.Exhausted, "", "there were too many roots before")
	}
	return all, nil
}

// stored are the roots that are there in order, and the number of the last one.
func (r *rootStore) stored(ctx context.Context) (all []egressca.Root, last int, err error) {
	names, err := r.vault.Keys(ctx)
	if err != nil {
		return nil, 0, err
	}
	var numbers []int
	for _, name := range names {
		if rest, ok := strings.CutPrefix(name, rootPrefix); ok {
			n, err := strconv.Atoi(rest)
			if err != nil || n < 1 || n > mostRoots {
				return nil, 0, errs.E("read egress root", errkind.DataLoss, name, "its name is malformed")
			}
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	for _, n := range numbers {
		root, err := r.read(ctx, n)
		if err != nil {
			return nil, 0, err
		}
		all, last = append(all, root), n
	}
	return all, last, nil
}

func (r *rootStore) read(ctx context.Context, n int) (egressca.Root, error) {
	name := rootPrefix + strconv.Itoa(n)
	raw, err := r.vault.Get(ctx, name)
	if err != nil {
		return egressca.Root{}, err
	}
	defer clear(raw)
	root, err := egressca.Decode(raw)
	if err != nil {
		return egressca.Root{}, errs.E("read egress root", errkind.DataLoss, name, err)
	}
	return root, nil
}

// make stores a new root, or returns the one that was stored first.
func (r *rootStore) make(ctx context.Context, n int, now, from time.Time) (egressca.Root, error) {
	root, err := egressca.NewRoot(n, now, from)
	if err != nil {
		return egressca.Root{}, err
	}
	raw, err := root.Encode()
	if err != nil {
		return egressca.Root{}, err
	}
	defer clear(raw)
	sealed, err := r.vault.Seal(ctx, rootPrefix+strconv.Itoa(n), raw)
	if err != nil {
		return egressca.Root{}, err
	}
	if err := r.vault.Add(ctx, sealed); err != nil && !errs.Is(err, errkind.Exists) {
		return egressca.Root{}, err
	}
	return r.read(ctx, n)
}

// egressCA issues the authority of a host's gate. The host is the caller's, as the bus knows it.
func (s *service) egressCA(ctx context.Context, r bus.Request, req *credentialsv1.EgressCARequest) (*credentialsv1.EgressCAReply, error) {
	const op = "credentials.egress_ca"
	now := time.Now()
	all, err := s.egressRoots.roots(ctx, now)
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	live := egressca.Live(all, now)
	if len(live) == 0 {
		return nil, errs.E(op, errkind.Internal, "", "every root has expired")
	}
	cert, err := live[0].Issue(req.GetPublicKey(), r.Caller.Host, now)
	if errors.Is(err, egressca.ErrKey) {
		return nil, errs.E(op, errkind.Invalid, string(r.Caller.Host), err)
	}
	if err != nil {
		return nil, errs.E(op, errkind.Internal, string(r.Caller.Host), err)
	}
	reply := &credentialsv1.EgressCAReply{Certificate: cert.Raw}
	for _, root := range live {
		reply.Roots = append(reply.Roots, root.Cert.Raw)
	}
	s.record(ctx, []core.Command{core.Audit{What: "issued", Expires: cert.NotAfter,
		Reason: fmt.Sprintf("authority of the gate of host %s by %s", r.Caller.Host, live[0])}})
	return reply, nil
}
