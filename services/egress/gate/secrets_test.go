package gate

import (
	"testing"

	"google.golang.org/protobuf/proto"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// A gate that kept the secrets of sessions which left it would have them to lose.
func TestSecretsAreForgottenWithTheirSession(t *testing.T) {
	s := &secrets{by: map[secretKey]*held{}}
	gone, stays := binding(1).GetSession(), binding(2).GetSession()
	next := proto.CloneOf(gone)
	next.Epoch.Index++
	has := func(ref *corev1.SessionRef, name string) bool {
		k, err := keyOf(ref, name)
		must(t, err)
		return s.by[k] != nil
	}
	for _, ref := range []*corev1.SessionRef{gone, stays, next} {
		for _, name := range []string{"api-key", "other"} {
			k, err := keyOf(ref, name)
			must(t, err)
			s.by[k] = new(held)
		}
	}
	s.ended(gone)
	for _, name := range []string{"api-key", "other"} {
		if has(gone, name) {
			t.Errorf("%s is kept", name)
		}
		if !has(stays, name) || !has(next, name) {
			t.Errorf("%s of another session, or of its next epoch, is forgotten", name)
		}
	}
}
