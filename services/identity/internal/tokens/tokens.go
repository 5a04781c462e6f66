// Package tokens verifies users' tokens with the keys of their issuers. It
// guarantees that a token is believed only after go-oidc checked its signature
// with a key of the issuer that it names, by an algorithm that the registry
// allows; it judges neither audience nor times, which the core does. A token
// that two parsers could read in two ways is refused before that. Keys come
// from OIDC discovery or a file. Fetched ones are cached, fetched again when a
// token names a new one or after some minutes, never more than one fetch a
// second, and used for up to an hour while their issuer cannot be reached; so
// forged tokens cannot make identity flood an issuer, and an issuer that is
// slow or down delays nobody whose key is known.
package tokens

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// Issuer is one issuer of users' tokens.
type Issuer struct {
	// URL is the iss claim, byte for byte, and where discovery begins.
	URL string
	// Algs are the signature algorithms allowed; empty means Algs of this package.
	Algs []string
	// JWKS is the key set, and JWKSFile a file that holds it; both empty means discovery.
	JWKS     []byte
	JWKSFile string
}

// Algs are what is allowed where the registry does not say: never an
// algorithm with a shared secret, never "none".
var Algs = []string{oidc.RS256, oidc.ES256, oidc.EdDSA}

var known = []string{
	oidc.RS256, oidc.RS384, oidc.RS512, oidc.PS256, oidc.PS384, oidc.PS512, oidc.ES256, oidc.ES384, oidc.ES512, oidc.EdDSA,
}

// Token holds the facts of a verified token.
type Token struct {
	Issuer    string
	Subject   string
	Audience  []string
	Expires   time.Time
	NotBefore time.Time
	IssuedAt  time.Time
	// Acting is who acts for the subject, by the outermost act claim; empty
	// when nobody does.
	Acting string

	claims map[string]json.RawMessage
}

// Verifier verifies tokens of registered issuers. It is safe for concurrent use.
type Verifier struct {
	client  *http.Client
	issuers map[string]*trusted

	mu     sync.Mutex
	recent map[[sha256.Size]byte]verified
}

// verified is a token that was good a moment ago. Clients send the same one
// with each request.
type verified struct {
	token Token
	at    time.Time
}

const (
	// recentFor is how long a verification counts; a key that the issuer
	// withdraws works at most this much longer.
	recentFor = time.Minute
	maxRecent = 4096
)

// trusted is a registered issuer with its keys.
type trusted struct {
	how      Issuer
	keys     oidc.KeySet
	verifier *oidc.IDTokenVerifier
}

// New makes a verifier; client fetches keys, nil is one with sane time-outs.
// Nothing is fetched before the first token of an issuer.
func New(issuers []Issuer, client *http.Client) (*Verifier, error) {
	if client == nil {
		client = &http.Client{Timeout: usual.fetch}
	}
	v, err := (&Verifier{client: client}).With(issuers)
	if err != nil {
		return nil, err
	}
	return v, nil
}

// With makes a verifier for a changed registry. Keys that were fetched of
// issuers which did not change go along, so that a change elsewhere neither
// fetches nor depends on them being reachable now; the verifications that
// count for a while do not. With an error there is a verifier all the same: an
// issuer whose file cannot be read now keeps the keys that it had, if nothing
// else of it changed, and is refused otherwise.
func (v *Verifier) With(issuers []Issuer) (*Verifier, error) {
	var failed error
	next := &Verifier{client: v.client, issuers: map[string]*trusted{}, recent: map[[sha256.Size]byte]verified{}}
	for _, i := range issuers {
		if _, twice := next.issuers[i.URL]; twice {
			continue
		}
		if had := v.issuers[i.URL]; had != nil && had.how.same(i) {
			next.issuers[i.URL] = had
			continue
		}
		t, err := trust(i, v.client)
		if failed = errors.Join(failed, err); err != nil {
			if t = v.issuers[i.URL]; t == nil || i.JWKSFile == "" || i.JWKSFile != t.how.JWKSFile || !slices.Equal(i.Algs, t.how.Algs) {
				continue
			}
		}
		next.issuers[i.URL] = t
	}
	return next, failed
}

// same tells whether nothing but time can have changed the issuer's keys. A file can have changed.
func (i Issuer) same(as Issuer) bool {
	return i.JWKSFile == "" && as.JWKSFile == "" && bytes.Equal(i.JWKS, as.JWKS) && slices.Equal(i.Algs, as.Algs)
}

