package egress

import "fmt"

// Config of the service.
type Config struct {
	// MaxPolicies is how many there may be in the cell, one per plan, tenant, template and session that has any.
	MaxPolicies int `yaml:"max_policies"`
}

// mostPolicies is what gates can keep in memory.
const mostPolicies = 100_000

// NewConfig returns the defaults.
func NewConfig() Config { return Config{MaxPolicies: mostPolicies} }

// Validate says in one sentence what cannot work.
func (c *Config) Validate() error {
	if c.MaxPolicies < 1 || c.MaxPolicies > mostPolicies {
		return fmt.Errorf("max_policies is %d, it must be between 1 and %d", c.MaxPolicies, mostPolicies)
	}
	return nil
}
