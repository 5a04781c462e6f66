package web

import (
	"bufio"
	"compress/zlib"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/berth-dev/berth/services/egress/internal/session"
	"github.com/berth-dev/berth/services/egress/policy"
)

// readable makes the body of an answer one that can be searched, or refuses it.
func (x *exchange) readable(resp *http.Response) *session.Refusal {
	if resp.StatusCode == http.StatusPartialContent || resp.Header.Get("Content-Range") != "" && resp.StatusCode != http.StatusRequestedRangeNotSatisfiable {
		return refuse(policy.Echo, "The host sent a part where the whole was asked for.")
	}
	for _, name := range []string{"Grpc-Encoding", "Connect-Content-Encoding", "Im"} {
		for _, v := range resp.Header[name] {
			if v != "" && !strings.EqualFold(v, "identity") {
				return refuse(policy.Echo, "The host compressed what was asked for as it is.")
			}
		}
	}
	var codings []string
	for _, v := range resp.Header["Content-Encoding"] {
		for _, c := range strings.Split(v, ",") {
			if c = strings.ToLower(strings.Trim(c, " \t")); c != "" && c != "identity" {
				codings = append(codings, c)
			}
		}
	}
	if len(codings) == 0 {
		return nil
	}
	if len(codings) > 3 {
		return refuse(policy.Echo, "")
	}
	body := io.Reader(resp.Body)
	for i := len(codings) - 1; i >= 0; i-- {
		open, ok := codingReaders[codings[i]]
		if !ok {
			return refuse(policy.Echo, "The host compressed the answer in a way that cannot be read here.")
		}
		body = &decoder{from: body, open: open}
	}
	resp.Header.Del("Content-Encoding")
	resp.Header.Del("Content-Length")
	for _, digest := range []string{"Content-Md5", "Digest", "Content-Digest"} {
		resp.Header.Del(digest) // of what is not sent on
	}
	if x.r.Method != http.MethodHead && resp.ContentLength != 0 {
		resp.ContentLength = -1
		resp.Body = struct {
			io.Reader
			io.Closer
		}{body, resp.Body}
	}
	return nil
}

var codingReaders = map[string]func(io.Reader) (io.Reader, error){
	"gzip":   func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) },
	"x-gzip": func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) },
	"br":     func(r io.Reader) (io.Reader, error) { return brotli.NewReader(r), nil },
	"zstd": func(r io.Reader) (io.Reader, error) {
		return zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(8<<20))
	},
	"deflate": func(r io.Reader) (io.Reader, error) {
		b := bufio.NewReader(r)
		head, err := b.Peek(2)
		if err == nil && head[0]&0x0f == 8 && (int(head[0])<<8|int(head[1]))%31 == 0 {
			return zlib.NewReader(b)
		}
		return flate.NewReader(b), nil
	},
}

// decoder opens a compressed body when it is first read: an empty one is no error.
type decoder struct {
	from io.Reader
	open func(io.Reader) (io.Reader, error)
	text io.Reader
}

// Read implements io.Reader.
func (d *decoder) Read(p []byte) (n int, err error) {
	if d.text == nil {
		b := bufio.NewReader(d.from)
		if _, err := b.Peek(1); errors.Is(err, io.EOF) {
			return 0, io.EOF
		}
		if d.text, err = d.open(b); err != nil {
			return 0, err
		}
	}
	n, err = d.text.Read(p)
	if errors.Is(err, io.EOF) {
		// The trailers come after whatever is left, which nobody sees.
		if left, failed := io.Copy(io.Discard, io.LimitReader(d.from, 64<<10)); failed != nil || left == 64<<10 {
			err = errors.New("the answer goes on behind its end")
		}
	}
	if z, ok := d.text.(*zstd.Decoder); ok && err != nil {
		z.Close()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		err = errors.New("the answer is not compressed as it says")
	}
	return n, err
}
