package identity

import (
	"github.com/berth-dev/berth/services/identity/internal/core"
	"github.com/berth-dev/berth/services/identity/internal/tokens"
)

// coreToken is a verified token as the core has it.
func coreToken(t tokens.Token) core.Token {
	return core.Token{
		Issuer: t.Issuer, Subject: t.Subject, Audience: t.Audience, Expires: t.Expires, NotBefore: t.NotBefore, IssuedAt: t.IssuedAt,
		Acting: t.Acting, Claims: t,
	}
}
