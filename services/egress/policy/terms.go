package policy

import (
	"math"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

// secretName is how secrets of a tenant are called.
var secretName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

var (
	headerName      = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]{0,63}$`)
	queryName       = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)
	placeholderForm = regexp.MustCompile(`^[A-Za-z0-9_-]{8,128}$`)
	bytesForm       = regexp.MustCompile(`^([1-9][0-9]{0,14})(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)$`)
)

// framing are header fields that say how a message is carried; no secret goes there.
var framing = []string{"host", "content-length", "transfer-encoding", "connection", "upgrade", "te", "trailer", "keep-alive", "expect", "content-type", "content-encoding"}

// readTerms reads what a rule says besides what it matches.
func readTerms(f map[string]node, r *Rule) (err error) {
	if n, ok := f["report_only"]; ok {
		if r.ReportOnly, err = n.truth("report_only"); err != nil {
			return err
		}
	}
	if n, ok := f["refuse_credentials"]; ok {
		if r.RefuseCredentials, err = n.truth("refuse_credentials"); err != nil {
			return err
		}
	}
	if n, ok := f["limits"]; ok {
		if r.Limit, err = readLimit(n); err != nil {
			return err
		}
	}
	if n, ok := f["addresses"]; ok {
		if r.Addresses, err = list(n, "addresses", readPrefix); err != nil {
			return err
		}
	}
	if n, ok := f["inject"]; ok {
		r.Inject, err = readInjections(n, Injection{})
	}
	return err
}

func readLimit(n node) (l Limit, err error) {
	f, err := n.fields("requests_per_second", "burst", "bytes_per_day", "connections")
	if err != nil {
		return l, err
	}
	if len(f) == 0 {
		return l, n.fail("limits names none")
	}
	if v, ok := f["requests_per_second"]; ok {
		if l.RequestsPerSecond, err = readRate(v); err != nil {
			return l, err
		}
		l.Burst = int(max(1, math.Ceil(l.RequestsPerSecond)))
	}
	if v, ok := f["burst"]; ok {
		if l.RequestsPerSecond == 0 {
			return l, v.fail("burst goes with requests_per_second")
		}
		burst, err := v.whole("burst", 1, 1_000_000)
		if err != nil {
			return l, err
		}
		l.Burst = int(burst)
	}
	if v, ok := f["bytes_per_day"]; ok {
		if l.BytesPerDay, err = readBytes(v); err != nil {
			return l, err
		}
	}
	if v, ok := f["connections"]; ok {
		c, err := v.whole("connections", 1, 100_000)
		if err != nil {
			return l, err
		}
		l.Connections = int(c)
	}
	return l, nil
}

func readRate(n node) (float64, error) {
	text, err := n.text("requests_per_second")
	if err != nil {
		return 0, err
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || n.Tag != "!!int" && n.Tag != "!!float" || !(v >= 0.001 && v <= 1_000_000) {
		return 0, n.fail("requests_per_second is %s; it is a number from 0.001 to 1000000", short(text))
	}
	return v, nil
}

var units = map[string]uint64{"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

func readBytes(n node) (uint64, error) {
	text, err := n.text("bytes_per_day")
	if err != nil {
		return 0, err
	}
	m := bytesForm.FindStringSubmatch(text)
	if m == nil {
		return 0, n.fail("bytes_per_day is %s; it is a whole number with its unit, as in 500MiB or 1GB", short(text))
	}
	v, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil || v > 1<<60/units[m[2]] {
		return 0, n.fail("bytes_per_day is too much")
	}
	return v * units[m[2]], nil
}

func readPrefix(n node) (netip.Prefix, error) {
	text, err := n.text("an address range")
	if err != nil {
		return netip.Prefix{}, err
	}
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return netip.Prefix{}, n.fail("%s is no range of addresses, as in 10.1.0.0/16", short(text))
	case p.Addr().Is4In6():
		return netip.Prefix{}, n.fail("%s is no range of addresses: write it as IPv4", short(text))
	case p != p.Masked() || p.String() != text:
		return netip.Prefix{}, n.fail("%s is not how this range is written: write %s", short(text), p.Masked())
	case p.Addr().Is4() && p.Bits() < 8 || p.Addr().Is6() && p.Bits() < 7:
		return netip.Prefix{}, n.fail("%s is too wide", short(text))
	}
	return p, nil
}

// readInjections reads one or several; standard says what a preset knows.
func readInjections(n node, standard Injection) ([]Injection, error) {
	if n.Kind != yaml.SequenceNode {
		in, err := readInjection(n, standard)
		return []Injection{in}, err
	}
	items, err := n.items("inject", maxInject)
	if err != nil {
		return nil, err
	}
	var out []Injection
	for _, item := range items {
		in, err := readInjection(item, standard)
		if err != nil {
			return nil, err
		}
		for _, other := range out {
			if strings.EqualFold(other.Header, in.Header) && other.Query == in.Query {
				return nil, item.fail("two secrets go to one place")
			}
			if other.Placeholder == in.Placeholder {
				return nil, item.fail("two secrets have one placeholder")
			}
		}
		out = append(out, in)
	}
	return out, nil
}

func readInjection(n node, in Injection) (Injection, error) {
	f, err := n.fields("secret", "header", "query", "format", "placeholder")
	if err != nil {
		return in, err
	}
	word := func(key string, form *regexp.Regexp, to *string, what string) {
		v, ok := f[key]
		if !ok || err != nil {
			return
		}
		if *to, err = v.text(key); err == nil && !form.MatchString(*to) {
			err = v.fail("%s is no %s", short(*to), what)
		}
	}
	_, header := f["header"]
	_, query := f["query"]
	if query && !header {
		in.Header, in.Format = "", ""
	}
	word("secret", secretName, &in.Secret, "name of a secret: small letters, digits, - and _")
	word("header", headerName, &in.Header, "name of a header field")
	word("query", queryName, &in.Query, "name of a query parameter")
	word("placeholder", placeholderForm, &in.Placeholder, "placeholder: 8 to 128 letters, digits, - and _")
	switch {
	case err != nil:
		return in, err
	case in.Secret == "":
		return in, n.fail("inject names no secret")
	case (in.Header == "") == (in.Query == ""):
		return in, n.fail("inject needs one of header and query")
	case slices.Contains(framing, strings.ToLower(in.Header)) || strings.HasPrefix(strings.ToLower(in.Header), "proxy-"):
		return in, n.fail("a secret cannot go into the header field %s", in.Header)
	}
	if in.Placeholder == "" {
		in.Placeholder = "BERTH_SECRET_" + strings.ToUpper(strings.ReplaceAll(in.Secret, "-", "_"))
	}
	return in, readFormat(f, &in)
}

func readFormat(f map[string]node, in *Injection) error {
	v, ok := f["format"]
	if !ok {
		if in.Format == "" {
			in.Format = "{secret}"
			if strings.EqualFold(in.Header, "Authorization") {
				in.Format = "Bearer {secret}"
			}
		}
		return nil
	}
	text, err := v.text("format")
	if err != nil {
		return err
	}
	if len(text) > 256 || strings.Count(text, "{secret}") != 1 || strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) {
		return v.fail("%s is no format: one line of ASCII with {secret} in it once", short(text))
	}
	in.Format = text
	return nil
}
