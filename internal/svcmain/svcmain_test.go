package svcmain

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestUnknownConfigurationKeyEndsTheProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte("lease: 9s\nlaese: 3s\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := struct {
		Lease string `yaml:"lease"`
	}{}
	err := Program{Name: "scheduler", Config: &cfg}.run([]string{"-config", file, "-check"})
	if err == nil || !strings.Contains(err.Error(), "laese") {
		t.Errorf("the program says %v", err)
	}
}

func TestMissingLoginIsOneSentence(t *testing.T) {
	err := Program{Name: "scheduler", Config: &struct{}{}}.run([]string{"-login", filepath.Join(t.TempDir(), "none.json")})
	if err == nil || strings.Contains(err.Error(), "\n") {
		t.Errorf("the program says %v", err)
	}
}
