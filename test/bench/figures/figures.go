// Package figures collects what a benchmark measured, each value beside a floor
// or peer of the same run, and writes it as a table and as JSON. It guarantees
// that an aim is judged by the same rule everywhere.
package figures

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"
)

// Result is one row. Ratio is Value divided by Floor, 0 without a floor.
type Result struct {
	Name    string  `json:"name"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	Floor   float64 `json:"floor"`
	FloorOf string  `json:"floor_of"`
	Ratio   float64 `json:"ratio"`
	Aim     string  `json:"aim"`
	Met     *bool   `json:"met"` // nil: there is no aim
}

// Set is what one benchmark measured.
type Set struct {
	Results []Result `json:"results"`
}

// Aim judges a result.
type Aim struct {
	Text string
	Met  func(Result) bool
}

// AtMost is met when the value is not above v.
func AtMost(v float64, unit string) Aim {
	return Aim{fmt.Sprintf("at most %g %s", v, unit), func(r Result) bool { return r.Value <= v }}
}

// RatioAtMost is met when the value is at most x times its floor.
func RatioAtMost(x float64) Aim {
	return Aim{fmt.Sprintf("at most %g x its floor", x), func(r Result) bool { return r.Floor > 0 && r.Ratio <= x }}
}

// TimesFaster is met when the peer takes at least x times as long.
func TimesFaster(x float64) Aim {
	return Aim{fmt.Sprintf("at least %g times faster than its peer", x), func(r Result) bool { return r.Value > 0 && r.Floor/r.Value >= x }}
}

// None sets no aim.
var None = Aim{}

// Add judges and keeps a result.
func (s *Set) Add(r Result, aim Aim) {
	if r.Floor > 0 {
		r.Ratio = r.Value / r.Floor
	}
	r.Aim = aim.Text
	if aim.Met != nil {
		met := aim.Met(r)
		r.Met = &met
	}
	s.Results = append(s.Results, r)
}

// Print writes the table.
func (s *Set) Print(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tVALUE\tUNIT\tFLOOR\tRATIO\tAIM\tMET\tFLOOR IS")
	for _, r := range s.Results {
		met := ""
		if r.Met != nil {
			met = map[bool]string{true: "yes", false: "NO"}[*r.Met]
		}
		fmt.Fprintf(t, "%s\t%.3g\t%s\t%.3g\t%.3g\t%s\t%s\t%s\n", r.Name, r.Value, r.Unit, r.Floor, r.Ratio, r.Aim, met, r.FloorOf)
	}
	t.Flush()
}

// Write writes the JSON, replacing the file as a whole.
func (s *Set) Write(path string) error {
	raw, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", append(raw, '\n'), 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// End prints and writes what was measured, and ends the program with an error if there is one.
func (s *Set) End(name, out string, err error) {
	s.Print(os.Stdout)
	if len(s.Results) > 0 {
		if werr := s.Write(out); werr != nil && err == nil {
			err = werr
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench %s: %v\n", name, err)
		os.Exit(1)
	}
}

// Quantile of durations, in milliseconds; q lies between 0 and 1.
func Quantile(d []time.Duration, q float64) float64 {
	if len(d) == 0 {
		return 0
	}
	s := slices.Clone(d)
	slices.Sort(s)
	return float64(s[min(len(s)-1, int(q*float64(len(s))))].Microseconds()) / 1000
}
