package bus

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/berth-dev/berth/schemas/errkind"
)

// TestANodeThatIsNotThereYetIsWaitedFor: a stream that finds too few nodes while a cluster starts is declared
// again, and what is asked wrongly is not.
func TestANodeThatIsNotThereYetIsWaitedFor(t *testing.T) {
	for description, want := range map[string]errkind.Kind{
		"no suitable peers for placement, peer offline":         errkind.Unavailable,
		"no suitable peers for placement":                       errkind.Unavailable,
		"no suitable peers for placement, insufficient storage": errkind.Exhausted,
	} {
		err := (&Conn{}).declareFailed("declare stream", "S", "create it", &jetstream.APIError{Code: 400, ErrorCode: 10005, Description: description})
		if !tooEarly(err) || apiKind(&jetstream.APIError{Code: 400, ErrorCode: 10005, Description: description}) != want {
			t.Errorf("%s: %v", description, err)
		}
	}
	if wrong := apiKind(&jetstream.APIError{Code: 400, ErrorCode: 10052, Description: "duplicates window can not be larger"}); wrong != errkind.Invalid {
		t.Errorf("a wrong setting is %v", wrong)
	}
}
