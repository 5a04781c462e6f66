package bus

import (
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// WithToken has a user log in with its own token instead of an nkey: the login's name must be that of
// subjects.Frontend(tenant, subjects.UserFrontend(issuer, subject)), and its seed is not used. token is
// asked again at each reconnect, and must not block for long.
func WithToken(token func() string) Option { return func(o *options) { o.token = token } }

// hearing are the permissions of a user, who hears the events of its own sessions besides; those of the
// tenant's others tell who they are and what they do.
func (p Permissions) hearing(t ids.Tenant, own []ids.SessionKey) Permissions {
	for _, key := range own {
		p.Subscribe = append(p.Subscribe, subjects.Prefix+"session."+string(t)+"."+string(key)+".*")
	}
	return p
}

// proof is what the login shows the server.
func (l Login) proof(o options) (nats.Option, error) {
	if o.token != nil {
		return nats.TokenHandler(o.token), nil
	}
	pair, err := nkeys.FromSeed([]byte(l.Seed))
	if err != nil {
		return nil, fmt.Errorf("the login's nkey seed cannot be read: %w", err)
	}
	pub, err := pair.PublicKey()
	if err != nil {
		return nil, err
	}
	return nats.Nkey(pub, pair.Sign), nil
}
