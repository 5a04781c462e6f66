package credentials

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/bus"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	credentialsv1 "github.com/berth-dev/berth/schemas/gen/berth/credentials/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/services/credentials/internal/core"
)

const (
	// endedPrefix begins the names of records of grants that ended: the tenant and a hash of the scope.
	endedPrefix = "ended."
	// maxName bounds issuer and subject of an ending; no grant is large enough for a longer one.
	maxName = grant.MaxBytes
	// maxReason bounds the sentence of an ending.
	maxReason = 512
)

// endedRecord is what is stored of an ending. It holds no secret.
type endedRecord struct {
	Tenant   ids.Tenant   `json:"tenant"`
	Issuer   string       `json:"issuer,omitempty"`
	Subject  string       `json:"subject,omitempty"`
	Frontend ids.Frontend `json:"frontend,omitempty"`
	At       time.Time    `json:"at"`
	Until    time.Time    `json:"until"`
}

// endedName is the name of a scope's record; issuer and subject may hold anything.
func endedName(s grant.Scope) string {
	h := sha256.New()
	for _, f := range []string{s.Issuer, s.Subject, string(s.Frontend)} {
		_ = binary.Write(h, binary.BigEndian, uint32(len(f))) // a hash takes all
		h.Write([]byte(f))
	}
	sum := base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(h.Sum(nil)[:16])
	return endedPrefix + string(s.Tenant) + "." + strings.ToLower(sum)
}

// endGrants ends grants before their time. What was decided holds in memory at once, also when it
// cannot be stored: then the caller asks again.
func (s *service) endGrants(ctx context.Context, _ bus.Request, req *credentialsv1.EndGrantsRequest) (*credentialsv1.EndGrantsReply, error) {
	const op = "credentials.end_grants"
	if len(req.GetIssuer()) > maxName || len(req.GetSubject()) > maxName || len(req.GetReason()) > maxReason {
		return nil, errs.E(op, errkind.TooLarge, "", "issuer, subject or reason are longer than is allowed")
	}
	scope := grant.Scope{Tenant: ids.Tenant(req.GetTenant()), Issuer: req.GetIssuer(), Subject: req.GetSubject(), Frontend: ids.Frontend(req.GetFrontend())}
	s.ending.Lock()
	defer s.ending.Unlock()
	cmds, err := s.decide(core.EndGrants{Scope: scope, Reason: req.GetReason()})
	if err != nil {
		return nil, refused(op, err)
	}
	for _, c := range cmds {
		switch c := c.(type) {
		case core.StoreEnding:
			err = s.store.endGrants(ctx, c.Ending)
		case core.DropEnding:
			if err == nil {
				err = s.store.dropEnding(ctx, c.Scope)
			}
		}
	}
	if err != nil {
		return nil, errs.Wrap(op, "", err)
	}
	s.record(ctx, cmds)
	return &credentialsv1.EndGrantsReply{}, nil
}

// dropEnding removes the record of an ending that is over, unless there is a new one.
func (s *service) dropEnding(ctx context.Context, scope grant.Scope) error {
	s.ending.Lock()
	defer s.ending.Unlock()
	s.mu.Lock()
	_, again := s.state.Ended[scope]
	s.mu.Unlock()
	if again {
		return nil
	}
	return s.store.dropEnding(ctx, scope)
}

// endGrants makes an ending durable. It needs no platform key: a suspension must not wait for its service.
func (s store) endGrants(ctx context.Context, e grant.Ending) error {
	raw, err := json.Marshal(endedRecord{e.Tenant, e.Issuer, e.Subject, e.Frontend, e.At.UTC(), e.Until.UTC()})
	if err != nil {
		return err
	}
	return s.records.Note(ctx, endedName(e.Scope), raw)
}

func (s store) dropEnding(ctx context.Context, scope grant.Scope) error {
	return s.records.Destroy(ctx, endedName(scope))
}

func (s store) ended(ctx context.Context, name string) (grant.Ending, error) {
	raw, err := s.records.ReadNote(ctx, name)
	if err != nil {
		return grant.Ending{}, err
	}
	return parseEnding(name, raw)
}

// parseEnding reads a record. One that is malformed keeps credentials from starting: whose grants ended
// would not be known.
func parseEnding(name string, raw []byte) (grant.Ending, error) {
	var r endedRecord
	if err := json.Unmarshal(raw, &r); err != nil {
		return grant.Ending{}, errs.E("read ending", errkind.DataLoss, name, "it is malformed")
	}
	e := grant.Ending{Scope: grant.Scope{Tenant: r.Tenant, Issuer: r.Issuer, Subject: r.Subject, Frontend: r.Frontend}, At: r.At, Until: r.Until}
	err := e.Check()
	if err == nil && (e.At.IsZero() || endedName(e.Scope) != name) {
		err = errors.New("it has no time, or the name of another")
	}
	if err != nil {
		return grant.Ending{}, errs.E("read ending", errkind.DataLoss, name, err)
	}
	return e, nil
}
