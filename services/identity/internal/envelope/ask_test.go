package envelope

import (
	"crypto/sha256"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	identityv1 "github.com/berth-dev/berth/schemas/gen/berth/identity/v1"
	"github.com/berth-dev/berth/services/identity/internal/core"
)

// FuzzAsk takes an opened envelope all the way to the first decision: whatever
// it holds, the token is verified before anything else is done, a refusal is
// one sentence, and neither it nor its record holds the token.
func FuzzAsk(f *testing.F) {
	at := time.Unix(1_750_000_000, 0)
	body := []byte(`{"sessionName":"work"}`)
	sum := sha256.Sum256(body)
	good := &identityv1.Envelope{Token: "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.c2ln", RequestId: "r1", Verb: core.Open, Time: timestamppb.New(at),
		Body: body, BodyHash: sum[:], ContentType: JSON, ProofKey: make([]byte, 32)}
	asJSON, err := protojson.Marshal(good)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(encode(f, good), byte(0), false)
	f.Add(asJSON, byte(0), true)
	f.Add(asJSON, byte(4), false)
	f.Add(asJSON, byte(128+8), false)
	f.Add(encode(f, &identityv1.Envelope{Verb: core.Renew, RequestId: "r1", Time: timestamppb.New(at)}), byte(3), false)
	f.Fuzz(func(t *testing.T, raw []byte, n byte, durable bool) {
		env, _, err := Parse(raw)
		if err != nil {
			return
		}
		verb, door := verbs[int(n)%len(verbs)], core.Direct
		if durable {
			door = core.Durable
		}
		if n >= 128 { // past what only an honest client would get right
			h := sha256.Sum256(env.GetBody())
			env.Verb, env.BodyHash, env.Time, env.ProofKey = verb, h[:], timestamppb.New(at), make([]byte, 32)
		}
		asked := core.Asked{Door: door, Tenant: "acme", Frontend: "web", Verb: verb, StoredAt: at, Envelope: env}
		if len(env.GetBody()) <= core.MaxBody {
			var berr error
			if asked.Body, berr = Body(verb, env); berr != nil {
				asked.Body.Fault = berr.Error()
			}
		}
		_, cmds, err := core.Decide(core.State{}, asked, at)
		if err != nil {
			refused(t, env.GetToken(), cmds, err)
			return
		}
		for _, c := range cmds {
			switch c.(type) {
			case core.VerifyToken, core.Audit:
			case core.CallRenew: // credentials checks the grant and its proof
				if verb != core.Renew || env.GetToken() != "" {
					t.Fatalf("%s went on without its token being verified", verb)
				}
			default:
				t.Fatalf("%s began with %T", verb, c)
			}
		}
	})
}

func refused(t *testing.T, token string, cmds []core.Command, err error) {
	t.Helper()
	hidden := func(text string) bool { return len(token) < 20 || !strings.Contains(text, token) }
	if err.Error() == "" || strings.Contains(err.Error(), "\n") || !hidden(err.Error()) {
		t.Fatalf("%.300q", err)
	}
	if len(cmds) != 1 {
		t.Fatalf("a refusal goes on with %v", cmds)
	}
	a, ok := cmds[0].(core.Audit)
	if !ok || a.Record.GetAdmitted() || !hidden(a.Record.String()) {
		t.Fatalf("recorded as %v", cmds[0])
	}
}
