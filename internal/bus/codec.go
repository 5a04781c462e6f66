package bus

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// Content types of messages. Protobuf is the default where none is named.
const (
	Protobuf = "application/protobuf"
	JSON     = "application/json"
)

// Headers of messages.
const (
	HeaderContentType = "Content-Type"
	HeaderTimeout     = "Berth-Timeout-Ms" // how long the caller waits
	HeaderReply       = "Berth-Reply"      // where the durable door answers
	HeaderStream      = "Berth-Stream"     // data-plane stream id

	ceID          = "ce-id"
	ceType        = "ce-type"
	ceSource      = "ce-source"
	ceTime        = "ce-time"
	ceSpec        = "ce-specversion"
	ceContentType = "ce-datacontenttype"
)

// JSON writes lowerCamelCase names (protobuf's own JSON mapping) and leaves
// out what is not set; it reads lowerCamelCase and the names of the .proto
// files alike, and refuses names that it does not know. Protobuf keeps
// unknown fields.
var (
	jsonOut = protojson.MarshalOptions{EmitUnpopulated: false, UseProtoNames: false}
	jsonIn  = protojson.UnmarshalOptions{DiscardUnknown: false}
)

// Encode writes m in a content type; the empty one is Protobuf.
func Encode(m proto.Message, contentType string) ([]byte, error) {
	if isJSON(contentType) {
		b, err := jsonOut.Marshal(m)
		if err != nil {
			return nil, errs.E("encode JSON", errkind.Internal, "", err)
		}
		return b, nil
	}
	b, err := proto.Marshal(m)
	if err != nil {
		return nil, errs.E("encode protobuf", errkind.Internal, "", err)
	}
	return b, nil
}

// Decode reads m in a content type; the empty one is Protobuf. Bad input is
// of kind Invalid.
func Decode(data []byte, contentType string, into proto.Message) error {
	what := string(into.ProtoReflect().Descriptor().Name())
	switch {
	case len(data) > MaxPayload:
		return errs.E("decode", errkind.TooLarge, what, fmt.Sprintf("%d bytes, at most %d are allowed", len(data), MaxPayload))
	case isJSON(contentType):
		if err := jsonIn.Unmarshal(data, into); err != nil {
			return errs.E("decode", errkind.Invalid, what, fmt.Sprintf("the body is not its JSON form: %s", discreet(err)))
		}
	case contentType == "" || mediaType(contentType) == Protobuf || mediaType(contentType) == "application/x-protobuf":
		if err := proto.Unmarshal(data, into); err != nil {
			return errs.E("decode", errkind.Invalid, what, fmt.Errorf("the body is not its protobuf form: %w", err))
		}
	default:
		return errs.E("decode", errkind.Invalid, what, fmt.Sprintf("content type %.80q is neither %s nor %s", contentType, Protobuf, JSON))
	}
	return nil
}

// long are quoted values that may be a secret that somebody put in the wrong place.
var long = regexp.MustCompile(`"[^"]{28,}"?|\S{28,}`)

// discreet is what the decoder says, without the values that it quotes.
func discreet(err error) string {
	text := long.ReplaceAllString(strings.Join(strings.Fields(err.Error()), " "), "(left out)")
	return strings.ToValidUTF8(text[:min(len(text), 200)], "")
}

func mediaType(contentType string) string {
	t, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(t))
}

func isJSON(contentType string) bool { return contentType != "" && mediaType(contentType) == JSON }

// contentTypeOf reads a message's content type from either header.
func contentTypeOf(h map[string][]string) string {
	for _, k := range [...]string{HeaderContentType, ceContentType, "content-type"} {
		if v := h[k]; len(v) > 0 {
			return v[0]
		}
	}
	return ""
}
