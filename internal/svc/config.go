package svc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"gopkg.in/yaml.v3"
)

// LoadConfig reads a YAML file over cfg, a pointer to a struct that holds the
// defaults. A key that the struct does not have is refused. An empty path
// leaves the defaults. If cfg has a method Validate() error, it is called.
func LoadConfig(path string, cfg any) error {
	if path != "" {
		raw, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read configuration: %w", err)
		}
		if err := ParseConfig(raw, cfg); err != nil {
			return fmt.Errorf("configuration %s: %w", path, err)
		}
	}
	if v, ok := cfg.(interface{ Validate() error }); ok {
		if err := v.Validate(); err != nil {
			return fmt.Errorf("configuration: %w", err)
		}
	}
	return nil
}

// ParseConfig reads one YAML document over cfg.
func ParseConfig(raw []byte, cfg any) error {
	dec := yaml.NewDecoder(bytes.NewReader(raw))
	dec.KnownFields(true)
	if err := dec.Decode(cfg); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := dec.Decode(new(any)); !errors.Is(err, io.EOF) {
		return errors.New("it holds more than one document")
	}
	return nil
}
