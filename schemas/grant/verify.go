package grant

import (
	"crypto/ed25519"
	"encoding/json"
	"time"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// maxKeys bounds a key set.
const maxKeys = 64

// Verifier checks grants against one key set and one list of revocations.
// It never changes.
type Verifier struct {
	keys    map[ids.KeyID]ed25519.PublicKey
	revoked map[revokedKey]time.Time
	ended   Endings
}

// NewVerifier reads an RFC 7517 key set. Keys of other types are passed
// over; a set without any Ed25519 key is refused, and so is an ending without
// a proper scope.
func NewVerifier(jwks []byte, revoked []Revocation, ended []Ending) (*Verifier, error) {
	var set struct {
		Keys []JWK `json:"keys"`
	}
	if err := json.Unmarshal(jwks, &set); err != nil {
		return nil, refuse(errkind.Invalid, "the key set is not JSON of RFC 7517")
	}
	if len(set.Keys) > maxKeys {
		return nil, refuse(errkind.TooLarge, "the key set has %d keys, at most %d are allowed", len(set.Keys), maxKeys)
	}
	v := &Verifier{keys: map[ids.KeyID]ed25519.PublicKey{}, revoked: map[revokedKey]time.Time{}, ended: Endings{}}
	for _, k := range set.Keys {
		if k.KeyType != "OKP" || k.Curve != "Ed25519" || (k.Use != "" && k.Use != "sig") || (k.Alg != "" && k.Alg != "EdDSA") {
			continue
		}
		kid, err := ids.ParseKeyID(k.KeyID)
		if err != nil {
			return nil, refuse(errkind.Invalid, "the key set has a key without a proper kid")
		}
		pub, err := k.ed25519()
		if err != nil {
			return nil, refuse(errkind.Invalid, "key %s of the key set is malformed", kid)
		}
		if _, twice := v.keys[kid]; twice {
			return nil, refuse(errkind.Invalid, "the key set has two keys named %s", kid)
		}
		v.keys[kid] = pub
	}
	if len(v.keys) == 0 {
		return nil, refuse(errkind.Invalid, "the key set has no Ed25519 signing key")
	}
	for _, r := range revoked {
		v.revoked[revokedKey{r.Tenant, r.Session, r.Generation}] = r.Until
	}
	for _, e := range ended {
		if err := e.Check(); err != nil {
			return nil, err
		}
		v.ended.Add(e)
	}
	return v, nil
}

// EpochOf converts a stamp of the wire.
func EpochOf(s *corev1.Stamp) ids.Epoch {
	return ids.Epoch{Incarnation: s.GetIncarnation(), Index: s.GetIndex()}
}

// GenerationOf converts a stamp of the wire.
func GenerationOf(s *corev1.Stamp) ids.Generation {
	return ids.Generation{Incarnation: s.GetIncarnation(), Index: s.GetIndex()}
}

// BindingOf is what a grant for a session on a host must be for.
func BindingOf(ref *corev1.SessionRef, host ids.Host) Binding {
	return Binding{
		Tenant: ids.Tenant(ref.GetTenant()), Session: ids.SessionKey(ref.GetSession()),
		Generation: GenerationOf(ref.GetGeneration()), Epoch: EpochOf(ref.GetEpoch()), Host: host,
	}
}

// Knows reports whether the key set has the key that signed token. It is
// false for malformed tokens: fetching keys again would not help those.
func (v *Verifier) Knows(token string) bool {
	p, err := parse(token)
	return err != nil || v.keys[p.kid] != nil
}

// Authenticate checks signature, times and revocation at now, and returns
// the claims. It does not check what the grant is for: see Verify.
//
// Kinds: Unauthenticated (malformed, not ours, from the future), TooLarge,
// Expired (renew or open again), and those of Alive.
func (v *Verifier) Authenticate(token string, now time.Time) (Claims, error) {
	p, err := parse(token)
	if err != nil {
		return Claims{}, err
	}
	key := v.keys[p.kid]
	if key == nil {
		return Claims{}, refuse(errkind.Unauthenticated, "the grant was signed with a key that is not in force")
	}
	if !ed25519.Verify(key, []byte(p.signed), p.sig) {
		return Claims{}, refuse(errkind.Unauthenticated, "the signature of the grant is wrong")
	}
	c, err := p.claims()
	if err != nil {
		return Claims{}, err
	}
	if time.Unix(c.IssuedAt, 0).After(now.Add(Skew)) {
		return Claims{}, refuse(errkind.Unauthenticated, "the grant was issued in the future")
	}
	if !now.Before(c.ExpiresAt()) {
		return Claims{}, refuse(errkind.Expired, "the grant expired; renew it or open the session again")
	}
	if err := v.Alive(c); err != nil {
		return Claims{}, err
	}
	return c, nil
}

// Verify is Authenticate and an exact match with want. Kinds beside those of
// Authenticate: Denied (another tenant or session), StaleEpoch (another
// generation, epoch or host: open the session again).
func (v *Verifier) Verify(token string, want Binding, now time.Time) (Claims, error) {
	c, err := v.Authenticate(token, now)
	if err != nil {
		return Claims{}, err
	}
	got := c.Binding()
	switch {
	case got.Tenant != want.Tenant || got.Session != want.Session:
		return Claims{}, refuse(errkind.Denied, "the grant is for another session")
	case got.Generation != want.Generation:
		return Claims{}, refuse(errkind.StaleEpoch, "the grant is for another generation of the session; open it again")
	case got.Epoch != want.Epoch:
		return Claims{}, refuse(errkind.StaleEpoch, "the grant is for another epoch of the session; open it again")
	case got.Host != want.Host:
		return Claims{}, refuse(errkind.StaleEpoch, "the grant is for another host; open the session again")
	}
	return c, nil
}
