package builder

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// machineSources writes this machine's own package sources for the image's suite
// to files in dir, in the two formats that apt knows, and returns their paths.
// Other sources of the machine (other suites, other vendors) are left out.
func machineSources(dir string) ([]string, error) {
	var oneLine, stanzas strings.Builder
	files, err := filepath.Glob("/etc/apt/sources.list.d/*")
	if err != nil {
		return nil, err
	}
	for _, path := range append([]string{"/etc/apt/sources.list"}, files...) {
		data, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read this machine's package sources: %w", err)
		}
		switch filepath.Ext(path) {
		case ".list":
			oneLine.WriteString(keepLines(string(data)))
		case ".sources":
			stanzas.WriteString(keepStanzas(string(data)))
		}
	}
	var written []string
	for name, text := range map[string]string{"machine.list": oneLine.String(), "machine.sources": stanzas.String()} {
		if text == "" {
			continue
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return nil, fmt.Errorf("write package sources: %w", err)
		}
		written = append(written, path)
	}
	if len(written) == 0 {
		return nil, fmt.Errorf("this machine has no package sources for Debian %s; name an image with --image or %s", suite, EnvImage)
	}
	slices.Sort(written)
	return written, nil
}

// keepLines keeps the "deb [options] URI suite component..." lines of the suite.
func keepLines(text string) string {
	var kept strings.Builder
	for _, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb ")
		if !ok {
			continue
		}
		rest = strings.TrimSpace(rest)
		if strings.HasPrefix(rest, "[") {
			_, rest, _ = strings.Cut(rest, "]")
		}
		fields := strings.Fields(rest)
		if len(fields) >= 3 && ofSuite(fields[1]) && slices.Contains(fields[2:], "main") {
			kept.WriteString(strings.TrimSpace(line) + "\n")
		}
	}
	return kept.String()
}

// keepStanzas keeps the deb822 stanzas that are for the suite only.
func keepStanzas(text string) string {
	var kept strings.Builder
	for _, stanza := range strings.Split(text, "\n\n") {
		var lines []string
		fields := make(map[string]string)
		for _, line := range strings.Split(stanza, "\n") {
			if strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "" {
				continue
			}
			lines = append(lines, line)
			if name, value, ok := strings.Cut(line, ":"); ok {
				fields[strings.ToLower(name)] = value
			}
		}
		suites := strings.Fields(fields["suites"])
		other := slices.ContainsFunc(suites, func(s string) bool { return !ofSuite(s) })
		if len(suites) == 0 || other ||
			!slices.Contains(strings.Fields(fields["types"]), "deb") ||
			!slices.Contains(strings.Fields(fields["components"]), "main") ||
			strings.TrimSpace(fields["enabled"]) == "no" {
			continue
		}
		kept.WriteString(strings.Join(lines, "\n") + "\n\n")
	}
	return kept.String()
}

// ofSuite accepts the suite and its pockets, but not what ends in its name.
func ofSuite(name string) bool {
	return name == suite || name == suite+"-updates" || name == suite+"-security"
}
