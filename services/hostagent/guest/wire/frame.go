package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

const (
	// MaxPayload is the largest payload of one frame, in bytes.
	MaxPayload = 64 << 10
	// HeaderSize is the length of a frame header, in bytes.
	HeaderSize = 24
	// MaxFrame is the largest encoded frame, in bytes.
	MaxFrame = HeaderSize + MaxPayload
	// MaxMessage bounds a request that is spread over several frames.
	MaxMessage = 1 << 20
	// Window is how far a sender may be ahead of the last ACK, in bytes.
	Window = 1 << 20

	lead = 0xB7
)

// Type says what a frame means.
type Type uint8

// The frame types. Their numbers are append-only.
const (
	TypeHello   Type = 1  // both ways: Hello, first frame after a sync record
	TypeRequest Type = 2  // host: Request, opens the stream
	TypeResult  Type = 3  // guest: result of the call
	TypeError   Type = 4  // guest: Failure, ends the call
	TypeData    Type = 5  // both ways: bytes at Offset of Sub
	TypeAck     Type = 6  // both ways: everything before Offset was taken
	TypeEnd     Type = 7  // both ways: no bytes at or after Offset
	TypeGap     Type = 8  // guest: bytes from Offset to the 8-byte payload are gone
	TypeExit    Type = 9  // guest: Exit of the process
	TypeCancel  Type = 10 // host: stop the call; an exec stays held
	TypeEvent   Type = 11 // guest: one WatchEvent
	TypeDesync  Type = 12 // guest: it lost the frame boundary; attach again
)

// Sub tells the byte streams of one call apart.
type Sub uint8

// The sub-streams of an exec.
const (
	Stdin  Sub = 0
	Stdout Sub = 1
	Stderr Sub = 2
)

// FlagMore marks a request that goes on in the next frame of its stream.
const FlagMore uint8 = 1

// Frame is one decoded frame. The payload of a frame from Reader.Next is valid
// only until the following call of Next.
type Frame struct {
	Type    Type
	Sub     Sub
	Flags   uint8
	Stream  uint32
	Offset  uint64
	Payload []byte
}

var (
	// ErrTooLarge reports a payload above MaxPayload.
	ErrTooLarge = errors.New("wire: payload exceeds 64 KiB")
	// ErrMagicInFrame reports a frame that holds the sync magic and cannot be split.
	ErrMagicInFrame = errors.New("wire: frame would contain the sync magic")

	castagnoli = crc32.MakeTable(crc32.Castagnoli)
)

// AppendFrame appends the encoding of f to dst. A DATA frame that would contain
// the sync magic becomes two or more frames with consecutive offsets. On error
// dst is returned unchanged.
func AppendFrame(dst []byte, f Frame) ([]byte, error) {
	if len(f.Payload) > MaxPayload {
		return dst, fmt.Errorf("%w: %d bytes, type %d", ErrTooLarge, len(f.Payload), f.Type)
	}
	start := len(dst)
	for {
		frame := len(dst)
		dst = appendOne(dst, f)
		at := bytes.Index(dst[frame:], magic[:])
		if at < 0 {
			return dst, nil
		}
		cut := max(at+len(magic)/2-HeaderSize, 1)
		if f.Type != TypeData || cut >= len(f.Payload) {
			return dst[:start], fmt.Errorf("%w: type %d, stream %d", ErrMagicInFrame, f.Type, f.Stream)
		}
		first := f
		first.Payload = f.Payload[:cut]
		dst = appendOne(dst[:frame], first)
		f.Payload = f.Payload[cut:]
		f.Offset += uint64(cut)
	}
}

func appendOne(dst []byte, f Frame) []byte {
	at := len(dst)
	dst = append(dst, lead, byte(f.Type), byte(f.Sub), f.Flags)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(f.Payload)))
	dst = binary.BigEndian.AppendUint32(dst, f.Stream)
	dst = binary.BigEndian.AppendUint64(dst, f.Offset)
	sum := crc32.Update(0, castagnoli, dst[at:])
	sum = crc32.Update(sum, castagnoli, f.Payload)
	dst = binary.BigEndian.AppendUint32(dst, sum)
	return append(dst, f.Payload...)
}

type verdict int

const (
	short verdict = iota // more bytes are needed
	whole
	broken
)

// decode reads one frame from the beginning of b and says how long it is.
func decode(b []byte) (Frame, int, verdict) {
	if len(b) > 0 && b[0] != lead {
		return Frame{}, 0, broken
	}
	if len(b) < HeaderSize {
		return Frame{}, 0, short
	}
	length := binary.BigEndian.Uint32(b[4:])
	if length > MaxPayload {
		return Frame{}, 0, broken
	}
	size := HeaderSize + int(length)
	if len(b) < size {
		return Frame{}, 0, short
	}
	sum := crc32.Update(0, castagnoli, b[:20])
	sum = crc32.Update(sum, castagnoli, b[HeaderSize:size])
	if sum != binary.BigEndian.Uint32(b[20:]) {
		return Frame{}, 0, broken
	}
	return Frame{
		Type: Type(b[1]), Sub: Sub(b[2]), Flags: b[3],
		Stream: binary.BigEndian.Uint32(b[8:]), Offset: binary.BigEndian.Uint64(b[12:]),
		Payload: b[HeaderSize:size:size],
	}, size, whole
}
