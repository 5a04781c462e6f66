package egress

import "fmt"

// Config of the service.
type Config struct {
	// MaxDocument is the largest policy in bytes; MaxPolicies is how many there may be in the cell.
	MaxDocument int `yaml:"max_document"`
	MaxPolicies int `yaml:"max_policies"`
	// MaxRules is how many rules one policy may have.
	MaxRules int `yaml:"max_rules"`
}

// The most that the configuration may allow: what fits into one message of the bus, and what a gate keeps in
// memory for each of its sessions.
const (
	mostDocument = 960 << 10
	mostRules    = 10_000
	mostPolicies = 100_000
)

// NewConfig returns the defaults.
func NewConfig() Config {
	return Config{MaxDocument: mostDocument, MaxPolicies: mostPolicies, MaxRules: mostRules}
}

// Validate says in one sentence what cannot work.
func (c *Config) Validate() error {
	for _, n := range []struct {
		name        string
		value, most int
	}{{"max_document", c.MaxDocument, mostDocument}, {"max_policies", c.MaxPolicies, mostPolicies}, {"max_rules", c.MaxRules, mostRules}} {
		if n.value < 1 || n.value > n.most {
			return fmt.Errorf("%s is %d, it must be between 1 and %d", n.name, n.value, n.most)
		}
	}
	return nil
}
