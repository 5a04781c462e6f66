package grant

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/ids"
)

// Principal is issuer and subject of the user's token, byte-exact.
type Principal struct {
	Issuer  string `json:"issuer"`
	Subject string `json:"subject"`
}

// Claims are what a grant says.
type Claims struct {
	Issuer     string         `json:"iss"`
	ID         string         `json:"jti"`
	Tenant     ids.Tenant     `json:"tenant"`
	Frontend   ids.Frontend   `json:"frontend"`
	Session    ids.SessionKey `json:"session"`
	Generation ids.Generation `json:"generation"`
	Epoch      ids.Epoch      `json:"epoch"`
	Host       ids.Host       `json:"host"`
	Principal  Principal      `json:"principal"`
	Confirm    Confirmation   `json:"cnf"`
	// Verbs are what the grant is good for, in order, each once. A grant of a
	// release that had no verbs has none: it was good for DefaultVerbs, and is
	// read so.
	Verbs []Verb `json:"verbs,omitempty"`
	// Once: the grant cannot be renewed.
	Once bool `json:"once,omitempty"`
	// Unix seconds.
	IssuedAt int64 `json:"iat"`
	Expires  int64 `json:"exp"`
	// AuthTime is when the user's own token was last verified.
	AuthTime int64 `json:"auth_time"`
}

// A grant of an operator names these in place of a frontend and of an issuer of
// users. Both are words that neither can have, and such a grant cannot be renewed.
const (
	OperatorFrontend ids.Frontend = "operator"
	OperatorIssuer                = "berth:operator"
)

// OfOperator reports whether an operator holds the grant, not a frontend.
func (c Claims) OfOperator() bool { return c.Frontend == OperatorFrontend }

// Confirmation names the proof key (RFC 7800, member jwk).
type Confirmation struct {
	JWK JWK `json:"jwk"`
}

// JWK is an Ed25519 public key (RFC 8037).
type JWK struct {
	KeyType string `json:"kty"`
	Curve   string `json:"crv"`
	X       string `json:"x"`
	KeyID   string `json:"kid,omitempty"`
	Use     string `json:"use,omitempty"`
	Alg     string `json:"alg,omitempty"`
}

// Confirm makes the cnf claim for a proof key.
func Confirm(key ed25519.PublicKey) Confirmation {
	return Confirmation{JWK: JWK{KeyType: "OKP", Curve: "Ed25519", X: b64.EncodeToString(key)}}
}

// Binding is what a grant is for; a match needs every field to be equal.
type Binding struct {
	Tenant     ids.Tenant
	Session    ids.SessionKey
	Generation ids.Generation
	Epoch      ids.Epoch
	Host       ids.Host
}

// Binding returns what these claims are for.
func (c Claims) Binding() Binding {
	return Binding{c.Tenant, c.Session, c.Generation, c.Epoch, c.Host}
}

// ProofKey returns the key whose holder may use the grant.
func (c Claims) ProofKey() (ed25519.PublicKey, error) { return c.Confirm.JWK.ed25519() }

// ExpiresAt returns the exp claim as a time.
func (c Claims) ExpiresAt() time.Time { return time.Unix(c.Expires, 0).UTC() }

// HalfLife is when a client should renew.
func (c Claims) HalfLife() time.Time {
	return time.Unix(c.IssuedAt, 0).Add(time.Duration(c.Expires-c.IssuedAt) * time.Second / 2).UTC()
}

func (k JWK) ed25519() (ed25519.PublicKey, error) {
	if k.KeyType != "OKP" || k.Curve != "Ed25519" {
		return nil, refuse(errkind.Unauthenticated, "the key is not an Ed25519 key")
	}
	raw, err := b64.DecodeString(k.X)
	if err != nil || len(raw) != ed25519.PublicKeySize {
		return nil, refuse(errkind.Unauthenticated, "the Ed25519 key is malformed")
	}
	return ed25519.PublicKey(raw), nil
}

var b64 = base64.RawURLEncoding.Strict()

// header returns the one form that a grant's header has for a key.
func header(kid ids.KeyID) []byte {
	return []byte(`{"alg":"EdDSA","kid":"` + string(kid) + `","typ":"` + Type + `"}`)
}

// Sign makes the compact form of a grant. It fails only if the claims are
// incomplete or too large.
func Sign(c Claims, kid ids.KeyID, key ed25519.PrivateKey) (string, error) {
	if err := c.check(); err != nil {
		return "", err
	}
	if !ids.IsToken(string(kid)) || len(key) != ed25519.PrivateKeySize {
		return "", refuse(errkind.Internal, "the signing key or its name is malformed")
	}
	body, err := json.Marshal(c)
	if err != nil {
		return "", refuse(errkind.Internal, "encode the claims of a grant: %v", err)
	}
	head := header(kid)
	out := make([]byte, 0, b64.EncodedLen(len(head))+b64.EncodedLen(len(body))+b64.EncodedLen(ed25519.SignatureSize)+2)
	out = b64.AppendEncode(out, head)
	out = append(out, '.')
	out = b64.AppendEncode(out, body)
	sig := ed25519.Sign(key, out)
	out = append(out, '.')
	out = b64.AppendEncode(out, sig)
	if len(out) > MaxBytes {
		return "", refuse(errkind.TooLarge, "the grant would be %d bytes long, at most %d are allowed", len(out), MaxBytes)
	}
	return string(out), nil
}