func trust(i Issuer, client *http.Client) (*trusted, error) {
	if err := checkURL(i.URL); err != nil {
		return nil, err
	}
	names := i.Algs
	if len(names) == 0 {
		names = Algs
	}
	algs := make([]jose.SignatureAlgorithm, 0, len(names))
	for _, a := range names {
		if !slices.Contains(known, a) {
			return nil, errs.Errorf("register issuer", errkind.Invalid, "%s: %q is no signature algorithm with a public key", i.URL, a)
		}
		algs = append(algs, jose.SignatureAlgorithm(a))
	}
	keys, err := keySetOf(i, algs, client)
	if err != nil {
		return nil, err
	}
	return &trusted{how: i, keys: keys, verifier: oidc.NewVerifier(i.URL, keys, &oidc.Config{
		SupportedSigningAlgs: names, SkipClientIDCheck: true, SkipExpiryCheck: true,
	})}, nil
}

// checkURL allows https, and http only where nobody can listen in.
func checkURL(raw string) error {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return errs.Errorf("register issuer", errkind.Invalid, "%q is no issuer URL", raw)
	}
	ip := net.ParseIP(u.Hostname())
	if u.Scheme == "https" || u.Scheme == "http" && (u.Hostname() == "localhost" || ip.IsLoopback()) {
		return nil
	}
	return errs.Errorf("register issuer", errkind.Invalid, "%q must begin with https:// unless it is a loopback address", raw)
}

// checkFetch allows what checkURL does, with a query, which some issuers have
// in the address of their keys.
func checkFetch(raw string) error {
	u, err := url.Parse(raw)
	if err != nil {
		return errs.E("fetch keys", errkind.Invalid, "", "the address of the keys is no URL")
	}
	u.RawQuery = ""
	return checkURL(u.String())
}

func keySetOf(i Issuer, algs []jose.SignatureAlgorithm, client *http.Client) (oidc.KeySet, error) {
	if i.JWKSFile == "" && len(i.JWKS) == 0 {
		return &remote{url: i.URL, client: guarded(client), algs: algs, pace: usual, missing: map[string]bool{}, unknown: map[string]int{}}, nil
	}
	raw, from := i.JWKS, "the registry"
	if i.JWKSFile != "" {
		var err error
		if raw, err = os.ReadFile(i.JWKSFile); err != nil {
			return nil, errs.E("read the key set of issuer", errkind.Invalid, i.URL, err)
		}
		from = i.JWKSFile
	}
	keys, err := parseJWKS(raw)
	if err != nil {
		return nil, errs.E("read the key set of issuer", errkind.Invalid, i.URL, fmt.Errorf("%s: %w", from, err))
	}
	return static{keys, algs}, nil
}

// static is a key set that does not change.
type static struct {
	keys []jose.JSONWebKey
	algs []jose.SignatureAlgorithm
}

// VerifySignature is called by go-oidc.
func (s static) VerifySignature(_ context.Context, jwt string) ([]byte, error) {
	jws, err := jose.ParseSigned(jwt, s.algs)
	if err != nil {
		return nil, errForged
	}
	if payload, ok := fits(s.keys, jws); ok {
		return payload, nil
	}
	return nil, errForged
}

// MaxBytes bounds a token.
const MaxBytes = 16 << 10

// Verify checks the signature of a token. Kinds: Unauthenticated, or
// Unavailable when the issuer's keys cannot be fetched now. No error quotes
// the token.
func (v *Verifier) Verify(ctx context.Context, raw string) (Token, error) {
	sum := sha256.Sum256([]byte(raw))
	now := time.Now()
	v.mu.Lock()
	seen, ok := v.recent[sum]
	v.mu.Unlock()
	if ok && now.Sub(seen.at) < recentFor {
		return seen.token, nil
	}
	t, err := v.verify(ctx, raw)
	if err != nil {
		return Token{}, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.recent) >= maxRecent {
		clear(v.recent)
	}
	v.recent[sum] = verified{t, now}
	return t, nil
}

