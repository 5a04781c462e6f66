package bus

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
)

// TestARefusedBodyIsNotRepeated: a token in the wrong place of a body must not
// come back in an error, which is logged and stored with dead messages.
func TestARefusedBodyIsNotRepeated(t *testing.T) {
	const token = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJlc2lnbmF0dXJl"
	for _, body := range []string{
		`{"index":"` + token + `"}`, `{"` + token + `":1}`, `{"index":` + token + `}`, token, `"` + token + `"`, `{"index":"` + token,
		`{"index":"` + strings.ReplaceAll(token, ".", `\"`) + `"}`,
	} {
		err := Decode([]byte(body), JSON, &corev1.Stamp{})
		if !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s: %v", body, err)
			continue
		}
		for _, part := range strings.Split(token, ".") {
			if strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v", body, err)
			}
		}
	}
	if err := Decode([]byte(`{"indx":1}`), JSON, &corev1.Stamp{}); err == nil || !strings.Contains(err.Error(), "indx") {
		t.Errorf("a mistyped name is not told: %v", err)
	}
}

// FuzzDecode: a body is read, and says the same when it is written again, or
// is refused in one line.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"tenant":"acme","issuer":"i","subject":"\u0000"}`), JSON)
	f.Add([]byte("\x0a\x04acme"), Protobuf)
	f.Add([]byte("\x0a\xff"), "")
	f.Add([]byte("{}"), "application/json;x=y")
	f.Fuzz(func(t *testing.T, raw []byte, contentType string) {
		got := &corev1.Actor{}
		if err := Decode(raw, contentType, got); err != nil {
			if k := errs.Kind(err); k != errkind.Invalid && k != errkind.TooLarge || strings.ContainsAny(err.Error(), "\n\r") || len(err.Error()) > 400 {
				t.Fatalf("%v: %.500q", k, err)
			}
			return
		}
		again := &corev1.Actor{}
		out, err := Encode(got, contentType)
		if err == nil {
			err = Decode(out, contentType, again)
		}
		if err != nil || !proto.Equal(got, again) {
			t.Fatalf("not the same when read again: %v", err)
		}
	})
}
