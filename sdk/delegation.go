package sdk

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
)

// ActedFor is one frontend that acted for a user.
type ActedFor struct {
	Frontend string
	// Acting is the party that the frontend's exchanged tokens named (RFC 8693); empty where it came with
	// the user's own.
	Acting  string
	FirstAt time.Time // zero: it never acted
	LastAt  time.Time // to the hour
	// RevokedAt is when the user took the right to act for them away; zero: the frontend has it.
	RevokedAt time.Time
}

// Frontends lists which frontends acted for the user, by name; user nil: that of the Config. What
// happened in the last moments may not stand there yet.
func (c *Client) Frontends(ctx context.Context, user TokenSource) ([]ActedFor, error) {
	r, err := c.userAsk(ctx, "list frontends", "frontends", UserSession{User: user}, &identityv1.FrontendsRequest{})
	if err != nil {
		return nil, err
	}
	var out []ActedFor
	for _, f := range r.GetFrontends().GetFrontends() {
		out = append(out, actedOf(f))
	}
	return out, nil
}

// RevokeFrontend takes from a frontend of the tenant the right to act for the user. When it returns, the
// frontend's requests for this user are refused and its grants end: open streams end within a second.
// It takes the user's own token: one that was exchanged settles nothing.
//
// Errors: ErrNotFound (there is no such frontend), ErrDenied.
func (c *Client) RevokeFrontend(ctx context.Context, user TokenSource, frontend string) error {
	return c.settleFrontend(ctx, user, frontend, false)
}

// AllowFrontend gives back what RevokeFrontend took. It must come by another frontend than that.
func (c *Client) AllowFrontend(ctx context.Context, user TokenSource, frontend string) error {
	return c.settleFrontend(ctx, user, frontend, true)
}

func (c *Client) settleFrontend(ctx context.Context, user TokenSource, frontend string, allow bool) error {
	_, err := c.userAsk(ctx, "settle who may act", "revoke_frontend", UserSession{User: user},
		&identityv1.RevokeFrontendRequest{Frontend: frontend, Allow: allow})
	return err
}

func actedOf(f *identityv1.ActedFor) ActedFor {
	return ActedFor{Frontend: f.GetFrontend(), Acting: f.GetActing(), FirstAt: timeOf(f.GetFirstAt()), LastAt: timeOf(f.GetLastAt()),
		RevokedAt: timeOf(f.GetRevokedAt())}
}

func timeOf(t *timestamppb.Timestamp) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.AsTime()
}
