package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/tools/berth/cluster/control"
	"github.com/berth-dev/berth/tools/berth/cluster/wire"
)

const (
	maxRequest = 64 << 10
	actTime    = 100 * time.Second
	// maxPath is what a socket's path may have.
	maxPath = 107
)

// serveControl listens on the control socket.
func (s *supervisor) serveControl() (stop func(), err error) {
	path := control.Socket(s.cfg.Stack.Dir)
	if len(path) > maxPath {
		return nil, fmt.Errorf("the path %s is too long for a socket: at most %d characters", path, maxPath)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen for commands: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err == nil {
		err = os.Chmod(path, 0o600)
	}
	if err != nil {
		return nil, fmt.Errorf("listen for commands: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /links", answer(func(context.Context, []byte) (any, error) { return s.links(), nil }))
	mux.HandleFunc("POST /links", answer(s.setLinks))
	mux.HandleFunc("GET /members", answer(func(context.Context, []byte) (any, error) { return s.current().Members, nil }))
	mux.HandleFunc("POST /members", answer(s.act))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second}
	go func() { _ = server.Serve(l) }()
	return func() { server.Close(); os.Remove(path) }, nil
}

// answer makes a handler that reads a bounded body and answers with JSON.
func answer(f func(context.Context, []byte) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
		var out any
		if err == nil {
			ctx, cancel := context.WithTimeout(r.Context(), actTime)
			defer cancel()
			out, err = f(ctx, body)
		}
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			out = control.Failure{Error: err.Error()}
		}
		_ = json.NewEncoder(w).Encode(out) // a caller that is gone needs no answer
	}
}

func decode(body []byte, v any) error {
	dec := json.NewDecoder(strings.NewReader(string(body)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("the request cannot be read: %w", err)
	}
	return nil
}

func (s *supervisor) links() control.Links {
	names := s.net.sw.Names()
	out := control.Links{Ports: names, Seed: s.cfg.Seed, Links: []control.Link{}, Counts: map[string]wire.Counts{}}
	for _, from := range names {
		out.Counts[from] = s.net.sw.Counts(from)
		for _, to := range names {
			if r := s.net.sw.Rule(from, to); r != (wire.Rule{}) {
				out.Links = append(out.Links, control.Link{From: from, To: to, Rule: r})
			}
		}
	}
	return out
}

// setLinks checks everything before it changes anything.
func (s *supervisor) setLinks(_ context.Context, body []byte) (any, error) {
	var req control.Set
	if err := decode(body, &req); err != nil {
		return nil, err
	}
	if err := req.Rule.Check(); err != nil {
		return nil, err
	}
	from, err := s.ports(req.From)
	if err != nil {
		return nil, err
	}
	to, err := s.ports(req.To)
	if err != nil {
		return nil, err
	}
	pairs := map[[2]string]bool{}
	for _, a := range from {
		for _, b := range to {
			if a == b {
				continue
			}
			pairs[[2]string{a, b}] = true
			if !req.OneWay {
				pairs[[2]string{b, a}] = true
			}
		}
	}
	if len(pairs) == 0 {
		return nil, fmt.Errorf("%s reaches itself without a link", req.From)
	}
	for p := range pairs {
		err = errors.Join(err, s.net.sw.Set(p[0], p[1], req.Rule))
	}
	return s.links(), err
}

// ports are those that a name means: one, a kind with -*, or all.
func (s *supervisor) ports(name string) ([]string, error) {
	return matching(name, s.net.sw.Names(), "link")
}

func matching(name string, all []string, what string) ([]string, error) {
	if name == "" {
		name = "*"
	}
	prefix, wild := strings.CutSuffix(name, "*")
	out := slices.DeleteFunc(slices.Clone(all), func(n string) bool {
		return n != name && !(wild && strings.HasPrefix(n, prefix))
	})
	if len(out) == 0 {
		return nil, fmt.Errorf("there is no %s %.60q; there are %s", what, name, strings.Join(all, ", "))
	}
	return out, nil
}

// act does something to members, to several at once.
func (s *supervisor) act(ctx context.Context, body []byte) (any, error) {
	var req control.Act
	if err := decode(body, &req); err != nil {
		return nil, err
	}
	if !slices.Contains([]string{control.Kill, control.Hold, control.Pause, control.Resume, control.Restart}, req.Verb) {
		return nil, fmt.Errorf("%.20q is none of kill, hold, pause, resume and restart", req.Verb)
	}
	var names []string
	all := map[string]*member{}
	for _, m := range s.all() {
		if m.begun() {
			names = append(names, m.name)
			all[m.name] = m
		}
	}
	if req.Name == "" {
		return nil, errors.New("no member is named")
	}
	names, err := matching(req.Name, names, "member")
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(req.Name, "*") && req.Verb == control.Resume {
		names = slices.DeleteFunc(names, func(n string) bool { return all[n].show().State != control.Paused })
	}
	failed := make([]error, len(names))
	var wg sync.WaitGroup
	for i, name := range names {
		wg.Go(func() { failed[i] = all[name].act(ctx, req.Verb) })
	}
	wg.Wait()
	if err := errors.Join(failed...); err != nil {
		return nil, err
	}
	out := make([]control.Member, len(names))
	for i, name := range names {
		out[i] = all[name].show()
	}
	return out, nil
}

// serveMetrics serves /metrics, a list, and /metrics/<member> of each member.
func (s *supervisor) serveMetrics() (stop func(), err error) {
	at := s.cfg.Stack.MetricsListen
	if at == "" {
		return func() {}, nil
	}
	l, err := s.cfg.Stack.Telemetry.Listen(at)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		for _, m := range s.all() {
			fmt.Fprintf(w, "# /metrics/%s\n", m.name)
		}
	})
	for _, m := range s.all() {
		mux.Handle("GET /metrics/"+m.name, proxy(s.plan.metricsSocket(m.name)))
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() { _ = server.Serve(l) }()
	scheme := "http://"
	if s.cfg.Stack.Telemetry.MetricsCert != "" {
		scheme = "https://"
	}
	s.info.Metrics = scheme + l.Addr().String() + "/metrics"
	return func() { server.Close() }, nil
}

// proxy asks a member on its socket, which is in no network namespace.
func proxy(socket string) http.Handler {
	to := &url.URL{Scheme: "http", Host: "member"}
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to); r.Out.URL.Path = "/metrics" },
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}},
	}
}
