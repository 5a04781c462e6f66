package obs

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"

	"github.com/berth-dev/berth/internal/certs"
	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

// otlpTLS is how the collector is spoken to: TLS 1.3, or nothing on this machine.
func (cfg Config) otlpTLS() (*tls.Config, error) {
	const op = "export traces and metrics"
	u, err := url.Parse(cfg.OTLPEndpoint)
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, errs.Errorf(op, errkind.Invalid, "the endpoint %.200q is none of the form https://host:port", cfg.OTLPEndpoint)
	}
	if u.Scheme == "http" {
		if !loopback(u.Hostname()) {
			return nil, errs.Errorf(op, errkind.Invalid, "the collector at %s is on another machine and must be https://", u.Host)
		}
		return nil, nil
	}
	src, err := certs.OpenFiles(cfg.OTLPCert, cfg.OTLPKey, cfg.OTLPCA, nil)
	if err != nil {
		return nil, err
	}
	return certs.ByName(src, u.Hostname()), nil
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Listen listens for who collects metrics: on host:port, or unix:/path, where a
// socket that an earlier process left is replaced. Other machines are served
// over TLS 1.3 only.
func (cfg Config) Listen(at string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(at, "unix:"); ok {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("serve metrics: %w", err)
		}
		l, err := net.Listen("unix", path)
		if err != nil {
			return nil, fmt.Errorf("serve metrics: %w", err)
		}
		return l, nil
	}
	host, _, err := net.SplitHostPort(at)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w", err)
	}
	var conf *tls.Config
	if cfg.MetricsCert != "" {
		src, err := certs.OpenFiles(cfg.MetricsCert, cfg.MetricsKey, "", nil)
		if err != nil {
			return nil, err
		}
		conf = certs.Server(src, tls.NoClientCert)
	} else if !loopback(host) {
		return nil, errs.Errorf("serve metrics", errkind.Invalid, "%s can be reached from other machines, which are served over TLS only; metrics_cert and metrics_key are needed", at)
	}
	l, err := net.Listen("tcp", at)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w", err)
	}
	if conf != nil {
		l = tls.NewListener(l, conf)
	}
	return l, nil
}