// parsed is a grant whose signature was not checked yet; its claims are
// still encoded.
type parsed struct {
	kid    ids.KeyID
	signed string // header and claims as signed
	body   []byte
	sig    []byte
}

var errMalformed = &Error{Kind: errkind.Unauthenticated, Reason: "the grant is malformed"}

// parse takes a compact form apart without believing any of it.
func parse(token string) (parsed, error) {
	var p parsed
	if len(token) == 0 {
		return p, refuse(errkind.Unauthenticated, "there is no grant")
	}
	if len(token) > MaxBytes {
		return p, refuse(errkind.TooLarge, "the grant is %d bytes long, at most %d are allowed", len(token), MaxBytes)
	}
	head, rest, ok := strings.Cut(token, ".")
	body, sig, ok2 := strings.Cut(rest, ".")
	if !ok || !ok2 {
		return p, errMalformed
	}
	rawHead, err := b64.DecodeString(head)
	if err != nil {
		return p, errMalformed
	}
	if p.kid, err = parseHeader(rawHead); err != nil {
		return p, err
	}
	if p.body, err = b64.DecodeString(body); err != nil {
		return p, errMalformed
	}
	if p.sig, err = b64.DecodeString(sig); err != nil || len(p.sig) != ed25519.SignatureSize {
		return p, errMalformed
	}
	p.signed = token[:len(head)+1+len(body)]
	return p, nil
}

// parseHeader accepts the canonical header and nothing else, so that crit,
// jwk, jku, x5u and other algorithms have no way in.
func parseHeader(raw []byte) (ids.KeyID, error) {
	var h struct {
		Alg string `json:"alg"`
		Kid string `json:"kid"`
		Typ string `json:"typ"`
	}
	if err := json.Unmarshal(raw, &h); err != nil {
		return "", errMalformed
	}
	if h.Alg != "EdDSA" {
		return "", refuse(errkind.Unauthenticated, "the grant is not signed with EdDSA")
	}
	if h.Typ != Type {
		return "", refuse(errkind.Unauthenticated, "the token is not a grant")
	}
	kid, err := ids.ParseKeyID(h.Kid)
	if err != nil || !bytes.Equal(raw, header(kid)) {
		return "", errMalformed
	}
	return kid, nil
}

// claims decodes the body of a grant whose signature is good.
func (p parsed) claims() (Claims, error) {
	var c Claims
	dec := json.NewDecoder(bytes.NewReader(p.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return Claims{}, errMalformed
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Claims{}, errMalformed
	}
	if c.Verbs == nil {
		c.Verbs = DefaultVerbs()
	}
	if err := c.check(); err != nil {
		return Claims{}, err
	}
	return c, nil
}

// Unverified reads the claims of a token without checking it. It is for a token
// that somebody else has checked, who does not tell its claims.
func Unverified(token string) (Claims, error) {
	p, err := parse(token)
	if err != nil {
		return Claims{}, err
	}
	return p.claims()
}

// check holds claims to their form.
func (c Claims) check() error {
	if c.Issuer != Issuer {
		return refuse(errkind.Unauthenticated, "the grant was not issued by credentials")
	}
	if !ids.IsToken(c.ID) {
		return refuse(errkind.Unauthenticated, "the grant has no proper id")
	}
	if _, err := ids.ParseTenant(string(c.Tenant)); err != nil {
		return refuse(errkind.Unauthenticated, "the grant names no proper tenant")
	}
	if c.OfOperator() != (c.Principal.Issuer == OperatorIssuer) || c.OfOperator() && !c.Once {
		return refuse(errkind.Unauthenticated, "the grant is half of an operator, or could be renewed by one")
	}
	if _, err := ids.ParseFrontend(string(c.Frontend)); err != nil && !c.OfOperator() {
		return refuse(errkind.Unauthenticated, "the grant names no proper frontend")
	}
	if _, err := ids.ParseSessionKey(string(c.Session)); err != nil {
		return refuse(errkind.Unauthenticated, "the grant names no proper session")
	}
	if _, err := ids.ParseHost(string(c.Host)); err != nil {
		return refuse(errkind.Unauthenticated, "the grant names no proper host")
	}
	if c.Generation.IsZero() || c.Epoch.IsZero() {
		return refuse(errkind.Unauthenticated, "the grant names no generation or no epoch")
	}
	if c.Principal.Issuer == "" || c.Principal.Subject == "" {
		return refuse(errkind.Unauthenticated, "the grant names no principal")
	}
	if c.IssuedAt <= 0 || c.Expires <= c.IssuedAt || c.AuthTime <= 0 || c.AuthTime > c.IssuedAt {
		return refuse(errkind.Unauthenticated, "the times of the grant contradict each other")
	}
	if err := checkVerbs(c.Verbs); err != nil {
		return err
	}
	_, err := c.ProofKey()
	return err
}
