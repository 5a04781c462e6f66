// Package credentials is the service that issues grants, keeps the keys that
// sign them, holds the data key of every session generation, the static secrets
// of tenants and the roots of egress certificates. It
// guarantees that no grant, signing key, data key or secret is ever on the bus or in
// a store in the clear; that a grant is for one session, generation, epoch and
// host, and bound to a proof key; that after an acknowledged revoke the
// generation's data key is destroyed and no grant of it is issued or renewed;
// that after an acknowledged end_grants no grant that it meets is renewed, and none
// is issued for what was asked before it;
// and that a data key is given only to the host that owns the epoch now, by
// scheduler's word at that moment, and a secret only to that host's gate, of the
// session's own tenant, while it is waking or active. A data key that was destroyed is never made
// again. While the platform key cannot be reached, data keys are refused as
// unavailable and nothing is made or destroyed for them; a revoke still works.
// One replica is active at a time.
package credentials

import (
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/services/credentials/internal/core"
	"github.com/berth-dev/berth/services/credentials/internal/platform"
)

// Config is the configuration of the service.
type Config struct {
	// KeyDir holds the platform key, if it is a file, and the curve key, made at
	// the first start.
	KeyDir string `yaml:"key_dir"`
	// PlatformKey wraps the keys of all records: empty or "file" is a key file
	// in KeyDir, else the URL of a key in a key service, see
	// docs/howto/platform-key.md.
	PlatformKey string `yaml:"platform_key"`
	// GrantTTL is the life of a grant; clients renew at half of it.
	GrantTTL time.Duration `yaml:"grant_ttl"`
	// MaxSinceToken is how long grants are renewed after the last
	// verification of the user's own token.
	MaxSinceToken time.Duration `yaml:"max_since_token"`
	// RotateKeys is how long one key signs grants.
	RotateKeys time.Duration `yaml:"rotate_keys"`
	// PublishAhead is how long a key is published before it signs.
	PublishAhead time.Duration `yaml:"publish_ahead"`
	// Limit is the most requests of one method at once.
	Limit int `yaml:"limit"`
}

// NewConfig returns the defaults; KeyDir has none.
func NewConfig() Config {
	return Config{
		GrantTTL: 15 * time.Minute, MaxSinceToken: 12 * time.Hour,
		RotateKeys: 24 * time.Hour, PublishAhead: time.Hour, Limit: 256,
	}
}

// Validate says in one sentence what is wrong, if anything is.
func (c Config) Validate() error {
	bad := func(what string) error { return errs.E("configure credentials", errkind.Invalid, "", what) }
	switch {
	case c.KeyDir == "":
		return bad("key_dir is not set")
	case c.GrantTTL < core.MinTTL || c.GrantTTL > core.MaxTTL:
		return bad("grant_ttl must lie between 10s and 1h")
	case c.MaxSinceToken < c.GrantTTL:
		return bad("max_since_token must not be shorter than grant_ttl")
	case c.RotateKeys < 2*c.GrantTTL:
		return bad("rotate_keys must be at least twice grant_ttl")
	case c.PublishAhead < 2*grant.MaxFeedAge || c.PublishAhead > c.RotateKeys/2:
		return bad("publish_ahead must be at least 10s, so that every host knows a key before it signs, and at most half of rotate_keys")
	case c.Limit <= 0:
		return bad("limit must be positive")
	}
	return platform.Check(c.PlatformKey)
}
