package obs

import (
	"context"
	"fmt"
	"io"
	"log/slog"

	"go.opentelemetry.io/otel/trace"
)

// LogConfig says how logs are written.
type LogConfig struct {
	Level  string `yaml:"level"`  // debug, info, warn or error; default info
	Format string `yaml:"format"` // text or json; default text
}

// NewLogger makes a logger that adds trace and span ids where a context
// carries them.
func NewLogger(w io.Writer, cfg LogConfig) (*slog.Logger, error) {
	var level slog.Level
	if cfg.Level != "" {
		if err := level.UnmarshalText([]byte(cfg.Level)); err != nil {
			return nil, fmt.Errorf("log level %q must be debug, info, warn or error", cfg.Level)
		}
	}
	opts := &slog.HandlerOptions{Level: level}
	switch cfg.Format {
	case "", "text":
		return slog.New(traced{slog.NewTextHandler(w, opts)}), nil
	case "json":
		return slog.New(traced{slog.NewJSONHandler(w, opts)}), nil
	}
	return nil, fmt.Errorf("log format %q must be text or json", cfg.Format)
}

type traced struct{ slog.Handler }

func (t traced) Handle(ctx context.Context, r slog.Record) error {
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() {
		r.AddAttrs(slog.String("trace", sc.TraceID().String()), slog.String("span", sc.SpanID().String()))
	}
	return t.Handler.Handle(ctx, r)
}

func (t traced) WithAttrs(attrs []slog.Attr) slog.Handler { return traced{t.Handler.WithAttrs(attrs)} }
func (t traced) WithGroup(name string) slog.Handler       { return traced{t.Handler.WithGroup(name)} }
