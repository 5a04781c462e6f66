package web

import (
	"encoding/json"
	"html/template"
	"net/http"
	"strings"

	"github.com/berth-dev/berth/services/egress/policy"
)

// see is where a sandbox reads what it may reach.
const see = "/run/berth/egress.json"

// denied is the JSON of a denial. Its fields are stable.
type denied struct {
	Error      string `json:"error"`
	Reason     string `json:"reason"`
	Message    string `json:"message"`
	Host       string `json:"host"`
	Port       uint16 `json:"port"`
	Method     string `json:"method,omitempty"`
	Path       string `json:"path,omitempty"`
	Rule       string `json:"rule,omitempty"`
	Layer      string `json:"layer,omitempty"`
	Generation uint64 `json:"policy_generation"`
	Ask        string `json:"ask,omitempty"`
	See        string `json:"see"`
}

// statuses of reasons that are no 403.
var statuses = map[policy.Reason]int{
	policy.Mismatch: http.StatusMisdirectedRequest, policy.Malformed: http.StatusBadRequest,
	policy.Rate: http.StatusTooManyRequests, policy.Unresolved: http.StatusBadGateway,
	policy.Unreachable: http.StatusGatewayTimeout, policy.Certificate: http.StatusBadGateway,
	policy.SecretAway: http.StatusBadGateway, policy.Echo: http.StatusBadGateway,
	policy.AuditAway: http.StatusServiceUnavailable, policy.NoLease: http.StatusServiceUnavailable,
}

var page = template.Must(template.New("denied").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Not let out of the sandbox</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:42em;margin:4em auto;padding:0 1em;color:#222}
dt{float:left;width:9em;color:#666}dd{margin-left:9em}code{background:#f3f3f3;padding:0 .2em}</style></head>
<body><h1>This request was not let out of the sandbox</h1>
<p>{{.Message}}</p>
<dl><dt>Host</dt><dd><code>{{.Host}}:{{.Port}}</code></dd>
{{if .Method}}<dt>Request</dt><dd><code>{{.Method}} {{.Path}}</code></dd>{{end}}
<dt>Reason</dt><dd><code>{{.Reason}}</code></dd>
{{if .Rule}}<dt>Rule</dt><dd><code>{{.Rule}}</code>{{if .Layer}} of the {{.Layer}}{{end}}</dd>{{end}}
<dt>Policy</dt><dd>generation {{.Generation}}</dd>
{{if .Ask}}<dt>Whom to ask</dt><dd>{{.Ask}}</dd>{{end}}</dl>
<p>What may be reached stands in <code>{{.See}}</code>.</p></body></html>
`))

// Denial is what a client is told that was not let out: a page where it accepts one, JSON where it accepts
// that or anything, else text. text says why in a sentence; empty: by the reason.
func Denial(req policy.Request, d policy.Decision, text, accept string) (status int, contentType string, body []byte) {
	if text == "" {
		text = policy.Sentence(req, d)
	}
	if status = statuses[d.Reason]; status == 0 {
		status = http.StatusForbidden
	}
	it := denied{
		Error: "egress_denied", Reason: string(d.Reason), Message: text, Host: string(req.Name), Port: req.Port,
		Method: req.Method, Path: req.Path, Rule: d.Rule, Layer: policy.LayerName(d.Layer), Generation: d.Generation, Ask: d.Ask, See: see,
	}
	accept = strings.ToLower(accept)
	var b strings.Builder
	switch {
	case strings.Contains(accept, "text/html"):
		contentType = "text/html; charset=utf-8"
		if err := page.Execute(&b, it); err != nil {
			b.WriteString("denied")
		}
	case accept == "" || strings.Contains(accept, "json") || strings.Contains(accept, "*/*"):
		contentType = "application/json"
		e := json.NewEncoder(&b)
		e.SetIndent("", "  ")
		_ = e.Encode(it)
	default:
		contentType = "text/plain; charset=utf-8"
		b.WriteString("Not let out of the sandbox: " + text + "\nreason: " + it.Reason + "\n")
		if it.Rule != "" {
			b.WriteString("rule: " + it.Rule + "\n")
		}
		if it.Ask != "" {
			b.WriteString("ask: " + it.Ask + "\n")
		}
		b.WriteString("see: " + see + "\n")
	}
	return status, contentType, []byte(b.String())
}
