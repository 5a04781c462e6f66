package devissuer

import (
	"encoding/json"
	"path/filepath"
	"time"

	"github.com/go-jose/go-jose/v4"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/internal/keyfile"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// maxExchanges bounds how many parties may stand in one token's act claim.
const maxExchanges = 8

// exchangeable are the claims that an exchange looks at.
type exchangeable struct {
	Issuer  string         `json:"iss"`
	Subject string         `json:"sub"`
	Expires int64          `json:"exp"`
	Act     map[string]any `json:"act"`
}

// Exchange is the token exchange of RFC 8693 for development: for a user's
// token that this issuer made it gives one that says who acts for the user.
// acting is the party that acts now; those of earlier exchanges stay nested
// within, and count for nothing. The new token ends with the old one, and has
// no groups: whoever acts for an administrator is none.
func Exchange(dir string, t ids.Tenant, token, acting string, now time.Time) (string, error) {
	const op = "exchange dev token"
	if acting == "" || len(acting) > 255 {
		return "", errs.E(op, errkind.Invalid, "", "the name of who acts must be 1 to 255 bytes long")
	}
	old, err := verified(op, dir, t, token)
	if err != nil {
		return "", err
	}
	if now.Unix() >= old.Expires {
		return "", errs.E(op, errkind.Expired, "", "the token has expired")
	}
	act := map[string]any{"sub": acting}
	if old.Act != nil {
		act["act"] = old.Act
	}
	for n, inner := 0, act; inner != nil; n++ {
		if n >= maxExchanges {
			return "", errs.E(op, errkind.Refused, "", "the token was exchanged too often")
		}
		inner, _ = inner["act"].(map[string]any)
	}
	return sign(op, dir, t, map[string]any{"sub": old.Subject, "iat": now.Unix(), "exp": old.Expires, "act": act})
}

// verified reads a token of a tenant's issuer, made with any live key.
func verified(op, dir string, t ids.Tenant, token string) (exchangeable, error) {
	var claims exchangeable
	bad := errs.E(op, errkind.Unauthenticated, "", "the token is not one of this tenant's development issuer")
	keys, err := keyfile.Read(filepath.Join(dir, keyFile))
	if err != nil {
		return claims, errs.Wrap(op, "", err)
	}
	listen, err := readAddress(filepath.Join(dir, addressFile))
	if err != nil {
		return claims, errs.Wrap(op, "", err)
	}
	jws, err := jose.ParseSignedCompact(token, []jose.SignatureAlgorithm{jose.EdDSA})
	if err != nil {
		return claims, bad
	}
	for _, k := range keys {
		raw, err := jws.Verify(secret(k, t).Public())
		if err != nil {
			continue
		}
		if err := json.Unmarshal(raw, &claims); err != nil || claims.Issuer != "http://"+listen+"/"+string(t) || claims.Subject == "" {
			return claims, bad
		}
		return claims, nil
	}
	return claims, bad
}
