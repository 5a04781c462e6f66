package bus

import (
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"time"

	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// The subject on which servers ask, and the header that names the server's curve key.
const (
	CalloutSubject    = "$SYS.REQ.USER.AUTH"
	CalloutXKeyHeader = "Nats-Server-Xkey"
	calloutAudience   = "nats-authorization-request"
)

// userSubscriptions is the most that a user's own login has at once: each takes memory of every server.
const userSubscriptions = 1024

// maxQuestion bounds a question: a CONNECT, and a chain of certificates.
const maxQuestion = 128 << 10

// Question is one login that a server asks about.
type Question struct {
	// NKey is the public nkey whose private part the client has: its signature over this connection's
	// nonce was checked. Empty: the client showed none.
	NKey string
	// Token is a user's token, not checked yet; empty if NKey is set.
	Token string
	// From is the address of the client.
	From string
	// TLS: it came over TLS, as every client of another process does; the others are in the server's own.
	TLS bool
	// Peer is the certificate that the client showed and the server verified; nil without one.
	Peer *x509.Certificate

	user, server, xkey string
}

// errQuestion tells nothing of the question, which holds secrets.
var errQuestion = errors.New("the server's question about a login cannot be read")

// Open reads a question. An error means that there is nobody to answer: the message comes from no
// server, or is sealed to another key. A Refusal of the login itself is returned as why.
func (k CalloutKeys) Open(msg []byte, header string) (q Question, why string, err error) {
	if len(msg) > maxQuestion || !nkeys.IsValidPublicCurveKey(header) {
		return q, "", errQuestion
	}
	plain, err := k.curve.Open(msg, header)
	if err != nil {
		return q, "", errQuestion
	}
	claims, err := jwt.DecodeAuthorizationRequestClaims(string(plain))
	if err != nil {
		return q, "", errQuestion
	}
	issuer, err := k.issuer.PublicKey()
	if err != nil || claims.Subject != issuer || claims.Audience != calloutAudience || claims.Server.XKey != header ||
		claims.Issuer != claims.Server.ID || !nkeys.IsValidPublicUserKey(claims.UserNkey) || !nkeys.IsValidPublicServerKey(claims.Server.ID) {
		return q, "", errQuestion
	}
	q = Question{From: claims.ClientInformation.Host, user: claims.UserNkey, server: claims.Server.ID, xkey: header}
	if claims.TLS != nil {
		q.TLS, q.Peer = true, peerOf(claims.TLS)
	}
	why = q.proof(claims.ConnectOptions, claims.ClientInformation)
	return q, why, nil
}

// proof takes what the client logs in with.
func (q *Question) proof(o jwt.ConnectOptions, c jwt.ClientInformation) (why string) {
	switch {
	case o.Username != "" || o.Password != "" || o.JWT != "":
		return "a login needs an nkey or a user's token, not a password or a JWT of NATS"
	case o.Nkey != "" && o.Token != "":
		return "a login has an nkey or a token, not both"
	case o.Nkey != "":
		if !signed(o.Nkey, c.Nonce, o.SignedNonce) {
			return "the nkey's signature is missing or wrong"
		}
		q.NKey = o.Nkey
		return ""
	case o.Token != "":
		q.Token = o.Token
		return ""
	}
	return "the client showed neither an nkey nor a token"
}

// signed reports whether sig is the signature of a user's nkey over the nonce.
func signed(nkey, nonce, sig string) bool {
	if nonce == "" || !nkeys.IsValidPublicUserKey(nkey) {
		return false
	}
	raw, err := base64.RawURLEncoding.DecodeString(sig)
	if err != nil {
		if raw, err = base64.StdEncoding.DecodeString(sig); err != nil {
			return false
		}
	}
	pub, err := nkeys.FromPublicKey(nkey)
	return err == nil && pub.Verify([]byte(nonce), raw) == nil
}

// peerOf is the client's own certificate, if the server verified its chain.
func peerOf(t *jwt.ClientTLS) *x509.Certificate {
	if len(t.VerifiedChains) == 0 || len(t.VerifiedChains[0]) == 0 {
		return nil
	}
	block, _ := pem.Decode([]byte(t.VerifiedChains[0][0]))
	if block == nil {
		return nil
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil
	}
	return cert
}

// Admit answers that the login is the caller's, with exactly its permissions, until then. A user hears
// its own sessions besides, which nobody else has. The servers' lists of connections show the mark, in
// lower case.
func (k CalloutKeys) Admit(q Question, c subjects.Caller, mark string, until time.Time, own ...ids.SessionKey) ([]byte, error) {
	if len(own) > 0 && !subjects.IsUserFrontend(c.Frontend) {
		return nil, errors.New("only a user's own login has sessions of its own")
	}
	if accountOf(c) != appAccount || Static(c) || c.Name() == "" {
		return nil, errors.New("only hosts, frontends and operators are let in by the callout")
	}
	u := jwt.NewUserClaims(q.user)
	u.Name, u.Audience, u.Expires = c.Name(), appAccount, until.Unix()
	u.Permissions = PermissionsOf(c).hearing(c.Tenant, own).JWT()
	u.AllowedConnectionTypes.Add(jwt.ConnectionTypeStandard, jwt.ConnectionTypeInProcess)
	u.Tags.Add(mark)
	if subjects.IsUserFrontend(c.Frontend) {
		u.Limits.Subs = userSubscriptions
	}
	signed, err := u.Encode(k.issuer)
	if err != nil {
		return nil, err
	}
	return k.seal(q, func(r *jwt.AuthorizationResponseClaims) { r.Jwt = signed })
}

// Refuse answers that nobody is let in, with one sentence that the server keeps to itself.
func (k CalloutKeys) Refuse(q Question, why string) ([]byte, error) {
	return k.seal(q, func(r *jwt.AuthorizationResponseClaims) { r.Error = why })
}

func (k CalloutKeys) seal(q Question, fill func(*jwt.AuthorizationResponseClaims)) ([]byte, error) {
	r := jwt.NewAuthorizationResponseClaims(q.user)
	if r == nil {
		return nil, errQuestion
	}
	r.Audience = q.server
	fill(r)
	plain, err := r.Encode(k.issuer)
	if err != nil {
		return nil, err
	}
	return k.curve.Seal([]byte(plain), q.xkey)
}
