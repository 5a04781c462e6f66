// Package wire is the framed protocol between a host and the guest agent of
// one sandbox, spoken over any two byte streams: container FIFOs, pipes or a
// virtio-serial port.
//
// # Frames
//
// A frame is a 24-byte header and up to 64 KiB of payload, all numbers
// big-endian:
//
//	0  1  lead byte 0xB7
//	1  1  type
//	2  1  sub-stream: 0 stdin or the only one, 1 stdout, 2 stderr
//	3  1  flags: bit 0 more (the message goes on in the next frame)
//	4  4  payload length, at most 65536
//	8  4  stream: the call this frame belongs to, chosen by the host
//	12 8  offset: address of the first payload byte, or what an ACK reached
//	20 4  CRC32C of bytes 0..19 and the payload
//
// # Synchronising
//
// A peer may be killed in the middle of a frame while the stream lives on. So
// an attach begins with a sync record: a fixed 16-byte magic, a random 16-byte
// marker, the attach id and a CRC32C. The guest answers by echoing the record.
// The magic appears nowhere else on the stream: AppendFrame splits a DATA frame
// that would contain it, control payloads are JSON and cannot hold its first
// byte. A reader that meets the magic therefore drops whatever half frame it
// was in, at once and without ambiguity; content that passes through the
// channel cannot forge an attach. After a bad frame a reader discards
// everything up to the next sync record.
//
// # Guarantees
//
// Reader never panics, holds one buffer of fixed size whatever it is fed, and
// never hands out a frame whose checksum is wrong. Order on a stream is the
// order of writing. Flow control is by ACK: a sender may be Window bytes beyond
// the last acknowledged offset, and a receiver refuses more.
//
// # Versions
//
// After the sync records each side sends a HELLO with the range of versions it
// speaks and its capabilities. Unknown JSON fields and unknown frame types are
// ignored; an unknown method is refused with KindUnsupported.
package wire