func (v *Verifier) verify(ctx context.Context, raw string) (Token, error) {
	const op = "verify token"
	iss, claims, err := unverified(raw)
	if err != nil {
		return Token{}, errs.E(op, errkind.Unauthenticated, "", err)
	}
	issuer := v.issuers[iss]
	if issuer == nil {
		return Token{}, errs.E(op, errkind.Unauthenticated, "", "the token's issuer is not registered here")
	}
	var fault fetchFault
	t, err := issuer.verifier.Verify(context.WithValue(ctx, faultKey{}, &fault), raw)
	if err != nil && fault.err != nil {
		return Token{}, errs.E(op, errkind.Unavailable, "", fmt.Errorf("the keys of issuer %s cannot be fetched now: %w", iss, fault.err))
	}
	if err != nil {
		return Token{}, errs.E(op, errkind.Unauthenticated, "", errUnsigned)
	}
	out := Token{Issuer: t.Issuer, Subject: t.Subject, Audience: t.Audience, Expires: given(t.Expiry), IssuedAt: given(t.IssuedAt), claims: claims}
	if out.NotBefore, err = notBefore(claims); err != nil {
		return Token{}, errs.E(op, errkind.Unauthenticated, "", err)
	}
	if out.Acting, err = actingIn(claims); err == nil {
		err = out.sound(iss)
	}
	if err != nil {
		return Token{}, errs.E(op, errkind.Unauthenticated, "", err)
	}
	return out, nil
}

var errNoTime = errors.New("a time in the token lies beyond all calendars")

// sound refuses what would not be the same everywhere: names that decoding
// changed, so that two of them would become one; names that change what a
// screen shows around them; and times that other parts cannot hold.
func (t Token) sound(iss string) error {
	if t.Issuer != iss {
		return errors.New("the token names two issuers")
	}
	for _, name := range []string{t.Issuer, t.Subject, t.Acting} {
		if strings.ContainsRune(name, utf8.RuneError) || strings.ContainsFunc(name, unicode.IsControl) {
			return errors.New("a name in the token holds control characters or is no valid Unicode")
		}
	}
	for _, at := range []time.Time{t.Expires, t.NotBefore, t.IssuedAt} {
		if at.Year() > 9999 {
			return errNoTime
		}
	}
	return nil
}

// notBefore is the time of the nbf claim, zero without one.
func notBefore(claims map[string]json.RawMessage) (time.Time, error) {
	raw, ok := claims["nbf"]
	if !ok {
		return time.Time{}, nil
	}
	var n *float64
	if err := json.Unmarshal(raw, &n); err != nil {
		return time.Time{}, errors.New("the token's nbf claim is no number")
	}
	if n == nil {
		return time.Time{}, nil
	}
	if *n < 0 || *n > 1e11 {
		return time.Time{}, errNoTime
	}
	return time.Unix(int64(*n), 0), nil
}

// given turns the time of an absent claim into the zero time.
func given(t time.Time) time.Time {
	if t.Unix() <= 0 {
		return time.Time{}
	}
	return t
}

var (
	errNoJWT    = errors.New("the token is no JWT; opaque tokens are not accepted")
	errUnsigned = errors.New("the token is malformed, or not signed by its issuer with an algorithm that is allowed")
)

// unverified takes a token apart before its signature is checked, to know
// which issuer's keys it is then checked with. It refuses what can be read in
// two ways. No error of it quotes the token.
func unverified(raw string) (iss string, claims map[string]json.RawMessage, err error) {
	if len(raw) > MaxBytes {
		return "", nil, fmt.Errorf("the token is %d bytes long, at most %d are allowed", len(raw), MaxBytes)
	}
	parts := strings.Split(raw, ".")
	if len(parts) != 3 || strings.ContainsAny(raw, "\r\n") { // which base64 would skip
		return "", nil, errNoJWT
	}
	for i, what := range []string{"header", "payload"} {
		part, err := base64.RawURLEncoding.Strict().DecodeString(parts[i])
		if err != nil {
			return "", nil, errNoJWT
		}
		if claims, err = object(part); err != nil {
			return "", nil, fmt.Errorf("the token's %s is not clear: %w", what, err)
		}
		if _, crit := claims["crit"]; crit && i == 0 {
			return "", nil, errors.New("the token's header demands an extension, and none is known here")
		}
	}
	// The loop ends with the payload.
	if _, notice := claims["events"]; notice {
		return "", nil, errors.New("the token is a notice of its issuer, such as of a logout, and proves nothing about who sends it")
	}
	if _, err := base64.RawURLEncoding.Strict().DecodeString(parts[2]); err != nil {
		return "", nil, errUnsigned // the library would take several spellings of one signature
	}
	iss, ok := Token{claims: claims}.Claim("iss")
	if !ok || iss == "" {
		return "", nil, errors.New("the token names no issuer")
	}
	return iss, claims, nil
}
