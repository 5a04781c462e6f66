package sdk

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
)

// userName is the bus identity that the user of the token has. What the token
// says is not verified here: the bus lets in nobody under another name.
func (c Config) userName() (string, error) {
	const op = "connect"
	tenant, err := ids.ParseTenant(c.Tenant)
	if err != nil {
		return "", wrap(op, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), tokenTime)
	defer cancel()
	token, err := c.User(ctx)
	if err != nil {
		return "", wrap(op, err)
	}
	var claims struct {
		Issuer  string `json:"iss"`
		Subject string `json:"sub"`
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return "", invalid(op, "the user's token is no JWT")
	}
	raw, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err == nil {
		err = json.Unmarshal(raw, &claims)
	}
	if err != nil || claims.Issuer == "" || claims.Subject == "" {
		return "", invalid(op, "the user's token names no issuer and subject")
	}
	return subjects.Frontend(tenant, subjects.UserFrontend(claims.Issuer, claims.Subject)).Name(), nil
}

// tokenTime bounds asking for a token at a login.
const tokenTime = 10 * time.Second

// userToken is asked at each login. With none the bus refuses, and it is tried again.
func (c Config) userToken() string {
	ctx, cancel := context.WithTimeout(context.Background(), tokenTime)
	defer cancel()
	token, err := c.User(ctx)
	if err != nil {
		return ""
	}
	return token
}
